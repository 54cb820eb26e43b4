"""The context of a batch, the prompt of a group, and proxies for what stays on the event loop of the run."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeVar

import attrs
import numpy as np

from rlsdk.contracts import EnvHandle, Sampling
from rlsdk.engines.client import Sampler
from rlsdk.environments.local import EnvBackend, LocalEnvBackend
from rlsdk.loops import LoopBridge, UserLoop
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.types import Message, Observation, Rollout, Step, Task

T = TypeVar("T")


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
        environments: Pool in which environments run.
        user_loop: Event loop of workflows that are not part of rlsdk; None to run them on the run's loop.
        recorder: Serves the policy to an agent (`rlsdk.serving.recording.Recorder`); None without a server.
        vocabulary: Number of tokens that the model has embeddings for.
    """

    codec: ChatTokenizer
    client: Sampler | None
    sampling: Sampling
    max_length: int
    environments: EnvBackend = attrs.field(factory=LocalEnvBackend)
    user_loop: UserLoop | None = None
    recorder: Callable[..., ServedConversations] | None = None
    vocabulary: int = sys.maxsize


class BridgedEnv:
    """Proxy for an environment on another event loop; the first `reset` opens it there."""

    def __init__(self, bridge: LoopBridge, open_env: Callable[[], EnvHandle]) -> None:
        """Prepare an environment that `open_env` opens on the loop of the run, once."""
        self._bridge, self._open = bridge, open_env
        self._env: EnvHandle | None = None

    async def reset(self) -> Observation:
        """See `EnvHandle.reset`."""
        return await self._bridge.run(self._reset)

    async def step(self, text: str) -> Step:
        """See `EnvHandle.step`."""
        env = self._env
        if env is None:
            raise RuntimeError("an environment must be reset before its first step")
        return await self._bridge.run(lambda: env.step(text))

    def close(self) -> None:
        """See `EnvHandle.close`; may be called from either loop's thread."""
        self._bridge.post_from_anywhere(self._leave)

    async def _reset(self) -> Observation:
        if self._env is None:
            self._env = self._open()
        return await self._env.reset()

    def _leave(self) -> None:
        if self._env is not None:
            self._env.close()


@asynccontextmanager
async def entered_on(bridge: LoopBridge, context: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Enter and exit a context on another event loop, and run the block on this one."""
    value = await bridge.run(context.__aenter__)
    try:
        yield value
    except BaseException as error:
        given = type(error), error, error.__traceback__
        if not await bridge.run(lambda: context.__aexit__(*given)):
            raise
    else:
        await bridge.run(lambda: context.__aexit__(None, None, None))
