"""Trackers and observing plugins never end or delay a run."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

import rlsdk
from rlsdk.contracts import Run
from rlsdk.isolation.reaper import MARK, marked
from rlsdk.plugins import Plugins
from rlsdk.preflight import packages, version
from rlsdk.runlog.observers import Observers, ObserverThread
from rlsdk.runlog.trackers import MlflowTracker, SwanlabTracker, TensorboardTracker, TrackioTracker, WandbTracker


class Noting:
    """A tracker that records its calls."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def open(self, run: Run) -> None:
        self.told.append(run.name)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.told.append((step, metrics))

    def close(self) -> None:
        self.told.append("closed")


class Failing(Noting):
    def __init__(self, *calls: str) -> None:
        super().__init__()
        self.calls = calls

    def open(self, run: Run) -> None:
        super().open(run)
        if "open" in self.calls:
            raise ConnectionError("no route to the service")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        super().log(step, metrics)
        if "log" in self.calls:
            raise SystemExit(3)


class Waiting(Noting):
    async def log(self, step: int, metrics: dict[str, float]) -> None:  # type: ignore[override]
        super().log(step, metrics)


def line_of(text: str) -> str:
    """Where this file first holds a text, as failures are reported."""
    lines = Path(__file__).read_text().splitlines()
    return (
        f"{Path(__file__).relative_to(Path.cwd())}, line {next(n for n, line in enumerate(lines, 1) if text in line)}"
    )


def run_of(folder: Path, resumed_from: int = 0) -> Run:
    return Run("a", folder, {"steps": 2}, resumed_from)


def test_trackers_are_told_in_order_and_a_failing_one_is_told_of(tmp_path, caplog):
    good, unopened, rude, waiting = Noting(), Failing("open"), Failing("log"), Waiting()
    observers = Observers(Plugins())
    observers.open({"good": good, "unopened": unopened, "rude": rude, "waiting": waiting}, run_of(tmp_path))
    metrics = {"loss": 1.0}
    observers.log(1, metrics)
    metrics["loss"] = 2.0  # what was handed over does not change later
    observers.log(2, metrics)
    with caplog.at_level(logging.WARNING):
        fates = observers.close_trackers()
    assert good.told == ["a", (1, {"loss": 1.0}), (2, {"loss": 2.0}), "closed"]
    assert unopened.told == ["a"]
    assert rude.told[1:] == [(1, {"loss": 1.0}), (2, {"loss": 2.0}), "closed"]
    assert fates == {
        "good": "ok",
        "unopened": f"open: ConnectionError: no route to the service ({line_of('no route')})",
        "rude": f"2 of 4 calls failed; the first: log of step 1: SystemExit: 3 ({line_of('SystemExit')})",
        "waiting": "2 of 4 calls failed; the first: log of step 1: TypeError: Waiting.log is async def, but is called "
        "without await; write def",
    }


def test_a_call_that_hangs_holds_up_neither_the_run_nor_its_end():
    never = threading.Event()
    thread = ObserverThread("tracker stuck")
    thread.submit("open", never.wait, essential=True)
    for step in range(3):
        thread.submit(f"log of step {step}", lambda: None)
    assert thread.close(0.05) == "open did not return; 3 calls after it were not made"
    never.set()


def test_calls_beyond_those_that_may_wait_are_counted(monkeypatch):
    monkeypatch.setattr("rlsdk.runlog.observers.WAITING_CALLS", 2)
    begun, free, made = threading.Event(), threading.Event(), []
    thread = ObserverThread("plugin slow")

    def wait() -> None:
        begun.set()
        free.wait()

    thread.submit("a", wait)
    assert begun.wait(10)
    for name in "bcde":
        thread.submit(name, lambda name=name: made.append(name))
    free.set()
    assert thread.close(10) == "0 of 3 calls failed; 2 were dropped because it was too slow; the first: none"
    assert made == ["b", "c"]


def test_hooks_of_one_plugin_fail_alone(caplog):
    seen: list[int] = []

    class Good:
        @rlsdk.hookimpl
        def rlsdk_step_end(self, step):
            seen.append(step)

    class Bad:
        @rlsdk.hookimpl(tryfirst=True)
        def rlsdk_step_end(self, step, metrics):
            raise ValueError(metrics)

    plugins = Plugins()
    plugins.register(Good(), name="good")
    plugins.register(Bad(), name="bad")
    observers = Observers(plugins)
    assert observers.observes("rlsdk_step_end")
    assert not observers.observes("rlsdk_rollout_done")
    observers.tell("rlsdk_rollout_done", rollout=None, score=None, step=1)
    for step in (1, 2):
        observers.tell("rlsdk_step_end", step=step, metrics={})
    place = line_of("raise ValueError")
    assert observers.close() == {
        "plugin bad": f"2 of 2 calls failed; the first: rlsdk_step_end: ValueError: {{}} ({place})"
    }
    assert seen == [1, 2]
    observers.tell("rlsdk_step_end", step=3, metrics={})  # of a second training in the same program
    observers.close()
    assert seen == [1, 2, 3]


