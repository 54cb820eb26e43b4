"""Reward rehearsal: score made-up answers to real tasks before anything starts.

It finds a reward that always raises, or returns something other than a number, within a second, before engines start
and sample a batch. An answer that is merely wrong is fine.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from functools import partial

import attrs
import numpy as np

from rlsdk.components import component_of
from rlsdk.config import Plan, defaults
from rlsdk.config.rules import longest_prompt
from rlsdk.contracts import KeepsToolObjects, RewardSpec, TriesToolObjects, batch_of
from rlsdk.errors import ConfigError, DataError, described
from rlsdk.isolation.reaper import marked_early
from rlsdk.plugins import load
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.rollout.generator import RolloutGenerator, first_error
from rlsdk.scoring.actors import reward_terms
from rlsdk.scoring.scorer import RewardTerm, Scorer
from rlsdk.serving.context import context_of
from rlsdk.testing import ScriptedPolicy
from rlsdk.types import Rollout, Task

log = logging.getLogger(__name__)
_LOOKED_AT = 32
"""Number of tasks, spread over a source, that are searched for prompts within the run's limit."""
_TRIED = 4
"""Maximum tasks per source for which answers are made up, each with another `Task.source`, such as a file."""


@attrs.frozen
class Rehearsal:
    """Result of a rehearsal that lets the run start.

    Attributes:
        notes: Why the reward, or a term of it, was not tried; `examined` adds the notes of other checks.
        warnings: Terms that failed here but may work in the run, because its workflow makes other rollouts or
            `max_invalid` is 1.
    """

    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def log(self) -> None:
        """Write the notes to the run's log."""
        for note in self.notes:
            log.info("%s", note)
        for note in self.warnings:
            log.warning("%s", note)


async def rehearse(plan: Plan, tasks: Sequence[Sequence[Task]]) -> Rehearsal:
    """Let each reward term score made-up answers to a few tasks of each source that it applies to.

    The rehearsal creates its own reward instances, so stateful rewards start the run with fresh state.

    Raises:
        ConfigError: A term could score none of the answers to a task, or a task lacks what it needs; names the term,
            the task and the cause.
    """
    if not (plan.sampled and plan.rewards and plan.config.scoring.trial):
        return Rehearsal()
    workflow = plan.plugins.component(plan.workflow)
    if workflow.rewards:
        return Rehearsal((f"the reward is not tried out before the start: workflow {workflow.name!r} gives it",))
    objects = plan.plugins.resolve(plan.workflow)
    has_objects = isinstance(objects, KeepsToolObjects) and objects.tool_classes
    if has_objects and not isinstance(objects, TriesToolObjects):
        read = ", ".join(objects.tool_classes)
        return Rehearsal((f"the reward is not tried out before the start: it may read the rollout's {read}",))
    terms = reward_terms(plan)
    parts = {"reward" if len(terms) == 1 else f"reward[{i}]": term for i, term in enumerate(terms)}
    reasons = {path: reason for path, part in parts.items() if (reason := _kept_from(part, workflow.one_answer))}
    faults: list[str] = []
    with marked_early():
        for rollouts in await _answered(plan, tasks):
            if has_objects:
                try:
                    rollouts = await _with_objects(objects, rollouts)
                except Exception as error:  # noqa: BLE001 - the user's class may raise anything
                    task = rollouts[0].task.id
                    faults.append(f"workflow: task {task!r}: {described(error)}; its rollouts would fail like this")
                    continue
            for path, part in parts.items():
                if path not in reasons and part.rule.applies(rollouts[0].task):
                    faults += await _faults(plan, path, part, rollouts)
    if faults and workflow.one_answer and plan.config.max_invalid < 1:
        raise ConfigError(faults)
    names = {path: parts[path].rule.name for path in reasons}
    skipped = (f"{path}: {names[path]!r} is not tried out before the start: {why}" for path, why in reasons.items())
    return Rehearsal(tuple(skipped), tuple(faults))


