"""Debug without training: serve the engines, or run a workflow on one task against any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from rlsdk import preflight
from rlsdk.cluster.placement import layout, ray_cluster
from rlsdk.cluster.watched import watched
from rlsdk.config import Plan
from rlsdk.engines.client import EngineClient
from rlsdk.engines.starting import start_engines, started_engines
from rlsdk.errors import ConfigError, DataError
from rlsdk.isolation.reaper import reaped
from rlsdk.isolation.watching import main_loop
from rlsdk.readiness.checks import machine
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.rollout.generator import RolloutGenerator, first_error
from rlsdk.rollout.stream import opened
from rlsdk.scoring.actors import scoring
from rlsdk.scoring.scorer import Scorer
from rlsdk.serving.context import context_of
from rlsdk.serving.endpoint import endpoint
from rlsdk.serving.remote import RemoteClient, Timed
from rlsdk.serving.stateless import EngineService, tool_parser_of
from rlsdk.types import Group, Rollout, Score, Task

log = logging.getLogger(__name__)
FILE = "debug.json"
"""File in the run's folder with the address of the running engine, readable only by its owner."""


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
    """Start the engines of a plan and serve them on this machine until SIGINT or SIGTERM.

    Args:
        plan: The plan; its learner is not started.
        ready: Called with the base URL once requests are accepted.

    Raises:
        ConfigError: The plan generates nothing.
        EngineError: An engine did not start.
        RunError: A process was silent for too long.
    """
    if not plan.needs_engine:
        raise ConfigError(["algorithm: it trains on demonstrations and generates nothing, so there is no engine"])
    preflight.require(map(str, machine(plan, trains=False)))
    (plan.folder / "logs").mkdir(parents=True, exist_ok=True)
    with watched(plan.config.watchdog, "serving"), reaped(), ray_cluster(plan) as gpus:
        found = layout(plan, os.cpu_count() or 1, gpus, roles=["engine"])
        engines = started_engines(plan, start_engines(plan, found, replaced=False))
        asyncio.run(_serve(plan, engines, ready))


async def _serve(plan: Plan, engines: list[Any], ready: Callable[[str], None]) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    codec = ChatTokenizer.of(plan)
    context = context_of(plan, codec, EngineClient(engines, codec.decode))
    service = EngineService(context, plan.config.model.path, tool_parser_of(plan, codec))
    place = (await endpoint()).mount(service.routes)
    with main_loop(), _announced(plan.folder / FILE, place.base_url):
        ready(place.base_url)
        await ended.wait()


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
