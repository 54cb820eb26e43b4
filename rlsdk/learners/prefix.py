"""A transformers cache with the keys and values of shared prompts only, not of the rows after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


class Prefix(Cache):
    """Cache of all layers.

    transformers' own caches also store keys and values of the rows: a compiled model would return them, with gradients
    of zeros.
    """

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Create a cache of prompt keys and values, `[rows, heads, prompt, head size]` each."""
        super().__init__(layers=[_PrefixLayer(keys, values) for keys, values in layers])


class _PrefixLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing, since keys and values are given at creation."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values for attention: those of the prompts, followed by those of the rows."""
        return torch.cat([self.keys, key_states], dim=2), torch.cat([self.values, value_states], dim=2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns that a mask covers, and their first."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of prompt columns."""
        return self.keys.shape[2]

    def get_max_length(self) -> int:
        """No maximum."""
        return -1
