"""Explain why a trainer's numbers differ from rlsdk's, for known causes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import attrs
import numpy as np

from rlsdk.config import Plan
from rlsdk.replay.computed import ComputedBatch
from rlsdk.replay.dump import Dump
from rlsdk.replay.objectives import (
    MODES,
    Bounds,
    Formula,
    Normalisation,
    Tokens,
    bounds_of,
    contrast,
    formulas_of,
    kl_estimates,
    nice,
    normalisation_of,
)
from rlsdk.schedules import at

_SHIFTED = {"advantages": "advantages", "token losses": "losses", "gradient": "gradient"}


class Reasons:
    """Compare recorded numbers with the results of other choices."""

    def __init__(self, dump: Dump, found: ComputedBatch, plan: Plan, tolerance: float) -> None:
        self._dump, self._found, self._plan, self._tolerance = dump, found, plan, tolerance
        self._tokens = Tokens(mask=found.mask, segments=found.segments, groups=found.batch.groups, width=dump.width)

    def of(self, stage: str, ours: np.ndarray, theirs: np.ndarray) -> str:
        """Explain why a stage differs; empty if unknown."""
        recognisers = {
            "logprobs": self._logprobs,
            "advantages": self._advantages,
            "ratios": self._ratios,
            "token losses": self._token_losses,
            "gradient": self._gradient,
        }
        return recognisers[stage](ours, theirs) or self._multiple(ours, theirs)

    def shifted(self, stage: str) -> str:
        """Report recorded values shifted by one token relative to the mask; empty if they are not."""
        rows = self._dump.tokens.get(_SHIFTED.get(stage, ""))
        if rows is None:
            return ""
        for by, text in (
            (1, "one token late: the first token of each response has none"),
            (-1, "one token early: the last token has none"),
        ):
            if self._all_shifted(rows, by):
                return f"mask off by one: theirs is nonzero {text}"
        return ""

    def _all_shifted(self, rows: tuple[np.ndarray, ...], by: int) -> bool:
        seen = 0
        for row, mask in zip(rows, self._dump.masks, strict=True):
            nonzero = np.abs(row) > 0
            if not nonzero.any():
                continue
            plane = np.zeros(len(row) + 2, bool)
            plane[1 + by : 1 + by + min(len(mask), len(row))] = mask[: len(row)]
            if not np.array_equal(nonzero, plane[1:-1]):
                return False
            seen += 1
        return seen > 0

    # --- rewards and advantages

    def rewards(self) -> str:
        """Explain why the reward from which advantages were computed is not the score."""
        scores, rewards = self._dump.scores, self._dump.rewards
        tokens = self._dump.tokens
        assert rewards is not None
        old = tokens.get("old_logprobs", tokens.get("behaviour_logprobs"))
        if old is not None and "ref_logprobs" in tokens:
            terms = [
                {name: float(kl[m].sum()) for name, kl in kl_estimates(o[: len(m)], r[: len(m)]).items()}
                for o, r, m in zip(old, tokens["ref_logprobs"], self._dump.masks, strict=True)
            ]
            for name in ("k1", "k3", "k2"):
                kl = np.array([each[name] for each in terms])
                fitted = self._coefficient(scores - rewards, kl)
                if fitted is not None:
                    return f"KL in the reward: theirs is the score minus {fitted:g} × the KL to the reference ({name})"
        order, groups = self._found.order, self._found.batch.groups
        segments = np.arange(len(order))
        every = np.ones(len(order), bool)
        fits = formulas_of(rewards[order], scores[order], groups, segments, every, self._tolerance)
        return f"theirs are already normalised: {fits[0]}" if fits else ""

    @staticmethod
    def _coefficient(difference: np.ndarray, term: np.ndarray) -> float | None:
        """Return the common coefficient with which a term explains a difference."""
        some = np.isfinite(difference) & np.isfinite(term)
        square = float(term[some] @ term[some])
        if not square:
            return None
        fitted = float(difference[some] @ term[some]) / square
        usual = nice(fitted, 2e-2)
        off = np.abs(difference[some] - fitted * term[some]).max()
        # rlsdk computes in float32: next to a loss of about 1, a small term has few digits left.
        return usual if usual is not None and off <= max(1e-3 * np.abs(difference[some]).max(), 5e-7) else None

    def _advantages(self, ours: np.ndarray, theirs: np.ndarray) -> str:
        found = self._found
        mine = self._formulas(ours, self._dump.scores)
        candidates = {"": self._dump.scores}
        if self._dump.rewards is not None:
            candidates[" (of the reward with the KL penalty, or as recorded)"] = self._dump.rewards
        for label, rewards in candidates.items():
            fits = self._formulas(theirs, rewards)
            if fits:
                how = contrast(fits[0], mine[0]) if mine else ""
                return f"{how + '. ' if how else ''}Theirs: {fits[0]}{label}{_or_else(fits)}"
        count = len(self._dump)
        for size in (size for size in range(2, count + 1) if count % size == 0):
            groups = (found.order // size).astype(np.int64)
            fits = self._formulas(theirs, self._dump.scores, np.unique(groups, return_inverse=True)[1])
            if fits:
                return f"theirs has groups of {size} consecutive rollouts (--group-size {size}): {fits[0]}"
        return ""

    def _formulas(self, values: np.ndarray, rewards: np.ndarray, groups: np.ndarray | None = None) -> list[Formula]:
        found = self._found
        within = found.batch.groups if groups is None else groups
        return formulas_of(values, rewards[found.order], within, found.segments, found.mask, self._tolerance)

    # --- logprobs, ratios, losses

    def _logprobs(self, ours: np.ndarray, theirs: np.ndarray) -> str:
        same = self._found.segments[1:] == self._found.segments[:-1]
        both = same & self._found.mask[1:] & self._found.mask[:-1]
        for by, (x, y) in {"before": (ours[:-1], theirs[1:]), "after": (ours[1:], theirs[:-1])}.items():
            if both.any() and np.abs(x - y)[both].max() <= 1e-2:
                return f"off by one: theirs are those of the token {by}"
        return ""

    def _ratios(self, ours: np.ndarray, theirs: np.ndarray) -> str:
        found, recorded = self._found, self._found.recorded
        if "logprobs" in recorded and "behaviour_logprobs" in recorded:
            other = np.exp(recorded["logprobs"] - recorded["behaviour_logprobs"])
            if self._close(other, theirs):
                return "theirs are relative to the sampler's logprobs, not the old policy's"
        n = len(found.order)
        counts = np.bincount(found.segments, found.mask, minlength=n)
        means = np.bincount(found.segments, np.where(found.mask, np.log(ours), 0.0), minlength=n) / np.maximum(
            counts, 1
        )
        if self._close(np.exp(means)[found.segments], theirs):
            return "theirs is one ratio per rollout: the geometric mean over its tokens"
        return ""

    def _token_losses(self, ours: np.ndarray, theirs: np.ndarray) -> str:
        found = self._found
        mask = found.mask
        advantages = found.recorded.get("advantages", found.advantages)
        assert found.ratios is not None and found.losses is not None
        given = advantages[mask], found.ratios[mask]
        bounds = [bounds_of(each[mask], *given, self._tolerance) for each in (theirs, found.losses)]
        if bounds[0] is not None and bounds[1] is not None and (text := _bounds_differ(bounds[0], bounds[1], *given)):
            return text
        logprobs = found.recorded.get("logprobs", found.batch.fields["logprobs"].astype(np.float64))
        if self._close(-advantages * logprobs, theirs):
            return "theirs has no ratio: -A × the logprob"
        for name, kl in self._kls().items():
            coefficient = self._coefficient((theirs - found.losses)[mask], kl[mask])
            if coefficient is not None:
                term = f"{coefficient:g} × the KL to the reference ({name})"
                return f"KL in the loss: theirs has {term} in each token's loss"
        return ""

    def _kls(self) -> Mapping[str, np.ndarray]:
        recorded = self._found.recorded
        if "ref_logprobs" not in recorded:
            return {}
        logprobs = recorded.get("logprobs", self._found.batch.fields["logprobs"].astype(np.float64))
        return kl_estimates(logprobs, recorded["ref_logprobs"])

    def _gradient(self, ours: np.ndarray, theirs: np.ndarray) -> str:
        for mode, text in MODES.items():
            if self._close(self.reweighed(ours, Normalisation(mode=mode)), theirs, relative=True):
                return f"theirs belongs to another sum: {text}"
        return ""

    def loss(self, theirs: float) -> str:
        """Explain how a recorded loss was computed from per-token losses."""
        known = self.normalisation
        if known is None:
            return ""
        same = known.mode == self._plan.loss.aggregate
        return f"{known}" if same else f"{known}; rlsdk's is {self._plan.loss.aggregate}"

    @cached_property
    def normalisation(self) -> Normalisation | None:
        """How the recorded loss was computed; None if unknown."""
        found, theirs = self._found, self._dump.numbers.get("loss")
        if theirs is None or found.losses is None or found.ratios is None:
            return None
        recorded = found.recorded.get("losses")
        advantages = found.recorded.get("advantages", found.advantages)
        return normalisation_of(
            theirs,
            np.where(found.mask, found.losses if recorded is None else recorded, 0.0),
            self._tokens,
            10 * self._tolerance,
            kls=self._kls(),
            surrogate=None if recorded is not None else (np.where(found.mask, advantages, 0.0), found.ratios),
        )

    def by_mode(self, losses: np.ndarray) -> dict[str, float]:
        """Return the loss in every known normalisation."""
        return {mode: float(self._tokens.weights(mode) @ losses) for mode in MODES}

    def reweighed(self, gradient: np.ndarray, known: Normalisation) -> np.ndarray:
        """Return a gradient with respect to logprobs under another normalisation."""
        mode, norm = self._plan.loss.aggregate, at(self._plan.loss.norm, 0)
        own = self._tokens.weights(mode) if mode in MODES else self._tokens.weights("seq-mean-token-sum") / norm
        other = self._tokens.without(known.mask).weights(known.mode)
        found: np.ndarray = gradient * other / np.where(own > 0, own, 1.0)
        return found

    def _close(self, x: np.ndarray, y: np.ndarray, *, relative: bool = False) -> bool:
        mask = self._found.mask
        scale = max(float(np.abs(y[mask]).max()), 1e-12) if relative else np.maximum(1, np.abs(y[mask]))
        return bool((np.abs(x - y)[mask] <= 10 * self._tolerance * scale).all())

    def _multiple(self, ours: np.ndarray, theirs: np.ndarray) -> str:
        mask = self._found.mask
        square = float(ours[mask] @ ours[mask])
        factor = float(ours[mask] @ theirs[mask]) / square if square else 0.0
        if abs(factor) < 1e-6 or abs(factor - 1) < 1e-3 or not self._close(factor * ours, theirs, relative=True):
            return ""
        return "theirs has the opposite sign" if abs(factor + 1) < 1e-4 else f"theirs is {factor:.4g} times rlsdk's"


def _or_else(fits: Sequence[Formula]) -> str:
    """Name another formula with the same numbers, if the batch cannot tell them apart."""
    first = attrs.evolve(fits[0], epsilon=0.0)
    other = next((each for each in fits[1:] if attrs.evolve(each, epsilon=0.0) != first), None)
    return "" if other is None else f" (or {other}, which is the same on this batch)"


def _bounds_differ(theirs: Bounds, ours: Bounds, advantages: np.ndarray, ratios: np.ndarray) -> str:
    differences = []
    for side, name, shown in (
        ("high", "upper", advantages > 0),
        ("low", "lower", advantages < 0),
        ("dual", "dual", advantages < 0),
    ):
        a, b = getattr(theirs, side), getattr(ours, side)
        if a is not None and (b is None or abs(a - b) > 1e-4):
            own = "clips nothing there" if b is None else f"at {b:.4g}"
            differences.append(f"theirs has its {name} clip bound at {a:.4g}, rlsdk {own}")
        elif a is None and b is not None and shown.any():
            edge = ratios[shown].max() if side != "low" else ratios[shown].min()
            differences.append(f"theirs does not clip where rlsdk's {name} bound is {b:.4g} (ratios go to {edge:.4g})")
    return f"clip bounds: {'; '.join(differences)}" if differences else ""
