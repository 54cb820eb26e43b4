"""Modules loaded by an import, and modules left alone; public names and submodules do not conflict."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import rlsdk

HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers")
ROOT = Path(rlsdk.__file__).parent


def modules_after(code: str) -> set[str]:
    """Names of all modules that a fresh process has loaded after running some code."""
    program = f"import sys\n{code}\nprint('MODULES', *sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(ran.stdout.rpartition("MODULES")[2].split())


@pytest.mark.parametrize(
    ("code", "also"),
    [
        ("import rlsdk", ("numpy", "omegaconf", "rich", "click", "yaml")),
        ("import rlsdk.cli", ("numpy", "omegaconf", "rich", "yaml", "rlsdk.builtins")),
        ("import rlsdk; rlsdk.load('reward', 'countdown')", ("omegaconf", "rich")),
        ("import rlsdk; rlsdk.Task(id='1', prompt='?')", ("numpy",)),
        ("from rlsdk.cli import root; root(['plugins'], standalone_mode=False)", ("rlsdk.builtins", "omegaconf")),
        ("from rlsdk.cli import root; root(['plugins', '--json'], standalone_mode=False)", ("rlsdk.builtins",)),
        ("from rlsdk.cli import root; root(['--help'], standalone_mode=False)", ("rlsdk.cli.train", "rich")),
        ("import rlsdk.config", ("numpy",)),
    ],
)
def test_light_things_load_nothing_heavy(code, also):
    assert not {*HEAVY, *also} & modules_after(code)


def test_the_plugin_of_pytest_loads_nothing():
    """It is loaded in every project, before coverage is measured and warnings are filtered."""
    added = modules_after("import rlsdk.testing.pytest_plugin") - modules_after("import typing, importlib")
    assert {name for name in added if name.partition(".")[0] not in sys.stdlib_module_names} == {
        "rlsdk",
        "rlsdk.testing",
        "rlsdk.testing.pytest_plugin",
    }


@pytest.mark.stack
def test_a_learner_loads_deepspeed_without_mlflow():
    pytest.importorskip("mlflow")
    found = modules_after("from rlsdk.learners import deepspeed; deepspeed._import_deepspeed()")
    assert "deepspeed" in found
    assert "mlflow" not in found


def test_a_public_name_is_loaded_when_it_is_used():
    before, after = modules_after("import rlsdk"), modules_after("import rlsdk; rlsdk.CreditInputs")
    assert "torch" in after
    assert "torch" not in before


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'rlsdk' has no attribute 'nonsense'"):
        _ = rlsdk.nonsense
    assert dir(rlsdk) == sorted(rlsdk.__all__)


def submodules() -> list[str]:
    """Every module of rlsdk that can be imported here."""
    names = [m.name for m in pkgutil.walk_packages([str(ROOT)], "rlsdk.", onerror=lambda name: None)]
    return [name for name in names if not name.endswith("__main__")]


def test_public_names_stay_what_they_are_when_every_submodule_was_imported():
    """A submodule that bears the name of a public attribute would replace it when it is imported."""
    for name in submodules():
        importlib.import_module(name)
    for name in rlsdk.__all__:
        value = getattr(rlsdk, name)
        assert callable(value), name
        assert not inspect.ismodule(value), name
        assert value.__doc__, f"{name} has no docstring"
    assert rlsdk.Score(1.0).value == 1.0
    assert rlsdk.names("kl")
    assert rlsdk.reward("x")(lambda rollout: 1.0)(None) == 1.0
    assert rlsdk.load("kl", "k1")


def packages() -> list[Path]:
    """Every package of rlsdk."""
    return [path.parent for path in ROOT.rglob("__init__.py")]


@pytest.mark.parametrize("package", packages(), ids=lambda p: p.relative_to(ROOT.parent).as_posix().replace("/", "."))
def test_no_submodule_bears_the_name_of_a_public_attribute(package):
    module = ".".join(package.relative_to(ROOT.parent).parts)
    public = set(getattr(importlib.import_module(module), "__all__", ()))
    below = {path.stem for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/__init__.py")}
    assert not public & below
