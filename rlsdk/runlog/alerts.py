"""What diagnoses found in a run: each finding once, in the log and in `alerts.jsonl` of the run's folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from rlsdk.contracts import Finding, History
from rlsdk.errors import described
from rlsdk.runlog.metrics import lines_up_to

log = logging.getLogger(__name__)
ALERTS = "alerts.jsonl"
QUIET = 10
"""Steps in a row without a finding after which the same finding counts as a new one."""
Rule = Callable[[History], Finding | None]


@attrs.frozen
class Alert:
    """A finding of a diagnosis at a step of a run.

    Attributes:
        step: Step at which it was first seen.
        name: Name of the diagnosis.
        level: `info`, `warning` or `critical`.
        message: What was seen.
        advice: What to do.
    """

    step: int
    name: str
    level: str
    message: str
    advice: str

    def __str__(self) -> str:
        return f"{self.name} (step {self.step}): {self.message}; {self.advice}"


class Diagnoses:
    """Calls the diagnoses of a run after each step, and returns what is new."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        """Create it for rules by name; one that raises is logged and not called again."""
        self._rules = dict(rules)
        self._quiet: dict[str, int] = {}

    def look(self, history: History) -> list[Alert]:
        """Return the findings that the last step brought; one that lasts over many steps is returned once."""
        found: list[Alert] = []
        for name, rule in list(self._rules.items()):
            try:
                finding = rule(history)
                new = finding is not None and self._quiet.get(name, QUIET) >= QUIET
                alert = Alert(history.step, name, finding.level, finding.message, finding.advice) if finding else None
            except Exception as error:
                del self._rules[name]
                log.warning("diagnosis %s failed and is not asked again: %s", name, described(error), exc_info=error)
                continue
            self._quiet[name] = 0 if finding is not None else self._quiet.get(name, QUIET) + 1
            if alert is not None and new:
                found.append(alert)
        return found


def diagnose(lines: Iterable[Mapping[str, Any]], rules: Mapping[str, Rule]) -> list[Alert]:
    """Return what the rules would have found while a run trained.

    Args:
        lines: Lines of its `metrics.jsonl`.
        rules: Diagnoses by name.
    """
    whole, diagnoses = History.of(lines), Diagnoses(rules)
    steps = sorted({int(step) for series in whole.series.values() for step in series.steps})
    return [alert for step in steps for alert in diagnoses.look(whole.until(step))]


def append_alerts(folder: Path, alerts: Iterable[Alert]) -> None:
    """Append alerts to the file of a run, one JSON object a line."""
    with (folder / ALERTS).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(attrs.asdict(alert)) + "\n" for alert in alerts)


def begin_alerts(folder: Path, step: int) -> None:
    """Create the file of a run; of one that is resumed, keep the alerts up to the step that it resumes from."""
    path = folder / ALERTS
    kept = lines_up_to(path, step) if step else []
    path.write_text("".join(kept), encoding="utf-8")


def read_alerts(folder: Path) -> list[Alert] | None:
    """Return the alerts of a run, malformed lines left out; None if it keeps none (an older run)."""
    path = folder / ALERTS
    if not path.is_file():
        return None
    names = [field.name for field in attrs.fields(Alert)]
    found = map(json.loads, lines_up_to(path, 2**62))
    return [Alert(**{name: line[name] for name in names}) for line in found if all(name in line for name in names)]
