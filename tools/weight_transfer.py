"""Measure a weight sync with each weight transfer on this machine's CPU, and write the table in `docs/gpu.md`.

    python tools/weight_transfer.py              # the shape of Qwen2.5-0.5B, in bfloat16
    python tools/weight_transfer.py --layers 4   # a smaller model

It uses real learner ranks and engine actors, with random weights and without a forward pass: the learner exports a
transformers model as `deepspeed` does, and each engine copies the weights into another model.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import re
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from curves import ROOT, git

import rlsdk
from rlsdk.cluster.actors import kill
from rlsdk.contracts import ActorSpec, LossSpec, Model, Roles, Weights
from rlsdk.engines.canary import Canary
from rlsdk.engines.group import EngineGroup
from rlsdk.engines.starting import launch
from rlsdk.engines.weight_sync import deliver
from rlsdk.learners.export import WeightExporter
from rlsdk.learners.group import LearnerGroup
from rlsdk.learners.zero import full_tensors
from rlsdk.plugins import Plugins
from rlsdk.weights import from_weights

PAGE = ROOT / "docs" / "gpu.md"
TITLE = "## Weights from the learner to the engines"
WAYS = ("object_store", "gloo", "shared_memory")
MIB = 2**20
TIMES = 5
"""Number of measured syncs, after one that is not measured."""


def build(layers: int) -> Any:
    """Return a model with Qwen2.5-0.5B's shape and random weights, in bfloat16."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        net = Qwen2ForCausalLM(config).to(torch.bfloat16)
    net.to_empty(device="cpu")
    net.tie_weights()
    net._weight_conversions = []  # as `from_pretrained` sets it: names in memory are those of the checkpoint
    for tensor in net.parameters():
        tensor.data.view(torch.int16).random_(0, 2**14)
    return net


def memory(field: str) -> int:
    """Return a field of this process's status, in bytes."""
    (found,) = re.findall(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found) * 1024


class Measured:
    """A process with a model, and its memory since `reset`."""

    net: Any
    before: int

    def reset(self) -> None:
        """Reset the peak memory."""
        self.before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")

    def above(self) -> int:
        """Return the peak memory since `reset`, in bytes above the memory at `reset`."""
        return memory("VmHWM") - self.before


@rlsdk.learner("measured")
class MeasuredLearner(Measured):
    """Exports a model."""

    def environment(self, place: ActorSpec) -> dict[str, str]:
        """Return one thread for torch."""
        return place.environment()

    def start(self, roles: Roles, loss: LossSpec, place: ActorSpec, total_updates: int) -> None:
        """Build the model."""
        import deepspeed  # noqa: F401 - a real learner imports it, too

        from rlsdk.learners.ranks import Ranks

        self.net = build(int(roles.actor.path))
        ranks = Ranks(place.rank, place.world_size, "cpu")
        self.exporter = WeightExporter(self.net, roles.actor, ranks, None, partial(full_tensors, self.net))
        self.reset()

    def weights(self, version: int) -> Weights | None:
        """Return all weights, copied."""
        return self.exporter.weights(version)

    def weight_parts(self, version: int) -> Iterator[Weights | None]:
        """Return all weights layer by layer, not copied."""
        return self.exporter.parts(version, copy=False)

    def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """Return zeros."""
        return np.zeros(len(token_ids) - 1, np.float32)

    def memcpy(self) -> float:
        """Return the seconds for copying all bytes between touched memory."""
        import torch

        source = torch.ones(sum(p.nbytes for p in self.net.parameters()), dtype=torch.uint8)
        target, seconds = torch.zeros_like(source), []
        for _ in range(TIMES):
            began = time.perf_counter()
            target.copy_(source)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)


@rlsdk.engine("measured")
class MeasuredEngine(Measured):
    """Copies weights into a model."""

    unfinished = 0

    def environment(self, place: ActorSpec) -> dict[str, str]:
        """Return one thread for torch."""
        return place.environment()

    def start(self, model: Model, place: ActorSpec) -> None:
        """Build the model."""
        self.net = build(int(model.path))
        self.held = self.net.state_dict()
        self.reset()

    def load_weights(self, weights: Weights) -> None:
        """Copy all weights."""
        self.load_weight_parts(weights.version, iter((weights,)))

    def load_weight_parts(self, version: int, parts: Iterator[Weights]) -> None:
        """Copy each part as it arrives."""
        for part in parts:
            for name, tensor in from_weights(part):
                self.held[name].copy_(tensor)

    def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """Return zeros."""
        return np.zeros(len(token_ids) - 1, np.float32)


