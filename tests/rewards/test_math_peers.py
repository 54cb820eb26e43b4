"""The math reward on the public cases of five other trainers: equal verdicts, or a stated reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import rlsdk
from rlsdk.errors import DataError

FILES = yaml.safe_load(Path(__file__).with_name("math_peers.yaml").read_text(encoding="utf-8"))
ALIKE = [(f["source"], f["options"], *case) for f in FILES for case in f["cases"]]
OTHERWISE = [(f["source"], f["options"], *case) for f in FILES for case in f.get("otherwise", ())]


def score(options, response, reference):
    task = rlsdk.Task(id="t", prompt="?", answer=reference)
    try:
        found = rlsdk.load("reward", "math", **options)(rlsdk.Rollout.from_text(task, response))
    except DataError:
        return "DataError"
    assert found.valid
    return found.value


def test_there_are_cases_of_five_trainers():
    repositories = {f["repository"].lower() for f in FILES}
    assert len({name.replace("volcengine", "verl-project") for name in repositories}) == 5
    assert len(ALIKE) >= 150
    assert len(OTHERWISE) <= len(ALIKE) / 4


@pytest.mark.parametrize(("source", "options", "response", "reference", "theirs"), ALIKE)
def test_a_case_is_answered_as_its_source_answers_it(source, options, response, reference, theirs):
    assert score(options, response, reference) == theirs


@pytest.mark.parametrize(("source", "options", "response", "reference", "theirs", "ours", "why"), OTHERWISE)
def test_a_case_is_answered_otherwise_for_a_reason(source, options, response, reference, theirs, ours, why):
    assert score(options, response, reference) == ours != theirs
    assert len(why.split()) > 4
