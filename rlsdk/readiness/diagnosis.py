"""Result of one check of a machine, as `rlsdk doctor` shows it."""

from __future__ import annotations

from typing import Literal

import attrs

Status = Literal["ok", "warn", "fail"]


@attrs.frozen(kw_only=True)
class Diagnosis:
    """Result of one check.

    Attributes:
        name: Name of the check.
        status: `ok`; `warn`: something works badly or not at all; `fail`: no training can run.
        found: Result of the check.
        remedy: Advice on what to do; empty if nothing is wrong.
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
