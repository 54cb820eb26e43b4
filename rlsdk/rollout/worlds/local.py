"""Environments in this process: in tests, on scripted policies, and wherever no training runs."""

from __future__ import annotations

import itertools
from typing import Any, Protocol

from rlsdk.components import Isolation, Use, component_of
from rlsdk.contracts import World
from rlsdk.errors import WorldLostError
from rlsdk.plugins import Plugins
from rlsdk.rollout.worlds.host import Blueprint, Host
from rlsdk.types import Observation, Step

THREADS = 64


class Worlds(Protocol):
    """Where environments run."""

    def open(self, environment: Use, seed: int, seconds: float) -> World:
        """An environment; it is made by its `reset`.

        Args:
            environment: Which one, with its options.
            seed: Of its episode.
            seconds: That one call of it may take.
        """
        ...


class Blueprints:
    """What environments are made from: one and the same object for the environments of one component."""

    def __init__(self, plugins: Plugins | None, isolation: Isolation | None) -> None:
        """Make it.

        Args:
            plugins: Where components are found; None: among those that are installed.
            isolation: In place of what the environments' marks say.
        """
        self._plugins, self._isolation = plugins, isolation
        self._known: dict[Any, Blueprint] = {}

    def of(self, environment: Use) -> Blueprint:
        """The one of an environment.

        Raises:
            PluginError: There is no such environment.
        """
        name = environment.name
        if name not in self._known:
            plugins = self._plugins = self._plugins or Plugins()
            reference = plugins.reference("environment", name)
            component = component_of(name) or plugins.find("environment", name)[1]
            self._known[name] = Blueprint(reference, self._isolation or component.isolation)
        return self._known[name]


class LocalWorlds:
    """Hosts environments in threads of this process."""

    def __init__(self, plugins: Plugins | None = None, *, threads: int = THREADS) -> None:
        """Make it; nothing starts before it is needed.

        Args:
            plugins: Where environments are found; left out, among those that are installed.
            threads: Calls that run at once.
        """
        self._plugins, self._threads = plugins, threads
        self._blueprints = Blueprints(plugins, None)
        self._host: Host | None = None
        self._numbers = itertools.count()

    def open(self, environment: Use, seed: int, seconds: float) -> World:
        """An environment; see `Worlds`."""
        self._host = self._host or Host(self._threads, self._plugins)
        return _LocalWorld(
            self._host, next(self._numbers), self._blueprints.of(environment), environment, seed, seconds
        )


class _LocalWorld:
    def __init__(
        self, host: Host, number: int, blueprint: Blueprint, environment: Use, seed: int, seconds: float
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

    def leave(self) -> None:
        self._host.leave(self._number)
