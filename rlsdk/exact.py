"""Bitwise identical logprobs in engine and learner: `model.exact`, on a CPU in float32.

The summation order of a float32 product depends on its shape: on batch size, padding, the length of the cache, and
where a continued conversation ends. Each sequence is therefore processed alone, padded on the right to
`model.max_length`. All passes have the same shape, and causal attention keeps the padding out of every result that is
used. Both sides run the same tokens through the same backbone and head, in the same chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


def padded_sequence(token_ids: np.ndarray, width: int) -> tuple[Tensor, Tensor]:
    """Pad a sequence to the one shape that all exact passes have.

    Args:
        token_ids: int64 `[k]`, at most `width`.
        width: `model.max_length`.

    Returns:
        Tokens with zeros on the right, int64 `[1, width]`, and the token after each of them, int64 `[width]`.
    """
    import torch

    plane = np.zeros(width + 1, np.int64)
    plane[: len(token_ids)] = token_ids
    return torch.from_numpy(plane[None, :-1].copy()), torch.from_numpy(plane[1:].copy())


def sequence_logprobs(net: Any, token_ids: np.ndarray, width: int, temperature: float) -> np.ndarray:
    """Compute the logprobs of a sequence exactly as the learner does.

    Args:
        net: A causal language model of transformers.
        token_ids: int64 `[k]`, at most `width`.
        width: `model.max_length`.
        temperature: Divisor of the logits; above 0.

    Returns:
        float32 `[k - 1]`, in nats: logprob of each token given the tokens before it.
    """
    import torch

    from rlsdk.head import logit_scale, token_logprobs

    head = net.get_output_embeddings()
    with torch.no_grad():
        input_ids, targets = padded_sequence(token_ids, width)
        states = net.base_model(input_ids=input_ids, position_ids=None, use_cache=False).last_hidden_state[0]
        bias = getattr(head, "bias", None)
        divisor = temperature / logit_scale(net.config)
        found = token_logprobs(states, head.weight, targets, bias=bias, temperature=divisor)[0]
    return np.asarray(found[: len(token_ids) - 1].numpy())


def expert_count(config: Any) -> int:
    """Return the number of experts per layer; 0 if the model is not a mixture of experts."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((int(count) for name in names if (count := getattr(config, name, None))), 0)


def architecture_fault(config: Any) -> str | None:
    """Explain why exact logprobs are impossible for a model; None if they are possible."""
    if expert_count(config):
        return (
            f"model type {config.model_type!r} has experts, and each processes the tokens routed to it together: "
            "the shape of its products depends on the other tokens of a conversation"
        )
    return None
