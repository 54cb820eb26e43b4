"""FLOPs of updates, compared with sums by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, MistralConfig, MistralForCausalLM, MixtralConfig
from transformers import MixtralForCausalLM as Mixtral

from rlsdk.contracts import LossSpec, Model, Roles, TrainBatch
from rlsdk.learners.flops import ModelFlops, peak_tflops
from rlsdk.plugins import Plugins

LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
"""Weights of a layer of the small models: queries and outputs, keys and values, the three matrices of the MLP."""
HEAD = 61 * 32


def test_the_output_head_counts_and_the_embeddings_that_are_looked_up_do_not(tied: Model, untied: Model) -> None:
    for model in (tied, untied):
        found = ModelFlops.of(AutoModelForCausalLM.from_pretrained(model.path))
        assert (found.weights, found.width, len(found.windows)) == (2 * LAYER + HEAD, 32, 2)
        lengths = np.array([4, 6])
        assert found.of_update(lengths) == 3 * (2 * found.weights * 10 + 2 * 4 * 32 * (16 + 36))
    assert ModelFlops.of(AutoModel.from_pretrained(tied.path)).weights == 2 * LAYER  # a critic's backbone


def test_weights_beside_an_adapter_need_no_gradient(tied: Model) -> None:
    net = AutoModelForCausalLM.from_pretrained(tied.path)
    lengths = np.array([8])
    whole, adapted = (ModelFlops.of(net, adapted=each).of_update(lengths) for each in (False, True))
    assert adapted / whole == pytest.approx(2 / 3)


SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def test_a_token_is_multiplied_by_the_experts_that_it_chooses() -> None:
    with torch.device("meta"):
        net = Mixtral(MixtralConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2, sliding_window=None))
    attention = LAYER - 3 * 32 * 48
    assert ModelFlops.of(net).weights == 2 * (attention + 2 * 3 * 32 * 48 + 8 * 32) + HEAD


def test_sliding_windows_bound_what_a_token_attends_to() -> None:
    with torch.device("meta"):
        net = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4))
    found = ModelFlops.of(net)
    assert found.of_update(np.array([2, 10])) == 3 * (2 * found.weights * 12 + 2 * 4 * 32 * (2 * 2 + 10 * 4))


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.0),
        ("Tesla K80", None),
    ],
)
def test_peaks_are_found_by_the_name_of_the_gpu(device: str, peak: float | None) -> None:
    assert peak_tflops(device) == peak


@pytest.mark.slow
@pytest.mark.stack
def test_ranks_count_the_flop_of_every_rollout_once(
    tied: Model, launch: Callable[..., Any], make_batch: Callable[..., TrainBatch]
) -> None:
    batch = make_batch(8)
    expected = ModelFlops.of(AutoModelForCausalLM.from_pretrained(tied.path)).of_update(batch.lengths)
    spec = LossSpec(policy_loss=Plugins().reference("policy_loss", "ppo"))
    for world in (1, 2):
        group = launch(world, Roles(actor=tied), spec)
        before = group.clock()["update_flop"]
        group.update(batch, [np.arange(4), np.arange(4, 8)], 0)
        assert (group.clock()["update_flop"] - before) * world == pytest.approx(expected)
