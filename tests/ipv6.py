"""Tests of addresses of IPv6, on machines that have them."""

from __future__ import annotations

import socket

import pytest


def _loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _loopback(), reason="needs the address ::1")
