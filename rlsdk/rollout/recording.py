"""The conversations that an agent holds with the policy over HTTP, recorded token by token."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import attrs
import numpy as np

from rlsdk.contracts import Speaker
from rlsdk.errors import ConfigError, OutOfRoomError, ValueFault
from rlsdk.rollout import wire
from rlsdk.rollout.chat import Prompt, Setting, TokenChat
from rlsdk.rollout.endpoint import endpoint
from rlsdk.rollout.seeds import derive
from rlsdk.rollout.wire import ChatAsked, Refusal, Reply, Said, ToolCall
from rlsdk.types import Message, Rollout, Status, Task
from rlsdk.workflows.dialects import Dialect
from rlsdk.workflows.tool_calls import Malformed, hermes

MODEL = "policy"
"""Its name for clients; any other is served, too."""
_FINISH: Mapping[str, wire.Finish] = {"finished": "stop", "truncated": "length", "aborted": "length"}


@attrs.frozen(eq=False)
class _Node:
    """A conversation as it stood behind an answer; what follows are its children.

    Attributes:
        chat: The conversation.
        parent: As it stood behind the answer before.
        length: Tokens.
        sampled: How many of them were.
        children: What went on from here.
    """

    chat: TokenChat
    parent: _Node | None
    length: int
    sampled: int
    children: list[_Node] = attrs.field(factory=list, repr=False)

    @property
    def path(self) -> list[_Node]:
        """From this one to the conversation's first answer."""
        return [self, *(self.parent.path if self.parent else ())]


