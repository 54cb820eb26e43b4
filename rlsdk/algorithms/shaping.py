"""Shaping: new rewards per rollout `[n]` or per token `[t]`, chained before the advantage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from rlsdk.algorithms import kl
from rlsdk.algorithms.packed import SampledTokens, in_order
from rlsdk.batch import EPSILON, CreditInputs, Groups, row_sums, wide
from rlsdk.contracts import RunFacts
from rlsdk.errors import ValueFault
from rlsdk.limits import Count, NonNegative
from rlsdk.marks import shaping

ESTIMATORS: dict[str, kl.Estimator] = {
    "k1": kl.k1,
    "k2": kl.k2,
    "k3": kl.k3,
    "abs": kl.absolute,
    "low_var": kl.low_var,
}
ERROR_BOUND = 0.2
HORIZON = 10_000
ASYMMETRIC = (-1.0, 3.0)
PAPER_LENGTH = 20_480
"""Longest response of DAPO's experiments."""


def _horizon_is_read(_: RunFacts, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Refuse the speed of an adaptation that does not take place."""
    if options["target"] is None and options["horizon"] != HORIZON:
        yield (
            "horizon",
            f"{options['horizon']} given, but without a target the coefficient is fixed; also give target, or leave "
            "horizon out",
        )


@shaping("kl_penalty", needs=("logprobs", "ref_logprobs"), check=_horizon_is_read)
@attrs.define(kw_only=True)
class KLPenalty:
    """KL penalty to the reference per token, with a fixed or adaptive coefficient.

    Paper: arXiv:1909.08593, §2.2 (with the adaptive controller); defaults as in TinyZero and verl.
    Formula: `r_t - β · KL_t` on every sampled token. With a `target`, after each batch of `n` rollouts `β ·= 1 +
    clip(KL / target - 1, ±0.2) · n / horizon`, KL being the mean over rollouts of the mean over their tokens.
    When to use: PPO and REINFORCE++; methods with a group baseline put the KL into the loss instead.

    Attributes:
        coef: β, or its initial value if adaptive.
        estimator: Estimator of the KL.
        target: KL that the coefficient is adapted to reach; null keeps it fixed.
        horizon: Rollouts over which the coefficient changes by at most a fifth; larger is slower.
    """

    coef: NonNegative = 0.001
    estimator: Literal["k1", "k2", "k3", "abs", "low_var"] = "k1"
    target: float | None = attrs.field(default=None)
    horizon: Count = HORIZON
    value: float = attrs.field(init=False)
    _reported: dict[str, float] = attrs.field(init=False, factory=dict)

    @target.validator
    def _positive(self, _: Any, target: float | None) -> None:
        if target is not None and target <= 0:
            raise ValueFault(f"target must be a KL above 0 to steer to, or null for a fixed coefficient; got {target}")

    def __attrs_post_init__(self) -> None:
        if self.target is not None and not self.coef:
            raise ValueFault("coef is 0, which adapting multiplies; give an initial value above 0, or no target")
        self.value = self.coef

    def __call__(self, x: CreditInputs) -> Tensor:
        """Return new rewards, `[t]`."""
        sampled = SampledTokens.of(x)
        divergence = ESTIMATORS[self.estimator](sampled.take(x.logprobs), sampled.take(x.ref_logprobs))
        rewards = sampled.put(sampled.rewards(x) - self.value * divergence)
        self._reported = {"kl": float(divergence.mean()), "coef": self.value} if len(divergence) else {}
        some = sampled.counts > 0
        if self.target is not None and bool(some.any()):
            means = (row_sums(divergence, sampled.counts) / sampled.counts)[some]
            error = min(max(float(means.mean()) / self.target - 1, -ERROR_BOUND), ERROR_BOUND)
            self.value *= 1 + error * len(means) / self.horizon
        return rewards

    def metrics(self) -> dict[str, float]:
        """Return the mean KL of the last batch's tokens, and the coefficient that it was multiplied by."""
        return self._reported

    def state(self) -> dict[str, float]:
        """Return the current coefficient; empty if it is fixed."""
        return {} if self.target is None else {"value": self.value}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a `state()`."""
        if self.target is not None:
            self.value = float(state["value"])


@shaping("reward_norm", needs=("sources",))
@attrs.define(kw_only=True)
class RewardNorm:
    """Normalise rewards within the group, the data source or the batch, before they are used.

    Source: ROLL (reward_normalization). ROLL's asym_clip has since become an alias of mean_std; here it clamps, as its
    name says.
    Formula: `mean`: `r - μ`. `mean_std`: `(r - μ) / (σ + 1e-6)`, 0 where `σ ≤ 1e-6`. `asym_clip`: the same, clamped to
    -1…3. `running`: `(r - μ) / (σ + 1e-6)` with mean and deviation of all rewards so far, including this batch.
    When to use: several sources with rewards on different scales.

    Attributes:
        by: Set that mean and standard deviation are computed over. Sources and groups have no identity across batches,
            so `running` requires `batch`.
        method: identity, mean, mean_std, asym_clip or running.
    """

    by: Literal["group", "source", "batch"] = "batch"
    method: Literal["identity", "mean", "mean_std", "asym_clip", "running"] = attrs.field(default="mean_std")
    count: int = attrs.field(init=False, default=0)
    mean: float = attrs.field(init=False, default=0.0)
    squares: float = attrs.field(init=False, default=0.0)

    @method.validator
    def _over_batch(self, _: Any, method: str) -> None:
        if method == "running" and self.by != "batch":
            raise ValueFault(f"method 'running' needs by 'batch'; got by {self.by!r}")

    def __call__(self, x: CreditInputs) -> Tensor:
        """Return new rewards, `[n]`."""
        rewards = wide(x.outcomes)
        if self.method == "identity":
            return rewards
        if self.method == "running":
            self._update(rewards)
            deviation = (self.squares / max(self.count - 1, 1)) ** 0.5
            scaled: Tensor = (rewards - self.mean) / (deviation + EPSILON)
            return scaled
        groups = Groups(
            torch.zeros_like(x.groups) if self.by == "batch" else x.groups if self.by == "group" else x.sources
        )
        if self.method == "mean":
            return groups.centred(rewards)
        scaled = torch.where(groups.std(rewards) > EPSILON, groups.centred(rewards, std_normalize=True), 0)
        return scaled.clamp(*ASYMMETRIC) if self.method == "asym_clip" else scaled

    def _update(self, rewards: Tensor) -> None:
        """Apply Chan's parallel form of Welford's update, which avoids the imprecise sum of squares."""
        new, values = len(rewards), rewards.double()
        if not new:
            return
        total = self.count + new
        gap = float(values.mean()) - self.mean
        self.squares += float(((values - values.mean()) ** 2).sum()) + gap**2 * self.count * new / total
        self.mean += gap * new / total
        self.count = total

    def state(self) -> dict[str, float]:
        """Return count, mean and squared deviations so far."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a `state()`."""
        self.count, self.mean, self.squares = int(state["count"]), float(state["mean"]), float(state["squares"])


@shaping("reward_clip", check=in_order("low", "high"))
def reward_clip(x: CreditInputs, *, low: float = -10.0, high: float = 10.0) -> Tensor:
    """Clip rewards, so that one outlier of a reward model does not dominate the batch.

    Source: ROLL (reward_clip).
    Formula: `clamp(r, low, high)`.
    When to use: reward models, which have outliers.

    Args:
        x: The batch.
        low: Minimum reward.
        high: Maximum reward.
    """
    return x.outcomes.clamp(low, high)


def _can_bite(run: RunFacts, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Refuse a penalty that no response of the run can incur, and inconsistent lengths."""
    limit, buffer = _span(options["max_length"], options["buffer"])
    if not 0 < buffer <= limit:
        yield "buffer", _BUFFER.format(limit=limit, buffer=buffer)
    elif limit - buffer >= run.longest_response:
        yield (
            "max_length",
            f"{limit:g} with a buffer of {buffer:g}: the penalty begins above {limit - buffer:g} tokens, and no "
            f"response here has more than {run.longest_response}; null takes sampling.max_tokens",
        )


@shaping("overlong", lengths=("max_length",), check=_can_bite)
def overlong(
    x: CreditInputs, *, max_length: int | None = None, buffer: int | None = None, penalty: NonNegative = 1.0
) -> Tensor:
    """Penalty that grows over the last tokens before the limit, so that answers learn to end in time.

    Paper: soft overlong punishment, DAPO, arXiv:2503.14476, eq. 13: a limit of 20,480 tokens, a buffer of 4,096.
    Formula: `r + penalty · clamp((max_length - buffer - length) / buffer, -1, 0)`, with the tokens of the response.
    When to use: answers that are truncated by the limit.

    Args:
        x: The batch.
        max_length: Length from which the full penalty applies; null uses the run's `sampling.max_tokens`, or the
            paper's limit outside of a run. With several turns, give the length of all of them together.
        buffer: Tokens before `max_length` over which the penalty grows; null uses a fifth of it, as in the paper.
        penalty: The full penalty.
    """
    limit, span = _span(max_length, buffer)
    if not 0 < span <= limit:
        raise ValueFault(f"overlong: {_BUFFER.format(limit=limit, buffer=span)}")
    rewards = wide(x.outcomes)
    return rewards + penalty * ((limit - span - x.lengths.to(rewards.dtype)) / span).clamp(-1, 0)


_BUFFER = "buffer must be above 0 and at most max_length={limit:g}; got {buffer:g}"


def _span(max_length: int | None, buffer: int | None) -> tuple[int, float]:
    """Return the limit, and the tokens before it over which the penalty grows."""
    limit = PAPER_LENGTH if max_length is None else max_length
    return limit, limit / 5 if buffer is None else buffer


@shaping("length_penalty")
def length_penalty(x: CreditInputs, *, coef: NonNegative = 1.0, passing: float = 1.0) -> Tensor:
    """Within a group, short right answers earn more and long ones less; wrong answers never gain.

    Paper: Kimi k1.5, arXiv:2501.12599, §2.3.3.
    Formula: `r + coef·λ` for a right answer, `r + coef·min(0, λ)` for a wrong one, with `λ = 0.5 - (length - shortest)
    / (longest - shortest)` in the group, 0 if all lengths are equal.
    When to use: right answers that grow longer than necessary.

    Args:
        x: The batch.
        coef: Weight.
        passing: Minimum reward of a right answer.
    """
    rewards, groups = wide(x.outcomes), Groups(x.groups)
    lengths = x.lengths.to(rewards.dtype)
    shortest = groups.min(lengths)
    spread = groups.max(lengths) - shortest
    bonus = torch.where(spread > 0, 0.5 - (lengths - shortest) / spread.clamp(min=1), 0)
    return rewards + coef * torch.where(rewards >= passing, bonus, bonus.clamp(max=0))


def _reaches_the_limit(run: RunFacts, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Refuse a reward for responses of a length that none has."""
    limit = options["max_length"]
    if options["exceeded"] is not None and limit is not None and limit > run.longest_response:
        yield (
            "exceeded",
            f"{options['exceeded']:g} is the reward from {limit} tokens (max_length), and no response here has more "
            f"than {run.longest_response}; lower max_length, or leave exceeded out",
        )


@shaping("cosine_length", lengths=("max_length",), check=_reaches_the_limit)
def cosine_length(
    x: CreditInputs,
    *,
    max_length: Count | None = None,
    right_short: float = 1.0,
    right_long: float = 0.5,
    wrong_short: float = -1.0,
    wrong_long: float = -0.5,
    exceeded: float | None = None,
    passing: float = 1.0,
) -> Tensor:
    """Right answers earn more if they are short, and wrong ones lose less if they are long: thinking pays if it helps.

    Paper: cosine reward, arXiv:2502.03373, appendix C.1; the defaults are those of open-r1 and TRL.
    Formula: `r - passing + v` for a right answer (`r ≥ passing`), `r + v` for a wrong one, so that a reward of 1 or 0
    becomes `v`, and other parts of the reward are kept. `v = long + (short - long) · (1 + cos(π · length /
    max_length)) / 2` with the values for right or wrong answers; `exceeded`, if given, from `max_length` on.
    When to use: reasoning whose length should neither explode nor collapse.

    Args:
        x: The batch.
        max_length: Tokens of the longest response; null uses the run's `sampling.max_tokens`, or 20,480 outside of a
            run. With several turns, give the length of all of them together.
        right_short: Value of a right answer of length 0.
        right_long: Value of a right answer of `max_length` tokens.
        wrong_short: Value of a wrong answer of length 0.
        wrong_long: Value of a wrong answer of `max_length` tokens.
        exceeded: Value of an answer of `max_length` tokens or more, right or wrong; null for none.
        passing: Reward that a right answer earns, apart from other parts of the reward.
    """
    limit, rewards = PAPER_LENGTH if max_length is None else max_length, wide(x.outcomes)
    right = rewards >= passing
    short, long = torch.where(right, right_short, wrong_short), torch.where(right, right_long, wrong_long)
    progress = (x.lengths.to(rewards.dtype) / limit).clamp(max=1)
    values = long + (short - long) * (1 + torch.cos(torch.pi * progress)) / 2
    if exceeded is not None:
        values = torch.where(x.lengths >= limit, exceeded, values)
    return torch.where(right, rewards - passing, rewards) + values


@shaping("rank_penalty", needs=("logprobs",))
def rank_penalty(x: CreditInputs, *, coef: NonNegative = 0.25) -> Tensor:
    """Likely answers earn less, so that rare right answers are also reinforced: counteracts GRPO's sharpening.

    Paper: unlikeliness reward, arXiv:2506.02355.
    Formula: `r · (1 - coef · (g - rank) / g)` with `g` rollouts in the group, `rank` of them likelier (by the sum
    of logprobs).
    When to use: pass@k that falls while pass@1 rises.

    Args:
        x: The batch.
        coef: Share of the reward that the likeliest answer loses.
    """
    rewards, groups = wide(x.outcomes), Groups(x.groups)
    rank, size = groups.rank(x.sequence_sum(x.logprobs)), groups.members().to(rewards.dtype)
    return rewards * (1 - coef * (size - rank) / size)
