"""What a workflow talks to: builds one rollout token by token; later turns only ever append."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, get_args

import attrs
import numpy as np

from rlsdk.components import Use
from rlsdk.contracts import Finish, Sampling, Speaker, World
from rlsdk.errors import ConfigError, EngineError, OutOfRoomError, ValueFault
from rlsdk.rollout.client import Sampler
from rlsdk.rollout.codec import NOTHING, Codec
from rlsdk.rollout.seeds import derive
from rlsdk.rollout.worlds.local import LocalWorlds, Worlds
from rlsdk.types import Message, Rollout, Score, Status, Task

if TYPE_CHECKING:
    from rlsdk.rollout.recording import Recorder

STATUS: Mapping[Finish, Status] = {"stop": "finished", "length": "truncated", "abort": "aborted"}
"""How a rollout has ended whose last answer ended so."""


@attrs.frozen(eq=False)
class Prompt:
    """A task's prompt, tokenised once for its whole group; `plain`: the conversation is text, without a template."""

    task: Task
    messages: tuple[Message, ...]
    token_ids: np.ndarray
    plain: bool = attrs.field()

    @plain.default
    def _is_text(self) -> bool:
        return isinstance(self.task.prompt, str)


@attrs.frozen(kw_only=True, eq=False)
class Setting:
    """What all rollouts of one batch share.

    Attributes:
        codec: Text to tokens and back.
        client: The engines; None where nothing is sampled.
        sampling: How tokens are sampled, stop strings already split.
        max_length: Tokens of prompt and response together.
        worlds: Where environments run.
    """

    codec: Codec
    client: Sampler | None
    sampling: Sampling
    max_length: int
    worlds: Worlds = attrs.field(factory=LocalWorlds)


