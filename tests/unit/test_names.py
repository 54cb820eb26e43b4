"""The core names no built-in component except its defaults, and no annotation names a higher layer."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsdk.builtins import MODULES

ROOT = Path(__file__).resolve().parents[2]
PARTS = {"algorithms", "rewards", "workflows", "sources"}
"""Folders of built-in components, which may name each other."""
DEFAULTS = ROOT / "rlsdk" / "config" / "defaults.py"
EXCEPTIONS = {
    "rlsdk/cli/data.py": "a command that writes files for the tasks `countdown`",
    "rlsdk/kit.py": "helpers for plugins, which are those of built-in components",
}
BUILT_IN = {name for names in MODULES.values() for name in names}


def core() -> Iterator[Path]:
    """Yield the modules that are neither built-in components nor in their packages."""
    own = {ROOT / f"{name.replace('.', '/')}.py" for name in BUILT_IN}
    for path in sorted((ROOT / "rlsdk").rglob("*.py")):
        if path not in {*own, DEFAULTS} and path.relative_to(ROOT).parts[1] not in PARTS:
            yield path


def named(source: str) -> list[str]:
    """Return the lines of a module that choose or recognise a component by a name in the code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)) if text.startswith("core/"):
                pass
            case ast.Call(func=ast.Name(id="Use"), args=[ast.Constant()]):
                pass
            case ast.Call(func=ast.Name(id="load") | ast.Attribute(attr="load"), args=[ast.Constant(), ast.Constant()]):
                pass
            case ast.Compare(
                left=ast.Attribute(
                    value=ast.Attribute(attr="workflow" | "reference" | "engine" | "learner" | "algorithm"), attr="name"
                ),
                comparators=[ast.Constant() | ast.Tuple()],
            ):
                pass
            case ast.ImportFrom(module=str(module)) if module in BUILT_IN:
                pass
            case _:
                continue
        found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_no_module_of_the_core_names_a_built_in() -> None:
    files = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in core()}
    assert len(files) > 200
    assert {name: lines for name, text in files.items() if name not in EXCEPTIONS and (lines := named(text))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "plan.workflow.name == 'agent'",
        "plan.workflow.name in ('agent', 'tools')",
        "name == 'core/agent'",
        "load('workflow', 'single_turn')",
        "rlsdk.load('workflow', 'single_turn')",
        "use = Use('grpo')",
        "def late():\n    from rlsdk.rewards.countdown import countdown",
    ],
)
def test_a_name_in_the_code_is_found(line: str) -> None:
    assert len(named(line)) == 1


def test_annotations_name_rooms_below_their_own() -> None:
    """import-linter leaves out imports under TYPE_CHECKING, since `rlsdk/__init__.py` shows all public names there."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (lines,) = (contract["layers"] for contract in contracts if contract["id"] == "layers")
    layer = {room: depth for depth, line in enumerate(lines) for room in line.split(" | ")}
    upwards = set()
    for path in (ROOT / "rlsdk").rglob("*.py"):
        own = path.relative_to(ROOT / "rlsdk").parts[0].removesuffix(".py")
        for other in re.findall(r"^ *from rlsdk\.(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            if own in layer and other != own and other in layer and layer[other] <= layer[own]:
                upwards.add((own, other))
    assert upwards == {("schedules", "components")}  # a scheduled component says what it is


def test_no_two_classes_have_one_name() -> None:
    found = Counter(
        name
        for path in sorted((ROOT / "rlsdk").rglob("*.py"))
        for name in re.findall(r"^ *class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert len(found) > 500
    assert [name for name, count in found.items() if count > 1] == []
