"""OpenAI's API on the engines, without recording, for `--mode serve` and `debug engine`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import attrs
import numpy as np

from rlsdk.cluster.actors import cause_of
from rlsdk.config import Plan
from rlsdk.contracts import CallsTools, Sampling
from rlsdk.engines.client import Answer, EngineClient, GenerateRequest, Watch
from rlsdk.errors import EngineError, RlsdkError, ValueFault
from rlsdk.rollout.chat import RolloutContext
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.serving.context import context_of
from rlsdk.serving.http_server import Routes
from rlsdk.serving.messages import AnswerHead, APIError, HttpReply, TokenLogprobs, models, text_logprobs, tokens_used
from rlsdk.serving.requests import (
    ChatAnswer,
    ChatReplies,
    all_answers,
    answered,
    expect_readable,
    full,
    opening,
    until_stop,
)
from rlsdk.serving.streaming import LiveAnswer, sampled_live
from rlsdk.serving.wire import ChatCompletionRequest, CompletionRequest, GenerationRequest, read_chat, read_completion
from rlsdk.tool_calls import Dialect
from rlsdk.types import Message

NO_IMAGES: Mapping[str, Any] = {}


class EngineService:
    """Answers `/completions` (also for token ids) and `/chat/completions` with the engines and settings of a run.

    A request may override temperature, top-p, top-k, seed, length and stop strings.

    Attributes:
        step: Training step of the served weights; None if unknown.
    """

    def __init__(self, context: RolloutContext, model: str, dialect: Dialect, *, strict: bool = False) -> None:
        """Create a service; a strict one rejects other model names and unsupported fields instead of ignoring them."""
        self._context, self._model, self._dialect, self._strict = context, model, dialect, strict
        self._serial = itertools.count()
        self.step: int | None = None

    @classmethod
    def of(cls, plan: Plan, engines: Sequence[Any], model: str = "", *, strict: bool = False) -> EngineService:
        """Create the service of a plan's engines; the name of the model is by default its path."""
        codec = ChatTokenizer.of(plan)
        context = context_of(plan, codec, EngineClient(engines, codec.decode))
        return cls(context, model or plan.config.model.path, tool_parser_of(plan, codec), strict=strict)

    @property
    def routes(self) -> Routes:
        """The handler of each method and path."""
        return {
            "POST /completions": self._complete,
            "POST /chat/completions": self._chat,
            "GET /models": self._models,
        }

    def model(self, name: str) -> HttpReply:
        """Answer `/models/NAME`."""
        if name != self._model:
            raise self._no_model(name)
        return HttpReply(body=self._listed().body["data"][0])

    def _listed(self) -> HttpReply:
        facts = {} if self.step is None else {"step": self.step}
        return models([self._model], max_model_len=self._context.max_length, **facts)

    async def _models(self, _: Any) -> HttpReply:
        return self._listed()

    def _no_model(self, name: str) -> APIError:
        fault = f"model: unknown model {name!r}; this server serves {self._model!r}"
        return APIError(fault, status=404, code="model_not_found", param="model")

    async def _chat(self, body: Any) -> HttpReply:
        asked = read_chat(body, strict=self._strict)
        head = self._head(asked, "chatcmpl")
        expect_readable(asked, self._context)
        begin = await opening(asked, self._context.codec, self._dialect)
        sampling, ids = self._sampling(asked, len(begin.token_ids)), begin.token_ids
        replies = ChatReplies(asked=asked, head=head, codec=self._context.codec, dialect=self._dialect)

        async def start(watch: Watch | None) -> ChatAnswer:
            answer = await self._sample(head.id, ids, sampling, asked.seed, watch, begin.images)
            done, codec = answer.completion, self._context.codec
            message = answered(done.token_ids, asked, codec, self._dialect, continued=bool(asked.prefill))
            return ChatAnswer(message, done, len(ids))

        starts = [start] * asked.n
        if asked.stream:
            return self._reply(head, events=replies.streamed(starts))
        return self._reply(head, body=await replies.whole(starts))

    async def _complete(self, body: Any) -> HttpReply:
        asked = read_completion(body, strict=self._strict)
        head = self._head(asked, "cmpl")
        prompts = await self._prompts(asked)
        starts: list[Any] = []
        for number, ids in enumerate(prompts):
            sampling = self._sampling(asked, len(ids))
            one = partial(self._sample, f"{head.id}/{number}", ids, sampling, asked.seed)
            starts += [one] * asked.n
        replies = _TextReplies(asked, head, self._context, prompts)
        if asked.stream:
            return self._reply(head, events=replies.streamed(starts))
        return self._reply(head, body=replies.whole(await all_answers(starts)))

    def _head(self, asked: GenerationRequest, kind: str) -> AnswerHead:
        if self._strict and asked.model not in ("", self._model):
            raise self._no_model(asked.model)
        model = self._model if self._strict else asked.model or self._model
        fingerprint = None if self.step is None else f"step-{self.step}"
        return AnswerHead(id=f"{kind}-{next(self._serial)}", model=model, fingerprint=fingerprint)

    @staticmethod
    def _reply(head: AnswerHead, **what: Any) -> HttpReply:
        known = head.fingerprint
        return HttpReply(**what, headers={} if known is None else {"x-rlsdk-step": known.removeprefix("step-")})

    async def _prompts(self, asked: CompletionRequest) -> list[np.ndarray]:
        """Check all prompts, then tokenise them."""
        codec, room = self._context.codec, self._context.max_length
        for prompt in asked.prompts:
            if isinstance(prompt, str) and len(prompt) > room * codec.longest:
                raise full(ValueFault(f"a prompt of {len(prompt)} characters cannot fit in {room} tokens"), "prompt")
            if not isinstance(prompt, str) and (greatest := max(prompt)) >= codec.size:
                raise APIError(f"prompt: token {greatest} is not in the vocabulary of {codec.size}", param="prompt")

        def encode() -> list[np.ndarray]:
            return [
                codec.prompt_tokens((Message("user", prompt),), plain=True)
                if isinstance(prompt, str)
                else np.array(prompt, np.int64)
                for prompt in asked.prompts
            ]

        return await asyncio.to_thread(encode)

    def _sampling(self, asked: GenerationRequest, prompt: int) -> Sampling:
        """Return the sampling parameters for a prompt of this length."""
        room = self._context.max_length - prompt
        if room < 1:
            what = "messages" if isinstance(asked, ChatCompletionRequest) else "prompt"
            raise full(ValueFault(f"{prompt} tokens leave no room in {self._context.max_length}"), what)
        base, codec = self._context.sampling, self._context.codec
        given = {name: value for name, value in asked.sampling.items() if name != "stop_token_ids"}
        if "top_k" in given:
            given["top_k"] = max(0, given["top_k"])  # other servers use -1 for off
        stops, ids = codec.split_stops(asked.stop) if asked.stop else (base.stop, base.stop_token_ids)
        return attrs.evolve(
            base,
            max_tokens=min(room, asked.max_tokens or base.max_tokens),
            stop=stops,
            stop_token_ids=(*ids, *asked.sampling.get("stop_token_ids", ())),
            top_logprobs=asked.top_logprobs or 0,
            **given,
        )

    async def _sample(
        self,
        group: str,
        prompt: np.ndarray,
        sampling: Sampling,
        seed: int | None,
        watch: Watch | None,
        images: Mapping[str, Any] = NO_IMAGES,
    ) -> Answer:
        client: Any = self._context.client
        request = GenerateRequest(group, prompt, sampling, seed=seed, watch=watch, **images)
        try:
            answer: Answer = await client.sample(request)
        except Exception as error:
            cause = cause_of(error)
            if isinstance(cause, ValueFault):  # the engine rejected this request, but is alive
                raise APIError(str(cause)) from error
            if isinstance(cause, RlsdkError):
                raise cause from error
            # The traceback of the engine's process stays in the log.
            raise EngineError(f"{type(cause).__name__}; see the log") from error
        return answer


