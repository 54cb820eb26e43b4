"""A run started with marked objects: its folder is sufficient to check, compare and resume it."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

import rlsdk
from rlsdk.checkpoints.checkpoint import SECTIONS, Checkpoints
from rlsdk.config import check
from rlsdk.errors import PluginError
from rlsdk.opening.changes import differences
from rlsdk.opening.resuming import prepare_folder

SCRIPT = """\
import rlsdk

LIMIT = 3

@rlsdk.reward("short")
def short(rollout, *, limit=LIMIT, bonus: dict[int, float] | None = None):
    return float(len(rollout.response) < limit)

@rlsdk.policy_loss("soft")
def soft(x, *, beta: float = 0.1):
    return -(x.logprobs * x.advantages) * beta

@rlsdk.algorithm("msoft")
class MSoft(rlsdk.Algorithm):
    policy_loss = rlsdk.Use(soft, beta=0.2)
"""


def lab(text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    Path("lab_script.py").write_text(text)
    module = types.ModuleType("lab_script")
    module.__file__ = str(Path("lab_script.py").absolute())
    monkeypatch.setitem(sys.modules, "lab_script", module)
    exec(compile(text, module.__file__, "exec"), module.__dict__)
    import linecache

    linecache.checkcache()
    return module


def config(module: Any, **more: Any) -> rlsdk.Config:
    Path("model").mkdir(exist_ok=True)
    (Path("model") / "config.json").write_text("{}")
    given: dict[str, Any] = {
        "name": "kept",
        "model": "model",
        "tasks": rlsdk.Config.Tasks(train="countdown"),
        "reward": ["countdown", {"use": module.short, "weight": 0.5, "limit": 9}],
        "algorithm": module.MSoft,
        "steps": 2,
        "engine": "transformers",
    }
    return rlsdk.Config(**given | more)


def begin(plan: Any, **how: Any) -> tuple[Checkpoints, tuple[str, ...]]:
    checkpoints = Checkpoints(plan.folder, 2)
    how = {"resume": False, "overwrite": False, "allow_changes": False} | how
    prepared = prepare_folder(plan, checkpoints, **how)
    return checkpoints, (*prepared.notices, *prepared.keep_changes())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_kept_configuration_names_the_objects_and_is_the_same_training(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = check(config(lab(SCRIPT, monkeypatch)))
    _, notices = begin(plan)
    assert notices == ()
    kept = yaml.safe_load(Path("runs/kept/config.yaml").read_text())
    assert kept["plugins"] == ["code/lab_script.py"]
    assert kept["reward"][1] == {"use": "lab_script/short", "weight": 0.5, "limit": 9}
    assert kept["algorithm"] == "lab_script/msoft"

    again = check("runs/kept/config.yaml")
    assert again.code == plan.code
    assert [part.reference.name for part in again.rewards] == [part.reference.name for part in plan.rewards]
    assert (differences(again), differences(plan)) == ([], [])


def test_numbers_as_keys_of_an_option_stay_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = lab(SCRIPT, monkeypatch)
    plan = check(config(module, reward={"use": module.short, "bonus": {0: 0.5, 3: 1.0}}))
    begin(plan)
    again = check("runs/kept/config.yaml")
    assert again.rewards[0].reference.options["bonus"] == {0: 0.5, 3: 1.0}
    assert (differences(again), differences(plan)) == ([], [])


def test_it_is_resumed_from_the_folder_and_from_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    module = lab(SCRIPT, monkeypatch)
    plan = check(config(module))
    checkpoints, _ = begin(plan)
    checkpoints.save(1, {**{key: {} for key in SECTIONS}, "plugins": plan.code}, lambda _: None)
    for source, overrides in (("runs/kept/config.yaml", ["steps=5"]), (config(module, steps=7), [])):
        resumed = check(source, overrides)
        _, notices = begin(resumed, resume=True)
        assert next(each for each in notices if each.startswith("changed since")).split(": ")[1] == "steps"
        assert yaml.safe_load(Path("runs/kept/config.yaml").read_text())["plugins"] == ["code/lab_script.py"]


def test_changed_source_is_another_training(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = check(config(lab(SCRIPT, monkeypatch)))
    checkpoints, _ = begin(plan)
    checkpoints.save(1, {**{key: {} for key in SECTIONS}, "plugins": plan.code}, lambda _: None)
    changed = check(config(lab(SCRIPT.replace("LIMIT = 3", "LIMIT = 4"), monkeypatch)))
    with pytest.raises(PluginError, match="plugin lab_script was source"):
        begin(changed, resume=True)
    assert "LIMIT = 3" in Path("runs/kept/code/lab_script.py").read_text()


def test_an_object_without_a_source_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    @rlsdk.reward("inner")
    def inner(rollout: Any) -> float:
        return 1.0

    plan = check(config(lab(SCRIPT, monkeypatch), reward=inner, algorithm="grpo"))
    _, notices = begin(plan)
    assert "the source of reward 'inner' cannot be kept" in notices[0]


def test_what_was_loaded_is_kept_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = rlsdk.load("reward", "countdown", format_score=0.3)
    plan = check(config(lab(SCRIPT, monkeypatch), reward=loaded, algorithm="grpo"))
    begin(plan)
    kept = yaml.safe_load(Path("runs/kept/config.yaml").read_text())
    assert kept["reward"] == [{"use": "countdown", "format_score": 0.3}] and "plugins" not in kept