@attrs.frozen
class Row:
    """A row of the table: seconds of a sync, and each process's memory above its weights in bytes."""

    way: str
    engines: int
    seconds: float
    memcpy: float
    learner: int
    engine: int

    def __str__(self) -> str:
        ratio = f"{self.seconds / self.memcpy:.1f}"
        above = f"{self.learner / MIB:,.0f} | {self.engine / MIB:,.0f}"
        return f"| `{self.way}` | {self.engines} | {self.seconds:.2f} | {ratio} | {above} |"


async def measure(way: str, engines: int, layers: int, folder: Path) -> Row:
    """Sync several times, and return the median."""
    plugins, model = Plugins(), Model(path=str(layers))
    transfer = plugins.reference("weight_transfer", way)
    learner = LearnerGroup.launch(
        plugins.reference("learner", MeasuredLearner),
        Roles(actor=model),
        LossSpec(policy_loss=plugins.reference("policy_loss", "reinforce")),
        ActorSpec(role="learner", threads=1),
        total_updates=1,
        cpus=0,
        log_dir=folder,
        transfer=transfer,
    )
    places = [ActorSpec(role="engine", rank=rank, threads=1) for rank in range(engines)]
    actors = [launch(plugins.reference("engine", MeasuredEngine), p, cpus=0, transfer=transfer) for p in places]
    await asyncio.gather(*(actor.start.remote(model, p) for actor, p in zip(actors, places, strict=True)))
    group, canary, seconds = EngineGroup(actors, shared=False), Canary(np.arange(3), 1.0), []
    for version in range(TIMES + 1):
        began = time.perf_counter()
        found = await deliver(group, learner, version, canary.token_ids, wake=False)
        seconds.append(time.perf_counter() - began)
        del found  # free the object, so that the store does not hold two
    above = [await actor.__ray_call__.remote(lambda owner: owner._engine.above()) for actor in actors]
    own = await learner.actors[0].call.remote("above")
    copied = await learner.actors[0].call.remote("memcpy")
    learner.stop()
    for actor in actors:
        kill(actor)
    return Row(way, engines, statistics.median(seconds[1:]), copied, own, max(above))


def page(rows: list[Row], layers: int, size: int) -> str:
    """Return the section of the page."""
    largest = max(p.nbytes for p in build(1).parameters())
    when = datetime.datetime.now(datetime.UTC).date().isoformat()
    cores = len(os.sched_getaffinity(0))
    about = f"""`python tools/weight_transfer.py` measures a sync on this CPU, by each [weight
transfer](howto/weight_transfer.md): a model of Qwen2.5-0.5B's shape ({layers} layers, bfloat16,
{size / MIB:,.0f} MiB, {largest / MIB:,.0f} MiB of them the embeddings), random weights, no forward pass, one learner
rank and one or two engines in separate processes on {cores} cores. *memcpy* is the time the learner's process takes to
copy as many bytes, measured in the same run."""
    how = f"""Commit `{git("rev-parse", "--short", "HEAD")}`, {when}; load of the machine {os.getloadavg()[0]:.1f}.
Medians of {TIMES} syncs; memory is the maximum over all of them, including code and buffers of the transfer, and Ray's
shared memory where a process maps it."""
    table = f"""\
| transfer | engines | seconds | × memcpy | learner, MiB above its weights | engine, MiB above its weights |
| --- | ---: | ---: | ---: | ---: | ---: |
{chr(10).join(map(str, rows))}"""
    wrapped = partial(textwrap.fill, width=120, break_on_hyphens=False, break_long_words=False)
    return f"{TITLE}\n\n{wrapped(about)}\n\n{table}\n\n{wrapped(how)}\n"


def main() -> None:
    """Measure, and write the section."""
    import ray

    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    arguments.add_argument("--layers", type=int, default=24)
    layers = arguments.parse_args().layers
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=4 * 2**30)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for engines in (1, 2):
            for way in WAYS:
                rows.append(asyncio.run(measure(way, engines, layers, Path(folder))))
                print(rows[-1], flush=True)
    size = sum(p.nbytes for p in build(layers).parameters())
    text = PAGE.read_text(encoding="utf-8")
    before, _, after = text.partition(f"{TITLE}\n")
    rest = re.split(r"(?m)^(?=## )", after, maxsplit=1)[1:] if after else []
    PAGE.write_text(
        f"{before.rstrip()}\n\n{page(rows, layers, size)}{''.join(chr(10) + r for r in rest)}", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
