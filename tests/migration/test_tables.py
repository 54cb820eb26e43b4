"""Every key of every table: rlsdk's own check accepts its result, and none is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from rlsdk.config import check
from rlsdk.config.schema import Config
from rlsdk.migration import FRAMEWORKS, Migration, framework
from rlsdk.migration.convert import convert
from rlsdk.migration.reading import ForeignConfig, flattened, nested
from rlsdk.migration.rules import KeyRule
from rlsdk.migration.values import Choice

ENVIRONMENT = {"env_type": "gymnasium", "env_config": {"id": "CartPole-v1"}}
SAMPLES = "agent_loop_manager_cfg.tasks.sampler_config"
BASES: dict[str, dict[str, Any]] = {
    "verl": {
        "actor_rollout_ref.model.path": "model",
        "data.train_files": "train.parquet",
        "custom_reward_function.path": "my_reward.py",
        "actor_rollout_ref.rollout.n": 4,
    },
    "roll": {
        "pretrain": "model",
        "actor_train.data_args.file_name": "train.jsonl",
        "rewards.m.worker_cls": "MathRuleRewardWorker",
        "num_return_sequences_in_group": 4,
    },
    "trinity": {
        "model.model_path": "model",
        "buffer.explorer_input.taskset.path": "openai/gsm8k",
        "buffer.explorer_input.default_workflow_type": "math_workflow",
        "algorithm.repeat_times": 4,
    },
    "xtuner": {
        "load_from": "model",
        "agent_loop_manager_cfg.tasks.judger_config.class": "GSM8KJudgerConfig",
        f"{SAMPLES}.dataloader_cfg.dataset_config_list": [{"dataset": {"anno_path": "train.jsonl"}}],
        f"{SAMPLES}.prompt_repeat_k": 4,
        "total_train_steps": 10,
        "train_batch_size": 8,
    },
    "trl": {
        "model_name_or_path": "model",
        "dataset_name": "openai/gsm8k",
        "reward_funcs": ["accuracy_reward"],
    },
    "openrlhf": {
        "actor.model_name_or_path": "model",
        "data.prompt_dataset": "openai/gsm8k",
        "reward.remote_url": "my_reward.py",
        "rollout.n_samples_per_prompt": 4,
    },
}
"""The least that makes a whole configuration of each trainer."""

TOGETHER: dict[tuple[str, Any], dict[str, Any]] = {
    ("trinity", "on_policy_distill"): {
        "algorithm.algorithm_type": "on_policy_distill",
        "explorer.auxiliary_models": [{"model_path": "o/teacher"}],
    },
    **{("trinity", name): {"algorithm.algorithm_type": name} for name in ("mix", "mix_chord")},
}
"""What a choice needs in addition."""

HOSTILE = [[{"a": [1]}], "${oc.env:NOT_SET_HERE}", float("nan"), -(10**30), "\ud800", {}, [], "0.2"]
CHECKED: set[str] = set()


def rows(*statuses: str) -> Iterator[Any]:
    for name in FRAMEWORKS:
        for row in framework(name).rows:
            if row.status in statuses:
                yield pytest.param(name, row, id=f"{name}:{row.key}")


def named(row: KeyRule) -> str:
    """A key that the row stands for."""
    return ".".join(part.replace("**", "x").replace("*", "1" if part == "*" else "x") for part in row.key.split("."))


def migrated(name: str, flat: dict[str, Any]) -> Migration:
    return convert(framework(name), ForeignConfig(nested(flat)))


def accepted(found: Migration) -> None:
    """Check a config; many keys lead to the same."""
    text = json.dumps(found.config)
    if text not in CHECKED:
        check(found.config)
        CHECKED.add(text)


@pytest.mark.parametrize(("name", "row"), [*rows("mapped", "changed")])
def test_a_key_gives_a_config_that_the_check_accepts(folder, zoo, name, row):
    flat = {**BASES[name], named(row): row.sample}
    if name == "roll" and row.key.startswith(("train_env", "val_env", "custom_envs", "max_actions")):
        flat["custom_envs.FrozenLake"] = ENVIRONMENT
        flat.setdefault("train_env_manager.num_env_groups", 128)
        flat.setdefault("train_env_manager.group_size", 4)
        flat = {key: value for key, value in flat.items() if not key.startswith("custom_envs.1")}
    if row.key.startswith(f"{SAMPLES}.dataloader_cfg.dataset_config_list.0") and "anno_path" not in row.key:
        part, _, option = row.key.partition("list.0.")[2].partition(".")
        content = {"dataset": {"anno_path": "train.jsonl"}, "tokenize_fn": {"max_length": 2048}}
        flat[f"{SAMPLES}.dataloader_cfg.dataset_config_list"] = [
            {**content, part: {**content[part], option: flat.pop(row.key)}}
        ]
    for value in row.read.known if isinstance(row.read, Choice) else [None]:
        together = TOGETHER.get((name, value), {})
        found = migrated(name, {**flat, **together, named(row): value} if value else flat)
        assert len(found.entries) == len(list(flattened(nested({**flat, **together}))))
        accepted(found)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_keys_without_a_counterpart_say_what_to_do_or_why_not(folder, name):
    bare = [row for row in framework(name).rows if row.status in ("missing", "ignored") and row.give is None]
    assert all(row.note for row in bare)
    flat = {named(row): row.sample for row in bare if "_env" not in row.key}
    flat = {key: value for key, value in flat.items() if not any(other.startswith(f"{key}.") for other in flat)}
    found = migrated(name, flat)
    assert len(found.entries) == len(list(flattened(nested(flat))))
    assert all(entry.note for entry in found.entries)
    accepted(migrated(name, {**flat, **BASES[name]}))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_least_configuration_of_each_trainer_is_accepted(folder, name):
    found = migrated(name, BASES[name])
    assert {entry.status for entry in found.entries} <= {"mapped", "changed"}
    accepted(found)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_paths_of_a_table_exist(name):
    fields = {field.name for field in attrs.fields(Config)}
    assert {path.partition(".")[0] for row in framework(name).rows for path in row.to} <= fields


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_keys_stand_once_in_a_table(name):
    keys = [row.key for row in framework(name).rows]
    assert sorted(keys) == sorted(set(keys))
    known = set(keys)
    newer = [f"{new}x" if new.endswith(".") else new for new in framework(name).renamed.values()]
    assert not [new for new in newer if framework(name).row(new) is None]
    assert not known & framework(name).renamed.keys()


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_unknown_key_is_reported(name):
    entry = migrated(name, {"no.such.key": 1}).entries[0]
    assert (entry.status, "unknown" in entry.note) == ("missing", True)


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize(
    "value",
    [
        *([{"a": [1]}], float("nan"), "\ud800"),
        *(pytest.param(v, marks=pytest.mark.slow) for v in ("${oc.env:NOT_SET_HERE}", -(10**30), {}, [], "0.2")),
    ],
)
def test_a_hostile_value_is_reported_clearly(name, value):
    for row in framework(name).rows:
        flat = {**BASES[name], named(row): value}
        assert len(migrated(name, flat).entries) == len(list(flattened(nested(flat))))


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("value", [5, "text", [1, 2], None, {"x": {"y": 1}}, [{"x": 1}]])
def test_a_hostile_section_is_reported_clearly(name, value):
    keys = [named(row).split(".") for row in framework(name).rows]
    for path in sorted({".".join(parts[:depth]) for parts in keys for depth in range(1, len(parts))}):
        tree = nested({**{k: v for k, v in BASES[name].items() if not k.startswith(f"{path}.")}, path: value})
        assert len(convert(framework(name), ForeignConfig(tree)).entries) == len(list(flattened(tree)))