def tool_parser_of(plan: Plan, codec: ChatTokenizer) -> Dialect:
    """Return the tool parser of a plan's workflow or, if the workflow does not set one, of its model."""
    workflow = plan.plugins.resolve(plan.workflow)
    named = workflow.dialect if isinstance(workflow, CallsTools) else None
    return named or Dialect.of(codec.tool_parser)


class _TextReplies:
    """Writes the answers to one `/completions` request."""

    def __init__(
        self, asked: CompletionRequest, head: AnswerHead, context: RolloutContext, prompts: Sequence[np.ndarray]
    ) -> None:
        self._asked, self._head, self._codec, self._prompts = asked, head, context.codec, prompts

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = []
        for i, answer in enumerate(answers):
            done = answer.completion
            tokens = TokenLogprobs(done.token_ids, done.logprobs, done.top)
            choices.append(self._choice(i, self._text(answer), tokens, done.finish) | self._ids(i, answer))
        return self._head.write("text_completion", choices, self._usage(answers))

    async def streamed(self, starts: Sequence[Any]) -> AsyncGenerator[dict[str, Any], None]:
        live = [LiveAnswer(self._codec, self._asked.stop) for _ in starts]
        done: list[Answer] = []
        async with aclosing(sampled_live(starts)) as events:
            async for i, sampled, answer in events:
                if sampled is not None:
                    live[i].feed(sampled)
                    offset = len(live[i].sent)
                    if text := live[i].take_text():
                        yield self._chunk(self._choice(i, text, live[i].take_tokens(), None, offset))
                elif answer is not None:
                    done.append(answer)
                    offset = len(live[i].sent)
                    rest, tokens = live[i].take_rest(self._text(answer)), live[i].take_tokens(answer.completion)
                    last = self._choice(i, rest, tokens, answer.completion.finish, offset)
                    yield self._chunk(last | self._ids(i, answer))
        if self._asked.stream_usage:
            yield self._head.write("text_completion", [], self._usage(done))

    def _chunk(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        return self._head.write("text_completion", [choice])

    def _text(self, answer: Answer) -> str:
        return until_stop(answer.text, self._asked.stop)

    def _choice(self, i: int, text: str, tokens: TokenLogprobs, finish: str | None, offset: int = 0) -> dict[str, Any]:
        logprobs = None if self._asked.top_logprobs is None else text_logprobs(self._codec, tokens, offset)
        finish = "length" if finish == "abort" else finish
        return {"index": i, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _ids(self, i: int, answer: Answer) -> dict[str, Any]:
        if not self._asked.return_token_ids:
            return {}
        done = answer.completion
        prompt = self._prompts[i // self._asked.n].tolist()
        return {"token_ids": done.token_ids.tolist(), "versions": done.versions.tolist(), "prompt_token_ids": prompt}

    def _usage(self, answers: Sequence[Answer]) -> dict[str, int]:
        sampled = sum(len(answer.completion.token_ids) for answer in answers)
        return tokens_used(sum(map(len, self._prompts)), sampled)
