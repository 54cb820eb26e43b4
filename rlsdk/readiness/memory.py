"""Estimate the memory of a run's processes before it starts: on each GPU, and on the machine."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from math import ceil
from typing import Any, Literal

import attrs

from rlsdk import preflight
from rlsdk.cluster.address import RayAddress
from rlsdk.cluster.gpus import GPUMap, GPUNode, GPUPlace
from rlsdk.cluster.placement import gpu_map, sections_apart
from rlsdk.config import Plan
from rlsdk.contracts import (
    ActorSpec,
    ApartRole,
    EstimatesGeneration,
    EstimatesUpdates,
    MemoryUse,
    SizesBuckets,
    SpansGPUs,
    StreamsTensors,
    StreamsWeights,
    TakesAdapter,
    UpdateShape,
)
from rlsdk.contracts.generation import DTYPE_BYTES
from rlsdk.contracts.optional import Turn
from rlsdk.errors import EngineError, EnvironmentFault, LearnerError, first_line
from rlsdk.learners.apart import roles, roles_apart
from rlsdk.readiness.models import adapter_of

DRIVER_BYTES = 600 * 2**20
"""Host memory of the driver and of Ray's own processes."""
COPIES = 2
"""Copies of the weights in Ray's object store: those loaded by engines, and the next ones."""


@attrs.frozen(kw_only=True)
class MemoryRow:
    """Memory of one process for one purpose.

    Attributes:
        role: Purpose, such as `learner weights`.
        bytes: Size.
        of: Total memory of the device or machine; None if unknown.
        where: Device: `GPU`, or `engine GPU` and `learner GPU` if they differ, or `host`.
        processes: Number of such processes on it.
        turn: Phase in which a shared GPU holds it; empty for both.
    """

    role: str
    bytes: int
    of: int | None
    where: str
    processes: int = 1
    turn: Turn = ""


@attrs.frozen(kw_only=True)
class MemoryEstimate:
    """Memory that a run needs at the same time.

    Attributes:
        rows: One row per process and purpose.
        unknown: Sentences about what could not be estimated.
        remedies: Options that would reduce the memory on each device.
    """

    rows: tuple[MemoryRow, ...] = ()
    unknown: tuple[str, ...] = ()
    remedies: Mapping[str, Sequence[str]] = attrs.field(factory=dict)

    @property
    def places(self) -> list[str]:
        """Devices of the rows, in order."""
        return list(dict.fromkeys(row.where for row in self.rows))

    def total(self, where: str) -> int:
        """Return the bytes needed on a device at once; on a shared GPU, engines and learner take turns."""
        needed: Counter[Turn] = Counter()
        for row in self.rows:
            if row.where == where:
                needed[row.turn if where == "GPU" else ""] += row.bytes * row.processes
        return needed[""] + max(needed["learn"], needed["generate"] + max(needed["sync"], needed["sample"]))

    def capacity(self, where: str) -> int | None:
        """Return the memory of a device; None if unknown."""
        return next((row.of for row in self.rows if row.where == where), None)

    def shortages(self) -> Iterator[str]:
        """Yield what does not fit, and what to reduce."""
        size = preflight.size_text
        for where in self.places:
            has, needs = self.capacity(where), self.total(where)
            if has is None or needs <= has:
                continue
            largest = sorted((row for row in self.rows if row.where == where), key=lambda row: -row.bytes)[:3]
            parts = ", ".join(f"{row.role} {size(row.bytes)}" for row in largest)
            what = "this machine" if where == "host" else f"each {where}"
            remedies = ", ".join(dict.fromkeys(self.remedies.get(where, ())))
            yield (
                f"about {size(needs)} is needed at once, and {what} has {size(has)}; most is for {parts}. To reduce "
                f"it: {remedies}"
            )


