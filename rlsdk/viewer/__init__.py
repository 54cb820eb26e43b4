"""Local web page for run folders: curves, times, actors and rollouts, live while the runs train."""
