"""Record an agent's conversations with the policy over HTTP, token by token."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import attrs
import numpy as np

from rlsdk.contracts import Role, Sampled
from rlsdk.engines.client import Watch
from rlsdk.errors import ConfigError, OutOfRoomError, RefusedMessagesError, ValueFault
from rlsdk.plurals import counted
from rlsdk.rollout.chat import Prompt, RolloutContext, TokenChat
from rlsdk.seeds import derive
from rlsdk.serving.http_server import endpoint
from rlsdk.serving.messages import AnswerHead, APIError, ChatMessage, HttpReply, models
from rlsdk.serving.requests import MODEL, ChatAnswer, ChatReplies, Turn, answered, expect_readable, full, opening
from rlsdk.serving.streaming import LiveAnswer
from rlsdk.serving.wire import ChatCompletionRequest, read_chat
from rlsdk.tool_calls import Dialect
from rlsdk.types import Message, Rollout, Task


@attrs.frozen(eq=False)
class _Node:
    """A conversation right after an answer; its continuations are its children."""

    chat: TokenChat
    parent: _Node | None
    length: int
    serial: int
    children: list[_Node] = attrs.field(factory=list, repr=False)

    @property
    def path(self) -> list[_Node]:
        """Return the nodes from this one back to the conversation's first answer."""
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:  # not by recursion, which ends after some 1,000 answers
            nodes.append(parent)
        return nodes


@attrs.frozen(eq=False)
class _Turn:
    """A request and the conversation in which it is answered, with the prefill unless the conversation ends with it."""

    asked: ChatCompletionRequest
    serial: int
    parent: _Node | None
    chat: TokenChat
    prefill: str

    @property
    def answered(self) -> bool:
        """True once the conversation has the answer, which may complete just as its client disconnects."""
        return self.chat.turns > (0 if self.parent is None else self.parent.chat.turns)


