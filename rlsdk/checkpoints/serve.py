"""Serve a run's newest checkpoint with an OpenAI-compatible server; newer ones are loaded as they are written."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from rlsdk import preflight
from rlsdk.checkpoints.checkpoint import Checkpoints
from rlsdk.checkpoints.export import export
from rlsdk.checkpoints.mirror import local_copy, uploads
from rlsdk.cluster.placement import ray_cluster
from rlsdk.cluster.watched import watched
from rlsdk.config import Plan
from rlsdk.contracts import Weights
from rlsdk.engines.starting import engine_clocks, engines_alone, load_weights
from rlsdk.errors import CheckpointError, ConfigError, RlsdkError, RunError
from rlsdk.isolation.reaper import reaped
from rlsdk.isolation.scratch import scratch_folder
from rlsdk.isolation.watching import main_loop
from rlsdk.loops.signals import on_interrupt
from rlsdk.readiness.checks import machine
from rlsdk.runlog.folder import remove_compiled
from rlsdk.runlog.logs import log_console, log_to
from rlsdk.serving.server import PublicServer, ServerOptions
from rlsdk.serving.stateless import EngineService
from rlsdk.storage.location import is_url
from rlsdk.weights import to_weights

log = logging.getLogger(__name__)
FOLDER = "serve"
"""Folder within the run's folder for logs and caches of the serving engines; the run may still be training."""
POLL_SECONDS = 2.0
REMOTE_EVERY = 15
"""A run at a URL is checked only every this many polls."""
_COUNTERS = {"tokens": "sampled_tokens_total", "prompt_tokens": "prompt_tokens_total"}


class CheckpointReader:
    """Read the models of a run's checkpoints, the newest intact one first and each at most once.

    Attributes:
        remote: True if the run is at a URL, which is checked less often.
    """

    def __init__(self, plan: Plan, files: Sequence[str | Path], scratch: Path) -> None:
        """Create a reader."""
        self._plan, self._files, self._scratch = plan, files, scratch
        self._checkpoints = Checkpoints(plan.folder, plan.config.checkpoint.keep)
        self._seen: set[tuple[int, str]] = set()
        self._said = ""
        self.remote = is_url(plan.config.out)

    def read_newest(self) -> Weights | None:
        """Read the newest checkpoint if it appeared since the last call; damaged ones are skipped.

        A download that fails is tried again by the next call.

        Returns:
            Weights, with the step as their version; None if there is nothing new.
        """
        try:
            written = self._written()
        except RunError as error:
            self._warn(f"cannot look for new checkpoints: {error}")
            return None
        for found in written:
            if found in self._seen:
                return None
            self._seen.add(found)
            try:
                return self._read(found[0])
            except (CheckpointError, RunError, OSError) as error:  # the training may have just removed it
                self._warn(f"the checkpoint of step {found[0]} will not be served: {error}")
                if self.remote and not isinstance(error, CheckpointError):
                    self._seen.remove(found)
                    return None
        return None

    def _warn(self, text: str) -> None:
        """Log a warning once, although the reader is called every few seconds."""
        if text != self._said:
            log.warning("%s", text)
        self._said = text

    def _written(self) -> list[tuple[int, str]]:
        """Return the steps of checkpoints, newest first, each with what tells it from an earlier one of its step.

        Raises:
            RunError: The run is at a URL that cannot be reached.
        """
        if self.remote:
            return [(copy.step, copy.id) for copy in reversed(uploads(self._plan.location).values())]
        found = []
        for step in reversed(self._checkpoints.steps()):
            with suppress(FileNotFoundError):  # the training has just removed it
                state = self._checkpoints.path(step) / "state.json"
                found.append((step, str(state.stat().st_mtime_ns)))
        return found

    def _read(self, step: int) -> Weights:
        from safetensors.torch import load_file

        folder = self._scratch / f"step-{step}"
        try:
            with local_copy(self._plan.location, step=step) as run:
                export(run, folder, step=step, plugins=self._files, named=self._plan.tree)
            tensors: dict[str, Any] = {}
            for file in sorted(folder.glob("*.safetensors")):
                tensors |= load_file(file)
            return to_weights(step, tensors, copy=False)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def serve_run(
    plan: Plan,
    files: Sequence[str | Path],
    options: ServerOptions,
    ready: Callable[[str, int | None], None],
) -> None:
    """Serve a run's newest checkpoint until SIGINT or SIGTERM; before the first one, serve the initial model.

    Newer checkpoints are loaded as they appear; requests in progress continue with the new weights. Once requests are
    accepted, `ready` is called with the base URL and the served step.

    Raises:
        ConfigError: The plan has no generation, or the server would be open to other machines.
        EnvironmentFault: The address is in use.
        EngineError: An engine did not start, or died.
        RunError: A process was silent for too long.
    """
    if not plan.needs_engine:
        raise ConfigError(["algorithm: it trains on demonstrations, so there is no engine to serve"])
    options.check()
    preflight.require(map(str, machine(plan, trains=False)))
    serving_plan = attrs.evolve(plan, config=attrs.evolve(plan.config, out=str(plan.folder), name=FOLDER))
    (serving_plan.folder / "logs").mkdir(parents=True, exist_ok=True)
    log_to(serving_plan, log_console(), "server.log")
    remove_compiled(serving_plan.folder)
    taken = options.bind()
    with (
        taken,
        watched(plan.config.watchdog, "serving"),
        reaped(),
        scratch_folder("rlsdk-serve-") as scratch,
        ray_cluster(plan) as gpus,
    ):
        reader = CheckpointReader(plan, files, scratch)
        # Before the engines start: for a checkpoint without an export, a learner must write one, which needs memory.
        first = reader.read_newest()
        engines = engines_alone(serving_plan, gpus)
        asyncio.run(_Serving(plan, engines, reader, options).run(taken, first, ready))


