"""Tools of MCP servers (modelcontextprotocol.io), started by this run or available at a URL."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import logging
import shutil
import tempfile
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TextIO, cast

import attrs

from rlsdk.errors import EnvironmentFault, ValueFault
from rlsdk.tool_calls import Call
from rlsdk.workflows.functions import WrongCallError, named

log = logging.getLogger(__name__)
SECONDS_TO_START = 60.0
"""Time limit for the start of a server and the list of its tools."""
CONNECTION_CLOSED = -32000
"""MCP's error code for a connection that closed before or during a call."""
_SHOWN = 500
"""Maximum characters of a server's output that an error message quotes."""


@attrs.frozen(kw_only=True)
class Server:
    """An MCP server: a command to start for this run, or the address of a running server.

    Attributes:
        command: Program that communicates through standard input and output.
        args: Arguments of the program.
        env: Environment variables of the program, in addition to the usual ones (PATH, HOME).
        url: Address of a streamable HTTP server.
        only: Names of the tools to offer; null for all.
    """

    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = attrs.field(factory=dict)
    url: str | None = None
    only: tuple[str, ...] | None = None

    def check(self) -> None:
        """Check the settings of the server, without starting it.

        Raises:
            ValueFault: Not exactly one of command and URL is given, or the program or the package mcp is not installed.
        """
        if (self.command is None) == (self.url is None):
            raise ValueFault("expected either `command` (with `args`), or `url`")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueFault(f"url: expected http://… or https://…, got {self.url!r}")
        if self.command is not None and shutil.which(self.command) is None:
            raise ValueFault(f"command: there is no program {self.command!r} on this machine")
        if importlib.util.find_spec("mcp") is None:
            raise ValueFault("MCP servers need the package mcp: pip install 'rlsdk[mcp]'")


@attrs.frozen(eq=False)
class McpTool:
    """A tool of an MCP server as an async function of named arguments, described by the server in JSON schema."""

    name: str
    function: Any
    description: str
    parameters: Mapping[str, Any]

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the tool, for chat templates and servers."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def arguments(self, call: Call) -> Mapping[str, Any]:
        """Return the arguments of a call by name; the server checks their values.

        Raises:
            WrongCallError: There are too many arguments, or one is given twice.
        """
        return named(self.name, list(self.parameters.get("properties", {})), call.as_wanted(self.parameters))


class Connection:
    """Connection to a server: the current session, or a new one after the server ended."""

    def __init__(self, name: str, server: Server) -> None:
        """Prepare a connection; the server is started when its tools are first needed."""
        self._name, self._server = name, server
        # One session per event loop, since a session is bound to the loop that created it.
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _McpSession] = weakref.WeakKeyDictionary()

    async def tools(self) -> list[McpTool]:
        """Return the tools that the server offers.

        Raises:
            EnvironmentFault: The server does not start or respond.
            ValueFault: The server lacks a tool named in `only`.
        """
        _, listed = await self._live_session().ready_once()
        wanted = self._server.only
        tools = []
        for t in listed:
            if wanted is None or t.name in wanted:
                hints = t.annotations
                may_repeat = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
                call = functools.partial(self._call, t.name, may_repeat)
                tools.append(McpTool(t.name, call, t.description or "", t.input_schema))
        return tools

    def _live_session(self) -> _McpSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.over:
            session = self._sessions[loop] = _McpSession(self._name, self._server)
        return session

    async def _call(self, tool: str, may_repeat: bool, /, **arguments: Any) -> str:
        """Call a tool; if the server ends during the call, repeat it once if that is safe."""
        from mcp import MCPError

        while True:
            session = self._live_session()
            try:
                client, _ = await session.ready_once()
            except (EnvironmentFault, ValueFault) as error:
                raise WrongCallError(f"{tool} is not available: {error}") from error
            try:
                result = await client.call_tool(tool, arguments)
            except Exception as error:
                if isinstance(error, MCPError) and error.code != CONNECTION_CLOSED:
                    raise WrongCallError(f"{tool}: {error}") from error  # the server refused the call, but runs
                session.end()
                if not may_repeat:
                    raise WrongCallError(f"{tool} is not available: its server ended during the call") from error
                may_repeat = False
            else:
                break
        # Images and audio are only named.
        text = "\n".join(str(part.text) if part.type == "text" else f"[{part.type}]" for part in result.content)
        if result.is_error:
            raise WrongCallError(text)
        return text


class _McpSession:
    """One connection, opened and closed in its own asyncio task."""

    def __init__(self, name: str, server: Server) -> None:
        self._name, self._server = name, server
        self._ready: asyncio.Future[tuple[Any, list[Any]]] = asyncio.get_running_loop().create_future()
        self._end = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._live())

    @property
    def over(self) -> bool:
        """True if a new session is needed."""
        return self._task.done() or self._end.is_set()

    async def ready_once(self) -> tuple[Any, list[Any]]:
        """Return the client and the tools that the server listed, once it has started."""
        # Several rollouts wait for the same start; cancelling one must not cancel it.
        return await asyncio.shield(self._ready)

    def end(self) -> None:
        """End the session, since the server has ended."""
        if not self.over and self._ready.done():
            log.warning("MCP server %r has ended; the next call of one of its tools starts it again", self._name)
        self._end.set()

    async def _live(self) -> None:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
            printed = cast(TextIO, file)
            try:
                async with asyncio.timeout(SECONDS_TO_START) as limit, self._client(printed) as client:
                    listed = await self._listed(client)
                    limit.reschedule(None)
                    self._ready.set_result((client, listed))
                    await self._end.wait()
            except (Exception, asyncio.CancelledError) as error:
                self._end.set()
                if self._ready.done():  # the next call gets a new session
                    return
                if isinstance(error, asyncio.CancelledError):
                    self._ready.cancel()
                    raise
                self._ready.set_exception(self._explained(error, printed))

    def _client(self, printed: TextIO) -> Any:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        if self._server.url is not None:
            return Client(self._server.url)
        command, args, env = str(self._server.command), list(self._server.args), dict(self._server.env)
        transport = stdio_client(StdioServerParameters(command=command, args=args, env=env), errlog=printed)
        return Client(_noticed(transport, self.end))

    async def _listed(self, client: Any) -> list[Any]:
        found, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        missing = sorted({*(self._server.only or ())} - {tool.name for tool in found})
        if missing:
            raise ValueFault(f"has no tool {', '.join(missing)}; it has: {', '.join(t.name for t in found) or 'none'}")
        return found

    def _explained(self, error: BaseException, printed: TextIO) -> EnvironmentFault:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        late = f"no answer within {SECONDS_TO_START:g} s" if isinstance(error, TimeoutError) else str(error)
        printed.seek(0)
        output = printed.read()[-_SHOWN:].strip()
        where = self._server.url or " ".join([str(self._server.command), *self._server.args])
        tail = f"; it printed: {output}" if output else ""
        return EnvironmentFault(f"MCP server {self._name!r} ({where}): {late}{tail}")


@asynccontextmanager
async def _noticed(transport: Any, ended: Callable[[], None]) -> AsyncIterator[tuple[Any, Any]]:
    """Forward a transport's messages, and call `ended` when its process has exited."""
    import anyio

    async with transport as (incoming, outgoing), anyio.create_task_group() as group:
        sending, receiving = anyio.create_memory_object_stream[Any](0)

        async def forward() -> None:
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                async with sending:
                    async for message in incoming:
                        await sending.send(message)
            ended()

        group.start_soon(forward)
        try:
            yield receiving, outgoing
        finally:
            group.cancel_scope.cancel()
