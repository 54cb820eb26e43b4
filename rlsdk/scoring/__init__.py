"""Runs rewards, isolated so that one which fails, hangs or meets hostile text does not harm the run."""
