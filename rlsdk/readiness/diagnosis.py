"""Result of a machine check, as shown by `rlsdk doctor`."""

from __future__ import annotations

from typing import Literal

import attrs

Status = Literal["ok", "warn", "fail"]


@attrs.frozen(kw_only=True)
class Diagnosis:
    """Result of one check.

    Attributes:
        name: Name of the check.
        status: `ok`; `warn`: something works badly or not at all; `fail`: training cannot run.
        found: Result of the check.
        remedy: Advice on what to do; empty if nothing is wrong.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""

    def describe(self) -> dict[str, str | bool]:
        """Return the result as JSON values."""
        return {
            "name": self.name,
            "ok": self.status != "fail",
            "status": self.status,
            "found": self.found,
            "remedy": self.remedy,
        }
