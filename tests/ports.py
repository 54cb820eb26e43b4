"""Ports for servers that another process opens, or that nobody does."""

from __future__ import annotations

import contextlib
import random
import socket

_PORTS = range(20_000, 32_000)
"""Above the ports of Ray's workers and below the system's ephemeral ports, which another test may get at any moment."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nothing uses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket(family) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise AssertionError("no port is free")
