"""Packed rollouts give the same numbers as separate ones, without a tokens-by-tokens mask."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rlsdk
from rlsdk.contracts import Model, TrainBatch
from rlsdk.errors import LearnerError
from rlsdk.learners.model import load_policy
from rlsdk.learners.model_faults import policy_faults
from rlsdk.learners.packing import PackedAttention, PackedSpans, attend, copy_grouped_heads
from rlsdk.learners.rows import TokenRows, to_rows


def packed(model: Model, checkpointing: bool = False) -> tuple[Any, Callable[[TokenRows], Any]]:
    """A policy, and its run on packed rows."""
    policy, attention = load_policy(model, "sdpa", checkpointing), PackedAttention()
    attention.adopt(policy.model, model.path)
    return policy, lambda rows: attention(policy, rows, 0.8, "gradient")


def gradients(policy: Any, results: tuple[Any, ...]) -> list[torch.Tensor]:
    weights = torch.linspace(0.5, 1.5, len(results[0]))
    sum((result * weights).sum() for result in results if result is not None).backward()
    return [parameter.grad for parameter in policy.parameters()]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_packed_rollouts_give_what_padded_ones_do(
    key_heads: int, checkpointing: bool, make_batch: Callable[..., TrainBatch], tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": key_heads}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path)
    model, batch = Model(path=str(tmp_path), max_length=128), make_batch(7)
    plain = load_policy(model, "sdpa", False)
    expected = plain(to_rows(batch, "padded"), 0.8, "gradient")
    policy, run = packed(model, checkpointing)
    found = run(to_rows(batch, "packed"))
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for one, other in zip(gradients(policy, found), gradients(plain, expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "lengths",
    [(5,), (1, 1, 1), (130, 3, 129), (3, 17, 4, 130, 16, 1, 18, 3), (128, 2, 128, 127)],
    ids=lambda lengths: "-".join(map(str, lengths)),
)
@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("rows", [1, 2])
def test_spans_attend_as_with_a_mask(lengths: tuple[int, ...], key_heads: int, rows: int) -> None:
    made = torch.Generator().manual_seed(0)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    span = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    mask = (span[:, None] == span) & torch.ones(ends[-1], ends[-1]).tril().bool()
    heads = (4, key_heads, key_heads)
    given = [torch.randn(rows, h, ends[-1], 8, generator=made, dtype=torch.float64, requires_grad=True) for h in heads]
    weights = torch.randn(rows, 4, ends[-1], 8, generator=made, dtype=torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(*given, attn_mask=mask, scale=0.3, enable_gqa=True)
    spans = PackedSpans.of(list(zip([0, *ends], ends, strict=False)), "cpu")
    found = attend(*given, spans, 0.3)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        *(torch.autograd.grad((out * weights).sum(), given) for out in (found, expected)), strict=True
    ):
        torch.testing.assert_close(one, other)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_no_tensor_grows_with_the_square_of_the_tokens(tied: Model, make_batch: Callable[..., TrainBatch]) -> None:
    rows = to_rows(make_batch(150), "packed")
    tokens = rows.input_ids.numel()
    assert tokens > 1000
    _, run = packed(tied)
    with Largest() as made:
        run(rows)
    with Largest() as masked:
        load_policy(tied, "sdpa", False)(rows, 0.8, "gradient")
    assert made.elements < tokens**2 / 2 < masked.elements


def test_a_model_with_other_layers_keeps_its_attention(tied: Model, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, MistralConfig

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    config = MistralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, sliding_window=4)
    net = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    PackedAttention().adopt(net, "")
    assert net.config._attn_implementation == "sdpa"


def test_two_learners_of_a_process_keep_apart(tied: Model, make_batch: Callable[..., TrainBatch]) -> None:
    _, first = packed(tied)
    rows = to_rows(make_batch(5), "packed")
    expected = first(rows)[0]
    _, second = packed(tied)
    second(to_rows(make_batch(3, seed=1), "packed"))
    torch.testing.assert_close(first(rows)[0], expected)


def test_a_model_with_its_own_masks_keeps_its_attention() -> None:
    from transformers import AutoModelForCausalLM, DogeConfig

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    config = DogeConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    net = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    PackedAttention().adopt(net, "")
    assert net.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("given", "what"), [({"attention_mask": 1}, "a mask of its own"), ({"softcap": 5.0}, "softcap")]
)
def test_attention_that_is_more_than_causal_is_refused(given: dict[str, Any], what: str) -> None:
    with pytest.raises(LearnerError, match=f"attention of a Linear takes {what}, which packed rollouts"):
        PackedAttention()._attention(torch.nn.Linear(1, 1), *[torch.zeros(1, 1, 1, 1)] * 3, **given)


def test_models_without_a_mask_between_packed_rollouts_are_refused() -> None:
    from transformers import AutoModelForCausalLM, FalconConfig, OPTConfig

    with torch.device("meta"):
        falcon = AutoModelForCausalLM.from_config(FalconConfig(num_hidden_layers=1))
        opt = AutoModelForCausalLM.from_config(OPTConfig(num_hidden_layers=1))
    for net, alone in ((falcon, False), (opt, True)):
        for without_mask in (True, False):
            faults = policy_faults(net, "sdpa", "packed", without_mask=without_mask)
            assert any("does not separate packed rollouts" in fault for fault in faults) != (alone and without_mask)
        assert policy_faults(net, "sdpa", "padded") == []


@pytest.mark.parametrize(
    ("options", "without"),
    [
        ({"rows": "packed"}, True),
        ({"rows": "packed", "attention": "eager"}, False),
        ({"rows": "packed", "compile": True}, False),
        ({}, False),
    ],
)
def test_which_rows_need_no_mask(options: dict[str, Any], without: bool) -> None:
    assert rlsdk.load("learner", "deepspeed", **options).packs_without_mask == without


class SeemsOnGPU(TorchFunctionMode):
    """Makes tensors claim to be on a GPU; records the heads of queries and keys that attention gets."""

    def __init__(self) -> None:
        self.heads: list[tuple[int, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.heads.append((args[0].shape[1], args[1].shape[1]))
        return func(*args, **(kwargs or {}))


class TestHeadsOnAGPU:
    """Only the flash kernel shares heads: it takes 16 bits, no mask, and heads of equal size up to 256."""

    @pytest.mark.parametrize(
        ("dtype", "masked", "sizes", "heads"),
        [
            (torch.bfloat16, False, (64, 64), 2),
            (torch.float32, False, (64, 64), 8),
            (torch.bfloat16, True, (64, 64), 8),
            (torch.bfloat16, False, (64, 32), 8),
            (torch.bfloat16, False, (512, 512), 8),
        ],
    )
    def test_are_copied_where_flash_does_not_run(
        self, dtype: torch.dtype, masked: bool, sizes: tuple[int, int], heads: int
    ) -> None:
        query, key = (torch.randn(1, n, 9, sizes[0]).to(dtype) for n in (8, 2))
        value = torch.randn(1, 2, 9, sizes[1]).to(dtype)
        mask = torch.ones(1, 9, 9, dtype=torch.bool).tril()
        within = mask if masked else PackedSpans([9], [None], [None], None, None)
        expected = attend(query, key, value, within, None)
        with SeemsOnGPU() as gpu:
            found = attend(query, key, value, within, None)
        assert gpu.heads == [(8, heads)]
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_are_copied_by_a_model_of_padded_rows(self, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM, LlamaConfig

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
        config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
        net = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        given = {"input_ids": torch.arange(14).view(2, 7), "use_cache": False}
        expected = net(**given).logits
        copy_grouped_heads(net)
        with SeemsOnGPU() as gpu:
            found = net(**given).logits
        assert gpu.heads == [(4, 4 if dtype == torch.float32 else 2)]
        torch.testing.assert_close(found, expected)

    def test_are_copied_only_for_models_that_share_them(self, tied: Model) -> None:
        for attention, heads in (("eager", 2), ("sdpa", 4)):
            from transformers import AutoModelForCausalLM, LlamaConfig

            config = LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=heads)
            net = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
            copy_grouped_heads(net)
            assert net.config._attn_implementation == attention
