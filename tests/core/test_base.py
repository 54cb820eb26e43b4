"""Features that work with only the base of rlsdk, without torch, datasets, sympy, SQL and training."""

from __future__ import annotations

import json
import os
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from rlsdk.errors import EXTRAS, install_command
from tests.warm import WarmPython

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
HIDE = f"""
import sys
from importlib.abc import MetaPathFinder

class Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {set(EXTRAS)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=;~ ]", each)[0].replace("-", "_").lower() for each in requirements}


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """Run modules in forks of an interpreter that has none of the extras' packages."""
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(HIDE)
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([str(site), root, *filter(None, [os.environ.get("PYTHONPATH")])])
    libraries = ("attrs", "cattrs", "click", "hypothesis", "numpy", "omegaconf", "pluggy")
    process = WarmPython({**os.environ, "PYTHONPATH": path}, libraries)
    yield process
    process.close()


@pytest.fixture
def rlsdk(warm, tmp_path):
    """Run the command line there."""

    def run(*arguments: str, status: int = 0) -> str:
        ran = warm.run("rlsdk.cli", *arguments, cwd=tmp_path)
        assert ran.returncode == status, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    return run


def test_the_base_requires_none_of_the_packages_that_come_by_an_extra():
    assert not names(PROJECT["dependencies"]) & {name.lower() for name in EXTRAS}


def test_each_package_that_is_missed_by_name_comes_with_the_extra_that_is_named():
    distributions = metadata.packages_distributions()
    extras = PROJECT["optional-dependencies"]
    brought_by_another = {"tokenizers": "transformers", "latex2sympy2_extended": "math_verify"}
    for package, extra in EXTRAS.items():
        wanted = {package.lower(), *(each.lower().replace("-", "_") for each in distributions.get(package, ()))}
        wanted.add(brought_by_another.get(package, package))
        assert wanted & names(extras[extra]), f"{package} does not come with rlsdk[{extra}]"


@pytest.mark.parametrize("kind", ["reward", "workflow", "environment", "filter", "tasks", "buffer", "stop"])
def test_components_of_light_kinds_are_written_and_checked(rlsdk, kind):
    rlsdk("new", kind, "mine", "--file")
    assert "0 failed" in rlsdk("check", "mine.py")


def test_what_needs_torch_says_which_extra_brings_it(rlsdk):
    rlsdk("new", "advantage", "mine", "--file")
    assert "pip install 'rlsdk[algorithms]'" in rlsdk("check", "mine.py", status=1)


def test_a_command_that_trains_names_the_whole_stack(rlsdk, tmp_path):
    (tmp_path / "run.yaml").write_text("model: {path: nano}\ntasks: {train: {use: countdown}}\nreward: countdown\n")
    said = rlsdk("train", "run.yaml", status=1)
    assert "pip install 'rlsdk[train]'" in said
    assert "'rlsdk[cpu]' or 'rlsdk[gpu]'" in said
    assert "Traceback" not in said


def test_scoring_works_and_a_reward_that_misses_its_package_says_so(rlsdk, tmp_path):
    row = {
        "prompt": "Make 24 from 3 and 8.",
        "response": "<answer>3*8</answer>",
        "answer": {"target": 24, "numbers": [3, 8]},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert "1" in rlsdk("score", "rows.jsonl", "--reward", "countdown")
    (tmp_path / "sums.jsonl").write_text(json.dumps({**row, "answer": "24"}) + "\n")
    assert "pip install 'rlsdk[math]'" in rlsdk("score", "sums.jsonl", "--reward", "math", status=1)


def test_an_import_that_fails_for_another_reason_gets_no_advice():
    assert install_command(ModuleNotFoundError("No module named 'mylab'", name="mylab")) == ""
    assert install_command(ImportError("cannot import name 'x' from 'torch'", name="torch")) == ""