class Recorder:
    """Answer the requests of one rollout's agent, and record the tokens sent and sampled.

    A request that continues a recorded answer adds the new messages to the recorded tokens. Any other request starts a
    conversation: the first one, a sub-agent's, one whose history the agent has rewritten, or one whose earlier thoughts
    the renderer now drops. Two requests that continue the same answer are two branches; their common part is trained
    only in the first.
    """

    api_key = "rollout"

    def __init__(
        self,
        task: Task,
        context: RolloutContext,
        group: str,
        seed: int | None,
        member: int,
        *,
        dialect: Dialect | None = None,
        max_turns: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """Create a recorder.

        Args:
            task: Task of the rollout.
            context: Tokenizer, engines, sampling; sampling parameters of requests, such as temperature, are ignored.
            group: Group of the rollout.
            seed: Seed of the group's requests; None leaves sampling to the engines.
            member: Index of the rollout in its group.
            dialect: Tool parser; by default, the model's own (`model.tool_parser`).
            max_turns: Maximum number of answers.
            max_tokens: Maximum tokens of an answer; by default, the run's setting.
        """
        self._task, self._context, self._group, self._seed, self._member = task, context, group, seed, member
        self._dialect = dialect or Dialect.of(context.codec.tool_parser)
        self._max_turns, self._max_tokens = max_turns, max_tokens
        self._serial = itertools.count()
        self._nodes: list[_Node] = []
        self._by_key: dict[tuple[Any, ...], list[_Node]] = {}
        self._written: dict[Turn, str] = {}
        self._running: set[asyncio.Future[Message]] = set()
        self._streams: dict[int, tuple[_Turn, LiveAnswer]] = {}
        self._closed = False
        self.base_url = ""
        self.calls = 0
        self.cut = False
        self.refusal = ""
        self.failure: Exception | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Recorder]:
        """Serve the rollout's agent, until the block ends.

        Raises:
            EngineError: Generation failed, even if the agent handled the error.
            ConfigError: The chat template rewrites earlier answers.
        """
        server = await endpoint()
        routes = {"POST /chat/completions": self._answer, "GET /models": self._models}
        place = server.mount(routes, self._note)
        self.base_url = place.base_url
        try:
            yield self
        except Exception as error:
            if self.failure is not None:
                raise self.failure from error
            raise
        finally:
            server.unmount(place)
            for serial in list(self._streams):
                self._keep_streamed(serial)
            self._closed = True
            for running in self._running:  # no longer needed
                running.cancel()
        if self.failure is not None:
            raise self.failure

    @property
    def stopped(self) -> bool:
        """True if an answer was stopped from outside, as by a pause of the run."""
        return any(node.chat.status == "aborted" for node in self._nodes)

    @property
    def answers(self) -> int:
        """Number of answers given."""
        return len(self._nodes)

    def reward(self, value: float) -> None:
        """Reward the last answer, at its last sampled token.

        Raises:
            RuntimeError: There is no answer.
        """
        self._expect_answer()
        self._nodes[-1].chat.reward(value)

    def finish(self, **changes: Any) -> tuple[Rollout, ...]:
        """Return the rollouts of the trajectory: one per conversation, in the order of their last answers.

        Args:
            **changes: Changes to the last rollout, as in `TokenChat.finish`; `metrics` are added to every rollout,
                and `answer` is the agent's own final answer: a message after the others, unless the policy wrote it.

        Raises:
            RuntimeError: Nothing was sampled; that is the agent's failure, and does not end the run.
        """
        self._expect_answer()
        leaves = [node for node in self._nodes if not node.children]
        metrics = {"calls": float(self.calls), "conversations": float(len(leaves)), **changes.pop("metrics", {})}
        word = changes.pop("answer", None)
        if self.stopped:  # the rollout is repeated, whatever the agent made of half an answer
            changes["status"] = "aborted"
        done: set[_Node] = set()
        rollouts = []
        for step, leaf in enumerate(leaves):
            shared = next((node.length for node in leaf.path if node in done), 0)
            done.update(leaf.path)
            found = leaf.chat.finish(trajectory=f"{self._group}/{self._member}", step=step)
            rollouts.append(_without(found, shared, metrics))
        last = rollouts[-1]
        if word is not None and last.text.strip() != word.strip():
            changes["messages"] = (*last.messages, Message("assistant", word, prompt=False))
        return (*rollouts[:-1], attrs.evolve(last, **changes))

    def _expect_answer(self) -> None:
        if self._nodes:
            return
        why = "it sent no request; pass it `base_url`"
        if self.refusal:
            why = f"its last request was refused: {self.refusal}"
        elif self.calls:
            why = f"{counted(self.calls, 'request')} ended early, cancelled by the agent or by its time limit"
        raise RuntimeError(f"the agent got no answer from the policy; {why}")

    def _note(self, refusal: APIError) -> None:
        self.refusal = str(refusal)

    async def _models(self, _: Any) -> HttpReply:
        return models([MODEL])

    async def _answer(self, body: Any) -> HttpReply:
        asked = read_chat(body)
        if asked.n != 1:
            raise APIError("n: this server returns one answer per request; ask again for another", param="n")
        if self._closed:
            raise _ended()
        if self._max_turns is not None and self.calls >= self._max_turns:
            self.cut = True
            raise APIError(
                f"the rollout has reached its limit of {self._max_turns} answers (max_turns)", code="max_turns"
            )
        expect_readable(asked, self._context)
        self.calls += 1
        serial = next(self._serial)
        turn = await self._turn(asked, serial)
        head = AnswerHead(id=f"chatcmpl-{serial}", model=asked.model or MODEL)
        replies = ChatReplies(asked=asked, head=head, codec=self._context.codec, dialect=self._dialect)
        start = partial(self._sampled, turn)
        if asked.stream:
            return HttpReply(events=replies.streamed([start]))
        return HttpReply(body=await replies.whole([start]))

    async def _turn(self, asked: ChatCompletionRequest, serial: int) -> _Turn:
        """Find or start the conversation that a request continues, and add the new messages."""
        history = _history(asked)
        found = self._by_key.get(_key(asked, history[: _answered(history)]), [])
        parent = min(found, key=lambda node: len(node.children), default=None)  # first those without a continuation
        if parent is not None:
            chat = parent.chat.branch()
            for message in history[_answered(history) :]:
                said = asked.as_message(message)
                if said.role == "tool":
                    chat.tool_result(said.text, said.name, said.tool_call_id)
                else:
                    # As the agent wrote them, and as any server renders them: consecutive messages are not merged.
                    chat.say(said.content, cast("Role", said.role), joined=False)
            try:
                await chat.tokenize()
                new_rollout = chat.begins_new_rollout
            except RefusedMessagesError as error:  # as at the start of a conversation: the agent's fault
                raise APIError("; ".join(error.faults), param="messages") from error
            except ConfigError as error:
                self.failure = self.failure or error
                raise
            if not new_rollout:
                return _Turn(asked, serial, parent, chat, asked.prefill)
        # A separate seed: with the group's, members with equal requests would get equal answers.
        seed = None if self._seed is None else derive(self._seed, self._member, "call", serial)
        begin = await opening(asked, self._context.codec, self._dialect, self._written)
        prompt = Prompt(self._task, begin.messages, begin.token_ids, begin.plain)
        chat = TokenChat(prompt, self._context, self._group, seed)
        if begin.tools:
            chat.offer(begin.tools, parser=self._dialect)
        if self._closed:
            raise _ended()
        return _Turn(asked, serial, None, chat, "")

    async def _sampled(self, turn: _Turn, watch: Watch | None) -> ChatAnswer:
        """Sample an answer of the policy, and record it."""
        asked, limit = turn.asked, self._max_tokens or self._context.sampling.max_tokens
        how: dict[str, Any] = {"max_tokens": min(limit, asked.max_tokens or limit), "stop": asked.stop}
        if watch is not None:
            live = LiveAnswer(self._context.codec)
            self._streams[turn.serial] = turn, live

            def show(sampled: Sampled) -> None:
                live.feed(sampled)
                watch(sampled)

            how["watch"] = show
        sampling = turn.chat.sample(**how, prefill=turn.prefill, top_logprobs=asked.top_logprobs or 0)
        running = asyncio.ensure_future(sampling)
        self._running.add(running)
        try:
            await running
        except asyncio.CancelledError:
            running.cancel()
            if self._closed:
                raise _ended() from None
            self._keep_streamed(turn.serial)
            raise
        except (OutOfRoomError, ValueFault) as error:
            self.cut, self.refusal = True, str(error)
            raise full(error) from error
        except Exception as error:
            self.failure = self.failure or error
            raise
        finally:
            self._running.discard(running)
        if self._closed:  # closed meanwhile: the streamed part is recorded, the rest reached no one
            raise _ended()
        self._streams.pop(turn.serial, None)
        return self._record(turn)

    def _keep_streamed(self, serial: int) -> None:
        """Record the part of an answer that was sent before its client disconnected, which may act on it."""
        turn, live = self._streams.pop(serial, (None, None))
        if turn is None or live is None:
            return
        if not turn.answered:
            done = live.cut()
            if done is None:
                return
            turn.chat.take(done, turn.prefill)
        # Requests that the agent made after abandoning this answer come after it, whether answered or not.
        self._record(turn, next((i for i, node in enumerate(self._nodes) if node.serial > serial), None))

    def _record(self, turn: _Turn, at: int | None = None) -> ChatAnswer:
        """Add an answer to the tree of conversations, by default as the last one; return it for the client."""
        chat, asked, parent = turn.chat, turn.asked, turn.parent
        assert chat.answer is not None
        node = _Node(chat, parent, len(chat.finish().token_ids), turn.serial)
        self._nodes.insert(len(self._nodes) if at is None else at, node)
        self.refusal = ""
        if parent is not None:
            parent.children.append(node)
        if asked.calling:
            chat.calls(self._dialect)
        completion, codec = chat.answer.completion, self._context.codec
        message = answered(completion.token_ids, asked, codec, self._dialect, continued=not turn.prefill)
        history, whole = _history(asked), attrs.evolve(message, content=asked.prefill + message.content)
        self._by_key.setdefault(_key(asked, (*history, whole)), []).append(node)
        if asked.prefill:  # some clients keep it as a separate message
            self._by_key.setdefault(_key(asked, (*asked.messages, message)), []).append(node)
        self._written |= {(last.key, whole.key): message.reasoning for last in history[-1:]}
        return ChatAnswer(message, completion, node.length - len(completion.token_ids))


