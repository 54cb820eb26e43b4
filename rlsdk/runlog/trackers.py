"""Metric trackers: the file `metrics.jsonl` of every run, and the services in the config."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal, TextIO
from urllib.parse import urlsplit

import rlsdk
from rlsdk.contracts import Run
from rlsdk.isolation.reaper import unmarked
from rlsdk.runlog.folder import naming, replace_text
from rlsdk.runlog.metrics import METRICS, lines_up_to

log = logging.getLogger(__name__)
CONNECT_SECONDS = 30
"""Timeout in seconds for connecting to a tracker's service."""


@rlsdk.tracker("jsonl")
class JsonlTracker:
    """`metrics.jsonl` in the run's folder: one object per step. Every run has it."""

    _file: TextIO

    def open(self, run: Run) -> None:
        """Open the file; on resume, cut it back to the step that the run resumes from."""
        path = run.folder / METRICS
        kept = lines_up_to(path, run.resumed_from) if run.resumed_from else []
        replace_text(path, "".join(kept))
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Append one line and flush it, so that it survives a kill of this process; JSON has no NaN: null instead."""
        finite = {name: None if value is None or not math.isfinite(value) else value for name, value in metrics.items()}
        with naming(self._file.name):
            self._file.write(json.dumps({"step": step, **finite}) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Sync the file to the disk and close it."""
        with naming(self._file.name), self._file:
            os.fsync(self._file.fileno())


def service_run(run: Run, service: str) -> str | None:
    """Return the id of a resumed run on a service; None for a new run."""
    path = run.folder / "trackers" / service
    return path.read_text(encoding="utf-8") if run.resumed_from and path.is_file() else None


def keep_service_run(run: Run, service: str, identity: str) -> None:
    """Record the id of a run on a service, for a resume."""
    path = run.folder / "trackers" / service
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, identity)


@rlsdk.tracker("tensorboard")
class TensorboardTracker:
    """Event files for TensorBoard in the run's folder (extra `tensorboard`)."""

    requires: ClassVar = ("tensorboard",)

    def open(self, run: Run) -> None:
        """Open the writer; on resume, events after the resumed step are hidden."""
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


def online_or_offline(
    name: str, start: Callable[[Any], Any], mode: str | None, variable: str, refusals: tuple[type[Exception], ...]
) -> Any:
    """Start the run of a service; offline if the service refuses, unless the user has chosen a mode.

    `mode` is that of the configuration; the environment variable may hold one, too. `refusals` are the exceptions of
    `start` if there is no login or no network.
    """
    try:
        return start(mode)
    except refusals as error:
        if mode or os.environ.get(variable):
            raise
        log.warning("tracker %s works offline: %s", name, error)
        return start("offline")


class _ServiceRun:
    """The open run of a service's client, as Weights & Biases and libraries like it have it."""

    _run: Any

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """End the run on the service."""
        self._run.finish()


@rlsdk.tracker("wandb")
class WandbTracker(_ServiceRun):
    """Weights & Biases (extra `wandb`)."""

    requires: ClassVar = ("wandb",)

    def __init__(
        self,
        *,
        project: str = "rlsdk",
        entity: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
    ) -> None:
        """Create the tracker; nothing is opened yet.

        Args:
            project: Project that the run belongs to.
            entity: User or team; null for the one that is logged in.
            mode: online, offline or disabled; null for WANDB_MODE or, if it is not set, online when logged in.
        """
        self._project, self._entity, self._mode = project, entity, mode

    def open(self, run: Run) -> None:
        """Start or continue the run on the service; without login or network, offline (`wandb sync` sends it later)."""
        import wandb

        known = service_run(run, "wandb")
        settings: dict[str, Any] = {
            "name": run.name,
            "dir": str(run.folder),
            "config": dict(run.config),
            "project": self._project,
            "entity": self._entity,
            "settings": wandb.Settings(init_timeout=CONNECT_SECONDS),
            **({"id": known, "resume": "allow"} if known else {}),
        }
        with unmarked():  # wandb keeps its service process for later runs of this process, and ends it at exit
            wandb.setup()

        def start(mode: Any) -> Any:
            if not (mode or os.environ.get("WANDB_MODE")) and not wandb.login(prompt=False):
                raise wandb.errors.AuthenticationError("not logged in (run `wandb login`, or set WANDB_API_KEY)")
            return wandb.init(mode=mode, **settings)

        refusals = (wandb.errors.AuthenticationError, wandb.errors.CommError)
        self._run = online_or_offline("wandb", start, self._mode, "WANDB_MODE", refusals)
        keep_service_run(run, "wandb", self._run.id)


