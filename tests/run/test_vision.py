"""Whole runs of tiny random models that see: FrozenLake as pictures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
import vision_models

pytestmark = [pytest.mark.stack, pytest.mark.slow]
LAKE = {
    "use": "gridworlds/frozen_lake",
    "template": "grid",
    "picture": True,
    "action_lookup": {0: "0", 1: "1", 2: "2", 3: "3"},
    "action_pattern": "[0-3]",
    "user_prompt_format": "[your answer]",
    "max_steps": 2,
    "format_penalty": -0.5,
}
CONFIG: dict[str, Any] = {
    "name": "run",
    "tasks": {
        "train": {"use": "environments", "environments": {"lake": LAKE}, "groups": 2, "prompt": "1"},
        "eval": {"use": "environments", "environments": {"lake": LAKE}, "groups": 2, "prompt": "1", "split": "test"},
    },
    "workflow": {"use": "environment", "max_turns": 2},
    "max_prompt_tokens": 16,
    "algorithm": {"use": "grpo", "kl_coef": 0.0},
    "sampling": {"max_tokens": 4},
    "steps": 3,
    "batch_size": 2,
    "group_size": 8,
    "engine": {"use": "transformers"},
    "learner": {"use": "deepspeed", "lr": 3.0e-3},
    "placement": {"engine_threads": 1, "learner_threads": 1},
    "save_rollouts": 1,
}
ANY = '''
import rlsdk

@rlsdk.shaping("odd")
def odd(x):
    """The share of odd tokens, whatever happens on the lake: it differs between the answers of a random model."""
    return x
'''


@pytest.mark.parametrize("kind", vision_models.KINDS)
def test_a_model_that_sees_trains_on_pictures(kind: str, runner: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    import rlsdk
    from rlsdk.conversion import read_header
    from rlsdk.vision import Vision

    model = tmp_path / "model"
    vision_models.make(model, kind)
    runner.config.write_text(
        yaml.safe_dump({**CONFIG, "out": str(tmp_path), "model": {"path": str(model), "max_length": 96}})
    )
    runner.train()
    lines = runner.metrics()[1:4]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert any(line["actor/grad_norm"] > 0 for line in lines)
    assert all(line["canary/gap"] < 1e-4 for line in lines)
    assert all(line["actor/k3"] < 1e-8 for line in lines)  # logprobs of conversations with images, engine and learner
    export = Path(runner.summary()["export"])
    assert read_header(str(export)) == read_header(str(model))
    before = AutoModelForImageTextToText.from_pretrained(model).state_dict()
    after = AutoModelForImageTextToText.from_pretrained(export).state_dict()
    tower = [key for key in before if "visual" in key or "vision_tower" in key]
    assert any(not before[key].equal(after[key]) for key in tower)
    assert Vision(rlsdk.contracts.Model(path=str(export))).usable
    group = next(iter(rlsdk.rollouts(runner.path())))
    assert np.all(np.diff(group.rollouts[0].image_positions) > 0)
