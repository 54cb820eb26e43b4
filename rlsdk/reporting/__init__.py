"""Reports of finished runs and comparisons between runs, as tables and HTML pages without scripts."""
