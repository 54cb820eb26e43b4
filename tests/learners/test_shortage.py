"""A learner that runs out of memory halves its micro-batch once, with an unchanged gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsdk.batch import LossInputs
from rlsdk.contracts import Model, Roles, TrainBatch
from rlsdk.errors import LearnerError
from rlsdk.learners.micro_batches import MicroBatchRunner, is_shortage, with_less
from rlsdk.learners.ranks import Ranks
from rlsdk.learners.trained import PhaseTimer
from rlsdk.marks import policy_loss
from tests.learners.test_gradients import distance, learn, make_spec

Launch = Callable[..., Any]
WHOLE = 400


def test_which_errors_say_that_memory_ran_out():
    assert is_shortage(MemoryError())
    assert is_shortage(torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**60)
    assert is_shortage(failed.value)
    assert not is_shortage(RuntimeError("shapes do not match"))


def test_exact_passes_are_not_repeated_since_a_smaller_budget_changes_none_of_them():
    def fail() -> None:
        raise MemoryError

    passes = MicroBatchRunner(Ranks(0, 1, "cpu"), PhaseTimer(), "padded", 16384, 4, exact_width=512)
    with pytest.raises(LearnerError) as failed:
        with_less(passes, "the update", fail, again=lambda: pytest.fail("it is repeated"))
    said = str(failed.value)
    assert "with micro-batches of 512 tokens" in said and "alone, padded to model.max_length: lower model.max_l" in said
    assert "micro_batch_tokens" not in said


@policy_loss("short_of_memory", needs=("values",))
def short_of_memory(x: LossInputs, *, most: int = 0, where: str = "forward") -> torch.Tensor:
    """Runs out of memory, forwards or backwards, in micro-batches of more rollouts than `most`."""
    if len(x.segments.unique()) > most:
        if where == "forward":
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
        node, functions = x.logprobs.grad_fn, []
        while node is not None:
            functions.append(node)
            node = next((each for each, _ in node.next_functions if each is not None), None)

        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

        # In the midst of the pass, when the gradients of the head and of some layers are there.
        functions[len(functions) // 2].register_prehook(fail)
    return -x.logprobs * x.advantages + 0.1 * x.values * x.logprobs


def spec_of(**options: Any) -> Any:
    from rlsdk.plugins import Plugins

    return make_spec(policy_loss=Plugins().reference("policy_loss", short_of_memory, options))


def half_fits(batch: TrainBatch) -> int:
    """Rollouts of the largest micro-batch with half the budget that takes all of them."""
    from rlsdk.learners.rows import plan, read_lengths

    return max(map(len, plan(read_lengths(batch), WHOLE // 2)))


@pytest.mark.stack
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("stage", "dtype"), [(0, "tied"), (1, "tied"), (2, "tied"), (1, "bfloat")])
def test_a_halved_micro_batch_gives_the_same_gradient(
    launch: Launch, make_batch: Callable[..., TrainBatch], request: Any, stage: int, dtype: str, where: str
):
    model: Model = request.getfixturevalue(dtype)
    batch = make_batch(40)
    whole = launch(1, Roles(actor=model), spec_of(most=100), zero_stage=stage, micro_batch_tokens=WHOLE)
    expected = learn(whole, [batch], batch)
    short = launch(
        1, Roles(actor=model), spec_of(most=half_fits(batch), where=where), zero_stage=stage, micro_batch_tokens=WHOLE
    )
    assert distance(learn(short, [batch], batch), expected) < (1e-6 if dtype == "tied" else 1e-2)
    said = Path(short.logs[0]).read_text()
    assert "is halved to 200 tokens" in said
    assert "Set learner.micro_batch_tokens=200" in said


@pytest.mark.stack
def test_a_batch_that_was_added_before_a_shortage_is_added_again_and_counted_once(
    launch: Launch, make_batch: Callable[..., TrainBatch], tied: Model
):
    batch = make_batch(40)
    first, second = batch.select(np.arange(3)), batch.select(np.arange(3, 40))
    results = []
    for most in (100, half_fits(second)):
        group = launch(1, Roles(actor=tied), spec_of(most=most), lr=1e-2, eps=1e-2, micro_batch_tokens=WHOLE)
        before = group.clock()["update_flop"]
        group.forward_backward(first, batch.totals, last=False)
        group.forward_backward(second, batch.totals)
        metrics = group.optimizer_step()
        results.append((metrics, group.clock()["update_flop"] - before, group.fetch_weights(1).tensors))
    (metrics, flop, weights), (again, counted, found) = results
    assert again == pytest.approx(metrics, rel=1e-5, abs=1e-7)
    assert counted == pytest.approx(flop)
    for name, array in weights.items():
        np.testing.assert_allclose(found[name], array, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.stack
def test_a_second_shortage_says_what_to_lower(launch: Launch, make_batch: Callable[..., TrainBatch], tied: Model):
    batch = make_batch(40)
    group = launch(1, Roles(actor=tied), spec_of(most=0), micro_batch_tokens=WHOLE, fresh=True)
    with pytest.raises(LearnerError) as failed:
        group.update(batch, [np.arange(len(batch))], 0)
    said = str(failed.value)
    assert "learner rank 0 failed in update of step 1: out of memory in the update of the actor in step 1" in said
    assert "micro-batches of 200 tokens" in said
    assert "lower learner.micro_batch_tokens" in said
