"""Code of the pool's worker processes: forks, with the rewards already imported, that handle one call at a time.

Calls arrive pickled from the driver, which is trusted. Results return as JSON, since code that ran on a model's output
is not trusted.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlsdk.components import component_of
from rlsdk.errors import LONGEST, DataError, described
from rlsdk.isolation.framing import receive, send
from rlsdk.isolation.threads import run_to_end
from rlsdk.plugins import ComponentRef, Plugins
from rlsdk.scoring.outcome import as_score, as_scores
from rlsdk.types import Rollout, Score, Task


def prepare(references: Sequence[ComponentRef]) -> Callable[[socket.socket], None]:
    """Load the rewards, and return the main function of a fork, which scores until the driver closes the connection."""
    plugins = Plugins()
    rewards = [plugins.resolve(reference) for reference in references]
    for reward in rewards:
        component = component_of(reward)
        for module in component.imports if component else ():
            importlib.import_module(module)
    # Modules that every call needs are also imported here, such as numpy, which rollouts import when first created.
    pickle.loads(pickle.dumps(Rollout.from_text(Task(id="", prompt=""), "")))  # noqa: S301 - our own

    def work(connection: socket.socket) -> None:
        spent = False
        while not spent:
            index, rollouts = pickle.loads(receive(connection))  # noqa: S301 - from the driver, which is trusted
            reply = _call(rewards[index], rollouts)
            send(connection, json.dumps({**reply, "cpu": time.process_time()}, default=float).encode())
            spent = bool(reply.get("spent"))

    return work


def _call(reward: Callable[..., Any], rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Call a reward and build the reply; `spent` means that the process must end: out of memory, or told to exit."""
    component = component_of(reward)
    try:
        if component is not None and component.batch:
            return {"scores": [_plain(score) for score in as_scores(_result(reward, rollouts), len(rollouts))]}
        scores = [_one(reward, rollout) for rollout in rollouts]
        spent = [score.pop("spent", False) for score in scores]
        return {"scores": scores, "spent": any(spent)}
    except DataError as error:
        return {"data_error": str(error)}
    except BaseException as error:  # noqa: BLE001 - the user's code: what it raises is the score's reason
        return _failure(error)


def _one(reward: Callable[..., Any], rollout: Rollout) -> dict[str, Any]:
    """Score one rollout of several; its failure does not affect the others."""
    try:
        return _plain(as_score(_result(reward, rollout)))
    except DataError:
        raise
    except BaseException as error:  # noqa: BLE001 - as above
        failure = _failure(error)
        return {**_plain(Score.invalid(failure["error"])), "spent": failure["spent"]}


def _result(reward: Callable[..., Any], argument: Any) -> Any:
    result = reward(argument)
    return run_to_end(result) if inspect.isawaitable(result) else result


def _failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, MemoryError):
        return {"error": "MemoryError: it needs more than scoring.memory allows", "spent": True}
    return {"error": described(error), "spent": isinstance(error, SystemExit | KeyboardInterrupt)}


def _plain(score: Score) -> dict[str, Any]:
    return {
        "value": score.value,
        "valid": score.valid,
        "metrics": {name: float(value) for name, value in score.metrics.items()},
        "reason": score.reason[: 2 * LONGEST],
        "token_rewards": score.token_rewards,
    }
