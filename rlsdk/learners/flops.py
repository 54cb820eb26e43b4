"""Count the FLOPs of a model's passes, and look up the peak of GPUs: together the model FLOPs utilisation (MFU)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from rlsdk.vision import tower_names

PEAK_TFLOPS: Mapping[str, float] = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10": 125.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
    "MI325X": 1307.0,
    "MI300X": 1307.0,
    "MI250": 362.0,
}
"""Peak of dense matrix products in bfloat16, in TFLOP/s, by a part of the GPU's name; from the vendors' data sheets."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Config keys of the number of experts per layer."""


@attrs.frozen(kw_only=True)
class ModelFlops:
    """FLOPs that the passes of a model need in theory, whether or not a learner recomputes or skips a part.

    Counted as in PaLM (arXiv:2204.02311, appendix B): two per weight and token, and attention without its mask.

    Attributes:
        weights: Number of weights that a token is multiplied by; of experts, those that it chooses.
        windows: Tokens to which each attention layer attends; infinite for full attention.
        width: Number of attention heads times their size.
        update: FLOPs of an update, in forward passes.
    """

    weights: float
    windows: tuple[float, ...]
    width: int
    update: int

    @classmethod
    def of(cls, net: Any, *, adapted: bool = False) -> ModelFlops:
        """Count the weights of a model.

        Args:
            net: A transformers model before it is sharded, or one that ZeRO-3 has sharded.
            adapted: True if only a small adapter beside the weights is trained, which then need no gradient.
        """
        config = net.config.get_text_config()
        experts = max((getattr(config, name, None) or 0 for name in _EXPERTS), default=0)
        chosen = getattr(config, "num_experts_per_tok", None) or 0
        share = chosen / experts if experts and chosen else 1.0
        tower = tuple(f"{name}." for name in tower_names(net))
        # Rows of the embeddings are looked up; tied, they are also the output head.
        head = net.get_output_embeddings()
        looked_up = None if head is not None and config.tie_word_embeddings else net.get_input_embeddings().weight
        weights = 0.0
        for name, parameter in net.named_parameters():
            shape = getattr(parameter, "ds_shape", parameter.shape)
            if len(shape) > 1 and parameter is not looked_up and not name.startswith(tower):
                weights += math.prod(shape) * (share if ".experts." in name else 1.0)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        sliding = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
        within = {"full_attention": math.inf, "sliding_attention": sliding or math.inf, "": sliding or math.inf}
        return cls(
            weights=weights,
            windows=tuple(within[kind] for kind in kinds if kind in within),
            width=config.num_attention_heads * size,
            update=2 if adapted else 3,
        )

    def of_update(self, lengths: np.ndarray) -> float:
        """Return the FLOPs of an update on rollouts of these lengths, int64 `[n]`."""
        tokens = lengths.astype(np.float64)
        attended = sum(float(tokens @ np.minimum(tokens, window)) for window in self.windows)
        return self.update * (2 * self.weights * float(tokens.sum()) + 4 * self.width * attended)


def peak_tflops(device: str) -> float | None:
    """Return the peak of a GPU in bfloat16, in TFLOP/s; None if it is not in the table."""
    words = f" {device.replace('-', ' ')} ".lower()
    return next((peak for name, peak in PEAK_TFLOPS.items() if f" {name.lower()} " in words), None)
