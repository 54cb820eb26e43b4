"""Attention within each packed rollout, without a mask of tokens × tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import attrs
import torch
from torch import Tensor

from rlsdk.errors import LearnerError
from rlsdk.learners.rows import TokenRows

SHORT = 128
"""Rollouts of at most this many tokens share attention calls, since the call takes longer than its computation."""
ALIKE = 16
"""Maximum difference in length between rollouts that share a call."""
_OWN_MASKS = ("doge",)
"""Model types whose attention computes its own mask."""
_COPIES_HEADS = "rlsdk_copies_heads"
_adopted = count()


@attrs.define(eq=False)
class PackedAttention:
    """Run models on packed rows, rank by rank; see `SharedRows`.

    Models with other than full attention keep their own attention with a mask.
    """

    rank: int = attrs.field(init=False, default=0)
    size: int = attrs.field(init=False, default=1)
    slices: int = attrs.field(init=False, default=1)
    _spans: PackedSpans = attrs.field(init=False)

    def adopt(self, model: Any, path: str) -> None:
        """Make a transformers model attend within each rollout, if possible."""
        if attends_fully(model):
            replace_attention(model, self._attention)

    def turns(self, rows: TokenRows) -> list[TokenRows]:
        """Return this rank's own rows."""
        return [rows]

    def __call__(self, model: Callable[..., Any], rows: TokenRows, *args: Any) -> Any:
        """Run a model on rows."""
        # Attention reads it now, and again when a backward pass recomputes activations, before the next pass.
        self._spans = PackedSpans.of_rows(rows, rows.input_ids.shape[1])
        return model(rows, *args)

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
    ) -> Any:
        """Attend, as called by transformers: `query` `[rows, heads, tokens, size]` to `[rows, tokens, heads, size]`."""
        check_plain(module, attention_mask, options)
        attended = attend(query, key, value, self._spans, options.get("scaling"))
        return attended.transpose(1, 2).contiguous(), None


def copied(query: Tensor, key: Tensor, value: Tensor, *, masked: bool) -> tuple[Tensor, Tensor]:
    """Return `key` and `value`, with a copy of each head per head of `query` where the kernel on a GPU needs it.

    Only torch's flash kernel shares heads. Where it does not run, neither does the memory-efficient one with shared
    heads, and torch would compute matrices of tokens × tokens.
    """
    size, groups = key.shape[-1], query.shape[1] // key.shape[1]
    flash = not masked and query.dtype != torch.float32 and size == value.shape[-1] <= 256
    if flash or groups == 1 or not query.is_cuda:
        return key, value
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def copy_grouped_heads(model: Any) -> None:
    """Make the attention `sdpa` of a transformers model copy heads where the kernel needs it; see `copied`.

    transformers itself copies them only beside a mask; on a GPU, float32 needs it without one as well.
    """
    config = model.config.get_text_config()
    kept = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if config._attn_implementation != "sdpa" or kept == config.num_attention_heads or not replaceable(model):
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Any:
        if attention_mask is None:
            key, value = copied(query, key, value, masked=False)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    AttentionInterface.register(_COPIES_HEADS, attention)
    AttentionMaskInterface.register(_COPIES_HEADS, sdpa_mask)
    model.set_attn_implementation(_COPIES_HEADS)


def attends_fully(model: Any) -> bool:
    """Return True for a transformers model whose layers all attend to every earlier token, by replaceable attention."""
    return not other_layers(model.config) and replaceable(model)


def replaceable(model: Any) -> bool:
    """Return True for a transformers model whose attention can be replaced by causal attention without a mask."""
    return bool(type(model)._supports_attention_backend) and model.config.model_type not in _OWN_MASKS


def other_layers(config: Any) -> set[str]:
    """Return the layer types in a model's config other than full attention."""
    text = config.get_text_config()
    types = set(getattr(text, "layer_types", None) or ())
    if not types and getattr(text, "sliding_window", None) is not None:
        return {"sliding_attention"}
    return types - {"full_attention"}


def replace_attention(model: Any, attention: Callable[..., Any]) -> None:
    """Make a transformers model use an attention, registered under a name for which transformers builds no mask."""
    from transformers import AttentionInterface

    # A unique name, since models of another learner in this process read spans of other rows.
    name = f"rlsdk_{next(_adopted)}"
    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)


