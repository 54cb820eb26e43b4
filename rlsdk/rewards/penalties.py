"""Penalties on the form of a response, to be added to a reward that judges its content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs

import rlsdk
from rlsdk.contracts import RunFacts
from rlsdk.errors import ValueFault
from rlsdk.types import Rollout, Score

Unit = Literal["tokens", "words", "characters"]

_MAX_UNITS = 200_000
"""Units at the beginning of a response to search for repetitions."""

_MAX_NGRAM = 50


def _can_bite(run: RunFacts, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Refuse a penalty that no response of the run can incur."""
    if options["unit"] == "tokens" and options["free"] >= run.longest_response:
        yield (
            "free",
            f"{options['free']}: the penalty begins above that many tokens, and no response here has more than "
            f"{run.longest_response}; use less",
        )


@rlsdk.reward("length_penalty", runs="driver", check=_can_bite)
@attrs.frozen(kw_only=True)
class LengthPenalty:
    """0 for a response of at most `free` units, decreasing linearly to `-penalty` at `limit` and beyond.

    Paper: DAPO (soft overlong punishment), arXiv:2503.14476, eq. 13, with `limit - free` for its buffer.
    Formula: `-penalty * min(1, max(0, (L - free) / (limit - free)))`.

    Attributes:
        limit: Length from which the full penalty applies.
        free: Length up to which there is no penalty.
        penalty: Maximum penalty.
        unit: Unit of length: sampled tokens, words (between white space) or characters.
    """

    limit: int
    free: int = 0
    penalty: float = 1.0
    unit: Unit = "tokens"

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.free < self.limit:
            raise ValueFault(f"free must be at least 0 and below limit; got free={self.free}, limit={self.limit}")
        _check_penalty(self.penalty)

    def __call__(self, rollout: Rollout) -> Score:
        """Score one rollout.

        Returns:
            From `-penalty` to 0, with the metric `length`; invalid if tokens are counted and the rollout has none.
        """
        units = _units(rollout, self.unit)
        if units is None:
            return _no_tokens()
        share = min(1.0, max(0.0, (len(units) - self.free) / (self.limit - self.free)))
        reason = f"{len(units)} {self.unit}" if share else ""
        return Score(0.0 - self.penalty * share, metrics={"length": float(len(units))}, reason=reason)


@rlsdk.reward("repetition_penalty", runs="driver")
@attrs.frozen(kw_only=True)
class RepetitionPenalty:
    """`-penalty` times the share of n-grams that repeat an earlier one; 0 if none does.

    A response shorter than one n-gram has no repetition. Words are compared case-insensitively.
    Source: the repetition penalty of open-r1 and TRL, after arXiv:2502.03373.
    Formula: `-penalty * (1 - different n-grams / all n-grams)`.

    Attributes:
        ngram: Number of units in an n-gram.
        penalty: Maximum penalty.
        unit: Unit of the n-grams: sampled tokens, words (between white space) or characters, for languages written
            without spaces.
    """

    ngram: int = 3
    penalty: float = 1.0
    unit: Unit = "words"

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.ngram <= _MAX_NGRAM:
            raise ValueFault(f"ngram must be from 1 to {_MAX_NGRAM}; got {self.ngram}")
        _check_penalty(self.penalty)

    def __call__(self, rollout: Rollout) -> Score:
        """Score one rollout; only the first 200,000 units count.

        Returns:
            From `-penalty` to 0, with the metric `repetition` (the share); invalid if tokens are counted and the
            rollout has none.
        """
        units = _units(rollout, self.unit)
        if units is None:
            return _no_tokens()
        share = _repeated(units[:_MAX_UNITS], self.ngram)
        reason = f"{share:.0%} of its {self.ngram}-grams are repetitions" if share else ""
        return Score(0.0 - self.penalty * share, metrics={"repetition": share}, reason=reason)


def _repeated(units: Sequence[object], size: int) -> float:
    """Return the share of n-grams that repeat an earlier one."""
    count = len(units) - size + 1
    if count < 1:
        return 0.0
    different = len(set(zip(*(units[start : start + count] for start in range(size)), strict=True)))
    return 1.0 - different / count


def _units(rollout: Rollout, unit: Unit) -> Sequence[object] | None:
    """Return the units to count; None if tokens are counted and there are none."""
    if unit == "tokens":
        sampled: list[int] = rollout.token_ids[rollout.loss_mask].tolist()
        return sampled if sampled or not rollout.response else None
    return rollout.response.lower().split() if unit == "words" else rollout.response


def _no_tokens() -> Score:
    return Score.invalid("the rollout has text but no tokens; set unit to words or characters")


def _check_penalty(penalty: float) -> None:
    if penalty <= 0:
        raise ValueFault(f"penalty must be above 0, since it is subtracted; got {penalty}")
