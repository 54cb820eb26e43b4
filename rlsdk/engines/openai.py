"""The engine `openai`: any OpenAI-compatible server, for evaluation and debugging; its model cannot be trained."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Literal

import attrs
import numpy as np

from rlsdk.contracts import ActorSpec, Completion, Finish, Model, Request, Weights
from rlsdk.engines.checks import check_images, check_known, check_requests
from rlsdk.engines.continuation import unsampled
from rlsdk.engines.pretrained import end_ids, open_tokenizer
from rlsdk.errors import EngineError
from rlsdk.marks import engine
from rlsdk.preflight import is_loopback

log = logging.getLogger(__name__)
WAIT_SECONDS = 0.02
"""Maximum time in seconds that a step waits for answers."""
FIRST_RETRY = 0.5
"""Seconds before a refused request is sent again; doubled each time, up to `LONGEST_RETRY`."""
LONGEST_RETRY = 30.0
LONGEST_RECONNECT = 4.0
"""Longest wait after a connection that broke; then the server counts as gone."""
LATE_SECONDS = 1.0
"""Seconds after `timeout` at which an incomplete answer is late; httpx limits only the wait for its next bytes."""
_BUSY = (429, 502, 503, 504)
"""Status codes of servers that are busy."""
_SAID = 500
_REFUSAL = (
    "the engine `openai` samples on a server whose weights cannot be replaced and whose logprobs differ from those of "
    "the learner's model, so no model can be trained with it: evaluate with it (`rlsdk eval`), or train with "
    "engine=vllm or engine=transformers"
)


@attrs.define(eq=False)
class _Attempts:
    """Attempts to send one request.

    Attributes:
        aborted: Set to end the retries.
        until: Time at which the current attempt is late; infinite between two attempts.
    """

    aborted: threading.Event = attrs.field(factory=threading.Event)
    until: float = math.inf


@attrs.define(eq=False)
class _Asked:
    """A requested continuation."""

    request: Request
    index: int
    future: Future[Completion]
    attempts: _Attempts


@engine("openai")
@attrs.define(kw_only=True, eq=False, slots=False)
class OpenAI:
    """Sample through `/completions` of an OpenAI-compatible server: vLLM, SGLang, llama.cpp, rlsdk's own, or a service.

    `model.path` names a local model of the same family, whose tokenizer encodes prompts and decodes answers. Token ids
    and logprobs come from the server if it returns them, as vLLM and rlsdk do. Otherwise the text is tokenized here,
    possibly not as it was sampled, and logprobs are 0.

    Attributes:
        base_url: URL without `/completions`, such as http://127.0.0.1:8000/v1.
        model: Name of the model on the server; empty selects the first one that it lists.
        api_key_env: Environment variable that holds the API key; if it is not set, no key is sent.
        prompts: Format of prompts: token ids, or text for servers that do not accept ids.
        parallel: Maximum number of requests that run at once.
        timeout: Seconds within which a whole answer must arrive. A request that a busy server refuses (status 429, 502,
            503 or 504) is sent again within this time; after broken connections, a few times.
    """

    base_url: str
    model: str = ""
    api_key_env: str = "OPENAI_API_KEY"
    prompts: Literal["ids", "text"] = "ids"
    parallel: int = 64
    timeout: float = 600.0

    _client: Any = attrs.field(init=False, default=None)
    _threads: Any = attrs.field(init=False, default=None)
    _tokenizer: Any = attrs.field(init=False, default=None)
    _limit: int = attrs.field(init=False, default=0)
    _ends: tuple[int, ...] = attrs.field(init=False, default=())
    _asked: list[_Asked] = attrs.field(init=False, factory=list)

    def training_faults(self) -> Sequence[str]:
        """Return why no model can be trained on this engine's samples."""
        return [_REFUSAL]

    def environment(self, place: ActorSpec) -> Mapping[str, str]:
        """Return the actor's environment variables, including the API key, since actors do not inherit it."""
        key = os.environ.get(self.api_key_env, "")
        return place.environment() | ({self.api_key_env: key} if key else {})

    def start(self, model: Model, place: ActorSpec) -> None:
        """Open the tokenizer, and ask the server for its models.

        Raises:
            EngineError: The server does not answer, or lists no model.
        """
        import httpx

        key = os.environ.get(self.api_key_env, "")
        self._tokenizer, self._limit = open_tokenizer(model), model.max_length
        self._ends = end_ids(model, self._tokenizer)
        self._client = httpx.Client(
            timeout=httpx.Timeout(self.timeout, connect=10.0),
            limits=httpx.Limits(max_connections=self.parallel),
            headers={"authorization": f"Bearer {key}"} if key else {},
            trust_env=not is_loopback(self.base_url),
        )
        self._threads = ThreadPoolExecutor(self.parallel)
        if not self.model:
            try:
                models = self._threads.submit(self._call, "GET", "/models").result(self.timeout + LATE_SECONDS)
            except TimeoutError as error:
                raise EngineError(self._late("/models")) from error
            try:
                self.model = str(models["data"][0]["id"])
            except (LookupError, TypeError) as error:
                said = f"{self.base_url}/models lists no model: {models!r:.{_SAID}}"
                raise EngineError(f"{said}; set engine.model") from error

    def add(self, requests: Sequence[Request]) -> None:
        """Send one HTTP request for each continuation.

        Raises:
            ValueFault: A request cannot be generated, or its id is in use.
        """
        check_images(requests, None)
        check_requests(requests, max_length=self._limit, vocabulary=len(self._tokenizer))
        check_known([request.id for request in requests], (asked.request.id for asked in self._asked))
        for request in requests:
            for index in range(request.n):
                attempts = _Attempts()
                future = self._threads.submit(self._complete, request, index, attempts)
                self._asked.append(_Asked(request, index, future, attempts))

    def step(self) -> list[Completion]:
        """Wait briefly and return the completions that have arrived.

        Raises:
            EngineError: The server refused a request, did not answer in time, or could not be reached.
        """
        wait([asked.future for asked in self._asked], timeout=WAIT_SECONDS, return_when=FIRST_COMPLETED)
        done: list[_Asked] = []
        waiting: list[_Asked] = []
        for asked in self._asked:
            (done if asked.future.done() else waiting).append(asked)
        self._asked = waiting
        if any(time.monotonic() > asked.attempts.until for asked in waiting):
            raise EngineError(self._late("/completions"))
        return [asked.future.result() for asked in done]

    @property
    def unfinished(self) -> int:
        """Number of continuations without an answer."""
        return len(self._asked)

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        """Abort requests (None: all); what the server has sampled for them is lost."""
        wanted = None if ids is None else set(ids)
        ended = [asked for asked in self._asked if wanted is None or asked.request.id in wanted]
        self._asked = [asked for asked in self._asked if wanted is not None and asked.request.id not in wanted]
        for asked in ended:
            asked.future.cancel()
            asked.attempts.aborted.set()
        return [unsampled(asked.request.id, asked.index) for asked in ended]

    def reseed(self, seed: int) -> None:
        """Do nothing: the server has its own generator, and a request's seed is sent along."""

    def load_weights(self, weights: Weights) -> None:
        """Refuse.

        Raises:
            EngineError: Always.
        """
        raise EngineError(_REFUSAL)

    def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """Refuse.

        Raises:
            EngineError: Always.
        """
        raise EngineError(_REFUSAL)

    def sleep(self) -> None:
        """Do nothing: this engine holds no device."""

    def wake(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Close the connections."""
        for asked in self._asked:
            asked.attempts.aborted.set()
        if self._client is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._client.close()
        self._asked = []

    def _complete(self, request: Request, index: int, attempts: _Attempts) -> Completion:
        sampling, room = request.sampling, min(request.sampling.max_tokens, self._limit - len(request.prompt_ids))
        body, retry_until = self._body(request, index, room), time.monotonic() + self.timeout
        answer = self._call("POST", "/completions", body, attempts, retry_until=retry_until)
        try:
            choice = answer["choices"][0]
            text, reason = choice["text"], choice.get("finish_reason")
        except (LookupError, TypeError, AttributeError) as error:
            said = f"{self.base_url}/completions: the answer is not a completion: {answer!r:.{_SAID}}"
            raise EngineError(said) from error
        finish: Finish = reason if reason in ("stop", "length") else "stop"
        tokens = choice.get("token_ids")
        if not isinstance(tokens, list):
            tokens = self._tokenizer.encode(text, add_special_tokens=False)
            if finish == "stop" and self._ends and not text.endswith(sampling.stop or ("\0",)):
                tokens = [*tokens, self._ends[0]]
        tokens = tokens[:room]  # tokenizing the text here may give more tokens than were sampled
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        known = len(logprobs) == len(tokens) and None not in logprobs
        return Completion(
            request=request.id,
            index=index,
            token_ids=np.array(tokens, np.int64),
            logprobs=np.array(logprobs, np.float32) if known else np.zeros(len(tokens), np.float32),
            versions=np.zeros(len(tokens), np.int64),
            finish=finish,
        )

    def _body(self, request: Request, index: int, room: int) -> dict[str, Any]:
        """Return the fields of a call of `/completions` that samples at most `room` tokens."""
        sampling, ids = request.sampling, request.prompt_ids
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": ids.tolist() if self.prompts == "ids" else self._tokenizer.decode(ids),
            "max_tokens": room,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if self.prompts == "ids":  # a server that accepts ids may return them, too
            body |= {"logprobs": 1, "return_token_ids": True}
        if request.seed is not None:
            body["seed"] = (request.seed + index) % 2**31
        optional = {
            "top_k": sampling.top_k,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            "include_stop_str_in_output": bool(sampling.stop) and self.prompts == "ids",
        }
        return body | {name: value for name, value in optional.items() if value}

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        attempts: _Attempts | None = None,
        *,
        retry_until: float = 0.0,
    ) -> Any:
        import httpx

        wait, attempts = FIRST_RETRY, attempts or _Attempts()
        while True:
            late = time.monotonic() + wait > retry_until
            attempts.until = time.monotonic() + self.timeout + LATE_SECONDS
            try:
                response = self._client.request(method, self.base_url.rstrip("/") + path, json=body)
            except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
                raise EngineError(self._late(path)) from error
            except httpx.TransportError as error:
                # A server may close an idle connection just when it is used again.
                if late or wait > LONGEST_RECONNECT or isinstance(error, httpx.TimeoutException):
                    raise EngineError(f"{self.base_url} cannot be reached ({type(error).__name__}: {error})") from error
                reason = f"{type(error).__name__}: {error}"
            else:
                if late or response.status_code not in _BUSY:
                    break
                reason = f"status {response.status_code}"
            attempts.until = math.inf
            log.warning("%s%s: %s; retry in %g s", self.base_url, path, reason, wait)
            if attempts.aborted.wait(wait):
                raise EngineError("the request was aborted")
            wait = min(2 * wait, LONGEST_RETRY)
        if response.status_code in (401, 403):
            raise EngineError(
                f"{self.base_url}{path} answered with status {response.status_code}: set the key in the environment "
                f"variable {self.api_key_env} (engine.api_key_env)"
            )
        if response.status_code != 200:
            reason = response.text[:_SAID]
            raise EngineError(f"{self.base_url}{path} answered with status {response.status_code}: {reason}")
        try:
            return response.json()
        except ValueError as error:
            reason = response.text[:_SAID]
            raise EngineError(f"{self.base_url}{path}: the answer is not JSON: {reason!r}") from error

    def _late(self, path: str) -> str:
        return f"{self.base_url}{path} gave no complete answer within {self.timeout:g} s (engine.timeout)"
