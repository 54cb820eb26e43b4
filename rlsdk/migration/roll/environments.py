"""Environments of ROLL's agentic pipeline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlsdk.migration.roll.sizes import answer_length, rollouts_per_task
from rlsdk.migration.rules import Given, KeyOutcome
from rlsdk.migration.values import number, texts, whole

ENVIRONMENTS = {"sokoban": "gridworlds/sokoban", "frozen_lake": "gridworlds/frozen_lake"}
"""`env_type` -> an environment of the plugin rlsdk-gridworlds, whose options have ROLL's names."""
BESIDE = ("user_prompt_format", "added_text", "max_tokens_per_step")
"""Keys beside `env_config` that are options of the environment here."""


def _environments(given: Given) -> dict[str, dict[str, Any]]:
    """Tag -> environment with its options."""
    found: dict[str, dict[str, Any]] = {}
    for tag, entry in given.section("custom_envs").items():
        if not isinstance(entry, Mapping):
            continue
        options = dict(given.section(f"custom_envs.{tag}.env_config"))
        options |= {key: entry[key] for key in BESIDE if entry.get(key) is not None}
        if isinstance(room := options.get("dim_room"), list) and len(room) == 2:  # the name of the newer versions
            del options["dim_room"]
            options |= {"dim_x": room[0], "dim_y": room[1]}
        penalty = given.read("train_env_manager.format_penalty", number)
        options = {"format_penalty": penalty, **options} if penalty is not None else options
        if "<think>" in str(options.get("user_prompt_format", "")):
            options.setdefault("think", True)
        name = str(entry.get("env_type", ""))
        found[tag] = {"use": ENVIRONMENTS.get(name, name), **options}
    return found


def kind(value: str, given: Given) -> KeyOutcome:
    if value in ENVIRONMENTS:
        return KeyOutcome({}, "environments of rlsdk-gridworlds")
    if value == "gymnasium":
        return KeyOutcome({}, "an environment of rlsdk")
    single = "; those with one question each are tasks, with a reward such as math" if "math" in value else ""
    return KeyOutcome.missing(f"write this environment (howto/environment.md){single}")


def _played(given: Given, manager: str, split: str, environments: Mapping[str, Any]) -> dict[str, Any]:
    """Groups of environments as a source of tasks."""
    tags = [tag for tag in given.read(f"{manager}.tags", texts, [*environments]) if tag in environments]
    groups = given.whole(f"{manager}.num_env_groups", 128)
    found = {"use": "environments", "split": split, "groups": groups, "tags": tags, "environments": environments}
    shares = given.read(f"{manager}.num_groups_partition", lambda value: [whole(each) for each in texts(value)], [])
    return {**found, "partition": shares} if len(shares) == len(tags) and sum(shares) == groups else found


def _workers(given: Given, manager: str) -> dict[str, int]:
    total = given.whole(f"{manager}.num_env_groups", 128) * given.whole(f"{manager}.group_size")
    each = given.whole(f"{manager}.max_env_num_per_worker", 0)
    each = each if each > 0 else total
    return {"workers": math.ceil(total / each), "per_worker": each, "threads": min(each, 64)}


def finish_agentic(given: Given) -> dict[str, Any]:
    environments = _environments(given)
    turns = given.whole("max_actions_per_traj", 0)
    steps = [whole(each["max_steps"]) for each in environments.values() if "max_steps" in each]
    found: dict[str, Any] = {
        "tasks.train": _played(given, "train_env_manager", "train", environments),
        "workflow": {"use": "environment", "max_turns": turns or max(steps, default=20)},
        "environments": _workers(given, "train_env_manager"),
        "group_size": rollouts_per_task(given),
        "sampling.max_tokens": answer_length(given),
    }
    if "val_env_manager" in given.tree:
        found["tasks.eval"] = _played(given, "val_env_manager", "test", environments)
        found["eval.environments"] = _workers(given, "val_env_manager")
        found["eval.samples"] = given.whole("val_env_manager.group_size")
    return found
