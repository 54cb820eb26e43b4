"""The messages of a conversation, as stored in its rollout and as passed to its renderer, and its growing tokens."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rlsdk.contracts import Call, Malformed, ToolParser
from rlsdk.messages import joined
from rlsdk.rollout.codec import CUT, ChatTokenizer
from rlsdk.tool_calls import call_id as id_of
from rlsdk.types import Content, Message, Role, ToolCall


@attrs.frozen(eq=False)
class _Answer:
    """The last answer.

    Attributes:
        token_ids: Sampled tokens.
        prefill: Text at its beginning that was not sampled.
        continued: True if the prefill is a message of the prompt.
    """

    token_ids: np.ndarray
    prefill: str
    continued: bool


@attrs.define(eq=False)
class Transcript:
    """Messages of a conversation.

    In a rollout, an answer of the policy is its whole text. The renderer gets it split into thought, content and calls,
    all as data: names of control tokens in it stay ordinary characters.

    Attributes:
        codec: Tokenizer with its renderer.
        messages: Messages of the rollout.
        shown: The same messages for the renderer.
        new: Number of messages after the last answer.
        begun: True if the last message is a prefill that the next answer continues.
    """

    codec: ChatTokenizer
    messages: list[Message]
    shown: list[Message]
    new: int = 0
    begun: bool = False
    _answer: _Answer | None = None

    @classmethod
    def of(cls, codec: ChatTokenizer, prompt: Sequence[Message]) -> Transcript:
        """Start with a prompt; answers in it are marked as part of the prompt, unless they are marked already."""
        given = [attrs.evolve(m, prompt=True) if m.role == "assistant" and m.prompt is None else m for m in prompt]
        return cls(codec, given, [*given], begun=bool(given) and given[-1].role == "assistant")

    def copy(self) -> Transcript:
        """Return an independent copy."""
        return attrs.evolve(self, messages=[*self.messages], shown=[*self.shown])

    @property
    def before(self) -> list[Message]:
        """Messages up to the last answer."""
        return self.messages[: len(self.messages) - self.new]

    @property
    def new_characters(self) -> int:
        """Number of characters after the last answer."""
        texts = [message.text for message in self.shown[len(self.shown) - self.new :]]
        return sum(len(text) - text.count(CUT) for text in texts)

    @property
    def _answers(self) -> int:
        return sum(message.role == "assistant" for message in self.messages)

    def say(self, content: Content, role: Role, *, joined_to_last: bool = True) -> None:
        """Append a message; with `joined_to_last`, it is joined to a last message of the same role."""
        content = self.codec.content_as_data(content)
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != role or not joined_to_last:
            self._append(Message(role, content))
            return
        whole = joined(last.content, self.codec.separator, content)
        self.messages[-1] = self.shown[-1] = Message(role, whole)
        self.new, self.begun = max(self.new, 1), False

    def tool_result(self, text: str, name: str, call_id: str) -> None:
        """Append the result of a call; without an id, it belongs to the last answer's next call."""
        codec = self.codec
        results = sum(message.role == "tool" for message in self.messages[len(self.messages) - self.new :])
        call_id = call_id or id_of(self._answers, results)
        self._append(Message("tool", codec.as_data(text), codec.as_data(name), tool_call_id=call_id))

    def _append(self, message: Message) -> None:
        self.messages.append(message)
        self.shown.append(message)
        self.new, self.begun = self.new + 1, False

    def answer(self, text: str, token_ids: np.ndarray, prefill: str = "") -> Message:
        """Append an answer; a prefill message that it continues becomes part of it."""
        codec = self.codec
        if self.begun:
            self.shown.pop()
            prefill = self.messages.pop().text + prefill
        self._answer = _Answer(token_ids, prefill, continued=self.begun)
        parsed = codec.renderer.parse(token_ids, prefill=prefill, continued=self.begun)
        message = Message("assistant", prefill + text, reasoning=parsed.reasoning, prompt=False)
        shown = message if parsed.content == message.content else attrs.evolve(message, content=parsed.content)
        self.messages.append(message)
        self.shown.append(codec.message_as_data(shown))
        self.new, self.begun = 0, False
        return message

    def calls(self, parser: ToolParser | None, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[Call | Malformed, ...]:
        """Parse the calls in the last answer, and add the valid ones to its message."""
        answer, codec = self._answer, self.codec
        if answer is None:
            return ()
        parsed = codec.renderer.parse(
            answer.token_ids, prefill=answer.prefill, continued=answer.continued, parser=parser or codec.tool_parser
        )
        functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping)]
        schemas = {function.get("name"): function.get("parameters") for function in functions}
        number = self._answers
        made = [
            ToolCall(call.name, call.as_wanted(schemas.get(call.name) or {}).arguments, id_of(number, i))
            for i, call in enumerate(parsed.calls)
            if isinstance(call, Call)
        ]
        at = len(self.messages) - self.new - 1
        self.messages[at] = attrs.evolve(self.messages[at], tool_calls=made)
        if made:
            shown = attrs.evolve(self.shown[at], content=parsed.content, tool_calls=made)
            self.shown[at] = codec.message_as_data(shown)
        return parsed.calls


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

    def arrays(self, image_token: int | None) -> dict[str, Any]:
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
        too_long: True if they were left out, since the messages cannot fit into the model's length.
    """

    tokens: np.ndarray
    new_rollout: bool = False
    too_long: bool = False

    def length(self, segment: Segment) -> int:
        """Return the number of tokens before the answer."""
        if self.too_long:
            return sys.maxsize
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
