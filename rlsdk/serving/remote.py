"""Use an OpenAI-compatible server instead of engines, for debugging rollouts without Ray."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from rlsdk.contracts import Completion, Finish, Sampling
from rlsdk.engines.client import Answer, GenerateRequest
from rlsdk.errors import EngineError
from rlsdk.rollout.codec import ChatTokenizer

if TYPE_CHECKING:
    import httpx

_MOST = 500


@attrs.frozen
class Timed:
    """One answered request: its duration in seconds, and its tokens."""

    seconds: float
    tokens: int


class RemoteClient:
    """Sample through a server's `/completions`, with prompts as token ids.

    vLLM and `rlsdk debug engine` return token ids and logprobs. If a server does not, the text is tokenised here, and
    the logprobs are 0; `notes` say so.
    """

    def __init__(self, base_url: str, codec: ChatTokenizer, *, api_key: str = "", model: str = "") -> None:
        """Create a client.

        Args:
            base_url: URL without `/completions`.
            codec: Tokenizer of the served model.
            api_key: Key, if the server requires one.
            model: Name of the model on the server; by default, the first one listed.
        """
        self._url, self._codec, self._key, self._model = base_url.rstrip("/"), codec, api_key, model
        self._client: httpx.AsyncClient | None = None
        self._named: asyncio.Task[str] | None = None
        self._serial = itertools.count()
        self.notes: dict[str, None] = {}
        self.served: list[Timed] = []

    def sample(self, request: GenerateRequest) -> asyncio.Future[Answer]:
        """Request one continuation of a prompt, like `EngineClient.sample`; cancelling it closes its connection.

        Tokens arrive with the whole answer: `watch` sees nothing.

        Raises:
            EngineError: The prompt has images.
        """
        if request.images:
            raise EngineError(
                f"a conversation has an image, but {self._url}/completions accepts only token ids; try it "
                "in a short training (steps=1)"
            )
        return asyncio.ensure_future(self._ask(request.prompt, request.sampling, request.seed))

    async def close(self) -> None:
        """Close the connections."""
        client, self._client, self._named = self._client, None, None
        if client is not None:
            await client.aclose()

    async def _ask(self, prompt: np.ndarray, sampling: Sampling, seed: int | None) -> Answer:
        body: dict[str, Any] = {
            "model": await self._name(),
            "prompt": prompt.tolist(),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "logprobs": 1,
            "return_token_ids": True,
        }
        more = {
            "top_k": sampling.top_k,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
        }
        body |= {name: value for name, value in more.items() if value}  # servers reject unknown fields
        body |= {"seed": seed} if seed is not None else {}
        start = time.perf_counter()
        answer = self._read(await self._request("POST", "/completions", body))
        self.served.append(Timed(time.perf_counter() - start, len(answer.completion.token_ids)))
        return answer

    def _read(self, found: Any) -> Answer:
        try:
            choice = found["choices"][0]
            text, finish = "" + choice["text"], choice.get("finish_reason")  # TypeError unless it is text
            logprobs = list((choice.get("logprobs") or {}).get("token_logprobs") or [])
        except (LookupError, TypeError, AttributeError) as error:
            raise EngineError(f"{self._url}/completions: its answer is not a completion: {found!r:.{_MOST}}") from error
        reason: Finish = finish if finish in ("stop", "length", "abort") else "stop"
        ids = self._ids(choice, text, reason)
        if len(logprobs) != len(ids) or None in logprobs:
            self.notes["the server returns no logprobs: they are set to 0"] = None
            logprobs = [0.0] * len(ids)
        versions = choice.get("versions")
        completion = Completion(
            request=f"remote-{next(self._serial)}",
            index=0,
            token_ids=ids,
            logprobs=np.array(logprobs, np.float32),
            versions=np.array(versions if versions is not None else [0] * len(ids), np.int64),
            finish=reason,
        )
        return Answer(completion, self._codec.decode([ids])[0])

    def _ids(self, choice: Mapping[str, Any], text: str, finish: Finish) -> np.ndarray:
        ids = choice.get("token_ids")
        if isinstance(ids, list) and all(type(i) is int for i in ids):
            return np.array(ids, np.int64)
        self.notes["the server returns no token ids: its text is tokenised here, possibly not as sampled"] = None
        end = self._codec.end
        made = self._codec.encode(text)
        return np.append(made, end) if finish == "stop" and end is not None else made

    async def _name(self) -> str:
        if self._model:
            return self._model
        if self._named is None:
            self._named = asyncio.ensure_future(self._first_model())
        return await asyncio.shield(self._named)

    async def _first_model(self) -> str:
        found = await self._request("GET", "/models")
        try:
            return str(found["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise EngineError(f"{self._url}/models lists no model: {found!r:.{_MOST}}; name one") from error

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        import httpx

        if self._client is None:
            limits = httpx.Limits(max_connections=None)
            headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
            self._client = httpx.AsyncClient(
                timeout=httpx.Timeout(None, connect=10.0),
                limits=limits,
                headers=headers,
                trust_env=not self._url.startswith("http://127.0.0.1"),  # no proxy for this machine
            )
        try:
            response = await self._client.request(method, self._url + path, json=body)
        except httpx.TransportError as error:
            raise EngineError(
                f"nothing answers at {self._url} ({type(error).__name__}: {error}); is `rlsdk debug engine CONFIG` "
                "still running?"
            ) from error
        if response.status_code != 200:
            raise EngineError(f"{self._url}{path} answers with status {response.status_code}: {response.text[:_MOST]}")
        try:
            return response.json()
        except ValueError as error:
            raise EngineError(f"{self._url}{path}: its answer is not JSON: {response.text[:_MOST]!r}") from error
