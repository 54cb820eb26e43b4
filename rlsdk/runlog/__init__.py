"""What a run writes: metrics, saved rollouts, the progress line and the report."""
