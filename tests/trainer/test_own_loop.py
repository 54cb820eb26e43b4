"""The examples of docs/howto/own_loop.md work; a run follows the path of a task in docs/design.md."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlsdk
from rlsdk.errors import RunError
from rlsdk.trainer import Trainer
from rlsdk.weights import to_weights
from tests.trainer.fakes import FakeLearner, ScriptedRollouts, make_plan

ROOT = Path(__file__).parents[2]


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / "own_loop" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLES = [
    "by_hand",
    "sampling",
    "second_update",
    "teacher_pass",
    "accumulation",
    "kl_stopping",
    "weight_averaging",
    "learning_rate",
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_less_than_twenty_lines_of_code_and_is_on_the_page(name: str) -> None:
    text = (ROOT / "examples" / "own_loop" / f"{name}.py").read_text()
    code = [line for line in text.splitlines() if line.strip() and not line.startswith(('"""', "#"))]
    assert len(code) < 20
    assert f'--8<-- "examples/own_loop/{name}.py"' in (ROOT / "docs" / "howto" / "own_loop.md").read_text()


def test_a_second_update_takes_the_minibatches_in_the_reverse_order(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, minibatches=2)
    trainer = example("second_update").TwoUpdates(plan, rollouts=ScriptedRollouts(plan), learner=FakeLearner())
    metrics = asyncio.run(trainer.step())
    (_, first, _), (_, second, _) = trainer.learner.updates
    assert len(first) == 2 and second == first[::-1]
    assert metrics["second/grad_norm"] == 1.0


