"""Environments: how they are run, in this process or in workers, and the built-in one, gymnasium."""
