"""Turn tasks into scored groups: rollouts run independently, and each is scored when it finishes.

A reward term that compares the rollouts of a group is called once the group is complete.
"""

from __future__ import annotations

import asyncio
import inspect
import reprlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import attrs

from rlsdk.contracts import ScoredAtEnd, Workflow, runs_user_code
from rlsdk.engines.checks import known_ids, outside
from rlsdk.engines.pausable import PausableClient
from rlsdk.errors import (
    ConfigError,
    DataError,
    EngineError,
    OutOfRoomError,
    RlsdkError,
    ValueFault,
    WorldLostError,
    described,
)
from rlsdk.loops import UserLoop, is_cancelled
from rlsdk.rollout.chat import Prompt, RolloutContext, TokenChat
from rlsdk.scoring.outcome import as_score
from rlsdk.scoring.scorer import Scorer, ScoringCounters
from rlsdk.seeds import derive
from rlsdk.types import Group, Rollout, Score, Task

Observer = Callable[[Rollout, Score, int], Any]
RERUNS = 3
"""Number of times that a rollout is restarted when its environment's worker dies, before it counts as failed."""
ABORTED = Score.invalid("it was aborted from outside")
"""Score of an aborted rollout: a partial answer is not scored."""
UNCOMPARED = Score.invalid("others of its group were aborted from outside before they could be compared")
"""Score of a complete rollout in an aborted group, where the reward compares rollouts."""


@attrs.frozen(eq=False, slots=False)
class _Made:
    """Rollouts of one group member, with their scores.

    Attributes:
        rollouts: One rollout, or the steps of a trajectory.
        judged: One score per rollout, or only the last rollout's, which then counts for all; a `ScoringCounters` if
            the score depends on the rest of the group.
        is_new: True if the observer has not seen it yet.
        chat: Conversation that made the rollouts; it may hold earlier rollouts of the same trajectories.
    """

    rollouts: Sequence[Rollout]
    judged: Sequence[Score | ScoringCounters]
    is_new: bool = True
    chat: TokenChat | None = None

    @cached_property
    def pairs(self) -> list[tuple[Rollout, Score]]:
        """Rollouts with their scores, once the scores are complete."""
        scores = [each for each in self.judged if isinstance(each, Score)]
        if missing := len(self.rollouts) - len(scores):
            # Token rewards of the last rollout refer to positions that the others do not have.
            scores = [*[attrs.evolve(scores[-1], token_rewards=None, shared=True)] * missing, *scores]
        paired = list(zip(self.rollouts, scores, strict=True))
        if self.chat is None:
            return paired
        found = []
        for rollout, score in paired:
            *earlier, last = self.chat.with_earlier(rollout)
            found += [(each, attrs.evolve(score, token_rewards=None, shared=True)) for each in earlier]
            found.append((last, score))
        return found


