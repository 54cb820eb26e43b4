"""Interfaces of workflows, environments, trackers and algorithms."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs

from rlsdk.components import component_of

if TYPE_CHECKING:
    from rlsdk.components import OneOrMore, Use
    from rlsdk.contracts.tasks import RewardSpec
    from rlsdk.tool_calls import Call, Dialect, Malformed, ToolParser
    from rlsdk.types import Message, Observation, Rollout, Score, Status, Step, Task


Role = Literal["user", "system"]
"""Author of a message that the policy did not write."""


class EnvHandle(Protocol):
    """Handle of the environment that a rollout plays in, wherever it runs."""

    async def reset(self) -> Observation:
        """Wait for a slot, create the environment and start its episode.

        Raises `RuntimeError` or `TimeoutError` if the environment raises or takes too long, with its name, seed and the
        call; do not call it again then. Raises `WorldLostError` if its worker died.
        """
        ...

    async def step(self, text: str) -> Step:
        """Take an action; raises the same errors as `reset`."""
        ...

    def close(self) -> None:
        """Release the environment without waiting for its `close`."""
        ...


class Chat(Protocol):
    """A workflow's conversation with the policy; it builds one rollout, token by token.

    The rollout consists of the tokens sent to the policy and those it sampled, in order; nothing is tokenised twice.
    """

    @property
    def status(self) -> Status:
        """Status of the last answer: finished, truncated (reached a limit) or aborted (stopped from outside)."""
        ...

    @property
    def turns(self) -> int:
        """Number of answers so far."""
        ...

    def room(self) -> int:
        """Tokens left for the next answer, given the conversation so far; 0: nothing can be sampled."""
        ...

    async def sample(self, *, max_tokens: int | None = None, stop: Sequence[str] = (), prefill: str = "") -> Message:
        """Let the policy write the next assistant message.

        Raises `OutOfRoomError` if no tokens are left; the rollout of a workflow that does not catch it is truncated.
        Before the first answer it raises `ValueFault` instead, and the rollout fails: nothing could be scored.
        """
        ...

    def say(self, text: str | Sequence[Any], role: Role = "user") -> None:
        """Append a message that the policy did not write; consecutive messages of one role are merged.

        Besides text it accepts a sequence of parts, for vision models: texts, `rlsdk.Image`s, or OpenAI's mappings.
        """
        ...

    def calls(self, parser: ToolParser | None = None) -> tuple[Call | Malformed, ...]:
        """Parse the tool calls in the last answer, with the model's own parser by default."""
        ...

    def tool_result(self, text: str, name: str = "", call_id: str = "") -> None:
        """Append a tool's result; without an id, for the next unanswered call of the last answer."""
        ...

    def offer(
        self, tools: Sequence[Mapping[str, Any]], *, describe: bool = False, parser: ToolParser | None = None
    ) -> bool:
        """Pass tools, as JSON schemas, to the renderer; return False if it cannot show them.

        With `describe`, a message then describes them and the call syntax of `parser`, or of the model's own.
        """
        ...

    def write(self, text: str) -> None:
        """Append an assistant message written by an expert, which is trained on."""
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
        """Return an environment to play in; it runs in a worker during training, else in the driver's threads.

        `step_timeout` limits one call, in seconds. Environments that the workflow does not close are closed when it
        ends.
        """
        ...

    def serve(
        self, *, dialect: Dialect | None = None, max_turns: int | None = None, max_tokens: int | None = None
    ) -> AbstractAsyncContextManager[Served]:
        """Serve the policy to an agent through an OpenAI-compatible endpoint of this rollout, until the block ends.

        Messages exchanged there are not part of this conversation; `Served.finish` returns their rollouts.
        """
        ...

    def finish(self, **changes: Any) -> Rollout:
        """Return the rollout so far; `changes` replace fields such as `status`, and are merged into `metrics`."""
        ...


class Served(Protocol):
    """An OpenAI-compatible endpoint of the policy for a single rollout."""

    @property
    def base_url(self) -> str:
        """`http://127.0.0.1:PORT/SECRET/v1`; closed when the rollout ends."""
        ...

    @property
    def api_key(self) -> str:
        """Placeholder for clients that require a key; the secret is in the URL."""
        ...

    @property
    def calls(self) -> int:
        """Number of requests for an answer so far."""
        ...

    @property
    def cut(self) -> bool:
        """True if a request was refused because no tokens or turns were left."""
        ...

    @property
    def refusal(self) -> str:
        """Reason why the last request was refused; empty if it was answered."""
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
    """Turns a task into one rollout, or into several rollouts of one trajectory.

    Each rollout is scored separately, unless the workflow is `ScoredAtEnd`.
    """

    async def run(self, task: Task, chat: Chat) -> Rollout | Sequence[Rollout]:
        """Run one task."""
        ...


@runtime_checkable
class ScoredAtEnd(Protocol):
    """Optional interface of a workflow whose last rollout is scored on behalf of the whole trajectory."""

    @property
    def scored_at_end(self) -> bool:
        """True if only the last rollout is scored and the others share its score."""
        ...


