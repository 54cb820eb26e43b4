"""The Ray cluster: which resources each actor gets, and why an actor died."""
