"""Plugins use only public names, from modules of `rlsdk.PUBLIC_MODULES`."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import rlsdk
from rlsdk.kinds import KINDS

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    *sorted((ROOT / "plugins").glob("**/*.py")),
    *sorted((ROOT / "examples").rglob("*.py")),
    *sorted((ROOT / "tests" / "packages").glob("**/*.py")),
]


def private_uses(source: str) -> list[str]:
    """Non-public names of rlsdk that a file uses, one line each."""
    tree, found = ast.parse(source), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            used = [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rlsdk":
            used = [("rlsdk", node.attr)]
        else:
            continue
        found += [f"line {node.lineno}: {m}{f'.{n}' if n else ''}" for m, n in used if not is_public(m, n)]
    return found


def is_public(module: str, name: str | None) -> bool:
    if module.partition(".")[0] != "rlsdk":
        return True
    if module not in rlsdk.PUBLIC_MODULES:
        return False
    if name is None or f"{module}.{name}" in rlsdk.PUBLIC_MODULES:
        return True
    loaded = importlib.import_module(module)
    offered = getattr(loaded, "__all__", None)
    return name in offered if offered is not None else hasattr(loaded, name) and not name.startswith("_")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_plugins_and_examples_use_public_names_alone(file: Path) -> None:
    assert private_uses(file.read_text(encoding="utf-8")) == []


def test_a_plugin_of_each_kind_is_frozen() -> None:
    """docs/api_policy.md says so."""
    frozen = (ROOT / "tests" / "packages" / "frozen_v1").glob("my_*.py")
    assert {path.stem.removeprefix("my_") for path in frozen} == set(KINDS)


def test_there_are_plugins() -> None:
    assert {file.parent.name for file in FILES} >= {
        "tests",
        "rlsdk_agents",
        "rlsdk_gridworlds",
        "rlsdk_tinker",
        "rlsdk_verifiers",
        "rlsdk_zoo",
    }


@pytest.mark.parametrize(
    "line",
    [
        "from rlsdk.algorithms.packed import trained",
        "import rlsdk.trainer.run",
        "def late():\n    from rlsdk.rollout import chat",
        "from rlsdk.kit import _LAZY",
        "from rlsdk.types import _array",
        "import rlsdk\nrlsdk.rollout.chat",
    ],
)
def test_what_is_private_is_found(line: str) -> None:
    assert len(private_uses(line)) == 1


@pytest.mark.parametrize("module", rlsdk.PUBLIC_MODULES)
def test_every_public_name_is_there(module: str) -> None:
    loaded = importlib.import_module(module)
    for name in getattr(loaded, "__all__", ()):
        assert getattr(loaded, name) is not None
    assert loaded.__doc__


def test_the_kit_is_light() -> None:
    code = "import sys, rlsdk.kit; rlsdk.kit.find; rlsdk.kit.ActionPattern; print({'torch', 'ray'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


def test_a_name_missing_from_the_kit_is_reported_with_the_existing_ones() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'; it offers: PATTERN"):
        importlib.import_module("rlsdk.kit").nothing  # noqa: B018
