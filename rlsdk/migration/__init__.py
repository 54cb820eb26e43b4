"""Convert configurations of other trainers to rlsdk.

Each trainer is a package. Its `keys` are a table: one row for a key, with its counterpart in rlsdk, or with a note on
what to do. `sizes`, `algorithm` and `run` hold the conversions that take more than a row, and the package itself the
trainer's defaults and the older names of its keys. What several trainers need is in `shared`; `rows` makes those of a
table, `rules` says what they are, and `values` reads what they convert.

To add a trainer, write such a package, and add its name to `convert.FRAMEWORKS`: `tests/migration/test_tables.py` then
converts every row.
"""

from rlsdk.migration.convert import FRAMEWORKS, KeyReport, Migration, framework, migrate

__all__ = ["FRAMEWORKS", "KeyReport", "Migration", "framework", "migrate"]
