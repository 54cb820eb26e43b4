"""Diagnoses: pure functions of a run's metric history that report what is wrong and what to do about it."""
