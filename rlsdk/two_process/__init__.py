"""Two-process mode: the trainer and an explorer as separate programs on one Ray cluster."""
