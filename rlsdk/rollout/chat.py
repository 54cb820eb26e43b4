"""The conversation that a workflow holds, which builds a rollout token by token.

Later turns only append. If the renderer changes earlier text, such as by dropping thoughts, a new rollout starts.
"""

from __future__ import annotations

import asyncio
import copy
import reprlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar, get_args

import attrs
import numpy as np

from rlsdk.components import Use
from rlsdk.contracts import Call, Completion, EnvHandle, Finish, Malformed, Role, Sampling, ToolParser
from rlsdk.engines.client import Answer, GenerateRequest, Watch
from rlsdk.errors import ConfigError, EngineError, OutOfRoomError, ValueFault
from rlsdk.loops import LoopBridge
from rlsdk.messages import QUICK_CHARACTERS, content_of, number
from rlsdk.rollout.codec import NOTHING
from rlsdk.rollout.context import BridgedEnv, Prompt, RolloutContext, ServedConversations, entered_on
from rlsdk.rollout.transcript import Segment, Sending, Transcript
from rlsdk.seeds import derive
from rlsdk.tool_calls import Dialect
from rlsdk.types import REWARD_LIMIT, Message, Rollout, Score, Status, is_reward

__all__ = ["STATUS", "Prompt", "RolloutContext", "ServedConversations", "TokenChat"]
T = TypeVar("T")
STATUS: Mapping[Finish, Status] = {"stop": "finished", "length": "truncated", "abort": "aborted"}
"""Finish reason of the last answer -> status of its rollout."""


