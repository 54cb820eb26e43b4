"""A plugin's own field with its producer: from the marks to the advantage, the loss and the checks."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch

import rlsdk
from rlsdk.errors import ConfigError, PluginError, RunError
from rlsdk.testing import check_component
from rlsdk.trainer import Trainer
from tests.trainer.fakes import FakeLearner, ScriptedRollouts, make_plan


@rlsdk.field("lateness", needs=("entropy",), sample=(0.0, 1.0))
def lateness(batch: rlsdk.StepBatch) -> np.ndarray:
    """Where a token stands in its response, from 0 to 1, plus the entropy."""
    spans = [np.arange(count) / max(count - 1, 1) for count in batch.arrays.responses]
    return np.concatenate(spans) + batch.fields["entropy"]


@rlsdk.advantage("late", needs=(lateness,))
def late(x: rlsdk.CreditInputs) -> torch.Tensor:
    """The reward, weighed by the lateness of each token."""
    return x.per_token(x.rewards) * x.lateness


def plan_of(folder: Path, advantage: object = late) -> rlsdk.Trainer:
    algorithm = {"use": "grpo", "kl_coef": 0.0, "advantage": advantage}
    plan = make_plan(folder, algorithm=algorithm)
    return Trainer(plan, rollouts=ScriptedRollouts(plan), learner=FakeLearner())


def test_a_declared_field_is_computed_and_reaches_advantage_and_update(tmp_path: Path) -> None:
    trainer = plan_of(tmp_path)
    assert [field.name for field in trainer.plan.fields] == ["lateness"]
    asyncio.run(trainer.step())
    assert "entropy" in trainer.learner.fields[0]
    batch, _, _ = trainer.learner.updates[0]
    expected = np.concatenate([np.arange(n) / (n - 1) for n in batch.responses]) - 0.5
    np.testing.assert_allclose(batch.tokens["lateness"], expected, rtol=1e-6)
    assert set(batch.tokens["advantages"][: batch.responses[0]]) == {0.0}  # its reward is 0
    second = slice(int(batch.responses[0]), int(batch.responses[:2].sum()))
    np.testing.assert_allclose(batch.tokens["advantages"][second], expected[second], rtol=1e-6)


@rlsdk.field("scaled")
def scaled(batch: rlsdk.StepBatch, *, scale: Annotated[float, rlsdk.above(0)] = 1.0, name: str = "a") -> np.ndarray:
    """The same number for all tokens."""
    return np.full(len(batch.arrays.loss_mask), scale * len(name))


@rlsdk.advantage("reads_scaled", needs=(scaled,))
def reads_scaled(x: rlsdk.CreditInputs) -> torch.Tensor:
    """Reads it."""
    return x.scaled


def scaled_plan(folder: Path, fields: object) -> Any:
    return make_plan(folder, algorithm={"use": "grpo", "kl_coef": 0.0, "advantage": reads_scaled}, fields=fields)


@pytest.mark.parametrize(
    ("options", "expected"), [({}, 1.0), ({"scale": 0.5, "name": "four"}, 2.0), ({"scale": 3}, 3.0)]
)
def test_a_configuration_sets_the_options_of_a_field(tmp_path: Path, options: Any, expected: float) -> None:
    plan = scaled_plan(tmp_path, {"scaled": options} if options else {})
    trainer = Trainer(plan, rollouts=ScriptedRollouts(plan), learner=FakeLearner())
    asyncio.run(trainer.step())
    assert set(trainer.learner.updates[0][0].tokens["scaled"].tolist()) == {expected}
    assert plan.tree.get("fields", {}) == ({"scaled": options} if options else {})  # as a resumed run reads it


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"scale": {}}, "fields.scale: unknown field 'scale', did you mean 'scaled'"),
        ({"scaled": {"scal": 2.0}}, "fields.scaled.scal: unknown option 'scal', did you mean 'scale'"),
        ({"scaled": {"scale": -1.0}}, "fields.scaled.scale: expected float > 0, got -1.0"),
        ({"scaled": {"scale": "a", "name": 2}}, "fields.scaled.name: expected str, got 2"),
        ({"scaled": 2.0}, "fields.scaled: expected mapping, got 2.0"),
    ],
)
def test_options_that_a_field_does_not_have_are_refused_before_a_start(tmp_path: Path, fields: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scaled_plan(tmp_path, fields)
    assert any(fault.startswith(says) for fault in caught.value.faults), caught.value.faults


def test_options_of_a_field_that_nothing_reads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fields.scaled: unknown field 'scaled'; there are none; only fields of plu"):
        make_plan(tmp_path, fields={"scaled": {}})


def test_an_undeclared_field_stays_hidden(tmp_path: Path) -> None:
    x = rlsdk.CreditInputs(
        torch.ones(1), torch.zeros(1, dtype=torch.long), torch.tensor([2]), torch.ones(2, dtype=bool)
    )
    held = x.with_extra(lateness=torch.tensor([0.0, 1.0]))
    assert held.only(("lateness",)).lateness.tolist() == [0.0, 1.0]
    assert held.replace(rewards=torch.zeros(1)).lateness.tolist() == [0.0, 1.0]
    with pytest.raises(AttributeError, match="lateness"):
        _ = held.only(()).lateness
    with pytest.raises(ValueError, match=r"lateness has shape \(3,\); expected \(2,\)"):
        x.with_extra(lateness=torch.zeros(3))


def test_an_unknown_field_is_refused_when_it_is_marked() -> None:
    with pytest.raises(PluginError, match=r"does not declare a field; mark it with @rlsdk\.field"):
        rlsdk.advantage("x", needs=(lambda batch: None,))
    with pytest.raises(PluginError, match=r"the core already has a field of this name"):
        rlsdk.field("entropy")
    with pytest.raises(PluginError, match="did you mean 'entropy'"):
        rlsdk.field("mine", needs=("entropi",))


def fails(batch: rlsdk.StepBatch) -> Any:
    raise KeyError("x")


def writes_a_field(batch: rlsdk.StepBatch) -> Any:
    centred = batch.fields["logprobs"]
    centred -= centred.mean()
    return centred


def writes_the_mask(batch: rlsdk.StepBatch) -> Any:
    batch.arrays.loss_mask[:] = True
    return np.zeros(len(batch.arrays.loss_mask))


@pytest.mark.parametrize(
    ("producer", "says"),
    [
        (lambda batch: np.zeros(1), r"gave shape \(1,\); expected \(\d+,\)"),
        (lambda batch: [[1.0], [2.0, 3.0]], r"gave a list that is not an array of numbers; expected"),
        (lambda batch: None, r"gave shape \(\); expected"),
        (lambda batch: sys.exit(3), r"failed: SystemExit: 3 "),
        (fails, r"failed: KeyError: 'x' \(.*test_declared_fields\.py, line \d+\)$"),
        (lambda batch: batch.fields["values"], r"failed: KeyError: 'values' .*; declare what .*: needs=\('values',\)"),
        (writes_a_field, r"failed: ValueError: .*read-only \(.*test_declared_fields\.py, line \d+\)"),
        (writes_the_mask, r"failed: ValueError: .*read-only \(.*test_declared_fields\.py, line \d+\)"),
    ],
)
def test_a_producer_that_is_wrong_is_named(tmp_path: Path, producer: Any, says: str) -> None:
    short = rlsdk.field("short")(producer)

    @rlsdk.advantage("reads_short", needs=(short,))
    def reads_short(x: rlsdk.CreditInputs) -> torch.Tensor:
        """Reads it."""
        return x.short

    trainer = plan_of(tmp_path, reads_short)
    with pytest.raises(RunError, match=f"field 'short': its producer {says}"):
        asyncio.run(trainer.step())


def test_a_component_that_reads_a_declared_field_is_checked_like_any_other() -> None:
    findings = check_component(late)
    assert len(findings) > 5
    assert [each for each in findings if each.outcome == "failed"] == []


async def asks_a_judge(batch: rlsdk.StepBatch) -> Any:
    _, writer = await asyncio.open_connection("127.0.0.1", 9)
    writer.close()


@pytest.mark.parametrize(
    ("producer", "outcome", "says"),
    [
        (lambda batch: batch.arrays.starts, "failed", r"'mine': its producer gave shape \(8,\); expected \(\d+,\)"),
        (lambda batch: batch.fields["entropy"], "failed", r"declare what it reads: needs=\('entropy',\)"),
        (asks_a_judge, "skipped", r"cannot be called here: .* ConnectionRefusedError"),
    ],
)
def test_the_check_of_a_component_calls_the_functions_of_its_fields(producer: Any, outcome: str, says: str) -> None:
    @rlsdk.advantage("reads_mine", needs=(rlsdk.field("mine")(producer),))
    def reads_mine(x: rlsdk.CreditInputs) -> torch.Tensor:
        """Reads it."""
        return x.rewards

    (finding,) = [each for each in check_component(reads_mine) if each.rule == "fields-produced"]
    assert finding.outcome == outcome
    assert re.search(says, finding.reason or str(finding.fault))
