"""Facts about a pretrained model from its files: its tokenizer, end tokens, vocabulary and maximum length."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsdk.contracts import Model
from rlsdk.errors import ValueFault, first_line


def open_tokenizer(model: Model) -> Any:
    """Return the tokenizer of a model, with its chat template replaced if the model names another."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.tokenizer or model.path, trust_remote_code=model.trust_remote_code)
    if model.chat_template is not None:
        tokenizer.chat_template = model.chat_template
    return tokenizer


def end_ids(model: Model, tokenizer: Any) -> tuple[int, ...]:
    """Return the end tokens: the tokenizer's, those of the generation config, and those of the model's config.

    Raises:
        ValueFault: The generation config in the model's folder is damaged.
    """
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    ends = {tokenizer.eos_token_id, *_listed(getattr(config, "eos_token_id", None))}
    try:
        ends.update(_listed(GenerationConfig.from_pretrained(model.path).eos_token_id))
    except (OSError, TypeError, ValueError) as error:
        file = Path(model.path) / "generation_config.json"
        if file.is_file():
            raise ValueFault(
                f"{file} cannot be read ({first_line(error)}), and may name tokens that end an answer; copy it again"
            ) from error
        if not isinstance(error, OSError):  # of the hub; the file is optional
            raise
    return tuple(sorted(i for i in ends if i is not None))


def vocabulary_size(model: Model) -> int:
    """Return the number of tokens that a model has embeddings for; `sys.maxsize` if its config is not here."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            model.path, trust_remote_code=model.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError):  # an engine may serve a model that transformers does not know
        return sys.maxsize
    return int(getattr(config.get_text_config(), "vocab_size", sys.maxsize))


def _listed(ids: int | Sequence[int] | None) -> Sequence[int]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else ids


def positions(config: Any) -> float:
    """Return the maximum number of tokens that a model supports; infinity if its config has no limit.

    Includes the scaling factor of rotary positions, unless `max_position_embeddings` already does.
    """
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
    named = [found for name in names if (found := getattr(config, name, None))]
    longest = float(min(named, default=math.inf))
    for each in _rotary(config):
        factor = each.get("factor") or 1.0
        if each.get("rope_type") in ("linear", "dynamic"):
            return longest * factor
        if "original_max_position_embeddings" in each:
            longest = max(longest, each["original_max_position_embeddings"] * factor)
    return longest


def constant_positions(config: Any) -> float:
    """Return the number of tokens up to which rotary frequencies are constant; infinity if they never change.

    Beyond it, transformers changes those of all tokens of a batch, by its longest sequence.
    """
    limits = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
    found = [
        each.get(name) or getattr(config, name, None)
        for each in _rotary(config)
        if (name := limits.get(each.get("rope_type", "")))
    ]
    return float(min(filter(None, found), default=math.inf))


def _rotary(config: Any) -> list[Mapping[str, Any]]:
    """Return the settings of rotary positions: one for all layers, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [each for each in rope.values() if isinstance(each, dict)]
