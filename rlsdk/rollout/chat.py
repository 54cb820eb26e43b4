"""What a workflow talks to: builds one rollout token by token; later turns only ever append."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from rlsdk.contracts import Sampling
from rlsdk.errors import EngineError, ValueFault
from rlsdk.rollout.client import EngineClient
from rlsdk.rollout.codec import Codec
from rlsdk.types import Message, Rollout, Status, Task


@attrs.frozen(eq=False)
class Prompt:
    """A task's prompt, tokenised once for its whole group."""

    task: Task
    messages: tuple[Message, ...]
    token_ids: np.ndarray


@attrs.frozen(kw_only=True, eq=False)
class Setting:
    """What all rollouts of one batch share.

    Attributes:
        codec: Text to tokens and back.
        client: The engines; None where nothing is sampled.
        sampling: How tokens are sampled, stop strings already split.
        max_length: Tokens of prompt and response together.
    """

    codec: Codec
    client: EngineClient | None
    sampling: Sampling
    max_length: int


class TokenChat:
    """One conversation with the policy."""

    def __init__(self, prompt: Prompt, setting: Setting, group: str, seed: int | None) -> None:
        self._prompt = prompt
        self._setting = setting
        self._group = group
        self._seed = seed
        self._messages = list(prompt.messages)
        self._parts: list[tuple[np.ndarray, bool, np.ndarray | None, np.ndarray | None]] = [
            (prompt.token_ids, False, None, None)
        ]
        self._length = len(prompt.token_ids)
        self._status: Status = "finished"
        self._turn = 0

    async def sample(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Message:
        """Let the policy write the next assistant message.

        Args:
            max_tokens: Of this message; left out, the run's setting.
            stop: Strings that end it, in place of the run's.

        Raises:
            EngineError: There is no engine, or it failed.
            ValueFault: The conversation fills the model's length; nothing can be sampled.
        """
        client = self._setting.client
        if client is None:
            raise EngineError("this run has no engine; its algorithm trains on demonstrations")
        room = self._setting.max_length - self._length
        if room < 1:
            raise ValueFault(f"task {self._prompt.task.id!r}: {self._length} tokens leave no room in model.max_length")
        sampling = self._sampling(min(room, max_tokens or self._setting.sampling.max_tokens), stop)
        seed = None if self._seed is None else self._seed + self._turn
        answer = await client.sample(self._group, self._token_ids(), sampling, seed=seed)
        self._turn += 1
        done = answer.completion
        self._append(done.token_ids, True, done.logprobs, done.versions)
        self._status = {"stop": "finished", "length": "truncated", "abort": "aborted"}[done.finish]  # type: ignore[assignment]
        return self._answer(answer.text)

    def write(self, text: str) -> None:
        """Append an expert's assistant message and the end of text; it is trained on as if sampled."""
        ids = self._setting.codec.encode(text)
        end = self._setting.codec.end
        self._append(ids if end is None else np.append(ids, end), True, None, None)
        self._answer(text)

    def finish(self, **changes: Any) -> Rollout:
        """The rollout as it stands; `changes` replace fields such as `status`, `metrics` or `rewards`."""
        ids, masks, logprobs, versions = zip(*self._parts, strict=True)
        sizes = [len(i) for i in ids]
        fields = {
            "task": self._prompt.task,
            "messages": tuple(self._messages),
            "token_ids": _frozen(np.concatenate(ids)),
            "loss_mask": _frozen(np.repeat(np.array(masks), sizes)),
            "logprobs": _joined(logprobs, sizes, 0, np.float32),
            "policy_versions": _joined(versions, sizes, -1, np.int64),
            "status": self._status,
        }
        return Rollout(**{**fields, **changes})

    def _sampling(self, max_tokens: int, stop: Sequence[str]) -> Sampling:
        base = self._setting.sampling
        if max_tokens == base.max_tokens and not stop:
            return base
        strings, ids = self._setting.codec.split_stops(stop) if stop else (base.stop, base.stop_token_ids)
        return attrs.evolve(base, max_tokens=max_tokens, stop=strings, stop_token_ids=ids)

    def _token_ids(self) -> np.ndarray:
        return self._parts[0][0] if len(self._parts) == 1 else np.concatenate([p[0] for p in self._parts])

    def _append(self, ids: np.ndarray, sampled: bool, logprobs: np.ndarray | None, versions: np.ndarray | None) -> None:
        self._parts.append((ids, sampled, logprobs, versions))
        self._length += len(ids)

    def _answer(self, text: str) -> Message:
        last = self._messages[-1] if self._messages else None
        if (
            last is not None and last.role == "assistant" and self._turn <= 1
        ):  # a prefill and what continues it are one message
            self._messages[-1] = Message("assistant", last.content + text)
        else:
            self._messages.append(Message("assistant", text))
        return self._messages[-1]


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def _joined(parts: Sequence[np.ndarray | None], sizes: Sequence[int], blank: int, dtype: Any) -> np.ndarray:
    whole = [np.full(size, blank, dtype) if part is None else part for part, size in zip(parts, sizes, strict=True)]
    return _frozen(np.concatenate(whole).astype(dtype, copy=False))
