"""The learner's ranks as Ray actors that the driver calls together; results are in batch order."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import attrs
import numpy as np

from rlsdk.cluster.actors import kill, spawn
from rlsdk.cluster.gpus import GPUSeat
from rlsdk.cluster.portable import pickle_by_value
from rlsdk.contracts import ActorSpec, FreesDevice, LossSpec, Roles, TrainBatch, TrainedRole, Weights, WeightStream
from rlsdk.errors import LearnerError, RlsdkError
from rlsdk.fields import FORWARD
from rlsdk.learners.actor import LearnerActor
from rlsdk.learners.rank_calls import (
    OpenSteps,
    WeightCalls,
    answers,
    array_fault,
    bounded_below,
    metrics_fault,
    tokens_fault,
)
from rlsdk.learners.rows import read_lengths, split
from rlsdk.plugins import ComponentRef, Plugins

if TYPE_CHECKING:
    from rlsdk.batch import Totals


@attrs.define(eq=False)
class LearnerGroup:
    """All ranks of the learner, called together by the driver.

    Attributes:
        actors: Actor handles, by rank.
        places: Placements of the actors.
        logs: Log files of the actors.
        name: Name in messages and of the log files.
        ended: True if the actors were stopped or have failed.
        adapter_only: True if `weights` returns only the adapter.
        transfer: Weight transfer to the engines; None for Ray's object store.
    """

    actors: list[Any]
    places: list[ActorSpec]
    logs: list[Path]
    ended: bool = False
    adapter_only: bool = False
    transfer: ComponentRef | None = None
    name: str = "learner"
    _step: int = attrs.field(init=False, default=0)
    _training_calls: int = attrs.field(init=False, default=0)
    _steps: OpenSteps = attrs.field(init=False)
    _origin: str = attrs.field(init=False, default="learner")
    _sending: WeightCalls = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._sending = WeightCalls(self.actors, self._wait, self.transfer)

    @property
    def training_calls(self) -> int:
        """See `CountsTraining`."""
        return self._training_calls

    @classmethod
    def launch(
        cls,
        reference: ComponentRef,
        roles: Roles,
        loss: LossSpec,
        place: ActorSpec,
        *,
        total_updates: int,
        cpus: float = 1.0,
        seats: Sequence[GPUSeat] = (),
        resources: Mapping[str, float] | None = None,
        python: str = "",
        log_dir: Path,
        cache: Path | None = None,
        transfer: ComponentRef | None = None,
        name: str = "learner",
    ) -> Self:
        """Start `place.world_size` ranks and wait until all have loaded their models.

        Args:
            reference: Reference to the learner component.
            roles: Models of the learner.
            loss: Loss to minimise.
            place: Placement of rank 0; other ranks differ in `rank`, `cache` and `master`.
            total_updates: Length of the learning-rate schedule, in optimiser steps.
            cpus: Cores that Ray reserves for each rank.
            seats: GPUs reserved for each rank; empty on a CPU.
            resources: Additional resources that Ray reserves for each rank, by name.
            python: Command that starts the processes in place of Python; empty for Python.
            log_dir: Folder of the log files `NAME-RANK.log`; all ranks must see it, as with checkpoints.
            cache: Parent folder of each rank's compile caches, `NAME-RANK`.
            transfer: Weight transfer to the engines; None for Ray's object store.
            name: Name in messages and of the log files.

        Raises:
            LearnerError: A rank did not start, or cannot see the folder.
        """
        log_dir.mkdir(parents=True, exist_ok=True)
        template, ranks = Plugins().resolve(reference), range(place.world_size)
        caches = [str(cache / f"{name}-{rank}") if cache else place.cache for rank in ranks]
        places = [attrs.evolve(place, rank=rank, cache=caches[rank]) for rank in ranks]
        logs = [log_dir / f"{name}-{rank}.log" for rank in ranks]
        actors = [
            spawn(
                LearnerActor,
                str(logs[rank].resolve()),
                cpus=cpus,
                seat=seats[rank] if seats else None,
                resources=resources,
                environment=template.environment(places[rank]),
                python=python,
                watched_as=f"{name} rank {rank}",
                log_path=logs[rank].resolve(),
            )
            for rank in ranks
        ]
        group = cls(actors, places, logs, transfer=transfer, name=name)
        group._check_folder(log_dir)
        if len(actors) > 1:  # the ranks connect to rank 0
            addresses = group._wait("start", [actor.where.remote() for actor in actors])
            host = "127.0.0.1" if len({host for host, _ in addresses}) == 1 else addresses[0][0]
            group.places = [attrs.evolve(each, master=f"{host}:{addresses[0][1]}") for each in places]
        group.start(reference, roles, loss, total_updates)
        return group

    def _check_folder(self, folder: Path) -> None:
        """Check that all ranks see the driver's folder, to which they write checkpoints that the driver reads."""
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".seen-by-all-") as mark:
            seen = self._wait("start", [a.sees.remote(str(Path(mark.name).resolve())) for a in self.actors])
        for rank, (host, visible) in enumerate(seen):
            if not visible:
                self.stop()
                raise LearnerError(
                    f"{self.name} rank {rank}, on node {host}, does not see the driver's {folder}: checkpoints would "
                    "be lost. Set `out` to a folder that all nodes mount at the same path"
                )

    def start(self, reference: ComponentRef, roles: Roles, loss: LossSpec, total_updates: int) -> None:
        """Make every rank load its models; a second call restarts the learner in the same processes."""
        corrections = loss.correction.singles.values() if loss.correction else ()
        for each in (reference, *reference.named, loss.policy_loss, *corrections, loss.kl, self.transfer):
            pickle_by_value(each)
        self._origin = reference.origin
        self._steps = OpenSteps(reference.name, Plugins().resolve(reference), roles)
        starts = zip(self.actors, self.places, strict=True)
        common = (reference, roles, loss)
        self._wait("start", [a.start.remote(*common, p, total_updates, self.transfer) for a, p in starts])

    def forward(self, batch: TrainBatch, fields: Sequence[str]) -> dict[str, np.ndarray]:
        """Return fields computed by forward passes, float32 `[t]` each, in batch order."""
        values: dict[str, np.ndarray] = {}
        for model in ("actor", "reference"):
            wanted = {FORWARD[name].output: name for name in fields if FORWARD[name].model == model}
            if wanted:
                passed = self.logprobs(batch, model, tuple(wanted))
                values |= {name: passed[output] for output, name in wanted.items()}
        return values | ({"values": self.values(batch)} if "values" in fields else {})

    def logprobs(
        self,
        batch: TrainBatch,
        role: Literal["actor", "reference"] = "actor",
        fields: Sequence[str] = ("logprobs",),
    ) -> dict[str, np.ndarray]:
        """See `Learner.logprobs`; float32 `[t]` each, in batch order. No logprob is below `LEAST_LOGPROB`."""
        computed = self._shared_out("logprobs", batch, fields, role, tuple(fields))
        return computed if "logprobs" not in computed else {**computed, "logprobs": bounded_below(computed["logprobs"])}

    def values(self, batch: TrainBatch) -> np.ndarray:
        """See `Learner.values`; float32 `[t]`, in batch order."""
        return self._shared_out("values", batch, ("values",))["values"]

    def _shared_out(self, method: str, batch: TrainBatch, fields: Sequence[str], *args: Any) -> dict[str, np.ndarray]:
        shares = self._shares(batch, np.arange(len(batch)))
        alone = len(shares) == 1
        parts = [batch if alone else batch.select(share) for share in shares]
        results = self._call_each(method, [(part, *args) for part in parts])
        named = results if method == "logprobs" else [{fields[0]: result} for result in results]
        for part, result in zip(parts, named, strict=True):
            self._refuse(method, tokens_fault(result, fields, len(part.loss_mask)))
        if alone:
            return dict(named[0])
        whole = {name: np.empty(len(batch.loss_mask), np.float32) for name in fields}
        for share, result in zip(shares, named, strict=True):
            positions = batch.response_positions(share)
            for name in fields:
                whole[name][positions] = result[name]
        return whole

    def _shares(self, batch: TrainBatch, index: np.ndarray) -> list[np.ndarray]:
        """Return the rollouts `index`, distributed over ranks."""
        if len(self.actors) == 1:
            return [index]
        groups = batch.whole_groups
        shares = split(read_lengths(batch)[index], len(self.actors), None if groups is None else groups[index])
        return [index[share] for share in shares]

    def update(self, batch: TrainBatch, minibatches: Sequence[np.ndarray], step: int) -> dict[str, float]:
        """Take one optimiser step for each minibatch, and return metrics over all ranks; see `LearnerHandle`.

        Raises:
            LearnerError: A rank failed; the message names it and the step. All ranks are stopped.
        """
        self._steps.check_none("update")
        trained = batch.trained_tokens
        work: list[list[tuple[TrainBatch, int, int]]] = [[] for _ in self.actors]
        for index in minibatches:
            tokens, rollouts = int(trained[index].sum()), int(np.count_nonzero(trained[index]))
            for rank, share in enumerate(self._shares(batch, index)):
                work[rank].append((batch.select(share), tokens, rollouts))
        self._training_calls += 1
        results = self._call_each("update", [(each, step) for each in work], f"update of step {step + 1}", step + 1)
        self._refuse("update", metrics_fault(results[0]))
        return dict(results[0])

    def forward_backward(
        self,
        batch: TrainBatch,
        totals: Totals | None = None,
        *,
        role: TrainedRole = "actor",
        step: int = 0,
        update: int = 0,
        updates: int = 1,
        last: bool = True,
    ) -> None:
        """Accumulate the gradient of a batch for the optimiser step; see `LearnerHandle`.

        Raises:
            LearnerError: The call is out of order or unsupported, and nothing was done; or a rank failed, and all ranks
                are stopped.
        """
        self._steps.add(role, last=last)
        self._training_calls += 1
        options: dict[str, Any] = {"role": role, "step": step, "update": update, "updates": updates, "last": last}
        parts = [(batch.select(share), totals or batch.totals) for share in self._shares(batch, np.arange(len(batch)))]
        self._step = step
        self._call_each("forward_backward", parts, f"forward_backward of step {step + 1}", **options)

    def optimizer_step(self, role: TrainedRole = "actor") -> dict[str, float]:
        """Take one optimiser step along the accumulated gradient; return metrics over all batches and ranks.

        Raises:
            LearnerError: The gradient is missing or incomplete, and nothing was done; or a rank failed, and all ranks
                are stopped.
        """
        self._steps.take(role)
        self._training_calls += 1
        metrics = self._call("optimizer_step", role, version=self._step + 1)[0]
        self._refuse("optimizer_step", metrics_fault(metrics))
        return dict(metrics)

    def set_learning_rate(self, lr: float, role: TrainedRole = "actor") -> None:
        """Set the peak learning rate from the next optimiser step on; the schedule scales it and `save` stores it.

        Raises:
            LearnerError: The learning rate is negative or not finite, or the learner has no such method.
        """
        self._steps.check_rate(lr, role)
        self._call("set_learning_rate", float(lr), role)

    def move_reference(self) -> None:
        """Move the reference model towards the policy, by the share `reference_mix` of the roles.

        Raises:
            LearnerError: The reference model does not move.
        """
        if self._steps.roles.reference_mix is None:
            raise LearnerError("move_reference: the reference model does not move; set reference.update_every")
        self._call("move_reference")

    def weights(self, version: int) -> Any:
        """An `ObjectRef` of the actor's exported `Weights`, which engines fetch from Ray's object store.

        Raises:
            LearnerError: A rank failed; the message names it. All ranks are stopped by then.
        """
        return self._sending.whole(self._published, version)

    @property
    def streams(self) -> bool:
        """True if engines receive weights from `stream`; adapters are small and go through Ray's object store."""
        return self._sending.streams and not self.adapter_only

    def stream(self, engines: int, token_ids: np.ndarray, version: int | None = None) -> WeightStream:
        """Start sending the weights to engines, which must receive them at the same time; see `StreamsToEngines`.

        Raises:
            LearnerError: A rank failed; the message names it. All ranks are stopped by then.
        """
        return self._sending.stream(self._published, engines, token_ids, version)

    def fetch_weights(self, version: int) -> Weights:
        """Return the actor's weights themselves, where `weights` returns a reference."""
        weights: Weights = self._call(self._published, version)[0]
        return weights

    @property
    def _published(self) -> str:
        """Name of the learner's method that returns the weights for engines."""
        return "adapter_weights" if self.adapter_only else "weights"

    def checksums(self) -> dict[str, str]:
        """Return the CRC-32 of each tensor of the current weights."""
        calls = [actor.checksums.remote(self._published) for actor in self.actors]
        checksums: dict[str, str] = self._wait("checksums", calls)[0]
        return checksums

    def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the logprob of each token given those before it, at temperature 1, float32 `[k - 1]`."""
        logprobs = np.asarray(self._call("canary", token_ids)[0])
        self._refuse("canary", array_fault(logprobs, len(token_ids) - 1))
        return logprobs

    def save(self, folder: Path) -> None:
        """Write a checkpoint into a folder that all ranks see."""
        self._steps.check_none("save")
        self._call("save", Path(folder))

    def load(self, folder: Path) -> None:
        """Restore a checkpoint that `save` wrote.

        Raises:
            CheckpointError: It is damaged, or the learner's setup differs.
        """
        self._steps.check_none("load")
        self._call("load", Path(folder))

    def export(self, folder: Path) -> None:
        """Write a folder that `transformers.from_pretrained` can open."""
        self._call("export", Path(folder))

    def clock(self) -> dict[str, float]:
        """Return seconds and peak memory in bytes so far, each of the rank with the highest value.

        `update_flop`, the FLOPs needed in updates, is the mean over ranks.
        """
        clocks = self._wait("clock", [a.clock.remote() for a in self.actors])
        counters = {name: max(c.get(name, 0.0) for c in clocks) for name in clocks[0]}
        if "update_flop" in counters:
            counters["update_flop"] = sum(c.get("update_flop", 0.0) for c in clocks) / len(clocks)
        return counters

    def start_profile(self, ranks: Sequence[int], *, details: bool) -> None:
        """Start torch's profiler on some ranks.

        Args:
            ranks: Ranks to record.
            details: Also record shapes, memory and Python stacks.
        """
        arguments = [(rank in ranks, details) for rank in range(len(self.actors))]
        self._wait(
            "start_profile", [a.start_profile.remote(*each) for a, each in zip(self.actors, arguments, strict=True)]
        )

    def stop_profile(self, files: Mapping[int, Path]) -> None:
        """Stop torch's profiler, and write the Chrome trace of each recorded rank to its file."""
        paths = [str(files[rank].resolve()) if rank in files else "" for rank in range(len(self.actors))]
        self._wait("stop_profile", [a.stop_profile.remote(each) for a, each in zip(self.actors, paths, strict=True)])

    def sleep(self) -> None:
        """Free GPU memory for engines on the same GPUs, if the learner can (`FreesDevice`)."""
        if isinstance(self._steps.learner, FreesDevice):
            self._call("sleep")

    def stop(self) -> None:
        """End all ranks."""
        self.ended = True
        for actor in self.actors:
            kill(actor)

    def _refuse(self, method: str, fault: str) -> None:
        """End all ranks and raise an error, if there is a fault in what a method returned."""
        if fault:
            self.stop()
            raise LearnerError(f"{self._origin}: {method} returned {fault}")

    def _call(self, method: str, *arguments: Any, version: int | None = None) -> list[Any]:
        """Call a learner method on all ranks, with the same arguments; see `_call_each`."""
        return self._call_each(method, [arguments] * len(self.actors), version=version)

    def _call_each(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        what: str = "",
        version: int | None = None,
        **options: Any,
    ) -> list[Any]:
        """Call a learner method on each rank with its arguments; a `version` becomes the version of the weights."""
        with self._sending.lock:
            self._sending.version = self._sending.version if version is None else version
            calls = zip(self.actors, arguments, strict=True)
            refs = [actor.call.remote(method, *args, **options) for actor, args in calls]
        return self._wait(what or method, refs)

    def _wait(self, what: str, refs: Sequence[Any]) -> list[Any]:
        """Return the results of all ranks; if one fails, all are ended, so that none waits for it."""
        try:
            return answers(self.name, what, refs, self.logs)
        except RlsdkError:
            self.stop()
            raise
