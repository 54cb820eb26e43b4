"""Agents in any framework that call the policy through an OpenAI-compatible API."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import attrs

import rlsdk
from rlsdk.contracts import Chat, Served
from rlsdk.errors import OptionError, ValueFault
from rlsdk.isolation.threads import Threads
from rlsdk.limits import Count, Positive
from rlsdk.plugins.discovery import find
from rlsdk.tool_calls import Dialect, is_users
from rlsdk.types import Rollout, Task
from rlsdk.workflows.limits import LateError, call_within

NAME = "workflow 'agent'"


class RefusedError(Exception):
    """Raised in place of an agent's exception if the endpoint refused its last request; states the reason."""


@rlsdk.workflow("agent")
@attrs.frozen(kw_only=True)
class Agent:
    """Runs a function that calls the policy through an OpenAI-compatible endpoint; the sampled tokens are trained on.

    The function takes `(task, base_url, api_key)`. It may be async; a sync function runs in a thread. It may return

    * nothing;
    * a number, the rollout's reward (for the reward `environment`);
    * text, the answer that rewards read in place of the policy's last one;
    * a mapping with `reward`, `answer`, and further numbers, which become metrics.

    If it raises, the rollout has failed; if the endpoint refused its last request, the message states why. After a
    request that was refused for lack of room or turns, the rollout is truncated instead.

    The endpoint is reachable only from this machine, and closes when the rollout ends. Each conversation of the agent
    becomes one rollout of the trajectory. The last one is scored, and all get its score. Metrics: `calls` and
    `conversations`.

    Attributes:
        agent: The function, as `my_agent.py:solve` or `package.module:function`.
        parser: Syntax of tool calls: the name of a `tool_parser`, or your own `my_file.py:function`, which turns the
            text of an answer into a list of (name, arguments) pairs; if it raises a ValueError, the policy is shown the
            message. By default, the syntax of the model's chat template (`model.tool_parser`).
        max_turns: Maximum number of answers to the agent.
        max_tokens: Maximum tokens of an answer; by default, the run's setting. The agent may request fewer.
        timeout: Seconds after which the rollout is truncated; by default, no limit.
        threads: Maximum number of sync agents that run at once.
    """

    scored_at_end: ClassVar[bool] = True

    agent: str
    parser: str | None = None
    max_turns: Count = 32
    max_tokens: Count | None = None
    timeout: Positive | None = None
    threads: Count = 64
    _agent: Any = attrs.field(init=False, eq=False, repr=False)
    _dialect: Dialect | None = attrs.field(init=False, eq=False, repr=False)
    _threads: Threads = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        try:
            agent = find(self.agent)
            inspect.signature(agent).bind("task", "base_url", "api_key")
        except (ValueFault, TypeError) as error:
            fault = f"{self.agent} does not take (task, base_url, api_key): {error}"
            raise OptionError(NAME, [("agent", str(error) if isinstance(error, ValueFault) else fault)]) from error
        object.__setattr__(self, "_agent", agent)
        object.__setattr__(self, "_dialect", None if self.parser is None else Dialect.named(self.parser, NAME))
        object.__setattr__(self, "_threads", Threads(self.threads))

    @property
    def dialect(self) -> Dialect | None:
        """Syntax of the tool calls, if `parser` names one."""
        return self._dialect

    @property
    def runs_user_code(self) -> bool:
        """True for an async agent, and for the user's own parser; a sync agent runs in a thread."""
        return inspect.iscoroutinefunction(self._agent) or is_users(self.parser)

    async def run(self, task: Task, chat: Chat) -> Sequence[Rollout]:
        """Run the agent against an endpoint."""
        how = {"dialect": self._dialect, "max_turns": self.max_turns, "max_tokens": self.max_tokens}

        def call(served: Served) -> Awaitable[Any]:
            return call_within(self.timeout, self._threads, self._agent, task, served.base_url, served.api_key)

        return await attended(chat, call, name=self.agent, **how)


async def attended(
    chat: Chat, work: Callable[[Served], Awaitable[Any]], *, name: str, **how: Any
) -> tuple[Rollout, ...]:
    """Run an agent and return its rollouts; plugins for agent libraries use this.

    Args:
        chat: Chat of the rollout.
        work: Runs the agent against the served endpoint; returns the same as a function of the workflow `agent`, and
            raises `LateError` when a limit is reached.
        name: Name of the agent, for messages.
        **how: Options of `chat.serve`.
    """
    changes: dict[str, Any] = {"status": "truncated"}
    result = _LATE
    async with chat.serve(**how) as served:
        try:
            result = await work(served)
        except LateError as error:
            if not served.calls:
                raise TimeoutError("the agent reached its time limit before its first request") from error
        except Exception as error:  # noqa: BLE001 - raised again, unless a limit was its cause
            _raise_unless_cut(error, served)
    if result is not _LATE:
        try:  # only now: an answer whose stream the agent abandoned is recorded at the end of the block
            changes = _read(result, served, name)
        except Exception as error:  # noqa: BLE001 - as above
            _raise_unless_cut(error, served)
    return served.finish(**changes)


_LATE = object()


def _raise_unless_cut(error: Exception, served: Served) -> None:
    """Raise an agent's exception, or the reason for its refused last request; do nothing if tokens or turns ran out."""
    if served.cut:
        return
    if served.refusal:
        refused = RefusedError(f"the agent's last request was refused: {served.refusal}")
        raise refused.with_traceback(error.__traceback__) from error
    raise error


def _read(result: Any, served: Served, agent: str) -> dict[str, Any]:
    """Convert an agent's result into changes of its rollout."""
    if result is None:
        return {}
    if isinstance(result, str):
        return {"answer": result}
    given: Mapping[str, Any] = result if isinstance(result, Mapping) else {"reward": result}
    answer = given.get("answer")
    values = {name: value for name, value in given.items() if name != "answer"}
    numbers: dict[str, float] | None = None
    if not any(isinstance(value, str | bytes) for value in values.values()):  # float would parse them
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor of several elements
            numbers = {name: float(value) for name, value in values.items()}
    if numbers is None or not isinstance(answer, str | None):
        raise TypeError(
            f"{agent} returned {result!r:.200}; expected None, a number (the reward), a text (the answer) or a mapping "
            "of reward, answer and metrics that are numbers"
        )
    if "reward" in numbers:
        served.reward(numbers.pop("reward"))
    return {"metrics": numbers} | ({} if answer is None else {"answer": answer})