@pytest.fixture
def no_login(monkeypatch, tmp_path):
    """No account, no network, no settings of the person who runs the tests."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")


def test_wandb_works_offline_by_itself_and_resumes_its_own_run(tmp_path, no_login, caplog):
    pytest.importorskip("wandb")
    for resumed_from in (0, 1):
        tracker = WandbTracker()
        tracker.open(run_of(tmp_path, resumed_from))
        tracker.log(resumed_from + 1, {"loss": 0.5})
        tracker.close()
    assert "not logged in" in caplog.text
    files = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len({file.stem for file in files}) == 1  # one id, under which `wandb sync` joins both parts
    assert (tmp_path / "trackers" / "wandb").read_text() == files[0].stem.removeprefix("run-")


def test_the_end_of_a_run_leaves_wandbs_process_to_the_next_run(tmp_path, no_login, monkeypatch):
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # an earlier test may have started its process
    monkeypatch.setenv(MARK, "of-this-test")
    tracker = WandbTracker(mode="offline")
    tracker.open(run_of(tmp_path))
    assert marked("of-this-test") == []  # the end of a run kills what has its mark
    assert os.environ[MARK] == "of-this-test"
    tracker.close()


def test_wandb_works_offline_where_the_service_is_not_reached(tmp_path, no_login, monkeypatch, caplog):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # the discard port: nobody listens
    monkeypatch.setattr("rlsdk.runlog.trackers.CONNECT_SECONDS", 1)
    monkeypatch.setenv("WANDB_HTTP_TIMEOUT", "1")
    tracker = WandbTracker()
    tracker.open(run_of(tmp_path))
    tracker.log(1, {"loss": 0.5})
    tracker.close()
    assert "works offline" in caplog.text
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_mlflow_resumes_its_own_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database would need more packages
    uri = (tmp_path / "store").as_uri()
    for resumed_from in (0, 1):
        tracker = MlflowTracker(uri=uri, experiment="e")
        tracker.open(run_of(tmp_path, resumed_from))
        tracker.log(resumed_from + 1, {"eval/pass@1": 0.5 + resumed_from})
        tracker.close()
    client = mlflow.MlflowClient(uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "e"]
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "eval/pass_at_1")
    assert [(m.step, m.value) for m in history] == [(1, 0.5), (2, 1.5)]
    assert found.info.status == "FINISHED"


@pytest.mark.parametrize(
    ("uri", "database"),
    [
        (None, True),
        ("sqlite:///runs.db", True),
        ("postgresql+psycopg://db/runs", True),
        ("http://tracking:5000", False),
        ("databricks", False),
        ("file:///tracking", False),
    ],
)
def test_mlflow_with_a_database_needs_more_than_its_client(monkeypatch, uri, database):
    needs = "tracker mlflow needs mlflow, which is not installed: pip install mlflow"
    if version("mlflow") or version("alembic") or not version("mlflow-skinny"):
        pytest.skip("of MLflow, only the client must be installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert packages(MlflowTracker(uri=uri).requires, "tracker mlflow") == [needs] * database
    if uri is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert packages(MlflowTracker().requires, "tracker mlflow") == [needs] * database


def test_swanlab_works_offline_by_itself_and_resumes_its_own_run(tmp_path, no_login, monkeypatch, caplog):
    pytest.importorskip("swanlab")
    for name in ("SWANLAB_API_KEY", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for resumed_from in (0, 1):
        tracker = SwanlabTracker()
        tracker.open(run_of(tmp_path, resumed_from))
        tracker.log(resumed_from + 1, {"loss": 0.5, "eval/pass@2": float("nan")})
        tracker.close()
    assert "tracker swanlab works offline: " in caplog.text
    files = list((tmp_path / "swanlab").glob("run-*/run-*.swanlab"))
    assert len({file.stem for file in files}) == 1  # one id, under which `swanlab sync` joins both parts
    assert (tmp_path / "trackers" / "swanlab").read_text() == files[0].stem.removeprefix("run-")


def test_trackio_resumes_its_own_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    trackio = pytest.importorskip("trackio")
    for resumed_from in (0, 1):
        tracker = TrackioTracker(project="p")
        tracker.open(run_of(tmp_path, resumed_from))
        tracker.log(resumed_from + 1, {"eval/pass@1": 0.5 + resumed_from})
        tracker.close()
    from trackio.sqlite_storage import SQLiteStorage

    (found,) = trackio.Api().runs("p")
    history = [(row["step"], row["eval/pass@1"]) for row in SQLiteStorage.get_logs("p", found.name)]
    assert (found.name, history) == ("a", [(1, 0.5), (2, 1.5)])


def test_tensorboard_hides_what_a_resumed_run_does_again(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed_from, steps in ((0, (1, 2, 3)), (2, (3,))):
        tracker = TensorboardTracker()
        tracker.open(run_of(tmp_path, resumed_from))
        for step in steps:
            tracker.log(step, {"loss": step + 10.0 * resumed_from})
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 23.0)]
