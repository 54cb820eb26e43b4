"""Carry configurations of other trainers over to rlsdk: one table of keys for each of them."""

from rlsdk.migration.convert import FRAMEWORKS, KeyReport, Migration, framework, migrate

__all__ = ["FRAMEWORKS", "KeyReport", "Migration", "framework", "migrate"]