class RolloutGenerator:
    """Run the workflow on tasks, `group_size` times each.

    `run_again` counts the rollouts that were restarted because their environment's worker died.
    """

    def __init__(
        self, workflow: Any, scorer: Scorer | None, seed: int | None, observer: Observer | None = None
    ) -> None:
        """Create a generator.

        Args:
            workflow: Resolved workflow: an object with `run`, or an async function.
            scorer: Scorer of the rollouts; None to sum the rewards that the workflow gave (demonstrations).
            seed: Seed of the requests; None leaves sampling to the engines' own generators.
            observer: Called with each rollout, its score and the step it is for (-1: evaluation).
        """
        self._run: Callable[[Task, TokenChat], Awaitable[Rollout | Sequence[Rollout]]] = (
            workflow.run if isinstance(workflow, Workflow) else workflow
        )
        self._users = runs_user_code(workflow)
        self._at_end = isinstance(workflow, ScoredAtEnd) and workflow.scored_at_end
        self._scorer = scorer
        self._comparing = scorer if isinstance(scorer, Scorer) and scorer.comparing else None
        self._seed = seed
        self._observer = observer
        self.run_again = 0

    async def produce(self, tasks: Sequence[Task], context: RolloutContext, group_size: int, key: str) -> list[Group]:
        """Return the groups of these tasks, in order; `key` names them together, such as "eval greedy"."""
        async with asyncio.TaskGroup() as running:
            groups = [
                running.create_task(self.group(task, context, group_size, f"{key}/{i}")) for i, task in enumerate(tasks)
            ]
        return [group.result() for group in groups]

    async def group(
        self,
        task: Task,
        context: RolloutContext,
        group_size: int,
        key: str,
        step: int = -1,
        before: Group | None = None,
    ) -> Group:
        """Sample and score the group of one task. Groups that start together send their requests in that order.

        Of the group `before`, which an aborted attempt left, complete rollouts are kept, and a partial first answer is
        continued if the client keeps partial rollouts. Every seed depends on `key`, which is the group's `uid`.

        Raises:
            DataError: The task cannot be used.
            EngineError: Generation failed.
        """
        prompt = Prompt(task, *context.codec.prompt(task))
        left = before
        if before is not None and (len(before.rollouts) != group_size or any(r.trajectory for r in before.rollouts)):
            left = None  # step-wise workflows return several rollouts per member: unknown which are complete
        async with asyncio.TaskGroup() as running:
            members = [
                running.create_task(self._member(prompt, context, key, member, step, left))
                for member in range(group_size)
            ]
        made = [member.result() for member in members]
        if self._comparing is not None:
            made = [self._observed(each, step) for each in await self._compared(self._comparing, made)]
        pairs = [pair for each in made for pair in each.pairs]
        return Group(task, tuple(rollout for rollout, _ in pairs), tuple(score for _, score in pairs), uid=key)

    async def _member(
        self, prompt: Prompt, context: RolloutContext, group: str, member: int, step: int, before: Group | None
    ) -> _Made:
        """Return one member: the earlier one if it is complete, else a new one that continues the partial answer."""
        if before is not None:
            rollout, score = before.rollouts[member], before.scores[member]
            if score.valid:
                return _Made([rollout], [score], is_new=False)
            if score.reason == UNCOMPARED.reason:
                return _Made([rollout], await self._judged([rollout]))
            if rollout.status == "aborted" and isinstance(context.client, PausableClient):
                context = attrs.evolve(context, client=context.client.after(rollout, member))
        made = await self._sample_member(prompt, context, group, member)
        return made if self._comparing is not None else self._observed(made, step)

    async def _sample_member(self, prompt: Prompt, context: RolloutContext, group: str, member: int) -> _Made:
        seed = None if self._seed is None else derive(self._seed, group, prompt.task.id)
        scorer = None if self._scorer is None else self._score_alone
        user_loop = context.user_loop if self._users else None
        home = None if user_loop is None else user_loop.way_back()
        for attempt in range(RERUNS + 1):
            chat = TokenChat(prompt, context, group, seed, member=member, scorer=scorer, home=home)
            try:
                rollouts = await self._attempt(prompt.task, chat, group, user_loop)
                if self._users:  # built-in workflows return what engines sampled, which is checked there
                    _check_tokens(rollouts, context.vocabulary)
                if any(rollout.status == "aborted" for rollout in rollouts):
                    return _Made(rollouts, [ABORTED], is_new=False)
                judged = await self._judged(rollouts[-1:] if self._at_end else rollouts)
                return _Made(rollouts, judged, chat=chat)
            except WorldLostError as error:
                reason = f"{type(error).__name__}: {error}"
                self.run_again += attempt < RERUNS
            except _FailedError as error:
                if chat.stopped:  # the workflow or its agent could not use a partial answer
                    return _Made([chat.finish(status="aborted")], [ABORTED], is_new=False)
                reason = str(error)
                break
        return _Made([chat.failed()], [Score.invalid(f"workflow failed: {reason}")])

    async def _attempt(self, task: Task, chat: TokenChat, group: str, user_loop: UserLoop | None) -> Sequence[Rollout]:
        try:
            if user_loop is None:
                produced = await self._call(task, chat)
            else:
                produced = await user_loop.run(lambda: self._call(task, chat))
        except OutOfRoomError:
            produced = chat.finish()
        except ValueFault as error:  # an invalid observation, reward, … from environment or workflow
            raise _FailedError(described(error)) from error
        except RlsdkError:
            raise
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise _FailedError(f"its code raised {described(error)}") from error
        except Exception as error:
            if any(f"{kind.__module__}.".startswith("ray.") for kind in type(error).__mro__):
                raise EngineError(f"{group}, task {task.id!r}: the engine failed: {error}") from error
            raise _FailedError(described(error)) from error
        finally:
            chat.close()
        rollouts = list(produced) if isinstance(produced, Iterable) else [produced]
        if not rollouts or not all(isinstance(each, Rollout) for each in rollouts):
            expected = "a Rollout, such as chat.finish() returns, or a non-empty list of them"
            raise _FailedError(f"it returned {reprlib.repr(produced)}; expected {expected}")
        if len({id(each) for each in rollouts}) < len(rollouts):
            raise _FailedError("it returned the same Rollout twice; expected each only once, since all are trained on")
        return rollouts

    async def _call(self, task: Task, chat: TokenChat) -> Rollout | Sequence[Rollout]:
        made = self._run(task, chat)
        if not inspect.isawaitable(made):
            raise TypeError("it is a plain function; write async def, and await chat.sample()")
        return await made

    async def _judged(self, rollouts: Sequence[Rollout]) -> Sequence[Score | ScoringCounters]:
        """Score rollouts as far as possible before their group is complete."""
        if self._scorer is None:
            return [as_score(sum(value for _, value in rollout.rewards)) for rollout in rollouts]
        if isinstance(self._scorer, Scorer):
            self._scorer.warn_of_ignored(rollouts)
        judge = self._scorer.score if self._comparing is None else self._comparing.begin
        if len(rollouts) == 1:  # the common case, without an extra asyncio task
            return [await judge(rollouts[0])]
        return await asyncio.gather(*(judge(rollout) for rollout in rollouts))

    async def _score_alone(self, rollout: Rollout) -> Score:
        """Score a single rollout for its workflow."""
        if self._comparing is not None:
            names = ", ".join(self._comparing.comparing)
            raise ConfigError(
                [f"reward: {names} compares the rollouts of a group, but the workflow scores a single answer"]
            )
        return Score(0.0) if self._scorer is None else await self._scorer.score(rollout)

    async def _compared(self, scorer: Scorer, members: Sequence[_Made]) -> list[_Made]:
        """Return members with their scores; groups with aborted rollouts are not compared."""
        counters = [each for member in members for each in member.judged if isinstance(each, ScoringCounters)]
        if any(rollout.status == "aborted" for member in members for rollout in member.rollouts):
            scores = [UNCOMPARED] * len(counters)
        else:
            scores = await scorer.finish(counters)
        ordered = iter(scores)
        return [
            attrs.evolve(m, judged=[next(ordered) if isinstance(each, ScoringCounters) else each for each in m.judged])
            for m in members
        ]

    def _observed(self, made: _Made, step: int) -> _Made:
        """Pass new rollouts to the observer."""
        if self._observer is not None and made.is_new:
            for rollout, score in made.pairs:
                if score.reason != UNCOMPARED.reason:  # the steps before the last one have copies
                    self._observer(rollout, score, step)
        return made


def _check_tokens(rollouts: Sequence[Rollout], vocabulary: int) -> None:
    for rollout in rollouts:
        if (token := outside(rollout.token_ids, vocabulary)) is not None:
            raise _FailedError(f"it returned a Rollout with the token id {token}; {known_ids(vocabulary)}")


class _FailedError(Exception):
    """Raised when the workflow raises; its rollout fails and the run continues."""


def first_error(error: BaseException) -> BaseException:
    """Return the first cause inside (nested) exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = next((e for e in error.exceptions if isinstance(e, DataError)), error.exceptions[0])
    return error
