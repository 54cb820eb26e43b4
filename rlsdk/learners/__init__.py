"""Learners: models that are trained, on DeepSpeed; the pure parts of the work; their Ray actors."""
