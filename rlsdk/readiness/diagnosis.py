"""Result of one check of a machine, as `rlsdk doctor` shows it."""

from __future__ import annotations

from typing import Literal

import attrs

Status = Literal["ok", "warn", "fail"]


@attrs.frozen(kw_only=True)
class Diagnosis:
    """Result of one check.

    Attributes:
        name: What was checked.
        status: `ok`; `warn`: works, but not everything or not well; `fail`: a training cannot run.
        found: What there is.
        remedy: What to do; empty if all is well.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""

    def describe(self) -> dict[str, str | bool]:
        """Return it as JSON."""
        return {
            "name": self.name,
            "ok": self.status != "fail",
            "status": self.status,
            "found": self.found,
            "remedy": self.remedy,
        }
