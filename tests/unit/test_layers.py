"""The layers hold, and the import contracts can fail."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rlsdk.config.reference import settings
from rlsdk.kinds import KINDS

ROOT = Path(__file__).resolve().parents[2]
LIGHT = """
import sys
{code}
print(*({{"torch", "ray", "vllm", "deepspeed", "transformers"}} & set(sys.modules)))
"""


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter in a folder, with the configuration there."""
    code = (
        "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command; lint_imports_command()"
    )
    command = [sys.executable, "-c", code, "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project under our contracts, with every module of rlsdk, all of them empty."""
    configured = (ROOT / "pyproject.toml").read_text()
    tables = re.findall(
        r"^\[+tool\.importlinter.*?(?=^\[+tool\.(?!importlinter)|\Z)", configured, re.DOTALL | re.MULTILINE
    )
    (tmp_path / "pyproject.toml").write_text("".join(tables))
    (tmp_path / "rlsdk").mkdir()
    (tmp_path / "rlsdk" / "__init__.py").touch()
    layers = re.search(r"^layers = \[(.*?)^\]", configured, re.DOTALL | re.MULTILINE)
    for name in re.findall(r"[a-z_]+", layers.group(1)):
        (tmp_path / "rlsdk" / f"{name}.py").touch()
    return tmp_path


def test_the_diagram_of_the_design_is_checked() -> None:
    checked = contracts()["layers"]["layers"]
    page = (ROOT / "docs" / "design.md").read_text()
    (drawing,) = re.findall(r"^```\n(cli .*?)^```", page, re.DOTALL | re.MULTILINE)
    drawn = [re.match(r"\w+(?: \| \w+)*", line) for line in drawing.splitlines()]
    assert [line and line[0] for line in drawn] == checked


def test_modules_that_the_design_names_exist() -> None:
    named = re.findall(r"`(\w+)\.(\w+)[.\w]*`", (ROOT / "docs" / "design.md").read_text())
    keys = {key.path for key in settings()}
    places = [(room, name) for room, name in named if (ROOT / "rlsdk" / room).is_dir() and f"{room}.{name}" not in keys]
    assert ("rollout", "task_ledger") in places
    assert [f"{room}.{name}" for room, name in places if not (ROOT / "rlsdk" / room / f"{name}.py").exists()] == []


def contracts() -> dict[str, Any]:
    """Our contracts, by id."""
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {contract["id"]: contract for contract in configured["tool"]["importlinter"]["contracts"]}


@pytest.mark.parametrize(
    ("contract", "others"),
    [
        (
            "parts",
            {
                *("algorithms", "builtins", "diagnoses", "environments", "kit", "renderers", "rewards", "sources"),
                *("tool_parsers", "transfers", "workflows"),
            },
        ),
        ("heavy", {"cluster", "engines", "environments", "learners", "trainer", "two_process", "workers"}),
    ],
)
def test_each_room_is_held_by_a_contract_or_named_here(contract: str, others: set[str]) -> None:
    rooms = {room for line in contracts()["layers"]["layers"] for room in line.split(" | ")}
    held = {name.removeprefix("rlsdk.") for name in contracts()[contract]["source_modules"]}
    assert rooms - held == others


def test_the_layers_hold():
    ran = lint(ROOT)
    assert ran.returncode == 0, ran.stdout
    assert "4 kept, 0 broken" in ran.stdout


def test_empty_modules_keep_the_contracts(project):
    assert lint(project).returncode == 0


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("algorithms", "rlsdk.engines"),  # upwards
        ("types", "rlsdk.batch"),
        ("algorithms", "rlsdk.rewards"),  # a sibling
        ("learners", "rlsdk.engines"),
        ("rewards", "ray"),  # heavy, in a light module
        ("cli", "deepspeed"),
        ("scoring", "vllm"),
        ("rollout", "ray"),
        ("trainer", "rlsdk.algorithms"),  # a built-in, in the core
        ("evaluation", "rlsdk.workflows"),
        ("cli", "rlsdk.sources"),
    ],
)
def test_a_forbidden_import_is_found(project, module, imported):
    (project / "rlsdk" / f"{module}.py").write_text(f"def late():\n    import {imported}\n")
    ran = lint(project)
    assert ran.returncode == 1
    assert f"rlsdk.{module} -> {imported}" in ran.stdout


@pytest.mark.parametrize(("module", "imported"), [("cluster", "ray"), ("engines", "vllm"), ("cli", "rlsdk.trainer")])
def test_an_allowed_import_is_allowed(project, module, imported):
    (project / "rlsdk" / f"{module}.py").write_text(f"import {imported}\n")
    assert lint(project).returncode == 0


def test_a_module_without_a_place_is_found(project):
    (project / "rlsdk" / "helpers.py").touch()
    ran = lint(project)
    assert ran.returncode == 1
    assert "rlsdk.helpers" in ran.stdout


@pytest.mark.parametrize(
    "code", ["import rlsdk", "import rlsdk; rlsdk.load('reward', 'countdown')", "import rlsdk.cli"]
)
def test_light_parts_load_no_heavy_library(code):
    ran = subprocess.run(
        [sys.executable, "-c", LIGHT.format(code=code)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert ran.stdout.split() == []


BASE_ONLY = """
import re, sys
from importlib import metadata
from packaging.requirements import Requirement

def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()

def closure(name, extras, seen):
    if (name, extras) in seen:
        return
    seen.add((name, extras))
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:  # not needed on this system
        return
    for needed in map(Requirement, lines):
        if not needed.marker or any(needed.marker.evaluate({"extra": extra}) for extra in (extras or ("",))):
            closure(canonical(needed.name), tuple(sorted(needed.extras)), seen)

seen = set()
closure("rlsdk", (), seen)
for extra in sys.argv[1].split():
    closure("rlsdk", (extra,), seen)
base = {name for name, _ in seen}
modules = metadata.packages_distributions().items()
sys.modules.update({module: None for module, owners in modules if not base & set(map(canonical, owners))})
assert sys.modules["ray"] is None and sys.modules["transformers"] is None
import rlsdk
for kind in sys.argv[2:]:
    print(kind, *rlsdk.names(kind))
"""
WITH_TORCH = ("shaping", "advantage", "policy_loss", "correction", "kl")


@pytest.mark.parametrize("extra", ["", "algorithms"])
def test_pure_kinds_need_nothing_beyond_their_install(extra):
    """Their components import although every distribution is hidden that `pip install rlsdk` does not bring.

    Those that compute with tensors need the extra `algorithms`.
    """
    pure = [kind for kind in KINDS if kind not in ("engine", "learner", "tracker")]
    kinds = pure if extra else [kind for kind in pure if kind not in WITH_TORCH]
    ran = subprocess.run([sys.executable, "-c", BASE_ONLY, extra, *kinds], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert [line.split()[0] for line in ran.stdout.splitlines()] == kinds


def test_a_kind_that_lacks_its_extra_names_it():
    ran = subprocess.run(
        [sys.executable, "-c", BASE_ONLY, "", "advantage"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert "pip install 'rlsdk[algorithms]'" in ran.stderr


def test_explain_needs_nothing_beyond_the_base_install():
    code = BASE_ONLY.partition("import rlsdk\n")[0] + "import rlsdk.cli.explain"
    ran = subprocess.run([sys.executable, "-c", code, ""], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
