"""Names in metrics of the reward functions that `rlsdk migrate` reads in TRL's scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlsdk.config.resolve import check
from rlsdk.migration import migrate

SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
{imports}

GRPOTrainer(model="org/model", args=GRPOConfig("runs/a"), reward_funcs=[{functions}],
    train_dataset=load_dataset("o/d", split="train")).train()
"""


def names(functions: str, *imports: str) -> list[str | None]:
    Path("train.py").write_text(SCRIPT.format(functions=functions, imports="\n".join(imports)))
    config: dict[str, Any] = migrate("trl", ["train.py"], {}).config
    return [each.get("metric") for each in config["reward"]]


def test_functions_have_their_own_names(folder):
    found = names(
        "exact, brief, think_format_reward", "from a import exact, brief", "from trl.rewards import think_format_reward"
    )
    assert found == ["exact", "brief", None]


def test_a_name_that_another_part_or_statistic_has_is_left_out(folder):
    assert names("score, other, brief", "from a import score, brief", "from b import score as other") == [
        None,
        None,
        "brief",
    ]
    found = names("math, accuracy_reward", "from a import math", "from trl.rewards import accuracy_reward")
    assert found == [None, None]
    assert names("mean, brief", "from a import mean, brief") == [None, "brief"]


def test_the_names_are_those_of_the_parts(folder):
    Path("a.py").write_text("def exact(completions, **_):\n    return [1.0 for _ in completions]\n\n\nbrief = exact\n")
    names("exact, brief", "from a import exact, brief")
    config = migrate("trl", ["train.py"], {}).config
    plan = check({**config, "tasks": {"train": "countdown"}})
    assert [part.rule.name for part in plan.rewards] == ["exact", "brief"]
