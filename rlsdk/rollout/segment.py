"""The tokens of one rollout while it grows; tokens are only appended, each with its origin."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

Part = tuple[np.ndarray, bool, np.ndarray | None, np.ndarray | None]
"""Token ids, True if they were sampled, their logprobs, and the versions of the weights that sampled them."""


@attrs.define(eq=False)
class Segment:
    """Tokens of a rollout, from its prompt on.

    Attributes:
        parts: Pieces in the order in which they were sent or sampled, starting with the prompt.
        rewards: (token position, value) pairs.
        length: Number of tokens.
        sampled: Number of sampled tokens.
        last: Position of the last sampled token; -1 if none was sampled.
        routing: Experts chosen for the first tokens, as in `Rollout.routed_experts`; None if the engine reports none.
    """

    parts: list[Part]
    rewards: list[tuple[int, float]] = attrs.field(factory=list)
    length: int = 0
    sampled: int = 0
    last: int = -1
    routing: np.ndarray | None = None

    @classmethod
    def of(cls, prompt: np.ndarray) -> Segment:
        """Start with a prompt."""
        return cls([(prompt, False, None, None)], length=len(prompt))

    def copy(self) -> Segment:
        """Return an independent copy."""
        return attrs.evolve(self, parts=[*self.parts], rewards=[*self.rewards])

    def append(
        self, ids: np.ndarray, sampled: bool, logprobs: np.ndarray | None = None, versions: np.ndarray | None = None
    ) -> None:
        """Append tokens, if there are any."""
        if not len(ids):
            return
        self.parts.append((ids, sampled, logprobs, versions))
        self.length += len(ids)
        if sampled:
            self.last, self.sampled = self.length - 1, self.sampled + len(ids)

    def route(self, routing: np.ndarray | None) -> None:
        """Record the experts of all tokens so far, as reported with an answer."""
        if routing is not None:
            # Keep what earlier answers reported, since their tokens were sampled with those experts.
            known = routing[:0] if self.routing is None else self.routing
            self.routing = np.concatenate([known, routing[len(known) :]])

    def arrays(self, image_token: int | None = None) -> dict[str, Any]:
        """Return the per-token fields of a `Rollout`, read-only.

        Args:
            image_token: Id of the token that represents part of an image, unless it was sampled; None: no images.
        """
        ids = np.concatenate([part[0] for part in self.parts])
        mask, logprobs = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.float32)
        versions = np.full(len(ids), -1, np.int64)
        end = 0
        for part, sampled, own, of in self.parts:
            start, end = end, end + len(part)
            mask[start:end] = sampled
            if own is not None and of is not None:
                logprobs[start:end], versions[start:end] = own, of
        found = {"token_ids": ids, "loss_mask": mask, "logprobs": logprobs, "policy_versions": versions}
        if self.routing is not None:
            unknown = np.full((len(ids) - len(self.routing), *self.routing.shape[1:]), -1, np.int16)
            found["routed_experts"] = np.concatenate([self.routing, unknown])
        if image_token is not None:
            found["image_positions"] = np.flatnonzero((ids == image_token) & ~mask)
        for array in found.values():
            array.setflags(write=False)
        return found


@attrs.frozen(eq=False)
class Sending:
    """Tokens to send before the next answer.

    Attributes:
        tokens: int64 `[k]`.
        new_rollout: True if they are a whole prompt that starts another rollout.
    """

    tokens: np.ndarray
    new_rollout: bool = False

    def length(self, segment: Segment) -> int:
        """Return the number of tokens before the answer."""
        return len(self.tokens) + (0 if self.new_rollout else segment.length)

    def whole(self, segment: Segment, prefill: np.ndarray) -> np.ndarray:
        """Return all tokens before the answer, with a prefill at the end."""
        pieces = [] if self.new_rollout else [part[0] for part in segment.parts]
        pieces += [piece for piece in (self.tokens, prefill) if len(piece)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def image_positions(self, segment: Segment, image_token: int) -> np.ndarray:
        """Return the positions of image tokens before the answer: tokens of this id that were not sampled."""
        parts = [] if self.new_rollout else segment.parts
        stands = [(ids == image_token) & (not sampled) for ids, sampled, *_ in parts]
        return np.flatnonzero(np.concatenate([*stands, self.tokens == image_token]))
