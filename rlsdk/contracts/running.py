"""Interfaces of workflows, environments, trackers and algorithms."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs

from rlsdk.components import component_of

if TYPE_CHECKING:
    from rlsdk.components import Use
    from rlsdk.tool_calls import Call, Dialect, Malformed, ToolParser
    from rlsdk.types import Message, Observation, Rollout, Score, Status, Step, Task


Role = Literal["user", "system"]
"""Author of a message that the policy did not write."""


class EnvHandle(Protocol):
    """An environment that a rollout plays in, wherever it runs."""

    async def reset(self) -> Observation:
        """Wait for a place, make the environment, start its episode.

        An environment that raises or takes too long is a `RuntimeError` or a `TimeoutError` that says which it is, its
        seed and the call; nothing else is to be asked of it then. `WorldLostError`: its worker is gone.
        """
        ...

    async def step(self, text: str) -> Step:
        """Take an action; raises what `reset` raises."""
        ...

    def close(self) -> None:
        """Release the environment, without waiting for its `close`."""
        ...


class Chat(Protocol):
    """A workflow's conversation with the policy; it builds one rollout, token by token.

    The tokens of the rollout are those that were sent to the policy and those that it sampled, in their order; nothing
    is tokenised twice.
    """

    @property
    def status(self) -> Status:
        """Status of the last answer: finished, truncated (a limit was reached) or aborted (stopped from outside)."""
        ...

    @property
    def turns(self) -> int:
        """Number of answers so far."""
        ...

    def room(self) -> int:
        """Tokens that the next answer may have, all that was said until now counted; 0: none can be sampled."""
        ...

    async def sample(self, *, max_tokens: int | None = None, stop: Sequence[str] = (), prefill: str = "") -> Message:
        """Let the policy write the next assistant message.

        If no tokens are left it raises `OutOfRoomError`; a workflow that does not catch it ends as truncated.
        """
        ...

    def say(self, text: str | Sequence[Any], role: Role = "user") -> None:
        """Append a message that the policy did not write; consecutive ones of one role become one message.

        Beside text it takes parts, for a model that sees images: texts, `rlsdk.Image`s, or OpenAI's mappings.
        """
        ...

    def calls(self, parser: ToolParser | None = None) -> tuple[Call | Malformed, ...]:
        """Read the tool calls in the last answer, by the model's own parser where none is given."""
        ...

    def tool_result(self, text: str, name: str = "", call_id: str = "") -> None:
        """Append what a tool answered; without an id, to the next call of the last answer."""
        ...

    def offer(
        self, tools: Sequence[Mapping[str, Any]], *, describe: bool = False, parser: ToolParser | None = None
    ) -> bool:
        """Have the renderer show tools, as JSON schemas; False: it has no place for them.

        With `describe`, a message then says what they are and how `parser`, or the model's own, has them called.
        """
        ...

    def write(self, text: str) -> None:
        """Append an expert's assistant message, which is trained on."""
        ...

    def reward(self, value: float) -> None:
        """Reward the last answer, at its last sampled token."""
        ...

    async def score(self) -> Score:
        """Score the rollout so far with the run's reward."""
        ...

    def branch(self) -> Chat:
        """Return an independent conversation that continues from here; this one is left unchanged."""
        ...

    def world(self, environment: Use, seed: int, *, step_timeout: float = 30.0) -> EnvHandle:
        """An environment to play in; in a training it runs in a worker, in the driver's threads elsewhere.

        `step_timeout` is what one call of it may take, in seconds. What the workflow does not leave is left at its end.
        """
        ...

    def serve(
        self, *, dialect: Dialect | None = None, max_turns: int | None = None, max_tokens: int | None = None
    ) -> AbstractAsyncContextManager[Served]:
        """Serve the policy to an agent, as an OpenAI-compatible endpoint of this rollout, until the block ends.

        Messages exchanged there are not part of this conversation: `Served.finish` returns their rollouts.
        """
        ...

    def finish(self, **changes: Any) -> Rollout:
        """The rollout as it stands; `changes` replace fields such as `status`, and add to its `metrics`."""
        ...


class Served(Protocol):
    """An OpenAI-compatible endpoint of the policy for a single rollout."""

    @property
    def base_url(self) -> str:
        """`http://127.0.0.1:PORT/SECRET/v1`; dead once the rollout has ended."""
        ...

    @property
    def api_key(self) -> str:
        """For clients that insist on one; the secret is in the URL."""
        ...

    @property
    def calls(self) -> int:
        """Requests for an answer so far."""
        ...

    @property
    def cut(self) -> bool:
        """True if a request was refused because tokens or turns ran out."""
        ...

    @property
    def refusal(self) -> str:
        """Why the last request was refused; empty if it was answered."""
        ...

    def reward(self, value: float) -> None:
        """Reward the last answer, at its last sampled token."""
        ...

    def finish(self, **changes: Any) -> tuple[Rollout, ...]:
        """Return the conversations as rollouts of one trajectory, the most recently answered one last.

        `changes` apply to the last one, as in `Chat.finish`; `metrics` apply to all.
        """
        ...


