"""Attention of packed rollouts, each to itself: no mask of tokens × tokens, which would hold what no token may see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import attrs
import torch
from torch import Tensor

from rlsdk.errors import LearnerError
from rlsdk.learners.rows import TokenRows

_OWN_MASKS = ("doge",)
"""Types of models whose attention computes a mask of its own."""
_adopted = count()
SHORT = 128
"""Most tokens of a rollout whose attention takes less time than its call, so that several share a call."""
ALIKE = 16
"""Greatest difference in length of rollouts that share a call."""


@attrs.define(eq=False)
class PackedAttention:
    """Runs models on packed rows, rank by rank; see `SharedRows`.

    A model that mixes tokens otherwise than in full attention keeps its own attention, and a mask.
    """

    rank: int = attrs.field(init=False, default=0)
    size: int = attrs.field(init=False, default=1)
    slices: int = attrs.field(init=False, default=1)
    _spans: list[tuple[int, int]] = attrs.field(init=False, factory=list)

    def adopt(self, model: Any, path: str) -> None:
        """Have a transformers model attend within each rollout alone, if it can."""
        if attends_fully(model):
            replace_attention(model, self._attention)

    def turns(self, rows: TokenRows) -> list[TokenRows]:
        """Return the rows: this rank runs its own."""
        return [rows]

    def __call__(self, model: Callable[..., Any], rows: TokenRows, *args: Any) -> Any:
        """Run a model on rows."""
        # Attention reads it here, and again where a backward pass recomputes activations: before the next pass.
        self._spans = spans(rows, rows.input_ids.shape[1])
        return model(rows, *args)

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
    ) -> Any:
        """Attend as transformers asks: `query` `[rows, heads, tokens, size]` to `[rows, tokens, heads, size]`."""
        check_plain(module, attention_mask, options)
        found = attend(query, key, value, self._spans, options.get("scaling"))
        return found.transpose(1, 2).contiguous(), None


def attends_fully(model: Any) -> bool:
    """Return True for a transformers model whose layers all attend to every token before, by replaceable attention."""
    return not other_layers(model.config) and replaceable(model)


def replaceable(model: Any) -> bool:
    """Return True for a transformers model whose attention can be replaced by causal attention without a mask."""
    return bool(type(model)._supports_attention_backend) and model.config.model_type not in _OWN_MASKS


def other_layers(config: Any) -> set[str]:
    """Return the types of a model's layers, from its config, but for full attention."""
    text = config.get_text_config()
    types = set(getattr(text, "layer_types", None) or ())
    if not types and getattr(text, "sliding_window", None) is not None:
        return {"sliding_attention"}
    return types - {"full_attention"}


def replace_attention(model: Any, attention: Callable[..., Any]) -> None:
    """Have a transformers model use an attention, under a name for which transformers builds no mask."""
    from transformers import AttentionInterface

    # A name of its own: models of another learner in this process read the spans of other rows.
    name = f"rlsdk_{next(_adopted)}"
    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)


def check_plain(module: Any, mask: Any, options: Mapping[str, Any]) -> None:
    """Refuse attention that is more than causal, by what a layer of transformers gives with it.

    Raises:
        LearnerError: It would be computed otherwise.
    """
    more = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if mask is not None or more:
        what = ", ".join(["a mask of its own"] * (mask is not None) + more)
        raise LearnerError(
            f"attention of a {type(module).__name__} takes {what}, which packed rollouts and ranks that share them "
            "leave out; set learner.rows=padded, and let each rank read whole rollouts"
        )


def spans(rows: TokenRows, width: int) -> list[tuple[int, int]]:
    """Return the columns, up to `width`, within which tokens attend to each other: those of each packed rollout."""
    begins = [0] if rows.position_ids is None else (rows.position_ids[0] == 0).nonzero()[:, 0].tolist()
    return list(zip(begins, [*begins[1:], width], strict=True))


def attend(query: Tensor, key: Tensor, value: Tensor, within: list[tuple[int, int]], scale: float | None) -> Tensor:
    """Causal attention within spans of columns, which follow each other: `[rows, heads, tokens, size]`.

    Short spans of about the same length attend in one call. Those that are shorter repeat their last token, which no
    token before it sees.
    """
    grouped = query.shape[1] != key.shape[1]

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
        )

    stacks: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for begin, end in within:
        alike = ("length", (end - begin - 1) // ALIKE) if end - begin <= SHORT else ("alone", begin)
        stacks.setdefault(alike, []).append((begin, end))
    order = torch.cat([torch.arange(*span, device=query.device) for stack in stacks.values() for span in stack])
    ordered = len(stacks) == len(within)
    # One split, not a slice for each stack, whose gradient would be as large as the whole.
    sizes = [sum(end - begin for begin, end in stack) for stack in stacks.values()]
    pieces = [torch.split(each if ordered else each[:, :, order], sizes, 2) for each in (query, key, value)]
    parts = []
    for stack, *qkv in zip(stacks.values(), *pieces, strict=True):
        if len(stack) == 1:
            parts.append(one(*qkv))
            continue
        lengths = torch.tensor([[end - begin] for begin, end in stack], device=query.device)
        column = torch.arange(int(lengths.max()), device=query.device)
        index = lengths.cumsum(0) - lengths + column.minimum(lengths - 1)
        found = one(*(each[:, :, index].transpose(1, 2).flatten(0, 1) for each in qkv))
        parts.append(found.reshape(-1, len(stack), *found.shape[1:]).transpose(1, 2)[:, :, column < lengths])
    found = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    return found if ordered else found[:, :, order.argsort()]
