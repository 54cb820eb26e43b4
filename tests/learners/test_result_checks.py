"""What a learner's methods return is checked, with what was expected, before the trainer computes with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rlsdk.errors import LearnerError
from rlsdk.learners.group import LearnerGroup
from tests.learners.conftest import _make_batch

BATCH = _make_batch(4)
TOKENS = len(BATCH.loss_mask)
RIGHT = np.zeros(TOKENS, np.float32)


class Answering(LearnerGroup):
    """A group of one rank, whose methods all return the same."""

    def answer_with(self, result: Any) -> Answering:
        self.result, self.stopped, self._origin = result, False, "learner 'odd/odd' of rlsdk-odd 1.0"
        self._steps = type("Steps", (), {"check_none": lambda *_: None, "take": lambda *_: None})()
        return self

    def _call_each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], what: str = "", version: int | None = None
    ) -> Any:
        return [self.result]

    def stop(self) -> None:
        self.stopped = True


def group(result: Any) -> Answering:
    return Answering([None], [], []).answer_with(result)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, "None; expected a mapping with logprobs, entropy"),
        ({"logprobs": RIGHT}, "a mapping with logprobs; expected logprobs, entropy"),
        (
            {"logprobs": RIGHT, "entropy": RIGHT[1:]},
            rf"entropy as an array of float32 \[{TOKENS - 1}\]; expected",
        ),
        ({"logprobs": RIGHT[:, None], "entropy": RIGHT}, rf"logprobs as an array of float32 \[{TOKENS}, 1\]"),
        (
            {"logprobs": list(RIGHT), "entropy": RIGHT},
            rf"logprobs as a list; expected an array of float32 \[{TOKENS}\]",
        ),
        ({"logprobs": RIGHT.astype(int), "entropy": RIGHT}, "logprobs as an array of int64"),
    ],
)
def test_forward_passes_return_one_float_per_token_and_field(result: Any, said: str) -> None:
    learner = group(result)
    with pytest.raises(LearnerError, match=f"learner 'odd/odd' of rlsdk-odd 1.0: logprobs returned {said}"):
        learner.logprobs(BATCH, fields=("logprobs", "entropy"))
    assert learner.stopped


def test_values_that_are_nan_end_the_run_and_logprobs_that_are_leave_it_to_the_update() -> None:
    found = RIGHT.copy()
    found[[1, 2]] = np.nan
    with pytest.raises(LearnerError, match=f"returned values with NaN for 2 of {TOKENS} tokens; weights or act"):
        group(found).values(BATCH)
    assert np.isnan(group({"logprobs": found}).logprobs(BATCH)["logprobs"][1])


def test_values_are_one_float_per_token() -> None:
    with pytest.raises(LearnerError, match=r"values returned values as an array of float32 \[1\]; expected"):
        group(RIGHT[:1]).values(BATCH)
    assert group(RIGHT).values(BATCH) is RIGHT


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (None, "None; expected a mapping from names of metrics to numbers"),
        ({"actor/loss": "0.5"}, "'0.5' as metric 'actor/loss'; expected a number"),
        ({"actor/loss": [0.5]}, r"\[0.5\] as metric 'actor/loss'"),
        (
            {("actor", "loss"): 0.5},
            r"a metric named \('actor', 'loss'\); expected printable text, such as 'actor/grad_norm'",
        ),
        ({"loss\n\x1b[31m": 0.5}, r"a metric named 'loss\\n\\x1b\[31m'; expected printable text"),
    ],
)
def test_metrics_are_numbers_with_names(metrics: Any, said: str) -> None:
    with pytest.raises(LearnerError, match=f"rlsdk-odd 1.0: update returned {said}"):
        group(metrics).update(BATCH, [np.arange(4)], 0)
    with pytest.raises(LearnerError, match=f"rlsdk-odd 1.0: optimizer_step returned {said}"):
        group(metrics).optimizer_step()


def test_metrics_that_are_not_finite_are_kept() -> None:
    metrics = {"actor/loss": np.float32("nan"), "actor/lr": 1}
    assert group(metrics).update(BATCH, [np.arange(4)], 0) == metrics


def test_the_canary_has_a_logprob_for_each_token_but_the_first() -> None:
    with pytest.raises(
        LearnerError, match=r"canary returned an array of float32 \[3\]; expected an array of float32 \[2\]"
    ):
        group(np.zeros(3, np.float32)).canary(np.arange(3))
