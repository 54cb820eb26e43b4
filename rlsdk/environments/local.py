"""Environments that run in threads of this process, without Ray: in tests, and wherever no training runs."""

from __future__ import annotations

import itertools
from typing import Any, Protocol

from rlsdk.components import Isolation, Use, component_of
from rlsdk.contracts import EnvHandle
from rlsdk.environments.host import EnvHost, EnvSpec
from rlsdk.errors import WorldLostError
from rlsdk.plugins import Plugins
from rlsdk.types import Observation, Step

THREADS = 64
"""Default number of concurrent calls."""


class EnvBackend(Protocol):
    """Backend that runs environments."""

    def open(self, environment: Use, seed: int, seconds: float) -> EnvHandle:
        """Open a handle to an environment, which its `reset` creates.

        Args:
            environment: Environment component with its options.
            seed: Seed of the episode.
            seconds: Time limit of each call.
        """
        ...


class EnvSpecs:
    """Cache of environment specifications: one object per component."""

    def __init__(self, plugins: Plugins | None, isolation: Isolation | None) -> None:
        """Create an empty cache.

        Args:
            plugins: Plugins to look components up in; None for the installed ones.
            isolation: Isolation that overrides the environments' own marks.
        """
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


class LocalEnvBackend:
    """Hosts environments in threads of this process."""

    def __init__(self, plugins: Plugins | None = None, *, threads: int = THREADS) -> None:
        """Create the backend; nothing starts before it is needed.

        Args:
            plugins: Plugins to look environments up in; by default, the installed ones.
            threads: Maximum number of concurrent calls.
        """
        self._plugins, self._threads = plugins, threads
        self._specs = EnvSpecs(plugins, None)
        self._host: EnvHost | None = None
        self._numbers = itertools.count()

    def open(self, environment: Use, seed: int, seconds: float) -> EnvHandle:
        """Open a handle to an environment; see `EnvBackend`."""
        self._host = self._host or EnvHost(self._threads, self._plugins)
        return _LocalEnv(self._host, next(self._numbers), self._specs.of(environment), environment, seed, seconds)


class _LocalEnv:
    def __init__(self, host: EnvHost, number: int, spec: EnvSpec, environment: Use, seed: int, seconds: float) -> None:
        self._host, self._number, self._spec = host, number, spec
        self._environment, self._seed, self._seconds = environment, seed, seconds

    async def reset(self) -> Observation:
        try:
            return await self._host.reset(
                self._number, self._spec, self._environment.options, self._seed, self._seconds
            )
        except WorldLostError as error:  # a retry in another process, as with workers, is not possible here
            raise RuntimeError(str(error)) from error

    async def step(self, text: str) -> Step:
        try:
            return await self._host.step(self._number, text, self._seconds)
        except WorldLostError as error:
            raise RuntimeError(str(error)) from error

    def close(self) -> None:
        self._host.close(self._number)
