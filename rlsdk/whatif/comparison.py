"""Compare both sides of a what-if, step by step: rewards, trained groups, signs of advantages, gradients."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from rlsdk.config import Plan
from rlsdk.contracts import ScoredAtEnd
from rlsdk.runlog.serialization import prompt_text
from rlsdk.scoring.actors import reward_terms
from rlsdk.scoring.scorer import Scorer
from rlsdk.types import Group, Rollout, Score
from rlsdk.whatif.question import WhatIfQuestion, credit_faults
from rlsdk.whatif.side import Credited, Side, Store, StoredStep

if TYPE_CHECKING:
    from rlsdk.whatif.gradients import Gradients

REPRODUCED = 1e-4
"""Maximum difference at which the run's configuration counts as reproducing its stored advantages."""
MOST_GROUPS = 50
"""Maximum number of groups to list whose verdict changes."""
_TEXT = 160
"""Maximum number of characters of prompts and responses in examples."""


@attrs.frozen(eq=False)
class Moments:
    """Sums over pairs of numbers, for mean change and correlation; the sums of parts can be added.

    Attributes:
        sums: count, Σx, Σy, Σx², Σy², Σxy, Σ|y − x|.
    """

    sums: np.ndarray = attrs.field(factory=lambda: np.zeros(7))

    @classmethod
    def of(cls, before: Sequence[float] | np.ndarray, after: Sequence[float] | np.ndarray) -> Moments:
        """Return the sums of pairs."""
        x, y = np.asarray(before, np.float64), np.asarray(after, np.float64)
        return cls(np.array([len(x), x.sum(), y.sum(), x @ x, y @ y, x @ y, np.abs(y - x).sum()]))

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.sums + other.sums)

    def as_json(self) -> dict[str, Any]:
        """Return means, mean absolute change and correlation; null if undefined."""
        count, x, y, xx, yy, xy, change = (float(value) for value in self.sums)
        if not count:
            return {"count": 0, "before": None, "after": None, "mean_change": None, "correlation": None}
        spread = (xx - x * x / count) * (yy - y * y / count)
        together = xy - x * y / count
        return {
            "count": int(count),
            "before": x / count,
            "after": y / count,
            "mean_change": change / count,
            # Rounding can leave the interval: the sums are large where the numbers differ little.
            "correlation": max(-1.0, min(1.0, together / spread**0.5))
            if spread > 1e-18 * max(xx * yy, 1e-300)
            else None,
        }


