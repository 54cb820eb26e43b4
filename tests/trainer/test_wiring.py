"""Calls that no other test covers: checks of disk and GPUs before a run, a cache folder for each process."""

from __future__ import annotations

import io
import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlsdk import preflight
from rlsdk.checkpoints.checkpoint import SECTIONS, Checkpoints
from rlsdk.cluster.placement import Layout, layout
from rlsdk.config import Plan, check
from rlsdk.engines import starting as engine_starting
from rlsdk.errors import ConfigError, EnvironmentFault
from rlsdk.learners import group
from rlsdk.learners.apart import start_learner
from rlsdk.opening import record
from rlsdk.opening.resuming import prepare_folder
from rlsdk.readiness.checks import examine
from rlsdk.runlog.observers import Observers
from rlsdk.trainer import assembly, run
from rlsdk.two_process import programs

MODEL = Path(__file__).parents[2] / "examples" / "models" / "countdown-nano"


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Plan]:
    tree = {
        "name": "trial",
        "out": str(tmp_path / "runs"),
        "model": {"path": str(MODEL), "max_length": 32},
        "tasks": {"train": {"use": "countdown", "template": "compact", "size": 20}},
        "max_prompt_tokens": 24,
        "sampling": {"max_tokens": 8},
        "reward": "countdown",
        "engine": "transformers",
        "steps": 2,
        "placement": {"device": "cpu"},
    }
    return lambda *settings: check(tree, settings)


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test whose run gets as far as to start Ray."""

    def fail(*_: Any) -> None:
        pytest.fail("Ray would have been started")

    for module in (record, programs):
        monkeypatch.setattr(module, "ray_cluster", fail)


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("start", [run.run, programs.train_apart], ids=["both", "train"])
def test_no_training_starts_on_a_disk_that_is_too_small(
    plan: Callable[..., Plan], start: Callable[[Plan], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(EnvironmentFault, match=r"out: .* has 1000 bytes free, but .* are needed"):
        start(plan("placement.ray=auto"))


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("start", [run.run, programs.train_apart], ids=["both", "train"])
def test_no_training_starts_on_a_gpu_that_torch_has_no_code_for(
    plan: Callable[..., Plan], start: Callable[[Plan], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "gpu_capability", lambda: ["GPU 0: torch was built for others"])
    with pytest.raises(EnvironmentFault, match=r"placement\.device: GPU 0: torch was built for others"):
        start(plan("placement.ray=auto", "placement.device=auto"))


def test_gpus_are_not_looked_at_where_none_are_used(plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "gpu_capability", lambda: pytest.fail("looked at GPUs"))
    assert not examine(plan(), starts=False).warnings


def test_too_few_gpus_are_reported_before_ray_starts(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(preflight, "gpu_capability", list)
    monkeypatch.setattr(preflight, "gpu_count", lambda: 1)
    found = examine(plan("placement.device=cuda", "placement.engines=2"), starts=False).warnings
    assert any("needs 2 GPUs" in each.message and "this machine has 1" in each.message for each in found)


@pytest.mark.parametrize(
    ("gpus", "device", "waits"), [(0, "cpu", True), (1, "cpu", False), (1, "cuda", True), (2, "cuda", False)]
)
def test_a_reward_for_whose_gpus_its_actor_would_wait_forever_is_reported(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int, device: str, waits: bool
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(preflight, "gpu_capability", list)
    monkeypatch.setattr(preflight, "gpu_count", lambda: gpus)
    (tmp_path / "config.json").write_text("{}")
    reward = f"reward={{use: reward_model, path: {tmp_path}, gpus: 0.5}}"
    found = [str(each) for each in examine(plan(f"placement.device={device}", reward), starts=False).warnings]
    assert any("reward: its actors reserve GPUs of their own (reward_model 0.5)" in text for text in found) == waits


def test_low_limits_of_open_files_and_file_sizes_are_reported_before_ray_hangs(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 128))
    said = [each.message for each in examine(plan(), starts=False).warnings]
    assert any("may have 128 open files, but Ray needs at least 1024" in message for message in said)
    assert any("write files of at most 64 bytes" in message for message in said)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 4096) if kind == resource.RLIMIT_NOFILE else (-1, -1))
    assert not examine(plan(), starts=False).warnings


def test_each_engine_has_its_own_cache_folder_below_the_runs(
    plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = []

    class Started:
        """A handle of an engine's actor."""

        class start:
            remote = staticmethod(lambda *_, **__: None)

    def launch(_: Any, place: Any, **__: Any) -> Started:
        places.append(place)
        return Started()

    monkeypatch.setattr(engine_starting, "launch", launch)
    checked = plan("placement.engines=2")
    engine_starting.start_engines(checked, layout(checked, 2, 0))
    folder = (tmp_path / "runs" / "trial").resolve()
    caches = [Path(place.cache) for place in places]
    assert caches == [folder / "cache" / "engine-0", folder / "cache" / "engine-1"]
    for place in places:  # compilers of two engines that share a folder overwrite each other's files
        assert Path(place.environment()["TORCHINDUCTOR_CACHE_DIR"]).parent == Path(place.cache)


