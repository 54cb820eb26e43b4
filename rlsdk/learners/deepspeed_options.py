"""Options of the DeepSpeed learner, the checks that they imply, and the memory of a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs

from rlsdk.cluster.compiled import compiler_programs
from rlsdk.contracts import ActorSpec, MemoryUse, Model, Roles
from rlsdk.contracts.generation import DTYPE_BYTES
from rlsdk.errors import LearnerError
from rlsdk.learners.estimate import RankMemory, count_parameters
from rlsdk.learners.options import LearnerOptions
from rlsdk.learners.ranks import environment
from rlsdk.limits import Count

PROCESS_BYTES = 450 * 2**20
"""Memory of a rank's process without any model: Python, torch, DeepSpeed and Ray."""
BUCKET_ELEMENTS = 500_000_000
"""Elements of DeepSpeed's communication buffers (`reduce_bucket_size`)."""
LIVE_ELEMENTS = 1_000_000_000
"""Elements of parameters that ZeRO-3 gathers ahead at most (`stage3_max_live_parameters`)."""


@attrs.define(kw_only=True, eq=False)
class DeepSpeedOptions(LearnerOptions):
    """Options of `DeepSpeedLearner`, in addition to those of `LearnerOptions`.

    Attributes:
        zero_stage: State sharded across ranks: 0 nothing, 1 optimiser state, 2 also gradients, 3 also weights. In
            bfloat16, 0 works as 1, because DeepSpeed's stage 0 sums gradients in bfloat16.
        offload: State kept in host memory instead of GPU memory: none, optimizer (stage 1 and up), all (stage 3).
        sequence_parallel: Number of ranks that share the tokens of each rollout (Ulysses), for rollouts too long for
            one rank; each reads `micro_batch_tokens`. Must divide the number of ranks and of the model's heads.
        compile: Compile the models with `torch.compile`: updates take 20 % less time on the two cores of
            docs/benchmarks.md, but the first pass of each kind takes half a minute longer, unless an earlier run
            compiled the same. Needs g++ or the compiler that `CXX` names.
    """

    takes_optimizers: ClassVar[bool] = True

    zero_stage: Literal[0, 1, 2, 3] = 1
    offload: Literal["none", "optimizer", "all"] = "none"
    sequence_parallel: Count = 1
    compile: bool = False

    def __attrs_post_init__(self) -> None:
        if self.offload == "optimizer" and self.zero_stage == 0:
            raise ValueError("offload: optimizer needs zero_stage 1 or more; without ZeRO, DeepSpeed offloads nothing")
        if self.offload == "all" and self.zero_stage != 3:
            raise ValueError(f"offload: all needs zero_stage 3, which splits weights; got zero_stage {self.zero_stage}")
        super().__attrs_post_init__()
        if self.zero_stage and self.needs_whole_tensors:
            raise ValueError(
                f"optimizer: {self.optimizer_name} needs whole tensors, but zero_stage: {self.zero_stage} flattens "
                "them; set zero_stage: 0"
            )
        self.check_readers("sequence_parallel")
        if self.compile and (self.sequence_parallel > 1 or self.lora):
            raise ValueError("compile cannot be combined with sequence_parallel or lora yet; choose one")

    @property
    def programs(self) -> tuple[str, ...]:
        """Programs that these options need."""
        return compiler_programs() if self.compile else ()

    @property
    def readers(self) -> int:
        """Number of ranks that share the tokens of each rollout."""
        return self.sequence_parallel

    @property
    def packs_without_mask(self) -> bool:
        """True if packed rollouts can attend separately, if the model allows it; False if a mask separates them."""
        return super().packs_without_mask and not self.compile  # compile would recompile for each packing

    @property
    def memory_remedies(self) -> tuple[str, ...]:
        """Options that would lower the memory of a rank, cheapest first."""
        remedies = {
            "gradient_checkpointing=true": not self.gradient_checkpointing and self.rows != "shared",
            "micro_batch_tokens=auto": self.micro_batch_tokens != "auto",
            "zero_stage=3 on more ranks (placement.learners)": self.zero_stage < 3,
            "offload=all, or offload=optimizer (GPUs only)": self.offload == "none",
            "lora": self.lora is None,
        }
        return tuple(f"learner.{name}" for name, open_ in remedies.items() if open_)

    def rank_memory(self, roles: Roles, place: ActorSpec) -> RankMemory:
        """Return the memory of a rank without activations, as DeepSpeed shards it."""
        cpu = place.device == "cpu"
        uses, trained, reference = [], [], 0
        for model, title, lora in ((roles.actor, "learner", self.lora is not None), (roles.critic, "critic", False)):
            if model is None:
                continue
            held = _TrainedBytes.of(self, model, place, lora=lora)
            uses += [
                MemoryUse("learner weights" if title == "learner" else title, held.weights, held.weights_on_host),
                MemoryUse(f"{title} gradients", held.gradients, turn="learn"),
                MemoryUse(f"{title} optimiser state", held.optimizer, held.optimizer_on_host, "learn"),
            ]
            trained.append(held)
        if roles.reference is not None and not (self.lora and roles.reference == roles.actor):
            shared = place.world_size if self.zero_stage == 3 else 1
            width = DTYPE_BYTES[roles.reference.dtype] + (4 if roles.copies_reference else 0)
            reference = count_parameters(roles.reference)[0] * width // shared
            uses.append(MemoryUse("reference model", reference, self.offload == "all", "learn"))
        if not cpu and trained:
            uses.append(MemoryUse("communication buffers", trained[0].buffers))
            if place.colocated:  # while engines generate on its GPU
                asleep = sum(each.asleep for each in trained) + (0 if self.offload == "all" else reference)
                uses.append(MemoryUse("sleeping learner", asleep, on_host=True))
        uses.append(MemoryUse("learner process", PROCESS_BYTES, on_host=not cpu))
        return RankMemory(uses=tuple(uses), step=max((each.step for each in trained), default=0))

    def model_faults(self, model: Any) -> Sequence[str]:
        """Return why a model cannot be trained with these options; the model may have no weights."""
        from rlsdk.vision import layout_faults

        unseen = layout_faults(
            model,
            {
                f"sequence_parallel: {self.sequence_parallel} would cut them; leave it out": self.sequence_parallel > 1,
                "compile: true is not tested with them; leave it out": self.compile,
            },
        )
        faults = [*super().model_faults(model), *unseen]
        if self.needs_whole_tensors and str(model.dtype) == "torch.bfloat16":
            faults.append(self.flattened_fault)
        if self.sequence_parallel == 1:
            return faults
        from rlsdk.learners.ulysses import sequence_faults

        return [*faults, *sequence_faults(model, self.sequence_parallel)]

    @property
    def flattened_fault(self) -> str:
        """Why an optimiser that needs whole tensors cannot train a bfloat16 model."""
        return (
            f"optimizer: {self.optimizer_name} needs whole tensors, but DeepSpeed flattens those of a bfloat16 model "
            "in every stage; set model.dtype=float32"
        )

    def routing_faults(self, model: Any) -> Sequence[str]:
        """Return why the engine's expert routing cannot be replayed with these options."""
        from rlsdk.routing import replay_fault

        if self.compile:
            return ["compile: true cannot replay routed experts; set learner.compile=false"]
        fault = replay_fault(model)
        return [fault] if fault else []

    def exact_faults(self) -> Sequence[str]:
        """Return the options that conflict with `model.exact`."""
        reasons = {
            "compile: true fuses operations, and so rounds differently than the engine": self.compile,
            f"sequence_parallel: {self.sequence_parallel} splits what the engine reads": self.sequence_parallel > 1,
        }
        return [*(f"{reason}; leave it out" for reason, given in reasons.items() if given), *super().exact_faults()]

    def reference_faults(self) -> Sequence[str]:
        """Return the options with which the reference model cannot follow the policy."""
        adapted = "lora trains an adapter beside a frozen base, which is the reference model; train all weights instead"
        return [adapted] if self.lora else []

    def environment(self, place: ActorSpec) -> Mapping[str, str]:
        """Return the environment variables to set before the actor's process imports anything.

        Raises:
            LearnerError: `sequence_parallel` does not divide the number of ranks.
        """
        if place.world_size % self.sequence_parallel:
            needed = f"sequence_parallel: {self.sequence_parallel} needs that number of learner ranks or a multiple"
            raise LearnerError(f"{needed}; got {place.world_size}; change placement.learners")
        return environment(place, compiled=self.compile)