class Recorder:
    """Answers the requests of one rollout's agent, and keeps what was sent and sampled.

    A request that goes on from a recorded answer adds what is new to the tokens that are there. Any other begins a
    conversation: the first, that of a sub-agent, or one whose past the agent has rewritten. Two requests that go on
    from one answer are two branches, and what they share is trained on in the first alone.
    """

    api_key = "rollout"

    def __init__(
        self,
        task: Task,
        setting: Setting,
        group: str,
        seed: int | None,
        member: int,
        *,
        dialect: Dialect | None = None,
        max_turns: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """Make one.

        Args:
            task: Of the rollout.
            setting: Codec, engines, sampling; what a request says of temperature, top-p and the like does not count.
            group: Of the rollout.
            seed: Of the group's requests; None leaves sampling to the engines.
            member: Which of the group it is.
            dialect: Of calls of tools; left out, `hermes`.
            max_turns: Answers at most.
            max_tokens: Of one answer; left out, the run's setting.
        """
        self._task, self._setting, self._group, self._seed, self._member = task, setting, group, seed, member
        self._dialect = dialect or Dialect.named("hermes", "serve")
        self._max_turns, self._max_tokens = max_turns, max_tokens
        self._serial = itertools.count()
        self._nodes: list[_Node] = []
        self._by_key: dict[tuple[Any, ...], list[_Node]] = {}
        self._running: set[asyncio.Future[Message]] = set()
        self._closed = False
        self.base_url = ""
        self.calls = 0
        self.cut = False
        self.failure: Exception | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Recorder]:
        """Serve the rollout's agent, until the block ends.

        Raises:
            EngineError: Generation failed, whatever the agent made of it.
            ConfigError: The chat template rewrites earlier answers.
        """
        server = await endpoint()
        place = server.mount({"POST /chat/completions": self._answer, "GET /models": self._models})
        self.base_url = place.base_url
        try:
            yield self
        except Exception as error:
            if self.failure is not None:
                raise self.failure from error
            raise
        finally:
            server.unmount(place)
            self._closed = True
            for running in self._running:  # what nobody will read
                running.cancel()
        if self.failure is not None:
            raise self.failure

    @property
    def answers(self) -> int:
        """Answers that were given."""
        return len(self._nodes)

    def reward(self, value: float) -> None:
        """Reward the last answer, at its last sampled token.

        Raises:
            RuntimeError: There is no answer yet.
        """
        if not self._nodes:
            raise RuntimeError(f"task {self._task.id!r}: a reward of {value} before anything was sampled")
        self._nodes[-1].chat.reward(value)

    def finish(self, **changes: Any) -> tuple[Rollout, ...]:
        """The rollouts of the trajectory: one for each conversation, in the order of their last answers.

        Args:
            **changes: Of the last rollout, as in `TokenChat.finish`; `metrics` come to those of every one, and `answer`
                is the agent's own last word: a message behind the others, where it is no answer of the policy.

        Raises:
            RuntimeError: Nothing was sampled; that is the agent's failure, and ends no run.
        """
        if not self._nodes:
            raise RuntimeError(
                f"task {self._task.id!r}: the agent has had no answer from the policy; pass it `base_url`"
            )
        leaves = [node for node in self._nodes if not node.children]
        metrics = {"calls": float(self.calls), "conversations": float(len(leaves)), **changes.pop("metrics", {})}
        word = changes.pop("answer", None)
        done: set[_Node] = set()
        rollouts = []
        for step, leaf in enumerate(leaves):
            shared = next((node.length for node in leaf.path if node in done), 0)
            done.update(leaf.path)
            found = leaf.chat.finish(trajectory=f"{self._group}/{self._member}", step=step)
            rollouts.append(_without(found, shared, metrics))
        last = rollouts[-1]
        if word is not None and last.text.strip() != word.strip():
            changes["messages"] = (*last.messages, Message("assistant", word))
        return (*rollouts[:-1], attrs.evolve(last, **changes))

    async def _models(self, _: Any) -> Reply:
        return wire.models([MODEL])

    async def _answer(self, body: Any) -> Reply:
        asked = wire.read_chat(body)
        if self._closed:
            raise _ended()
        if self._max_turns is not None and self.calls >= self._max_turns:
            self.cut = True
            raise Refusal(f"the rollout has had its {self._max_turns} answers (max_turns)", code="max_turns")
        self.calls += 1
        serial = next(self._serial)
        parent = self._parent(asked)
        if parent is None:
            # A seed of its own: with that of the group, members that ask alike would be answered alike.
            seed = None if self._seed is None else derive(self._seed, self._member, "call", serial)
            chat = begun(asked, self._task, self._setting, self._group, seed, self._dialect)
        else:
            chat = parent.chat.branch()
            for said in asked.messages[_answered(asked) :]:
                _say(chat, asked.named(said))
        message = await self._sampled(chat, asked)
        answer = answered(message.content, asked, self._dialect, f"call_{serial}")
        node = self._record(chat, parent, _key(asked, (*asked.messages, answer)))
        sampled = node.sampled - (parent.sampled if parent else 0)
        return replied(asked, answer, chat.status, f"chatcmpl-{serial}", node.length - sampled, sampled)

    def _parent(self, asked: ChatAsked) -> _Node | None:
        """The recorded answer that this goes on from: one that nothing follows, if there are several."""
        found = self._by_key.get(_key(asked, asked.messages[: _answered(asked)]), [])
        return min(found, key=lambda node: len(node.children), default=None)

    async def _sampled(self, chat: TokenChat, asked: ChatAsked) -> Message:
        most = self._max_tokens or self._setting.sampling.max_tokens
        limit = min(most, asked.max_tokens or most)
        running = asyncio.ensure_future(chat.sample(max_tokens=limit, stop=asked.stop))
        self._running.add(running)
        try:
            return await running
        except asyncio.CancelledError:
            running.cancel()
            if self._closed:
                raise _ended() from None
            raise
        except (OutOfRoomError, ValueFault) as error:
            self.cut = True
            raise full(error) from error
        except Exception as error:
            self.failure = self.failure or error
            raise
        finally:
            self._running.discard(running)

    def _record(self, chat: TokenChat, parent: _Node | None, key: tuple[Any, ...]) -> _Node:
        mask = chat.finish().loss_mask
        node = _Node(chat, parent, len(mask), int(np.count_nonzero(mask)))
        self._nodes.append(node)
        self._by_key.setdefault(key, []).append(node)
        if parent is not None:
            parent.children.append(node)
        return node


def begun(asked: ChatAsked, task: Task, setting: Setting, group: str, seed: int | None, dialect: Dialect) -> TokenChat:
    """A conversation that begins with what a request says; nothing in it was sampled.

    Raises:
        Refusal: The chat template refuses it.
    """
    codec = setting.codec
    plain = not codec.template.there
    written = [_as_message(said, asked, dialect) for said in asked.messages]
    offered = asked.tools if asked.calling and not plain and codec.template.offers(asked.tools) else ()
    if asked.calling and not offered:
        written = _introduced(written, dialect.introduce(asked.tools))
    # Whoever wrote them, an agent, a tool or a page of the web: they are data.
    messages = [attrs.evolve(m, content=codec.as_data(m.content), name=codec.as_data(m.name)) for m in written]
    try:
        ids = codec.opening(messages, plain=plain, tools=offered)
    except ConfigError as error:
        raise Refusal("; ".join(error.faults), param="messages") from error
    chat = TokenChat(Prompt(task, tuple(messages), ids, plain), setting, group, seed)
    if offered:
        chat.offer(offered)
    return chat


