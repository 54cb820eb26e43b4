"""Processes and threads that may hang, misbehave or be hostile, and how they are killed."""
