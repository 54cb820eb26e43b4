"""The processes of a pool: one that has imported everything, and its forks, each scoring one call after the other.

Calls arrive pickled from the driver, which is trusted. Results go back as JSON: what ran on a model's output is not.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import json
import os
import pickle
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rlsdk.components import component_of
from rlsdk.errors import LONGEST, DataError, RlsdkError, described
from rlsdk.isolation.framing import receive, send
from rlsdk.isolation.process import fork_alone
from rlsdk.plugins import ComponentRef, Plugins
from rlsdk.scoring.outcome import as_score, as_scores
from rlsdk.types import Rollout, Score, Task

BROKEN = b"e"
READY = b"r"
FORK = b"f"


def main(descriptor: int) -> None:
    """Be the template: make the rewards ready, then fork a process for each socket that arrives."""
    control = socket.socket(fileno=descriptor)
    references, memory = pickle.loads(receive(control))  # noqa: S301 - from the driver that started this process
    try:
        rewards = _ready(references)
    except (RlsdkError, ImportError) as error:
        send(control, BROKEN + str(error).encode())
        return
    gc.collect()
    gc.freeze()  # what is imported stays shared with the forks
    send(control, READY)
    _serve(control, rewards, memory)


def _ready(references: Sequence[ComponentRef]) -> list[Callable[..., Any]]:
    plugins = Plugins()
    rewards = [plugins.resolve(reference) for reference in references]
    for reward in rewards:
        component = component_of(reward)
        for module in component.imports if component else ():
            importlib.import_module(module)
    # What any call needs is imported here, too: numpy, for one, which rollouts load when they are first made.
    pickle.loads(pickle.dumps(Rollout.from_text(Task(id="", prompt=""), "")))  # noqa: S301 - our own
    return rewards


def _serve(control: socket.socket, rewards: Sequence[Callable[..., Any]], memory: int) -> None:
    """Fork on request, and tell how forks ended, until the driver goes away."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as ready:
        ready.register(control, selectors.EVENT_READ)
        ready.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is control:
                    try:
                        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
                    except ConnectionError:
                        return
                    if message != FORK:
                        return
                    if os.fork() == 0:
                        signal.set_wakeup_fd(-1)
                        control.close()
                        _work(socket.socket(fileno=descriptors[0]), rewards, memory)
                    os.close(descriptors[0])
                else:
                    os.read(woken, 4096)
                    _reap(control)


def _reap(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        send(control, json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())


def _work(connection: socket.socket, rewards: Sequence[Callable[..., Any]], memory: int) -> NoReturn:
    """Score calls until the driver goes away; a fork never returns into the template's code."""
    code = 1
    try:
        _confine(memory)
        send(connection, json.dumps([os.getpid(), time.process_time()]).encode())
        while True:
            index, rollouts = pickle.loads(receive(connection))  # noqa: S301 - as above
            reply = _call(rewards[index], rollouts)
            send(connection, json.dumps({**reply, "cpu": time.process_time()}, default=float).encode())
            if reply.get("spent"):
                break
        code = 0
    except (EOFError, ConnectionError):
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _confine(memory: int) -> None:
    """A process group to be killed as one, an end with the template's, and limits."""
    import resource  # not on Windows, where there is no pool

    fork_alone()
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + memory, size + memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _call(reward: Callable[..., Any], rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Call a reward and build the reply; with `spent`, the process must end, since it ran out of memory."""
    component = component_of(reward)
    try:
        if component is not None and component.batch:
            return {"scores": [_plain(score) for score in as_scores(_result(reward, rollouts), len(rollouts))]}
        scores = [_one(reward, rollout) for rollout in rollouts]
        return {"scores": scores, "spent": any(score.pop("spent", False) for score in scores)}
    except DataError as error:
        return {"data_error": str(error)}
    except BaseException as error:  # noqa: BLE001 - the user's code: what it raises is the score's reason
        return _failure(error)


def _one(reward: Callable[..., Any], rollout: Rollout) -> dict[str, Any]:
    """The score of one of several; what fails says nothing of those beside it."""
    try:
        return _plain(as_score(_result(reward, rollout)))
    except DataError:
        raise
    except BaseException as error:  # noqa: BLE001 - as above
        failure = _failure(error)
        return {**_plain(Score.invalid(failure["error"])), "spent": failure["spent"]}


def _result(reward: Callable[..., Any], argument: Any) -> Any:
    result = reward(argument)
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


def _failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, MemoryError):
        return {"error": "MemoryError: it needs more than scoring.memory allows", "spent": True}
    return {"error": described(error), "spent": isinstance(error, SystemExit | KeyboardInterrupt)}


async def _awaited(result: Any) -> Any:
    return await result


def _plain(score: Score) -> dict[str, Any]:
    try:
        metrics = {name: float(value) for name, value in score.metrics.items()}
    except (TypeError, ValueError) as error:  # of one rollout: it says nothing of those beside it
        score, metrics = Score.invalid(f"a metric of its score is no number: {error}"), {}
    return {
        "value": score.value,
        "valid": score.valid,
        "metrics": metrics,
        "reason": score.reason[: 2 * LONGEST],
        "token_rewards": score.token_rewards,
    }
