"""Report each finding of a run's diagnoses once, in the log and in `alerts.jsonl` in the run's folder."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import attrs

from rlsdk.components import Bound
from rlsdk.contracts import Finding, History, Series
from rlsdk.errors import described
from rlsdk.plugins import Plugins, short_name
from rlsdk.runlog.folder import replace_text
from rlsdk.runlog.metrics import lines_up_to, open_lines

log = logging.getLogger(__name__)
ALERTS = "alerts.jsonl"
QUIET = 10
"""Number of consecutive steps without a finding after which the same finding counts as new."""
LEAST_WINDOW = 3
"""Minimum number of values that a shorter window averages."""
Rule = Callable[[History], Finding | None]


@attrs.frozen
class Alert:
    """A finding of a diagnosis at a step of a run.

    Attributes:
        step: Step at which it was first found.
        name: Name of the diagnosis.
        level: `info`, `warning` or `critical`.
        message: The observation.
        advice: What to do.
        metric: Metric whose curve shows it best; empty if there is none, or if an older version wrote the alert.
    """

    step: int
    name: str
    level: str
    message: str
    advice: str
    metric: str = ""

    @classmethod
    def of(cls, step: int, name: str, finding: Finding) -> Self:
        """Create the alert for a finding of the diagnosis `name`."""
        return cls(step, name, finding.level, finding.message, finding.advice, finding.metric)

    def __str__(self) -> str:
        return f"{self.name} (step {self.step}): {self.message}; {self.advice}"


class Diagnoses:
    """Run the diagnoses after each step, and return new findings."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        """Set the rules by name; a rule that raises is logged and not called again."""
        self._rules = dict(rules)
        self._quiet: dict[str, int] = {}

    def look(self, history: History) -> list[Alert]:
        """Return new findings at the last step; a finding that lasts over many steps is returned once."""
        found: list[Alert] = []
        for name, rule in list(self._rules.items()):
            try:
                finding = rule(history)
                new = finding is not None and self._quiet.get(name, QUIET) >= QUIET
                alert = Alert.of(history.step, name, finding) if finding else None
            except (Exception, SystemExit) as error:
                del self._rules[name]
                log.warning("diagnosis %s failed and is not called again: %s", name, described(error), exc_info=error)
                continue
            self._quiet[name] = 0 if finding is not None else self._quiet.get(name, QUIET) + 1
            if alert is not None and new:
                found.append(alert)
        return found


def diagnose(lines: Iterable[Mapping[str, Any]], rules: Mapping[str, Rule]) -> list[Alert]:
    """Return what the rules would have found while a run trained."""
    whole, diagnoses = History.of(lines), Diagnoses(rules)
    steps = sorted({int(step) for series in whole.series.values() for step in series.steps})
    return [alert for step in steps for alert in diagnoses.look(whole.until(step))]


@attrs.frozen
class Unjudged:
    """A diagnosis for which a run has too few values of a metric.

    Attributes:
        name: Name of the diagnosis.
        values: Number of values of the metric.
        needed: Number of values that the diagnosis needs.
        window: The longest window for which the values suffice; 0 if there is none of `LEAST_WINDOW` values or more.
        finding: What the diagnosis finds with that window.
    """

    name: str
    values: int
    needed: int
    window: int = 0
    finding: Finding | None = None


def unjudged(history: History, rules: Mapping[str, Rule]) -> list[Unjudged]:
    """Return the diagnoses for which a run is too short, each with what a shorter window shows.

    A diagnosis is listed if it asks `History.enough` or `History.current` for more values than a metric has, and finds
    nothing. Metrics that the run lacks do not count.
    """
    found = []
    for name, rule in rules.items():
        with contextlib.suppress(Exception):  # `Diagnoses.look` logs it
            finding, lacking = _asked(rule, history)
            if finding is None and lacking:
                values, needed = max(lacking.values(), key=lambda each: each[1] - each[0])
                found.append(Unjudged(name, values, needed, *_with_shorter_window(rule, history, needed)))
    return found


def _with_shorter_window(rule: Rule, history: History, longest: int) -> tuple[int, Finding | None]:
    """Return the longest window for which no metric lacks values, and the finding with it."""
    if isinstance(rule, Bound) and "window" in inspect.signature(rule.component.obj).parameters:
        for window in range(longest, LEAST_WINDOW - 1, -1):
            finding, lacking = _asked(attrs.evolve(rule, options={**rule.options, "window": window}), history)
            if not lacking:
                return window, finding
    return 0, None


def _asked(rule: Rule, history: History) -> tuple[Finding | None, dict[str, tuple[int, int]]]:
    """Return the finding of a rule, and the metrics with too few values for it: name -> values, values needed."""
    asked = _AskedHistory(history.series, history.step)
    return rule(asked), asked.lacking


@attrs.frozen(eq=False)
class _AskedHistory(History):
    """A history that records which metrics have too few values for a rule."""

    lacking: dict[str, tuple[int, int]] = attrs.field(factory=dict)

    def enough(self, series: Series, values: int) -> bool:
        if 0 < len(series) < values:
            self.lacking[series.name] = (len(series), values)
        return super().enough(series, values)


def append_alerts(folder: Path, alerts: Iterable[Alert]) -> None:
    """Append alerts to the file of a run, one JSON object per line."""
    with open_lines(folder / ALERTS) as file:
        file.writelines(json.dumps(attrs.asdict(alert)) + "\n" for alert in alerts)


def begin_alerts(folder: Path, step: int) -> None:
    """Create a run's file; for a resumed run, keep the alerts up to the step from which it resumes."""
    path = folder / ALERTS
    kept = lines_up_to(path, step) if step else []
    replace_text(path, "".join(kept))


