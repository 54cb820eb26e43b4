"""`rlsdk.Config` becomes the same mapping as a file, and gets the same checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import yaml

import rlsdk
from rlsdk.config import check
from rlsdk.config.tree import as_tree, read


@rlsdk.reward("mine")
def mine(rollout: rlsdk.Rollout, *, limit: int = 3) -> float:
    return float(limit)


def config(file: Path, **more: Any) -> rlsdk.Config:
    given: dict[str, Any] = {
        "name": "trial",
        "model": file.parent / "model",
        "tasks": rlsdk.Config.Tasks(train="countdown"),
        "reward": "countdown",
        "algorithm": "grpo",
        "steps": 2,
        "batch_size": 4,
        "group_size": 4,
        "engine": "transformers",
    }
    return rlsdk.Config(**given | more)


def test_it_is_the_same_run_as_the_file(file: Path) -> None:
    assert check(config(file)).config == check(file).config


def test_only_what_was_given_is_written(file: Path) -> None:
    tree = as_tree(config(file, group_size=8, sampling=rlsdk.Config.Sampling(max_tokens=5)))
    assert tree["group_size"] == 8  # the default, but given: an algorithm must not set another
    assert tree["sampling"] == {"max_tokens": 5}
    assert {"seed", "passes", "eval", "workflow"}.isdisjoint(tree)


def test_an_algorithm_sets_what_is_left_open_and_nothing_else(file: Path) -> None:
    assert check(config(file, algorithm="dapo")).config.rollout.dynamic_sampling
    given = rlsdk.Config.Rollout(dynamic_sampling=False)
    assert not check(config(file, algorithm="dapo", rollout=given)).config.rollout.dynamic_sampling
    copied = attrs.evolve(config(file), algorithm="dapo")
    assert check(copied).config.rollout.dynamic_sampling


def test_components_may_be_names_mappings_objects_and_uses(file: Path) -> None:
    rewards = ["countdown", mine, {"use": mine, "weight": 0.5, "limit": 4}, rlsdk.Use("countdown", format_score=0.2)]
    plan = check(config(file, reward=rewards, learner=rlsdk.Use("deepspeed", lr=1e-3)))
    assert [dict(part.reference.options) for part in plan.rewards] == [{}, {}, {"limit": 4}, {"format_score": 0.2}]
    assert [part.rule.weight for part in plan.rewards] == [1.0, 1.0, 0.5, 1.0]
    assert plan.learner.options == {"lr": 1e-3}


def test_sources_keep_their_weights(file: Path) -> None:
    sources = [{"use": "countdown", "weight": 2.0, "source": "a"}, rlsdk.Config.Source(rlsdk.Use("countdown"), "b")]
    plan = check(config(file, tasks=rlsdk.Config.Tasks(train=sources)))
    assert [(source.name, source.weight) for source in plan.tasks_train] == [("a", 2.0), ("b", 1.0)]


def test_overrides_change_it(file: Path) -> None:
    tree, faults = read(config(file), ["steps=5", "learner.lr=0.5"])
    assert (tree["steps"], tree["learner"], faults) == (5, {"lr": 0.5}, [])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"algorithm": "gprp"}, "did you mean 'grpo'"),
        ({"reward": 3}, "reward[0]: expected the name of a component"),
        ({"learner": {"use": "deepspeed", "lrr": 1}}, "learner.lrr: unknown option 'lrr', did you mean 'lr'?"),
        ({"steps": "many"}, "steps: expected int or null, got 'many'"),
        ({"trackers": ["tensorbord"]}, "did you mean 'tensorboard'"),
        (
            {"eval": {"pass_at": {1}}},
            "eval.pass_at: expected text, a number, a list, a mapping or a marked object; got {1}",
        ),
        ({"reward": print}, "got <built-in function print>; write @rlsdk.reward('NAME') above it"),
        ({"algorithm": {"use": "grpo", "filters": [print]}}, "filters[0]: expected the name"),
        ({"algorithm": {"use": "grpo", "filters": [print]}}, "; write @rlsdk.filter('NAME') above it"),
    ],
)
def test_mistakes_are_reported_with_their_path(file: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises(rlsdk.ConfigError) as caught:
        check(config(file, **more))
    assert words in str(caught.value)


def test_numbers_and_arrays_of_numpy_are_plain_values(file: Path) -> None:
    learner = {"use": "deepspeed", "betas": np.array([0.5, 0.75])}
    plan = check(config(file, steps=np.int64(3), max_invalid=np.float64(0.5), learner=learner))
    assert (plan.config.steps, plan.config.max_invalid) == (3, 0.5)
    assert list(plan.learner.options["betas"]) == [0.5, 0.75]


def test_the_tracker_of_every_run_is_not_opened_twice(file: Path) -> None:
    assert [each.name for each in check(config(file, trackers=["jsonl", "tensorboard"])).trackers] == [
        "core/tensorboard"
    ]


def test_a_mapping_may_hold_uses_and_sections(file: Path) -> None:
    tree = {
        **yaml.safe_load(file.read_text()),
        "model": rlsdk.Config.Model(path=str(file.parent / "model"), max_length=500),
        "reward": [rlsdk.Use(mine, limit=4), rlsdk.Use("countdown")],
    }
    plan = check(tree)
    assert plan.config.model.max_length == 500
    assert [part.reference.options for part in plan.rewards] == [{"limit": 4}, {}]


def test_a_use_takes_options_as_keywords_or_as_a_mapping() -> None:
    assert rlsdk.Use("x", {"a": 1}, b=2) == rlsdk.Use("x", a=1, b=2)
    assert rlsdk.Use("x", name="an option", options=3).options == {"name": "an option", "options": 3}


@pytest.mark.parametrize(
    ("section", "keyword", "said"),
    [
        (rlsdk.Config, "nam", "Config: unknown key 'nam', did you mean 'name'?"),
        (rlsdk.Config.Sampling, "temprature", "SamplingSection: unknown key 'temprature', did you mean 'temperature'?"),
    ],
)
def test_a_misspelt_keyword_is_answered_with_the_nearest_key(section: type, keyword: str, said: str) -> None:
    with pytest.raises(TypeError) as error:
        section(**{keyword: 1})
    assert str(error.value).startswith(said)
