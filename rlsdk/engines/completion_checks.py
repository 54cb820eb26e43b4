"""Checks of what an engine returns, before its arrays are joined with those of other completions."""

from __future__ import annotations

import math
import reprlib
import sys
from typing import Any, get_args

import numpy as np

from rlsdk.contracts import Completion, Finish, Request

_FINISHES = get_args(Finish)


def completion_fault(completion: Completion, request: Request, version: int, vocabulary: int) -> str:
    """Return what is wrong with a completion, with what was expected; empty if nothing is.

    The engine waits meanwhile, so a correct completion takes few calls of numpy: not even a search for infinite values.

    Args:
        completion: Completion that an engine returned.
        request: Its request.
        version: Version of the weights that the engine has; no token can come from a later one.
        vocabulary: Number of tokens that the model has embeddings for.
    """
    if completion.finish not in _FINISHES:
        return f"finish {reprlib.repr(completion.finish)}; expected one of {', '.join(_FINISHES)}"
    tokens, logprobs, versions = completion.token_ids, completion.logprobs, completion.versions
    if not _is_array(tokens, "iu"):
        return f"token_ids {_told(tokens)}; expected an array of integers with one axis"
    length = len(tokens)
    if not (_is_array(logprobs, "f") and len(logprobs) == length):
        return f"logprobs {_told(logprobs)} for {length} tokens; expected an array of {length} floats"
    if not (_is_array(versions, "iu") and len(versions) == length):
        return f"versions {_told(versions)} for {length} tokens; expected an array of {length} integers"
    return _value_fault(completion, request, version, vocabulary) if length else ""


def _value_fault(completion: Completion, request: Request, version: int, vocabulary: int) -> str:
    tokens, logprobs, versions = completion.token_ids, completion.logprobs, completion.versions
    if (length := len(tokens)) > request.sampling.max_tokens:
        return f"{length} tokens; its request allows {request.sampling.max_tokens}"
    if (wrong_id := outside(tokens, vocabulary)) is not None:
        return f"token id {wrong_id}; {known_ids(vocabulary)}"
    if not math.isfinite(np.add.reduce(logprobs)) and not np.isfinite(logprobs).all():
        at = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        return (
            f"logprob {logprobs[at]} for token {at}; expected a finite logprob of each sampled token, under the "
            "distribution that it was sampled from"
        )
    if int(versions.min()) < 0 or int(versions.max()) > version:
        wrong = next(int(v) for v in versions if not 0 <= v <= version)
        return f"version {wrong} for a token; expected the version of the weights that sampled it, 0 to {version}"
    return ""


def outside(token_ids: np.ndarray, vocabulary: int) -> int | None:
    """Return a token id that the model has no embedding for; None if there is none."""
    if not len(token_ids):
        return None
    least, greatest = int(token_ids.min()), int(token_ids.max())
    return least if least < 0 else greatest if greatest >= vocabulary else None


def known_ids(vocabulary: int) -> str:
    """Return which token ids a model reads, for messages."""
    return f"the model has 0 to {vocabulary - 1}" if vocabulary < sys.maxsize else "expected ids from 0"


def _is_array(values: Any, kinds: str) -> bool:
    return isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in kinds


def _told(values: Any) -> str:
    if isinstance(values, np.ndarray):
        return f"of dtype {values.dtype} and shape {list(values.shape)}"
    return f"of type {type(values).__name__}"
