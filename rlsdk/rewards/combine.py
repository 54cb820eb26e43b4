"""Several rewards as one: the weighted sum, with every part still visible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rlsdk.errors import ValueFault
from rlsdk.types import Score

Part = tuple[str, float, Score]
"""(name, weight, score)."""


def combine(parts: Sequence[Part], *, last_token: int | None = None) -> Score:
    """The weighted sum of scores.

    Its metrics are `reward/NAME`, the value of each part before its weight, and the parts' own; one that several
    parts report is `NAME/METRIC` for each of them.

    Args:
        parts: (name, weight, score) each.
        last_token: Position of the last sampled token; needed only where some parts reward single tokens and others the
            whole rollout, whose values belong there.

    Returns:
        The sum, invalid if any part is, with the name and reason of each that is.

    Raises:
        ValueFault: There is no part, or `last_token` is needed and left out.
    """
    if not parts:
        raise ValueFault("there is no score to combine; expected at least one")
    failed = [_because(name, score) for name, _, score in parts if not score.valid]
    if failed:
        return Score.invalid("; ".join(failed))
    low = [_because(name, score) if len(parts) > 1 else score.reason for name, _, score in parts if score.reason]
    return Score(
        sum(weight * score.value for _, weight, score in parts),
        metrics=_metrics(parts),
        reason="; ".join(low),
        token_rewards=_token_rewards(parts, last_token),
    )


def _because(name: str, score: Score) -> str:
    return score.reason if score.reason.startswith(f"{name}:") else f"{name}: {score.reason or 'no reason given'}"


def _metrics(parts: Sequence[Part]) -> dict[str, float]:
    reported = Counter(metric for _, _, score in parts for metric in score.metrics)
    metrics: dict[str, float] = {}
    for name, _, score in parts:
        metrics[f"reward/{name}"] = score.value
        for metric, value in score.metrics.items():
            metrics[metric if reported[metric] == 1 else f"{name}/{metric}"] = value
    return metrics


def _token_rewards(parts: Sequence[Part], last_token: int | None) -> tuple[tuple[int, float], ...] | None:
    """Rewards of tokens, those of one position added up; None where no part has any."""
    if all(score.token_rewards is None for _, _, score in parts):
        return None
    total: dict[int, float] = {}
    for name, weight, score in parts:
        pairs = score.token_rewards
        if pairs is None:
            if last_token is None:
                raise ValueFault(
                    f"{name!r} rewards the whole rollout, another part single tokens: last_token is needed"
                )
            pairs = ((last_token, score.value),)
        for position, value in pairs:
            total[position] = total.get(position, 0.0) + weight * value
    return tuple(sorted(total.items()))
