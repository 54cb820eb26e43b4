"""Checks of what an engine returns, before its arrays are joined with those of other completions."""

from __future__ import annotations

import reprlib
from typing import Any, get_args

import numpy as np

from rlsdk.contracts import Completion, Finish, Request

_FINISHES = get_args(Finish)


def completion_fault(completion: Completion, request: Request, version: int) -> str:
    """Return what is wrong with a completion, with what was expected; empty if nothing is.

    Args:
        completion: Completion that an engine returned.
        request: Its request.
        version: Version of the weights that the engine has; no token can come from a later one.
    """
    if completion.finish not in _FINISHES:
        return f"finish {reprlib.repr(completion.finish)}; expected one of {', '.join(_FINISHES)}"
    tokens = completion.token_ids
    if not _is_array(tokens) or not np.issubdtype(tokens.dtype, np.integer):
        return f"token_ids {_told(tokens)}; expected an array of integers with one axis"
    for name in ("logprobs", "versions"):
        values, kind = getattr(completion, name), np.floating if name == "logprobs" else np.integer
        if not _is_array(values) or len(values) != len(tokens) or not np.issubdtype(values.dtype, kind):
            numbers = "floats" if name == "logprobs" else "integers"
            return f"{name} {_told(values)} for {len(tokens)} tokens; expected an array of {len(tokens)} {numbers}"
    return _value_fault(completion, request, version) if len(tokens) else ""


def _value_fault(completion: Completion, request: Request, version: int) -> str:
    tokens = completion.token_ids
    if len(tokens) > request.sampling.max_tokens:
        return f"{len(tokens)} tokens; its request allows {request.sampling.max_tokens}"
    if (least := int(tokens.min())) < 0:
        return f"token id {least}; expected ids of the vocabulary, from 0"
    if not np.isfinite(completion.logprobs).all():
        at = int(np.flatnonzero(~np.isfinite(completion.logprobs))[0])
        return (
            f"logprob {completion.logprobs[at]} for token {at}; expected a finite logprob of each sampled token, under "
            "the distribution that it was sampled from"
        )
    if int(completion.versions.min()) < 0 or int(completion.versions.max()) > version:
        wrong = next(int(v) for v in completion.versions if not 0 <= v <= version)
        return f"version {wrong} for a token; expected the version of the weights that sampled it, 0 to {version}"
    return ""


def _is_array(values: Any) -> bool:
    return isinstance(values, np.ndarray) and values.ndim == 1


def _told(values: Any) -> str:
    if isinstance(values, np.ndarray):
        return f"of dtype {values.dtype} and shape {list(values.shape)}"
    return f"of type {type(values).__name__}"
