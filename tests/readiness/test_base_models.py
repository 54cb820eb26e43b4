"""An adapter that continues is compared with the model that it is given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlsdk.readiness.base_models import adapter_notes
from rlsdk.readiness.checks import examine
from tests.trainer.fakes import MODEL, make_plan


def notes(folder: Path, model: str, config: Any) -> list[tuple[str, str]]:
    adapter = folder / "adapter"
    adapter.mkdir(exist_ok=True)
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    learner = {"use": "deepspeed", "lora": {"path": str(adapter)}}
    return list(adapter_notes(make_plan(folder, model={"path": model, "max_length": 64}, learner=learner)))


@pytest.mark.parametrize(
    ("model", "base", "told"),
    [
        ("lab/tiny", "lab/tiny", False),
        ("mirror/Tiny", "lab/tiny", False),
        ("lab/tiny", "/models/tiny", False),
        ("lab/tiny", "lab/tiny-instruct", True),
        ("lab/tiny", None, False),
        ("lab/tiny", 3, False),
    ],
)
def test_an_adapter_of_a_model_of_another_name_is_told(tmp_path: Path, model: str, base: Any, told: bool) -> None:
    found = notes(tmp_path, model, {"base_model_name_or_path": base})
    assert bool(found) == told
    if told:
        assert "lab/tiny, but the adapter to continue was trained on lab/tiny-instruct" in found[0][1]


def test_of_two_folders_the_weights_count_and_not_the_names(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(MODEL, copy)
    config = {"base_model_name_or_path": str(MODEL)}
    assert notes(tmp_path, str(copy), config) == []
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert notes(tmp_path, str(copy), config)[0][0] == "model.path"
    learner = {"use": "deepspeed", "lora": {"path": str(tmp_path / "adapter")}}
    plan = make_plan(tmp_path, model={"path": str(copy), "max_length": 64}, learner=learner)
    assert any("the adapter to continue was trained on" in note.message for note in examine(plan, starts=False).notes)


def test_adapters_that_cannot_be_read_are_left_to_the_learner(tmp_path: Path) -> None:
    assert notes(tmp_path, "lab/tiny", ["no", "mapping"]) == []
    (tmp_path / "adapter" / "adapter_config.json").write_text("{")
    learner = {"use": "deepspeed", "lora": {"path": str(tmp_path / "adapter")}}
    assert not list(adapter_notes(make_plan(tmp_path, model={"path": "lab/tiny", "max_length": 64}, learner=learner)))