def estimate_memory(
    plan: Plan, built: tuple[Any, str], *, nodes: Sequence[GPUNode] | None = None, gpu_bytes: int | None = None
) -> MemoryEstimate:
    """Estimate the memory of a plan, without running anything.

    Args:
        plan: Checked plan.
        built: The model without its weights, or why it is missing; see `rlsdk.readiness.disk.skeleton`.
        nodes: GPU nodes to run on; None for this machine.
        gpu_bytes: Memory of a GPU; None to use that of this machine's GPUs.
    """
    if find_spec("torch") is None or find_spec("transformers") is None:
        remedy = "that needs torch and transformers: pip install 'rlsdk[train]'"
        return MemoryEstimate(unknown=(f"memory is not estimated: {remedy}",))
    found = _Estimate.of(plan, nodes, gpu_bytes)
    net, why = built
    if net is None:
        return MemoryEstimate(unknown=(f"memory is not estimated: {why}",))
    try:
        found.learner()
    # A model cannot be trained, its config cannot be read, or it needs the values of tensors that are fake here.
    except (OSError, ValueError, LearnerError, RuntimeError) as error:
        return MemoryEstimate(unknown=(f"memory is not estimated: {first_line(error)}",))
    if plan.needs_engine:
        found.engines(net)
        found.sync(net)
    for part in plan.rewards:
        if plan.plugins.component(part.reference).runs == "actor":
            found.unknown.append(f"the reward {part.reference.name!r} runs in its own process, which is not estimated")
    found.add([MemoryUse("driver and Ray", DRIVER_BYTES, on_host=True)], "host", 1)
    return MemoryEstimate(rows=tuple(found.rows), unknown=tuple(found.unknown), remedies=dict(found.remedies))


def gpu_shortages(plan: Plan, built: tuple[Any, str]) -> list[str]:
    """Return what will not fit on this machine and its GPUs; nothing if the run has other machines or no GPU.

    Args:
        plan: Checked plan.
        built: As in `estimate_memory`.
    """
    place = plan.config.placement
    if place.device == "cpu" or RayAddress.find(place) is not None or not preflight.gpu_count():
        return []
    return [f"memory: {text}" for text in estimate_memory(plan, built).shortages()]


