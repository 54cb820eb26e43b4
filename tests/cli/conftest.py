"""Commands whose output has unlimited width."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_columns(monkeypatch):
    """The width of the terminal in which the tests run is none of theirs."""
    monkeypatch.delenv("COLUMNS", raising=False)
