"""Per-continuation states of layers without keys and values: linear attention and state-space models."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers.cache_utils import LinearAttentionLayer

KINDS = ("linear_attention", "conv", "moe", "mlp")
"""Types of layers with a state, or, in models that list each block as a layer, without a cache."""


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
        for (name, index), held in self._held.items():
            getattr(self, name)[index] = held[:rows]
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
