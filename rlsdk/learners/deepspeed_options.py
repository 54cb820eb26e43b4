"""Options of the learner on DeepSpeed, and what they require of a model and a machine before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

from rlsdk.contracts import ActorSpec, Roles
from rlsdk.errors import LearnerError
from rlsdk.learners.options import LearnerOptions
from rlsdk.learners.ranks import environment
from rlsdk.learners.zero import Offload

if TYPE_CHECKING:
    from rlsdk.learners.estimate import RankMemory


@attrs.define(kw_only=True, eq=False)
class DeepSpeedOptions(LearnerOptions):
    """Options of `DeepSpeedLearner` beside those of `LearnerOptions`.

    Attributes:
        zero_stage: Parts that ranks divide: 0 nothing, 1 the optimiser's state, 2 gradients too, 3 weights too. In
            bfloat16, 0 works as 1, because DeepSpeed's stage 0 sums gradients in bfloat16.
        offload: Parts kept in main memory instead of the GPU's: none, optimizer (stage 1 and up), all (stage 3).
        sequence_parallel: Ranks that share the tokens of each rollout (Ulysses), for rollouts too long for one; each
            reads `micro_batch_tokens` of a micro-batch. Divides the number of ranks and the model's heads.
        compile: Compile the models with `torch.compile`: on the two cores of docs/benchmarks.md an update takes a fifth
            less time, but the first of each kind of pass half a minute more. Needs g++, or what `CXX` names.
    """

    zero_stage: Literal[0, 1, 2, 3] = 1
    offload: Offload = "none"
    sequence_parallel: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    compile: bool = False

    def __attrs_post_init__(self) -> None:
        if self.offload == "optimizer" and self.zero_stage == 0:
            raise ValueError("offload: optimizer needs zero_stage 1 or more; without ZeRO, DeepSpeed offloads nothing")
        if self.offload == "all" and self.zero_stage != 3:
            raise ValueError(f"offload: all needs zero_stage 3, which splits weights; got zero_stage {self.zero_stage}")
        super().__attrs_post_init__()
        self.check_readers("sequence_parallel")
        if self.compile and (self.sequence_parallel > 1 or self.lora):
            raise ValueError("compile cannot be combined with sequence_parallel or lora yet; choose one")

    @property
    def programs(self) -> tuple[str, ...]:
        """Programs these options need: `torch.compile` calls the compiler that `CXX` names, as torch parses it."""
        return (os.environ.get("CXX", "g++"),) if self.compile else ()

    @property
    def readers(self) -> int:
        """Number of ranks that share the tokens of each rollout."""
        return self.sequence_parallel

    @property
    def packs_without_mask(self) -> bool:
        """True if packed rollouts attend one after another, where the model allows it; false if a mask parts them."""
        return super().packs_without_mask and not self.compile  # which would compile again for each packing

    @property
    def memory_remedies(self) -> tuple[str, ...]:
        """Options that would lower the memory of a rank, those first that cost least."""
        found = {
            "gradient_checkpointing=true": not self.gradient_checkpointing and self.rows != "shared",
            "micro_batch_tokens=auto": self.micro_batch_tokens != "auto",
            "zero_stage=3 on more ranks (placement.learners)": self.zero_stage < 3,
            "offload=all, or offload=optimizer (GPUs only)": self.offload == "none",
            "lora": self.lora is None,
        }
        return tuple(f"learner.{name}" for name, open_ in found.items() if open_)

    def rank_memory(self, roles: Roles, place: ActorSpec) -> RankMemory:
        """Return what a rank holds beside the activations of its passes, as DeepSpeed divides it."""
        from rlsdk.learners.estimate import zero_memory

        return zero_memory(self, roles, place)

    def model_faults(self, model: Any) -> Sequence[str]:
        """Say why a model cannot be trained with these options; it may have no weights."""
        from rlsdk.vision import layout_faults

        unseen = layout_faults(
            model,
            {
                f"sequence_parallel: {self.sequence_parallel} would cut them; leave it out": self.sequence_parallel > 1,
                "compile: true is not tried with them; leave it out": self.compile,
            },
        )
        if self.sequence_parallel == 1:
            return [*super().model_faults(model), *unseen]
        from rlsdk.learners.ulysses import sequence_faults

        return [*super().model_faults(model), *unseen, *sequence_faults(model, self.sequence_parallel)]

    def routing_faults(self, model: Any) -> Sequence[str]:
        """Say why the engine's choices of experts cannot be replayed with these options."""
        from rlsdk.routing import replay_fault

        if self.compile:
            return ["compile: true replays no experts; set learner.compile=false"]
        fault = replay_fault(model)
        return [fault] if fault else []

    def exact_faults(self) -> Sequence[str]:
        """Say which options stand in the way of `model.exact`."""
        reasons = {
            "compile: true fuses operations, which rounds otherwise than the engine": self.compile,
            f"sequence_parallel: {self.sequence_parallel} splits what the engine reads": self.sequence_parallel > 1,
        }
        return [*(f"{reason}; leave it out" for reason, given in reasons.items() if given), *super().exact_faults()]

    def environment(self, place: ActorSpec) -> Mapping[str, str]:
        """Environment variables to set before the actor's process imports anything.

        Raises:
            LearnerError: `sequence_parallel` does not divide the ranks.
        """
        if place.world_size % self.sequence_parallel:
            needed = f"sequence_parallel: {self.sequence_parallel} needs as many learner ranks, or a multiple of them"
            raise LearnerError(f"{needed}; got {place.world_size}, change placement.learners")
        return environment(place, compiled=self.compile)
