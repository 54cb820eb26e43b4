"""Whole runs of tiny random vision-language models: FrozenLake as pictures."""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
import torchvision_parts
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
PACKAGE = Path(__file__).resolve().parents[2] / "plugins" / "rlsdk-gridworlds"


@pytest.fixture
def gridworlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as pip would have installed it, for the processes that this test starts."""
    pytest.importorskip("gymnasium")
    info = tmp_path / "site" / "rlsdk_gridworlds-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlsdk-gridworlds\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[rlsdk.v1]\ngridworlds = rlsdk_gridworlds\n")
    paths = (str(info.parent), str(PACKAGE), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path: Path, gridworlds: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the engine, with torchvision's parts that it needs."""
    name: str = request.param
    if name == "vllm":
        folder = tmp_path / "torchvision"
        if problem := torchvision_parts.install(folder):
            pytest.skip(problem)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(folder), os.environ["PYTHONPATH"])))
    return name


def train(runner: Any, folder: Path, kind: str, engine: str, *overrides: str) -> tuple[Path, Path]:
    """Train for three steps, in which engine and learner agree, and return the folders of the model and its export."""
    model = folder / "model"
    vision_models.make(model, kind)
    settings = {"out": str(folder), "model": {"path": str(model), "max_length": 96}, "engine": {"use": engine}}
    runner.config.write_text(yaml.safe_dump({**CONFIG, **settings}))
    runner.train(*overrides)
    lines = runner.metrics()[1:4]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert any(line["actor/grad_norm"] > 0 for line in lines)
    assert all(line["canary/gap"] < 1e-4 for line in lines)
    assert all(line["actor/gap"] < 1e-4 for line in lines)  # logprobs of conversations with images, engine and learner
    return model, Path(runner.summary()["export"])


def changed(model: Path, export: Path, *, seeing: bool) -> list[bool]:
    """Return True for each tensor that training has changed, of those that read images or of the others."""
    from transformers import AutoModelForImageTextToText

    before, after = (AutoModelForImageTextToText.from_pretrained(each).state_dict() for each in (model, export))
    reads = [any(part in key for part in ("visual", "vision_tower", "projector")) for key in before]
    return [not before[key].equal(after[key]) for key, each in zip(before, reads, strict=True) if each == seeing]


@pytest.mark.parametrize(
    ("kind", "engine"),
    [*((kind, "transformers") for kind in vision_models.KINDS), ("qwen2_5_vl", "vllm"), ("qwen3_vl", "vllm")],
    indirect=["engine"],
)
def test_a_model_that_sees_trains_on_pictures(kind: str, engine: str, runner: Any, tmp_path: Path) -> None:
    from rlsdk.contracts import Model
    from rlsdk.conversion import read_header
    from rlsdk.runlog.serialization import decode
    from rlsdk.vision import Vision

    model, export = train(runner, tmp_path, kind, engine)
    assert read_header(str(export)) == read_header(str(model))
    assert any(changed(model, export, seeing=True))
    assert Vision(Model(path=str(export))).usable
    with closing(sqlite3.connect(runner.path() / "rollouts.db")) as store:
        (payload,) = store.execute("select payload from rlsdk_groups").fetchone()
    rollout = decode(payload).rollouts[0]
    turns = len(rollout.answers)
    assert len(rollout.images) == turns + 1  # one before each action, and the last one, which nobody answered
    assert len(rollout.image_positions) == 4 * turns


@pytest.mark.parametrize(("kind", "engine"), [("gemma3", "transformers"), ("qwen3_vl", "vllm")], indirect=["engine"])
def test_an_adapter_trains_on_pictures_with_the_tower_frozen(
    kind: str, engine: str, runner: Any, tmp_path: Path
) -> None:
    model, export = train(runner, tmp_path, kind, engine, "learner.lora={rank: 2, alpha: 4}", "learner.lr=1.0e-2")
    assert any(changed(model, export, seeing=False))
    assert not any(changed(model, export, seeing=True))
