"""The conversation that a workflow holds: builds one rollout token by token; later turns only ever append."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar, get_args

import attrs
import numpy as np

from rlsdk.components import Use
from rlsdk.contracts import Completion, EnvHandle, Finish, Role, Sampling
from rlsdk.engines.client import Answer, GenerateRequest, Sampler, Watch
from rlsdk.environments.local import EnvBackend, LocalEnvBackend
from rlsdk.errors import ConfigError, EngineError, OutOfRoomError, ValueFault
from rlsdk.loops import LoopBridge, UserLoop
from rlsdk.rollout.codec import NOTHING, ChatTokenizer
from rlsdk.rollout.crossing import CrossedWorld, entered_on
from rlsdk.seeds import derive
from rlsdk.types import Message, Rollout, Score, Status, Task

T = TypeVar("T")
STATUS: Mapping[Finish, Status] = {"stop": "finished", "length": "truncated", "abort": "aborted"}
"""Finish reason of the last answer -> status of its rollout."""


@attrs.frozen(eq=False)
class Prompt:
    """Prompt of a task, tokenized once for its whole group; `plain`: the conversation is text, without a template."""

    task: Task
    messages: tuple[Message, ...]
    token_ids: np.ndarray
    plain: bool = attrs.field()

    @plain.default
    def _is_text(self) -> bool:
        return isinstance(self.task.prompt, str)


class ServedConversations(Protocol):
    """The conversations that an agent holds with the policy over HTTP, such as `rlsdk.serving.recording.Recorder`."""

    @property
    def answers(self) -> int:
        """Count of answers given so far."""
        ...

    def serving(self) -> AbstractAsyncContextManager[Any]:
        """Serve the policy until the block ends."""
        ...

    def finish(self, **changes: Any) -> tuple[Rollout, ...]:
        """Return the rollouts that were recorded."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class RolloutContext:
    """Parts that all rollouts of one batch share.

    Attributes:
        codec: Tokenizer with its chat template.
        client: Client of the engines; None where nothing is sampled.
        sampling: Sampling parameters, stop strings already split.
        max_length: Maximum number of tokens of prompt and response together.
        worlds: Pool in which environments run.
        user_loop: Event loop of workflows that are not rlsdk's own; None: they run on the loop of the run.
        recorder: Serves the policy to an agent (`rlsdk.serving.recording.Recorder`); None where no server is offered.
    """

    codec: ChatTokenizer
    client: Sampler | None
    sampling: Sampling
    max_length: int
    worlds: EnvBackend = attrs.field(factory=LocalEnvBackend)
    user_loop: UserLoop | None = None
    recorder: Callable[..., ServedConversations] | None = None


