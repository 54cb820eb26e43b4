"""Stored rollouts scored again by a plan's reward."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import attrs

from rlsdk.config import Plan
from rlsdk.contracts import ScoredAtEnd
from rlsdk.scoring.scorer import RewardTerm, Scorer
from rlsdk.types import Group, Rollout, Score


def scorer_of(plan: Plan) -> Scorer:
    """Create the scorer of a plan, none of whose rewards needs an actor; close it after use."""
    parts = [RewardTerm(each.rule, plan.plugins.resolve(each.reference), each.reference) for each in plan.rewards]
    return Scorer(parts, plan.config.scoring)


def scored_at_end(plan: Plan) -> bool:
    """Return whether the last rollout of each trajectory is scored for all of it."""
    workflow = plan.plugins.resolve(plan.workflow)
    return isinstance(workflow, ScoredAtEnd) and workflow.scored_at_end


async def scored_again(scorer: Scorer, groups: Sequence[Group], *, at_end: bool) -> list[Group]:
    """Return groups with new scores; rollouts that failed or were stopped keep theirs.

    Args:
        scorer: Scorer of the other reward.
        groups: Groups with the scores of the run.
        at_end: True if the last rollout of each trajectory is scored for all of it.
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
    # Token rewards of the last rollout refer to positions that the others do not have.
    return score if member == judged_by else attrs.evolve(score, token_rewards=None)
