"""Environments with a process of their own: forks of one that has imported what they need, killed when they hang."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rlsdk.environments.fork import FORK, READY
from rlsdk.errors import EnvironmentFault, PluginError
from rlsdk.isolation.framing import receive_async, send_async
from rlsdk.plugins import ComponentRef
from rlsdk.types import Observation, Step

_CLOSING = 2.0
"""Seconds in which a process may close its environment before it is killed."""
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from rlsdk.environments.fork import main
main(int(sys.argv[2]))
"""


class EnvTemplate:
    """A process that has imported an environment's code, and forks one process for each instance."""

    def __init__(self, reference: ComponentRef) -> None:
        """Create a template for one kind of environment.

        Args:
            reference: Reference to the environment component, without options.
        """
        self._reference = reference
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = asyncio.Lock()

    async def ready(self) -> None:
        """Start it, or start it again; it ends when this process does.

        Raises:
            PluginError: The environment is not there, or is another than the driver's.
            EnvironmentFault: The process did not start.
        """
        async with self._starting:
            if self._process is None or self._process.poll() is not None:
                await self._start()

    async def _start(self) -> None:
        import cloudpickle

        self._control, there = socket.socketpair()
        with there:
            path = json.dumps([p or os.getcwd() for p in sys.path])
            command = [sys.executable, "-c", _BOOT, path, str(there.fileno())]
            self._process = subprocess.Popen(  # noqa: ASYNC220 - it takes milliseconds, once
                command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL
            )
        weakref.finalize(self, _ended, self._process, self._control)
        self._control.setblocking(False)
        try:
            await send_async(self._control, cloudpickle.dumps(self._reference))
            reply = await receive_async(self._control)
        except (EOFError, ConnectionError) as error:
            raise EnvironmentFault(
                f"the process that environments {self._reference.name!r} are forked from did not start"
            ) from error
        if reply != READY:
            raise PluginError(reply.decode(errors="replace"))

    def fork(self) -> socket.socket:
        """The connection to a new process."""
        here, there = socket.socketpair()
        with there:
            try:
                socket.send_fds(self._control, [FORK], [there.fileno()])
            except OSError:
                here.close()
                raise
        here.setblocking(False)
        return here


def _ended(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()  # its forks end with it
    process.wait()


class SubprocessEnv:
    """An environment that runs in its own process."""

    def __init__(self, template: EnvTemplate, options: Mapping[str, Any]) -> None:
        """Create the environment; its process starts with `reset`.

        Args:
            template: Ready template of its kind.
            options: Options of this environment.
        """
        self._template, self._options = template, options
        self._connection: socket.socket | None = None
        self._pid = 0

    async def reset(self, seed: int, seconds: float) -> Any:
        """Start the process, make the environment, start its episode."""
        import cloudpickle

        options = cloudpickle.dumps(dict(self._options))
        self._connection = self._template.fork()
        async with self._limited(seconds):
            self._pid = int(await receive_async(self._connection))
            await send_async(self._connection, options)
        found = await self._ask({"reset": seed}, seconds)
        return Observation(**found["observation"]) if set(found) == {"observation"} else found

    async def step(self, text: str, seconds: float) -> Any:
        """Act."""
        found = await self._ask({"step": text}, seconds)
        if "reward" not in found:
            return found
        return Step(observation=Observation(**found.pop("observation")), **found)

    async def close(self) -> None:
        """Let it close, but not for long; then its process is gone."""
        if self._connection is None:
            return
        try:
            await self._ask({"close": True}, _CLOSING)
        finally:
            self._kill()

    async def _ask(self, call: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        if self._connection is None:
            raise RuntimeError("its process was ended")
        async with self._limited(seconds):
            await send_async(self._connection, json.dumps(call).encode())
            found: dict[str, Any] = json.loads(await receive_async(self._connection))
        if "raised" in found:
            name, text = found["raised"]
            raise type(name, (Exception,), {})(text)  # named as what was raised there
        return found

    @asynccontextmanager
    async def _limited(self, seconds: float) -> AsyncIterator[None]:
        """Kills the process if it takes too long, or nobody waits any more."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            self._kill()
            raise TimeoutError(f"it took longer than {seconds:g} s and was killed") from None
        except (EOFError, ConnectionError):
            self._kill()
            raise RuntimeError("its process ended") from None
        except asyncio.CancelledError:
            self._kill()
            raise

    def _kill(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
