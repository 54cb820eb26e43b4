"""The environments of one process; their calls run concurrently, and are abandoned if they take too long.

Methods of an environment run in threads, or on the event loop if they are `async`. Among environments with isolation
`lock`, only one call runs at a time; with `process`, each environment has its own process.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

import attrs

from rlsdk.components import Component, Isolation
from rlsdk.environments.subprocess_env import RaisedInProcessError, SubprocessEnv, prepare
from rlsdk.errors import EnvironmentFault, PluginError, WorldLostError, described
from rlsdk.isolation.fork_server import ForkServer, ForkServerError
from rlsdk.isolation.threads import Threads
from rlsdk.plugins import ComponentRef, Plugins, short_name
from rlsdk.types import Observation, Step

T = TypeVar("T")
log = logging.getLogger(__name__)
CLOSING = 10.0
"""Time limit in seconds for an environment to close."""
_LAST_WORDS = 1.0
"""Seconds within which a cancelled coroutine must end."""


@attrs.frozen(eq=False)
class EnvSpec:
    """One kind of environment, without options; `kind` is the number that identifies it to workers."""

    reference: ComponentRef
    isolation: Isolation
    kind: int

    @property
    def name(self) -> str:
        """Name of the environment, for messages."""
        return short_name(self.reference.name)


class Instance(Protocol):
    """An environment instance, in this process or another."""

    async def reset(self, seed: int, seconds: float) -> Any:
        """Create the environment and start its episode; raises TimeoutError, or the environment's own exception."""
        ...

    async def step(self, text: str, seconds: float) -> Any:
        """Pass text to the environment as an action."""
        ...

    async def close(self) -> None:
        """Close the environment; no call follows."""
        ...


@attrs.define(eq=False)
class _EnvSlot:
    where: str
    instance: Instance | None = None
    steps: int = 0
    busy: bool = False
    usable: bool = True
    left: bool = False


class EnvHost:
    """Hosts environments, each identified by a number that the caller chooses."""

    def __init__(self, threads: int, plugins: Plugins | None = None) -> None:
        """Create a host; threads and processes start when they are needed.

        Args:
            threads: Maximum concurrent calls in threads; further calls wait, and their time limit starts when they
                begin.
            plugins: Plugins to look components up in.
        """
        self._plugins = plugins
        self._threads = Threads(threads)
        self._lock = _Lock()
        self._components: dict[int, asyncio.Future[Component]] = {}
        self._fork_servers: dict[int, ForkServer] = {}
        self._slots: dict[int, _EnvSlot] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def stuck(self) -> int:
        """Number of hanging calls, each in an abandoned thread."""
        return self._threads.stuck

    async def reset(
        self, number: int, spec: EnvSpec, options: Mapping[str, Any], seed: int, seconds: float
    ) -> Observation:
        """Create an environment and start its episode.

        Raises:
            RlsdkError: The component is missing in this process, or differs.
            WorldLostError: Another environment hangs and holds the lock.
            TimeoutError: The call exceeded its time limit.
            RuntimeError: The environment raised an exception.
            TypeError: The environment returned a value of another type.
        """
        slot = self._slots.setdefault(number, _EnvSlot(f"environment {spec.name!r} (seed {seed})"))
        slot.busy = True
        try:
            instance = slot.instance = slot.instance or await self._instance(spec, options)
        finally:
            slot.busy = False
        slot.steps = 0
        return await self._call(slot, "reset", Observation, lambda: instance.reset(seed, seconds))

    async def step(self, number: int, text: str, seconds: float) -> Step:
        """Pass a text to an environment as its action; raises the same exceptions as `reset`."""
        slot = self._slots[number]
        instance = slot.instance
        assert instance is not None, "step was called before reset"
        slot.steps += 1
        return await self._call(slot, f"step {slot.steps}", Step, lambda: instance.step(text, seconds))

    def close(self, number: int) -> None:
        """Close an environment in the background, at once or when its running call ends."""
        slot = self._slots.pop(number, None)
        if slot is not None:
            slot.left = True
            self._end(slot)

    async def _call(self, slot: _EnvSlot, what: str, kind: type[T], call: Callable[[], Awaitable[Any]]) -> T:
        where = f"{slot.where}: {what}"
        slot.busy, usable = True, False
        try:
            result = await call()
            usable = True
        except WorldLostError:
            raise
        except TimeoutError as error:
            raise TimeoutError(f"{where}: {error}") from error
        except RaisedInProcessError as error:
            raise RuntimeError(f"{where} raised {error}") from error
        except Exception as error:  # the environment's code failed: its rollout fails, the run continues
            raise RuntimeError(f"{where} raised {described(error)}") from error
        finally:
            slot.busy, slot.usable = False, usable
            if slot.left:
                self._end(slot)
        if not isinstance(result, kind):
            slot.usable = False
            raise TypeError(f"{where} returned {result!r}; expected an rlsdk.{kind.__name__}")
        return result

    def _end(self, slot: _EnvSlot) -> None:
        if slot.busy:
            return
        closing = asyncio.get_running_loop().create_task(_closed(slot))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _instance(self, spec: EnvSpec, options: Mapping[str, Any]) -> Instance:
        if spec.isolation == "process":
            what = f"environments {spec.reference.name!r}"
            forks = self._fork_servers.setdefault(spec.kind, ForkServer(what, prepare, spec.reference))
            try:
                await forks.ready()
            except ForkServerError as error:
                raise (PluginError if error.refused else EnvironmentFault)(str(error)) from error
            return SubprocessEnv(forks, options)
        found = self._components.get(spec.kind)
        if found is None:  # resolved once; concurrent calls wait for the same future
            self._plugins = self._plugins or Plugins()
            finding = self._threads.call(self._plugins.component, spec.reference)
            found = self._components[spec.kind] = asyncio.ensure_future(finding)
        component = await asyncio.shield(found)
        assert self._plugins is not None
        lock = self._lock if spec.isolation == "lock" else None
        return _InProcessEnv(self._plugins, component, options, self._threads, lock)


