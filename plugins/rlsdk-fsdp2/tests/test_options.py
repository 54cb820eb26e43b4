"""Options of the learner that are offered, refused and estimated before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rlsdk_fsdp2.learner import FSDP2Learner

import rlsdk
from rlsdk import contracts
from rlsdk.contracts import ActorSpec, MemoryUse, Model, Roles, UpdateShape
from rlsdk.errors import LearnerError, OptionError


@rlsdk.optimizer("by_matrix", whole_tensors=True)
def by_matrix(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """SGD, as if it needed matrices."""
    return torch.optim.SGD(groups)


def make(**options: Any) -> FSDP2Learner:
    found: FSDP2Learner = rlsdk.load("learner", FSDP2Learner, **options)
    return found


@pytest.mark.parametrize(
    "interface",
    [
        "EstimatesUpdates",
        "ExaminesModel",
        "GivesAdapter",
        "GivesPrimitives",
        "HasClock",
        "MovesReference",
        "Preloads",
        "SetsLearningRate",
    ],
)
def test_it_offers_the_optional_interfaces_of_a_learner(interface: str) -> None:
    assert isinstance(make(), getattr(contracts, interface))


def test_it_replays_no_experts() -> None:
    assert not isinstance(make(), contracts.ReplaysRouting)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_stage": 3}, "zero_stage"),
        ({"reshard_after_forward": "often"}, "reshard_after_forward"),
        ({"rows": "shared", "gradient_checkpointing": True}, "choose one"),
        ({"micro_batch_tokens": 0}, "above 0, or auto"),
        ({"offload": "optimizer"}, "offload"),
        ({"context_parallel": 2, "rows": "shared"}, "packed or tree, .* got rows: shared and attention: sdpa"),
        ({"context_parallel": 2, "attention": "eager"}, "got rows: padded and attention: eager"),
        ({"optimizer": by_matrix}, "by_matrix needs whole tensors, but fsdp2 splits them over ranks; set learner"),
        ({"optimizer": "sgd", "betas": [0.9, 0.99]}, "betas belongs to optimizer: adamw; got sgd"),
    ],
)
def test_options_that_it_lacks_or_that_exclude_each_other_are_refused(options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make(**options)


def test_a_model_that_sees_images_is_refused() -> None:
    from transformers import LlavaConfig, LlavaForConditionalGeneration
    from transformers.models.clip import CLIPVisionConfig
    from transformers.models.llama import LlamaConfig

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlavaConfig(vision_config=CLIPVisionConfig(**small), text_config=LlamaConfig(vocab_size=61, **small))
    with torch.device("meta"):
        net = LlavaForConditionalGeneration(config)
    assert any("reads images" in fault for fault in make().model_faults(net))


def test_float16_is_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device("meta"):
        net = LlamaForCausalLM(LlamaConfig(vocab_size=61, **small)).half()
    (fault,) = make().model_faults(net)
    assert fault.startswith("dtype float16 would need loss scaling")


def test_layers_that_ranks_cannot_divide_are_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 48, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 6}
    with torch.device("meta"):
        odd = LlamaForCausalLM(LlamaConfig(vocab_size=61, num_key_value_heads=3, **{**small, "intermediate_size": 16}))
        llama = LlamaForCausalLM(LlamaConfig(vocab_size=61, num_key_value_heads=3, **small))
        gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=2))
    # Transformers adds the embeddings to its plan where the head is tied to them.
    llama.config.base_model_tp_plan = {**llama.config.base_model_tp_plan, "embed_tokens": "embedding_rowwise"}
    assert make(tensor_parallel=3).model_faults(llama) == []
    (fault,) = make(tensor_parallel=3).model_faults(odd)
    assert fault.startswith(
        "layers.*.mlp.down_proj, layers.*.mlp.gate_proj, layers.*.mlp.up_proj of a LlamaForCausalLM"
    )
    (fault,) = make(tensor_parallel=2).model_faults(llama)
    assert fault.startswith("3 key-value heads cannot be divided among 2 ranks")
    assert any("no tensor-parallel plan" in fault for fault in make(tensor_parallel=2).model_faults(gpt2))


def test_weights_between_divided_layers_are_refused() -> None:
    """Each rank would have a part of their gradient, or too few heads for them."""
    from transformers import ApertusConfig, ApertusForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device("meta"):
        apertus = ApertusForCausalLM(ApertusConfig(vocab_size=61, num_key_value_heads=2, **small))
        neox = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=61, **small))  # its config counts no heads of keys
    (fault,) = make(tensor_parallel=2).model_faults(apertus)
    assert fault.startswith("layers.*.mlp.act_fn.alpha_n, layers.*.mlp.act_fn.alpha_p of a ApertusForCausalLM")
    assert make(tensor_parallel=2).model_faults(neox) == []


def test_rollouts_that_ranks_cannot_share_are_refused() -> None:
    from transformers import (
        AutoModelForCausalLM,
        BloomConfig,
        BloomForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
    )

    small = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    with torch.device("meta"):
        llama = LlamaForCausalLM(LlamaConfig(**small, **heads))
        mistral = AutoModelForCausalLM.from_config(MistralConfig(**small, **heads, sliding_window=8))
        bloom = BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=48, n_layer=1, n_head=6))
    assert make(context_parallel=3).model_faults(llama) == []
    assert make(context_parallel=6).model_faults(llama) == []  # two ranks for each head of keys and values
    (fault,) = make(context_parallel=4).model_faults(llama)
    assert fault.startswith("6 attention heads and 3 key-value heads: learner.context_parallel must divide")
    (fault,) = make(context_parallel=3, tensor_parallel=3).model_faults(llama)
    assert "already divided by 3" in fault
    (fault,) = make(context_parallel=3).model_faults(mistral)
    assert "sliding_attention" in fault and fault.endswith("set learner.context_parallel=1")
    faults = make(context_parallel=3).model_faults(bloom)
    assert any("attention of a BloomForCausalLM cannot be replaced" in fault for fault in faults)


def test_ranks_that_cannot_be_grouped_are_refused() -> None:
    place = ActorSpec(role="learner", world_size=6)
    assert make(context_parallel=3, tensor_parallel=2).environment(place)
    with pytest.raises(LearnerError, match="context_parallel: 2 times tensor_parallel: 2 needs 4 learner ranks"):
        make(context_parallel=2, tensor_parallel=2).environment(place)


def test_ranks_that_share_rollouts_need_less_for_activations(untied: Model) -> None:
    roles, place = Roles(actor=untied), ActorSpec(role="learner", world_size=2)
    shape = UpdateShape(rollouts=1, prompt=2000, response=2000)

    def activations(**options: Any) -> int:
        uses = make(micro_batch_tokens=64, **options).update_memory(roles, place, shape)
        return next(use.bytes for use in uses if use.role == "learner activations")

    assert activations(context_parallel=2) < 0.6 * activations()


def test_weights_gradients_and_optimiser_are_divided_among_ranks(untied: Model) -> None:
    """19,424 parameters in float32; all are gathered at one time: embeddings, head and two layers."""
    roles, count = Roles(actor=untied), 19_424

    def uses(ranks: int, **options: Any) -> dict[str, int]:
        place = ActorSpec(role="learner", world_size=ranks)
        return {use.role: use.bytes for use in make(**options).rank_memory(roles, place).uses}

    for ranks in (1, 4):
        found = uses(ranks)
        assert found["learner gradients"] == 4 * count // ranks
        assert found["learner optimiser state"] == 8 * count // ranks
        assert found["learner weights"] == pytest.approx(4 * count // ranks + 4 * count, rel=0.01)
    outside = 2 * 61 * 32  # embeddings and head, which ranks that divide layers hold both
    found = uses(2, tensor_parallel=2)
    assert found["learner gradients"] == 4 * (outside + (count - outside) // 2)
    adapted = uses(2, tensor_parallel=2, lora={"rank": 4})
    adapter = adapted["learner gradients"] // 4
    assert 0 < adapter < 0.3 * count
    held = outside + (count - outside) // 2  # and as much gathered
    assert adapted["learner weights"] == pytest.approx(4 * adapter + 2 * 4 * held, rel=0.01)


def test_memory_is_estimated_for_too_few_ranks_as_well(untied: Model) -> None:
    place = ActorSpec(role="learner", world_size=1, device="cpu")
    assert make(tensor_parallel=2).rank_memory(Roles(actor=untied), place).uses


def test_what_is_offloaded_lies_in_main_memory_and_what_is_gathered_on_the_gpu(untied: Model) -> None:
    roles = Roles(actor=untied, critic=untied, reference=untied)

    def uses(device: str, offload: str) -> dict[str, MemoryUse]:
        place = ActorSpec(role="learner", world_size=2, device=device, colocated=False)
        return {use.role: use for use in make(offload=offload).rank_memory(roles, place).uses}

    whole, apart = uses("cuda", "none"), uses("cuda", "all")
    on_gpu = [role for role, use in whole.items() if not use.on_host]
    assert set(on_gpu) == set(whole) - {"learner process"}
    assert [role for role, use in apart.items() if not use.on_host] == ["gathered weights"]
    assert apart["gathered weights"].bytes == 3 * 4 * 19_424  # as all of each model is gathered at one time
    assert sum(use.bytes for use in apart.values()) == sum(use.bytes for use in whole.values())
    assert uses("cpu", "all") == uses("cpu", "none")


def test_moments_and_reference_leave_a_shared_gpu_while_engines_generate(untied: Model) -> None:
    roles = Roles(actor=untied, reference=untied)
    place = ActorSpec(role="learner", world_size=2, device="cuda", colocated=True)
    uses = {use.role: use for use in make().rank_memory(roles, place).uses}
    assert {role for role, use in uses.items() if use.turn} == {
        "learner gradients",
        "learner optimiser state",
        "reference model",
    }
    assert uses["sleeping learner"] == MemoryUse("sleeping learner", (8 + 4) * 19_424 // 2, on_host=True)
    assert "sleeping learner" not in {use.role for use in make(offload="all").rank_memory(roles, place).uses}
