"""The normalisation invariant on the real engine: splitting a batch changes the gradient by rounding only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from rlsdk.batch import AGGREGATIONS, LossInputs, Totals, aggregate
from rlsdk.contracts import LossSpec, Model, Roles, TrainBatch
from rlsdk.learners.rows import plan, read_lengths, split
from rlsdk.marks import correction, policy_loss
from rlsdk.plugins import Plugins
from tests.learners.full_gradients import gradients, keep_gradients

pytestmark = pytest.mark.stack
COUNT = 20


@policy_loss("probe", needs=("values",))
def probe(x: LossInputs) -> torch.Tensor:
    """Reads the token, its rollout and the position in the batch's own numbers."""
    gap = x.logprobs - x.old_logprobs
    return -(gap.exp() + 0.3 * x.sequence_mean(gap)) * x.advantages + 0.1 * x.values * x.logprobs


@correction("probe")
def cap(x: LossInputs) -> torch.Tensor:
    """Truncated importance weights."""
    return (x.old_logprobs - x.behaviour_logprobs).exp().clamp(max=1.05)


def make_spec(**changes: Any) -> LossSpec:
    plugins = Plugins()
    spec = LossSpec(
        policy_loss=plugins.reference("policy_loss", probe),
        correction=plugins.reference("correction", cap),
        kl=plugins.reference("kl", "k3"),
        kl_coef=0.1,
        entropy_coef=0.05,
        temperature=0.8,
        value_clip=0.5,
    )
    return attrs.evolve(spec, **changes)


