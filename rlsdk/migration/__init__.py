"""Convert configurations of other trainers to rlsdk.

Each trainer is a package: its `__init__` holds the table of its keys (one row for a key, with its counterpart in rlsdk,
or with a note on what to do), its defaults and the older names of its keys; the modules beside it hold the conversions
that take more than a row. What several trainers need is in `shared`; `rows` makes those of a table, `rules` says what
they are, and `values` reads what they convert.

To add a trainer, write such a package, and add its name to `convert.FRAMEWORKS`: `tests/migration/test_tables.py` then
converts every row.
"""

from rlsdk.migration.convert import FRAMEWORKS, KeyReport, Migration, framework, migrate

__all__ = ["FRAMEWORKS", "KeyReport", "Migration", "framework", "migrate"]
