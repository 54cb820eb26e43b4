"""Tools of MCP servers: a process or an address, whose tools the policy may call (modelcontextprotocol.io)."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from typing import Any, TextIO, cast

import attrs

from rlsdk.errors import EnvironmentFault, ValueFault
from rlsdk.workflows.functions import WrongCallError, named
from rlsdk.workflows.tool_calls import Call

SECONDS_TO_START = 60.0
_SHOWN = 500
"""Characters of what a server printed, shown when it fails."""


class ServerGoneError(RuntimeError):
    """A server ended, or broke the protocol: no fault of the policy, so its rollout fails."""


@attrs.frozen(kw_only=True)
class Server:
    """An MCP server: a command that is started for this run, or the address of one that runs.

    Attributes:
        command: Program, which speaks over its standard input and output.
        args: Of the program.
        env: Environment variables of the program, beside the usual ones (PATH, HOME).
        url: Address of a server that speaks streamable HTTP.
        only: Names of the tools to offer; null for all.
    """

    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = attrs.field(factory=dict)
    url: str | None = None
    only: tuple[str, ...] | None = None

    def check(self) -> None:
        """See whether it could be reached, without starting it.

        Raises:
            ValueFault: It has no command or address, or both; the program or the package mcp is not installed.
        """
        if (self.command is None) == (self.url is None):
            raise ValueFault("expected either `command` (with `args`), or `url`")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueFault(f"url: expected http://… or https://…, got {self.url!r}")
        if self.command is not None and shutil.which(self.command) is None:
            raise ValueFault(f"command: there is no program {self.command!r} here")
        if importlib.util.find_spec("mcp") is None:
            raise ValueFault("MCP servers need the package mcp: pip install 'rlsdk[mcp]'")


@attrs.frozen(eq=False)
class McpTool:
    """A tool of a server, called as a function is.

    Attributes:
        name: As the server calls it.
        function: Async; takes the arguments by name and returns text.
        description: The server's.
        parameters: JSON schema of the arguments.
    """

    name: str
    function: Any
    description: str
    parameters: Mapping[str, Any]

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates and servers know it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def arguments(self, call: Call) -> Mapping[str, Any]:
        """The arguments of a call by name; the server itself checks their values.

        Raises:
            WrongCallError: There are too many, or one is given twice.
        """
        return named(self.name, list(self.parameters.get("properties", {})), call)


class Connection:
    """A live session with a server, in a task of its own, which reconnects after the server ended."""

    def __init__(self, name: str, server: Server) -> None:
        """Make one; the server is started when its tools are asked for.

        Args:
            name: As the config calls it.
            server: Which one.
        """
        self._name, self._server = name, server
        # One session for each event loop: a session cannot leave the loop that it was made on.
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Session] = weakref.WeakKeyDictionary()

    async def tools(self) -> list[McpTool]:
        """The tools that the server has.

        Raises:
            EnvironmentFault: The server does not start, or does not answer.
            ValueFault: It has no tool of a name that is asked for.
        """
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.over:
            session = self._sessions[loop] = _Session(self._name, self._server)
        # Several rollouts wait for one start: one that is cancelled takes it from nobody.
        return await asyncio.shield(session.tools)


class _Session:
    """One connection, from its start to its end."""

    def __init__(self, name: str, server: Server) -> None:
        self._name, self._server = name, server
        self.tools: asyncio.Future[list[McpTool]] = asyncio.get_running_loop().create_future()
        self._end = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._live())

    @property
    def over(self) -> bool:
        """Whether another must take its place."""
        return self._task.done() or self._end.is_set()

    async def _live(self) -> None:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
            printed = cast(TextIO, file)
            try:
                async with asyncio.timeout(SECONDS_TO_START) as limit, self._client(printed) as client:
                    listed = await self._listed(client)
                    limit.reschedule(None)
                    self.tools.set_result(listed)
                    await self._end.wait()
            except (Exception, asyncio.CancelledError) as error:
                self._end.set()
                if self.tools.done():  # whoever calls a tool now is told that the server is gone
                    return
                if isinstance(error, asyncio.CancelledError):
                    self.tools.cancel()
                    raise
                self.tools.set_exception(self._explained(error, printed))

    def _client(self, printed: TextIO) -> Any:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        if self._server.url is not None:
            return Client(self._server.url)
        command, args, env = str(self._server.command), list(self._server.args), dict(self._server.env)
        return Client(stdio_client(StdioServerParameters(command=command, args=args, env=env), errlog=printed))

    async def _listed(self, client: Any) -> list[McpTool]:
        found, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        wanted = self._server.only
        missing = sorted({*(wanted or ())} - {tool.name for tool in found})
        if missing:
            raise ValueFault(f"has no tool {', '.join(missing)}; it has: {', '.join(t.name for t in found) or 'none'}")
        return [
            McpTool(t.name, functools.partial(self._call, client, t.name), t.description or "", t.input_schema)
            for t in found
            if wanted is None or t.name in wanted
        ]

    async def _call(self, client: Any, name: str, /, **arguments: Any) -> str:
        try:
            result = await client.call_tool(name, arguments)
        except Exception as error:
            self._end.set()
            raise ServerGoneError(f"MCP server {self._name!r}, tool {name!r}: {error}") from error
        text = "\n".join(_text(part) for part in result.content)
        if result.is_error:
            raise WrongCallError(text)
        return text

    def _explained(self, error: BaseException, printed: TextIO) -> EnvironmentFault:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        late = f"no answer within {SECONDS_TO_START:g} s" if isinstance(error, TimeoutError) else str(error)
        printed.seek(0)
        said = printed.read()[-_SHOWN:].strip()
        where = self._server.url or " ".join([str(self._server.command), *self._server.args])
        tail = f"; it printed: {said}" if said else ""
        return EnvironmentFault(f"MCP server {self._name!r} ({where}): {late}{tail}")


def _text(part: Any) -> str:
    """What a policy reads of a part of a result; pictures and sounds are named, not shown."""
    return str(part.text) if part.type == "text" else f"[{part.type}]"
