"""Simulate training in virtual time, with the real scheduler and step order and models of engines and learner."""
