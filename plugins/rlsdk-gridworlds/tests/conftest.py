"""Fixtures of the worlds' tests: answers, and the package as pip would have installed it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from rlsdk.testing import find_plugins_again

pytest.importorskip("gymnasium")

PACKAGE = Path(__file__).resolve().parents[1]


@pytest.fixture
def answer():
    """An answer without thoughts."""
    return "<answer>{}</answer>".format


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder on the path with the metadata of the package, so that its components have names."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"rlsdk_gridworlds-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    declared = "".join(f"{name} = {value}\n" for name, value in project["entry-points"]["rlsdk.v1"].items())
    (info / "entry_points.txt").write_text(f"[rlsdk.v1]\n{declared}")
    monkeypatch.syspath_prepend(str(tmp_path))
    find_plugins_again()
    yield tmp_path
    find_plugins_again()
