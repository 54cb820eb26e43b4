"""Read a run for reports: whatever its folder has of configuration, metrics, summary and findings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml

from rlsdk.config.tree import leaves, spelled_out
from rlsdk.contracts import History
from rlsdk.errors import ConfigError
from rlsdk.runlog.alerts import Alert, read_alerts
from rlsdk.runlog.folder import MARKER, why_no_run
from rlsdk.runlog.metrics import METRICS, read_metrics

HELD_OUT = ("eval/sampled", "eval/greedy")
"""Held-out accuracies, less noisy first."""


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
        ConfigError: The folder is not a run's.
    """
    if not any((folder / name).is_file() for name in (METRICS, MARKER)):
        raise ConfigError([f"RUN: {why_no_run(folder, METRICS)}"])
    text = _text(folder / "config.yaml")
    try:
        config, summary = yaml.safe_load(text), json.loads(_text(folder / "summary.json") or "{}")
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([f"RUN: {folder}: config.yaml or summary.json is damaged: {error}"]) from error
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
