"""Run rewards in isolation, so that a reward that fails, hangs or reads hostile text does not harm the run."""
