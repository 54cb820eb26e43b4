"""Run the policy as an agent of verifiers, instead of verifiers' own rollout through harness, server and client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rlsdk.contracts import Chat
from rlsdk.errors import OutOfRoomError, ValueFault
from rlsdk.types import Message
from rlsdk_verifiers import environments, traces


class Seat:
    """One agent of an environment, for one episode.

    Attributes:
        trainable: Set by environments; it has no effect here.
        run_: The conversation, set once it is open.
    """

    def __init__(self, name: str, config: Any, chat: Chat, prompt: Sequence[Message]) -> None:
        """Create the agent."""
        self.name, self.config, self.trainable = name, config, True
        self._chat, self._prompt = chat, tuple(prompt)
        self.run_: Conversation | None = None

    async def run(self, task: Any, **others: Any) -> Any:
        """Let the policy answer the task's prompt once; return the scored trace."""
        run = self._open(task, others)
        if await run.open() and await run.step():
            run.trace.stop("agent_completed")
        return await run.close()

    @asynccontextmanager
    async def interaction(self, task: Any, **others: Any) -> AsyncIterator[Any]:
        """Yield verifiers' own `Interaction` over the chat, for a conversation of several turns."""
        from verifiers.v1.agent import Interaction

        run = self._open(task, others)
        await run.open()
        run.raise_failure()
        held = Interaction(run)
        try:
            yield held
        except Exception as error:
            run.fail(error)
            raise
        finally:
            await held.close()

    def provision(self, task: Any = None) -> Any:
        """Reject a request for a container."""
        raise ValueFault("the environment requests a container (provision), which rlsdk does not support")

    def _open(self, task: Any, others: dict[str, Any]) -> Conversation:
        asked = sorted(name for name, value in others.items() if value is not None)
        if asked:
            raise ValueFault(f"the environment gives its agent {', '.join(asked)}, which rlsdk does not support")
        if self.run_ is not None:
            raise ValueFault("the environment runs its agent twice in one episode, but a rollout is one conversation")
        if environments.prompt_of(task.data) != self._prompt:
            raise ValueFault(
                "the environment changes the prompt of its task in run(); a rollout begins with the taskset's prompt"
            )
        self.run_ = Conversation(task, self, self._chat, self._prompt)
        return self.run_


class Conversation:
    """Stand-in for verifiers' `Rollout`, with the attributes that `Interaction` reads."""

    def __init__(self, task: Any, seat: Seat, chat: Chat, prompt: Sequence[Message]) -> None:
        from verifiers.v1.session import RolloutLimits

        names = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens")
        self.task, self._chat, self._prompt = task, chat, prompt
        self.trace = traces.new(task, seat.config, seat.name)
        self.closed = False
        self._failure: Exception | None = None
        self._limits = RolloutLimits(**{name: getattr(seat.config, name) for name in names})
        self._stops: list[Callable[..., Any]] = task.hooks("stop")

    @property
    def ok(self) -> bool:
        """True if the conversation can continue: nothing failed or stopped it."""
        return self._failure is None and self.trace.stop_condition is None

    def fail(self, error: Exception) -> None:
        """Record an error; the first one counts."""
        self._failure = self._failure or error
        self.trace.record_error(error)

    def raise_failure(self) -> None:
        """Raise the recorded error, if any."""
        if self._failure is not None:
            raise self._failure

    async def steer(self, message: str, *, message_id: str | None = None) -> dict[str, str]:
        """Reject a message that arrives while the policy answers."""
        return {"outcome": "promptRequired", "reason": "noRunningTurn"}

    async def open(self) -> bool:
        """Run the task's own `setup`."""
        return await self._guarded(self._hook("setup"))

    async def step(self, messages: Sequence[Any] | None = None, *, on_input: Callable[[], None] | None = None) -> bool:
        """Run one turn: messages of the environment and the policy's answer; return True if it can continue."""
        if not self.ok or not await self._guarded(self._stopped()) or not self.ok:
            return False
        if on_input is not None:
            on_input()
        return await self._guarded(self._turn(messages)) and self.ok

    async def close(self) -> Any:
        """Run the task's own `finalize` and its rewards, once; return the trace."""
        if self.closed:
            return self.trace
        self.closed = True
        if self._failure is None:
            await self._guarded(self._hook("finalize"))
        if self._failure is None:
            await self._guarded(self.task.score(self.trace))
        self.trace.is_completed, self.trace.ok = True, self._failure is None
        return self.trace

    async def _turn(self, messages: Sequence[Any] | None) -> None:
        if messages:
            for message in messages:
                self._say(message)
            traces.add(self.trace, messages)
        else:
            traces.add(self.trace, traces.theirs(self._prompt))
        before = len(self._chat.finish().token_ids)
        try:
            answer = await self._chat.sample()
        except OutOfRoomError:  # the episode ends here as truncated, and is scored as it is
            self.trace.stop("max_total_tokens")
            return
        after = self._chat.finish()
        truncated = after.status == "truncated"
        tokens = len(after.token_ids) - before
        traces.add_answer(self.trace, answer.text, truncated=truncated, prompt_tokens=before, tokens=tokens)

    def _say(self, message: Any) -> None:
        if message.role != "user":
            raise ValueFault(f"the environment sends a message of the role {message.role}; rlsdk supports only user")
        self._chat.say(environments.text_of(message))

    async def _stopped(self) -> None:
        """Stop at a limit of the agent, or if a function of the task says so."""
        import verifiers.v1 as vf
        from verifiers.v1.session import call_hook

        reached = self._limits.reached(self.trace)
        if reached:
            self.trace.stop(reached)
            return
        for stop in self._stops:
            if await call_hook(stop, {vf.Trace: self.trace}):
                self.trace.stop(stop.__name__)
                return

    async def _hook(self, name: str) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.utils.decorators import invoke

        if getattr(type(self.task), name) is not getattr(vf.Task, name):
            await invoke(getattr(self.task, name), {"trace": self.trace, "task": self.task.data})

    async def _guarded(self, work: Any) -> bool:
        """Await the work and return True on success; record an exception as verifiers does on the trace."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - raised again when the episode is over
            self.fail(error)
            return False
        return True
