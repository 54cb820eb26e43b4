"""ROLL's agentic configuration, written for rlsdk, passes the check of configurations."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsdk.errors import ConfigError
from rlsdk.testing import check_config

CONFIG = Path(__file__).with_name("groups.yaml")


def roll(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "config.json").write_text("{}")
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    return {**config, "model": {**config["model"], "path": str(tmp_path)}}


def test_rolls_configuration_passes_the_check(installed: Path) -> None:
    plan = check_config(roll(installed))
    assert plan.config.batch_size == 128 and plan.config.group_size == 8
    held_out = plan.plugins.resolve(plan.tasks_eval[0].reference)
    assert Counter(t.source for t in held_out) == dict.fromkeys(
        ("SimpleSokoban", "LargerSokoban", "SokobanDifferentGridVocab", "FrozenLake"), 256
    )
    train = plan.plugins.resolve(plan.tasks_train[0].reference)
    assert {train[i].source for i in range(128)} == {"FrozenLake"}
    assert train[0].metadata["environment"]["is_slippery"] is False
    assert plan.config.eval.environments is not None and plan.config.eval.environments.per_worker == 512
    assert [p.rule.name for p in plan.rewards] == ["environment"]
    assert "gridworlds" in plan.code


def test_a_wrong_number_of_workers_is_reported_with_the_other_faults(installed: Path) -> None:
    config = roll(installed)
    config["environments"] = {"workers": 0, "isolation": "cell"}
    config["tasks"]["eval"]["environments"]["FrozenLake"]["is_slipery"] = True
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    text = str(caught.value)
    assert "environments.isolation" in text and "tasks.eval.environments.FrozenLake.is_slipery" in text
    config["environments"] = {"workers": 0}
    config["eval"]["environments"] = {"threads": 0}
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    assert "environments.workers: at least 1, got 0" in str(caught.value)
    assert "eval.environments.threads: at least 1, got 0" in str(caught.value)