@rlsdk.tracker("mlflow")
class MlflowTracker:
    """MLflow (extra `mlflow`)."""

    def __init__(self, *, uri: str | None = None, experiment: str = "rlsdk") -> None:
        """Create the tracker; nothing is opened yet.

        Args:
            uri: Tracking server or database; null for MLFLOW_TRACKING_URI or, if it is not set, a database in the
                working folder.
            experiment: Experiment that the run belongs to.
        """
        self._uri, self._experiment = uri, experiment

    @property
    def requires(self) -> tuple[str, ...]:
        """Packages: MLflow's client (`mlflow-skinny`) suffices for a server, but not for a database."""
        uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        scheme = urlsplit(uri).scheme.partition("+")[0]
        in_database = not uri or scheme in ("sqlite", "postgresql", "mysql", "mssql")
        return ("mlflow | mlflow-skinny", *(["mlflow | alembic"] if in_database else []))

    def open(self, run: Run) -> None:
        """Start or continue the run on the tracking server."""
        import mlflow

        if self._uri is not None:
            mlflow.set_tracking_uri(self._uri)
        mlflow.set_experiment(self._experiment)
        self._mlflow = mlflow
        known = service_run(run, "mlflow")
        started = mlflow.start_run(run_id=known) if known else mlflow.start_run(run_name=run.name)
        keep_service_run(run, "mlflow", started.info.run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step; MLflow does not allow '@' in names."""
        self._mlflow.log_metrics({k.replace("@", "_at_"): float(v) for k, v in metrics.items()}, step=step)

    def close(self) -> None:
        """End the run on the service."""
        self._mlflow.end_run()


@rlsdk.tracker("swanlab")
class SwanlabTracker(_ServiceRun):
    """SwanLab (extra `swanlab`)."""

    requires: ClassVar = ("swanlab",)

    def __init__(
        self,
        *,
        project: str = "rlsdk",
        workspace: str | None = None,
        mode: Literal["online", "local", "offline", "disabled"] | None = None,
    ) -> None:
        """Create the tracker; nothing is opened yet.

        Args:
            project: Project that the run belongs to.
            workspace: User or organisation; null for the one that is logged in.
            mode: online, local, offline or disabled; null for SWANLAB_MODE or, if it is not set, online when logged in.
        """
        self._project, self._workspace, self._mode = project, workspace, mode

    def open(self, run: Run) -> None:
        """Start or continue the run; without login or network, offline (`swanlab sync` sends it later)."""
        import swanlab
        from swanlab.exceptions import AuthenticationError

        known = service_run(run, "swanlab")
        settings: dict[str, Any] = {
            "name": run.name,
            "log_dir": str(run.folder / "swanlab"),
            "config": dict(run.config),
            "project": self._project,
            "settings": swanlab.Settings(interactive=False),
            **({"workspace": self._workspace} if self._workspace else {}),
            **({"id": known, "resume": "allow"} if known else {}),
        }
        refusals = (AuthenticationError, RuntimeError)
        start = partial(swanlab.init, **settings)
        self._run = online_or_offline("swanlab", lambda mode: start(mode=mode), self._mode, "SWANLAB_MODE", refusals)
        keep_service_run(run, "swanlab", self._run.id)


@rlsdk.tracker("trackio")
class TrackioTracker(_ServiceRun):
    """Trackio, on this machine or in a Hugging Face Space (extra `trackio`)."""

    requires: ClassVar = ("trackio",)

    def __init__(self, *, project: str = "rlsdk", space: str | None = None) -> None:
        """Create the tracker; nothing is opened yet.

        Args:
            project: Project that the run belongs to.
            space: Hugging Face Space, such as `me/trackio`; null for TRACKIO_SPACE_ID or, if it is not set, a database
                on this machine, in TRACKIO_DIR.
        """
        self._project, self._space = project, space

    def open(self, run: Run) -> None:
        """Start the run, or continue the one of its name."""
        import trackio

        resume = "allow" if service_run(run, "trackio") else "never"
        self._run = trackio.init(
            self._project, run.name, space_id=self._space, config=dict(run.config), resume=resume, embed=False
        )
        keep_service_run(run, "trackio", self._run.name)