@attrs.define(kw_only=True)
class _Estimate:
    """Collects the rows.

    Attributes:
        plan: Checked plan.
        cuda: True if the actors run on GPUs.
        nodes: Number of machines.
        placed: GPUs assigned to actors; empty if there are too few.
        gpu_bytes: Memory of a GPU; None if unknown.
        host_bytes: Memory of a machine; None if unknown.
        remedies: Options that would reduce the memory on each device.
    """

    plan: Plan
    cuda: bool
    nodes: int
    placed: GPUMap
    gpu_bytes: int | None
    host_bytes: int | None
    rows: list[MemoryRow] = attrs.field(factory=list)
    unknown: list[str] = attrs.field(factory=list)
    remedies: defaultdict[str, list[str]] = attrs.field(factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, plan: Plan, nodes: Sequence[GPUNode] | None, gpu_bytes: int | None) -> _Estimate:
        device = plan.config.placement.device
        here = preflight.gpu_count() if device != "cpu" else 0
        if gpu_bytes is None and here:
            import torch

            gpu_bytes = int(torch.cuda.get_device_properties(0).total_memory)
        placed = GPUMap(())
        if nodes is not None:
            with suppress(EnvironmentFault):  # another check reports it
                placed = gpu_map(plan, nodes)
        return cls(
            plan=plan,
            cuda=device == "cuda" or (device == "auto" and bool(here or nodes)),
            nodes=1 if nodes is None else len(nodes),
            placed=placed,
            gpu_bytes=gpu_bytes,
            host_bytes=preflight.main_memory() if nodes is None else None,
        )

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Device of the actors."""
        return "cuda" if self.cuda else "cpu"

    def learner(self) -> None:
        """Add the rows of the learner's ranks."""
        plan, place = self.plan, self.plan.config.placement
        learner = plan.plugins.resolve(plan.learner)
        if not isinstance(learner, EstimatesUpdates):
            self.unknown.append(f"the learner {plan.learner.name!r} does not report how much memory it needs")
            return
        shared = place.colocate and plan.needs_engine
        spec = ActorSpec(role="learner", world_size=place.learners, device=self.device, colocated=shared)
        where = "GPU" if shared else "learner GPU"
        self._reduced_by(learner.memory_remedies, where, "host")
        uses = learner.update_memory(roles(plan), spec, self._shape(place.learners, plan.config.minibatches))
        self.add(uses, where, place.learners, self.placed.learners)
        for role, section in sections_apart(plan).items():
            self._apart(role, section.ranks)

    def _apart(self, role: ApartRole, ranks: int) -> None:
        """Add the rows of a model with dedicated processes."""
        learner = self.plan.plugins.resolve(self.plan.apart[role])
        if not isinstance(learner, EstimatesUpdates):
            self.unknown.append(f"the learner {self.plan.apart[role].name!r} does not report how much memory it needs")
            return
        spec = ActorSpec(role="learner", world_size=ranks, device=self.device)
        held = roles_apart(self.plan)[role]
        shape = self._shape(ranks, self.plan.config.minibatches if held.trains else 1)
        uses = learner.update_memory(held, spec, shape)
        named = [attrs.evolve(use, role=use.role.replace("learner", role)) for use in uses]
        self._reduced_by(
            [each.replace("learner.", f"{role}.learner.") for each in learner.memory_remedies], f"{role} GPU"
        )
        self.add(named, f"{role} GPU", ranks, self.placed.apart.get(role, ()))

    def engines(self, net: Any) -> None:
        """Add the rows of the engines."""
        plan, place = self.plan, self.plan.config.placement
        engine = plan.plugins.resolve(plan.engine)
        if not isinstance(engine, EstimatesGeneration):
            self.unknown.append(f"the engine {plan.engine.name!r} does not report how much memory it needs")
            return
        spec = ActorSpec(role="engine", world_size=place.engines, device=self.device, colocated=place.colocate)
        if isinstance(engine, TakesAdapter) and (adapter := adapter_of(plan)):
            with suppress(EngineError):  # reported by the check of the model
                engine.expect_adapter(adapter)
        where = "GPU" if place.colocate else "engine GPU"
        self._reduced_by(["engine.kv_cache_gib", "placement.engines"], "host")
        split = "placement.gpus_per_engine, and the same number for engine.tensor_parallel_size"
        spans = isinstance(engine, SpansGPUs)
        self._reduced_by([split, "engine.gpu_memory_utilization"] if spans else ["engine.kv_cache_gib"], where)
        uses = engine.generation_memory(plan.model, net, spec, self.gpu_bytes)
        self.add(uses, where, place.engines, self.placed.engines)

    def sync(self, net: Any) -> None:
        """Add the rows of the weights on their way from the learner to the engines."""
        plan, place = self.plan, self.plan.config.placement
        transfer = plan.plugins.resolve(plan.weight_transfer)
        sizes = [p.numel() * DTYPE_BYTES[plan.config.model.dtype] for p in net.parameters()]
        if isinstance(transfer, SizesBuckets):
            on_host = not isinstance(transfer, StreamsTensors) or transfer.device == "cpu"
            use = MemoryUse("arriving weights", transfer.arriving_bytes(max(sizes)), on_host, "sync")
            self.add([use], "GPU" if place.colocate else "engine GPU", place.engines, self.placed.engines)
        elif not isinstance(transfer, StreamsWeights):
            self.add([MemoryUse("object store", sum(sizes) * COPIES, on_host=True)], "host", 1)

    def add(self, uses: Sequence[MemoryUse], device: str, count: int, places: Sequence[GPUPlace] = ()) -> None:
        """Add the memory of each of `count` processes; host memory is counted for the fullest machine."""
        here = max(Counter(place.node for place in places).values(), default=ceil(count / self.nodes))
        for use in uses:
            if not use.bytes:
                continue
            if self.cuda and not use.on_host:
                row = MemoryRow(role=use.role, bytes=use.bytes, of=self.gpu_bytes, where=device, turn=use.turn)
            else:
                row = MemoryRow(role=use.role, bytes=use.bytes, of=self.host_bytes, where="host", processes=here)
            self.rows.append(row)

    def _reduced_by(self, remedies: Iterable[str], *places: str) -> None:
        for where in places:
            self.remedies[where] += remedies

    def _shape(self, ranks: int, parts: int) -> UpdateShape:
        """Return one rank's share of a batch split into `parts`, with rollouts of maximum length."""
        config = self.plan.config
        prompt, longest = config.max_prompt_tokens, config.max_prompt_tokens + config.sampling.max_tokens
        if not self.plan.plugins.component(self.plan.workflow).one_answer:
            longest = config.model.max_length
        longest = min(config.model.max_length, longest)
        prompt = min(prompt, longest - 1)
        each = config.group_size if self.plan.sampled else 1
        share = ceil(config.batch_size * each / parts / ranks)
        free = self.gpu_bytes if self.cuda else self.host_bytes and self.host_bytes // ranks
        return UpdateShape(
            rollouts=share,
            prompt=prompt,
            response=longest - prompt,
            prompts=ceil(share / each),
            together=config.group_size if "groups" in self.plan.needs else 2 if self.plan.whole_groups else 1,
            free=free,
        )


def in_words(found: MemoryEstimate) -> dict[str, str | list[str]]:
    """Describe an estimate: name -> text."""
    size, words = preflight.size_text, {}
    for row in found.rows:
        several = f"{row.processes} × " if row.processes > 1 else ""
        words[f"{row.role} ({row.where})"] = f"{several}{size(row.bytes)}"
    for where in found.places:
        has = found.capacity(where)
        of = "" if has is None else f" of {size(has)}"
        words[f"needed at once ({where})"] = f"{size(found.total(where))}{of}"
    return {**words, **({"unknown": list(found.unknown)} if found.unknown else {})}
