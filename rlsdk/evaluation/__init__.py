"""Evaluate a policy on held-out tasks, during a training or from its checkpoints."""
