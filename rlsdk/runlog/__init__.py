"""Output of a run: metrics, saved rollouts, the progress line and the report."""