def read_alerts(folder: Path) -> list[Alert] | None:
    """Return the alerts of a run, skipping malformed lines; None for an older run without alerts."""
    path = folder / ALERTS
    if not path.is_file():
        return None
    found = map(json.loads, lines_up_to(path, 2**62))
    return [alert for line in found if (alert := alert_from(line)) is not None]


def alert_from(line: Mapping[str, Any]) -> Alert | None:
    """Parse a line of `alerts.jsonl`; None if the line is incomplete."""
    fields = attrs.fields(Alert)
    if any(field.default is attrs.NOTHING and field.name not in line for field in fields):
        return None
    return Alert(**{field.name: line[field.name] for field in fields if field.name in line})


@attrs.frozen
class LatestAlert:
    """The latest alert of a diagnosis, and whether the diagnosis still finds it at the last step of the run.

    Attributes:
        alert: The alert, with the last step's message if it lasts. Its step is the first one with the finding, or the
            last one if it was not found during the training.
        lasts: True if the diagnosis finds it at the last step.
    """

    alert: Alert
    lasts: bool


def latest_alerts(history: History, alerts: Iterable[Alert], rules: Mapping[str, Rule]) -> list[LatestAlert]:
    """Return the latest alert of each diagnosis with findings; `rules` are evaluated at the last step."""
    recorded = {alert.name: alert for alert in alerts}
    now = {alert.name: alert for alert in Diagnoses(rules).look(history)}
    found = [LatestAlert(attrs.evolve(alert, step=recorded.get(name, alert).step), True) for name, alert in now.items()]
    return found + [LatestAlert(alert, False) for name, alert in recorded.items() if name not in now]


def chosen_rules(config: Mapping[str, Any], names: Sequence[str] = (), plugins: Sequence[str] = ()) -> dict[str, Rule]:
    """Return diagnoses ready to run, with the options from a run's configuration.

    Args:
        config: The run's configuration.
        names: Names of diagnoses; if empty, all built-in ones.
        plugins: Files with more diagnoses. Plugins of the configuration are not executed.

    Raises:
        PluginError: There is no such diagnosis.
    """
    known = Plugins(plugins)
    listed = config.get("diagnoses")
    uses = [use for use in (listed if isinstance(listed, list) else [listed]) if isinstance(use, Mapping)]
    options = {short_name(use["use"]): {k: v for k, v in use.items() if k != "use"} for use in uses if "use" in use}
    wanted = names or known.names("diagnosis")
    return {n: known.resolve(known.reference("diagnosis", n, options.get(short_name(n), {}))) for n in wanted}
