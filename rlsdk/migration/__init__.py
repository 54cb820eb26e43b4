"""Convert configurations of other trainers to rlsdk: one table of keys for each trainer."""

from rlsdk.migration.convert import FRAMEWORKS, KeyReport, Migration, framework, migrate

__all__ = ["FRAMEWORKS", "KeyReport", "Migration", "framework", "migrate"]
