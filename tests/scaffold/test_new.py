"""`rlsdk new`: its files import, pass their own tests and `rlsdk check`; invalid names are refused."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from rlsdk.kinds import KINDS
from rlsdk.scaffold import TEMPLATES
from tests.scaffold.conftest import Rlsdk, add_metadata
from tests.warm import WarmPython

FILES = {
    ".github/workflows/tests.yml",
    ".gitignore",
    "README.md",
    "pyproject.toml",
    "rlsdk_brief/__init__.py",
    "rlsdk_brief/py.typed",
    "tests/test_brief.py",
    "train.yaml",
}


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_kind_has_a_template() -> None:
    assert set(TEMPLATES) == set(KINDS)


def test_a_package_has_all_files_and_the_next_commands_are_printed(rlsdk: Rlsdk) -> None:
    said = rlsdk("new", "plugin", "rlsdk-brief").output
    assert {str(path.relative_to("brief")) for path in Path("brief").rglob("*") if path.is_file()} == FILES
    assert said.split("Next:\n")[1].splitlines() == [
        "  cd brief && pip install -e .",
        "  rlsdk check brief",
        "  rlsdk model new nano model && rlsdk train train.yaml",
    ]
    project = tomllib.loads(Path("brief/pyproject.toml").read_text())
    assert project["project"]["entry-points"]["rlsdk.v1"] == {"brief": "rlsdk_brief"}
    assert project["project"]["name"] == "rlsdk-brief"
    assert "$" not in Path("brief/README.md").read_text()
    assert yaml.safe_load(Path("brief/.github/workflows/tests.yml").read_text())["jobs"]["tests"]["steps"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_configuration_uses_the_component(rlsdk: Rlsdk, kind: str) -> None:
    rlsdk("new", kind, "brief", "--dir", "lab")
    text = Path("lab/brief/train.yaml").read_text()
    assert yaml.safe_load(text)["name"] == "brief" and "brief/brief" in text


def test_packages_of_all_kinds_pass_their_own_tests(rlsdk: Rlsdk, tmp_path: Path) -> None:
    for kind in KINDS:
        rlsdk("new", "plugin", f"my-{kind}", "--kind", kind)
    folders = [tmp_path / f"my_{kind}" for kind in KINDS]
    path = os.pathsep.join([*map(str, folders), str(Path(__file__).parents[2])])
    process = WarmPython({**os.environ, "PYTHONPATH": path})
    try:
        tests = [folder / "tests" for folder in folders]
        options = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, "--import-mode=importlib")
        ran = process.run("pytest", *options, *tests, cwd=tmp_path)
    finally:
        process.close()
    assert ran.returncode == 0, ran.stdout


def test_an_installed_package_is_checked_by_its_name(
    rlsdk: Rlsdk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rlsdk("new", "reward", "terse")
    add_metadata(tmp_path / "terse", "terse")
    monkeypatch.syspath_prepend(str(tmp_path / "terse"))
    assert "1 component" in rlsdk("check", "terse").output
    sys.modules.pop("rlsdk_terse", None)


def test_one_file_is_checked_and_its_configuration_names_it(rlsdk: Rlsdk) -> None:
    said = rlsdk("new", "reward", "brief.py").output
    assert sorted(path.name for path in Path().iterdir()) == ["brief.py", "brief.yaml"]
    assert "rlsdk check brief.py" in said and "rlsdk train brief.yaml" in said
    rlsdk("check", "brief.py")
    assert yaml.safe_load(Path("brief.yaml").read_text())["plugins"] == ["brief.py"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("2fast", "lower-case letters, digits and underscores"),
        ("My-Lab", "lower-case letters, digits and underscores"),
        ("lambda", "not a keyword of Python"),
        ("../up", "cannot name a plugin"),
        ("core", "a plugin 'core' is already installed"),
        ("json", "name of a Python module"),
        ("attrs", "name of a Python module"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(rlsdk: Rlsdk, name: str, words: str) -> None:
    assert words in rlsdk("new", "reward", name, status=1).output
    assert list(Path().iterdir()) == []


def test_nothing_is_overwritten(rlsdk: Rlsdk) -> None:
    Path("brief").mkdir()
    assert "brief already exists" in rlsdk("new", "reward", "brief", status=2).output
    Path("brief.yaml").write_text("mine")
    assert "brief.yaml already exists" in rlsdk("new", "reward", "brief", "--file", status=1).output
    assert Path("brief.yaml").read_text() == "mine" and not Path("brief.py").exists()