class TokenChat:
    """A conversation with the policy.

    Its tokens are the sent and sampled ones, in order. If the renderer changes earlier text (it drops the thoughts of
    answers, or moves messages), the current rollout ends (`with_earlier` returns it), and the conversation continues
    from the newly rendered prompt as the next rollout of the same trajectory. A message is sent with the next `sample`;
    a last message without an answer has no tokens. Messages are data: names of special tokens in them are tokenized as
    ordinary characters. Cancelling `sample` leaves the conversation unchanged.

    A workflow may run on an event loop other than the run's (`home`). Only this class crosses between the loops: for
    answers, scores, environment calls, and the start and end of an endpoint. Everything else happens on the workflow's
    loop.

    Attributes:
        answer: The last answer as it was sampled.
    """

    def __init__(
        self,
        prompt: Prompt,
        context: RolloutContext,
        group: str,
        seed: int | None,
        *,
        member: int = 0,
        scorer: Callable[[Rollout], Awaitable[Score]] | None = None,
        home: LoopBridge | None = None,
    ) -> None:
        """Start a conversation.

        Args:
            prompt: Prompt of the task.
            context: Tokenizer, engines and sampling parameters.
            group: Name shared by the rollouts of one task; equal prompts in it are sampled as one request.
            seed: Seed of the group's requests; None uses the engines' generators.
            member: Index of this rollout in its group.
            scorer: The run's reward, for `score`.
            home: Bridge to the run's event loop, if the workflow has its own loop.
        """
        self._prompt, self._context, self._group = prompt, context, group
        self._seed, self._member, self._scorer, self._home = seed, member, scorer, home
        self._plain = prompt.plain
        self._talk = Transcript.of(context.codec, prompt.messages)
        self._segment = Segment.of(prompt.token_ids)
        self._earlier: list[Rollout] = []
        self._trajectories: dict[str, list[Rollout]] = {}
        self._label = f"{group}/{member}"
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._status: Status = "finished"
        self._turn = self._sampled = 0
        self._ended = NOTHING
        self._engine: int | None = None
        self._pending: Sending | None = Sending(NOTHING)
        self._environments: list[EnvHandle] = []  # including those of branches
        self._owner = object()  # of these environments
        self._branches = 0
        self._recorders: list[ServedConversations] = []  # including those of branches
        self.answer: Answer | None = None

    @property
    def status(self) -> Status:
        """See `Chat.status`."""
        return self._status

    @property
    def turns(self) -> int:
        """See `Chat.turns`."""
        return self._turn

    @property
    def begins_new_rollout(self) -> bool:
        """True if the next answer starts a new rollout, since the renderer now changes earlier text."""
        return self._sending().new_rollout

    def room(self) -> int:
        """See `Chat.room`; messages that were not sent yet count."""
        return max(0, self._context.max_length - self._sending().length(self._segment))

    def say(self, text: str | Sequence[Any], role: Role = "user", *, joined: bool = True) -> None:
        """See `Chat.say`; a message that is not `joined` stays separate from a preceding one of the same role.

        Messages are joined by the separator, so an environment's first observation joins the prompt.
        """
        if role not in get_args(Role):
            raise ValueFault(f"say: role must be one of {', '.join(get_args(Role))}; got {role!r}")
        self._talk.say(content_of(text), role, joined_to_last=joined)
        self._pending = None

    def tool_result(self, text: str, name: str = "", call_id: str = "") -> None:
        """See `Chat.tool_result`."""
        if not isinstance(text, str):
            raise ValueFault(
                f"tool_result: the result is {reprlib.repr(text)}; expected text, such as json.dumps gives"
            )
        self._talk.tool_result(text, name, call_id)
        self._pending = None

    def offer(
        self, tools: Sequence[Mapping[str, Any]], *, describe: bool = False, parser: ToolParser | None = None
    ) -> bool:
        """See `Chat.offer`; a parser must read the calls that the renderer writes."""
        if self._turn:
            raise ValueFault(f"task {self._prompt.task.id!r}: tools must be offered before the first answer")
        if self._plain or not self._context.codec.renderer.shows_tools(tools):
            if describe:
                self.say(Dialect.of(parser or self._context.codec.tool_parser).introduce(tools))
            return False
        if parser is None:
            self._context.codec.expect_calls()
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
        """See `Chat.sample`.

        The `top_logprobs` most likely tokens are recorded for each sampled one, in `answer`. `watch` is called with
        tokens while they are sampled, on the event loop of the run.
        """
        client, codec = self._context.client, self._context.codec
        if max_tokens is not None and max_tokens < 1:
            raise ValueFault(f"sample: max_tokens must be at least 1 or left out; got {max_tokens}")
        if client is None:
            raise EngineError(
                "the workflow samples the policy, but the algorithm trains on demonstrations; use it only for "
                "evaluation (`eval.workflow`), or choose an algorithm that samples"
            )
        await self.tokenize()
        begin = codec.encode(prefill)
        room = self.room() - len(begin)
        if room < 1:
            raise self._full()
        sending = self._sending()
        ids = sending.whole(self._segment, begin)
        sampling = self._sampling(min(room, max_tokens or self._context.sampling.max_tokens), stop)
        if top_logprobs:
            sampling = attrs.evolve(sampling, top_logprobs=top_logprobs)
        seed, engine = self._seed, self._engine
        # Only first answers to equal prompts in a group share a request, whose continuations differ anyway. Later
        # requests are sent one by one, and with a shared seed equal conversations would stay equal. The same holds for
        # the first request of user code, which may await something before it.
        if seed is not None and (self._home is not None or self._turn or self._talk.new):
            seed = derive(seed, self._member, self._turn)
        request = GenerateRequest(
            self._group, ids, sampling, seed=seed, affinity=engine, watch=watch, **self._images(sending)
        )
        answer = await self._at_home(lambda: client.sample(request))
        if self._pending is not sending:  # the answer does not continue the current conversation
            raise self._changed()
        return self._take(sending, prefill, answer)

    async def tokenize(self) -> None:
        """Tokenize the unsent messages: long ones in a thread, since other conversations share this event loop.

        Raises:
            ConfigError: The renderer rejects the messages, or rewrites earlier answers.
            ValueFault: The conversation changed meanwhile.
        """
        if self._pending is not None or self._talk.new_characters <= QUICK_CHARACTERS:
            return
        talk, tools = self._talk.copy(), self._tools
        sending = await asyncio.to_thread(self._rendered, talk, tools)
        if self._pending is not None or self._tools is not tools or self._talk.shown != talk.shown:
            raise self._changed()
        self._expect(sending)

    def _changed(self) -> ValueFault:
        return ValueFault(
            f"task {self._prompt.task.id!r}: the conversation changed while an answer to it was sampled; await "
            "`sample` before the next call, or sample several answers from `chat.branch()`"
        )

    def _images(self, sending: Sending) -> dict[str, Any]:
        """Return the images before the answer and their token positions, in the form of a request."""
        token = self._context.codec.image_token(self._talk.shown)
        if token is None:
            return {}
        images = tuple(image for message in self._talk.shown for image in message.images)
        return {"images": images, "image_positions": sending.image_positions(self._segment, token)}

    def take(self, completion: Completion, prefill: str = "") -> Message:
        """Append an answer that was sampled outside of `sample`, as `sample` would."""
        text = self._context.codec.decode([completion.token_ids])[0]
        return self._take(self._sending(), prefill, Answer(completion, text, self._engine))

    def _take(self, sending: Sending, prefill: str, answer: Answer) -> Message:
        self.answer, done = answer, answer.completion
        self._send(sending)
        self._segment.append(self._context.codec.encode(prefill), False)
        self._segment.append(done.token_ids, True, done.logprobs, done.versions)
        self._segment.route(done.routed_experts)
        self._status, self._engine = STATUS[done.finish], answer.engine
        return self._answer(answer.text, done.token_ids, prefill=prefill, ended=done.finish == "stop")

    def write(self, text: str) -> None:
        """See `Chat.write`; text beyond the model's length is cut off, as with the policy's answers."""
        codec, room = self._context.codec, self.room()
        if room < 1:
            raise self._full()
        end = codec.end if self._plain else codec.turn_end
        ids = codec.encode(text)
        ids = ids if end is None else np.append(ids, end)
        cut = len(ids) > room
        if cut:
            ids, self._status = ids[:room], "truncated"
            text = codec.decode([ids])[0]
        self._send(self._sending())
        self._segment.append(ids, True)
        self._answer(text, ids, ended=end is not None and not cut)

    def _send(self, sending: Sending) -> None:
        if not sending.new_rollout:
            self._segment.append(sending.tokens, False)
            return
        over = self._rollout(self._talk.before)
        self._earlier.append(attrs.evolve(over, trajectory=self._label, step=len(self._earlier)))
        self._segment = Segment.of(sending.tokens)

    def calls(self, parser: ToolParser | None = None) -> tuple[Call | Malformed, ...]:
        """See `Chat.calls`; the answer's message then contains the valid ones."""
        return self._talk.calls(parser, self._tools)

    def reward(self, value: float) -> None:
        """See `Chat.reward`; several rewards on one token add up."""
        where = f"task {self._prompt.task.id!r}: a reward"
        if not self._turn:
            raise ValueFault(f"{where} of {value} was given before anything was sampled")
        found = float(number(value, where))
        if not is_reward(found):
            raise ValueFault(f"{where} must be finite and within ±{REWARD_LIMIT:g}; got {value}")
        self._segment.rewards.append((self._segment.last, found))

    async def score(self) -> Score:
        """See `Chat.score`."""
        if self._scorer is None:
            raise ConfigError(["reward: none given, but the workflow scores an answer; name one"])
        scorer, rollout = self._scorer, self.finish()
        return await self._at_home(lambda: scorer(rollout))

    def world(self, environment: Use, seed: int, *, step_timeout: float = 30.0) -> EnvHandle:
        """See `Chat.world`."""
        if not isinstance(environment, Use):
            raise TypeError(
                f"chat.world expects an rlsdk.Use, got {environment!r}: annotate the workflow's option `environment: "
                "rlsdk.Use`, or write rlsdk.Use(NAME, OPTIONS)"
            )
        environments, owner = self._context.environments, self._owner
        if self._home is None:
            self._environments.append(environments.open(environment, seed, step_timeout, owner))
        else:
            self._environments.append(
                BridgedEnv(self._home, lambda: environments.open(environment, seed, step_timeout, owner))
            )
        return self._environments[-1]

    def close(self) -> None:
        """Close the environments that the workflow left open, in branches too."""
        while self._environments:
            self._environments.pop().close()

    def serve(self, **how: Any) -> AbstractAsyncContextManager[Any]:
        """Serve the policy to an agent through an OpenAI-compatible endpoint of this rollout; see `Chat.serve`."""
        if self._context.recorder is None:
            raise ConfigError(["the workflow serves the policy to an agent, but this context has no server"])
        seed, count = self._seed, len(self._recorders)
        if seed is not None and count:  # with one seed, a second agent with equal requests would get equal answers
            seed = derive(seed, self._member, "served", count)
        recorder = self._context.recorder(self._prompt.task, self._context, self._group, seed, self._member, **how)
        self._recorders.append(recorder)
        serving = recorder.serving()
        return serving if self._home is None else entered_on(self._home, serving)

    @property
    def stopped(self) -> bool:
        """True if an answer was aborted from outside: the last one, or one to a served agent."""
        return self._status == "aborted" or any(recorder.stopped for recorder in self._recorders)

    def failed(self) -> Rollout:
        """Return the rollout of a failed workflow; if it served an agent, the last answered conversation."""
        for recorder in reversed(self._recorders):
            if recorder.answers:
                return recorder.finish(status="failed")[-1]
        return self.finish(status="failed")

    def branch(self) -> TokenChat:
        """See `Chat.branch`; it has a seed of its own."""
        other = copy.copy(self)
        if self._seed is not None:
            other._seed = derive(self._seed, self._member, "branch", self._branches)
        self._branches += 1
        other._talk, other._earlier = self._talk.copy(), [*self._earlier]
        other._segment, other._branches = self._segment.copy(), 0
        other._label = f"{self._label}.{self._branches}"
        return other

    def finish(self, **changes: Any) -> Rollout:
        """See `Chat.finish`.

        A partial answer that was aborted from outside stays `aborted`: it is resampled, not trained on.
        """
        if self._status == "aborted":
            changes["status"] = "aborted"
        if self._earlier:
            changes = {"trajectory": self._label, "step": len(self._earlier), **changes}
            self._trajectories[changes["trajectory"]] = [*self._earlier]
        metrics = {"turns": float(self._turn), "tokens": float(self._sampled), **changes.get("metrics", {})}
        earned = [value for each in self._earlier for _, value in each.rewards]
        return self._rollout(self._talk.messages, earned, **{"status": self._status, **changes, "metrics": metrics})

    def with_earlier(self, rollout: Rollout) -> list[Rollout]:
        """Return the rollouts of a trajectory: those that ended when earlier text changed, then the given last one."""
        earlier = self._trajectories.get(rollout.trajectory, [])
        first = rollout.step - len(earlier)
        found = [attrs.evolve(r, trajectory=rollout.trajectory, step=first + i) for i, r in enumerate(earlier)]
        return [*found, rollout]

    def _rollout(self, messages: Sequence[Message], earned: Sequence[float] = (), **fields: Any) -> Rollout:
        """Return the current segment; rewards `earned` in earlier ones are placed on its first sampled token."""
        arrays = self._segment.arrays(self._context.codec.image_token(messages))
        before = [(int(arrays["loss_mask"].argmax()), value) for value in earned]
        readable = tuple(map(self._context.codec.readable, messages))
        taken = {"task": self._prompt.task, "messages": readable, "rewards": (*before, *self._segment.rewards)}
        return Rollout(**{**taken, **arrays, **fields})

    async def _at_home(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await work on the run's event loop."""
        return await (work() if self._home is None else self._home.run(work))

    def _sending(self) -> Sending:
        """Return the tokens to send before the next answer; before the first answer, change the prompt itself."""
        return self._pending or self._expect(self._rendered(self._talk, self._tools))

    def _expect(self, sending: Sending) -> Sending:
        """Set the tokens to send before the next answer."""
        if not self._turn and not sending.too_long:
            self._segment, sending = Segment.of(sending.tokens), Sending(NOTHING)
        self._pending = sending
        return sending

    def _rendered(self, talk: Transcript, tools: Sequence[Mapping[str, Any]]) -> Sending:
        """Tokenize what follows the last answer, or the whole conversation; may run in a thread."""
        codec, limit, new = self._context.codec, self._context.max_length, talk.new_characters
        # To tokenize hundreds of megabytes, of a tool's result for example, takes minutes and gigabytes.
        if new > limit and new > limit * codec.longest:
            return Sending(NOTHING, too_long=True)
        how: dict[str, Any] = {"plain": self._plain, "tools": tools}
        bridge = codec.bridge_tokens(talk.shown, talk.new, ended=self._ended, **how) if self._turn else None
        tokens = codec.prompt_tokens(talk.shown, **how) if bridge is None else bridge
        return Sending(tokens, new_rollout=bridge is None)

    def _full(self) -> Exception:
        where = f"task {self._prompt.task.id!r}: {self._segment.length} tokens"
        if not self._turn:  # nothing was sampled that could be scored
            more = " with what was added to the prompt" if self._talk.new else ""
            return ValueFault(f"{where}{more} leave no room in model.max_length")
        self._status = "truncated"
        return OutOfRoomError(f"{where} and the messages after them leave no room in model.max_length")

    def _sampling(self, max_tokens: int, stop: Sequence[str]) -> Sampling:
        base = self._context.sampling
        if max_tokens == base.max_tokens and not stop:
            return base
        strings, ids = self._context.codec.split_stops(stop) if stop else (base.stop, base.stop_token_ids)
        return attrs.evolve(base, max_tokens=max_tokens, stop=strings, stop_token_ids=ids)

    def _answer(self, text: str, ids: np.ndarray, *, prefill: str = "", ended: bool) -> Message:
        self._turn, self._sampled, self._pending = self._turn + 1, self._sampled + len(ids), None
        self._ended = ids if ended else NOTHING
        return self._talk.answer(text, ids, prefill)