@runtime_checkable
class Workflow(Protocol):
    """Turns a task into one rollout, or several of one trajectory.

    Each rollout is scored by itself, unless the workflow is `ScoredAtEnd`.
    """

    async def run(self, task: Task, chat: Chat) -> Rollout | Sequence[Rollout]:
        """Run one task."""
        ...


@runtime_checkable
class ScoredAtEnd(Protocol):
    """Optional interface of a workflow whose last rollout is scored for its whole trajectory."""

    @property
    def scored_at_end(self) -> bool:
        """True if only the last rollout is scored, and all others share its score."""
        ...


@runtime_checkable
class CallsTools(Protocol):
    """Optional interface of a workflow in which the policy calls tools.

    `rlsdk debug` and `--mode serve` read and write tool calls as the workflow does.
    """

    @property
    def dialect(self) -> Dialect | None:
        """Syntax of the tool calls; None for the model's own."""
        ...


@runtime_checkable
class PlaysEpisodes(Protocol):
    """Optional interface of a workflow whose rollouts are episodes of an environment, so that they can be replayed."""

    def episode(self, task: Task) -> tuple[Use, int]:
        """Return the environment that a task is played in, with its options, and the seed of its episodes.

        Raises:
            DataError: The task names no environment, or its seed is not an integer.
        """
        ...


@runtime_checkable
class RunsUserCode(Protocol):
    """Optional interface of a built-in workflow whose options name functions or coroutines of the user."""

    @property
    def runs_user_code(self) -> bool:
        """True if it does, with the options that it has."""
        ...


def runs_user_code(component: Any) -> bool:
    """Return True if a component awaits users' code, which may block the event loop.

    True for any component that is not rlsdk's own, and for one that declares it (`RunsUserCode`).

    Args:
        component: Workflow or reward, ready to run.
    """
    if isinstance(component, RunsUserCode):
        return component.runs_user_code
    mark = component_of(component)
    defined = component if mark is None else mark.obj
    module = getattr(defined, "__module__", None) or type(defined).__module__
    return not module.startswith("rlsdk.")


class Environment(Protocol):
    """An environment that answers text actions with observations.

    Each rollout has an instance of its own, whose calls come one after the other, each in any thread. Methods may be
    `async`: they run on the event loop of a worker, which thousands share, and must not block it. An environment that
    `Closes` is closed at the end.
    """

    def reset(self, seed: int) -> Observation:
        """Start an episode; the same seed gives the same world in every process."""
        ...

    def step(self, text: str) -> Step:
        """Take an action; metrics cover the episode so far, and the last value of each name is kept."""
        ...


@runtime_checkable
class Closes(Protocol):
    """Optional interface of an environment that holds resources."""

    def close(self) -> Awaitable[None] | None:
        """Release the resources; called once, after the last step."""
        ...


@runtime_checkable
class ShowsImages(Protocol):
    """Optional interface of an environment that says, with the options that it has, if observations hold pictures.

    `rlsdk explain` then checks that the model and the engine see.
    """

    @property
    def shows_images(self) -> bool:
        """True if some observation has an image."""
        ...


@runtime_checkable
class Renders(Protocol):
    """Optional interface of an environment that can be shown; `rlsdk eval` draws some episodes."""

    def render(self) -> Any:
        """Return a picture, uint8 `[height, width, 3]`, or a text; anything else is not shown."""
        ...


class Tracker(Protocol):
    """Takes the metrics of a run."""

    def open(self, run: Run) -> None:
        """A run starts or resumes."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step."""
        ...

    def close(self) -> None:
        """The run ended."""
        ...


@attrs.frozen
class Run:
    """Description of a run for trackers: name, folder, resolved config, and the step it resumes from (0: new)."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    resumed_from: int = 0


@attrs.frozen(kw_only=True)
class RunFacts:
    """Facts of a run for the `check` of a component, before it starts.

    Attributes:
        teacher: True if `model.reference` differs from the model that is trained.
        max_tokens: Most tokens of one answer.
        longest_response: Most tokens of a response: `max_tokens` where a rollout is one answer, else what the model
            holds beside one token of a prompt.
        group_size: Rollouts of each task.
        updates: Optimiser steps on each batch.
        aggregate: Mode in which per-token losses are reduced to one number.
        rewards: Names of the parts of the reward; none where the workflow gives it.
    """

    teacher: bool
    max_tokens: int
    longest_response: int
    group_size: int
    updates: int
    aggregate: str
    rewards: tuple[str, ...] = ()


class AlgorithmDefaults(Protocol):
    """Fields of an algorithm; `rlsdk.Algorithm` has them with defaults."""

    advantage: Use
    whiten_advantages: bool
    clip_advantages: float | None
    policy_loss: Use
    shaping: tuple[Use, ...]
    correction: Use | None
    kl: Use | None
    kl_coef: float
    entropy_coef: float
    aggregate: str
    norm: float | None
    filters: tuple[Use, ...]
    critic: bool
    value_clip: float | None
    rollouts: Literal["sampled", "demonstrations", "mixed"]
    passing: float
    defaults: Mapping[str, Any]
