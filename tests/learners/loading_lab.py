"""A learner rank in a separate process that reports the cost of loading a model, and whether it is intact.

    python loading_lab.py RANK WORLD DTYPE COMPARED PORT=MODEL...

At each port the ranks meet once: one that is quick could meet another's group of the model before.

Prints a line of JSON for each model: `peak` and `kept`, MiB of memory that is the process's own, above what it had
before, at the greatest and once the model was loaded; `faults`, tensors that differ from those of a plain load (only
if COMPARED is 1).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlsdk.contracts import ActorSpec, LossSpec, Model, Roles
from rlsdk.learners.deepspeed import DeepSpeedLearner
from rlsdk.plugins import Plugins


def own_memory() -> float:
    """MiB that this process alone has: without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


class Peak:
    """The greatest memory while a thread looks at it."""

    def __init__(self) -> None:
        self.before = self.found = own_memory()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.is_set():
            self.found = max(self.found, own_memory())
            time.sleep(0.005)

    def end(self) -> dict[str, float]:
        """Peak and remaining additional memory."""
        self._over.set()
        self._thread.join()
        return {"peak": self.found - self.before, "kept": own_memory() - self.before}


class Loaded(Exception):
    """Raised instead of training: all that is wanted is the loaded module."""


class LoadingLearner(DeepSpeedLearner):
    """A learner that ends once its actor is loaded."""

    def train(self, module: Any, *_: Any) -> Any:
        """End."""
        raise Loaded(module)


def compare(divided: Any, model: Model) -> list[str]:
    """Names of tensors that are not those of a plain load, in value or dtype."""
    import deepspeed
    import torch

    from rlsdk.learners.model import load_policy

    plain = load_policy(model, divided.model.config._attn_implementation, False)
    buffers, parameters = dict(divided.named_buffers()), dict(divided.named_parameters())
    same: Callable[[Any, Any], bool] = lambda a, b: a.dtype == b.dtype and torch.equal(a, b)  # noqa: E731
    faults = [name for name, each in plain.named_buffers() if not same(each, buffers[name])]
    for name, each in plain.named_parameters():
        with deepspeed.zero.GatheredParameters([parameters[name]]):
            faults += [] if same(each.data, parameters[name].data) else [name]
    return faults


def main() -> None:
    """Load each model, and print its cost."""
    import torch.distributed as dist

    rank, world, dtype, compared, *models = sys.argv[1:]
    loss = LossSpec(policy_loss=Plugins().reference("policy_loss", "ppo"))
    for port, path in (each.split("=", 1) for each in models):
        place = ActorSpec(role="learner", rank=int(rank), world_size=int(world), master=f"127.0.0.1:{port}")
        attention: Any = "eager" if "gpt-oss" in path else "sdpa"
        learner = LoadingLearner(zero_stage=3, attention=attention)
        learner.preload()
        model = Model(path=path, dtype=dtype)  # type: ignore[arg-type]
        peak = Peak()
        try:
            learner.start(Roles(actor=model), loss, place, 1)
        except Loaded as loaded:
            took = peak.end()
            print(json.dumps({**took, "faults": compare(loaded.args[0], model) if compared == "1" else []}), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Threads of gloo outlive `destroy_process_group`; one that still runs while the interpreter ends aborts it.
    os._exit(0)
