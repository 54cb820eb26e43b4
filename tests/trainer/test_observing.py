"""Diagnoses of a running training: the real callback, with a scripted policy and a fake learner."""

from __future__ import annotations

import asyncio
import json
import logging
import logging.config
import os
import threading
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from rich.console import Console

from rlsdk.runlog.observers import Observers
from rlsdk.trainer import Trainer, observing
from rlsdk.trainer.callbacks import Callback, standard_callbacks
from rlsdk.trainer.metrics import (
    dead_share,
    gap_metrics,
    raw_metrics,
    repetition,
    sampled_entropy,
    source_metrics,
    source_shares,
)
from rlsdk.types import Group, Rollout, Score, Task
from tests.trainer.fakes import FakeLearner, ScriptedRollouts, make_plan

RULES = '''
import time

import rlsdk
from rlsdk.contracts import Finding


@rlsdk.diagnosis("low")
def low(history, *, under: float = 0.8):
    """The reward is low."""
    found = history["reward/mean"].last(1).mean
    return Finding(f"the reward is {found:g}", "raise it") if found < under else None


@rlsdk.diagnosis("broken")
def broken(history):
    """It raises."""
    raise RuntimeError("by hand")


@rlsdk.diagnosis("hangs")
def hangs(history):
    """It does not return."""
    time.sleep(3600)
'''


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "rules_lab.py").write_text(RULES)
    return tmp_path


