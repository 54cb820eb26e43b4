"""State of one `generate` call of an engine actor, and its messages to the client: completions and new tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import numpy as np

from rlsdk.contracts import Completion, Finish, Request, Sampled, TopTokens
from rlsdk.engines.checks import completion_fault


@attrs.define(eq=False)
class CompletionStream:
    """State of one `generate` call.

    Attributes:
        requests: Its requests, by id.
        open: Continuations that are not finished, by id of the request and index.
        streamed: Numbers of tokens already reported for unfinished continuations.
        ready: Finished completions that are not sent yet.
        some: Set if there may be something to send.
        done: Set once everything is finished.
    """

    requests: dict[str, Request]
    open: set[tuple[str, int]] = attrs.field(init=False)
    streamed: dict[tuple[str, int], int] = attrs.field(factory=dict)
    ready: list[Completion] = attrs.field(factory=list)
    some: asyncio.Event = attrs.field(factory=asyncio.Event)
    done: asyncio.Event = attrs.field(factory=asyncio.Event)

    def __attrs_post_init__(self) -> None:
        self.open = {(request.id, index) for request in self.requests.values() for index in range(request.n)}

    @property
    def left(self) -> int:
        """Number of continuations that are not finished."""
        return len(self.open)

    def fault(self, completion: Completion, version: int, vocabulary: int) -> str:
        """Return what is wrong with a completion of one of the requests; empty if nothing is."""
        request = self.requests[completion.request]
        if (request.id, completion.index) in self.open:
            return completion_fault(completion, request, version, vocabulary)
        if isinstance(completion.index, int) and 0 <= completion.index < request.n:
            return f"index {completion.index}, which it had returned before; expected each continuation once"
        return f"index {completion.index!r}; expected 0 to {request.n - 1}, since n is {request.n}"

    def put(self, completion: Completion) -> None:
        """Add a finished completion."""
        self.ready.append(completion)
        key = (completion.request, completion.index)
        self.open.discard(key)
        self.streamed.pop(key, None)
        self.some.set()
        if not self.left:
            self.done.set()

    def release(self) -> None:
        """Wake the waiting call, whether or not results have arrived."""
        self.some.set()
        self.done.set()


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