def _ended() -> APIError:
    return APIError("the rollout that this URL belonged to has ended", status=404, code="rollout_ended")


def _history(asked: ChatCompletionRequest) -> tuple[ChatMessage, ...]:
    """Return the messages of a request, without a prefill of the answer."""
    return asked.messages[:-1] if asked.prefill else asked.messages


def _answered(messages: Sequence[ChatMessage]) -> int:
    """Return the number of messages up to the last answer."""
    return max((i + 1 for i, message in enumerate(messages) if message.role == "assistant"), default=0)


def _key(asked: ChatCompletionRequest, messages: Sequence[ChatMessage]) -> tuple[Any, ...]:
    tools = json.dumps([dict(tool) for tool in asked.tools] if asked.calling else [], sort_keys=True)
    return tools, tuple(message.key for message in messages)


def _without(rollout: Rollout, shared: int, metrics: Mapping[str, float]) -> Rollout:
    """Return a rollout whose first tokens count as not sampled, since they are trained elsewhere."""
    mask, logprobs, versions = (getattr(rollout, name).copy() for name in ("loss_mask", "logprobs", "policy_versions"))
    mask[:shared], logprobs[:shared], versions[:shared] = False, 0.0, -1
    return attrs.evolve(
        rollout,
        loss_mask=mask,
        logprobs=logprobs,
        policy_versions=versions,
        rewards=[(position, value) for position, value in rollout.rewards if position >= shared],
        metrics={**rollout.metrics, **metrics, "tokens": float(np.count_nonzero(mask))},
    )
