"""Function calling: the policy calls Python functions or MCP tools, and reads their results."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

import rlsdk
from rlsdk.contracts import Chat
from rlsdk.errors import ConfigError, OptionError, ValueFault
from rlsdk.isolation.threads import Threads
from rlsdk.limits import Count, Positive
from rlsdk.options import did_you_mean
from rlsdk.plugins.discovery import find
from rlsdk.tool_calls import TOOL_STATE, Call, Dialect, Malformed, is_users
from rlsdk.types import Rollout, Status, Task
from rlsdk.workflows.functions import Tool, WrongCallError, as_text
from rlsdk.workflows.limits import LateError, call_within, limited
from rlsdk.workflows.mcp_servers import Connection, McpTool, Server
from rlsdk.workflows.tool_objects import ObjectMethod, ToolClass, ToolObject, ToolObjectError

NAME = "workflow 'tools'"
Offered = Mapping[str, Tool | McpTool]
"""The tools of a rollout by name."""


@rlsdk.workflow("tools")
@attrs.frozen(kw_only=True)
class Tools:
    """Lets the policy call functions until it answers without a call.

    Tools are typed Python functions, sync or async; their descriptions for the policy come from signatures and
    docstrings. If a call cannot be parsed, has wrong arguments, raises or takes too long, its result is the error, and
    the rollout continues. Sync functions run in threads of the run's own process, so they must not execute code written
    by the policy. Of a class, each rollout has its own object, whose public methods are the tools; a method that takes
    too long fails the rollout. Tools of MCP servers can also be offered. A server that exits is restarted by the next
    call; a call in progress is repeated if the server marks its tool as read-only or idempotent, or else gets an error.
    Metrics: `calls` and `failed_calls`.

    Attributes:
        tools: Functions and classes, each as `my_file.py:function` or `package.module:Class`; may be empty if there are
            servers.
        servers: Name -> MCP server: `{command: …, args: […], env: {…}}` to start one here, or `{url: …}`; `only: [name,
            …]` offers only some of its tools.
        parser: Syntax of tool calls: the name of a `tool_parser`, or your own `my_file.py:function`, which turns the
            text of an answer into a list of (name, arguments) pairs; if it raises a ValueError, the policy is shown the
            message. By default, the syntax of the model's chat template (`model.tool_parser`).
        describe: Describe the tools in a message if the chat template does not.
        max_turns: Number of answers after which the rollout is truncated.
        max_calls: Maximum number of calls in one answer; further calls get an error.
        call_timeout: Time limit of one call, in seconds.
        max_result: Maximum characters of one result; the rest is cut off.
        max_tokens: Maximum tokens of an answer; by default, the run's setting.
        timeout: Seconds after which the rollout is truncated; by default, no limit.
        threads: Maximum number of sync calls that run at once.
    """

    tools: tuple[str, ...]
    servers: Mapping[str, Server] = attrs.field(factory=dict)
    parser: str | None = None
    describe: bool = True
    max_turns: Count = 8
    max_calls: Count = 8
    call_timeout: Positive = 10.0
    max_result: Count = 4_000
    max_tokens: Count | None = None
    timeout: Positive | None = None
    threads: Count = 16
    _tools: dict[str, Tool] = attrs.field(init=False, eq=False, repr=False)
    _classes: tuple[ToolClass, ...] = attrs.field(init=False, eq=False, repr=False)
    _connections: tuple[Connection, ...] = attrs.field(init=False, eq=False, repr=False)
    _dialect: Dialect | None = attrs.field(init=False, eq=False, repr=False)
    _threads: Threads = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        found = [_tool(path, i) for i, path in enumerate(self.tools)]
        classes = tuple(each for each in found if isinstance(each, ToolClass))
        functions = [each for each in found if isinstance(each, Tool)]
        if not (found or self.servers) or len({each.name for each in found}) < len(found):
            raise OptionError(
                NAME, [("tools", f"expected functions with different names, or servers; got {list(self.tools)}")]
            )
        if twice := _repeated([*functions, *(tool for each in classes for tool in each.tools)]):
            raise OptionError(NAME, [("tools", f"several functions or methods are named {twice}; rename them")])
        for name, server in self.servers.items():
            try:
                server.check()
            except ValueFault as error:
                raise OptionError(NAME, [(f"servers.{name}", str(error))]) from error
        connections = tuple(Connection(name, server) for name, server in self.servers.items())
        object.__setattr__(self, "_connections", connections)
        object.__setattr__(self, "_tools", {tool.name: tool for tool in functions})
        object.__setattr__(self, "_classes", classes)
        object.__setattr__(self, "_dialect", None if self.parser is None else Dialect.named(self.parser, NAME))
        object.__setattr__(self, "_threads", Threads(self.threads))

    @property
    def dialect(self) -> Dialect | None:
        """Syntax of the tool calls, if `parser` names one."""
        return self._dialect

    @property
    def runs_user_code(self) -> bool:
        """True with async tools, and with the user's own parser; sync tools run in threads."""
        is_async = any(inspect.iscoroutinefunction(tool.function) for tool in self._tools.values())
        return is_async or is_users(self.parser) or any(each.is_async for each in self._classes)

    @property
    def tool_classes(self) -> tuple[str, ...]:
        """Names of the classes among the tools."""
        return tuple(each.name for each in self._classes)

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of its functions and of the methods of its classes."""
        return [tool.schema for tool in [*self._tools.values(), *(t for each in self._classes for t in each.tools)]]

    def offer(self, chat: Chat) -> None:
        """Show the tools in the prompt as `run` does, without those of servers."""
        chat.offer(self.tool_schemas, describe=self.describe, parser=self._dialect)

    def check_task(self, task: Task) -> None:
        """Check that a task has the fields that `reset` of each class requires.

        Raises:
            DataError: It lacks one.
        """
        for each in self._classes:
            each.reset_arguments(task)

    async def try_objects(self, task: Task) -> Task:
        """Create an object of each class, reset it for a task, close it, and return the task with their attributes.

        Raises:
            DataError: The task lacks a field that `reset` requires.
            ToolObjectError: A constructor or `reset` failed.
        """
        objects = [ToolObject(each, self._threads, self.call_timeout) for each in self._classes]
        try:
            for each in objects:
                await each.start(task)
            return _with_state(task, {k: v for each in objects for k, v in (await each.state()).items()})
        finally:
            for each in objects:
                await each.close()

    async def run(self, task: Task, chat: Chat) -> Rollout:
        """Answer calls until an answer has none."""
        served = [tool for connection in self._connections for tool in await connection.tools()]
        objects = [ToolObject(each, self._threads, self.call_timeout) for each in self._classes]
        own: list[Tool | McpTool] = [*self._tools.values(), *(tool for each in objects for tool in each.tools)]
        if twice := _repeated([*own, *served]):
            raise ConfigError([f"workflow.servers: several tools are named {twice}; choose with `only`"])
        offered: Offered = {tool.name: tool for tool in [*own, *served]}
        schemas = [tool.schema for tool in offered.values()]
        chat.offer(schemas, describe=self.describe, parser=self._dialect)
        metrics = {"calls": 0.0, "failed_calls": 0.0}
        status: Status = "truncated"
        try:
            for each in objects:
                if shown := await each.start(task):
                    chat.say(shown)
            async with limited(self.timeout):
                status = await self._talk(chat, offered, metrics)
            state = {name: values for each in objects for name, values in (await each.finish(chat)).items()}
        finally:
            for each in objects:
                await each.close()
        kept = {"task": _with_state(task, state)} if objects else {}
        return chat.finish(status=status, metrics=metrics, **kept)

    async def _talk(self, chat: Chat, offered: Offered, metrics: dict[str, float]) -> Status:
        for _ in range(self.max_turns):
            await chat.sample(max_tokens=self.max_tokens)
            calls = chat.calls(self._dialect)
            if not calls or chat.status == "aborted":
                return chat.status
            for index, call in enumerate(calls):
                text, failed = await self._answer(offered, call, index)
                metrics["calls"] += 1
                metrics["failed_calls"] += failed
                chat.tool_result(text, name="" if isinstance(call, Malformed) else call.name)
                if index == self.max_calls:
                    break
        return "truncated"

    async def _answer(self, offered: Offered, call: Call | Malformed, index: int) -> tuple[str, bool]:
        """Run a call and return (text for the policy, failed)."""
        try:
            if index >= self.max_calls:
                raise WrongCallError(f"at most {self.max_calls} calls per answer; the others were not made")
            if isinstance(call, Malformed):
                raise WrongCallError(call.reason)
            return as_text(await self._call(offered, call), self.max_result), False
        except WrongCallError as error:
            return as_text(f"error: {error}", self.max_result), True
        except ToolObjectError:
            raise
        except Exception as error:  # noqa: BLE001 - a tool's code; the policy is shown its exception
            return as_text(f"error: {type(error).__name__}: {error}", self.max_result), True

    async def _call(self, offered: Offered, call: Call) -> Any:
        tool = offered.get(call.name)
        if tool is None:
            hint = did_you_mean(call.name, offered, ", ")
            raise WrongCallError(f"there is no tool {call.name!r}{hint}; there are: {', '.join(offered)}")
        arguments = tool.arguments(call)
        if isinstance(tool, ObjectMethod):
            return await tool.owner.call(tool.name, arguments)
        try:
            return await call_within(self.call_timeout, self._threads, tool.function, **arguments)
        except LateError as error:
            raise TimeoutError(f"it took longer than {self.call_timeout:g} s") from error


def _with_state(task: Task, state: Mapping[str, Any]) -> Task:
    """Return a task whose metadata has the attributes of a rollout's objects."""
    return attrs.evolve(task, metadata={**task.metadata, TOOL_STATE: state})


def _tool(path: str, index: int) -> Tool | ToolClass:
    try:
        found = find(path)
        if inspect.isclass(found):
            return ToolClass.of(found)
        if not inspect.isroutine(found):
            raise ValueFault(f"{path} is of type {type(found).__name__}; expected a function or a class")
        return Tool.of(found)
    except ValueFault as error:
        raise OptionError(NAME, [(f"tools[{index}]", str(error))]) from error


def _repeated(tools: Iterable[Tool | McpTool]) -> str:
    """Return the names that several tools have, separated by commas."""
    return ", ".join(name for name, count in Counter(tool.name for tool in tools).items() if count > 1)
