"""Messages from an engine actor to its clients: completions, and new tokens of streamed requests."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from rlsdk.contracts import Completion, Finish, Sampled, TopTokens


@attrs.frozen(eq=False)
class Progress:
    """A message of `generate`: tokens that streamed requests have sampled since the previous message."""

    sampled: list[Sampled]


class Bundle(list[Completion]):
    """Completions, pickled as a few long arrays, since pickling thousands of short ones is slower than sampling."""

    def __reduce__(self) -> tuple[Any, ...]:
        if not self:
            return (Bundle, ())
        names = [(c.request, c.index, c.finish) for c in self]
        lengths = np.array([len(c.token_ids) for c in self])
        columns = [np.concatenate([getattr(c, f) for c in self]) for f in ("token_ids", "logprobs", "versions")]
        top = [c.top for c in self] if any(c.top is not None for c in self) else None
        routing = [c.routed_experts for c in self] if any(c.routed_experts is not None for c in self) else None
        return (_unbundle, (names, lengths, *columns, top, routing))


def _unbundle(
    names: list[tuple[str, int, Finish]],
    lengths: np.ndarray,
    token_ids: np.ndarray,
    logprobs: np.ndarray,
    versions: np.ndarray,
    top: list[TopTokens | None] | None,
    routing: list[np.ndarray | None] | None,
) -> Bundle:
    """Return the completions, whose arrays are views."""
    ends, blank = np.cumsum(lengths), [None] * len(names)
    return Bundle(
        Completion(
            request=request,
            index=index,
            token_ids=token_ids[end - count : end],
            logprobs=logprobs[end - count : end],
            versions=versions[end - count : end],
            finish=finish,
            top=likeliest,
            routed_experts=experts,
        )
        for (request, index, finish), end, count, likeliest, experts in zip(
            names, ends.tolist(), lengths.tolist(), top or blank, routing or blank, strict=True
        )
    )
