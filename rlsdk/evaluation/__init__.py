"""Evaluate a policy on held-out tasks, during training or from its checkpoints."""
