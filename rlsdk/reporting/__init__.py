"""Reports of runs that have ended, and comparisons of several: pages without scripts, and tables."""