def trained(lab: Path, *diagnoses: Any, steps: int = 3, **how: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train three steps; return the summary and the lines of alerts.jsonl."""
    plan = make_plan(
        lab, plugins=[str(lab / "rules_lab.py")], diagnoses=list(diagnoses), steps=steps, eval={"before": False}, **how
    )
    plan.folder.mkdir(parents=True)
    trainer = Trainer(plan, rollouts=ScriptedRollouts(plan), learner=FakeLearner())
    observers = Observers(plan.plugins)
    trainer.callbacks = standard_callbacks(Console(quiet=True), observers, None)
    summary = asyncio.run(trainer.train_async())
    path = plan.folder / "alerts.jsonl"
    return summary, [json.loads(line) for line in path.read_text().splitlines()]


class Recorder:
    """A learner's group that notes what is recorded."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start_profile(self, ranks: Any, *, details: bool) -> None:
        self.calls.append((tuple(ranks), details))

    def stop_profile(self, files: Any) -> None:
        self.calls.append({rank: f"{file.parent.name}/{file.name}" for rank, file in files.items()})
        assert all(file.parent.is_dir() for file in files.values())


def test_the_steps_that_a_profile_names_are_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = make_plan(tmp_path, steps=3, profile={"steps": [1, 2, 3], "details": True}, eval={"before": False})
    plan.folder.mkdir(parents=True)
    recorder = Recorder()
    own = [observing.Profiling(recorder)]  # type: ignore[arg-type]
    trainer = Trainer(plan, rollouts=ScriptedRollouts(plan), learner=FakeLearner(), callbacks=own, steps=2)
    with caplog.at_level(logging.WARNING):
        asyncio.run(trainer.train_async())
    files = [{0: f"profiles/step-{step}-learner-0.json.gz"} for step in (1, 2)]
    assert recorder.calls == [((0,), True), files[0], ((0,), True), files[1]]
    assert "profile.steps: this run takes the steps 1 to 2, not [3]" in caplog.text


def test_what_is_found_is_in_the_log_the_file_and_the_summary(lab: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        summary, alerts = trained(lab, "rules_lab/low")
    told = "rules_lab/low (step 1): the reward is 0.5; raise it"
    line = {
        "step": 1,
        "name": "rules_lab/low",
        "level": "warning",
        "message": "the reward is 0.5",
        "advice": "raise it",
        "metric": "",
    }
    assert alerts == [line]
    assert summary["warnings"] == [told]
    assert [(r.levelname, r.getMessage()) for r in caplog.records if r.name == observing.log.name] == [
        ("WARNING", told)
    ]


def test_options_of_the_configuration_count_and_a_healthy_run_has_an_empty_file(lab: Path) -> None:
    summary, alerts = trained(lab, {"use": "rules_lab/low", "under": 0.4}, "builtin")
    assert (summary["warnings"], alerts) == ([], [])


def test_a_rule_that_raises_does_not_end_the_run(lab: Path, caplog: pytest.LogCaptureFixture) -> None:
    summary, alerts = trained(lab, "rules_lab/broken", "rules_lab/low")
    assert (summary["status"], [each["name"] for each in alerts]) == ("finished", ["rules_lab/low"])
    assert "diagnosis rules_lab/broken failed and is not called again: RuntimeError: by hand" in caplog.text


def test_a_rule_that_hangs_does_not_end_the_run(
    lab: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(observing, "CLOSE_SECONDS", 0.2)
    before = threading.active_count()
    summary, alerts = trained(lab, "rules_lab/hangs")
    assert (summary["status"], alerts) == ("finished", [])
    assert "diagnoses: diagnoses of step 1 did not return" in caplog.text
    assert threading.active_count() <= before + 2


def test_a_full_disk_does_not_end_the_run(
    lab: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(observing, "append_alerts", full)
    summary, alerts = trained(lab, "rules_lab/low")
    assert (summary["status"], alerts) == ("finished", [])
    assert summary["warnings"] == ["rules_lab/low (step 1): the reward is 0.5; raise it"]


def test_all_built_in_rules_are_on_by_default_and_keep_their_options(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    assert [each.name for each in plan.diagnoses] == [f"core/{n}" for n in plan.plugins.names("diagnosis")]
    changed = make_plan(tmp_path, diagnoses=["builtin", {"use": "clip_share", "high": 0.4}]).diagnoses
    assert len(changed) == len(plan.diagnoses)
    assert [dict(each.options) for each in changed if each.options] == [{"high": 0.4}]
    assert make_plan(tmp_path, diagnoses=[]).diagnoses == ()
    assert [each.name for each in make_plan(tmp_path, diagnoses="clip_share").diagnoses] == ["core/clip_share"]


# --- the metrics that rules read


def rollout(tokens: list[int], logprobs: list[float], mask: list[bool], source: str = "") -> Rollout:
    return Rollout(Task(id="t", prompt="?", source=source), (), tokens, mask, logprobs, [0] * len(tokens))


def test_repeated_phrases_are_counted() -> None:
    assert repetition(np.array([1, 2, 3, 1, 2, 3]), size=3) == 0.25  # 123 231 312 123: one of four again
    assert repetition(np.zeros(20, np.int64), size=3) == 17 / 18
    assert repetition(np.arange(30)) == 0.0
    assert repetition(np.zeros(8, np.int64)) == 0.0


def test_entropy_is_estimated_from_the_sampled_tokens_alone() -> None:
    first = rollout([1, 2, 3], [0.0, -1.0, -2.0], [False, True, True])
    second = rollout([1, 2], [0.0, -0.5], [False, True])
    assert sampled_entropy([first, second]) == {"rollouts/entropy": pytest.approx(3.5 / 3)}
    written = Rollout(Task(id="t", prompt="?"), (), [1, 2], [False, True], [0.0, 0.0], [-1, -1])
    assert sampled_entropy([written]) == {}


def test_groups_of_equal_rewards_are_dead_and_groups_of_one_do_not_count() -> None:
    def group(*values: float | None) -> Group:
        scores = [Score.invalid("ill") if value is None else Score(value) for value in values]
        return Group(Task(id="t", prompt="?"), [rollout([1], [-1.0], [True])] * len(values), scores)

    assert dead_share([group(1, 1, 1), group(0, 1), group(0.5, None), group(0.1, None, 0.1)]) == {
        "groups/dead": pytest.approx(2 / 3)
    }
    assert dead_share([group(1.0)]) == {}


def test_a_group_is_dead_if_all_parts_are_equal_where_the_algorithm_reads_them_one_by_one() -> None:
    def group(*parts: tuple[float, float]) -> Group:
        scores = [Score(a + b, metrics={"reward/right": a, "reward/short": b}) for a, b in parts]
        return Group(Task(id="t", prompt="?"), [rollout([1], [-1.0], [True])] * len(parts), scores)

    groups = [group((1, 0), (0, 1)), group((1, 0), (1, 0)), group((1, 0), (1, 1))]
    assert dead_share(groups) == {"groups/dead": pytest.approx(2 / 3)}
    assert dead_share(groups, {"right", "short"}) == {"groups/dead": pytest.approx(1 / 3)}
    assert dead_share(groups, {"right"}) == {"groups/dead": pytest.approx(2 / 3)}
    assert raw_metrics(groups, {"right", "short"})["raw/groups_dead"] == pytest.approx(1 / 3)
    tasks = [Task(id="t", prompt="?", source=source) for source in "aab"]
    several = [attrs.evolve(each, task=task) for each, task in zip(groups, tasks, strict=True)]
    found = source_metrics(several, scored=True, separate={"right", "short"})
    assert (found["source/a/groups/dead"], found["source/b/groups/dead"]) == (0.5, 0.0)


@pytest.mark.parametrize(("algorithm", "separate"), [("gdpo", {"countdown", "format"}), ("grpo", set())])
def test_parts_of_weight_0_teach_nothing(tmp_path: Path, algorithm: str, separate: set[str]) -> None:
    parts = [
        "countdown",
        {"use": "format", "pattern": ".", "weight": 0.5},
        {"use": "length_penalty", "limit": 9, "weight": 0.0},
    ]
    plan = make_plan(tmp_path, algorithm=algorithm, reward=parts)
    assert plan.separate_rewards == separate


def test_gaps_add_up_over_a_generation_and_stale_tokens_do_not_count() -> None:
    learner, engine = np.array([-1.0, -1.0, -2.0, -9.0]), np.array([-1.2, -1.2, -1.5, -1.0])
    current, segments = np.array([True, True, True, False]), np.array([0, 0, 1, 2])
    found = gap_metrics(learner, engine, current, segments)
    assert found == {"actor/gap": pytest.approx(0.5), "actor/gap_generation": pytest.approx(0.45)}  # (0.4 + 0.5) / 2
    assert gap_metrics(learner, engine, np.zeros(4, bool), segments) == {}


def test_the_share_of_a_source_is_computed_from_trained_groups() -> None:
    groups = [Group(Task(id="t", prompt="?", source=name), [], []) for name in ("a", "a", "b", "a")]
    assert source_shares(groups) == {"source/a/share": 0.75, "source/b/share": 0.25}


class Careless(Callback):
    """Changes settings of the process in each step, as the first call of a library in a workflow may do."""

    async def after_step(self, trainer: Trainer, metrics: Any) -> None:
        logging.config.dictConfig({"version": 1})
        torch.set_default_dtype(torch.float64)
        os.chdir("/")


def test_settings_of_the_process_that_code_of_the_run_changes_are_changed_back_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = make_plan(tmp_path, steps=2, eval={"before": False})
    plan.folder.mkdir(parents=True)
    trainer = Trainer(plan, rollouts=ScriptedRollouts(plan), learner=FakeLearner())
    trainer.callbacks = standard_callbacks(Console(quiet=True), Observers(plan.plugins), None, [Careless()])
    with caplog.at_level(logging.WARNING):
        asyncio.run(trainer.train_async())
    (told,) = [text for text in caplog.messages if "settings of the whole process" in text]
    assert told.startswith(
        "a workflow, reward, tool or callback changes settings of the whole process: torch's default"
    )
    assert "the working folder, from" in told and told.endswith("; they are changed back after each step")
    assert torch.zeros(1).dtype == torch.float32 and Path.cwd() == tmp_path
    assert not logging.getLogger("rlsdk.trainer.trainer").disabled
