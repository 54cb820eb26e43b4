"""Workers forked from a process with all imports, and workers that must not be forked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlsdk.cluster import template as module
from rlsdk.cluster.template import template, warmed
from rlsdk.config import Plan, check
from rlsdk.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
WORKER = """
import gc, json, os, sys
seen = {name: name in sys.modules for name in ("torch", "deepspeed", "rlsdk.engines.cached", "ray")}
garbage = {"looked for": gc.isenabled(), "frozen": gc.get_freeze_count()}
import re, unittest.mock, transformers.conversion_mapping as conversions
before = set(sys.modules)
import transformers.models.llama.modeling_llama
loading = [name for name in set(sys.modules) - before if not name.startswith("transformers.models.llama")]
with unittest.mock.patch.object(re, "compile", wraps=re.compile) as compiling:
    conversions.get_checkpoint_conversion_mapping("llama")
print(json.dumps({"arguments": sys.argv, "folder": os.getcwd(), "variables": dict(os.environ), "modules": seen,
                  "garbage": garbage, "loading a model": [loading, compiling.call_count]}))
import torch
print(torch.get_num_threads(), __name__, file=sys.stderr)
sys.exit(3)
"""
ABANDONED = """
import subprocess, sys
from rlsdk.cluster.template import template
from rlsdk.config import check
with template(check(sys.argv[1], ["engine=transformers"])) as python:
    subprocess.run(python["learner"] + " " + sys.argv[2], shell=True)
"""


def plan(*settings: str) -> Plan:
    return check(EXAMPLE, ["engine=transformers", *settings])


@pytest.fixture(scope="module")
def python() -> Iterator[Mapping[str, str]]:
    with template(plan()) as found:
        yield found


def work(python: str, folder: Path, **variables: str) -> tuple[dict[str, Any], str]:
    """Run the worker as Ray would; return its output on both streams."""
    (folder / "worker.py").write_text(WORKER)
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = f"exec {python} worker.py --one 'two three'"
    ran = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=kept | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.stdout, ran.stderr
    return json.loads(ran.stdout), ran.stderr


@pytest.mark.stack
@pytest.mark.parametrize(
    ("role", "imported"),
    [
        ("learner", {"torch": True, "deepspeed": True, "rlsdk.engines.cached": False, "ray": False}),
        ("engine", {"torch": True, "deepspeed": False, "rlsdk.engines.cached": True, "ray": False}),
    ],
)
def test_a_worker_has_the_imports_of_its_role_and_all_that_its_caller_gave(
    role: str, imported: dict[str, bool], python: Mapping[str, str], tmp_path: Path
) -> None:
    variables = {"OMP_NUM_THREADS": "2", "MINE": "a\nb"}
    seen, errors = work(python[role], tmp_path, **variables)
    assert seen["modules"] == imported
    assert seen["loading a model"] == [[], 0]  # nothing is left to import or compile but the model's own file
    assert seen["garbage"]["looked for"]
    assert seen["garbage"]["frozen"] > 100_000  # what was imported is never looked at again
    assert seen["arguments"] == ["worker.py", "--one", "two three"]
    assert Path(seen["folder"]) == tmp_path.resolve()
    assert seen["variables"].items() >= variables.items()
    assert "TORCHDYNAMO_DISABLE" not in seen["variables"]  # the template had it
    assert errors == "2 __main__\n"


@pytest.mark.stack
@pytest.mark.slow
def test_without_its_template_a_worker_is_a_process_like_any_other(tmp_path: Path) -> None:
    with template(plan()) as python:
        pass
    seen, errors = work(python["learner"], tmp_path, OMP_NUM_THREADS="2")
    assert not any(seen["modules"].values())
    assert seen["arguments"] == ["worker.py", "--one", "two three"]
    assert errors == "2 __main__\n"


@pytest.mark.slow
@pytest.mark.stack
def test_a_driver_that_is_killed_leaves_neither_template_nor_workers(tmp_path: Path) -> None:
    sleeper = tmp_path / "sleeper.py"
    sleeper.write_text(f"import time\nopen({str(tmp_path / 'up')!r}, 'w').close()\ntime.sleep(600)\n")
    driver = subprocess.Popen([sys.executable, "-c", ABANDONED, str(EXAMPLE), str(sleeper)])
    end = time.monotonic() + 120
    while not (tmp_path / "up").exists() and time.monotonic() < end:
        time.sleep(0.1)
    family = psutil.Process(driver.pid).children(recursive=True)
    assert len(family) >= 4  # the template, two roles, the worker
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    assert psutil.wait_procs(family, timeout=20)[1] == []


@pytest.mark.parametrize(
    "settings",
    [
        ["placement.device=cuda"],
        ["placement.ray=127.0.0.1:6379"],
        ["placement.runtime_env={env_vars: {A: b}}"],
        ["learner.compile=true"],
    ],
)
def test_workers_on_other_nodes_gpus_or_with_another_compiler_are_not_forked(settings: list[str]) -> None:
    with template(plan(*settings)) as python:
        assert python == {}


def test_on_a_machine_with_gpus_nothing_is_forked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_GPU", tmp_path)
    with template(plan()) as python:
        assert python == {}


@pytest.mark.stack
def test_a_template_that_began_before_its_plan_was_known_serves_it(tmp_path: Path) -> None:
    with warmed() as begun:
        assert begun is not None
        with template(plan(), begun) as python:
            seen, _ = work(python["engine"], tmp_path)
        assert begun.process.poll() is None  # it ends with whoever began it
    assert seen["modules"]["rlsdk.engines.cached"]
    assert begun.process.poll() is not None


@pytest.mark.parametrize(
    "settings", [["placement.ray=127.0.0.1:6379"], ["engine.compile=true", "learner.compile=true"]]
)
def test_a_template_that_began_and_does_not_fit_the_plan_ends(settings: list[str]) -> None:
    with warmed() as begun:
        assert begun is not None
        with template(plan(*settings), begun) as python:
            assert begun.process.wait(timeout=20) == -signal.SIGKILL
            assert bool(python) == (settings[0] == "engine.compile=true")


def test_a_wrong_configuration_leaves_no_template() -> None:
    with pytest.raises(ConfigError), warmed() as begun:
        plan("group_size=none")
    assert begun is not None
    assert begun.process.poll() is not None


def test_a_package_that_cannot_be_imported_is_reported_by_who_uses_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_package.py").write_text("raise RuntimeError('built for another CPU')")
    (tmp_path / "whole_package.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "COMMON", ("broken_package", "no_package", "whole_package"))
    module.import_common()
    assert sys.modules.pop("whole_package")
