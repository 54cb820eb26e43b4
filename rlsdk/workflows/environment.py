"""A conversation with an environment: it shows, the policy acts, until it ends."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import attrs

import rlsdk
from rlsdk.components import Component, Use, component_of
from rlsdk.contracts import Chat
from rlsdk.errors import DataError, OptionError, OutOfRoomError, PluginError
from rlsdk.types import Observation, Rollout, Status, Step, Task
from rlsdk.workflows.threads import Threads

T = TypeVar("T")
NAME = "workflow 'environment'"


@rlsdk.workflow("environment", rewards=True)
@attrs.frozen(kw_only=True)
class EnvironmentWorkflow:
    """Drives any environment: its observations are said, what the policy answers are its actions.

    The first observation joins the task's prompt, unless it is the prompt. The seed is `seed` of the task's metadata,
    or made from the task's id, so that the rollouts of a group begin in one state. Each reward lies on the last token
    of its answer. Calls of the environment run in threads: one that takes too long is left behind, and its rollout
    fails, while others go on.

    Attributes:
        environment: Which one, with its options.
        max_turns: Actions until the rollout ends as truncated.
        max_tokens: Of one answer; left out, the run's setting.
        step_timeout: Seconds for one call of the environment.
        timeout: Seconds until the rollout ends as truncated; left out, there is no limit.
        threads: Calls of environments that run at once.
    """

    environment: Use
    max_turns: int = 20
    max_tokens: int | None = None
    step_timeout: float = 30.0
    timeout: float | None = None
    threads: int = 16
    _component: Component = attrs.field(init=False, eq=False, repr=False)
    _threads: Threads = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        for name in ("max_turns", "threads", "step_timeout"):
            if getattr(self, name) <= 0:
                raise OptionError(NAME, [(name, f"above 0, got {getattr(self, name)}")])
        try:
            made = rlsdk.load("environment", self.environment.name, **self.environment.options)
        except OptionError as error:
            raise OptionError(NAME, [(f"environment.{path}", text) for path, text in error.faults]) from error
        except PluginError as error:
            raise OptionError(NAME, [("environment", str(error))]) from error
        _close(made)
        object.__setattr__(self, "_component", component_of(made))
        object.__setattr__(self, "_threads", Threads(self.threads))

    async def run(self, task: Task, chat: Chat) -> Rollout:
        """Play one episode."""
        world = _World(self, seed_of(task))
        metrics: dict[str, float] = {}
        status: Status = "truncated"
        try:
            async with asyncio.timeout(self.timeout) as limit:
                status = await self._play(task, world, chat, metrics)
        except OutOfRoomError:
            pass
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            world.leave()
        return chat.finish(status=status, metrics=metrics)

    async def _play(self, task: Task, world: _World, chat: Chat, metrics: dict[str, float]) -> Status:
        first = (await world.reset()).text
        if first != _asked(task):
            chat.say(first)
        for _ in range(self.max_turns):
            answer = await chat.sample(max_tokens=self.max_tokens)
            if chat.status == "aborted":
                return "aborted"
            step = await world.step(answer.content)
            chat.reward(step.reward)
            metrics.update(step.metrics)
            if step.observation.text:
                chat.say(step.observation.text)
            if step.terminated or step.truncated:
                return "finished" if step.terminated else "truncated"
        return "truncated"


def seed_of(task: Task) -> int:
    """The seed of an episode.

    Raises:
        DataError: The task gives one that is no whole number.
    """
    given = task.metadata.get("seed")
    if given is None:
        return int.from_bytes(hashlib.blake2b(task.id.encode(), digest_size=4).digest(), "big") >> 1
    if type(given) is not int:
        raise DataError(f"task {task.id!r}: metadata 'seed' is {given!r}; expected a whole number")
    return given


def _asked(task: Task) -> str:
    """What the prompt ends with."""
    return task.prompt if isinstance(task.prompt, str) else task.prompt[-1].content if task.prompt else ""


class _World:
    """One environment, in the threads of the workflow."""

    def __init__(self, workflow: EnvironmentWorkflow, seed: int) -> None:
        self._workflow, self._seed = workflow, seed
        self._environment: Any = None
        self._steps = 0
        self._usable = True

    async def reset(self) -> Observation:
        def make() -> Observation:
            self._environment = self._workflow._component.bind(self._workflow.environment.options)
            return self._environment.reset(self._seed)  # type: ignore[no-any-return]

        return await self._call("reset", Observation, make)

    async def step(self, text: str) -> Step:
        self._steps += 1
        return await self._call(f"step {self._steps}", Step, self._environment.step, text)

    def leave(self) -> None:
        """Close it, if it can be closed and does not hang; nobody waits for it."""
        if self._usable and hasattr(self._environment, "close"):
            threads = self._workflow._threads
            closing = asyncio.get_running_loop().create_task(threads.call(_close, self._environment, seconds=10.0))
            _CLOSING.add(closing)
            closing.add_done_callback(_closed)

    async def _call(self, what: str, kind: type[T], function: Callable[..., Any], *arguments: Any) -> T:
        workflow = self._workflow
        where = f"environment {workflow._component.name!r} (seed {self._seed}): {what}"
        self._usable = False
        try:
            result = await workflow._threads.call(function, *arguments, seconds=workflow.step_timeout)
        except TimeoutError as error:
            raise TimeoutError(f"{where}: {error}") from error
        except Exception as error:  # the environment's code; its rollout fails, the run goes on
            raise RuntimeError(f"{where} raised {type(error).__name__}: {error}") from error
        if not isinstance(result, kind):
            raise TypeError(f"{where} gave {result!r}; expected an rlsdk.{kind.__name__}")
        self._usable = True
        return result


_CLOSING: set[asyncio.Task[None]] = set()


def _close(environment: Any) -> None:
    if hasattr(environment, "close"):
        environment.close()


def _closed(task: asyncio.Task[None]) -> None:
    """An episode is over, whatever becomes of closing its environment."""
    _CLOSING.discard(task)
    if not task.cancelled():
        task.exception()
