"""Parts of an algorithm that several trainers share."""

from __future__ import annotations

from typing import Any


def kl_penalty(
    coefficient: float, estimator: Any, target: float | None = None, horizon: int = 10000
) -> list[dict[str, Any]]:
    """Return the shapings that a KL in the reward is, whose coefficient follows a target if there is one."""
    if not coefficient or estimator is None:
        return []
    found = {"use": "kl_penalty", "coef": coefficient, "estimator": estimator}
    return [{**found, "target": target, "horizon": horizon} if target else found]


def overlong(max_length: int, buffer: int | None, penalty: float) -> list[dict[str, Any]]:
    """Return the shapings that DAPO's penalty of long answers is."""
    return [{"use": "overlong", "max_length": max_length, "buffer": buffer, "penalty": penalty}]
