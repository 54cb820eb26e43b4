"""With ZeRO-3, a model is sharded while it is loaded: equal to a plain one, and never whole on any rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
import architectures

from tests.ports import free_port

LAB = Path(__file__).with_name("loading_lab.py")


def load(world: int, dtype: str, paths: list[Path], *, compared: bool = False) -> list[list[dict[str, Any]]]:
    """Load models on this many ranks; return each rank's report on each model."""
    models = [f"{free_port()}={path}" for path in paths]
    arguments = [str(world), dtype, str(int(compared)), *models]
    ranks = [
        subprocess.Popen([sys.executable, str(LAB), str(rank), *arguments], stdout=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world
    return [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in said]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_divided_model_is_the_one_that_was_saved(dtype: str, tmp_path: Path) -> None:
    # Fused experts, a float32 buffer of the router, other names in memory than on disk, a tied head, Mamba.
    names = ["qwen3-moe", "deepseek-v3", "gpt-neox", "gemma3", "nemotron-h"]
    for name in names:
        architectures.make(tmp_path / name, name, dtype=dtype, tied=name == "gemma3")
    [said] = load(1, dtype, [tmp_path / name for name in names], compared=True)
    assert dict(zip(names, [each["faults"] for each in said], strict=True)) == {name: [] for name in names}


@pytest.mark.slow
def test_no_rank_holds_a_whole_model(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=4000, hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=8
    )
    model = LlamaForCausalLM(config)
    whole = sum(p.numel() * 4 for p in model.parameters()) / 2**20
    # Saved in bfloat16 and cast: tensors that are not cast may be the mapped file, which is nobody's memory.
    model.to(torch.bfloat16).save_pretrained(tmp_path / "large")
    architectures.make(tmp_path / "llama", "llama", dtype="bfloat16")  # its load imports what the other needs
    for _, took in load(2, "float32", [tmp_path / "llama", tmp_path / "large"]):
        assert 0.4 * whole < took["kept"] < 0.6 * whole
        assert took["peak"] < 0.8 * whole
