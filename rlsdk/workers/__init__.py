"""Makers of the groups of a run: its own process, or rollout workers."""