def answered(text: str, asked: ChatAsked, dialect: Dialect, call_id: str) -> Said:
    """What the policy wrote, as a client is told it: calls of tools are read, and a stop string is left out."""
    for stop in asked.stop:
        text = text.removesuffix(stop)
    calls = dialect.parse(text) if asked.calling else []
    told = []
    for i, call in enumerate(calls):
        named = None if isinstance(call, Malformed) else _arguments(call.name, call.positional, call.arguments, asked)
        if isinstance(call, Malformed) or named is None:
            return Said("assistant", text)  # the agent sees what cannot be read as a call, and says so or gives up
        told.append(ToolCall(f"{call_id}_{i}", call.name, json.dumps(named, ensure_ascii=False)))
    if not told:
        return Said("assistant", text)
    before = text[: text.find("<tool_call>", max(text.rfind("</think>"), 0))] if dialect.parse is hermes else ""
    return Said("assistant", before.strip(), tuple(told))


def replied(asked: ChatAsked, answer: Said, status: Status, name: str, prompt: int, sampled: int) -> Reply:
    """An answer of so many tokens to a prompt of so many."""
    finish = "tool_calls" if answer.calls else _FINISH[status]
    asked = asked if asked.model else attrs.evolve(asked, model=MODEL)
    usage = wire.tokens_used(prompt, sampled)
    return wire.chat_reply(asked, answer, id=name, created=int(time.time()), finish=finish, usage=usage)


def full(error: Exception) -> Refusal:
    """What says that there is no room, as OpenAI does."""
    return Refusal(str(error), code="context_length_exceeded", param="messages")


def _ended() -> Refusal:
    return Refusal("the rollout that this URL belonged to has ended", status=404, code="rollout_ended")


def _answered(asked: ChatAsked) -> int:
    """How many messages there are up to the last answer."""
    return max((i + 1 for i, said in enumerate(asked.messages) if said.role == "assistant"), default=0)


def _key(asked: ChatAsked, messages: tuple[Said, ...]) -> tuple[Any, ...]:
    tools = json.dumps([dict(tool) for tool in asked.tools] if asked.calling else [], sort_keys=True)
    return tools, tuple(said.key for said in messages)


def _say(chat: TokenChat, message: Message) -> None:
    if message.role == "tool":
        chat.tool_result(message.content, message.name)
    else:
        chat.say(message.content, cast("Speaker", message.role))


def _as_message(said: Said, asked: ChatAsked, dialect: Dialect) -> Message:
    """A message as a prompt shows it: calls that somebody made are written out."""
    if not said.calls:
        return asked.named(said)
    pairs = []
    for call in said.calls:
        try:
            read = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError):
            read = None
        pairs.append((call.name, read if isinstance(read, dict) else {"arguments": call.arguments}))
    return Message("assistant", "\n".join(filter(None, [said.content, dialect.write(pairs)])))


def _introduced(messages: list[Message], told: str) -> list[Message]:
    """Tools that the template does not show are told by the system."""
    if messages[0].role == "system":
        return [Message("system", f"{messages[0].content}\n{told}"), *messages[1:]]
    return [Message("system", told), *messages]


def _arguments(
    name: str, positional: tuple[Any, ...], named: Mapping[str, Any], asked: ChatAsked
) -> Mapping[str, Any] | None:
    """All arguments by name, as JSON has them; None if that cannot be."""
    if not positional:
        return dict(named)
    schemas = (tool["function"] for tool in asked.tools)
    schema: Mapping[str, Any] = next((each for each in schemas if each["name"] == name), {})
    names = list((schema.get("parameters") or {}).get("properties") or {})
    given = dict(zip(names, positional, strict=False))
    if len(positional) > len(names) or given.keys() & named.keys():
        return None
    return {**given, **named}


def _without(rollout: Rollout, shared: int, metrics: Mapping[str, float]) -> Rollout:
    """A rollout whose first tokens are trained on elsewhere: here nobody sampled them."""
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