class TokenChat:
    """One conversation with the policy.

    Its tokens are those that were sent and those that were sampled, in their order. What is said is sent with the next
    `sample`; what is said last, and answered by nobody, is a message without tokens. What is said is data: names of
    special tokens in it are tokenised as the characters that they are written with. A call of `sample` that is
    cancelled leaves the conversation as it was.
    """

    def __init__(
        self,
        prompt: Prompt,
        setting: Setting,
        group: str,
        seed: int | None,
        *,
        member: int = 0,
        scorer: Callable[[Rollout], Awaitable[Score]] | None = None,
    ) -> None:
        """Begin one.

        Args:
            prompt: Of the task.
            setting: Codec, engines, sampling.
            group: Shared by the rollouts of one task; equal prompts in it are sampled as one request.
            seed: Of the group's requests; None leaves sampling to the engines' own generators.
            member: Which of the group it is.
            scorer: The run's reward, for `score`.
        """
        self._prompt, self._setting, self._group = prompt, setting, group
        self._seed, self._member, self._scorer = seed, member, scorer
        self._plain = prompt.plain
        self._messages = list(prompt.messages)
        self._parts: list[tuple[np.ndarray, bool, np.ndarray | None, np.ndarray | None]] = [
            (prompt.token_ids, False, None, None)
        ]
        self._length = len(prompt.token_ids)
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._status: Status = "finished"
        self._rewards: list[tuple[int, float]] = []
        self._turn = self._said = self._sampled = 0
        self._last = -1
        self._begun = bool(prompt.messages) and prompt.messages[-1].role == "assistant"
        self._ended = NOTHING
        self._engine: int | None = None
        self._pending: np.ndarray | None = NOTHING
        self._worlds: list[World] = []
        self._branches = 0
        self._recorder: Recorder | None = None

    @property
    def status(self) -> Status:
        """How the last answer ended: finished, truncated or aborted."""
        return self._status

    @property
    def turns(self) -> int:
        """Answers so far."""
        return self._turn

    def room(self) -> int:
        """Tokens that the next answer may have, all that was said until now counted; 0: none can be sampled."""
        unsent = len(self._unsent())  # before the length, which it may change
        return max(0, self._setting.max_length - self._length - unsent)

    def say(self, text: str, role: Speaker = "user") -> None:
        """Append what the policy did not write.

        What one role says twice in a row is one message, its parts joined by the separator: the first observation of an
        environment joins the prompt.

        Args:
            text: What is said.
            role: Who says it.

        Raises:
            ValueFault: The role is another; an assistant's words come from `sample`, with a prefill, or `write`.
        """
        if role not in get_args(Speaker):
            raise ValueFault(f"say: role is one of {', '.join(get_args(Speaker))}; got {role!r}")
        codec = self._setting.codec
        text = codec.as_data(text)
        last = self._messages[-1] if self._messages else None
        if last is not None and last.role == role:
            joined = codec.separator.join(part for part in (last.content, text) if part)
            self._messages[-1] = Message(role, joined)
            self._said = max(self._said, 1)
        else:
            self._messages.append(Message(role, text))
            self._said += 1
        self._begun, self._pending = False, None

    def tool_result(self, text: str, name: str = "") -> None:
        """Append what a tool answered.

        Args:
            text: The answer, or the error.
            name: Of the tool.
        """
        codec = self._setting.codec
        self._messages.append(Message("tool", codec.as_data(text), codec.as_data(name)))
        self._said += 1
        self._begun, self._pending = False, None

    def offer(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Have the chat template show tools to the policy.

        Args:
            tools: JSON schemas, `{"type": "function", "function": {"name": …, "description": …, "parameters": …}}`.

        Returns:
            Whether it shows them; where not (no template, or none with a place for tools), say what they are.

        Raises:
            ValueFault: The policy has written already.
        """
        if self._turn:
            raise ValueFault(f"task {self._prompt.task.id!r}: tools are offered before the first answer, not behind it")
        if self._plain or not self._setting.codec.template.offers(tools):
            return False
        self._tools, self._pending = tuple(tools), None
        return True

    async def sample(self, *, max_tokens: int | None = None, stop: Sequence[str] = (), prefill: str = "") -> Message:
        """Let the policy write the next assistant message.

        Args:
            max_tokens: Of this message; left out, the run's setting.
            stop: Strings that end it, in place of the run's.
            prefill: What it begins with; it is not trained on.

        Raises:
            EngineError: There is no engine, or it failed.
            OutOfRoomError: The conversation fills the model's length.
            ValueFault: The prompt alone fills it.
        """
        client, codec = self._setting.client, self._setting.codec
        if client is None:
            raise EngineError("this run has no engine; its algorithm trains on demonstrations")
        begin = codec.encode(prefill)
        room = self.room() - len(begin)
        if room < 1:
            raise self._full()
        sending = np.concatenate([self._unsent(), begin])
        sampling = self._sampling(min(room, max_tokens or self._setting.sampling.max_tokens), stop)
        ids = self._token_ids(sending)
        answer = await client.sample(self._group, ids, sampling, seed=self._request_seed(), affinity=self._engine)
        done = answer.completion
        self._append(sending, False, None, None)
        self._append(done.token_ids, True, done.logprobs, done.versions)
        self._status, self._engine = STATUS[done.finish], answer.engine
        return self._answer(prefill + answer.text, done.token_ids, ended=done.finish == "stop")

    def write(self, text: str) -> None:
        """Append an expert's assistant message and the end of text; it is trained on as if sampled."""
        codec = self._setting.codec
        ids = codec.encode(text)
        ids = ids if codec.end is None else np.append(ids, codec.end)
        self._append(self._unsent(), False, None, None)
        self._append(ids, True, None, None)
        self._answer(text, ids, ended=codec.end is not None)

    def reward(self, value: float) -> None:
        """Reward the last answer, at its last sampled token; several rewards of one token add up.

        Raises:
            ValueFault: There is no answer yet.
        """
        if self._last < 0:
            raise ValueFault(f"task {self._prompt.task.id!r}: a reward of {value} before anything was sampled")
        self._rewards.append((self._last, float(value)))

    async def score(self) -> Score:
        """What the run's reward says of the rollout as it stands.

        Raises:
            ConfigError: The run has no reward.
            DataError: The task cannot be scored.
        """
        if self._scorer is None:
            raise ConfigError(["reward: none given, but the workflow asks what an answer is worth; name one"])
        return await self._scorer(self.finish())

    def world(self, environment: Use, seed: int, *, step_timeout: float = 30.0) -> World:
        """An environment to play in.

        Args:
            environment: Which one, with its options.
            seed: Of its episode.
            step_timeout: Seconds that one call of it may take.
        """
        self._worlds.append(self._setting.worlds.open(environment, seed, step_timeout))
        return self._worlds[-1]

    def close(self) -> None:
        """Leave what the workflow did not leave."""
        while self._worlds:
            self._worlds.pop().leave()

    def serve(self, **how: Any) -> AbstractAsyncContextManager[Recorder]:
        """Serve the policy to an agent, as an OpenAI-compatible endpoint of this rollout; see `Chat.serve`."""
        from rlsdk.rollout.recording import Recorder

        about = (self._prompt.task, self._setting, self._group, self._seed, self._member)
        self._recorder = Recorder(*about, **how)
        return self._recorder.serving()

    def failed(self) -> Rollout:
        """The rollout as it stands when its workflow failed; of an agent, the conversation that was last answered."""
        if self._recorder is not None and self._recorder.answers:
            return self._recorder.finish(status="failed")[-1]
        return self.finish(status="failed")

    def branch(self) -> TokenChat:
        """A conversation that goes on from here by itself, with a seed of its own; this one stays as it is."""
        other = copy.copy(self)
        if self._seed is not None:
            other._seed = derive(self._seed, self._member, "branch", self._branches)
        self._branches += 1
        other._messages, other._parts, other._rewards = [*self._messages], [*self._parts], [*self._rewards]
        other._worlds, other._branches = [], 0
        return other

    def finish(self, **changes: Any) -> Rollout:
        """The rollout as it stands.

        Args:
            **changes: Replace fields such as `status` or `rewards`; `metrics` come beside `turns` and `tokens`.
        """
        ids = np.concatenate([part[0] for part in self._parts])
        mask, logprobs = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.float32)
        versions = np.full(len(ids), -1, np.int64)
        end = 0
        for part, sampled, own, of in self._parts:
            start, end = end, end + len(part)
            mask[start:end] = sampled
            if own is not None and of is not None:
                logprobs[start:end], versions[start:end] = own, of
        fields = {
            "task": self._prompt.task,
            "messages": tuple(map(self._setting.codec.readable, self._messages)),
            "token_ids": _frozen(ids),
            "loss_mask": _frozen(mask),
            "logprobs": _frozen(logprobs),
            "policy_versions": _frozen(versions),
            "status": self._status,
            "rewards": tuple(self._rewards),
        }
        metrics = {"turns": float(self._turn), "tokens": float(self._sampled), **changes.get("metrics", {})}
        return Rollout(**{**fields, **changes, "metrics": metrics})

    def _unsent(self) -> np.ndarray:
        """Tokens between what is there and the next answer; before the first answer, the prompt itself changes."""
        if self._pending is None:
            codec, messages, tools = self._setting.codec, self._messages, self._tools
            if self._turn:
                self._pending = codec.between(messages, self._said, plain=self._plain, ended=self._ended, tools=tools)
            else:
                self._parts = [(codec.opening(messages, plain=self._plain, tools=tools), False, None, None)]
                self._length, self._pending = len(self._parts[0][0]), NOTHING
        return self._pending

    def _full(self) -> Exception:
        where = f"task {self._prompt.task.id!r}: {self._length} tokens"
        if not self._turn and not self._said:
            return ValueFault(f"{where} leave no room in model.max_length")
        self._status = "truncated"
        return OutOfRoomError(f"{where} and what was said behind them leave no room in model.max_length")

    def _request_seed(self) -> int | None:
        # Of a group only first answers to one and the same prompt are one request, whose continuations differ by
        # themselves. What comes later comes alone, and with a shared seed equal conversations would stay equal.
        if self._seed is None or (not self._turn and not self._said):
            return self._seed
        return derive(self._seed, self._member, self._turn)

    def _sampling(self, max_tokens: int, stop: Sequence[str]) -> Sampling:
        base = self._setting.sampling
        if max_tokens == base.max_tokens and not stop:
            return base
        strings, ids = self._setting.codec.split_stops(stop) if stop else (base.stop, base.stop_token_ids)
        return attrs.evolve(base, max_tokens=max_tokens, stop=strings, stop_token_ids=ids)

    def _token_ids(self, more: np.ndarray) -> np.ndarray:
        if len(self._parts) == 1 and not len(more):
            return self._parts[0][0]
        return np.concatenate([*(part[0] for part in self._parts), more])

    def _append(self, ids: np.ndarray, sampled: bool, logprobs: np.ndarray | None, versions: np.ndarray | None) -> None:
        if not len(ids):
            return
        self._parts.append((ids, sampled, logprobs, versions))
        self._length += len(ids)
        if sampled:
            self._last, self._sampled = self._length - 1, self._sampled + len(ids)

    def _answer(self, text: str, ids: np.ndarray, *, ended: bool) -> Message:
        if self._begun:  # a prefill and what continues it are one message
            self._messages[-1] = Message("assistant", self._messages[-1].content + text)
        else:
            self._messages.append(Message("assistant", text))
        self._turn, self._said, self._begun, self._pending = self._turn + 1, 0, False, None
        self._ended = ids if ended else NOTHING
        return self._messages[-1]


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
