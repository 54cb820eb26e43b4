"""Reasons why a transformers model cannot be trained, by its class and config; the model needs no weights."""

from __future__ import annotations

from typing import Any

from rlsdk.errors import LearnerError
from rlsdk.head import LOGIT_DIVISORS
from rlsdk.learners.options import Attention
from rlsdk.learners.packing import attends_fully, other_layers
from rlsdk.learners.rows import RowStyle
from rlsdk.vision import layout_faults

_BENT_LOGITS = (
    "final_logit_softcapping",
    "lm_head_multiplier",
    "logit_scale",
    "logits_mup_width_multiplier",
    "logits_scaling",
    "logits_soft_cap",
    "output_logit_soft_cap",
    "output_multiplier",
    "output_multiplier_scale",
)
"""Settings of models whose logits are not `hidden · headᵀ`; the head computes those of `LOGIT_DIVISORS`."""
_BIASED_BY_COLUMN = ("bloom", "mpt")
"""Model types that bias attention by the distance of columns (ALiBi), whatever the positions are."""
_MASKED_WITHOUT_POSITIONS = (
    "afmoe",
    "biogpt",
    "bloom",
    "falcon",
    "gpt_oss",
    "granitemoehybrid",
    "mpt",
    "openai-gpt",
    "opt",
    "recurrent_gemma",
    "rwkv",
    "xglm",
    "zamba",
)
"""Model types for which transformers builds masks without positions: packed rollouts would attend to each other."""


def policy_faults(
    net: Any, attention: Attention, rows: RowStyle = "padded", *, without_mask: bool = False
) -> list[str]:
    """Return why a causal language model cannot be trained as a policy, judging by its class and config.

    Args:
        net: The model; it may have no weights.
        attention: Its attention implementation.
        rows: Row layout.
        without_mask: True if packed rollouts attend separately, if the model allows it.
    """
    text = net.config.get_text_config()
    divisor = LOGIT_DIVISORS.get(net.config.model_type)
    settings = {name: getattr(text, name, None) for name in _BENT_LOGITS if name != divisor}
    faults = []
    if net.base_model is net:
        faults.append(f"transformers names no backbone within a {type(net).__name__}; train another model")
    if bent := [f"{name}={value}" for name, value in settings.items() if value not in (None, 1.0)]:
        faults.append(f"logits changed after the head ({', '.join(bent)}) are not supported; train another model")
    return faults + backbone_faults(net, attention, rows, without_mask=without_mask)


def backbone_faults(net: Any, attention: Attention, rows: RowStyle, *, without_mask: bool) -> list[str]:
    """Return why a model cannot run on rows, as policy, reference or critic; arguments as in `policy_faults`."""
    kind, text = type(net).__name__, net.config.get_text_config()
    faults = []
    supported = {"sdpa": net._supports_sdpa, "flash_attention_2": net._supports_flash_attn, "eager": True}
    if not supported[attention]:
        faults.append(f"transformers runs a {kind} without attention: {attention}; set learner.attention=eager")
    recurrent = {*(getattr(text, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
    if rows == "packed" and recurrent:
        faults.append(
            f"layers of type {', '.join(sorted(recurrent))} would carry their state from one packed rollout into the "
            "next; set learner.rows=padded"
        )
    masked = attention != "flash_attention_2" and not (without_mask and attends_fully(net))
    if rows == "packed" and masked and text.model_type in _MASKED_WITHOUT_POSITIONS:
        faults.append(
            f"transformers does not separate packed rollouts in a {kind} with attention: {attention}; set "
            "learner.rows=padded"
        )
    faults += layout_faults(
        net,
        {
            f"learner.rows={rows} would mix their positions; set learner.rows=padded": rows != "padded",
            "flash attention has no mask in which the tokens of an image see each other; set learner.attention=sdpa": (
                attention == "flash_attention_2"
            ),
        },
    )
    if rows in ("shared", "tree"):
        try:
            check_layers(net.config, rows)
        except LearnerError as error:
            faults.append(str(error))
    return faults


def check_layers(config: Any, rows: RowStyle = "shared") -> None:
    """Refuse models that cannot share prefixes, since layers do not attend to all previous tokens.

    Raises:
        LearnerError: A layer has an unsupported type.
    """
    text = config.get_text_config()
    if others := sorted(other_layers(config)):
        raise LearnerError(
            f"model type {text.model_type!r} has layers of type {', '.join(others)}; rows: {rows} needs full "
            "attention in every layer; set learner.rows=padded"
        )
    if text.model_type in _BIASED_BY_COLUMN or getattr(text, "alibi", False):
        raise LearnerError(
            f"model type {text.model_type!r} biases attention by the distance of tokens within a row (ALiBi), which "
            f"rows: {rows} changes; set learner.rows=padded"
        )
