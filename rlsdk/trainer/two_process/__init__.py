"""Two-process mode: the trainer and an explorer as programs of their own, on one Ray cluster."""
