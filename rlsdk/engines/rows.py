"""The running continuations of the transformers engine as arrays, one row each, without Python work per token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import numpy as np

from rlsdk.contracts import Completion, Finish, Request, Sampled, Sampling
from rlsdk.engines.continuation import StopStrings, stack_top

_COLUMNS = 64
"""Number of columns by which token arrays grow."""


@attrs.define(eq=False)
class Pending:
    """A continuation waiting for a row of the batch.

    Attributes:
        request: Its request.
        index: Index among the request's continuations.
        seed: Seed of its random numbers.
        limit: Maximum number of tokens, prompt included.
        ends: Row of the end-token table.
        stops: Stop-string watcher, if there are stop strings.
    """

    request: Request
    index: int
    seed: int
    limit: int
    ends: int
    stops: StopStrings | None


class EndTable:
    """Sets of end tokens, as rows of one table.

    Attributes:
        vocabulary: Vocabulary size.
        table: bool `[sets, vocabulary]`.
    """

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.table = np.zeros((0, vocabulary), dtype=bool)
        self._rows: dict[frozenset[int], int] = {}

    def row(self, ends: Iterable[int]) -> int:
        """Return the row of a set of tokens, added if it is new."""
        key = frozenset(ends)
        if key not in self._rows:
            new = np.zeros((1, self.vocabulary), dtype=bool)
            new[0, [e for e in key if 0 <= e < self.vocabulary]] = True
            self.table = np.concatenate([self.table, new])
            self._rows[key] = len(self._rows)
        return self._rows[key]


class RunningRows:
    """Running continuations; row `r` holds one while `alive[r]`. Dead rows below `used` are computed but ignored.

    Attributes:
        capacity: Number of rows.
        used: Rows `0 .. used - 1` have been assigned.
        alive: bool `[capacity]`.
        length: int64 `[capacity]`, tokens in the KV cache; the token at this position is the next input.
        start: int64 `[capacity]`, prompt length.
        offset: int64 `[capacity]`, position minus column, since images have more tokens than positions.
        limit: int64 `[capacity]`, maximum number of tokens, prompt included.
        tokens: int64 `[capacity, columns]`, prompt and response.
        logprobs: float32 `[capacity, columns]`, logprobs of the sampled tokens.
        versions: int64 `[capacity, columns]`, versions of the weights that sampled them.
        top: Most likely tokens at each sampled position, as (ids, logprobs), for rows whose requests ask for them.
        routing: int16 `[capacity, columns, layers, k]`, experts that the tokens chose when they were first read; zero
            layers if they are not recorded.
    """

    def __init__(self, capacity: int, layers: int = 0, chosen: int = 0) -> None:
        """Create rows without continuations.

        Args:
            capacity: Number of rows.
            layers: Number of layers whose experts are recorded; 0 for none.
            chosen: Number of experts per token.
        """
        self.capacity, self.used = capacity, 0
        self.routing = np.zeros((capacity, 0, layers, chosen), dtype=np.int16)
        self.held: list[Pending | None] = [None] * capacity
        self.watched: set[int] = set()
        self.top: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        self.alive = np.zeros(capacity, dtype=bool)
        self.length, self.start, self.limit, self.ends, self.top_k = np.zeros((5, capacity), dtype=np.int64)
        self.offset = np.zeros(capacity, dtype=np.int64)
        self.seed = np.zeros(capacity, dtype=np.uint64)
        self.temperature, self.top_p = np.ones((2, capacity), dtype=np.float32)
        self.tokens = np.zeros((capacity, 0), dtype=np.int64)
        self.logprobs = np.zeros((capacity, 0), dtype=np.float32)
        self.versions = np.zeros((capacity, 0), dtype=np.int64)

    @property
    def running(self) -> np.ndarray:
        """Rows that are alive, int64."""
        return np.flatnonzero(self.alive[: self.used])

    def requests(self, rows: np.ndarray) -> list[Request]:
        """Return the requests of rows that are alive."""
        return [pending.request for row in rows.tolist() if (pending := self.held[row]) is not None]

    def free(self) -> np.ndarray:
        """Rows that can be assigned, used ones first, int64."""
        return np.flatnonzero(~self.alive)

    def place(self, row: int, pending: Pending) -> None:
        """Assign a row to a continuation; its `length` becomes the prompt's."""
        request, sampling = pending.request, pending.request.sampling
        count = len(request.prompt_ids)
        self._grow(count + 1)
        self.held[row] = pending
        self.alive[row] = True
        self.used = max(self.used, row + 1)
        self.length[row] = self.start[row] = count
        self.offset[row] = 0
        self.limit[row], self.ends[row], self.seed[row] = pending.limit, pending.ends, pending.seed
        self.temperature[row] = sampling.temperature
        # Truncation does not change which token is most likely, and its logprob is the one at temperature 1.
        self.top_p[row] = sampling.top_p if sampling.temperature else 1.0
        self.top_k[row] = sampling.top_k if sampling.temperature else 0
        self.tokens[row, :count] = request.prompt_ids
        if pending.stops is not None:
            self.watched.add(row)
        if sampling.top_logprobs:
            self.top[row] = []

    def write(self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Append one sampled token to each of these rows, all alive."""
        at = self.length[rows]
        self._grow(int(at.max()) + 1)
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = logprobs
        self.versions[rows, at] = version

    def stopped_by_text(self, rows: np.ndarray) -> np.ndarray:
        """Return bool per row: whether the token just written completes one of its stop strings."""
        if not self.watched:
            return np.zeros(len(rows), dtype=bool)
        stopped = np.zeros(len(rows), dtype=bool)
        for i, row in enumerate(rows.tolist()):
            if row in self.watched:
                pending = self.held[row]
                assert pending is not None and pending.stops is not None
                stopped[i] = pending.stops.feed(int(self.tokens[row, self.length[row]]))
        return stopped

    def take(self, row: int, end: int, finish: Finish) -> Completion:
        """End a row and return its completion up to position `end`."""
        pending = self.held[row]
        assert pending is not None
        start = int(self.start[row])
        self.alive[row], self.held[row] = False, None
        self.watched.discard(row)
        completion = Completion(
            request=pending.request.id,
            index=pending.index,
            finish=finish,
            # The last token has no routing, since it was not read.
            routed_experts=self.routing[row, : end - 1].copy() if self.routing.shape[2] else None,
            **self._arrays(row, start, end),
        )
        self.top.pop(row, None)
        return completion

    def sampled(self, since: Mapping[tuple[str, int], int]) -> list[Sampled]:
        """Return new tokens of rows that are alive; see `contracts.ShowsProgress`."""
        sampled = []
        for row in self.running.tolist():
            pending = self.held[row]
            assert pending is not None
            known = since.get((pending.request.id, pending.index))
            begin, end = int(self.start[row]) + (known or 0), int(self.length[row]) + 1
            if known is not None and begin < end:
                arrays = self._arrays(row, begin, end)
                sampled.append(Sampled(request=pending.request.id, index=pending.index, start=known, **arrays))
        return sampled

    def _arrays(self, row: int, begin: int, end: int) -> dict[str, Any]:
        """Return copies of a row's tokens and other sampled values between two positions."""
        names: dict[str, np.ndarray] = {"token_ids": self.tokens, "logprobs": self.logprobs, "versions": self.versions}
        arrays: dict[str, Any] = {name: array[row, begin:end].copy() for name, array in names.items()}
        if row in self.top:
            start = int(self.start[row])
            arrays["top"] = stack_top(self.top[row][begin - start : end - start])
        return arrays

    def compact(self) -> np.ndarray:
        """Move the rows that are alive to the front; return their old indices, int64 ascending."""
        kept = self.running
        count = len(kept)
        per_row = (self.offset, self.length, self.start, self.limit, self.ends, self.seed)
        sampling = (self.temperature, self.top_p, self.top_k)
        per_token = (self.tokens, self.logprobs, self.versions, self.routing)
        for array in (*per_row, *sampling, *per_token):
            array[:count] = array[kept]
        self.held[: self.used] = [self.held[r] for r in kept] + [None] * (self.used - count)
        self.watched = {r for r in range(count) if (pending := self.held[r]) is not None and pending.stops is not None}
        self.top = {new: self.top[old] for new, old in enumerate(kept.tolist()) if old in self.top}
        self.alive[:] = np.arange(self.capacity) < count
        self.used = count
        return kept

    def _grow(self, columns: int) -> None:
        have = self.tokens.shape[1]
        if columns > have:
            more = -(-max(columns, have + have // 2) // _COLUMNS) * _COLUMNS - have
            for name in ("tokens", "logprobs", "versions"):
                setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, more))))
            self.routing = np.pad(self.routing, ((0, 0), (0, more), (0, 0), (0, 0)))


def room(sampling: Sampling, prompt: int, max_length: int) -> int:
    """Return the maximum number of tokens of a continuation, its prompt of `prompt` tokens included."""
    return min(prompt + sampling.max_tokens, max_length)
