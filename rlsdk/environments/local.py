"""Environments in this process: in tests, on scripted policies, and wherever no training runs."""

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
            isolation: In place of what the environments' marks say.
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
            threads: Calls that run at once.
        """
        self._plugins, self._threads = plugins, threads
        self._blueprints = EnvSpecs(plugins, None)
        self._host: EnvHost | None = None
        self._numbers = itertools.count()

    def open(self, environment: Use, seed: int, seconds: float) -> EnvHandle:
        """An environment; see `EnvBackend`."""
        self._host = self._host or EnvHost(self._threads, self._plugins)
        return _LocalWorld(
            self._host, next(self._numbers), self._blueprints.of(environment), environment, seed, seconds
        )


class _LocalWorld:
    def __init__(
        self, host: EnvHost, number: int, blueprint: EnvSpec, environment: Use, seed: int, seconds: float
    ) -> None:
        self._host, self._number, self._blueprint = host, number, blueprint
        self._environment, self._seed, self._seconds = environment, seed, seconds

    async def reset(self) -> Observation:
        try:
            return await self._host.reset(
                self._number, self._blueprint, self._environment.options, self._seed, self._seconds
            )
        except WorldLostError as error:  # there is no other process in which it might go better
            raise RuntimeError(str(error)) from error

    async def step(self, text: str) -> Step:
        try:
            return await self._host.step(self._number, text, self._seconds)
        except WorldLostError as error:
            raise RuntimeError(str(error)) from error

    def close(self) -> None:
        self._host.close(self._number)
