"""Carry configurations of other trainers over to rlsdk: one table of keys for each of them."""

from rlsdk.migration.convert import FRAMEWORKS, Entry, Migration, framework, migrate

__all__ = ["FRAMEWORKS", "Entry", "Migration", "framework", "migrate"]
