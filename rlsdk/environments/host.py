"""The environments of one process. Their calls run side by side; one that takes too long is cut off, and nobody waits.

An environment's method runs in a thread, or on the event loop if it is `async`. Isolation `lock` lets one call of all
such environments run at a time; with `process` each environment has a process of its own.
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
"""Seconds that an environment may take to close."""
_LAST_WORDS = 1.0
"""Seconds for a coroutine to end that was cancelled."""


@attrs.frozen(eq=False)
class EnvSpec:
    """Specification of one kind of environment, without options.

    Attributes:
        reference: Reference to the component.
        isolation: Isolation of calls.
        kind: Number that identifies the component to workers.
    """

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
        """Make it and start its episode; raises TimeoutError, or what the environment raised."""
        ...

    async def step(self, text: str, seconds: float) -> Any:
        """Act."""
        ...

    async def close(self) -> None:
        """End it; it is not asked anything any more."""
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
    """Environments, each under a number that its owner chose."""

    def __init__(self, threads: int, plugins: Plugins | None = None) -> None:
        """Create a host; threads and processes start when they are needed.

        Args:
            threads: Concurrent calls in threads; further calls wait, and their time limit starts when they begin.
            plugins: Plugins to look components up in.
        """
        self._plugins = plugins
        self._threads = Threads(threads)
        self._lock = _Lock()
        self._components: dict[int, asyncio.Future[Component]] = {}
        self._fork_servers: dict[int, ForkServer] = {}
        self._guests: dict[int, _EnvSlot] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def stuck(self) -> int:
        """Calls that hang, each in a thread that was left to it."""
        return self._threads.stuck

    async def reset(
        self, number: int, blueprint: EnvSpec, options: Mapping[str, Any], seed: int, seconds: float
    ) -> Observation:
        """Create an environment and start its episode.

        Args:
            number: Number by which later calls name it.
            blueprint: Specification; the same object for environments of the same kind.
            options: Options of this environment.
            seed: Seed of the episode.
            seconds: Time limit.

        Raises:
            RlsdkError: The component is missing here, or differs.
            WorldLostError: Another environment hangs and holds the lock.
            TimeoutError: The call exceeded its time limit.
            RuntimeError: The environment raised an exception.
            TypeError: The environment returned a value of another type.
        """
        guest = self._guests.setdefault(number, _EnvSlot(f"environment {blueprint.name!r} (seed {seed})"))
        guest.busy = True
        try:
            instance = guest.instance = guest.instance or await self._instance(blueprint, options)
        finally:
            guest.busy = False
        guest.steps = 0
        return await self._call(guest, "reset", Observation, lambda: instance.reset(seed, seconds))

    async def step(self, number: int, text: str, seconds: float) -> Step:
        """Act; fails as `reset` does."""
        guest = self._guests[number]
        instance = guest.instance
        assert instance is not None, "an environment is reset before its first step"
        guest.steps += 1
        return await self._call(guest, f"step {guest.steps}", Step, lambda: instance.step(text, seconds))

    def close(self, number: int) -> None:
        """Close an environment, now or when the call ends that it is in; nobody waits for it."""
        guest = self._guests.pop(number, None)
        if guest is not None:
            guest.left = True
            self._end(guest)

    async def _call(self, guest: _EnvSlot, what: str, kind: type[T], call: Callable[[], Awaitable[Any]]) -> T:
        where = f"{guest.where}: {what}"
        guest.busy, usable = True, False
        try:
            result = await call()
            usable = True
        except WorldLostError:
            raise
        except TimeoutError as error:
            raise TimeoutError(f"{where}: {error}") from error
        except RaisedInProcessError as error:
            raise RuntimeError(f"{where} raised {error}") from error
        except Exception as error:  # the environment's code; its rollout fails, the run goes on
            raise RuntimeError(f"{where} raised {described(error)}") from error
        finally:
            guest.busy, guest.usable = False, usable
            if guest.left:
                self._end(guest)
        if not isinstance(result, kind):
            guest.usable = False
            raise TypeError(f"{where} gave {result!r}; expected an rlsdk.{kind.__name__}")
        return result

    def _end(self, guest: _EnvSlot) -> None:
        if guest.busy:
            return
        closing = asyncio.get_running_loop().create_task(_closed(guest))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _instance(self, blueprint: EnvSpec, options: Mapping[str, Any]) -> Instance:
        if blueprint.isolation == "process":
            what = f"environments {blueprint.reference.name!r}"
            forks = self._fork_servers.setdefault(blueprint.kind, ForkServer(what, prepare, blueprint.reference))
            try:
                await forks.ready()
            except ForkServerError as error:
                raise (PluginError if error.refused else EnvironmentFault)(str(error)) from error
            return SubprocessEnv(forks, options)
        found = self._components.get(blueprint.kind)
        if found is None:  # once for all: those who come meanwhile wait for it
            self._plugins = self._plugins or Plugins()
            finding = self._threads.call(self._plugins.component, blueprint.reference)
            found = self._components[blueprint.kind] = asyncio.ensure_future(finding)
        component = await asyncio.shield(found)
        assert self._plugins is not None
        lock = self._lock if blueprint.isolation == "lock" else None
        return _Here(self._plugins, component, options, self._threads, lock)


async def _closed(guest: _EnvSlot) -> None:
    instance = guest.instance
    if instance is not None and (guest.usable or isinstance(instance, SubprocessEnv)):
        try:
            await instance.close()
        except Exception as error:  # noqa: BLE001 - the episode is over, whatever becomes of its environment
            log.warning("%s: close failed: %s", guest.where, described(error))


class _Lock:
    """Lets one call run at a time. A call that hangs holds it for good, and those that come after it fail."""

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


class _Here:
    """An environment in this process."""

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
                return _limited(function(*arguments), seconds)
            return self._threads.call(function, *arguments, seconds=seconds)

        return await (call() if self._lock is None else self._lock.call(call))


async def _limited(work: Any, seconds: float) -> Any:
    """Await a coroutine within a time limit; on timeout it is cancelled, and abandoned if that does not end it."""
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
