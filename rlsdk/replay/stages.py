"""Compare a dumped batch with rlsdk stage by stage, each from the trainer's inputs, and find where they diverge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from rlsdk.config import Plan
from rlsdk.replay.computed import compute
from rlsdk.replay.dump import Dump
from rlsdk.replay.objectives import Normalisation
from rlsdk.replay.reasons import Reasons
from rlsdk.schedules import at

if TYPE_CHECKING:
    from rlsdk.whatif.gradients import Gradients

TOLERANCE = 1e-5


@attrs.frozen(kw_only=True, eq=False)
class ComparedStage:
    """One stage, computed by both sides.

    Attributes:
        name: Name of the stage.
        ours: rlsdk's result, `[t]`, `[n]` or a number; None if it cannot be computed.
        theirs: The trainer's recorded result; None if it was not recorded.
        difference: Maximum absolute difference over sampled tokens; None if one side is missing.
        equal: True if both agree; None if one side is missing.
        first: First difference: rollout in the file, response token, and both values.
        reason: Why they differ; empty if unknown.
    """

    name: str
    ours: Any = None
    theirs: Any = None
    difference: float | None = None
    equal: bool | None = None
    first: Mapping[str, Any] | None = None
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON; for arrays, mean, extremes and norm."""
        return {
            "stage": self.name,
            "ours": _summary(self.ours),
            "theirs": _summary(self.theirs),
            "max_difference": self.difference,
            "equal": self.equal,
            "first": None if self.first is None else dict(self.first),
            "reason": self.reason,
        }


