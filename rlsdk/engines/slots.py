"""A slot cache, written in place: one row per running continuation, whose tokens start at column 0.

Layers of linear attention and state-space models have states in place of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlsdk.engines.memory import KINDS, layer_kinds
from rlsdk.vision import offsets


class StateLayer(LinearAttentionLayer):
    """States of one layer, one row per continuation; the model reads and writes the first rows in place."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[tuple[str, int], torch.Tensor] = {}

    def fill(self, done: LinearAttentionLayer, source: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy the states after prompts.

        Args:
            done: States after `m` prompts.
            source: int64 `[k]`, index of each row's prompt.
            rows: int64 `[k]`, rows to write.
        """
        for name, index, state in states(done):
            held = self._held.get((name, index), state[:0])
            if (count := int(rows.max()) + 1) > len(held):
                held = torch.cat([held, state.new_zeros(count - len(held), *state.shape[1:])])
            held[rows] = state[source].to(held.dtype)
            self._held[name, index] = held
            if name == "conv_states":
                self.conv_kernel_size[index] = state.shape[-1]

    def show(self, rows: int) -> None:
        """Expose the states of the first rows to the model."""
        for (name, index), cached in self._held.items():
            getattr(self, name)[index] = cached[:rows]
            getattr(self, f"is_{name}_initialized")[index] = True
            self.has_previous_state[index] = True

    def keep(self, rows: torch.Tensor) -> None:
        """Move these rows, ascending, to the front."""
        for held in self._held.values():
            held[: len(rows)] = held[rows]

    def clear(self) -> None:
        """Free the memory."""
        self._held.clear()
        for states in (self.conv_states, self.recurrent_states):
            states.update(dict.fromkeys(states))


def states(layer: LinearAttentionLayer) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield the states of a layer, `[rows, ...]`, with their attribute and index in the layer."""
    for name in ("conv_states", "recurrent_states"):
        for index, state in getattr(layer, name).items():
            if state is not None:
                yield name, index, state


See = Callable[[torch.Tensor, torch.Tensor], Mapping[str, torch.Tensor]]
_ATTENTION = "rlsdk_shared_heads"
_FEW, _MANY = 16, 64
"""Number of columns by which the cache grows: few, so that short rows lie close together in memory."""


class Cursor:
    """Cache positions written by the current forward pass; shared by all layers.

    Attributes:
        rows: Number of active rows, `0 .. rows - 1`.
        columns: Column of each row's new token, int64 `[rows]`.
        width: Number of columns that attention reads.
        column: The common column, if it is the same for all rows.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.width = 0
        self.columns = torch.empty(0, dtype=torch.int64)
        self.index = torch.empty(0, dtype=torch.int64)
        self.column: int | None = None

    def move(self, columns: torch.Tensor, width: int) -> None:
        """Move to these columns, one per row starting with row 0."""
        self.rows, self.columns, self.width = len(columns), columns, width
        first = int(columns[0])
        self.column = first if bool((columns == first).all()) else None
        if len(self.index) != self.rows or self.index.device != columns.device:
            self.index = torch.arange(self.rows, device=columns.device)


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, `[capacity, heads, columns, head size]` each."""

    is_sliding = False

    def __init__(self, cursor: Cursor) -> None:
        super().__init__()
        self.cursor = cursor

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Create an empty cache in the shape of these states."""
        self.keys = key_states.new_zeros(0, key_states.shape[1], 0, key_states.shape[3])
        self.values = value_states.new_zeros(0, value_states.shape[1], 0, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token per row and return the keys and values that attention reads."""
        at = self.cursor
        for cache, new in ((self.keys, key_states), (self.values, value_states)):
            # When compiled, a plain number as an index would create a graph for each value.
            if torch.compiler.is_compiling() or at.column is None:
                cache[at.index, :, at.columns] = new[:, :, 0]
            else:
                cache[: at.rows, :, at.column] = new[:, :, 0]
        return self.keys[: at.rows, :, : at.width], self.values[: at.rows, :, : at.width]

    def reserve(self, rows: int, columns: int) -> None:
        """Grow the cache to at least this many rows and columns, with zeros, since masked columns must be finite."""
        for name in ("keys", "values"):
            cache = getattr(self, name)
            if cache.shape[0] < rows or cache.shape[2] < columns:
                size = (max(rows, cache.shape[0]), cache.shape[1], max(columns, cache.shape[2]), cache.shape[3])
                larger = cache.new_zeros(size)
                larger[: cache.shape[0], :, : cache.shape[2]] = cache
                setattr(self, name, larger)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns that a mask covers, and their first."""
        return self.cursor.width, 0

    def get_seq_length(self) -> int:
        """Return the number of columns before the new token."""
        return max(self.cursor.width - 1, 0)

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class Slots(Cache):
    """The cache of all layers."""

    def __init__(self, config: Any) -> None:
        """Create an empty cache."""
        self.cursor = Cursor()
        self.window: int = getattr(config, "sliding_window", None) or 0
        # If the config names no layer types, a window applies to all layers.
        self.kinds = set(getattr(config, "layer_types", None) or (("sliding_attention",) if self.window else ()))
        self.by_kind = bool(getattr(config, "layer_types", None))
        # Eager attention adds its mask to the scores; all others expect True for visible columns.
        self.added = config._attn_implementation == "eager"
        kinds = layer_kinds(config)
        super().__init__(layers=[StateLayer() if kind in KINDS else SlotLayer(self.cursor) for kind in kinds])
        self.attention = [layer for layer in self.layers if isinstance(layer, SlotLayer)]
        self.recurrent = [layer for layer in self.layers if isinstance(layer, StateLayer)]

    def fill(self, prefilled: Cache, source: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy the cache of a prefill of left-padded prompts.

        Args:
            prefilled: Its cache: `[m, heads, width, head size]` per attention layer, and states of other layers.
            source: int64 `[k]`, index of each row's prompt; several rows may share one.
            lengths: int64 `[m]`, prompt lengths.
            rows: int64 `[k]`, rows to write.
        """
        width = int(lengths.max())
        # Column c of a row is column c + padding of its prompt; columns beyond are masked until overwritten.
        columns = torch.arange(width, device=rows.device) + (width - lengths)[source, None]
        columns.clamp_(max=width - 1)
        whole = bool((lengths == width).all())
        for layer, done in zip(self.layers, prefilled.layers, strict=True):
            if isinstance(layer, StateLayer):
                layer.fill(done, source, rows)
                continue
            if not layer.is_initialized:
                layer.lazy_initialization(done.keys, done.values)
            layer.reserve(int(rows.max()) + 1, width)
            for cache, new in ((layer.keys, done.keys), (layer.values, done.values)):
                cache[rows, :, :width] = new[source] if whole else new[source[:, None], :, columns].transpose(1, 2)

    def advance(
        self,
        decoder: Callable[..., Any],
        device: str,
        tokens: np.ndarray,
        columns: np.ndarray,
        width: int,
        offsets: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Run one forward pass over one new token per row, starting with row 0.

        Args:
            decoder: The model or its compiled form.
            device: Device of the model.
            tokens: New tokens, int64 `[n]`.
            columns: Columns of these tokens, int64 `[n]`.
            width: Largest column plus one.
            offsets: Positions minus columns, int64 `[n]`; None if they are equal.

        Returns:
            Logits for the following token, `[n, vocabulary]`.
        """
        at = torch.from_numpy(columns).to(device)
        self.cursor.move(at, width)
        by = _FEW if width <= _MANY else _MANY
        for layer in self.recurrent:
            layer.show(len(columns))
        for layer in self.attention:
            # Reserve one more row and column than are read, so that a compiled model needs a single graph.
            layer.reserve(len(columns) + 1, -(-(width + 1) // by) * by)
        seen = torch.arange(width, device=device) <= at[:, None]
        mask: Any = self._mask(seen)
        if "sliding_attention" in self.kinds:
            near = self._mask(seen & (torch.arange(width, device=device) > at[:, None] - self.window))
            by_kind = {"full_attention": mask, "sliding_attention": near, **dict.fromkeys(self.kinds & set(KINDS))}
            mask = by_kind if self.by_kind else near
        positions = at if offsets is None else at + torch.from_numpy(offsets).to(device)
        output = decoder(
            torch.from_numpy(tokens).to(device)[:, None],
            attention_mask=mask,
            position_ids=positions[:, None],
            past_key_values=self,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _mask(self, seen: torch.Tensor) -> torch.Tensor:
        """Return the mask `[n, 1, 1, width]` for the visible columns of each row, bool `[n, width]`."""
        mask = seen[:, None, None]
        if not self.added:
            return mask
        dtype = self.attention[0].keys.dtype
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)

    def keep(self, rows: torch.Tensor, columns: int) -> None:
        """Move the first `columns` columns of these rows, ascending, to the front."""
        for layer in self.attention:
            for cache in (layer.keys, layer.values):
                cache[: len(rows), :, :columns] = cache[rows, :, :columns]
        for state in self.recurrent:
            state.keep(rows)

    def clear(self) -> None:
        """Free the memory."""
        for layer in self.attention:
            layer.is_initialized = False
            layer.keys = layer.values = None  # type: ignore[assignment]
        for state in self.recurrent:
            state.clear()

    def state_bytes(self, net: Any, device: str) -> int:
        """Return the state bytes of a continuation, which do not depend on its length; measured on one token."""
        if not self.recurrent:
            return 0
        cache = prefill(net, [np.zeros(1, dtype=np.int64)], device)[1]
        layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
        return sum(state.nbytes for layer in layers for _, _, state in states(layer))


def prefill(
    net: Any, prompts: Sequence[np.ndarray], device: str, see: See | None = None
) -> tuple[torch.Tensor, Cache, torch.Tensor, torch.Tensor | None]:
    """Run the model over prompts, padded on the left.

    Args:
        net: The model.
        prompts: Prompt tokens, int64 arrays.
        device: Device of the model.
        see: Function from token ids and a mask (False at padding) to the model's arguments, if there are images.

    Returns:
        Logits after each prompt `[m, vocabulary]`, the cache, the prompt lengths int64 `[m]`, and, with images, the
        next positions minus these lengths, int64 `[m]`.
    """
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    width = int(lengths.max())
    ids = np.zeros((len(prompts), width), dtype=np.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[width - len(prompt) :] = prompt
    seen = torch.arange(width, device=device) >= (width - lengths)[:, None]
    kinds = layer_kinds(net.config.get_text_config())
    # transformers' own layers would drop columns outside a window, which the slots keep.
    cache = Cache(layers=[LinearAttentionLayer() if kind in KINDS else DynamicLayer() for kind in kinds])
    tokens = torch.from_numpy(ids).to(device)
    positions = (seen.cumsum(-1) - 1).clamp_(min=0)
    images = None if see is None else see(tokens, seen)
    inputs = {"position_ids": positions, **({"input_ids": tokens} if images is None else images)}
    output = net(**inputs, attention_mask=seen.long(), past_key_values=cache, use_cache=True, logits_to_keep=1)
    return output.logits[:, -1], cache, lengths, None if images is None else offsets(images, lengths)


def use_attention(net: Any, compiled: bool) -> None:
    """Use `_attention` for decoding if it is faster than transformers' `sdpa`."""
    config = net.config.get_text_config()
    kept = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if config._attn_implementation == "sdpa" and (compiled or kept < config.num_attention_heads):
        AttentionInterface.register(_ATTENTION, _attention)
        AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
        net.set_attn_implementation(_ATTENTION)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute `sdpa` attention; with one new token per row, the heads of a group become its queries.

    With a mask, transformers copies the cache once per head, in every layer and step. When compiled without groups,
    explicit sums of products become one kernel, which is twice as fast as torch's for short rows.

    Args:
        module: The model's attention layer.
        query: `[n, heads, new tokens, head size]`.
        key: `[n, kept heads, columns, head size]`.
        value: Like `key`.
        attention_mask: bool or additive, `[n, 1, new tokens, columns]`.
        **options: Options passed by transformers, including `scaling`.

    Returns:
        Attention output `[n, new tokens, heads, head size]`, and None in place of the attention weights.
    """
    mask = attention_mask
    rows, heads, new, size = query.shape
    if new != 1 or mask is None or options.get("position_bias") is not None:
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **options)
        return result
    if torch.compiler.is_compiling() and heads == key.shape[1]:
        scores = (query.float() * key.float()).sum(-1) * (options.get("scaling") or size**-0.5)
        shares = scores.masked_fill(~mask[:, :, 0], -torch.inf).softmax(-1)
        mixed = (shares[..., None] * value.float()).sum(-2)
        return mixed.to(query.dtype)[:, None], None
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], size)
    output = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=mask, scale=options.get("scaling")
    )
    return output.reshape(rows, 1, heads, size), None
