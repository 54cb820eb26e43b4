"""The context shared by the rollouts of a batch, and the prompt shared by those of a group."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import attrs
import numpy as np

from rlsdk.contracts import Sampling
from rlsdk.engines.client import Sampler
from rlsdk.environments.local import EnvBackend, LocalEnvBackend
from rlsdk.loops import UserLoop
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.types import Message, Rollout, Task


@attrs.frozen(eq=False)
class Prompt:
    """Prompt of a task, tokenized once for its group; `plain` if the conversation is text without a template."""

    task: Task
    messages: tuple[Message, ...]
    token_ids: np.ndarray
    plain: bool = attrs.field()

    @plain.default
    def _is_text(self) -> bool:
        return isinstance(self.task.prompt, str)


class ServedConversations(Protocol):
    """Conversations of an agent with the policy over HTTP, such as `rlsdk.serving.recording.Recorder`."""

    @property
    def answers(self) -> int:
        """Number of answers so far."""
        ...

    @property
    def stopped(self) -> bool:
        """True if an answer was stopped from outside."""
        ...

    def serving(self) -> AbstractAsyncContextManager[Any]:
        """Serve the policy until the block ends."""
        ...

    def finish(self, **changes: Any) -> tuple[Rollout, ...]:
        """Return the recorded rollouts."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class RolloutContext:
    """Objects shared by all rollouts of a batch.

    Attributes:
        codec: Tokenizer with its renderer.
        client: Engine client; None if nothing is sampled.
        sampling: Sampling parameters, stop strings already split.
        max_length: Maximum number of tokens of prompt and response together.
        worlds: Pool in which environments run.
        user_loop: Event loop of workflows that are not part of rlsdk; None to run them on the run's loop.
        recorder: Serves the policy to an agent (`rlsdk.serving.recording.Recorder`); None without a server.
    """

    codec: ChatTokenizer
    client: Sampler | None
    sampling: Sampling
    max_length: int
    worlds: EnvBackend = attrs.field(factory=LocalEnvBackend)
    user_loop: UserLoop | None = None
    recorder: Callable[..., ServedConversations] | None = None