@runtime_checkable
class CallsTools(Protocol):
    """Optional interface of a workflow in which the policy calls tools.

    It lets `rlsdk debug` and `--mode serve` read and write tool calls as the workflow does.
    """

    @property
    def dialect(self) -> Dialect | None:
        """Syntax of the tool calls; None for the model's own."""
        ...


@runtime_checkable
class PlaysEpisodes(Protocol):
    """Optional interface of a workflow whose rollouts are episodes of an environment, which makes them replayable."""

    def episode(self, task: Task) -> tuple[Use, int]:
        """Return a task's environment, with its options, and the seed of its episodes.

        Raises:
            DataError: The task names no environment, or its seed is not an integer.
        """
        ...


@runtime_checkable
class KeepsToolObjects(Protocol):
    """Optional interface of a workflow that may give each rollout objects of its own, whose methods are tools.

    Their public attributes are in the task of the finished rollout, where rewards read them.
    """

    @property
    def tool_classes(self) -> tuple[str, ...]:
        """Names of the objects' classes; empty if there are none."""
        ...

    def check_task(self, task: Task) -> None:
        """Check that the objects can start with a task.

        Raises:
            DataError: The task lacks a field that one of them requires.
        """
        ...


@runtime_checkable
class DescribesTools(Protocol):
    """Optional interface of a workflow whose option `tools` names functions or classes; `rlsdk check` reads it."""

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of these tools as the policy gets them; those of servers are not known yet."""
        ...


@runtime_checkable
class TriesToolObjects(Protocol):
    """Optional interface of a workflow with `KeepsToolObjects` whose objects can be tried before the start.

    Rewards then score made-up answers with the state of new objects.
    """

    async def try_objects(self, task: Task) -> Task:
        """Create the objects of one rollout, reset them for a task and close them.

        Returns:
            The task as the finished rollout would have it, if the policy had called nothing.
        """
        ...


@runtime_checkable
class RunsUserCode(Protocol):
    """Optional interface of a built-in workflow that may call users' functions or coroutines, named by its options."""

    @property
    def runs_user_code(self) -> bool:
        """True if it does so with the given options."""
        ...


def runs_user_code(component: Any) -> bool:
    """Return True if a component awaits user code, which may block the event loop.

    True for any component that is not built in, and for a built-in one that declares it (`RunsUserCode`).

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

    Each rollout has its own instance, whose methods are called one at a time, from any thread. Methods may be `async`:
    they run on a worker's event loop, which thousands of environments share, and must not block it. An environment that
    implements `Closes` is closed at the end.
    """

    def reset(self, seed: int) -> Observation:
        """Start an episode; the same seed gives the same episode in every process."""
        ...

    def step(self, text: str) -> Step:
        """Take an action; metrics cover the episode so far, and the last value of each is kept."""
        ...


@runtime_checkable
class Closes(Protocol):
    """Optional interface of an environment that holds resources."""

    def close(self) -> Awaitable[None] | None:
        """Release the resources; called once, after the last step."""
        ...


@runtime_checkable
class ShowsImages(Protocol):
    """Optional interface of an environment that declares whether its observations contain images.

    `rlsdk explain` then checks that model and engine accept images.
    """

    @property
    def shows_images(self) -> bool:
        """True if, with the given options, some observation has an image."""
        ...


@runtime_checkable
class Renders(Protocol):
    """Optional interface of an environment that can be drawn; `rlsdk eval` renders some episodes."""

    def render(self) -> Any:
        """Return a picture, uint8 `[height, width, 3]`, or text; anything else is ignored."""
        ...


class Tracker(Protocol):
    """Receives the metrics of a run."""

    def open(self, run: Run) -> None:
        """Start tracking a run that starts or resumes."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        ...

    def close(self) -> None:
        """Finish tracking; the run has ended."""
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
    """Facts about a run that a component's `check` receives before the run starts.

    Attributes:
        teacher: True if `model.reference` differs from the model that is trained.
        max_tokens: Maximum tokens of one answer.
        longest_response: Maximum tokens of a response: `model.max_length` minus one token of prompt and, if a rollout
            is a single answer, at most `max_tokens`.
        group_size: Rollouts of each task.
        updates: Optimiser steps per batch.
        aggregate: Aggregation mode: how per-token losses are reduced to one number.
        rewards: Names of the parts of the reward; empty if the workflow gives it.
        shaping: Names of the shapings, in order.
        rollouts: Whether the policy samples the rollouts, they are demonstrations, or both are mixed.
        reward_parts: How each part of the reward is combined with the others.
        sources: Names of the sources of training tasks.
    """

    teacher: bool
    max_tokens: int
    longest_response: int
    group_size: int
    updates: int
    aggregate: str
    rewards: tuple[str, ...] = ()
    shaping: tuple[str, ...] = ()
    rollouts: Literal["sampled", "demonstrations", "mixed"] = "sampled"
    reward_parts: tuple[RewardSpec, ...] = ()
    sources: tuple[str, ...] = ()


class AlgorithmDefaults(Protocol):
    """Fields of an algorithm; `rlsdk.Algorithm` has them with defaults."""

    advantage: Use
    whiten_advantages: bool
    clip_advantages: float | None
    top_entropy_quantile: float | None
    policy_loss: Use
    shaping: tuple[Use, ...]
    correction: OneOrMore
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
