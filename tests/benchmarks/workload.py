"""Training workload of the benchmarks, as a plugin file: listed prompts, and a reward that differs in every group."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import rlsdk


@rlsdk.tasks("prompts")
def prompts(*, path: str, split: str = "train") -> Sequence[rlsdk.Task]:
    """The prompts of a JSON list, in its order.

    Args:
        path: Of the file.
        split: Part of every id.
    """
    texts = json.loads(Path(path).read_text(encoding="utf-8"))
    return [rlsdk.Task(id=f"{split}-{i}", prompt=text) for i, text in enumerate(texts)]


@rlsdk.reward("hash", runs="driver")
def text_hash(rollout: rlsdk.Rollout) -> float:
    """A hash of the text, from 0 to 1: nothing to learn, and no two answers of a group score alike."""
    return zlib.crc32(rollout.text.encode()) / 2**32
