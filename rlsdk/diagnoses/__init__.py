"""Diagnoses: pure functions that look at the history of a run's metrics and say what is wrong, and what to do."""
