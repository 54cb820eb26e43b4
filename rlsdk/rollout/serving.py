"""Engines as an OpenAI-compatible server that records nothing: for debugging."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import attrs
import numpy as np

from rlsdk.contracts import Sampling
from rlsdk.errors import EngineError, OutOfRoomError, RlsdkError, ValueFault
from rlsdk.rollout import wire
from rlsdk.rollout.chat import Setting
from rlsdk.rollout.client import Answer
from rlsdk.rollout.endpoint import Routes
from rlsdk.rollout.recording import answered, begun, full, replied
from rlsdk.rollout.wire import ChatAsked, Reply, TextAsked
from rlsdk.types import Message, Task
from rlsdk.workflows.dialects import Dialect


class EngineService:
    """Answers `/completions`, with tokens, and `/chat/completions`, by the settings of a run.

    Temperature, top-p, top-k, seed, length and stops are those of a request, where it says some.
    """

    def __init__(self, setting: Setting, model: str, dialect: Dialect) -> None:
        """Make one.

        Args:
            setting: Codec, engines, sampling.
            model: Its name for clients; any other is served, too.
            dialect: Of calls of tools.
        """
        self._setting, self._model, self._dialect = setting, model, dialect
        self._serial = itertools.count()

    @property
    def routes(self) -> Routes:
        """What is served."""
        return {
            "POST /completions": self._complete,
            "POST /chat/completions": self._chat,
            "GET /models": self._models,
        }

    async def _models(self, _: Any) -> Reply:
        return wire.models([self._model])

    async def _chat(self, body: Any) -> Reply:
        asked = wire.read_chat(body)
        group = f"chatcmpl-{next(self._serial)}"
        task = Task(id=group, prompt=tuple(Message(said.role, said.content) for said in asked.messages))
        setting = attrs.evolve(self._setting, sampling=self._sampling(asked))
        chat = begun(asked, task, setting, group, asked.seed, self._dialect)
        try:
            message = await chat.sample(max_tokens=asked.max_tokens, stop=asked.stop)
        except (OutOfRoomError, ValueFault) as error:
            raise full(error) from error
        except Exception as error:
            raise _failed(error) from error
        done = chat.finish()
        sampled = int(np.count_nonzero(done.loss_mask))
        answer = answered(message.content, asked, self._dialect, f"call_{group}")
        return replied(asked, answer, chat.status, group, len(done.loss_mask) - sampled, sampled)

    async def _complete(self, body: Any) -> Reply:
        asked = wire.read_text(body)
        prompt = self._prompt(asked)
        room = self._setting.max_length - len(prompt)
        if room < 1:
            raise full(ValueFault(f"a prompt of {len(prompt)} tokens leaves no room in {self._setting.max_length}"))
        base = self._sampling(asked)
        stops, ids = self._setting.codec.split_stops(asked.stop) if asked.stop else (base.stop, base.stop_token_ids)
        limit = min(room, asked.max_tokens or base.max_tokens)
        given = asked.sampling.get("stop_token_ids", ())
        sampling = attrs.evolve(base, max_tokens=limit, stop=stops, stop_token_ids=(*ids, *given))
        group = f"cmpl-{next(self._serial)}"
        client: Any = self._setting.client
        try:
            waiting = [client.sample(group, prompt, sampling, seed=asked.seed) for _ in range(asked.n)]
            answers = await asyncio.gather(*waiting)
        except Exception as error:
            raise _failed(error) from error
        return self._told(asked, group, prompt, answers)

    def _prompt(self, asked: TextAsked) -> np.ndarray:
        codec = self._setting.codec
        if isinstance(asked.prompt, str):
            return codec.opening((Message("user", asked.prompt),), plain=True)
        return np.array(asked.prompt, np.int64)

    def _sampling(self, asked: TextAsked | ChatAsked) -> Sampling:
        given = {name: value for name, value in asked.sampling.items() if name != "stop_token_ids"}
        if "top_k" in given:
            given["top_k"] = max(0, given["top_k"])  # others write -1 for none
        return attrs.evolve(self._setting.sampling, **given)

    def _told(self, asked: TextAsked, group: str, prompt: np.ndarray, answers: list[Answer]) -> Reply:
        choices = []
        for index, answer in enumerate(answers):
            done, codec = answer.completion, self._setting.codec
            ids = done.token_ids
            logprobs = {
                "tokens": [codec.shown(ids[i : i + 1]) for i in range(len(ids))],
                "token_logprobs": [float(value) for value in done.logprobs],
            }
            choices.append(
                {
                    "index": index,
                    "text": answer.text,
                    "finish_reason": done.finish,
                    "logprobs": logprobs,
                    "token_ids": ids.tolist(),
                    "versions": done.versions.tolist(),
                    "prompt_token_ids": prompt.tolist(),
                }
            )
        sampled = sum(len(answer.completion.token_ids) for answer in answers)
        head = {"id": group, "object": "text_completion", "created": int(time.time())}
        model = asked.model or self._model
        usage = wire.tokens_used(len(prompt), sampled)
        return Reply(body={**head, "model": model, "choices": choices, "usage": usage})


def _failed(error: Exception) -> RlsdkError:
    """What failed in an engine, told to the client."""
    return error if isinstance(error, RlsdkError) else EngineError(f"{type(error).__name__}: {error}")
