"""Runs in remote folders (fsspec URLs): their local mirrors, the lock, uploads and downloads."""