def check_plain(module: Any, mask: Any, options: Mapping[str, Any]) -> None:
    """Refuse attention that is not plainly causal, judging by the arguments that a transformers layer passes.

    Raises:
        LearnerError: The result would differ.
    """
    unsupported = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if mask is not None or unsupported:
        what = ", ".join(["a mask of its own"] * (mask is not None) + unsupported)
        raise LearnerError(
            f"attention of a {type(module).__name__} takes {what}, which packed rollouts and ranks that share rollouts "
            "do not support; set learner.rows=padded, and let each rank read whole rollouts"
        )


@attrs.frozen(eq=False)
class PackedSpans:
    """Column spans of packed rows within which tokens attend to each other, one per rollout.

    Short rollouts of similar length attend in one call, as a stack.

    Attributes:
        sizes: Tokens of each stack.
        columns: For each stack, index into its tokens for each column of each rollout, int64 `[rollouts, longest]`;
            shorter rollouts repeat their last token, which no earlier token sees. None for a single rollout.
        real: For each stack, False where a token is repeated, bool `[rollouts, longest]`; None for a single rollout.
        order: Column of each token, stack by stack, int64 `[tokens]`; None if that is their order in the row.
        restores: Index of each column in `order`, int64 `[tokens]`; None without `order`.
    """

    sizes: list[int]
    columns: list[Tensor | None]
    real: list[Tensor | None]
    order: Tensor | None
    restores: Tensor | None

    @classmethod
    def of_rows(cls, rows: TokenRows, width: int) -> PackedSpans:
        """Return the spans of rows; the last span ends with column `width`."""
        positions = rows.position_ids
        begins = [0] if positions is None else (positions[0] == 0).nonzero()[:, 0].tolist()
        return cls.of(list(zip(begins, [*begins[1:], width], strict=True)), rows.input_ids.device)

    @classmethod
    def of(cls, spans: list[tuple[int, int]], device: torch.device | str) -> PackedSpans:
        """Stack consecutive spans of columns."""
        stacks: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for begin, end in spans:
            alike = ("length", (end - begin - 1) // ALIKE) if end - begin <= SHORT else ("alone", begin)
            stacks.setdefault(alike, []).append((begin, end))
        sizes, columns, real = [], [], []
        for stack in stacks.values():
            lengths = torch.tensor([[end - begin] for begin, end in stack], device=device)
            column = torch.arange(int(lengths.max()), device=device)
            sizes.append(int(lengths.sum()))
            columns.append(lengths.cumsum(0) - lengths + column.minimum(lengths - 1) if len(stack) > 1 else None)
            real.append(column < lengths if len(stack) > 1 else None)
        order = restores = None
        if len(stacks) < len(spans):
            order = torch.cat([torch.arange(*span, device=device) for stack in stacks.values() for span in stack])
            restores = order.argsort()
        return cls(sizes, columns, real, order, restores)


def attend(query: Tensor, key: Tensor, value: Tensor, within: PackedSpans | Tensor, scale: float | None) -> Tensor:
    """Compute attention: `[rows, heads, tokens, size]`.

    Args:
        query: `[rows, heads, tokens, size]`.
        key: The same, possibly with fewer heads.
        value: Like `key`.
        within: Spans of columns, causal attention within each; or a mask, bool `[rows, tokens, tokens]`.
        scale: Factor of the scores; None for the inverse root of the size.
    """
    key, value = copied(query, key, value, masked=isinstance(within, Tensor))
    grouped = query.shape[1] != key.shape[1]
    if isinstance(within, Tensor):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, within[:, None], scale=scale, enable_gqa=grouped
        )

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
        )

    order, restores = within.order, within.restores
    stacked = [each if order is None else each[:, :, order] for each in (query, key, value)]
    # One split instead of a slice per stack, whose gradient would be as large as the whole.
    pieces = zip(*(torch.split(each, within.sizes, 2) for each in stacked), strict=True)
    parts = []
    for columns, real, qkv in zip(within.columns, within.real, pieces, strict=True):
        if columns is None:
            parts.append(one(*qkv))
            continue
        attended = one(*(each[:, :, columns].transpose(1, 2).flatten(0, 1) for each in qkv))
        parts.append(attended.reshape(-1, len(columns), *attended.shape[1:]).transpose(1, 2)[:, :, real])
    attended = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    return attended if restores is None else attended[:, :, restores]
