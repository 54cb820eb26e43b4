"""reasoning-gym's tasks and scorers as a separate package: installed, listed, checked, used for scoring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.packages.conftest import components_of, write_config

# No test requirement of rlsdk: a package that it needs is built by a C compiler. `test_libraries.py` brings it.
pytest.importorskip(
    "reasoning_gym", reason="reasoning-gym is not installed here; make test-slow runs these where it is"
)

PLUGIN = Path(__file__).resolve().parents[2] / "plugins" / "rlsdk-reasoning-gym"
CONFIG = {
    "name": "gym",
    "tasks": {
        "train": {"use": "reasoning_gym/tasks", "datasets": {"chain_sum": {"weight": 2}, "gcd": {}}},
        "eval": {"use": "reasoning_gym/tasks", "datasets": "chain_sum", "split": "test"},
    },
    "reward": [{"use": "reasoning_gym/score", "partial": False}],
    "algorithm": "grpo",
    "steps": 2,
    "engine": "transformers",
    "placement": {"device": "cpu"},
}


@pytest.fixture(scope="module")
def environment(install):
    """An environment with this package alone."""
    return install(PLUGIN)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, CONFIG)


def test_it_is_listed_from_metadata(rlsdk):
    (entry,) = (e for e in json.loads(rlsdk("plugins", "--json").stdout) if e["plugin"] == "reasoning_gym")
    assert (entry["distribution"], entry["version"]) == ("rlsdk-reasoning-gym", "0.1.0")
    assert (entry["module"], entry["broken"]) == ("rlsdk_reasoning_gym", None)


def test_it_shows_its_parts_without_importing_the_library(environment, tmp_path):
    assert components_of("reasoning_gym", "reasoning_gym", environment, tmp_path) == {
        ("tasks", "reasoning_gym/tasks"),
        ("reward", "reasoning_gym/score"),
    }


def test_it_conforms(rlsdk):
    from rlsdk_reasoning_gym.tasks import tasks

    from rlsdk import load

    task = load("tasks", tasks, datasets="gcd", size=1)()[0]
    given = {"prompt": task.prompt, "answer": task.answer, "metadata": dict(task.metadata)}
    options = ("--option", "tasks.datasets=gcd", "--task", json.dumps(given), "--json")
    found = json.loads(rlsdk("check", "reasoning_gym", *options).stdout)
    assert (found["conforms"], found["counts"]["skipped"]) == (True, 0)
    held = {(f["component"], f["property"]) for f in found["findings"]}
    assert {("reasoning_gym/tasks", "deterministic"), ("reasoning_gym/score", "any-text")} <= held


def test_explain_resolves_it(rlsdk, config):
    found = json.loads(rlsdk("explain", config, "--json").stdout)["plan"]
    assert found["rollouts"]["rewards"] == ["1 × reasoning_gym/score(partial=false)"]
    assert found["plugins"]["reasoning_gym"].startswith("rlsdk-reasoning-gym 0.1.0 ")


def test_answers_are_scored_offline(rlsdk, tmp_path):
    """Tasks that were written to a file by one process are scored by another."""
    from rlsdk_reasoning_gym.tasks import tasks

    from rlsdk import load

    made = load("tasks", tasks, datasets={"rearc": {}, "gcd": {}, "knights_knaves": {}}, size=9)()
    rows = [
        {"prompt": t.prompt, "answer": t.answer, **t.metadata, "response": f"<answer>{answer}</answer>"}
        for t in made
        for answer in (t.answer, "no")
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rlsdk("score", "answers.jsonl", "--reward", "reasoning_gym/score", "--out", "scores.jsonl")
    scores = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [row["score"] for row in scores[::2]] == [1.0] * 9
    assert max(row["score"] for row in scores[1::2]) < 0.1
