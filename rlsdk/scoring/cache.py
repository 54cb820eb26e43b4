"""Cache of the scores of a reward."""

from __future__ import annotations

import hashlib
import inspect
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from rlsdk.scoring.outcome import as_score
from rlsdk.types import Rollout, Score

ENTRIES = 100_000
"""Scores that are kept, those used last."""


class Cache:
    """Runs a reward once per distinct task, messages and status; failed calls are repeated."""

    def __init__(self, run: Callable[[Rollout], Any], entries: int = ENTRIES) -> None:
        self._run = run
        self._entries = entries
        self._kept: OrderedDict[bytes, Score] = OrderedDict()

    async def __call__(self, rollout: Rollout) -> Score:
        """The score of one rollout."""
        key = _key(rollout)
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        result = self._run(rollout)
        result = await result if inspect.isawaitable(result) else result
        score = as_score(result)
        if score.valid:
            self._kept[key] = score
            while len(self._kept) > self._entries:
                self._kept.popitem(last=False)
        return score


def _key(rollout: Rollout) -> bytes:
    content = pickle.dumps((rollout.task, rollout.messages, rollout.status), protocol=5)
    return hashlib.blake2b(content, digest_size=16).digest()
