"""Environments in separate processes, which are killed if they hang.

`prepare` and the function it returns run in those processes, `SubprocessEnv` in the process of the rollouts. Options
arrive pickled, since that process is trusted. Results return as JSON, since an environment acts on a model's text.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs

from rlsdk.errors import place_of
from rlsdk.isolation.fork_server import Fork, ForkServer
from rlsdk.isolation.framing import receive, send, send_async
from rlsdk.plugins import ComponentRef, Plugins
from rlsdk.types import Observation, Step

_CLOSING = 2.0
"""Seconds that a process has to close its environment before it is killed."""


def prepare(reference: ComponentRef) -> Callable[[socket.socket], None]:
    """Import an environment, and return the main function of a fork, which serves calls until the socket is closed."""
    plugins = Plugins()
    component = plugins.component(reference)

    def live(connection: socket.socket) -> None:
        options = pickle.loads(receive(connection))  # noqa: S301 - from the process that plays
        environment: Any = None
        with asyncio.Runner() as runner:
            while True:
                call = json.loads(receive(connection))
                try:
                    if "reset" in call:
                        environment = plugins.bind(component, options)
                    reply = _answer(environment, call, runner)
                except BaseException as error:  # noqa: BLE001 - the environment's code; the rollout gets it
                    place = place_of(error)
                    reply = {"raised": [type(error).__name__, f"{error}" + (f" ({place})" if place else "")]}
                send(connection, json.dumps(reply, default=float).encode())

    return live


def _answer(environment: Any, call: Mapping[str, Any], runner: asyncio.Runner) -> dict[str, Any]:
    [(name, given)] = call.items()
    if name == "close":
        result = environment.close() if hasattr(environment, "close") else None
        return {} if not inspect.isawaitable(result) else {"other": repr(runner.run(_awaited(result)))}
    result = getattr(environment, name)(given)
    if inspect.isawaitable(result):
        result = runner.run(_awaited(result))
    if isinstance(result, Observation):
        return {"observation": _observed(result)}
    if isinstance(result, Step):
        return {
            "observation": _observed(result.observation),
            "reward": float(result.reward),
            "terminated": result.terminated,
            "truncated": result.truncated,
            "metrics": {key: float(value) for key, value in result.metrics.items()},
        }
    return {"other": repr(result)}


def _observed(observation: Observation) -> dict[str, Any]:
    """Convert an observation to JSON values, from which `Observation` restores it."""
    image = observation.image
    return {**attrs.asdict(observation, recurse=False), "image": None if image is None else image.url}


async def _awaited(result: Any) -> Any:
    return await result


class RaisedInProcessError(Exception):
    """An exception raised by an environment's code: type name and message."""


class SubprocessEnv:
    """An environment that runs in its own process."""

    def __init__(self, forks: ForkServer, options: Mapping[str, Any]) -> None:
        """Create an environment of a fork server that runs `prepare`; its process starts with `reset`."""
        self._forks, self._options = forks, options
        self._fork: Fork | None = None

    async def reset(self, seed: int, seconds: float) -> Any:
        """Start the process, create the environment, and start its episode."""
        import cloudpickle

        async with self._limited(seconds):
            self._fork = await self._forks.fork()
            await send_async(self._fork.connection, cloudpickle.dumps(dict(self._options)))
        found = await self._ask({"reset": seed}, seconds)
        return Observation(**found["observation"]) if set(found) == {"observation"} else found

    async def step(self, text: str, seconds: float) -> Any:
        """Pass a text to the environment as its action."""
        found = await self._ask({"step": text}, seconds)
        if "reward" not in found:
            return found
        return Step(observation=Observation(**found.pop("observation")), **found)

    async def close(self) -> None:
        """Close the environment within a short time limit, then kill its process."""
        if self._fork is None:
            return
        try:
            await self._ask({"close": True}, _CLOSING)
        finally:
            self._kill()

    async def _ask(self, call: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        if self._fork is None:
            raise RuntimeError("its process was ended")
        async with self._limited(seconds):
            found: dict[str, Any] = json.loads(await self._fork.ask(json.dumps(call).encode()))
        if "raised" in found:
            raise RaisedInProcessError(": ".join(found["raised"]))
        return found

    @asynccontextmanager
    async def _limited(self, seconds: float) -> AsyncIterator[None]:
        """Kill the process if the block takes too long or is cancelled."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            self._kill()
            raise TimeoutError(f"it took longer than {seconds:g} s and was killed") from None
        except (EOFError, ConnectionError):
            fork = self._fork
            self._kill()
            how = "it did not start" if fork is None else await self._forks.ending(fork)
            raise RuntimeError(f"its process ended: {how}") from None
        except asyncio.CancelledError:
            self._kill()
            raise

    def _kill(self) -> None:
        if self._fork is not None:
            self._fork.kill()
            self._fork = None
