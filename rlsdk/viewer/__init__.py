"""A local web page over run folders: curves, times, actors and rollouts, also while the runs train."""