@attrs.frozen(kw_only=True)
class _TrainedBytes:
    """Bytes of a trained model on one rank; `asleep` of them move to host memory while engines use its GPU."""

    weights: int
    gradients: int
    optimizer: int
    asleep: int
    step: int
    buffers: int
    weights_on_host: bool
    optimizer_on_host: bool

    @classmethod
    def of(cls, options: DeepSpeedOptions, model: Model, place: ActorSpec, *, lora: bool) -> _TrainedBytes:
        every, trained = count_parameters(model, options.lora if lora else None)
        width, ranks, cuda = DTYPE_BYTES[model.dtype], place.world_size, place.device == "cuda"
        stage = 1 if width == 2 and options.zero_stage == 0 else options.zero_stage
        share = -(-trained // ranks) if stage else trained
        # Gradients accumulate in float32; in stages 2 and 3 only those of the rank's shard.
        gradients = 4 * (share if stage >= 2 else trained)
        narrow = stage == 1 and width == 2
        if narrow:  # a separate optimiser, which also keeps gradients of each micro-batch, but needs no buffers
            gradients += width * trained
        buckets = 0 if stage == 0 or narrow else 1 if stage == 3 else 2
        gathered = min(every, LIVE_ELEMENTS) * width if stage == 3 and ranks > 1 else 0
        # Its state, such as two moments, and, with ZeRO, a copy of the weights in float32.
        optimizer = int(share * (options.state_bytes + (4 if stage else 0)))
        on_host = cuda and options.offload != "none"
        return cls(
            weights=every * width // (ranks if stage == 3 else 1) + gathered,
            gradients=gradients,
            optimizer=optimizer,
            asleep=0 if on_host else optimizer,  # gradients are zeros by then
            step=4 * share if buckets == 2 else 0,
            buffers=BUCKET_ELEMENTS * 4 * buckets,
            weights_on_host=cuda and options.offload == "all",
            optimizer_on_host=on_host,
        )
