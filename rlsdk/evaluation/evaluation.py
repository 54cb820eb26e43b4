"""Evaluation on held-out tasks: greedy, and sampled with pass@k and maj@k."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import comb
from statistics import fmean
from typing import Any

import attrs

from rlsdk.config import Plan
from rlsdk.config.schema import EvalSection
from rlsdk.contracts import Sampling
from rlsdk.contracts.rollouts import Evaluation
from rlsdk.rollout.chat import RolloutContext
from rlsdk.rollout.generator import Observer, RolloutGenerator
from rlsdk.rollout.stream import opened
from rlsdk.runlog.serialization import exchange
from rlsdk.scoring.outcome import check_budget, unscored
from rlsdk.scoring.scorer import Scorer
from rlsdk.types import Group, Score, Task

_SHOWN = 3
"""Sample answers of an evaluation that are shown."""


@attrs.frozen
class Answers:
    """Groups of an evaluation: sampled answers to each task and, unless `eval.greedy` is false, a greedy one."""

    greedy: tuple[Group, ...]
    sampled: tuple[Group, ...]

    def check_scores(self, limit: float, when: str) -> None:
        """Raise if too many answers could not be scored.

        Raises:
            ScoringError: The share is greater; the message names tasks and causes.
        """
        check_budget((*self.greedy, *self.sampled), limit, when)

    def unscored(self) -> Answers:
        """Return the answers with invalid scores, for a run without a reward."""
        none = Score.invalid("the run has no reward")

        def without(groups: Sequence[Group]) -> tuple[Group, ...]:
            return tuple(attrs.evolve(group, scores=[none] * len(group.scores)) for group in groups)

        return Answers(without(self.greedy), without(self.sampled))


def held_out(plan: Plan) -> list[Task]:
    """Return the held-out tasks of a plan, source after source."""
    sources, limit = [opened(source, plan.plugins) for source in plan.tasks_eval], plan.config.eval.limit
    return [tasks[i] for tasks in sources for i in range(min(len(tasks), limit or len(tasks)))]


def evaluator_of(plan: Plan, scorer: Scorer | None, observer: Observer | None = None) -> RolloutGenerator:
    """Return the generator of a plan's evaluation: it samples the policy even if training imitates demonstrations."""
    workflow, config = plan.plugins.resolve(plan.eval_workflow), plan.config
    return RolloutGenerator(workflow, scorer, config.seed if config.sampling.seeds == "request" else None, observer)


Produce = Callable[[Sequence[Task], Sampling, int, str], Awaitable[list[Group]]]
"""Function that creates groups from tasks, sampling parameters, the number of rollouts per task, and a name."""


def produced_by(generator: RolloutGenerator, context: RolloutContext) -> Produce:
    """Return a function that creates groups with a generator; it replaces the sampling parameters of the context."""

    async def produce(tasks: Sequence[Task], sampling: Sampling, size: int, key: str) -> list[Group]:
        return await generator.produce(tasks, attrs.evolve(context, sampling=sampling), size, key)

    return produce


async def evaluate(
    produce: Produce, tasks: Sequence[Task], sampling: Sampling, section: EvalSection, *, reseed: Any
) -> Answers:
    """Let the policy answer held-out tasks.

    Args:
        produce: Makes the groups.
        tasks: Held-out tasks.
        sampling: Sampling parameters of training; temperature, top-p and top-k are replaced.
        section: Number, length and sampling parameters of the answers.
        reseed: Awaited before each pass, so that evaluations are reproducible.
    """
    plain = attrs.evolve(sampling, top_p=1.0, top_k=0, max_tokens=section.max_tokens or sampling.max_tokens)
    greedy: Sequence[Group] = ()
    if section.greedy:
        await reseed()
        greedy = await produce(tasks, attrs.evolve(plain, temperature=0.0), 1, "eval greedy")
    await reseed()
    drawn = attrs.evolve(plain, temperature=section.temperature, top_p=section.top_p, top_k=section.top_k)
    sampled = await produce(tasks, drawn, section.samples, "eval sampled")
    return Answers(tuple(greedy), tuple(sampled))


def evaluation_of(answers: Answers, samples: int, *, scored: bool = True) -> Evaluation:
    """Compute accuracy and metrics of an evaluation."""
    answers = answers if scored else answers.unscored()
    accuracy, metrics = _metrics(answers.greedy, answers.sampled, samples)
    for source, (plainly, drawn) in by_source(answers.greedy, answers.sampled).items():
        metrics |= {f"{source}/{name}": value for name, value in _metrics(plainly, drawn, samples)[1].items()}
    named = {f"eval/{name}": value for name, value in metrics.items()}
    shown = tuple(_shown(g) for g in answers.sampled[:_SHOWN])
    return Evaluation(accuracy, named, shown, greedy=answers.greedy, sampled=answers.sampled)


def by_source(*batches: Sequence[Group]) -> dict[str, tuple[list[Group], ...]]:
    """Split groups by task source; empty if there is only one source."""
    sources = sorted({group.task.source for batch in batches for group in batch})
    if len(sources) < 2:
        return {}
    return {source: tuple([g for g in batch if g.task.source == source] for batch in batches) for source in sources}


