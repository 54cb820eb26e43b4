"""A trained model as a folder that `transformers.from_pretrained` opens."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from rlsdk.contracts import Model

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)


def write_model(folder: Path, model: Any, tensors: Mapping[str, Tensor], source: Model) -> None:
    """Write config, generation config, weights (safetensors) and tokenizer.

    Args:
        folder: Made if missing.
        model: The transformers model, for its config.
        tensors: All of its tensors, whole.
        source: Where model and tokenizer came from.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, state_dict=dict(tensors))
    copy_tokenizer(source.tokenizer or source.path, folder, trust_remote_code=source.trust_remote_code)


def copy_tokenizer(source: str, folder: Path, *, trust_remote_code: bool) -> None:
    """Copy a tokenizer's files as they are; one of a hub id is loaded and saved.

    Loading and saving may change a tokenizer without a sound: transformers rebuilds some of them by rules of its own.
    """
    if not Path(source).is_dir():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code).save_pretrained(folder)
        return
    for name in _TOKENIZER_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, folder / name)
