"""One process imports and its forks serve: how they end and restart, and that none is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Callable

import psutil
import pytest

from rlsdk.errors import PluginError
from rlsdk.isolation import fork_server
from rlsdk.isolation.fork_server import ForkServer, ForkServerError
from rlsdk.isolation.framing import receive, send


def prepare(prefix: str) -> Callable[[socket.socket], None]:
    """Forks that answer each message with a prefix; `exit` ends them, `memory` takes a GiB."""

    def work(connection: socket.socket) -> None:
        while True:
            message = receive(connection).decode()
            if message == "exit":
                os._exit(3)
            if message == "memory":
                try:
                    bytearray(1 << 30)
                except MemoryError:
                    message = "refused"
            send(connection, f"{prefix}{message}".encode())

    return work


def prepare_with_a_helper(prefix: str) -> Callable[[socket.socket], None]:
    """Like `prepare`, as a module that starts a process when it is imported."""
    return prepare(f"{prefix}{subprocess.Popen(['sleep', '300']).pid} ")


def refuse(why: str) -> Callable[[socket.socket], None]:
    raise PluginError(why)


def die(_: str) -> Callable[[socket.socket], None]:
    os._exit(1)


def test_forks_answer_and_the_server_tells_how_they_ended() -> None:
    async def work() -> None:
        server = ForkServer("workers", prepare, "hello ", memory=256 << 20)
        one, other = await asyncio.gather(server.fork(), server.fork())
        assert one.pid != other.pid
        assert await one.ask(b"you") == b"hello you"
        assert await one.ask(b"memory") == b"hello refused"
        with pytest.raises(EOFError):
            await one.ask(b"exit")
        assert await server.ending(one) == "exit status 3"
        os.kill(other.pid, signal.SIGSEGV)
        assert await server.ending(other) == "killed by SIGSEGV"
        server.close()

    asyncio.run(work())


def test_a_timeout_of_new_sockets_that_the_program_has_set_ends_no_fork() -> None:
    """Such a socket is non-blocking, and so is its other end's file, whoever opens it."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.2)
    try:

        async def work() -> None:
            server = ForkServer("workers", prepare, "hello ")
            fork = await server.fork()
            assert await fork.ask(b"you") == b"hello you"
            server.close()

        asyncio.run(work())
    finally:
        socket.setdefaulttimeout(before)


def test_closing_ends_the_forks_and_the_next_one_starts_the_server_again() -> None:
    server = ForkServer("workers", prepare, "")

    async def work() -> int:
        fork = await server.fork()
        assert await fork.ask(b"a") == b"a"
        return fork.pid

    first = asyncio.run(work())
    server.close()
    psutil.wait_procs([psutil.Process(first)] if psutil.pid_exists(first) else [], timeout=10)
    assert not psutil.pid_exists(first)
    assert asyncio.run(work()) != first  # in another event loop
    server.close()


def test_requests_that_a_busy_server_cannot_take_yet_wait() -> None:
    count = 400  # more than fit into the socket of the server

    async def work() -> set[bytes]:
        server = ForkServer("workers", prepare, "")
        await server.ready()
        (process,) = (p for p in psutil.Process().children() if "fork_server" in " ".join(p.cmdline()))
        process.suspend()
        forks = asyncio.gather(*(_asked(server, str(i).encode()) for i in range(count)))
        for _ in range(10):  # turns of the event loop, in which all requests are begun
            await asyncio.sleep(0)
        process.resume()
        replies = set(await forks)
        server.close()
        return replies

    assert asyncio.run(work()) == {str(i).encode() for i in range(count)}


def test_requests_that_a_killed_server_has_not_read_go_to_the_next_server() -> None:
    async def work() -> set[bytes]:
        server = ForkServer("workers", prepare, "")
        await server.ready()
        (process,) = (p for p in psutil.Process().children() if "fork_server" in " ".join(p.cmdline()))
        process.suspend()
        forks = asyncio.gather(*(_asked(server, str(i).encode()) for i in range(3)))
        for _ in range(10):
            await asyncio.sleep(0)
        process.kill()
        replies = set(await forks)
        server.close()
        return replies

    assert asyncio.run(work()) == {b"0", b"1", b"2"}


def test_a_server_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "FORK_SECONDS", 0.5)

    async def work() -> set[bytes]:
        server = ForkServer("workers", prepare, "")
        await server.ready()
        (process,) = (p for p in psutil.Process().children() if "fork_server" in " ".join(p.cmdline()))
        process.suspend()
        replies = set(await asyncio.gather(*(_asked(server, str(i).encode()) for i in range(3))))
        assert not process.is_running()
        server.close()
        return replies

    assert asyncio.run(work()) == {b"0", b"1", b"2"}


async def _asked(server: ForkServer, message: bytes) -> bytes:
    fork = await server.fork()
    reply = await fork.ask(message)
    fork.kill()
    return reply


def test_closing_ends_what_the_server_started_when_it_imported() -> None:
    async def work() -> psutil.Process:
        server = ForkServer("workers", prepare_with_a_helper, "")
        helper = psutil.Process(int((await (await server.fork()).ask(b"you")).split()[0]))
        server.close()
        return helper

    psutil.wait_procs([helper := asyncio.run(work())], timeout=5)
    assert not helper.is_running() or helper.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("function", "refused", "text"),
    [
        (refuse, True, "^there is no such thing$"),
        (die, False, "the process that forks workers did not start"),
    ],
)
def test_a_server_that_does_not_start_says_why(function: Callable[..., object], refused: bool, text: str) -> None:
    async def work() -> None:
        await ForkServer("workers", function, "there is no such thing").fork()  # type: ignore[arg-type]

    with pytest.raises(ForkServerError, match=text) as raised:
        asyncio.run(work())
    assert raised.value.refused is refused
