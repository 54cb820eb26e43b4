"""Properties of transformers tokenizers."""

from __future__ import annotations

from typing import Any


def adds_nothing(tokenizer: Any) -> bool:
    """Return True if transformers passes texts and ids unchanged to the underlying tokenizer, and back."""
    methods = (getattr(type(tokenizer), name, None) for name in ("__call__", "_encode_plus", "decode", "_decode"))
    own = all(str(getattr(each, "__module__", "")).startswith("transformers.tokenization_utils") for each in methods)
    return own and not tokenizer.clean_up_tokenization_spaces and not tokenizer.split_special_tokens


def control_tokens(tokenizer: Any) -> set[str]:
    """Return the texts that a tokenizer always turns into tokens of their own.

    Runs of white space, which some vocabularies add, are left out: they cannot end a turn.
    """
    added = map(str, getattr(tokenizer, "added_tokens_decoder", {}).values())
    return {t for t in {*getattr(tokenizer, "all_special_tokens", ()), *added} if len(t) > 1 and not t.isspace()}