class Replay:
    """A dumped batch recomputed by rlsdk."""

    def __init__(
        self, dump: Dump, plan: Plan, *, tolerance: float = TOLERANCE, gradients: Gradients | None = None
    ) -> None:
        """Compute the batch.

        Args:
            dump: The batch.
            plan: Plan with the algorithm.
            tolerance: Maximum difference that counts as rounding, relative for values above 1.
            gradients: Weights of a checkpoint.
        """
        self.dump, self.plan, self.tolerance, self._gradients = dump, plan, tolerance, gradients
        self.found = compute(dump, plan, gradients)
        self.reasons = Reasons(dump, self.found, plan, tolerance)

    def result(self) -> dict[str, Any]:
        """Return everything as plain JSON."""
        stages = [each for each in self._stages() if each.ours is not None or each.theirs is not None]
        parted = next((each for each in stages if each.equal is False), None)
        found = self.found
        return {
            "framework": self.dump.framework,
            "algorithm": self.plan.tree["algorithm"],
            "rollouts": len(found.order),
            "groups": int(found.batch.groups.max()) + 1,
            "tokens": int(found.mask.sum()),
            "fields": dict(self.dump.names),
            "stages": [each.as_json() for each in stages],
            "first_difference": None if parted is None else parted.as_json(),
            "loss": self._losses(),
            "gradient": self._gradient_norms(),
            "notes": self._notes(),
        }

    def _stages(self) -> list[ComparedStage]:
        found, recorded = self.found, self.found.recorded
        stages = []
        old = recorded.get("old_logprobs")
        if self._gradients is not None and old is not None:
            modelled = self._gradients.forward(found.batch, self.plan, ["logprobs"])["logprobs"].astype(np.float64)
            stages.append(self._per_token("logprobs", modelled, old, loose=1e-3))
        stages.append(self._rewards())
        ours = found.advantages if self.dump.scored else None
        stages.append(self._per_token("advantages", ours, recorded.get("advantages")))
        if found.ratios is None or found.losses is None:
            return stages
        stages.append(self._per_token("ratios", found.ratios, recorded.get("ratios")))
        stages.append(self._per_token("token losses", self._token_losses(), recorded.get("losses")))
        stages += [self._loss(), self._per_token("gradient", found.given_gradient, recorded.get("gradient"))]
        return stages

    def _rewards(self) -> ComparedStage:
        if not self.dump.scored:
            return ComparedStage(name="rewards")
        ours, theirs = self.dump.scores, self.dump.rewards
        if theirs is None:
            return ComparedStage(name="rewards", ours=ours)
        off = np.abs(ours - theirs)
        wrong = np.flatnonzero(~(off <= self.tolerance * np.maximum(1, np.abs(theirs))))
        first = None
        if len(wrong):
            i = int(wrong[0])
            first = {"rollout": i, "token": None, "ours": float(ours[i]), "theirs": float(theirs[i])}
        reason = self.reasons.rewards() if len(wrong) else ""
        difference = float(np.nanmax(off)) if np.isfinite(off).any() else None
        return ComparedStage(
            name="rewards",
            ours=ours,
            theirs=theirs,
            difference=difference,
            equal=not len(wrong),
            first=first,
            reason=reason,
        )

    def _per_token(
        self, name: str, ours: np.ndarray | None, theirs: np.ndarray | None, *, loose: float = 0.0
    ) -> ComparedStage:
        mask = self.found.mask
        if ours is None or theirs is None:
            return ComparedStage(
                name=name, ours=None if ours is None else ours[mask], theirs=None if theirs is None else theirs[mask]
            )
        bound = max(self.tolerance, loose)
        scale = max(float(np.abs(theirs[mask]).max()), 1e-12) if name == "gradient" else np.maximum(1, np.abs(theirs))
        off = np.where(mask, np.abs(ours - theirs), 0.0)
        wrong = np.flatnonzero(~(off <= bound * scale))  # NaN, too, is a difference
        numbers = off[mask & np.isfinite(off)]
        equal, first, reason = not len(wrong), None, self.reasons.shifted(name)
        if len(wrong):
            rollout, token = self.found.place(int(wrong[0]))
            first = {
                "rollout": rollout,
                "token": token,
                "ours": float(ours[wrong[0]]),
                "theirs": float(theirs[wrong[0]]),
            }
            if not np.isfinite(ours[wrong[0]]):
                reason = reason or f"rlsdk's is {ours[wrong[0]]}: the algorithm's formula has no finite value there"
            reason = reason or self.reasons.of(name, ours, theirs)
        return ComparedStage(
            name=name,
            ours=ours[mask],
            theirs=theirs[mask],
            difference=float(numbers.max()) if len(numbers) else None,
            equal=equal and not reason,
            first=first,
            reason=reason,
        )

    def _token_losses(self) -> np.ndarray:
        """Return rlsdk's per-token losses, with the KL term if the trainer recorded them that way."""
        found, theirs = self.found, self.found.recorded.get("losses")
        assert found.losses is not None
        coefficient = at(self.plan.loss.kl_coef, 0)
        if theirs is None or found.kl is None or not coefficient:
            return found.losses
        whole = found.losses + coefficient * found.kl
        return min((found.losses, whole), key=lambda each: float(np.abs(each - theirs)[found.mask].max()))

    def _loss(self) -> ComparedStage:
        ours, theirs = self.found.given_loss, self.dump.numbers.get("loss")
        if ours is None or theirs is None:
            return ComparedStage(name="loss", ours=ours, theirs=theirs)
        difference = abs(ours - theirs)
        assert self.found.losses is not None
        size = float(np.abs(self.found.losses[self.found.mask]).mean())
        equal = difference <= 10 * self.tolerance * max(abs(theirs), 1e-2 * size)
        reason = "" if equal else self.reasons.loss(theirs)
        return ComparedStage(name="loss", ours=ours, theirs=theirs, difference=difference, equal=equal, reason=reason)

    def _losses(self) -> dict[str, Any]:
        """Return the loss in both normalisations, and in all others."""
        found = self.found
        theirs = self.dump.numbers.get("loss")
        if found.losses is None:
            return {"ours": None, "theirs": theirs, "from_their_advantages": None, "by_normalisation": {}}
        return {
            "ours": found.loss,
            "from_their_advantages": found.given_loss,
            "theirs": theirs,
            "aggregate": self.plan.loss.aggregate,
            "by_normalisation": self.reasons.by_mode(found.losses),
        }

    def _gradient_norms(self) -> dict[str, Any]:
        """Return norms and cosine of rlsdk's gradient and the trainer's, or rlsdk's in the trainer's normalisation."""
        found = self.found
        if found.gradient is None or found.given_gradient is None:
            return {}
        theirs = found.recorded.get("gradient")
        known: Normalisation | None = self.reasons.normalisation
        source = "recorded" if theirs is not None else None
        if theirs is None and known is not None and known.clip is None:
            theirs, source = self.reasons.reweighed(found.given_gradient, known), "rlsdk's, in their normalisation"
        ours = np.where(found.mask, found.gradient, 0.0)
        summary: dict[str, Any] = {"of": "logprobs", "norm": float(np.linalg.norm(ours)), "theirs": source}
        if theirs is not None:
            other = np.where(found.mask, theirs, 0.0)
            both = float(np.linalg.norm(ours) * np.linalg.norm(other))
            cosine = float(ours @ other) / both if both else None
            summary |= {"their_norm": float(np.linalg.norm(other)), "cosine": cosine}
        if "gradient_norm" in self.dump.numbers:
            summary["recorded_norm_of_weights"] = self.dump.numbers["gradient_norm"]
        if self._gradients is not None:
            summary["weights"] = self._weights()
        return summary

    def _weights(self) -> dict[str, float | None]:
        """Return the cosine and norms of weight gradients from the trainer's advantages and from rlsdk's."""
        assert self._gradients is not None
        batch = self.found.batch
        theirs = self.found.recorded.get("advantages")
        other = batch
        if theirs is not None:
            arrays = batch.arrays.with_tokens(advantages=theirs.astype(np.float32))
            other = attrs.evolve(batch, arrays=arrays)
        found = self._gradients.compare(other, batch, 0)
        return {"cosine": found["cosine"], "from_their_advantages": found["before"], "ours": found["after"]}

    def _notes(self) -> list[str]:
        notes = list(self.dump.notes)
        found, recorded = self.found, self.found.recorded
        left_out = len(self.dump) - len(found.order)
        if left_out:
            notes.append(f"{left_out} of {len(self.dump)} rollouts are left out: no reward, or no sampled token")
        if found.losses is None:
            notes.append("no logprobs were recorded: ratios, losses and gradient cannot be computed")
        elif "logprobs" not in recorded:
            notes.append("logprobs under the updated policy were not recorded: ratios are 1, as in the first update")
        if at(self.plan.loss.kl_coef, 0) and found.losses is not None and "ref_logprobs" not in recorded:
            notes.append("no reference logprobs were recorded: the loss has no KL term")
        if at(self.plan.loss.entropy_coef, 0) and found.losses is not None:
            notes.append("no entropies are recorded: the entropy bonus of the loss is left out")
        return notes


def _summary(value: Any) -> Any:
    if value is None or isinstance(value, float):
        return value
    finite = value[np.isfinite(value)]
    if not len(finite):
        return None
    return {
        "mean": float(finite.mean()),
        "least": float(finite.min()),
        "greatest": float(finite.max()),
        "norm": float(np.linalg.norm(finite)),
    }
