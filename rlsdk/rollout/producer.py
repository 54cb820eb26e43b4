"""From tasks to scored groups: every rollout runs on its own and is scored as it finishes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs

from rlsdk.errors import DataError, EngineError, OutOfRoomError, RlsdkError, WorldLostError
from rlsdk.rollout.chat import Prompt, Setting, TokenChat
from rlsdk.rollout.gate import Gate
from rlsdk.rollout.seeds import derive
from rlsdk.scoring.scorer import Scorer
from rlsdk.types import Group, Rollout, Score, Task

Observer = Callable[[Rollout, Score, int], Any]
RERUNS = 3
"""How often a rollout begins anew whose environment was lost with its worker; then it has failed."""
ABORTED = Score.invalid("it was stopped from outside")
"""Of an aborted rollout: nobody judges half an answer."""


class Producer:
    """Runs the workflow on tasks, `group_size` times each.

    `run_again` counts how often a rollout began anew, since the worker was lost that held its environment.
    """

    def __init__(
        self, workflow: Any, scorer: Scorer | None, seed: int | None, observer: Observer | None = None
    ) -> None:
        """Make one.

        Args:
            workflow: Ready to run: an object with `run`, or an async function.
            scorer: Left out, every score is 0 (demonstrations).
            seed: Of the requests; None leaves sampling to the engines' own generators.
            observer: Called with each rollout, its score and the step it is for (-1: evaluation).
        """
        self._run: Callable[[Task, TokenChat], Awaitable[Rollout | Sequence[Rollout]]] = getattr(
            workflow, "run", workflow
        )
        self._at_end = bool(getattr(workflow, "scored_at_end", False))
        self._scorer = scorer
        self._seed = seed
        self._observer = observer
        self.run_again = 0

    async def produce(
        self, tasks: Sequence[Task], setting: Setting, group_size: int, key: str, step: int = -1
    ) -> list[Group]:
        """The groups of these tasks, in their order.

        Args:
            tasks: What to solve.
            setting: Codec, engines, sampling.
            group_size: Rollouts per task.
            key: Names this batch, such as "eval greedy"; part of every seed.
            step: Trainer step that the rollouts are for.

        Raises:
            DataError: A task cannot be used.
            EngineError: Generation failed.
        """
        async with asyncio.TaskGroup() as running:
            groups = [
                running.create_task(self.group(task, setting, group_size, f"{key}/{i}", step))
                for i, task in enumerate(tasks)
            ]
        return [group.result() for group in groups]

    async def group(
        self, task: Task, setting: Setting, group_size: int, key: str, step: int = -1, before: Group | None = None
    ) -> Group:
        """The group of one task. Groups that are begun together admit their requests in that order.

        Args:
            task: What to solve.
            setting: Codec, engines, sampling.
            group_size: Rollouts.
            key: Names this group; part of every seed.
            step: Trainer step that the rollouts are for.
            before: What an attempt left that was aborted: rollouts that were whole by then stay as they are, and a
                first answer goes on from what there is of it, if the engines' gate lets it.

        Raises:
            DataError: The task cannot be used.
            EngineError: Generation failed.
        """
        prompt = Prompt(task, *setting.codec.prompt(task))
        left = before if before is not None and _one_each(before, group_size) else None
        async with asyncio.TaskGroup() as running:
            members = [
                running.create_task(self._member(prompt, setting, key, member, step, left))
                for member in range(group_size)
            ]
        pairs = [pair for member in members for pair in member.result()]
        return Group(task, tuple(rollout for rollout, _ in pairs), tuple(score for _, score in pairs))

    async def _member(
        self, prompt: Prompt, setting: Setting, group: str, member: int, step: int, before: Group | None
    ) -> list[tuple[Rollout, Score]]:
        """What one member is now: what it was, if it was whole; else made, from what there is of it."""
        if before is not None:
            rollout, score = before.rollouts[member], before.scores[member]
            if score.valid:
                return [(rollout, score)]
            if rollout.status == "aborted" and isinstance(setting.client, Gate):
                setting = attrs.evolve(setting, client=setting.client.after(rollout, member))
        return await self._one(prompt, setting, group, member, step)

    async def _one(
        self, prompt: Prompt, setting: Setting, group: str, member: int, step: int
    ) -> list[tuple[Rollout, Score]]:
        seed = None if self._seed is None else derive(self._seed, group, prompt.task.id)
        scorer = None if self._scorer is None else self._scorer.score
        for attempt in range(RERUNS + 1):
            chat = TokenChat(prompt, setting, group, seed, member=member, scorer=scorer)
            try:
                rollouts = await self._attempt(prompt.task, chat, group)
                if any(rollout.status == "aborted" for rollout in rollouts):
                    return [(rollout, ABORTED) for rollout in rollouts]
                scores = await self._scores(rollouts)
                return [self._seen(rollout, score, step) for rollout, score in zip(rollouts, scores, strict=True)]
            except WorldLostError as error:
                reason = f"{type(error).__name__}: {error}"
                self.run_again += attempt < RERUNS
            except _FailedError as error:
                if chat.status == "aborted":  # half an answer was too little for the workflow
                    return [(chat.finish(), ABORTED)]
                reason = str(error)
                break
        return [self._seen(chat.failed(), Score.invalid(f"workflow failed: {reason}"), step)]

    async def _attempt(self, task: Task, chat: TokenChat, group: str) -> Sequence[Rollout]:
        try:
            produced = await self._run(task, chat)
        except OutOfRoomError:
            produced = chat.finish()
        except (RlsdkError, asyncio.CancelledError):
            raise
        except Exception as error:
            if _from_ray(error):
                raise EngineError(f"{group}, task {task.id!r}: the engine failed: {error}") from error
            raise _FailedError(f"{type(error).__name__}: {error}") from error
        finally:
            chat.close()
        return [produced] if isinstance(produced, Rollout) else list(produced)

    async def _scores(self, rollouts: Sequence[Rollout]) -> list[Score]:
        if not self._at_end or not rollouts:
            return [await self._score(rollout) for rollout in rollouts]
        end = await self._score(rollouts[-1])
        # Its token rewards stand at positions that the others do not have.
        return [*[attrs.evolve(end, token_rewards=None)] * (len(rollouts) - 1), end]

    async def _score(self, rollout: Rollout) -> Score:
        if self._scorer is None:
            return Score(0.0)
        return await self._scorer.score(rollout)

    def _seen(self, rollout: Rollout, score: Score, step: int) -> tuple[Rollout, Score]:
        if self._observer is not None:
            self._observer(rollout, score, step)
        return rollout, score


class _FailedError(Exception):
    """The workflow raised; its rollout has failed, and the run goes on."""


def _one_each(group: Group, members: int) -> bool:
    """Whether its rollouts are those of its members, in their order; step-wise workflows give several."""
    return len(group.rollouts) == members and not any(rollout.trajectory for rollout in group.rollouts)


def _from_ray(error: BaseException) -> bool:
    return type(error).__module__.startswith("ray.") or any("ray." in c.__module__ for c in type(error).__mro__)


def first_error(error: BaseException) -> BaseException:
    """The first cause inside (nested) groups of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = next((e for e in error.exceptions if isinstance(e, DataError)), error.exceptions[0])
    return error
