"""Plugins written for an earlier commit still load: one component of each kind, never edited."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path

import pytest

import rlsdk

FROZEN = Path(__file__).parent / "frozen_v1"
"""Written by `rlsdk new KIND my_KIND --file` at commit 2ac8a07 (diagnosis, optimizer, sampler and weight_transfer at
5ccfd58; lr_schedule with the commit that adds the kind); docs/api_policy.md promises that these work."""


def test_nobody_edited_them() -> None:
    sums = dict(line.split()[::-1] for line in (FROZEN / "SHA256SUMS").read_text().splitlines())
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in FROZEN.glob("*.py")}
    assert found == sums


@pytest.mark.parametrize("kind", [path.stem.removeprefix("my_") for path in sorted(FROZEN.glob("*.py"))])
def test_a_plugin_of_an_earlier_commit_loads(kind: str) -> None:
    file = FROZEN / f"my_{kind}.py"
    plugins = rlsdk.Plugins([file])
    name = f"my_{kind}/my_{kind}"
    _, component = plugins.find(kind, name)
    assert component.kind == kind and component.summary
    made = component.bind({})
    assert callable(made) or inspect.getmembers(made)