def test_the_learner_is_given_a_cache_folder_below_the_runs(
    plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    class Launched:
        adapter_only = False

    monkeypatch.setattr(group.LearnerGroup, "launch", lambda *_, **options: given.update(options) or Launched())
    checked = plan()
    start_learner(checked, layout(checked, 2, 0), None, 2)
    assert given["cache"] == (tmp_path / "runs" / "trial").resolve() / "cache"


@pytest.mark.parametrize("colocate", [True, False])
def test_the_learner_takes_memory_of_a_shared_gpu_once_the_engines_have_theirs(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, colocate: bool
) -> None:
    order: list[str] = []

    def learner(*_: Any) -> None:
        order.append("learner")
        raise InterruptedError

    monkeypatch.setattr(assembly, "layout", lambda *_: Layout("cuda", 1, 1))
    monkeypatch.setattr(assembly, "start_engines", lambda *_: order.append("engines start") or [])
    monkeypatch.setattr(assembly, "started_engines", lambda *_: order.append("engines are ready") or [])
    monkeypatch.setattr(assembly, "start_learner", learner)
    checked = plan("placement.device=cuda", f"placement.colocate={colocate}")
    tasks, observers = assembly.train_tasks(checked), Observers(checked.plugins)
    with pytest.raises(InterruptedError), assembly.started(checked, 1, tasks, observers):
        pass
    # A shared GPU is the learner's once the engines are ready and asleep.
    assert order == ["engines start", *(["engines are ready"] * 2 if colocate else []), "learner"]


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("start", [run.run, programs.train_apart], ids=["both", "train"])
def test_a_resumed_run_without_steps_left_starts_nothing_and_keeps_its_summary(
    plan: Callable[..., Plan], start: Callable[..., Any]
) -> None:
    finished = plan("placement.ray=auto")
    checkpoints = Checkpoints(finished.folder, 1)
    prepare_folder(finished, checkpoints, resume=False, overwrite=False, allow_changes=False)
    checkpoints.save(2, {**{section: {} for section in SECTIONS}, "plugins": finished.code}, lambda _: None)
    summary = finished.folder / "summary.json"
    summary.write_text('{"status": "finished", "steps": 2}')
    console = Console(file=io.StringIO())
    assert start(finished, resume=True, console=console) == {"status": "finished", "steps": 2}
    assert json.loads(summary.read_text()) == {"status": "finished", "steps": 2}
    assert "nothing is left to train" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("no_ray")
def test_two_programs_need_weights_that_outlive_their_transfer(plan: Callable[..., Plan]) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.weight_transfer: 'core/gloo' sends weights while engines receive"):
        programs.train_apart(plan("placement.ray=auto", "rollout.weight_transfer=gloo"))