@functools.cache
def _double(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")


def plain_gradients(model: Model, batch: TrainBatch, spec: LossSpec) -> dict[str, np.ndarray]:
    """Of the whole batch at once, in float64, with nothing of the learner's: full logits, one rollout at a time."""
    net = _double(model.path)
    logprobs, entropies = [], []
    offset = 0
    for length, start, response in zip(batch.lengths, batch.starts, batch.responses, strict=True):
        ids = torch.from_numpy(batch.token_ids[offset : offset + length])
        log_p = (net(ids[None]).logits[0] / spec.temperature).log_softmax(-1)[start - 1 : start - 1 + response]
        logprobs.append(log_p.gather(1, ids[start : start + response, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
        offset += length
    fields = {k: torch.from_numpy(v).double() for k, v in batch.tokens.items() if k != "returns"}
    mask, segments = (
        torch.from_numpy(batch.loss_mask),
        torch.from_numpy(np.repeat(np.arange(len(batch)), batch.responses)),
    )
    x = LossInputs(torch.cat(logprobs), loss_mask=mask, segments=segments, **fields)
    ratio = x.ref_logprobs - x.logprobs

    def reduce(values: torch.Tensor) -> torch.Tensor:
        return aggregate(values, mask, segments, spec.aggregate, norm=spec.norm)

    loss = reduce(probe(x) * cap(x).detach()) + spec.kl_coef * reduce(ratio.exp() - 1 - ratio)
    loss = loss - spec.entropy_coef * reduce(torch.cat(entropies))
    names, parameters = zip(*net.named_parameters(), strict=True)
    return {n: g.numpy() for n, g in zip(names, torch.autograd.grad(loss, parameters), strict=True)}


def distance(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Norm of the difference, in units of the norm."""
    assert found.keys() == expected.keys()
    apart = sum(float(((found[n] - e) ** 2).sum()) for n, e in expected.items())
    return (apart / sum(float((e**2).sum()) for e in expected.values())) ** 0.5


def learn(group: Any, shares: list[TrainBatch], batch: TrainBatch, role: str = "actor") -> dict[str, np.ndarray]:
    """One optimiser step with these shares; the full gradients that DeepSpeed held."""
    mask, segments = (
        torch.from_numpy(batch.loss_mask),
        torch.from_numpy(np.repeat(np.arange(len(batch)), batch.responses)),
    )
    totals = Totals.of(mask, segments)
    keep_gradients(group)
    group._call_each("update", [([(share, totals.tokens, totals.rollouts)], 0) for share in shares])
    every = gradients(group, role)
    for other in every[1:]:
        for name, gradient in every[0].items():
            np.testing.assert_array_equal(gradient, other[name])
    return every[0]


def budget(shares: list[TrainBatch], count: int, **how: Any) -> int:
    """Tokens of a micro-batch that make `count` of them on the rank that has most."""
    for tokens in range(600, 0, -1):
        if max(len(plan(read_lengths(share), tokens, **how)) for share in shares) == count:
            return tokens
    raise AssertionError(f"no budget gives {count} micro-batches")


def shared_out(batch: TrainBatch, world: int, how: str) -> list[TrainBatch]:
    if how == "balanced":
        return [batch.select(index) for index in split(read_lengths(batch), world)]
    # One rank has no rollouts, or one (the first) that is not trained on.
    idle = np.array([] if how == "no rollouts" else [0], np.int64)
    busy = np.setdiff1d(np.arange(len(batch)), idle)
    return [batch.select(busy), batch.select(idle)]


CASES = [(world, count, "balanced") for world in (1, 2) for count in (1, 3, 7)]
CASES += [(2, 3, "no rollouts"), (2, 3, "nothing trained")]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world", "count", "how"), CASES)
def test_gradients_do_not_depend_on_the_split(
    stage: int,
    world: int,
    count: int,
    how: str,
    untied: Model,
    launch: Callable[..., Any],
    make_batch: Callable[..., TrainBatch],
) -> None:
    batch, spec = make_batch(COUNT), make_spec()
    shares = shared_out(batch, world, how)
    tokens = budget(shares, count)
    group = launch(world, Roles(actor=untied), spec, zero_stage=stage, lr=0.0, micro_batch_tokens=tokens)
    assert distance(learn(group, shares, batch), plain_gradients(untied, batch, spec)) < 1e-5


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_every_aggregation(
    mode: str, tied: Model, launch: Callable[..., Any], make_batch: Callable[..., TrainBatch]
) -> None:
    batch, spec = make_batch(COUNT, seed=1), make_spec(aggregate=mode, norm=12.0)
    shares = shared_out(batch, 2, "balanced")
    group = launch(2, Roles(actor=tied), spec, zero_stage=2, lr=0.0, micro_batch_tokens=budget(shares, 3))
    assert distance(learn(group, shares, batch), plain_gradients(tied, batch, spec)) < 1e-5


@pytest.mark.parametrize(("world", "stage"), [(1, 1), (2, 3)])
def test_packed_rows(
    world: int, stage: int, tied: Model, launch: Callable[..., Any], make_batch: Callable[..., TrainBatch]
) -> None:
    batch, spec = make_batch(COUNT, seed=2), make_spec()
    shares = shared_out(batch, world, "balanced")
    tokens = budget(shares, 3, packed=True)
    group = launch(world, Roles(actor=tied), spec, zero_stage=stage, lr=0.0, micro_batch_tokens=tokens, rows="packed")
    assert distance(learn(group, shares, batch), plain_gradients(tied, batch, spec)) < 1e-5


SHARED = [(1, 1, "balanced"), (2, 2, "balanced"), (2, 3, "balanced"), (2, 3, "no rollouts")]


@pytest.mark.parametrize(
    ("world", "stage", "how", "rows"),
    [*((*case, "shared") for case in SHARED), (1, 0, "balanced", "tree"), (2, 3, "no rollouts", "tree")],
)
def test_beginnings_that_rollouts_share(
    world: int,
    stage: int,
    how: str,
    rows: str,
    tied: Model,
    launch: Callable[..., Any],
    make_grouped_batch: Callable[..., TrainBatch],
) -> None:
    batch, spec = make_grouped_batch(COUNT, seed=2), make_spec()
    shares = shared_out(batch, world, how)
    tokens = budget(shares, 3)
    group = launch(world, Roles(actor=tied), spec, zero_stage=stage, lr=0.0, micro_batch_tokens=tokens, rows=rows)
    assert distance(learn(group, shares, batch), plain_gradients(tied, batch, spec)) < 1e-5


@pytest.mark.parametrize(
    "options",
    [{"offload": "optimizer", "zero_stage": 2}, {"offload": "all", "zero_stage": 3}, {"gradient_checkpointing": True}],
    ids=str,
)
def test_what_saves_memory_changes_nothing(
    options: dict[str, Any], tied: Model, launch: Callable[..., Any], make_batch: Callable[..., TrainBatch]
) -> None:
    batch, spec = make_batch(COUNT, seed=3), make_spec()
    shares = shared_out(batch, 2, "balanced")
    group = launch(2, Roles(actor=tied), spec, lr=0.0, micro_batch_tokens=budget(shares, 3), **options)
    assert distance(learn(group, shares, batch), plain_gradients(tied, batch, spec)) < 1e-5
