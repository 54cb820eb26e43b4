"""Length-prefixed messages over a stream socket, for blocking and non-blocking code."""

from __future__ import annotations

import asyncio
import socket

_LENGTH = 8
_MOST = 1 << 20
"""Maximum number of bytes per read."""


def send(connection: socket.socket, message: bytes) -> None:
    """Send a message."""
    connection.sendall(_framed(message))


def receive(connection: socket.socket) -> bytes:
    """Return the next message; raises EOFError if the peer has closed the connection."""
    return exactly(connection, int.from_bytes(exactly(connection, _LENGTH), "big"))


async def send_async(connection: socket.socket, message: bytes) -> None:
    """Send a message on a non-blocking socket."""
    await asyncio.get_running_loop().sock_sendall(connection, _framed(message))


async def receive_async(connection: socket.socket) -> bytes:
    """Return the next message on a non-blocking socket; raises EOFError if the peer has closed the connection."""
    return await _exactly_async(connection, int.from_bytes(await _exactly_async(connection, _LENGTH), "big"))


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH, "big") + message


def exactly(connection: socket.socket, count: int) -> bytes:
    """Read exactly `count` bytes; raises EOFError if the peer closes the connection first."""
    parts = []
    while count:
        part = connection.recv(min(count, _MOST))
        if not part:
            raise EOFError("the other side has closed the connection")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


async def _exactly_async(connection: socket.socket, count: int) -> bytes:
    loop, parts = asyncio.get_running_loop(), []
    while count:
        part = await loop.sock_recv(connection, min(count, _MOST))
        if not part:
            raise EOFError("the other side has closed the connection")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
