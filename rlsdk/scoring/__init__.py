"""Run rewards in isolation, so that one that fails, hangs or meets hostile text does not harm the run."""
