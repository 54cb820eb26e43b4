"""The plugin of the fault matrix: it reports when a training reaches a moment, waits there, and fails on demand.

`RLSDK_FAULT` names a folder, in which `cell.json` holds the cell that is on. Every component writes its process's id
there. The component that a moment belongs to creates the file `reached`, and waits for the file `go` while the fault
comes from outside; a fault that comes from a component itself is raised there.
"""

from __future__ import annotations

import errno
import json
import os
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rlsdk

FOLDER = Path(os.environ.get("RLSDK_FAULT") or ".")
SECONDS = 300.0
"""Longest wait at a moment: one that nobody uses must not keep a process."""
KEEPERS = {
    "start": "engine",
    "generation": "engine",
    "update": "learner rank",
    "sync": "engine",
    "checkpoint": "learner rank",
    "evaluation": "environment worker",
    "end": "learner rank",
}
"""Moment -> whose component waits there for a fault from outside."""


def cell() -> dict[str, Any]:
    """The cell that is on, with its number in the lineage; empty while none is."""
    path = FOLDER / "cell.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def came(who: str, when: str) -> None:
    """Perform the cell's fault at this moment in this process."""
    try:
        (FOLDER / f"pid {who}").write_text(str(os.getpid()))
        on = cell()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return  # the fault is that this process may open no more files, which the lab must not need
    inside = on.get("inside", False)
    if on.get("what") == "NaN gradients":  # those are the loss's
        return
    if on.get("when") != when or who != (on["who"] if inside else KEEPERS[when]):
        return
    if not first(on) and not on["always"]:
        return
    if inside:
        fail(on["what"])
        return
    go, end = FOLDER / f"go {on['number']}", time.monotonic() + SECONDS
    while not go.exists() and time.monotonic() < end:
        time.sleep(0.02)


def first(on: Mapping[str, Any]) -> bool:
    """Report that the moment has come, and return True if this is the first report."""
    try:
        (FOLDER / f"reached {on['number']}").open("x").close()
    except FileExistsError:
        return False
    return True


def fail(what: str) -> None:
    """Fail as a component can."""
    if what == "exception":
        raise RuntimeError("a fault on purpose")
    if what == "out of memory":
        bytearray(1 << 50)
    if what == "hangs":
        time.sleep(10_000)


@rlsdk.engine("engine")
class Engine:
    """The engine `transformers`."""

    def __init__(self) -> None:
        self._engine = rlsdk.load("engine", "transformers")

    def environment(self, place: Any) -> Mapping[str, str]:
        found: Mapping[str, str] = self._engine.environment(place)
        return found

    def start(self, model: Any, place: Any) -> None:
        came("engine", "start")
        self._engine.start(model, place)

    def add(self, requests: Sequence[Any]) -> None:
        self._engine.add(requests)

    def step(self) -> list[Any]:
        came("engine", "generation")
        done: list[Any] = self._engine.step()
        return done

    @property
    def unfinished(self) -> int:
        count: int = self._engine.unfinished
        return count

    def abort(self, ids: Iterable[str] | None = None) -> list[Any]:
        ended: list[Any] = self._engine.abort(ids)
        return ended

    def reseed(self, seed: int) -> None:
        self._engine.reseed(seed)

    def load_weights(self, weights: Any) -> None:
        came("engine", "sync")
        self._engine.load_weights(weights)

    def logprobs(self, token_ids: Any) -> Any:
        return self._engine.logprobs(token_ids)

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()

    def stop(self) -> None:
        self._engine.stop()


@rlsdk.learner("learner")
class Learner:
    """The learner `deepspeed`.

    Args:
        skip_limit: As there.
    """

    def __init__(self, *, skip_limit: int = 5) -> None:
        self._learner = rlsdk.load("learner", "deepspeed", lr=1e-5, skip_limit=skip_limit)

    def environment(self, place: Any) -> Mapping[str, str]:
        found: Mapping[str, str] = self._learner.environment(place)
        return found

    def start(self, roles: Any, loss: Any, place: Any, total_updates: int) -> None:
        came("learner rank", "start")
        self._learner.start(roles, loss, place, total_updates)

    def logprobs(self, batch: Any, role: Any = "actor", fields: Sequence[str] = ("logprobs",)) -> dict[str, Any]:
        found: dict[str, Any] = self._learner.logprobs(batch, role, fields)
        return found

    def values(self, batch: Any) -> Any:
        return self._learner.values(batch)

    def update(self, minibatches: Sequence[Any], step: int) -> dict[str, float]:
        came("learner rank", "update")
        metrics: dict[str, float] = self._learner.update(minibatches, step)
        return metrics

    def weights(self, version: int) -> Any:
        came("learner rank", "sync")
        return self._learner.weights(version)

    def canary(self, token_ids: Any) -> Any:
        return self._learner.canary(token_ids)

    def save(self, folder: Path) -> None:
        self._learner.save(folder)
        came("learner rank", "checkpoint")

    def load(self, folder: Path) -> None:
        self._learner.load(folder)

    def export(self, folder: Path) -> None:
        came("learner rank", "end")
        self._learner.export(folder)

    def clock(self) -> dict[str, float]:
        found: dict[str, float] = self._learner.clock()
        return found

    def stop(self) -> None:
        self._learner.stop()


class Digits:
    """Two turns."""

    when = "generation"

    def reset(self, seed: int) -> rlsdk.Observation:
        self.turns = 0
        return rlsdk.Observation(f"{seed % 20},5,17>9:")

    def step(self, text: str) -> rlsdk.Step:
        came("environment worker", self.when)
        self.turns += 1
        odd = sum(letter.isdigit() for letter in text) % 2
        return rlsdk.Step(rlsdk.Observation("go>1:"), float(odd), self.turns == 2)


@rlsdk.environment("digits")
class Training(Digits):
    """What is trained on."""


@rlsdk.environment("exam")
class Exam(Digits):
    """What is evaluated on."""

    when = "evaluation"


@rlsdk.reward("score")
def score(rollout: rlsdk.Rollout) -> float:
    """A number that the answer's text determines, so that the rewards of a group differ."""
    came("scorer", "generation")
    return zlib.crc32("".join(message.content for message in rollout.messages).encode()) / 2**32


@rlsdk.policy_loss("loss")
def loss(x: Any) -> Any:
    """REINFORCE; not a number where the cell asks for it."""
    value = -x.logprobs * x.advantages
    on = cell()
    if on.get("what") == "NaN gradients" and (first(on) or on["always"]):
        return value * float("nan")
    return value


@rlsdk.shaping("shaping")
def shaping(x: Any) -> Any:
    """Rewards as they are."""
    came("driver", "update")
    return x.rewards


@rlsdk.tracker("tracker")
class Tracker:
    """Fails at its calls, if asked to."""

    def open(self, run: Any) -> None:
        came("tracker", "start")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        came("tracker", "update")

    def close(self) -> None:
        came("tracker", "end")
