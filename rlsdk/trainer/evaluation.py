"""Evaluation on held-out tasks: greedy, and sampled at temperature 1 with pass@k."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import Any

import attrs

from rlsdk.config import Plan
from rlsdk.config.schema import EvalSection
from rlsdk.plugins import load
from rlsdk.rollout.chat import Setting
from rlsdk.rollout.producer import Observer, Producer
from rlsdk.rollout.stream import opened
from rlsdk.runlog.rollouts import prompt_text
from rlsdk.scoring.scorer import Scorer
from rlsdk.types import Group, Rollout, Score, Task


@attrs.frozen
class Evaluation:
    """What one evaluation found.

    Attributes:
        accuracy: `greedy`, `sampled`, and `pass@k` for each k asked for.
        metrics: The same, the mean rewards, and what the workflow measured in sampled answers, under `eval/`; of
            several sources also each one's, `eval/SOURCE/`.
        samples: A few sampled answers, for a person.
    """

    accuracy: dict[str, float]
    metrics: dict[str, float]
    samples: tuple[dict[str, Any], ...]


@attrs.frozen
class Answers:
    """The groups of an evaluation: one greedy answer to each task, and several sampled at temperature 1."""

    greedy: tuple[Group, ...]
    sampled: tuple[Group, ...]


def held_out(plan: Plan) -> list[Task]:
    """The tasks that a plan evaluates on, those of several sources behind each other."""
    sources, limit = [opened(source, plan.plugins) for source in plan.tasks_eval], plan.config.eval.limit
    return [tasks[i] for tasks in sources for i in range(min(len(tasks), limit or len(tasks)))]


def evaluator_of(plan: Plan, scorer: Scorer | None, observer: Observer | None = None) -> Producer:
    """What runs a plan's evaluation: always the policy, also where training imitates demonstrations."""
    workflow = plan.plugins.resolve(plan.workflow) if plan.sampled else load("workflow", "single_turn")
    config = plan.config
    return Producer(workflow, scorer, config.seed if config.sampling.seeds == "request" else None, observer)


async def evaluate(
    producer: Producer, tasks: Sequence[Task], setting: Setting, section: EvalSection, *, reseed: Any
) -> Answers:
    """Have the policy answer held-out tasks.

    Args:
        producer: Runs the workflow and scores.
        tasks: Held-out tasks.
        setting: Of the training; temperature, top-p and top-k are replaced.
        section: How many sampled answers, and how long.
        reseed: Awaited before each pass, so that evaluations repeat.
    """
    plain = attrs.evolve(
        setting.sampling, top_p=1.0, top_k=0, max_tokens=section.max_tokens or setting.sampling.max_tokens
    )
    await reseed()
    greedy = await producer.produce(
        tasks, attrs.evolve(setting, sampling=attrs.evolve(plain, temperature=0.0)), 1, "eval greedy"
    )
    await reseed()
    sampled = await producer.produce(
        tasks, attrs.evolve(setting, sampling=attrs.evolve(plain, temperature=1.0)), section.samples, "eval sampled"
    )
    return Answers(tuple(greedy), tuple(sampled))


def figures(answers: Answers, samples: int, *, show: int = 3) -> Evaluation:
    """What an evaluation found.

    Args:
        answers: The groups.
        samples: Sampled answers per task.
        show: How many samples to keep for a person.
    """
    accuracy, metrics = _found(answers.greedy, answers.sampled, samples)
    for source, (plainly, drawn) in by_source(answers.greedy, answers.sampled).items():
        metrics |= {f"{source}/{name}": value for name, value in _found(plainly, drawn, samples)[1].items()}
    named = {f"eval/{name}": value for name, value in metrics.items()}
    return Evaluation(accuracy, named, tuple(_shown(g) for g in answers.sampled[:show]))


def by_source(*batches: Sequence[Group]) -> dict[str, tuple[list[Group], ...]]:
    """Groups by the source of their tasks, if there are several; else nothing."""
    sources = sorted({group.task.source for batch in batches for group in batch})
    if len(sources) < 2:
        return {}
    return {source: tuple([g for g in batch if g.task.source == source] for batch in batches) for source in sources}


def _found(
    greedy: Sequence[Group], sampled: Sequence[Group], samples: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Accuracy, and the same with mean rewards and the workflow's metrics."""
    right = [[is_correct(s) for s in ends(g)] for g in sampled]
    accuracy = {
        "greedy": _mean([is_correct(s) for g in greedy for s in ends(g)]),
        "sampled": _mean([r for group in right for r in group]),
    }
    k = 2
    while k <= samples:
        accuracy[f"pass@{k}"] = _mean([pass_at(k, len(g), sum(g)) for g in right])
        k *= 2
    rewards = {"greedy_reward": _reward(greedy), "sampled_reward": _reward(sampled)}
    return accuracy, {**accuracy, **rewards, **measured([r for g in sampled for r in g.rollouts])}


def is_correct(score: Score) -> bool:
    """Whether an answer counts as right: its reward says so by the metric `correct`, else its value reaches 1."""
    return score.valid and bool(score.metrics.get("correct", score.value >= 1.0))


def measured(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The means of what workflows measured, each as `workflow/NAME`."""
    names = sorted({name for r in rollouts for name in r.metrics})
    return {f"workflow/{n}": _mean([r.metrics[n] for r in rollouts if n in r.metrics]) for n in names}


def ends(group: Group) -> list[Score]:
    """The scores of a group's trajectories: of several rollouts of one, the last step's; any other is one by itself."""
    last: dict[str, tuple[int, Score]] = {}
    for i, (rollout, score) in enumerate(zip(group.rollouts, group.scores, strict=True)):
        label = rollout.trajectory or f"\0{i}"
        if label not in last or rollout.step >= last[label][0]:
            last[label] = (rollout.step, score)
    return [score for _, score in last.values()]


def pass_at(k: int, n: int, correct: int) -> float:
    """Unbiased estimate that one of `k` samples is right, from `n` samples (Chen et al., arXiv:2107.03374, eq. 1)."""
    return 1.0 - comb(n - correct, k) / comb(n, k)


def _mean(values: Sequence[float]) -> float:
    return float(sum(values) / len(values)) if values else 0.0


def _reward(groups: Sequence[Group]) -> float:
    return _mean([s.value for g in groups for s in g.scores if s.valid])


def _shown(group: Group) -> dict[str, Any]:
    return {
        "prompt": prompt_text(group.task)[-300:],
        "response": group.rollouts[0].response[-300:],
        "reward": group.scores[0].value,
        "correct": is_correct(group.scores[0]),
    }
