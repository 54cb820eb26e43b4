"""Where metrics go: a JSON-lines file, which every run has, and the services that a config names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import rlsdk
from rlsdk.contracts import Run


@rlsdk.tracker("jsonl")
class JsonlTracker:
    """`metrics.jsonl` in the run's folder: one object per step. Every run has it."""

    _file: TextIO

    def open(self, run: Run) -> None:
        """Open the file; on resume, cut it back to the step that the run resumes from."""
        path = run.folder / "metrics.jsonl"
        kept = lines_up_to(path, run.resumed_from) if run.resumed_from else []
        path.write_text("".join(kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line and hand it to the system, so that a killed run keeps it."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Write it out to the disk."""
        os.fsync(self._file.fileno())
        self._file.close()


def lines_up_to(path: Path, step: int) -> list[str]:
    """The whole lines of a metrics file whose step is at most `step`; a line cut short by a kill is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    return [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All lines of a run's `metrics.jsonl`."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


@rlsdk.tracker("tensorboard")
class TensorboardTracker:
    """Event files for TensorBoard below the run's folder (extra `tensorboard`)."""

    def open(self, run: Run) -> None:
        """Open the writer; on resume, events behind the step are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        purge = run.resumed_from + 1 if run.resumed_from else None
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write each metric as a scalar."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()


@rlsdk.tracker("wandb")
class WandbTracker:
    """Weights & Biases (extra `wandb`)."""

    def __init__(self, *, project: str = "rlsdk", entity: str | None = None, mode: str | None = None) -> None:
        """Make one.

        Args:
            project: Project that the run belongs to.
            entity: User or team; null takes the login's.
            mode: online, offline or disabled; null takes the environment's.
        """
        self._settings = {"project": project, "entity": entity, "mode": mode}

    def open(self, run: Run) -> None:
        """Start the run there, or go on with it."""
        import wandb

        resume = {"id": run.name, "resume": "allow"} if run.resumed_from else {}
        self._run = wandb.init(name=run.name, dir=str(run.folder), config=dict(run.config), **self._settings, **resume)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """End the run there."""
        self._run.finish()


@rlsdk.tracker("mlflow")
class MlflowTracker:
    """MLflow (extra `mlflow`)."""

    def __init__(self, *, uri: str | None = None, experiment: str = "rlsdk") -> None:
        """Make one.

        Args:
            uri: Tracking server or folder; null takes MLFLOW_TRACKING_URI.
            experiment: Experiment that the run belongs to.
        """
        self._uri, self._experiment = uri, experiment

    def open(self, run: Run) -> None:
        """Start the run there."""
        import mlflow

        if self._uri is not None:
            mlflow.set_tracking_uri(self._uri)
        mlflow.set_experiment(self._experiment)
        self._mlflow = mlflow
        mlflow.start_run(run_name=run.name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step; MLflow takes no '@' in names."""
        self._mlflow.log_metrics({k.replace("@", "_at_"): float(v) for k, v in metrics.items()}, step=step)

    def close(self) -> None:
        """End the run there."""
        self._mlflow.end_run()
