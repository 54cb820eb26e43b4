"""Properties of fields that components declare with `rlsdk.field`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rlsdk.errors import RlsdkError
from rlsdk.fields import FORWARD
from rlsdk.isolation.threads import run_to_end
from rlsdk.rollout.step_batch import StepBatch, pack, produce
from rlsdk.testing import samples
from rlsdk.testing.findings import Case, NotApplicable, Violated, time_limit
from rlsdk.testing.properties.base import CREDIT, holds
from rlsdk.testing.subject import Subject
from rlsdk.types import Group, Score

SECONDS = 60.0
"""Time limit in seconds for the fields of one batch; training computes them once per step."""


def _batch(subject: Subject, responses: Sequence[str], groups: int) -> StepBatch:
    """Pack groups of equal responses; the learner's fields are those that a producer declares, in multiples of 1/8."""
    task = (*subject.tasks, *samples.TASKS)[0]
    rollouts = [samples.rollout(task, response) for response in responses]
    packed = pack([Group(task, rollouts, [Score(i / 2) for i in range(len(rollouts))])] * groups)
    assert packed is not None
    needed = sorted({name for field in subject.component.fields for name in field.needs if name in FORWARD})
    draws = np.random.default_rng(0).integers(-24, 0, (len(needed), len(packed.arrays.loss_mask)))
    return packed.with_fields(**{name: (draw / 8).astype(np.float32) for name, draw in zip(needed, draws, strict=True)})


def _batches(subject: Subject) -> Iterator[Case[StepBatch]]:
    yield Case("two groups of four rollouts", _batch(subject, samples.RESPONSES, 2))
    yield Case("one rollout of one token", _batch(subject, "4", 1))


@holds(
    "fields-produced",
    *CREDIT,
    "policy_loss",
    "correction",
    inputs=_batches,
    remedy="return one finite number per response token, in the order of batch.rollouts; name what the function reads "
    "of the learner, @rlsdk.field(…, needs=(…,)); if it reads more of a task, give one: --task '{\"prompt\": …}'",
    makes=False,
    trims=False,
    only=lambda component: bool(component.fields),
)
def fields_produced(subject: Subject, batch: StepBatch) -> None:
    """The functions of its own fields return one finite number per response token."""
    with time_limit(SECONDS):
        try:
            run_to_end(produce(batch, subject.component.fields, in_thread=False))
        except RlsdkError as error:
            if isinstance(error.__cause__, OSError):
                raise NotApplicable(f"it cannot be called here: {error}") from error
            raise Violated("raised", f"{len(batch.arrays.loss_mask)} finite numbers", str(error)) from error