async def _closed(slot: _EnvSlot) -> None:
    instance = slot.instance
    if instance is not None and (slot.usable or isinstance(instance, SubprocessEnv)):
        try:
            await instance.close()
        except Exception as error:  # noqa: BLE001 - the episode is over; how its environment closes does not matter
            log.warning("%s: close failed: %s", slot.where, described(error))


class _Lock:
    """Lock that lets one call run at a time. A hanging call holds it forever, and all later calls fail."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._held = ""

    async def call(self, call: Callable[[], Awaitable[Any]]) -> Any:
        async with self._lock:
            if self._held:
                raise WorldLostError(f"an environment with isolation 'lock' hangs and holds the lock: {self._held}")
            try:
                return await call()
            except (TimeoutError, asyncio.CancelledError) as error:
                self._held = str(error) or "it was cancelled"
                raise


class _InProcessEnv:
    """An environment that runs in this process."""

    def __init__(
        self,
        plugins: Plugins,
        component: Component,
        options: Mapping[str, Any],
        threads: Threads,
        lock: _Lock | None,
    ) -> None:
        self._plugins, self._component, self._options = plugins, component, options
        self._threads, self._lock = threads, lock
        self._environment: Any = None

    async def reset(self, seed: int, seconds: float) -> Any:
        cls = self._component.obj
        if inspect.iscoroutinefunction(getattr(cls, "reset", None)):
            await self._run(self._make, seconds=seconds)
            return await self._run(self._environment.reset, seed, seconds=seconds)
        return await self._run(lambda: self._make().reset(seed), seconds=seconds)

    async def step(self, text: str, seconds: float) -> Any:
        return await self._run(self._environment.step, text, seconds=seconds)

    async def close(self) -> None:
        close = getattr(self._environment, "close", None)
        if close is not None:
            await self._run(close, seconds=CLOSING)

    def _make(self) -> Any:
        self._environment = self._plugins.bind(self._component, self._options)
        return self._environment

    async def _run(self, function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
        def call() -> Awaitable[Any]:
            if inspect.iscoroutinefunction(function):
                return _limited(_awaited(function, *arguments), seconds)
            return self._threads.call(_called, function, *arguments, seconds=seconds)

        return await (call() if self._lock is None else self._lock.call(call))


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; its own TimeoutError becomes a `RaisedInProcessError`, distinct from the time limit's."""
    try:
        return function(*arguments)
    except TimeoutError as error:
        raise RaisedInProcessError(described(error)) from error


async def _awaited(function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """Await an async function; see `_called`."""
    try:
        return await function(*arguments)
    except TimeoutError as error:
        raise RaisedInProcessError(described(error)) from error


async def _limited(work: Any, seconds: float) -> Any:
    """Await a coroutine within a time limit; on timeout, cancel it, and abandon it if it does not end."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if done:
        return task.result()
    task.cancel()
    await asyncio.wait({task}, timeout=_LAST_WORDS)
    raise TimeoutError(f"it took longer than {seconds:g} s")
