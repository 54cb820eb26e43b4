"""verifiers itself, in separate folders: the plugin's tests and commands, and `foreign` with rubric functions.

What verifiers asks for conflicts with what vLLM asks for (openai, mcp), so that it is installed without its
requirements, and beside it those that nothing else brings. That takes a network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.packages.conftest import components_of

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "plugins" / "rlsdk-verifiers"
TOYS = Path(__file__).resolve().parent / "vf-toys"
CURRENT = (
    "verifiers==0.4.0",
    "aiofiles==25.1.0",
    "connectrpc==0.11.1",
    "gepa==0.1.4",
    "prime-pydantic-config==0.4.3",
    "prime-runs==0.1.4",
    "prime-sandboxes==0.5.1",
    "prime-tunnel==0.1.15",
    "protobuf-py==0.1.1",
    "pyqwest==0.12.0",
    "renderers==0.1.12",
    "tenacity==9.2.1",
    "tomli-w==1.2.0",
)
RUBRICS = ("verifiers==0.1.14", "nest-asyncio==1.6.0", "tenacity==9.2.1")
"""The last release that has rubrics."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Install distributions without their requirements into a folder."""

    def run(*distributions: str) -> Path:
        folder = tmp_path_factory.mktemp("verifiers")
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", "--target"]
        subprocess.run([*pip, str(folder), *distributions], check=True)
        return folder

    return run


@pytest.fixture(scope="module")
def environment(install, site) -> dict[str, str]:
    """An environment with the plugin, two environments of verifiers', and verifiers."""
    made = install(PLUGIN, TOYS)
    return {**made, "PYTHONPATH": os.pathsep.join([made["PYTHONPATH"], str(site(*CURRENT))])}


def test_the_tests_of_the_plugin_pass_where_verifiers_is(environment):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PLUGIN / "tests")]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    last = ran.stdout.strip().splitlines()[-1]
    assert ran.returncode == 0, ran.stdout
    assert int(last.split(" passed")[0].split()[-1]) >= 23, ran.stdout


def test_it_is_listed_without_importing_verifiers(environment, tmp_path):
    assert components_of("verifiers", "verifiers", environment, tmp_path) == {
        ("tasks", "verifiers/tasks"),
        ("workflow", "verifiers/workflow"),
        ("reward", "verifiers/rubric"),
    }


def test_it_conforms(rlsdk):
    data = {"idx": 1, "prompt": "1+2?", "system_prompt": "Add.", "answer": "3"}
    task = {"prompt": "1+2?", "answer": "3", "metadata": {"environment": "vf-sums", "config": {}, "data": data}}
    options = ("--option", "tasks.environment=vf-sums", "--task", json.dumps(task), "--json")
    found = json.loads(rlsdk("check", "verifiers", *options).stdout)
    assert found["conforms"]
    # An episode of verifiers waits for its own server, which a policy that follows a script does not have.
    assert {f["property"] for f in found["findings"] if f["outcome"] == "skipped"} <= {"ends", "gives-rollouts"}
    held = {(f["component"], f["property"]) for f in found["findings"]}
    assert {("verifiers/tasks", "deterministic"), ("verifiers/rubric", "any-text")} <= held


def test_explain_resolves_it(rlsdk, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    config = {
        "name": "vf",
        "model": {"path": str(tmp_path / "model")},
        "tasks": {"train": {"use": "verifiers/tasks", "environment": "vf-guess"}},
        "workflow": "verifiers/workflow",
        "reward": "verifiers/rubric",
        "algorithm": "grpo",
        "steps": 1,
        "engine": "transformers",
        "placement": {"device": "cpu"},
    }
    (tmp_path / "vf.yaml").write_text(yaml.safe_dump(config))
    found = json.loads(rlsdk("explain", "vf.yaml", "--json").stdout)["plan"]
    assert found["rollouts"]["workflow"] == "verifiers/workflow"
    assert found["plugins"]["verifiers"].startswith("rlsdk-verifiers 0.1.0 ")


MINE = """
import verifiers as vf
from verifiers.rubrics.math_rubric import MathRubric

form = vf.XMLParser(["reasoning", "answer"], answer_field="answer").get_format_reward_func()
rubric = MathRubric()


async def exact(parser, completion, answer):
    return float(parser.parse_answer(completion) == answer)
"""
SCORE = """
import asyncio, inspect, json, sys
import rlsdk
from rlsdk.types import Message, Rollout, Task

task = Task("t", (Message("user", "1/2?"),), r"\\frac{1}{2}")


async def all_of(scores):
    return await scores if inspect.isawaitable(scores) else scores


for name, *texts in json.loads(sys.argv[1]):
    reward = rlsdk.load("reward", "foreign", path=f"mine.py:{name}", style="auto")
    async def score():
        return await all_of(reward([Rollout.from_text(task, text) for text in texts]))
    scores = asyncio.run(score())
    print(json.dumps([reward.convention, *(s.value if s.valid else s.reason for s in scores)]))
"""


def test_functions_of_rubrics_are_foreign_rewards(site, tmp_path):
    """Those of the releases that have rubrics, recognised by their signatures."""
    (tmp_path / "mine.py").write_text(MINE)
    calls = [
        ("form", "<reasoning>a</reasoning><answer>b</answer>", "none"),
        ("rubric.correct_answer", r"\boxed{0.5}", r"\boxed{3}"),
        ("exact", r"\frac{1}{2}", "2"),
    ]
    path = os.pathsep.join([str(ROOT), str(site(*RUBRICS)), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        [sys.executable, "-c", SCORE, json.dumps(calls)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    form, correct, exact = map(json.loads, ran.stdout.splitlines())
    assert {form[0], correct[0], exact[0]} == {"verifiers"}
    assert (form[1], correct[1:], exact[1:]) == (1.0, [1.0, 0.0], [1.0, 0.0])
    assert form[2] < 0.5