class _Serving:
    """Server of the engines that loads new weights."""

    def __init__(self, plan: Plan, engines: Sequence[Any], reader: CheckpointReader, options: ServerOptions) -> None:
        self._service = EngineService.of(plan, engines, options.name, strict=True)
        self._engines, self._reader = engines, reader
        self._counters: dict[str, float] = {}
        self._server = PublicServer(self._service, options, lambda: self._counters)

    async def run(self, taken: socket.socket, first: Weights | None, ready: Callable[[str, int | None], None]) -> None:
        ended, forced = asyncio.Event(), asyncio.Event()

        def end() -> None:
            (forced if ended.is_set() else ended).set()

        on_interrupt(end)
        self._service.step = 0
        with main_loop():
            if first is not None:
                await self._load(first)
            url = await self._server.start(taken)
            ready(url, self._service.step)
            following = asyncio.create_task(self._follow())
            following.add_done_callback(lambda _: ended.set())
            await ended.wait()
            if following.done():
                following.result()  # raises the error of an engine
            following.cancel()
            log.info("ending once the requests in progress are finished; interrupt again to end at once")
            stopping, waiting = asyncio.create_task(self._server.stop()), asyncio.create_task(forced.wait())
            await asyncio.wait({stopping, waiting}, return_when=asyncio.FIRST_COMPLETED)

    async def _follow(self) -> None:
        """Load new checkpoints as they appear; raise when an engine dies."""
        looked = 0
        while True:
            await asyncio.sleep(POLL_SECONDS)
            looked += 1
            for rank, clock in enumerate(await engine_clocks(self._engines)):
                for name, shown in _COUNTERS.items():
                    key = f'{shown}{{engine="{rank}"}}'
                    self._counters[key] = clock[name]
            if self._reader.remote and looked % REMOTE_EVERY:
                continue
            try:
                if (weights := await asyncio.to_thread(self._reader.read_newest)) is not None:
                    await self._load(weights)
            except RlsdkError as error:
                log.warning("a newer checkpoint cannot be served; step %d is served on: %s", self._service.step, error)

    async def _load(self, weights: Weights) -> None:
        await load_weights(self._engines, weights)
        self._service.step = weights.version
        log.info("now serving the checkpoint of step %d", weights.version)
