"""Fork server: a process that makes imports once and forks on request, so a killed fork is replaced in milliseconds.

`ForkServer` is the client and `main` the server. A *prepare* function runs in the server before any fork, and returns
the function that each fork runs on its connection. Messages to the server are pickled, since it trusts the process that
started it. Forks run plugin code on a model's text, so nothing that they send back is unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import pickle
import selectors
import signal
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import attrs

from rlsdk.errors import RlsdkError, install_command
from rlsdk.isolation.framing import receive, receive_async, send, send_async
from rlsdk.isolation.process import fork_alone, limit_memory

log = logging.getLogger(__name__)
Work = Callable[[socket.socket], None]
"""Function that a fork runs on its connection; an EOFError or ConnectionError ends the fork without a fault."""

_READY, _REFUSED, _FORK = b"r", b"e", b"f"
_ENDING = struct.Struct("!ii")
"""Process id and exit code of an ended fork; short enough to be written and read in one call."""
_REMEMBERED = 1000
"""Maximum number of exit codes kept for `ForkServer.ending`."""
_LAST_WORDS = 0.5
"""Seconds to wait for the end of the server, or for its report of how a fork ended."""
FORK_SECONDS = 60.0
"""Timeout in seconds for a fork, which takes milliseconds; a server that does not answer is replaced."""
_FULL = 0.01
"""Seconds before a request that did not fit into the server's socket buffer is retried."""
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it: no print fails because of a character
from rlsdk.isolation.fork_server import main
main(int(sys.argv[2]))
"""


class ForkServerError(Exception):
    """The fork server did not start, or cannot fork.

    Attributes:
        refused: True if the prepare function raised an error, which it would raise again.
    """

    def __init__(self, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


@attrs.frozen(eq=False)
class Fork:
    """The caller's side of a fork; not bound to an event loop.

    Attributes:
        pid: Id of its process, and of its process group.
        connection: Socket to it, non-blocking.
    """

    pid: int
    connection: socket.socket

    async def ask(self, message: bytes) -> bytes:
        """Send a message and return the reply; raises EOFError if the process ends first."""
        try:
            await send_async(self.connection, message)
            return await receive_async(self.connection)
        except ConnectionError as error:
            raise EOFError from error

    def kill(self) -> None:
        """Kill the process and its process group."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class ForkServer:
    """Client of the server, which is started for the first fork and restarted if it dies."""

    def __init__(
        self,
        what: str,
        prepare: Callable[[Any], Work],
        argument: Any,
        *,
        memory: int = 0,
        log_to: Path | None = None,
    ) -> None:
        """Describe a server without starting it.

        Args:
            what: Name of the forks in messages, in the plural.
            prepare: Module-level function, called in the server with `argument`.
            argument: Picklable value.
            memory: Bytes of private memory that a fork may use beyond its initial size (Linux); 0 for no limit.
            log_to: File for the output of server and forks; None for standard error.
        """
        self._what, self._served, self._log_to = what, (prepare, argument, memory), log_to
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._endings: dict[int, int] = {}

    async def ready(self) -> None:
        """Start the server, or restart it if it has ended; it ends with this process.

        Raises:
            ForkServerError: It did not start.
        """
        self.enter_loop()
        async with self._starting:  # concurrent callers wait for the same server
            if self._process is not None and self._process.poll() is not None:
                log.warning("the process that forks %s ended and is restarted", self._what)
                self.close()
            if self._process is None:
                await self._start()

    async def fork(self) -> Fork:
        """Fork a process, starting the server if necessary.

        Raises:
            ForkServerError: The server did not start, or cannot fork.
        """
        retried, server = False, None
        while True:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            try:
                with theirs:
                    await self.ready()
                    server = self._process
                    await self._request(theirs)
                async with asyncio.timeout(FORK_SECONDS):
                    return Fork(int(await receive_async(ours)), ours)
            except (EOFError, OSError) as error:
                ours.close()
                if isinstance(error, TimeoutError) and server is self._process is not None:  # such as under SIGSTOP
                    log.warning("the process that forks %s does not answer and is replaced", self._what)
                    self.close()
                if server is not None and not retried:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        await asyncio.to_thread(server.wait, _LAST_WORDS)
                # A server that was killed before it read the request is replaced.
                if retried or server is None or server.poll() is None:
                    why = "check the limits on memory and processes"
                    raise ForkServerError(f"no process could be forked for {self._what}; {why}") from error
                retried = True
            except BaseException:
                ours.close()
                raise

    async def ending(self, fork: Fork) -> str:
        """Describe how a fork ended."""
        self.enter_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS):
                while fork.pid not in self._endings:
                    self._reported.clear()
                    await self._reported.wait()
        code = self._endings.pop(fork.pid, None)
        if code is None:
            return "cause unknown"
        return f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def enter_loop(self) -> None:
        """Receive exit codes of forks on the running event loop, which may differ from that of the last call."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self._loop, self._starting, self._reported = loop, asyncio.Lock(), asyncio.Event()
        if self._control is not None:
            loop.add_reader(self._control, self._receive)

    def close(self) -> None:
        """End the server and its forks; the next call starts another server."""
        if self._control is not None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._control)
            self._end()
        self._process = self._control = None

    async def _start(self) -> None:
        import cloudpickle

        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        with theirs, open(self._log_to or os.devnull, "ab") as output:  # noqa: ASYNC230 - as below
            # BLAS threads would not survive the fork, and would take cores from others.
            single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            stream = output if self._log_to else 2
            self._process = subprocess.Popen(  # noqa: ASYNC220 - it takes milliseconds, once
                [sys.executable, "-c", _BOOT, json.dumps([p or os.getcwd() for p in sys.path]), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **single},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                process_group=0,
            )
        self._end = weakref.finalize(self, _end, self._process, self._control)
        try:
            # cloudpickle sends decorated objects by value, and everything else by reference.
            await send_async(self._control, cloudpickle.dumps(self._served))
            reply = await receive_async(self._control)
        except (EOFError, ConnectionError) as error:
            self.close()
            raise ForkServerError(
                f"the process that forks {self._what} did not start; see {self._log_to or 'standard error'}"
            ) from error
        except BaseException:
            self.close()
            raise
        if reply.startswith(_REFUSED):
            self.close()
            raise ForkServerError(reply[1:].decode(errors="replace"), refused=True)
        asyncio.get_running_loop().add_reader(self._control, self._receive)

    async def _request(self, connection: socket.socket) -> None:
        """Send the other end of a connection to the server."""
        while True:
            control = self._control
            try:
                if control is None:
                    raise ConnectionResetError("the server was closed")
                socket.send_fds(control, [_FORK], [connection.fileno()])
                return
            except BlockingIOError:
                await asyncio.sleep(_FULL)
            except ConnectionError:  # it is ending; `ready` starts another after its end
                if control is not None and control is self._control and self._process is not None:
                    await asyncio.to_thread(self._process.wait)
                await self.ready()

    def _receive(self) -> None:
        assert self._control is not None and self._loop is not None
        try:
            received = self._control.recv(_ENDING.size * 64)
        except OSError:
            received = b""
        if not received:
            self._loop.remove_reader(self._control)
            return
        self._endings.update(_ENDING.iter_unpack(received))
        while len(self._endings) > _REMEMBERED:  # entries of killed forks are never queried
            self._endings.pop(next(iter(self._endings)))
        self._reported.set()


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    if process.poll() is None:  # its forks end with it; what it started when it imported is in its group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(descriptor: int) -> None:
    """Run the server: prepare, fork a process for each socket received, and report how forks ended."""
    control = socket.socket(fileno=descriptor)
    control.setblocking(True)  # whatever `socket.setdefaulttimeout` was called with
    setup = receive(control)
    try:
        prepare, argument, memory = pickle.loads(setup)  # noqa: S301 - from the process that started this one
        work: Work = prepare(argument)
    except (RlsdkError, ImportError) as error:
        remedy = install_command(error)
        send(control, _REFUSED + (f"{error}; {remedy}" if remedy else str(error)).encode())
        return
    gc.collect()
    gc.freeze()  # imported objects stay shared with the forks
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    send(control, _READY)
    with selectors.DefaultSelector() as ready:
        ready.register(control, selectors.EVENT_READ)
        ready.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is not control:
                    os.read(woken, 4096)
                    _reap(control)
                    continue
                try:
                    message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
                except ConnectionError:
                    return
                if message != _FORK:
                    return
                if os.fork() == 0:
                    signal.set_wakeup_fd(-1)
                    control.close()
                    connection = socket.socket(fileno=descriptors[0])
                    connection.setblocking(True)
                    _live(connection, work, memory)
                os.close(descriptors[0])


def _reap(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        control.sendall(_ENDING.pack(pid, os.waitstatus_to_exitcode(status)))


def _live(connection: socket.socket, work: Work, memory: int) -> NoReturn:
    """Serve one connection; a fork never returns into the server's code."""
    code = 1
    try:
        fork_alone()
        if memory:
            limit_memory(memory)
        # Otherwise, a process forked by `work` could reply, and its reply would be taken for that to the next call.
        os.register_at_fork(after_in_child=connection.close)
        send(connection, str(os.getpid()).encode())
        work(connection)
        code = 0
    except (EOFError, ConnectionError):  # its owner is gone
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