def _metrics(
    greedy: Sequence[Group], sampled: Sequence[Group], samples: int
) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Return accuracies, and all metrics: also rewards, lengths, number of invalid trajectories, workflow metrics.

    Those of greedy answers are left out if there are none (`eval.greedy`).
    """
    right = [_right(group) for group in sampled]
    answering = {group.task.source for group in sampled if any(score.answer for score in group.scores)}
    votes = [_votes(group) for group in sampled if group.task.source in answering]
    accuracy = {
        **({"greedy": _mean([r for group in greedy for r in _right(group)])} if greedy else {}),
        "sampled": _mean([r for group in right for r in group]),
    }
    every: dict[str, float | None] = {}
    k = 2
    while k <= samples:
        enough = [g for g in right if len(g) >= k]
        accuracy[f"pass@{k}"] = _mean([pass_at(k, len(g), sum(g)) for g in enough])
        every[f"all@{k}"] = _mean([all_at(k, len(g), sum(g)) for g in enough])
        if votes:
            every[f"maj@{k}"] = _mean([maj_at(k, each) for each in votes if len(each) >= k])
        k *= 2
    rewards = {
        f"{name}_reward": _mean([fmean([s.value for s in scores]) for scores in scored_trajectories(groups)])
        for name, groups in (("greedy", greedy), ("sampled", sampled))
        if groups or name == "sampled"
    }
    invalid = sum(len(unscored(group)) for group in (*greedy, *sampled))
    return accuracy, {
        **accuracy,
        **every,
        **rewards,
        "invalid": float(invalid),
        **lengths(sampled),
        **measured(sampled),
    }


def lengths(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean number of sampled tokens per rollout and the share of truncated rollouts; empty without any."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    return {
        "length": fmean([int(rollout.loss_mask.sum()) for rollout in rollouts]),
        "truncated": fmean([rollout.status == "truncated" for rollout in rollouts]),
    }


def _right(group: Group) -> list[bool]:
    """Return, for each answer of a group that could be scored, True if it is right."""
    return [is_correct(scores[-1]) for scores in scored_trajectories([group])]


def _votes(group: Group) -> list[str | bool]:
    """Return what each answer of a group that could be scored votes for: True, its text, or False for none.

    All right answers are the same vote, however they are spelled.
    """
    lasts = [scores[-1] for scores in scored_trajectories([group])]
    return [is_correct(score) or score.answer or False for score in lasts]


def is_correct(score: Score) -> bool:
    """Return True if an answer is right: by its reward's metric `correct`, or else by a value of at least 1."""
    return score.valid and bool(score.metrics.get("correct", score.value >= 1.0))


def measured(groups: Sequence[Group]) -> dict[str, float]:
    """Average the metrics of workflows, each as `workflow/NAME`, over the trajectories that have it."""
    found = trajectory_means([[group.rollouts[i].metrics for i in t] for group in groups for t in group.trajectories])
    return {f"workflow/{name}": value for name, value in found.items()}


def scored_trajectories(groups: Sequence[Group]) -> list[list[Score]]:
    """Return the scores, by step, of each trajectory whose scores are all valid."""
    return [[group.scores[i] for i in trajectory] for group in groups for trajectory in group.scored_trajectories]


def trajectory_means(trajectories: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """Average metrics over the trajectories that have them, each represented by the mean of its rollouts."""
    names = sorted({name for rollouts in trajectories for metrics in rollouts for name in metrics})
    found = {name: [[m[name] for m in rollouts if name in m] for rollouts in trajectories] for name in names}
    return {name: _plain_mean([_plain_mean(values) for values in votes if values]) for name, votes in found.items()}


def _plain_mean(values: Sequence[float]) -> float:
    """Return the mean; NaN for infinities of both signs, which `fmean` rejects."""
    return sum(values) / len(values)


def pass_at(k: int, n: int, correct: int) -> float:
    """Unbiased estimate that one of `k` samples is right, from `n` samples (Chen et al., arXiv:2107.03374, eq. 1)."""
    return 1.0 - comb(n - correct, k) / comb(n, k)


def all_at(k: int, n: int, correct: int) -> float:
    """Unbiased estimate that all of `k` samples are right, from `n` samples (pass^k; Yao et al., arXiv:2406.12045)."""
    return comb(correct, k) / comb(n, k)


def maj_at(k: int, votes: Sequence[str | bool]) -> float:
    """Estimate the share of `k` samples whose most frequent answer is right (self-consistency, arXiv:2203.11171).

    It is the mean over consecutive blocks of `k` samples. Of several answers with most votes, each counts in part.

    Args:
        k: Number of samples that vote, at most as many as there are.
        votes: Vote of each sample: True if it is right, False for none, or the text of a wrong answer.
    """
    blocks = [votes[start : start + k] for start in range(0, len(votes) - k + 1, k)]
    return fmean([_majority([vote for vote in block if vote is not False]) for block in blocks])


def _majority(votes: Sequence[str | bool]) -> float:
    """Return the share of the right answer among those with most votes."""
    counts = Counter(votes)
    most = max(counts.values(), default=0)
    first = [vote for vote, count in counts.items() if count == most]
    return float(True in first) / len(first) if first else 0.0


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean; None for an empty sequence."""
    return fmean(values) if values else None


def _shown(group: Group) -> dict[str, Any]:
    prompt, response = exchange(group.rollouts[0])
    return {
        "prompt": prompt[-300:],
        "response": response[-300:],
        "reward": group.scores[0].value if group.scores[0].valid else None,
        "correct": is_correct(group.scores[0]) if group.scores[0].valid else None,
    }