class TokenChat:
    """A conversation with the policy.

    Its tokens are those that were sent and those that were sampled, in order. A message is sent with the next `sample`;
    a last message that gets no answer has no tokens. Messages are data: the names of special tokens in them are
    tokenized as ordinary characters. A call of `sample` that is cancelled leaves the conversation as it was.

    A workflow may run on another event loop than the run (`home`). Only this class crosses between the two: for the
    engines' answers, scores, calls of environments, and the start and end of an endpoint. Everything else happens on
    the workflow's own loop.

    Attributes:
        answer: The last answer as it was sampled.
    """

    def __init__(
        self,
        prompt: Prompt,
        setting: RolloutContext,
        group: str,
        seed: int | None,
        *,
        member: int = 0,
        scorer: Callable[[Rollout], Awaitable[Score]] | None = None,
        home: LoopBridge | None = None,
    ) -> None:
        """Begin a conversation.

        Args:
            prompt: Prompt of the task.
            setting: Tokenizer, engines and sampling parameters.
            group: Shared by the rollouts of one task; equal prompts in it are sampled as one request.
            seed: Seed of the group's requests; None leaves sampling to the engines' own generators.
            member: Index of this rollout in its group.
            scorer: The run's reward, for `score`.
            home: Bridge to the event loop of the run, where the workflow has a loop of its own.
        """
        self._prompt, self._setting, self._group = prompt, setting, group
        self._seed, self._member, self._scorer, self._home = seed, member, scorer, home
        self._plain = prompt.plain
        self._messages = [_given(message) for message in prompt.messages]
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
        self._worlds: list[EnvHandle] = []
        self._branches = 0
        self._routing: np.ndarray | None = None
        self._recorder: ServedConversations | None = None
        self.answer: Answer | None = None

    @property
    def status(self) -> Status:
        """Status of the last answer: finished, truncated or aborted."""
        return self._status

    @property
    def turns(self) -> int:
        """Number of answers so far."""
        return self._turn

    def room(self) -> int:
        """Return the maximum length of the next answer, unsent messages accounted for; 0: none can be sampled."""
        unsent = len(self._unsent())  # before the length, which it may change
        return max(0, self._setting.max_length - self._length - unsent)

    def say(self, text: str, role: Role = "user") -> None:
        """Append a message that the policy did not write.

        Consecutive messages of one role become a single message, joined by the separator: the first observation of an
        environment joins the prompt.

        Args:
            text: Text of the message.
            role: Role of its author.

        Raises:
            ValueFault: The role is unknown; an assistant's words come from `sample`, with a prefill, or `write`.
        """
        if role not in get_args(Role):
            raise ValueFault(f"say: role is one of {', '.join(get_args(Role))}; got {role!r}")
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
        """Append the result of a tool call.

        Args:
            text: Result of the tool, or its error.
            name: Name of the tool.
        """
        codec = self._setting.codec
        self._messages.append(Message("tool", codec.as_data(text), codec.as_data(name)))
        self._said += 1
        self._begun, self._pending = False, None

    def offer(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Have the chat template list tools for the policy.

        Args:
            tools: JSON schemas, `{"type": "function", "function": {"name": …, "description": …, "parameters": …}}`.

        Returns:
            True if the template lists them; False without a template, or with one that has no place for tools: describe
            the tools in a message instead.

        Raises:
            ValueFault: The policy has written already.
        """
        if self._turn:
            raise ValueFault(f"task {self._prompt.task.id!r}: tools are offered before the first answer, not behind it")
        if self._plain or not self._setting.codec.template.offers(tools):
            return False
        self._tools, self._pending = tuple(tools), None
        return True

    async def sample(
        self,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        prefill: str = "",
        top_logprobs: int = 0,
        watch: Watch | None = None,
    ) -> Message:
        """Sample the next assistant message.

        Args:
            max_tokens: Maximum length of this message; left out, the run's setting.
            stop: Stop strings of this message, in place of the run's.
            prefill: Text that the message begins with; it is not trained on.
            top_logprobs: Number of likeliest tokens to keep beside each sampled one, in `answer`.
            watch: Called with tokens while they are sampled, on the event loop of the run.

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
        if top_logprobs:
            sampling = attrs.evolve(sampling, top_logprobs=top_logprobs)
        before = [part[0] for part in self._parts]
        ids = np.concatenate([*before, sending]) if len(before) > 1 or len(sending) else before[0]
        seed, engine = self._request_seed(), self._engine
        request = GenerateRequest(self._group, ids, sampling, seed=seed, affinity=engine, watch=watch)
        answer = await self._at_home(lambda: client.sample(request))
        return self._take(sending, prefill, answer)

    def take(self, completion: Completion, prefill: str = "") -> Message:
        """Append an answer that was sampled for this conversation outside of `sample`, as `sample` would have.

        Args:
            completion: The answer.
            prefill: Text that the answer begins with.
        """
        codec = self._setting.codec
        sending = np.concatenate([self._unsent(), codec.encode(prefill)])
        return self._take(sending, prefill, Answer(completion, codec.decode([completion.token_ids])[0], self._engine))

    def _take(self, sending: np.ndarray, prefill: str, answer: Answer) -> Message:
        self.answer, done = answer, answer.completion
        self._append(sending, False, None, None)
        self._append(done.token_ids, True, done.logprobs, done.versions)
        self._status, self._engine = STATUS[done.finish], answer.engine
        routing = done.routed_experts
        if routing is not None:
            # What earlier answers reported comes first: it is what their tokens were sampled with.
            known = routing[:0] if self._routing is None else self._routing
            self._routing = np.concatenate([known, routing[len(known) :]])
        return self._answer(prefill + answer.text, done.token_ids, ended=done.finish == "stop")

    def write(self, text: str) -> None:
        """Append an expert's assistant message and the end-of-text token; it is trained on as if sampled."""
        codec = self._setting.codec
        ids = codec.encode(text)
        ids = ids if codec.end is None else np.append(ids, codec.end)
        self._append(self._unsent(), False, None, None)
        self._append(ids, True, None, None)
        self._answer(text, ids, ended=codec.end is not None)

    def reward(self, value: float) -> None:
        """Reward the last answer, at its last sampled token; several rewards of one token are added up.

        Raises:
            ValueFault: There is no answer yet.
        """
        if self._last < 0:
            raise ValueFault(f"task {self._prompt.task.id!r}: a reward of {value} before anything was sampled")
        self._rewards.append((self._last, float(value)))

    async def score(self) -> Score:
        """Score the rollout as it stands by the run's reward.

        Raises:
            ConfigError: The run has no reward.
            DataError: The task cannot be scored.
        """
        if self._scorer is None:
            raise ConfigError(["reward: none given, but the workflow asks what an answer is worth; name one"])
        scorer, rollout = self._scorer, self.finish()
        return await self._at_home(lambda: scorer(rollout))

    def world(self, environment: Use, seed: int, *, step_timeout: float = 30.0) -> EnvHandle:
        """Open an environment for this rollout; `close` releases it.

        Args:
            environment: Environment component with its options.
            seed: Seed of its episode.
            step_timeout: Timeout of one call of it, in seconds.
        """
        worlds = self._setting.worlds
        if self._home is None:
            self._worlds.append(worlds.open(environment, seed, step_timeout))
        else:
            self._worlds.append(CrossedWorld(self._home, lambda: worlds.open(environment, seed, step_timeout)))
        return self._worlds[-1]

    def close(self) -> None:
        """Close the environments that the workflow left open."""
        while self._worlds:
            self._worlds.pop().close()

    def serve(self, **how: Any) -> AbstractAsyncContextManager[Any]:
        """Serve the policy to an agent, as an OpenAI-compatible endpoint of this rollout; see `Chat.serve`."""
        if self._setting.recorder is None:
            raise ConfigError(
                ["the workflow serves the policy to an agent, but these rollouts are made without a server"]
            )
        about = (self._prompt.task, self._setting, self._group, self._seed, self._member)
        self._recorder = self._setting.recorder(*about, **how)
        serving = self._recorder.serving()
        return serving if self._home is None else entered_on(self._home, serving)

    def failed(self) -> Rollout:
        """Return the rollout of a workflow that failed; where an agent was served, the conversation last answered."""
        if self._recorder is not None and self._recorder.answers:
            return self._recorder.finish(status="failed")[-1]
        return self.finish(status="failed")

    def branch(self) -> TokenChat:
        """Return an independent copy of the conversation with a seed of its own; this one stays as it is."""
        other = copy.copy(self)
        if self._seed is not None:
            other._seed = derive(self._seed, self._member, "branch", self._branches)
        self._branches += 1
        other._messages, other._parts, other._rewards = [*self._messages], [*self._parts], [*self._rewards]
        other._worlds, other._branches = [], 0
        return other

    def finish(self, **changes: Any) -> Rollout:
        """Return the rollout as it stands.

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
        if self._routing is not None:
            unknown = np.full((len(ids) - len(self._routing), *self._routing.shape[1:]), -1, np.int16)
            fields["routed_experts"] = _frozen(np.concatenate([self._routing, unknown]))
        metrics = {"turns": float(self._turn), "tokens": float(self._sampled), **changes.get("metrics", {})}
        return Rollout(**{**fields, **changes, "metrics": metrics})

    async def _at_home(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await work on the event loop of the run."""
        return await (work() if self._home is None else self._home.run(work))

    def _unsent(self) -> np.ndarray:
        """Return the tokens between the last answer and the next; before the first answer, change the prompt itself."""
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
        # Only first answers to equal prompts in a group share one request, whose continuations differ by themselves.
        # Later requests are sent one by one, and with a shared seed equal conversations would stay equal; so may the
        # first request of users' code, which can wait for something before it.
        if self._seed is None or (self._home is None and not self._turn and not self._said):
            return self._seed
        return derive(self._seed, self._member, self._turn)

    def _sampling(self, max_tokens: int, stop: Sequence[str]) -> Sampling:
        base = self._setting.sampling
        if max_tokens == base.max_tokens and not stop:
            return base
        strings, ids = self._setting.codec.split_stops(stop) if stop else (base.stop, base.stop_token_ids)
        return attrs.evolve(base, max_tokens=max_tokens, stop=strings, stop_token_ids=ids)

    def _append(self, ids: np.ndarray, sampled: bool, logprobs: np.ndarray | None, versions: np.ndarray | None) -> None:
        if not len(ids):
            return
        self._parts.append((ids, sampled, logprobs, versions))
        self._length += len(ids)
        if sampled:
            self._last, self._sampled = self._length - 1, self._sampled + len(ids)

    def _answer(self, text: str, ids: np.ndarray, *, ended: bool) -> Message:
        if self._begun:  # a prefill and what continues it are one message
            self._messages[-1] = Message("assistant", self._messages[-1].content + text, prompt=False)
        else:
            self._messages.append(Message("assistant", text, prompt=False))
        self._turn, self._said, self._begun, self._pending = self._turn + 1, 0, False, None
        self._ended = ids if ended else NOTHING
        return self._messages[-1]


def _given(message: Message) -> Message:
    """Return a message of the prompt, marked as such if the assistant wrote it and nothing says who did."""
    unsettled = message.role == "assistant" and message.prompt is None
    return attrs.evolve(message, prompt=True) if unsettled else message


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