def test_a_teachers_lead_is_added_to_the_advantages(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    found = {}
    for kind in (Trainer, example("teacher_pass").Taught):
        trainer = kind(plan, rollouts=ScriptedRollouts(plan), learner=FakeLearner())
        trainer.teacher = lambda arrays: np.full(len(arrays.loss_mask), 1.5, np.float32)
        asyncio.run(trainer.step())
        found[kind.__name__] = trainer.learner.updates[0][0].tokens["advantages"]
    np.testing.assert_allclose(found["Taught"], found["Trainer"] + 0.1 * (1.5 + 0.5))


def test_a_callback_that_would_never_be_called_or_awaited_is_refused() -> None:
    with pytest.raises(TypeError, match="Late: unknown method of callbacks 'after_steps', did you mean 'after_step'"):

        class Late(rlsdk.Callback):
            async def after_steps(self, trainer: Trainer, metrics: Any) -> None: ...

    with pytest.raises(TypeError, match=r"Plain\.after_step must be `async def`"):

        class Plain(rlsdk.Callback):
            def after_step(self, trainer: Trainer, metrics: Any) -> None: ...

    class Whole(rlsdk.Callback):
        async def after_step(self, trainer: Trainer, metrics: Any) -> None: ...
        async def mean_after_step(self) -> None: ...
        def before_all(self) -> None: ...


def test_callbacks_that_are_none_are_refused_before_anything_starts() -> None:
    for given, said in (
        (rlsdk.Callback(), r"write callbacks=\[Callback\("),
        ([rlsdk.Callback], "expected an instance, got the class"),
        ([print], "expected subclasses of rlsdk.Callback"),
    ):
        with pytest.raises(TypeError, match=said):
            Trainer.from_config({}, callbacks=given)


@pytest.mark.parametrize("wrong", ["3", [1.0, 2.0], np.ones(2), torch.ones(2), 10**400], ids=lambda v: str(v)[:9])
def test_a_metric_of_a_callback_is_one_number_of_whatever_library(tmp_path: Path, wrong: Any) -> None:
    seen: dict[str, Any] = {}

    class Adds(rlsdk.Callback):
        async def after_step(self, trainer: Trainer, metrics: Any) -> None:
            given = {"np": np.float32(2), "torch": torch.tensor(3.0), "bool": np.True_, "none": None}
            metrics |= given if trainer.version == 1 else {"mine/wrong": wrong}

    class Reads(rlsdk.Callback):
        async def after_step(self, trainer: Trainer, metrics: Any) -> None:
            seen.update(metrics)

    plan = make_plan(tmp_path, steps=2)
    trainer = Trainer(plan, rollouts=ScriptedRollouts(plan), learner=FakeLearner(), callbacks=[Adds(), Reads()])
    with pytest.raises(RunError, match="metric 'mine/wrong' of callback Adds: expected one number, got "):
        trainer.train()
    assert json.dumps([seen[name] for name in ("np", "torch", "bool", "none")]) == "[2.0, 3.0, 1.0, null]"


def test_weights_are_averaged_over_the_steps(tmp_path: Path) -> None:
    class Moving(FakeLearner):
        def fetch_weights(self, version: int) -> Any:
            return to_weights(version, {"w": torch.full((2,), float(version))})

    plan = make_plan(tmp_path, steps=3)
    plan.folder.mkdir(parents=True)
    own = example("weight_averaging").Averaging(decay=0.5)
    Trainer(plan, rollouts=ScriptedRollouts(plan), learner=Moving(), callbacks=[own]).train()
    assert torch.load(plan.folder / "averaged.pt")["w"].tolist() == [2.25, 2.25]


def test_two_batches_make_one_optimiser_step_with_the_totals_of_both(tmp_path: Path) -> None:
    plan, learner = make_plan(tmp_path, steps=4), FakeLearner()
    trainer = example("accumulation").Accumulating(plan, rollouts=ScriptedRollouts(plan), learner=learner)
    metrics = [asyncio.run(trainer.step()) for _ in range(4)]
    assert learner.stepped == [2, 4] and not learner.updates
    assert ["actor/grad_norm" in line for line in metrics] == [False, True, False, True]
    for begin in (0, 2):
        (first, totals, how), (second, same, last) = learner.gradients[begin : begin + 2]
        assert totals == same and totals is not None
        assert totals.rollouts == len(first) + len(second) == 8
        assert totals.tokens == first.loss_mask.sum() + second.loss_mask.sum()
        assert (how["last"], last.get("last", True), how["step"]) == (False, True, begin + 1)


@pytest.mark.parametrize(("kl", "taken"), [(0.01, 4), (0.03, 1)])
def test_optimiser_steps_stop_when_the_policy_has_moved_too_far(kl: float, taken: int, tmp_path: Path) -> None:
    plan, learner = make_plan(tmp_path, minibatches=4), FakeLearner()
    learner.kl = kl
    trainer = example("kl_stopping").KlStopping(plan, rollouts=ScriptedRollouts(plan), learner=learner)
    assert asyncio.run(trainer.step())["actor/updates"] == taken
    assert learner.stepped == list(range(1, taken + 1))
    assert [how["update"] for *_, how in learner.gradients] == list(range(taken))


def test_a_callback_lowers_the_learning_rate_on_a_plateau(tmp_path: Path) -> None:
    plan, learner = make_plan(tmp_path, steps=6), FakeLearner()
    plan.folder.mkdir(parents=True)
    own = example("learning_rate").LowerOnPlateau(patience=2)
    # The reward is that of each step's tasks: it rises once, then stays.
    rollouts = ScriptedRollouts(plan, lambda task, rollout: min(task // 2, 1) + 0.5 * rollout)
    Trainer(plan, rollouts=rollouts, learner=learner, callbacks=[own]).train()
    assert learner.rates == [0.5e-3, 0.25e-3]


def traced(folder: Path) -> list[tuple[str, str]]:
    """Train a step, and return rlsdk's functions in the order of their calls, by file and name."""
    calls: list[tuple[str, str]] = []
    root, package = f"{ROOT}/", f"{ROOT}/rlsdk/"

    def note(frame: Any, event: str, _: Any) -> None:  # millions of times
        if event == "call" and (code := frame.f_code).co_filename.startswith(package):
            calls.append((code.co_filename.removeprefix(root), code.co_qualname))

    threading.setprofile(note)
    sys.setprofile(note)
    plan = make_plan(folder, steps=1)
    Trainer(plan, rollouts=ScriptedRollouts(plan), learner=FakeLearner()).train()
    sys.setprofile(None)
    return calls


def test_the_way_of_a_task_in_the_design_is_that_of_a_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    listed = re.findall(r"^\d+\. `(rlsdk/[\w/]+\.py)` `([\w.]+)`:", page, re.MULTILINE)
    assert 10 < len(listed) <= 20
    # In a process of its own, since what other tests compiled may have left this one without profiling.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        calls = [call for call in pool.submit(traced, tmp_path).result(timeout=250) if call in listed]
    again = ("TaskLedger.move", "Trainer.publish")  # first called before its place in the list
    assert set(calls) == set(listed)
    assert [call for call in dict.fromkeys(calls) if call[1] not in again] == [
        call for call in listed if call[1] not in again
    ]