@attrs.frozen(kw_only=True, eq=False)
class StepResult:
    """One step, before and after the changes.

    Attributes:
        step: Number of the step, from 1; 0 for all steps together.
        groups: Number of stored groups.
        trained: Numbers of groups trained before and after, by only one side, and with a learning signal.
        rewards: Rewards of rollouts that are valid on both sides.
        advantages: Advantages of the sampled tokens; 0 for a rollout that is not trained.
        signs: Numbers of tokens whose advantage changes sign, becomes 0, or is no longer 0.
        invalid: Reasons for invalid scores after the changes, with their counts.
        cosine: Cosine of the two gradients, and their norms; empty without a checkpoint.
    """

    step: int
    groups: int = 0
    trained: Counter[str] = attrs.field(factory=Counter)
    rewards: Moments = attrs.field(factory=Moments)
    advantages: Moments = attrs.field(factory=Moments)
    signs: Counter[str] = attrs.field(factory=Counter)
    invalid: Counter[str] = attrs.field(factory=Counter)
    cosine: Mapping[str, float | None] = attrs.field(factory=dict)

    def __add__(self, other: StepResult) -> StepResult:
        return StepResult(
            step=0,
            groups=self.groups + other.groups,
            trained=self.trained + other.trained,
            rewards=self.rewards + other.rewards,
            advantages=self.advantages + other.advantages,
            signs=self.signs + other.signs,
            invalid=self.invalid + other.invalid,
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {
            "groups": self.groups,
            "trained": {name: self.trained[name] for name in ("before", "after", "gained", "lost")},
            "teaching": {"before": self.trained["teaching_before"], "after": self.trained["teaching_after"]},
            "rewards": self.rewards.as_json(),
            "advantages": self.advantages.as_json(),
            "tokens": int(self.advantages.sums[0]),
            "sign_changes": self.signs["opposite"],
            "became_zero": self.signs["became_zero"],
            "became_nonzero": self.signs["became_nonzero"],
            "invalid": dict(self.invalid.most_common(5)),
            "cosine": self.cosine.get("cosine"),
            "gradient_norms": {"before": self.cosine.get("before"), "after": self.cosine.get("after")},
        }


class Comparison:
    """A what-if over the stored steps of a run."""

    def __init__(
        self,
        run: Path,
        asked: WhatIfQuestion,
        *,
        gradients: Gradients | None = None,
        examples: int = 5,
    ) -> None:
        """Prepare both sides; the `examples` rollouts whose reward changed most are shown."""
        self._store, self._asked, self._gradients = Store(run), asked, gradients
        stored = self._store.steps()
        steps = asked.before.config.steps or max(stored, default=1)
        forward = None if gradients is None else gradients.forward
        computable = not credit_faults(asked.before, model=gradients is not None)
        self._before = Side(asked.before, train_steps=steps, forward=forward, computable=computable)
        self._after = Side(asked.after, train_steps=steps, forward=forward)
        self._at_end = scored_at_end(asked.before)
        self._most = examples
        self._examples: list[tuple[float, dict[str, Any]]] = []
        self._changed: list[dict[str, Any]] = []
        self._notes: dict[str, None] = {}

    async def run(self, first: int | None = None, last: int | None = None) -> dict[str, Any]:
        """Compare the stored steps within bounds, and return plain JSON."""
        after = self._asked.after  # no reward of it needs an actor
        scorer = Scorer(reward_terms(after), after.config.scoring) if self._asked.scores_again else None
        results: list[StepResult] = []
        with nullcontext() if scorer is None else closing(scorer):
            for number in self._store.steps(first, last):
                step = self._store.read(number)
                groups = [each.group for each in step.groups]
                rescored = groups if scorer is None else await scored_again(scorer, groups, at_end=self._at_end)
                results.append(await self._step(step, rescored))
        whole = sum(results, StepResult(step=0))
        if self._gradients is not None:
            whole = attrs.evolve(whole, cosine=self._gradients.whole())
        if len(self._changed) > MOST_GROUPS:
            self._notes[f"{MOST_GROUPS} of {len(self._changed)} groups with a different outcome are listed"] = None
        examples = sorted(self._examples, key=lambda each: -each[0])
        return {
            **whole.as_json(),
            "changes": {path: {"before": old, "after": new} for path, (old, new) in self._asked.changes.items()},
            "scored_again": self._asked.scores_again,
            "steps": [{"step": each.step, **each.as_json()} for each in results],
            "changed_groups": self._changed[:MOST_GROUPS],
            "examples": [example for _, example in examples[: self._most]],
            "notes": list(self._notes),
        }

    async def _step(self, step: StoredStep, rescored: Sequence[Group]) -> StepResult:
        stored = step.groups
        for text in step.unreadable:
            self._notes[f"left out: {text}"] = None
        verdicts = [self._before.verdict(each.group) for each in stored]
        # The run's actual verdict is known and overrides what its filters say now.
        ran = [
            v if each.state == "trained" else attrs.evolve(v, group=None)
            for v, each in zip(verdicts, stored, strict=True)
        ]
        before = await self._before.credited(step.step, ran, stored, keep=True)
        after = await self._after.credited(step.step, [self._after.verdict(g) for g in rescored], stored, keep=False)
        self._note(step, rescored, before.deviation)
        signs, advantages = _tokens(stored, before, after)
        trained = _trained(before, after)
        self._list_changed(step, before, after)
        self._list_examples(step, rescored)
        cosine = {} if self._gradients is None else self._gradients.compare(before.batch, after.batch, step.step - 1)
        return StepResult(
            step=step.step,
            groups=len(stored),
            trained=trained,
            rewards=_rewards(stored_groups=[each.group for each in stored], rescored=rescored),
            advantages=advantages,
            signs=signs,
            invalid=Counter(s.reason for group in rescored for s in group.scores if not s.valid),
            cosine=cosine,
        )

    def _note(self, step: StoredStep, rescored: Sequence[Group], deviation: float) -> None:
        if deviation > REPRODUCED:
            self._notes[
                f"step {step.step}: the run's configuration does not reproduce its stored advantages (difference up "
                f"to {deviation:.2g}); the stored ones are used"
            ] = None
        if any(each.uses > 1 for each in step.groups):
            self._notes["some groups were trained several times: each counts in the step that trained it last"] = None
        if any(any(v is None for v in values) for e in step.groups for values in e.learned.values()):
            self._notes["rollouts that the run did not train have no learner logprobs: the engine's are used"] = None
        count = sum(len(group) for group in rescored)
        invalid = sum(not score.valid for group in rescored for score in group.scores)
        limit = self._asked.after.config.max_invalid
        if self._asked.scores_again and invalid > limit * count:
            self._notes[
                f"step {step.step}: {invalid} of {count} rollouts could not be scored, more than max_invalid={limit:g} "
                "allows: the run would have ended here"
            ] = None

    def _list_changed(self, step: StoredStep, before: Credited, after: Credited) -> None:
        for stored, old, new in zip(step.groups, before.verdicts, after.verdicts, strict=True):
            if (old.group is None) != (new.group is None) or bool(old.reason) != bool(new.reason):
                self._changed.append(
                    {
                        "step": step.step,
                        "group": stored.number,
                        "task": stored.group.task.id,
                        "before": _fate(old.group is not None, old.reason, stored.state),
                        "after": _fate(new.group is not None, new.reason, "filtered"),
                    }
                )

    def _list_examples(self, step: StoredStep, rescored: Sequence[Group]) -> None:
        for stored, group in zip(step.groups, rescored, strict=True):
            for i, (rollout, old, new) in enumerate(
                zip(group.rollouts, stored.group.scores, group.scores, strict=True)
            ):
                change = abs(new.value - old.value) if old.valid and new.valid else float(old.valid != new.valid)
                if change > 0:
                    example = {
                        "step": step.step,
                        "group": stored.number,
                        "rollout": i,
                        "task": rollout.task.id,
                        "before": old.value if old.valid else None,
                        "after": new.value if new.valid else None,
                        "reason": new.reason,
                        "prompt": prompt_text(rollout.task)[-_TEXT:],
                        "response": rollout.response[:_TEXT],
                    }
                    self._examples.append((change, example))
        self._examples = sorted(self._examples, key=lambda each: -each[0])[: self._most]


def _fate(trained: bool, reason: str, state: str) -> str:
    return f"trained{f', but {reason}' if reason else ''}" if trained else f"{state}: {reason}" if reason else state


def _rewards(stored_groups: Sequence[Group], rescored: Sequence[Group]) -> Moments:
    pairs = [
        (old.value, new.value)
        for before, after in zip(stored_groups, rescored, strict=True)
        for old, new in zip(before.scores, after.scores, strict=True)
        if old.valid and new.valid
    ]
    return Moments.of(*zip(*pairs, strict=True)) if pairs else Moments()


def _trained(before: Credited, after: Credited) -> Counter[str]:
    pairs = list(zip(before.verdicts, after.verdicts, strict=True))
    return Counter(
        before=sum(old.group is not None for old, _ in pairs),
        after=sum(new.group is not None for _, new in pairs),
        gained=sum(old.group is None and new.group is not None for old, new in pairs),
        lost=sum(old.group is not None and new.group is None for old, new in pairs),
        teaching_before=sum(old.group is not None and not old.reason for old, _ in pairs),
        teaching_after=sum(new.group is not None and not new.reason for _, new in pairs),
    )


def _tokens(stored: Sequence[Any], before: Credited, after: Credited) -> tuple[Counter[str], Moments]:
    """Compare the advantages of all sampled tokens of a step."""
    signs: Counter[str] = Counter()
    moments = Moments()
    for each in stored:
        for rollout in each.group.rollouts:
            mask, nothing = rollout.loss_mask, np.zeros(len(rollout.token_ids), np.float32)
            old = before.advantages.get(id(rollout), nothing)[mask].astype(np.float64)
            new = after.advantages.get(id(rollout), nothing)[mask].astype(np.float64)
            signs["opposite"] += int(np.count_nonzero(old * new < 0))
            signs["became_zero"] += int(np.count_nonzero((old != 0) & (new == 0)))
            signs["became_nonzero"] += int(np.count_nonzero((old == 0) & (new != 0)))
            moments = moments + Moments.of(old, new)
    return signs, moments


def scored_at_end(plan: Plan) -> bool:
    """Return whether only the last rollout is scored, for the whole trajectory."""
    workflow = plan.plugins.resolve(plan.workflow)
    return isinstance(workflow, ScoredAtEnd) and workflow.scored_at_end


async def scored_again(scorer: Scorer, groups: Sequence[Group], *, at_end: bool) -> list[Group]:
    """Return groups with new scores; rollouts that failed or were stopped keep theirs.

    `at_end`: only the last rollout is scored, for the whole trajectory.
    """
    return await asyncio.gather(*(_scored(scorer, group, at_end) for group in groups))


async def _scored(scorer: Scorer, group: Group, at_end: bool) -> Group:
    judged_by = {i: (each[-1] if at_end else i) for each in group.trajectories for i in each}
    whole = sorted({last for i, last in judged_by.items() if _scorable(group.rollouts[last])})
    found = await scorer.score_group([group.rollouts[i] for i in whole])
    new = dict(zip(whole, found, strict=True))
    scores = [_of_member(group, i, judged_by[i], new) for i in range(len(group))]
    return attrs.evolve(group, scores=scores)


def _scorable(rollout: Rollout) -> bool:
    return rollout.status in ("finished", "truncated")


def _of_member(group: Group, member: int, judged_by: int, new: dict[int, Score]) -> Score:
    score = new.get(judged_by)
    if score is None or not _scorable(group.rollouts[member]):
        return group.scores[member]
    # Token rewards of the last rollout refer to positions that do not exist in the others.
    return score if member == judged_by else attrs.evolve(score, token_rewards=None, shared=True)
