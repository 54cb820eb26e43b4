"""Code of the environment processes: the template, which imports and forks, and its forks.

Options come pickled from the driver, which is trusted. Results go back as JSON, since
an environment acts on text from a model.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import attrs

from rlsdk.components import Component
from rlsdk.errors import RlsdkError, place_of
from rlsdk.isolation.framing import receive, send
from rlsdk.isolation.process import fork_alone
from rlsdk.plugins import Plugins
from rlsdk.types import Observation, Step

READY = b"r"
FORK = b"f"


def main(descriptor: int) -> None:
    """Be the template: import the environment, then fork a process for each socket that arrives."""
    control = socket.socket(fileno=descriptor)
    plugins = Plugins()
    try:
        component = plugins.component(pickle.loads(receive(control)))  # noqa: S301 - from the process that started this
    except (RlsdkError, ImportError) as error:
        send(control, str(error).encode())
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that end leave nothing behind
    gc.collect()
    gc.freeze()  # what is imported stays shared with the forks
    send(control, READY)
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        except ConnectionError:
            return
        if message != FORK:
            return
        if os.fork() == 0:
            control.close()
            _live(socket.socket(fileno=descriptors[0]), plugins, component)
        os.close(descriptors[0])


def _live(connection: socket.socket, plugins: Plugins, component: Component) -> NoReturn:
    """Be one environment until its owner goes away; a fork never returns into the template's code."""
    code = 1
    try:
        fork_alone()
        send(connection, str(os.getpid()).encode())
        options = pickle.loads(receive(connection))  # noqa: S301 - as above
        with asyncio.Runner() as runner:
            environment: Any = None
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
    except (EOFError, ConnectionError):
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _answer(environment: Any, call: Mapping[str, Any], runner: asyncio.Runner) -> dict[str, Any]:
    [(name, given)] = call.items()
    if name == "close":
        result = environment.close() if hasattr(environment, "close") else None
        return {} if not inspect.isawaitable(result) else {"other": repr(runner.run(_awaited(result)))}
    result = getattr(environment, name)(given)
    if inspect.isawaitable(result):
        result = runner.run(_awaited(result))
    if isinstance(result, Observation):
        return {"observation": attrs.asdict(result)}
    if isinstance(result, Step):
        return {
            "observation": attrs.asdict(result.observation),
            "reward": float(result.reward),
            "terminated": bool(result.terminated),
            "truncated": bool(result.truncated),
            "metrics": {key: float(value) for key, value in result.metrics.items()},
        }
    return {"other": repr(result)}


async def _awaited(result: Any) -> Any:
    return await result
