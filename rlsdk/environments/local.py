"""Environments that run in threads of this process, without Ray: in tests, and outside of training."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Iterator
from typing import Any, Protocol, TypeVar

from rlsdk.components import Isolation, Use, component_of
from rlsdk.contracts import EnvHandle
from rlsdk.environments.host import EnvHost, EnvSpec
from rlsdk.errors import WorldLostError
from rlsdk.plugins import Plugins
from rlsdk.types import Observation, Step

T = TypeVar("T")
THREADS = 64
"""Default number of concurrent calls."""


class EnvBackend(Protocol):
    """Backend that runs environments."""

    def open(self, environment: Use, seed: int, seconds: float, owner: object = None) -> EnvHandle:
        """Return a handle to an environment, which its `reset` creates.

        Args:
            environment: Environment component with its options.
            seed: Seed of the episode.
            seconds: Time limit of each call.
            owner: Same object for all environments of one rollout, which may wait for each other; None if there are no
                others.
        """
        ...


class EnvSpecs:
    """Cache of environment specifications: one object per component."""

    def __init__(self, plugins: Plugins | None, isolation: Isolation | None) -> None:
        """Create an empty cache; `isolation` overrides the environments' own marks."""
        self._plugins, self._isolation = plugins, isolation
        self._known: dict[Any, EnvSpec] = {}

    def of(self, environment: Use) -> EnvSpec:
        """Return the specification of an environment.

        Raises:
            PluginError: The environment does not exist.
        """
        name = environment.name
        if name not in self._known:
            plugins = self._plugins = self._plugins or Plugins()
            reference = plugins.reference("environment", name)
            component = component_of(name) or plugins.find("environment", name)[1]
            self._known[name] = EnvSpec(reference, self._isolation or component.isolation, len(self._known))
        return self._known[name]


class EnvCalls:
    """Numbers of a handle's environments, and its calls, which run one at a time.

    Each `reset` creates another environment. A call that timed out or was cancelled may still be running, so no other
    call is allowed until the next `reset`: it could collide with the running one, or receive its answer.

    Attributes:
        number: Number of the current environment; None before the first `reset`.
    """

    def __init__(self, numbers: Iterator[int]) -> None:
        """Start without an environment.

        Args:
            numbers: Numbers that no other handle uses.
        """
        self._numbers = numbers
        self._running = False
        self.number: int | None = None

    def renew(self) -> tuple[int | None, int]:
        """Take a number for another environment; return the old and the new number."""
        old, self.number, self._running = self.number, next(self._numbers), False
        return old, self.number

    async def call(self, work: Awaitable[T]) -> T:
        """Await a call of the current environment."""
        number, self._running = self.number, True
        try:
            result = await work
        except TimeoutError:
            raise
        except Exception:
            self._end(number)
            raise
        self._end(number)
        return result

    def _end(self, number: int | None) -> None:
        if number == self.number:
            self._running = False

    def for_step(self) -> int:
        """Return the number of the environment for a step.

        Raises:
            RuntimeError: There is none, or its last call has not ended.
        """
        if self.number is None:
            raise RuntimeError("step was called before reset: an environment must be reset first")
        if self._running:
            raise RuntimeError(
                "step was called while an earlier call is running: it took too long, was cancelled or not awaited; "
                "reset the environment first"
            )
        return self.number


class LocalEnvBackend:
    """Hosts environments in threads of this process."""

    def __init__(self, plugins: Plugins | None = None) -> None:
        """Create a backend that looks environments up in these plugins, or the installed ones; start nothing yet."""
        self._plugins = plugins
        self._specs = EnvSpecs(plugins, None)
        self._host: EnvHost | None = None
        self._numbers = itertools.count()

    def open(self, environment: Use, seed: int, seconds: float, owner: object = None) -> EnvHandle:
        """Open a handle to an environment; see `EnvBackend`."""
        self._host = self._host or EnvHost(THREADS, self._plugins)
        return _LocalEnv(self._host, self._numbers, self._specs.of(environment), environment, seed, seconds)


class _LocalEnv:
    def __init__(
        self, host: EnvHost, numbers: Iterator[int], spec: EnvSpec, environment: Use, seed: int, seconds: float
    ) -> None:
        self._host, self._calls, self._spec = host, EnvCalls(numbers), spec
        self._environment, self._seed, self._seconds = environment, seed, seconds

    async def reset(self) -> Observation:
        old, number = self._calls.renew()
        if old is not None:
            self._host.close(old)
        options = self._environment.options
        try:
            return await self._calls.call(self._host.reset(number, self._spec, options, self._seed, self._seconds))
        except WorldLostError as error:  # unlike with workers, a retry in another process is not possible here
            raise RuntimeError(str(error)) from error

    async def step(self, text: str) -> Step:
        number = self._calls.for_step()
        try:
            return await self._calls.call(self._host.step(number, text, self._seconds))
        except WorldLostError as error:
            raise RuntimeError(str(error)) from error

    def close(self) -> None:
        if self._calls.number is not None:
            self._host.close(self._calls.number)
