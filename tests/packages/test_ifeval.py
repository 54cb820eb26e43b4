"""IFEval's instructions as a separate package: installed, listed, checked, used for scoring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.packages.conftest import components_of

# No test requirement of rlsdk. `test_libraries.py` brings it.
pytest.importorskip(
    "if_verifiable", reason="if-verifiable is not installed here; make test-slow runs these where it is"
)

PLUGIN = Path(__file__).resolve().parents[2] / "plugins" / "rlsdk-ifeval"
TASK = {
    "prompt": "Write about the sea without a comma.",
    "metadata": {
        "instruction_id_list": ["punctuation:no_comma", "keywords:letter_frequency"],
        "kwargs": [{}, {"letter": "z", "let_frequency": 2, "let_relation": "at least"}],
    },
}


@pytest.fixture(scope="module")
def environment(install):
    """An environment with this package alone."""
    return install(PLUGIN)


def test_it_shows_its_reward_without_importing_the_library(environment, tmp_path):
    assert components_of("ifeval", "if_verifiable", environment, tmp_path) == {("reward", "ifeval/followed")}


def test_it_conforms(rlsdk):
    found = json.loads(rlsdk("check", "ifeval", "--task", json.dumps(TASK), "--json").stdout)
    assert (found["conforms"], found["counts"]["skipped"]) == (True, 0)
    assert {"deterministic", "any-text"} <= {finding["property"] for finding in found["findings"]}


def test_answers_are_scored_offline(rlsdk, tmp_path):
    row = {"prompt": TASK["prompt"], **TASK["metadata"]}
    rows = [{**row, "response": text} for text in ("A fizzy sea", "A sea", "A fizzy, wide sea")]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rlsdk("score", "answers.jsonl", "--reward", "ifeval/followed", "--out", "scores.jsonl")
    scores = [json.loads(line)["score"] for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert scores == [1.0, 0.5, 0.5]
