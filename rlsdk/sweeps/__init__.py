"""Sweeps and tournaments: a grid of settings, or algorithms on a suite of tasks, each over several seeds."""