async def _with_objects(workflow: TriesToolObjects, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
    """Return the rollouts of a task with the state of new tool objects, which are closed again."""
    task = await workflow.try_objects(rollouts[0].task)
    return tuple(attrs.evolve(rollout, task=task) for rollout in rollouts)


def answers(task: Task) -> tuple[str, ...]:
    """Return made-up answers to a task: an empty one, and the reference answer in the formats that rewards expect."""
    given = str(task.answer) if isinstance(task.answer, str | int | float) else "1"
    return (
        "I do not know.",
        given,
        f"<think>Let me see.</think>\n<answer>{given}</answer>",
        f"The answer is \\boxed{{{given}}}.",
        json.dumps({"answer": given}),
    )


def _kept_from(part: RewardTerm, one_answer: bool) -> str:
    """Return why a term cannot be tried in this process; empty if it can."""
    if part.where == "actor":
        return "it runs in its own actor"
    component = component_of(part.reward)
    if component is not None and component.is_async:
        return "it is async, and may call a server"
    if component is not None and component.reads_given and not one_answer:
        return "it reads rewards that the workflow gives, and made-up answers have none"
    return ""


async def _answered(plan: Plan, sources: Sequence[Sequence[Task]]) -> list[tuple[Rollout, ...]]:
    """Return single-turn rollouts of a few tasks per source, tokenized by the run's tokenizer."""
    codec, workflow = ChatTokenizer.of(plan), load("workflow", defaults.WORKFLOW.name)
    longest, _ = longest_prompt(plan.config)
    found = []
    for tasks in sources:
        chosen: dict[str, Task] = {}
        for i in range(0, len(tasks), max(1, len(tasks) // _LOOKED_AT)):
            task = tasks[i]
            if len(chosen) < _TRIED and task.source not in chosen and 0 < len(codec.prompt(task)[1]) <= longest:
                chosen[task.source] = task
        for task in chosen.values():
            texts = answers(task)
            context = context_of(plan, codec, ScriptedPolicy(codec, partial(_next, iter(texts))))
            try:
                group = await RolloutGenerator(workflow, None, None).group(task, context, len(texts), "trial")
            except ExceptionGroup as errors:
                raise first_error(errors) from errors
            found.append(group.rollouts)
    return found


def _next(texts: Iterator[str], _: str) -> str:
    return next(texts)


async def _faults(plan: Plan, path: str, part: RewardTerm, rollouts: Sequence[Rollout]) -> list[str]:
    """Return a fault if a term can score none of the rollouts, or if a score depends on the rest of its batch.

    Raises:
        ConfigError: The task lacks what the term needs.
    """
    task = rollouts[0].task
    scorer = Scorer([attrs.evolve(part, rule=RewardSpec(part.rule.name))], plan.config.scoring)
    try:
        scores = await scorer.score_group(rollouts)
        if not any(score.valid for score in scores):  # a reward for groups is called once, and may fail occasionally
            scores = await scorer.score_group(rollouts)
        if any(score.valid for score in scores):
            return [f"{path}: {text}" for text in await _compares(part, scorer, rollouts)]
    except DataError as error:
        raise ConfigError([f"{path}: {part.rule.name!r}: {error}{_columns(task)}"]) from error
    finally:
        scorer.close()
    reference = "which has no reference answer" if task.answer is None else "its reference answer among them"
    return [
        f"{path}: {part.rule.name!r} could score none of {len(rollouts)} made-up answers to task {task.id!r}, "
        f"{reference}: {scores[0].reason}. A wrong answer should get a low score, never an error. "
        "Fix the reward (`rlsdk score` tries it on your own texts), or skip this trial: scoring.trial=false"
    ]


def _columns(task: Task) -> str:
    """Return advice on a task without an answer, which another of its columns may hold."""
    if task.answer is not None or not task.metadata:
        return ""
    names = ", ".join(map(str, task.metadata))
    return f"; the task has no answer: if one of its other columns ({names}) holds it, set columns: {{answer: …}}"


async def _compares(part: RewardTerm, scorer: Scorer, rollouts: Sequence[Rollout]) -> list[str]:
    """Return a fault if a list, which may be split, is scored differently from its items, both repeatably."""
    component = component_of(part.reward)
    if component is None or component.batch is not True or batch_of(part.reward) is not True:
        return []

    async def together() -> list[float]:
        return [score.value for score in await scorer.score_group(rollouts)]

    async def alone() -> list[float]:
        return [(await scorer.score_group([rollout]))[0].value for rollout in rollouts]

    lists, singles = [await together(), await together()], [await alone(), await alone()]
    if lists[0] != lists[1] or singles[0] != singles[1] or np.allclose(lists[0], singles[0], rtol=1e-3):
        return []
    return [
        f"{part.rule.name!r} has batch=True and gives rollouts different scores in a list ({_shown(lists[0])}) than "
        f"one by one ({_shown(singles[0])}): with batch=True, lists may be split anywhere. A reward that compares the "
        'answers to a task must be marked batch="group"; it is called once with all of them'
    ]


def _shown(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
