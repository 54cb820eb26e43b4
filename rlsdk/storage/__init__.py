"""Runs in remote folders (fsspec URLs): where their local mirrors are, the lock, uploads, downloads."""
