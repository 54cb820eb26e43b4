"""Identify how a trainer computed its advantages and losses: formulas, clip bounds, KL terms, and token weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import attrs
import numpy as np

CENTRES = {
    "group": "the group's mean",
    "others": "the mean of the group's other rollouts",
    "batch": "the batch's mean",
    "none": "nothing",
}
SCALES = {
    "none": "nothing",
    "group": "the group's standard deviation",
    "batch": "the batch's standard deviation",
}
EPSILONS = (1e-6, 1e-8, 1e-4, 1e-5, 1e-3, 0.0)
AFTERS = {
    "none": "",
    "tokens": "whitened over the batch's tokens",
    "rollouts": "whitened over the batch's rollouts",
}
_WHITEN_EPSILON = 1e-8


@attrs.frozen(kw_only=True)
class Formula:
    """`(reward - centre) / (scale + epsilon)`, optionally whitened.

    Attributes:
        centre: Key of `CENTRES`.
        scale: Key of `SCALES`.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        epsilon: Added to the standard deviation.
        after: Key of `AFTERS`.
    """

    centre: str = "group"
    scale: str = "none"
    ddof: int = 1
    epsilon: float = 0.0
    after: str = "none"

    def __str__(self) -> str:
        text = "the reward" if self.centre == "none" else f"the reward minus {CENTRES[self.centre]}"
        if self.scale != "none":
            text += f", divided by {SCALES[self.scale]} (ddof {self.ddof}) + {self.epsilon:g}"
        return f"{text}, {AFTERS[self.after]}" if AFTERS[self.after] else text

    def values(self, rewards: np.ndarray, groups: np.ndarray, segments: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return the advantages of all tokens.

        Args:
            rewards: float64 `[n]`.
            groups: int64 `[n]`, dense.
            segments: int64 `[t]`, rollout of each token.
            mask: bool `[t]`.
        """
        plain = (rewards - self._centre(rewards, groups)) / self._divisor(rewards, groups)
        if self.after == "rollouts":
            plain = _whitened(plain, np.ones(len(plain), bool))
        values = np.where(mask, plain[segments], 0.0)
        return _whitened(values, mask) if self.after == "tokens" else values

    def _centre(self, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray | float:
        if self.centre in ("none", "batch"):
            return 0.0 if self.centre == "none" else float(rewards.mean())
        count, total = np.bincount(groups)[groups], np.bincount(groups, rewards)[groups]
        others: np.ndarray = (total - rewards) / np.maximum(count - 1, 1)
        return np.where(count > 1, others, rewards) if self.centre == "others" else total / count

    def _divisor(self, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray | float:
        if self.scale == "none":
            return 1.0
        within = groups if self.scale == "group" else np.zeros_like(groups)
        count = np.bincount(within)[within]
        squares = (rewards - np.bincount(within, rewards)[within] / count) ** 2
        std = np.sqrt(np.bincount(within, squares)[within] / np.maximum(count - self.ddof, 1)) + self.epsilon
        return np.where(std > 0, std, 1.0)


def _whitened(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    chosen = values[mask]
    variance = chosen.var(ddof=1) if len(chosen) > 1 else 0.0
    return np.where(mask, (values - chosen.mean()) / np.sqrt(variance + _WHITEN_EPSILON), 0.0)


def formulas() -> Iterator[Formula]:
    """Yield the known formulas, simplest first."""
    for after in AFTERS:
        yield from (Formula(centre=centre, after=after) for centre in CENTRES)
        for centre, scale, ddof, epsilon in itertools.product(CENTRES, ("group", "batch"), (1, 0), EPSILONS):
            yield Formula(centre=centre, scale=scale, ddof=ddof, epsilon=epsilon, after=after)


def formulas_of(
    values: np.ndarray,
    rewards: np.ndarray,
    groups: np.ndarray,
    segments: np.ndarray,
    mask: np.ndarray,
    tolerance: float,
) -> list[Formula]:
    """Return the formulas that reproduce the values, simplest first; none if all values are equal.

    Args:
        values: float64 `[t]`, recorded advantages.
        rewards: float64 `[n]`.
        groups: int64 `[n]`, dense.
        segments: int64 `[t]`.
        mask: bool `[t]`.
        tolerance: Maximum difference.
    """
    if not mask.any() or np.ptp(values[mask]) <= tolerance:
        return []
    fits: list[tuple[float, Formula]] = []
    for formula in formulas():
        off = float(np.abs(formula.values(rewards, groups, segments, mask) - values)[mask].max())
        if off <= tolerance:
            fits.append((off, formula))
    # Keep those that fit about as well as the best: recorded values were rounded to float32.
    least = min((off for off, _ in fits), default=0.0)
    return [formula for off, formula in fits if off <= max(10 * least, 1e-7)]


def contrast(theirs: Formula, ours: Formula) -> str:
    """Describe the parts in which two formulas differ."""
    differences = []
    if theirs.centre != ours.centre:
        differences.append(f"theirs subtracts {CENTRES[theirs.centre]}, rlsdk {CENTRES[ours.centre]}")
    if theirs.scale != ours.scale:
        differences.append(f"theirs divides by {SCALES[theirs.scale]}, rlsdk by {SCALES[ours.scale]}")
    elif theirs.scale != "none":
        if theirs.ddof != ours.ddof:
            names = {1: "the sample's (ddof 1)", 0: "the population's (ddof 0)"}
            differences.append(f"theirs takes {names[theirs.ddof]} standard deviation, rlsdk {names[ours.ddof]}")
        if theirs.epsilon != ours.epsilon:
            theirs_has = f"{theirs.epsilon:g}" if theirs.epsilon else "no eps"
            differences.append(f"theirs adds {theirs_has} to the standard deviation, rlsdk {ours.epsilon:g}")
    if theirs.after != ours.after:
        differences.append(
            f"theirs is {AFTERS[theirs.after] or 'not whitened'}, rlsdk's {AFTERS[ours.after] or 'not whitened'}"
        )
    return "; ".join(differences)


COEFFICIENTS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 0.01, 0.02, 0.03, 0.04, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Common coefficients of a KL term; arbitrary ones would fit any number."""
BOUNDS = (0.2, 0.28, 0.3, 0.1, 0.4, np.inf)
MODES: Mapping[str, str] = {
    "token-mean": "the mean over all tokens of the batch",
    "seq-mean-token-mean": "the mean over rollouts of the mean over their tokens",
    "seq-mean-token-sum": "the sum over tokens, divided by the number of rollouts",
    "token-sum": "the sum over all tokens",
    "padded-mean": "the sum over tokens, divided by rollouts × padded length (as if padding counted)",
    "group-mean": "the mean over groups of the mean over their tokens",
}
MASKS: Mapping[str, str] = {
    "all": "",
    "without first": "with a mask off by one: the first token of each response is missing",
    "without last": "with a mask off by one: the last token of each response is missing",
}


@attrs.frozen(kw_only=True, eq=False)
class Tokens:
    """The layout of a batch's sampled tokens, for sums over them.

    Attributes:
        mask: bool `[t]`.
        segments: int64 `[t]`, rollout of each token.
        groups: int64 `[n]`.
        width: Padded length of the responses.
    """

    mask: np.ndarray
    segments: np.ndarray
    groups: np.ndarray
    width: int

    def without(self, which: str) -> Tokens:
        """Return a copy whose mask omits the first or the last sampled token of each rollout."""
        if which == "all":
            return self
        where = np.flatnonzero(self.mask)
        owner = self.segments[where]
        edge = np.diff(owner, prepend=-1) != 0 if which == "without first" else np.diff(owner, append=-1) != 0
        mask = self.mask.copy()
        mask[where[edge]] = False
        return attrs.evolve(self, mask=mask)

    def weights(self, mode: str) -> np.ndarray:
        """Return the weight of each token, `[t]`, in the sum of a mode of `MODES`."""
        n = len(self.groups)
        counts = np.bincount(self.segments, self.mask, minlength=n)
        rollouts = max(int(np.count_nonzero(counts)), 1)
        if mode == "seq-mean-token-mean":
            weight = 1.0 / (rollouts * np.maximum(counts, 1)[self.segments])
        elif mode == "group-mean":
            by_group = np.bincount(self.groups, counts)
            weight = 1.0 / (np.count_nonzero(by_group) * np.maximum(by_group, 1)[self.groups[self.segments]])
        else:
            divisor = {
                "token-mean": max(counts.sum(), 1),
                "seq-mean-token-sum": rollouts,
                "token-sum": 1,
                "padded-mean": n * max(self.width, 1),
            }[mode]
            weight = np.full(len(self.mask), 1.0 / divisor)
        return np.where(self.mask, weight, 0.0)


@attrs.frozen(kw_only=True)
class Normalisation:
    """How a loss is computed from per-token losses.

    Attributes:
        mode: Key of `MODES`.
        mask: Key of `MASKS`.
        kl: Coefficient and estimator of a KL term; None for no term.
        clip: Lower and upper distance of the clip bounds from 1, if they differ from rlsdk's; otherwise None.
    """

    mode: str
    mask: str = "all"
    kl: tuple[float, str] | None = None
    clip: tuple[float, float] | None = None

    def __str__(self) -> str:
        text = f"theirs is {MODES[self.mode]}"
        if MASKS[self.mask]:
            text += f", {MASKS[self.mask]}"
        if self.kl is not None:
            text += f", with {self.kl[0]:g} × the KL to the reference ({self.kl[1]}) in the loss"
        if self.clip is not None:
            text += f", with ratios clipped {described_bounds(*self.clip)}"
        return text


def described_bounds(low: float, high: float) -> str:
    """Describe clip bounds of ratios."""
    ends = ["" if np.isinf(low) else f"below {1 - low:g}", "" if np.isinf(high) else f"above {1 + high:g}"]
    return " and ".join(filter(None, ends)) or "nowhere"


def clipped_losses(advantages: np.ndarray, ratios: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return clipped surrogate losses: `max(-A·r, -A·clip(r))`."""
    losses: np.ndarray = np.maximum(-advantages * ratios, -advantages * np.clip(ratios, 1 - low, 1 + high))
    return losses


def kl_estimates(logprobs: np.ndarray, reference: np.ndarray) -> dict[str, np.ndarray]:
    """Return the three common per-token KL estimates (http://joschu.net/blog/kl-approx.html)."""
    difference = logprobs - reference
    return {"k3": np.expm1(-difference) + difference, "k1": difference, "k2": difference**2 / 2}


def nice(coefficient: float, precision: float = 1e-3) -> float | None:
    """Return the common coefficient close to a fitted one; None if there is none."""
    return next((c for c in COEFFICIENTS if abs(coefficient - c) <= precision * c), None)


def normalisation_of(
    theirs: float,
    losses: np.ndarray,
    tokens: Tokens,
    tolerance: float,
    *,
    kls: Mapping[str, np.ndarray],
    surrogate: tuple[np.ndarray, np.ndarray] | None,
) -> Normalisation | None:
    """Identify how a recorded loss was computed; None if no known way reproduces it.

    Args:
        theirs: The recorded loss.
        losses: Per-token losses `[t]`.
        tokens: The sampled tokens.
        tolerance: Maximum relative difference.
        kls: Estimator -> per-token KL `[t]`; empty without a reference.
        surrogate: Advantages and ratios `[t]`, to try other clip bounds; None if per-token losses are known.
    """
    size = float(np.abs(losses[tokens.mask]).mean()) if tokens.mask.any() else 0.0
    close = tolerance * max(abs(theirs), 1e-2 * size, 1e-12)
    for candidate, value in _candidates(theirs, losses, tokens, kls, surrogate):
        if abs(value - theirs) <= close:
            return candidate
    return None


def _candidates(
    theirs: float,
    losses: np.ndarray,
    tokens: Tokens,
    kls: Mapping[str, np.ndarray],
    surrogate: tuple[np.ndarray, np.ndarray] | None,
) -> Iterator[tuple[Normalisation, float]]:
    """Yield explanations with their losses, simplest first."""
    for mask in MASKS:
        chosen = tokens.without(mask)
        for mode in MODES:
            yield Normalisation(mode=mode, mask=mask), float(chosen.weights(mode) @ losses)
    for mode, (name, kl) in itertools.product(MODES, kls.items()):
        weights = tokens.weights(mode)
        base, term = float(weights @ losses), float(weights @ kl)
        coefficient = nice((theirs - base) / term) if term else None
        if coefficient is not None:
            # The term is small compared with its coefficient's rounding: a good fit counts as explained.
            yield Normalisation(mode=mode, kl=(coefficient, name)), base + coefficient * term
    if surrogate is not None:
        for mode, low, high in itertools.product(MODES, BOUNDS, BOUNDS):
            value = float(tokens.weights(mode) @ clipped_losses(*surrogate, low, high))
            yield Normalisation(mode=mode, clip=(low, high)), value


@attrs.frozen
class Bounds:
    """Clip bounds evident from per-token losses; None if no token was clipped on that side.

    Attributes:
        low: Minimum ratio that counts for a token with negative advantage.
        high: Maximum ratio that counts for a token with positive advantage.
        dual: Maximum ratio that counts for a token with negative advantage.
    """

    low: float | None
    high: float | None
    dual: float | None


def bounds_of(losses: np.ndarray, advantages: np.ndarray, ratios: np.ndarray, tolerance: float) -> Bounds | None:
    """Infer clip bounds from per-token losses; None if they are not a clipped surrogate.

    Args:
        losses: Losses of sampled tokens, float64.
        advantages: Their advantages.
        ratios: Their ratios.
        tolerance: Maximum relative difference.
    """
    some = advantages != 0
    if not some.any() or (np.abs(losses[~some]) > tolerance).any():
        return None
    charged, ratios, positive = -losses[some] / advantages[some], ratios[some], advantages[some] > 0
    off = np.abs(charged - ratios) > tolerance * np.maximum(1, ratios)
    sides = (
        off & ~positive & (charged > ratios),
        off & positive & (charged < ratios),
        off & ~positive & (charged < ratios),
    )
    if (off & ~(sides[0] | sides[1] | sides[2])).any():
        return None
    found = []
    for side in sides:
        values = charged[side]
        if len(values) and np.ptp(values) > 10 * tolerance * max(1.0, float(np.abs(values).max())):
            return None
        found.append(float(np.median(values)) if len(values) else None)
    return Bounds(*found)
