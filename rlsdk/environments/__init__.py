"""Environments: running them in this process or in workers, and the built-in one, gymnasium."""
