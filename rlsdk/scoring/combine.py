"""Combine several rewards by sums, products, gates and routes; each part remains visible in metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from rlsdk.contracts import RewardSpec
from rlsdk.errors import ValueFault
from rlsdk.types import REWARD_LIMIT, Score, is_reward

Scored = tuple[RewardSpec, Score | None]
"""A part and its score; None if a gate excluded it from scoring."""


def combine(parts: Sequence[Scored], *, last_token: int | None = None) -> Score:
    """Combine the scores of a rollout: the weighted sum of the summands, times the factors.

    A sum without summands is 1, so that factors alone form a product. The metrics are `reward/NAME`, the value of each
    part before range and weight, and the parts' own; a metric that several parts report becomes `NAME/METRIC` for each.

    Args:
        parts: Scored parts, in order.
        last_token: Position of the last sampled token; required if some parts reward single tokens and others the whole
            rollout, whose values are placed there.

    Returns:
        The score, invalid if any part is, with the names and reasons of invalid parts.

    Raises:
        ValueFault: There are no parts, or `last_token` is needed and missing.
    """
    if not parts:
        raise ValueFault("there is no score to combine; expected at least one")
    failed = [_because(rule.name, score) for rule, score in parts if score is not None and not score.valid]
    if failed:
        return Score.invalid("; ".join(failed))
    summands = [(rule, score) for rule, score in parts if not rule.multiply]
    factor = math.prod(_value(rule, score) for rule, score in parts if rule.multiply)
    total = sum(rule.weight * _value(rule, score) for rule, score in summands) if summands else 1.0
    value = factor * total
    if not is_reward(value):
        return Score.invalid(f"the parts combine to {value:g}, beyond ±{REWARD_LIMIT:g}")
    low = [(rule.name, score) for rule, score in parts if score is not None and score.reason]
    return Score(
        value,
        metrics=_metrics(parts),
        reason="; ".join(score.reason if len(parts) == 1 else _because(name, score) for name, score in low),
        token_rewards=_token_rewards(summands, factor, last_token),
    )


def rewards_tokens(parts: Sequence[Scored]) -> bool:
    """Return True if any part rewards single tokens."""
    return any(score is not None and score.token_rewards is not None for _, score in parts)


def _value(rule: RewardSpec, score: Score | None) -> float:
    return 0.0 if score is None else rule.mapped(score.value)


def _because(name: str, score: Score) -> str:
    return score.reason if score.reason.startswith(f"{name}:") else f"{name}: {score.reason or 'no reason given'}"


def _metrics(parts: Sequence[Scored]) -> dict[str, float]:
    if len(parts) == 1 and (only := parts[0][1]) is not None:
        return {f"reward/{parts[0][0].name}": only.value, **only.metrics}
    reported = Counter(metric for _, score in parts if score is not None for metric in score.metrics)
    metrics: dict[str, float] = {}
    for rule, score in parts:
        metrics[f"reward/{rule.name}"] = 0.0 if score is None else score.value
        for metric, value in (score.metrics if score is not None else {}).items():
            metrics[metric if reported[metric] == 1 else f"{rule.name}/{metric}"] = value
    return metrics


def _token_rewards(
    summands: Sequence[Scored], factor: float, last_token: int | None
) -> tuple[tuple[int, float], ...] | None:
    """Return the sum of all parts' token rewards by position; None if no part has any."""
    if not rewards_tokens(summands):
        return None
    total: dict[int, float] = {}
    for rule, score in summands:
        pairs = score.token_rewards if score is not None and rule.range is None else None
        if pairs is None:
            if last_token is None:
                raise ValueFault(
                    f"{rule.name!r} rewards the whole rollout, another part single tokens: last_token is needed"
                )
            pairs = ((last_token, _value(rule, score)),)
        for position, value in pairs:
            total[position] = total.get(position, 0.0) + factor * rule.weight * value
    return tuple(sorted(total.items()))
