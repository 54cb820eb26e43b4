"""Straightforward advantages and shapings: a loop over rollouts, with a loop over tokens inside.

Each takes rollouts as `Row`s and gives one number, or one per sampled token, for each; options are the defaults.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import attrs
import torch

from rlsdk.batch import CreditInputs

TOKENS = ("values", "logprobs", "ref_logprobs", "probs_squared_sum", "token_rewards")


@attrs.frozen(eq=False)
class Row:
    """One rollout; tensors are views into the batch.

    Attributes:
        reward: Of the whole.
        group: Its group.
        length: Tokens, sampled or not.
        mask: bool `[length]`, True where the policy sampled the token.
        labels: Numbers by name.
        tokens: `[length]` by name.
        parts: Parts of the reward by name.
    """

    reward: float
    group: int
    length: int
    mask: torch.Tensor
    labels: dict[str, int]
    tokens: dict[str, torch.Tensor]
    parts: dict[str, float]

    def sampled(self, name: str) -> list[float]:
        """A per-token field, where the policy sampled."""
        return self.tokens[name][self.mask].tolist()

    def count(self) -> int:
        """Sampled tokens."""
        return int(self.mask.sum())

    def rewards(self) -> list[float]:
        """Of each sampled token."""
        if "token_rewards" in self.tokens:
            return self.sampled("token_rewards")
        return [0.0] * (self.count() - 1) + [self.reward]


def rows_of(x: CreditInputs) -> list[Row]:
    """The rollouts of a batch."""
    lengths = x.lengths.tolist()
    masks = x.loss_mask.split(lengths)
    fields = {name: getattr(x, name).split(lengths) for name in TOKENS if hasattr(x, name)}
    parts = {name: part.tolist() for name, part in x.reward_parts.items()}
    labels = {name: getattr(x, name).tolist() for name in ("sources", "trajectories", "steps", "states")}
    return [
        Row(
            reward,
            group,
            length,
            masks[i],
            {name: values[i] for name, values in labels.items()},
            {name: values[i] for name, values in fields.items()},
            {name: values[i] for name, values in parts.items()},
        )
        for i, (reward, group, length) in enumerate(zip(x.rewards.tolist(), x.groups.tolist(), lengths, strict=True))
    ]


def gathered(rows: list[Row], key: Callable[[Row], Hashable] = lambda row: row.group) -> dict[Hashable, list[Row]]:
    found = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


def std(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def relative(value: float, values: list[float], std_normalize: bool) -> float:
    if min(values) == max(values):
        return 0.0
    return (value - statistics.fmean(values)) / (std(values) + 1e-6 if std_normalize else 1.0)


def by_group(formula: Callable[[Row, list[Row]], Any]) -> Callable[[list[Row]], list[Any]]:
    def loop(rows: list[Row]) -> list[Any]:
        groups = gathered(rows)
        return [formula(row, groups[row.group]) for row in rows]

    return loop


def grpo(row: Row, group: list[Row]) -> float:
    return relative(row.reward, [r.reward for r in group], True)


def gdpo(rows: list[Row]) -> list[float]:
    groups, sums = gathered(rows), [0.0] * len(rows)
    for name in rows[0].parts:
        values = {group: [r.parts[name] for r in members] for group, members in groups.items()}
        for i, row in enumerate(rows):
            sums[i] += relative(row.parts[name], values[row.group], True)
    return [value / (std(sums) + 1e-6) for value in sums]


def rloo(row: Row, group: list[Row]) -> float:
    return row.reward - statistics.fmean(r.reward for r in group if r is not row)


def opo(row: Row, group: list[Row]) -> float:
    counts = [r.count() for r in group]
    return row.reward - sum(c * r.reward for c, r in zip(counts, group, strict=True)) / sum(counts)


def pass_at_k(row: Row, group: list[Row]) -> float:
    best = sorted((r.reward for r in group), reverse=True)
    leads = row.reward == best[0] and best[0] != best[1]
    return (best[0] - best[1]) / (std(best) + 1e-6) if leads else 0.0


def opmd(row: Row, group: list[Row]) -> float:
    return relative(row.reward, [r.reward for r in group], False)


def asymre(row: Row, group: list[Row]) -> float:
    rewards = [r.reward for r in group]
    return relative(row.reward, rewards, False) + 0.1 if len(set(rewards)) > 1 else 0.0


def length_penalty(row: Row, group: list[Row]) -> float:
    lengths = [r.length for r in group]
    spread = max(lengths) - min(lengths)
    bonus = 0.5 - (row.length - min(lengths)) / spread if spread else 0.0
    return row.reward + (bonus if row.reward >= 1 else min(bonus, 0.0))


def gpg(rows: list[Row]) -> list[float]:
    groups = gathered(rows)
    useful = sum(len(group) for group in groups.values() if len({r.reward for r in group}) > 1)
    return [len(rows) / max(useful, 1) * opmd(row, groups[row.group]) for row in rows]


def rank_penalty(rows: list[Row]) -> list[float]:
    likelihoods = {id(row): sum(row.sampled("logprobs")) for row in rows}
    groups, found = gathered(rows), []
    for row in rows:
        group = groups[row.group]
        likelier = sum(likelihoods[id(r)] > likelihoods[id(row)] for r in group)
        found.append(row.reward * (1 - 0.25 * (len(group) - likelier) / len(group)))
    return found


def reward_norm(rows: list[Row]) -> list[float]:
    rewards = [row.reward for row in rows]
    mean, deviation = statistics.fmean(rewards), std(rewards)
    return [(reward - mean) / (deviation + 1e-6) for reward in rewards]


def reinforce_plus_plus_baseline(rows: list[Row]) -> list[float]:
    groups = gathered(rows)
    values = [opmd(row, groups[row.group]) for row in rows]
    counts = [row.count() for row in rows]
    mean = sum(c * v for c, v in zip(counts, values, strict=True)) / sum(counts)
    variance = sum(c * (v - mean) ** 2 for c, v in zip(counts, values, strict=True)) / (sum(counts) - 1)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


def trajectories(rows: list[Row]) -> dict[Hashable, list[Row]]:
    return gathered(rows, lambda row: (row.group, row.labels["trajectories"]))


def between(rows: list[Row], value: Callable[[list[Row]], float], std_normalize: bool) -> list[float]:
    """Of each trajectory, against the others of its group."""
    values = {key: value(steps) for key, steps in trajectories(rows).items()}
    groups = defaultdict(list)
    for key, each in values.items():
        groups[key[0]].append(each)  # type: ignore[index]
    own = [values[row.group, row.labels["trajectories"]] for row in rows]
    return [relative(v, groups[row.group], std_normalize) for row, v in zip(rows, own, strict=True)]


def step_grpo(rows: list[Row]) -> list[float]:
    return between(rows, lambda steps: max(steps, key=lambda row: row.labels["steps"]).reward, True)


def gigpo(rows: list[Row]) -> list[float]:
    returns: dict[int, float] = {}
    for steps in trajectories(rows).values():
        later = 0.0
        for row in sorted(steps, key=lambda row: row.labels["steps"], reverse=True):
            returns[id(row)] = later = row.reward + 0.95 * later
    anchors = gathered(rows, lambda row: (row.group, row.labels["states"]))
    episodes = between(rows, lambda steps: sum(row.reward for row in steps), False)
    return [
        episode + relative(returns[id(row)], [returns[id(r)] for r in anchors[row.group, row.labels["states"]]], False)
        for row, episode in zip(rows, episodes, strict=True)
    ]


def to_go(rewards: list[float], gamma: float) -> list[float]:
    later, found = 0.0, []
    for reward in reversed(rewards):
        later = reward + gamma * later
        found.append(later)
    return found[::-1]


def whitened(values: list[list[float]]) -> torch.Tensor:
    flat = torch.tensor([v for row in values for v in row])
    return (flat - flat.mean()) / (flat.var() + 1e-8).sqrt()


def gae(rows: list[Row]) -> torch.Tensor:
    found = []
    for row in rows:
        advantage, following, own = 0.0, 0.0, []
        for reward, value in zip(reversed(row.rewards()), reversed(row.sampled("values")), strict=True):
            advantage = reward + following - value + advantage
            following = value
            own.append(advantage)
        found.append(own[::-1])
    return whitened(found)


def reinforce_plus_plus(rows: list[Row]) -> torch.Tensor:
    return whitened([to_go(row.rewards(), 1.0) for row in rows])


def remax(rows: list[Row]) -> list[list[float]]:
    return [to_go(row.rewards(), 1.0) for row in rows]  # the baseline of the benchmark's batches is 0


def segment_returns(rows: list[Row]) -> list[list[float]]:
    found = []
    for row in rows:
        mask, rewards = row.mask.tolist(), iter(row.rewards())
        earned: list[float] = []
        turn = []
        for t, sampled in enumerate(mask):
            if sampled:
                if t == 0 or not mask[t - 1]:
                    earned.append(0.0)
                earned[-1] += next(rewards)
                turn.append(len(earned) - 1)
        returns = to_go(earned, 1.0)
        found.append([returns[k] for k in turn])
    return found


def on_policy_distill(rows: list[Row]) -> list[list[float]]:
    return [(row.tokens["ref_logprobs"] - row.tokens["logprobs"])[row.mask].tolist() for row in rows]


def optimal_token_baseline(rows: list[Row]) -> list[list[float]]:
    found = []
    for group in gathered(rows).values():
        returns, weights = [], []
        for row in group:
            total, own = 0.0, []
            for logprob, squared in zip(row.sampled("logprobs"), row.sampled("probs_squared_sum"), strict=True):
                total += max(1 - 2 * math.exp(logprob) + squared, 0.0)
                own.append(total)
            weights.append(own)
            returns.append(to_go(row.rewards(), 1.0))
        baseline = []
        for j in range(max(map(len, returns))):
            there = [i for i in range(len(group)) if len(returns[i]) > j]
            total = sum(weights[i][j] for i in there)
            baseline.append(sum(weights[i][j] * returns[i][j] for i in there) / total)
        found += [[g - b for g, b in zip(own, baseline, strict=False)] for own in returns]
    return found


def kl_penalty(rows: list[Row]) -> list[list[float]]:
    found = []
    for row in rows:
        pairs = zip(row.rewards(), row.sampled("logprobs"), row.sampled("ref_logprobs"), strict=True)
        found.append([reward - 0.001 * (logprob - ref) for reward, logprob, ref in pairs])
    return found


def cosine_length(rows: list[Row]) -> list[float]:
    found = []
    for row in rows:
        right = row.reward >= 1
        short, long = (1.0, 0.5) if right else (-1.0, -0.5)
        share = (1 + math.cos(math.pi * min(row.length / 20_480, 1))) / 2
        found.append(row.reward - right + long + (short - long) * share)
    return found


LOOPS: dict[tuple[str, str], Callable[[list[Row]], Any]] = {
    ("advantage", "asymre"): by_group(asymre),
    ("advantage", "constant"): lambda rows: [1.0 for _ in rows],
    ("advantage", "gae"): gae,
    ("advantage", "gdpo"): gdpo,
    ("advantage", "gigpo"): gigpo,
    ("advantage", "gpg"): gpg,
    ("advantage", "grpo"): by_group(grpo),
    ("advantage", "on_policy_distill"): on_policy_distill,
    ("advantage", "opmd"): by_group(opmd),
    ("advantage", "opo"): by_group(opo),
    ("advantage", "optimal_token_baseline"): optimal_token_baseline,
    ("advantage", "pass_at_k"): by_group(pass_at_k),
    ("advantage", "rec"): by_group(opmd),
    ("advantage", "reinforce_plus_plus"): reinforce_plus_plus,
    ("advantage", "reinforce_plus_plus_baseline"): reinforce_plus_plus_baseline,
    ("advantage", "remax"): remax,
    ("advantage", "rloo"): by_group(rloo),
    ("advantage", "segment_returns"): segment_returns,
    ("advantage", "step_grpo"): step_grpo,
    ("shaping", "cosine_length"): cosine_length,
    ("shaping", "kl_penalty"): kl_penalty,
    ("shaping", "length_penalty"): by_group(length_penalty),
    ("shaping", "overlong"): lambda rows: [r.reward + min(max((16_384 - r.length) / 4_096, -1), 0) for r in rows],
    ("shaping", "rank_penalty"): rank_penalty,
    ("shaping", "reward_clip"): lambda rows: [min(max(row.reward, -10.0), 10.0) for row in rows],
    ("shaping", "reward_norm"): reward_norm,
}
