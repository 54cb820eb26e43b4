"""Cost of advantages and shapings, in memory passes of one number per token, and compared with a plain loop.

A pass is what a function of torch that gives a new tensor takes at least: it reads a float32 `[t]`, writes another.
Ratios only, of minima over a few rounds, which others on the machine disturb least.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import rlsdk
from rlsdk.batch import Credit, CreditInputs
from tests.benchmarks.loops import LOOPS, rows_of

SHAPES = [(1024, 1024), (8192, 2048)]
FORMS = ["even", "uneven", "episodes"]
"""Rollouts of one length; of half that to half as much again; these with tool results, and rewards on tokens."""
GROUP = 16
ROUNDS = 5
LOOP_ROWS = 64
"""The loop runs over these alone, and its time is scaled to all: it is linear in them."""
BENCHMARK = "Estimators"
MOST_PASSES = 30
"""Where a float32 `[t]` does not fit into a cache, in which a pass costs next to nothing."""
CACHED_TOKENS = 2**21
LEAST_AGAINST_LOOP = 3
ALONG_TOKENS = {"gae", "reinforce_plus_plus", "remax", "segment_returns", "optimal_token_baseline", "kl_penalty"}
"""Estimators whose loop runs over tokens in Python; others' may be a few operations of torch for each rollout."""


def make_batch(rollouts: int, tokens: int, form: str) -> CreditInputs:
    g = torch.Generator().manual_seed(0)
    total = rollouts * tokens
    lengths = torch.full((rollouts,), tokens)
    if form != "even":
        # In pairs that make up for each other: as many tokens as with even lengths.
        change = torch.randint(-tokens // 2, tokens // 2, (rollouts // 2,), generator=g)
        lengths += torch.cat([change, -change])
    mask = torch.ones(total, dtype=torch.bool)
    if form == "episodes":
        mask = (torch.rand(total // 32, generator=g) < 0.8).repeat_interleave(32)
        mask[lengths.cumsum(0) - 1] = True
    rewards = torch.randint(0, 5, (rollouts,), generator=g) / 4

    def noise() -> torch.Tensor:
        return torch.rand(total, generator=g)

    logprobs = -noise()
    fields: dict[str, Any] = {}
    if form == "episodes":
        along = torch.where(mask, (noise() < 0.01).float(), 0)
        fields["token_rewards"] = along.index_add(0, lengths.cumsum(0) - 1, rewards)
        rewards = torch.segment_reduce(fields["token_rewards"], "sum", lengths=lengths)
    row = torch.arange(rollouts)
    return CreditInputs(
        rewards,
        row // GROUP,
        lengths,
        mask,
        values=noise(),
        logprobs=logprobs,
        ref_logprobs=logprobs - 0.1 * noise(),
        probs_squared_sum=noise(),
        baseline_rewards=torch.zeros(rollouts),
        sources=row % 4,
        trajectories=row // 4,
        steps=row % 4,
        states=row % 8,
        reward_parts={"right": rewards, "form": (row % 3 > 0).float()},
        reward_weights={"right": 1.0, "form": 1.0},
        **fields,
    )


def head_of(x: CreditInputs, rows: int) -> CreditInputs:
    """The first rollouts."""
    t = int(x.lengths[:rows].sum())
    n = len(x.rewards)
    tensors = {k: v for k, v in vars(x).items() if isinstance(v, torch.Tensor)}
    parts = {name: part[:rows] for name, part in x.reward_parts.items()}
    cut = {k: v[:rows] if len(v) == n else v[:t] for k, v in tensors.items()}
    return CreditInputs(**cut, reward_parts=parts, reward_weights=x.reward_weights)


def seconds(call: Callable[[], Any], rounds: int = ROUNDS) -> list[float]:
    found = []
    call()
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return found


@pytest.fixture(scope="module", params=[(*shape, form) for shape in SHAPES for form in FORMS], ids=str)
def work(request: pytest.FixtureRequest) -> Iterator[tuple[CreditInputs, CreditInputs, float]]:
    """(batch, its first rollouts, seconds of a pass)."""
    x = make_batch(*request.param)
    one = torch.rand(len(x.loss_mask))
    yield x, head_of(x, LOOP_ROWS), min(seconds(lambda: one + 1.0, 9))


def on_tokens(x: CreditInputs, found: Any) -> torch.Tensor:
    """Float `[s]`: on the sampled tokens."""
    if isinstance(found, Credit):
        found = found.advantages
    if isinstance(found, list):
        counts = x.sampled_tokens().tolist()
        spread = [v if isinstance(v, list) else [v] * c for v, c in zip(found, counts, strict=True)]
        return torch.tensor([v for row in spread for v in row])
    if len(found) == len(x.rewards):
        found = x.per_token(found)
    return found[x.loss_mask] if len(found) == len(x.loss_mask) else found


def test_every_estimator_has_a_loop() -> None:
    assert set(LOOPS) == {(kind, name) for kind in ("advantage", "shaping") for name in rlsdk.names(kind)}


@pytest.mark.parametrize(("kind", "name"), LOOPS, ids=[f"{kind}-{name}" for kind, name in LOOPS])
def test_a_few_passes_and_no_loop(
    kind: str,
    name: str,
    work: tuple[CreditInputs, CreditInputs, float],
    show: Callable[..., None],
    check: Callable[..., None],
) -> None:
    x, few, one_pass = work
    estimator, loop = rlsdk.load(kind, name), LOOPS[kind, name]
    torch.testing.assert_close(
        on_tokens(few, estimator(few)), on_tokens(few, loop(rows_of(few))), atol=2e-3, rtol=2e-3, check_dtype=False
    )
    own = seconds(lambda: estimator(x))
    plain = min(seconds(lambda: loop(rows_of(few)), 2)) * len(x.rewards) / len(few.rewards)
    passes, against_loop = min(own) / one_pass, plain / min(own)
    show(own, passes=round(passes, 2), against_loop=round(against_loop, 1), pass_seconds=round(one_pass, 5))
    if len(x.loss_mask) >= CACHED_TOKENS:
        check("passes over memory", passes, at_most=MOST_PASSES)
    if name in ALONG_TOKENS:
        check("times as fast as a loop", against_loop, at_least=LEAST_AGAINST_LOOP)
