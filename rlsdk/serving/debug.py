"""Debug without training: serve the engines, or run a workflow on one task against any OpenAI-compatible server.

Such a server is used in place of engines, without Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from rlsdk import preflight
from rlsdk.cluster.placement import ray_cluster
from rlsdk.cluster.watched import watched
from rlsdk.config import Plan
from rlsdk.contracts import Completion, Finish, Sampling
from rlsdk.engines.client import Answer, GenerateRequest
from rlsdk.engines.starting import engine_clocks, engines_alone
from rlsdk.errors import ConfigError, DataError, EngineError
from rlsdk.isolation.reaper import reaped
from rlsdk.isolation.watching import main_loop
from rlsdk.loops.signals import on_interrupt
from rlsdk.readiness.checks import machine
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.rollout.generator import RolloutGenerator, first_error
from rlsdk.rollout.stream import opened
from rlsdk.runlog.logs import log_console, log_to
from rlsdk.scoring.actors import scoring
from rlsdk.scoring.scorer import Scorer
from rlsdk.serving.context import context_of
from rlsdk.serving.http_server import endpoint
from rlsdk.serving.stateless import EngineService
from rlsdk.types import Group, Rollout, Score, Task

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)
FILE = "debug.json"
"""File in the run's folder with the address of the running engine, readable only by its owner."""
POLL_SECONDS = 2.0


@attrs.frozen
class Debugged:
    """Result of a workflow on one task.

    Attributes:
        group: Rollouts and scores of the task.
        seconds: Seconds from the start to the end of each rollout, with its scoring.
        requests: Requests to the engine.
        notes: Remarks about the server, for the user.
        codec: Tokenizer, for showing tokens.
    """

    group: Group
    seconds: tuple[float, ...]
    requests: tuple[Timed, ...]
    notes: tuple[str, ...]
    codec: ChatTokenizer


def serve_engines(plan: Plan, ready: Callable[[str], None]) -> None:
    """Start a plan's engines and serve them on this machine until SIGINT or SIGTERM; `ready` gets the base URL.

    Raises:
        ConfigError: The plan generates nothing.
        EngineError: An engine did not start, or died.
        RunError: A process was silent for too long.
    """
    if not plan.needs_engine:
        raise ConfigError(["algorithm: it trains on demonstrations and generates nothing, so there is no engine"])
    preflight.require(map(str, machine(plan, trains=False)))
    (plan.folder / "logs").mkdir(parents=True, exist_ok=True)
    log_to(plan, log_console())
    with watched(plan.config.watchdog, "serving"), reaped(), ray_cluster(plan) as gpus:
        asyncio.run(_serve(plan, engines_alone(plan, gpus), ready))


async def _serve(plan: Plan, engines: list[Any], ready: Callable[[str], None]) -> None:
    ended = asyncio.Event()
    on_interrupt(ended.set)
    place = (await endpoint()).mount(EngineService.of(plan, engines).routes)
    with main_loop(), _announced(plan.folder / FILE, place.base_url):
        ready(place.base_url)
        watching = asyncio.create_task(_until_an_engine_fails(engines))
        watching.add_done_callback(lambda _: ended.set())
        await ended.wait()
        if watching.done():
            watching.result()  # raises the error of an engine
        watching.cancel()


async def _until_an_engine_fails(engines: Sequence[Any]) -> None:
    while True:
        await asyncio.sleep(POLL_SECONDS)
        await engine_clocks(engines)


@contextmanager
def _announced(file: Path, base_url: str) -> Iterator[None]:
    """Write the engine's address to a file readable only by its owner, and delete it after the block."""
    text = json.dumps({"base_url": base_url, "api_key": "", "pid": os.getpid()})
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        out.write(text)
    partial.replace(file)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            if file.read_text(encoding="utf-8") == text:  # otherwise it already names another engine
                file.unlink()


def find_engine(plan: Plan) -> tuple[str, str]:
    """Return the base URL and key of the engine served by `serve_engines` for the same run.

    Raises:
        ConfigError: No engine is served.
    """
    file = plan.folder / FILE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return str(found["base_url"]), str(found["api_key"])
    except FileNotFoundError as error:
        ways = "start `rlsdk debug engine CONFIG` in another terminal, or give a server with --url"
        raise ConfigError([f"there is no {file}, so no engine serves this run: {ways}"]) from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError([f"{file} cannot be read: {error}; delete it, and start the engine again"]) from error


def debug_workflow(
    plan: Plan, task: int = 0, *, samples: int = 1, url: str = "", api_key: str = "", model: str = ""
) -> Debugged:
    """Run a plan's workflow on one task against a server, and score it as in training.

    Args:
        plan: The plan; no engine or learner is started.
        task: Index among the training tasks of all sources, in order.
        samples: Number of rollouts.
        url: Base URL of an OpenAI-compatible server; by default, the engine served by `serve_engines` for this run.
        api_key: Key for the server.
        model: Name of the model on the server; by default, the first one listed.

    Raises:
        ConfigError: There is no server, or the plan's settings contradict each other.
        DataError: There is no such task.
        EngineError: The server fails.
    """
    if not url:
        url, api_key = find_engine(plan)
    chosen = _task(plan, task)
    codec = ChatTokenizer.of(plan)
    client = RemoteClient(url, codec, api_key=api_key, model=model)
    seconds: list[tuple[Rollout, float]] = []
    start = time.perf_counter()

    def observe(rollout: Rollout, _: Score, __: int) -> None:
        seconds.append((rollout, time.perf_counter() - start))

    async def play(scorer: Scorer | None) -> Group:
        generator = RolloutGenerator(plan.plugins.resolve(plan.workflow), scorer, None, observe)
        try:
            groups = await generator.produce([chosen], context_of(plan, codec, client), samples, "debug")
            return groups[0]
        finally:
            await client.close()

    with scoring(plan) as scorer:
        try:
            group = asyncio.run(play(scorer))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
    took = tuple(next(each for rollout, each in seconds if rollout is mine) for mine in group.rollouts)
    return Debugged(group, took, tuple(client.served), tuple(client.notes), codec)


def _task(plan: Plan, position: int) -> Task:
    left = position
    for source in plan.tasks_train:
        tasks = opened(source, plan.plugins)
        if left < len(tasks):
            return tasks[left]
        left -= len(tasks)
    raise DataError(f"task {position}: tasks.train has {position - left}, from 0 to {position - left - 1}")


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
        """Create a client; `base_url` has no `/completions`, and the model is by default the first one listed."""
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
        given = choice.get("token_ids")
        if isinstance(given, list) and all(type(i) is int for i in given):
            ids = np.array(given, np.int64)
        else:
            self.notes["the server returns no token ids: its text is tokenised here, possibly not as sampled"] = None
            ids = self._codec.encode(text)
            if reason == "stop" and self._codec.end is not None:
                ids = np.append(ids, self._codec.end)
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
                trust_env=not preflight.is_loopback(self._url),
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
