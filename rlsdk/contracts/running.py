"""What workflows, environments, trackers and algorithms must offer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs

if TYPE_CHECKING:
    from rlsdk.components import Use
    from rlsdk.types import Message, Observation, Rollout, Step, Task


class Chat(Protocol):
    """What a workflow talks to; it builds one rollout, token by token."""

    async def sample(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Message:
        """Let the policy write the next assistant message."""
        ...

    def write(self, text: str) -> None:
        """Append an expert's assistant message, which is trained on."""
        ...

    def finish(self, **changes: Any) -> Rollout:
        """The rollout as it stands."""
        ...


class Workflow(Protocol):
    """Turns a task into one rollout, or several of one trajectory."""

    async def run(self, task: Task, chat: Chat) -> Rollout | Sequence[Rollout]:
        """Run one task."""
        ...


class Environment(Protocol):
    """A world that answers text with observations."""

    def reset(self, seed: int) -> Observation:
        """Start anew; the same seed gives the same world in every process."""
        ...

    def step(self, text: str) -> Step:
        """Act."""
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
    """What a tracker is told of a run: name, folder, resolved config, and the step that it resumes from (0: new)."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    resumed_from: int = 0


class AlgorithmDefaults(Protocol):
    """What an algorithm names; `rlsdk.Algorithm` has these fields with defaults."""

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
