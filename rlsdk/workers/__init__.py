"""Group makers of a run: the driver's process, or rollout workers."""
