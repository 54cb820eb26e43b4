"""Options of the learner on DeepSpeed, and what they require of a model and a machine before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import attrs

from rlsdk.contracts import ActorSpec, DType, MemoryUse, Roles, UpdateShape
from rlsdk.contracts.generation import DTYPE_BYTES
from rlsdk.errors import LearnerError
from rlsdk.learners.lora import Lora, adapter_fault, count_adapter
from rlsdk.learners.ranks import environment
from rlsdk.learners.rows import RowStyle
from rlsdk.learners.zero import Offload, Schedule
from rlsdk.limits import NonNegative, Share, at_least, below

Decay = Annotated[float, at_least(0), below(1)]
Attention = Literal["sdpa", "flash_attention_2", "eager"]
ValueInit = Literal["zero", "small"]


def _positive_or_auto(_: Any, __: Any, value: int | str) -> None:
    if value != "auto" and (isinstance(value, str) or value <= 0):
        raise ValueError(f"micro_batch_tokens: expected a number above 0, or auto; got {value!r}")


@attrs.define(kw_only=True, eq=False)
class DeepSpeedOptions:
    """Options of `DeepSpeedLearner`.

    Attributes:
        zero_stage: Parts that ranks divide: 0 nothing, 1 the optimiser's state, 2 gradients too, 3 weights too. In
            bfloat16, 0 works as 1, because DeepSpeed's stage 0 sums gradients in bfloat16.
        offload: Parts kept in main memory instead of the GPU's: none, optimizer (stage 1 and up), all (stage 3).
        lr: Peak learning rate of the actor.
        critic_lr: Peak learning rate of the critic; left out, ten times the actor's.
        betas: Decay rates of AdamW's two moments.
        eps: AdamW's addition to the denominator.
        weight_decay: AdamW's weight decay.
        grad_clip: Greatest norm of the gradient; 0 for none.
        skip_limit: Updates in a row that are skipped because their gradient is not finite; one more ends the run. A
            skipped update changes no weight, and is counted in `actor/skipped_updates` or `critic/skipped_updates`.
        schedule: Learning rate after the warm-up: constant, or linear or cosine down to `final_ratio`.
        warmup_steps: Optimiser steps of linear warm-up.
        final_ratio: Learning rate at the end, as a share of the peak.
        micro_batch_tokens: Tokens of one forward pass, padding included; a longer rollout gets one of its own. `auto`
            takes as many, up to 32768, as leave half of the free memory unused by the estimate of `rlsdk explain`.
        rows: padded gives each rollout a row (rollouts of like length together); packed puts them one after another,
            which pays with flash_attention_2; shared reads a prompt once for all its rollouts in a micro-batch, which
            pays where groups are large and prompts are not short beside responses (full attention, sdpa or eager);
            tree reads whatever rollouts of a micro-batch begin with once, earlier turns and branches of a search, too.
        sequence_parallel: Ranks that share the tokens of each rollout (Ulysses), for rollouts too long for one; each
            reads `micro_batch_tokens` of a micro-batch. Divides the number of ranks and the model's heads.
        gradient_checkpointing: Compute activations again in the backward pass: a third more time, far less memory.
        attention: Implementation in transformers; on a CPU, eager is faster for rows of a few dozen tokens.
        compile: Compile the models with `torch.compile`: on the two cores of docs/benchmarks.md an update takes a fifth
            less time, but the first of each kind of pass half a minute more. Needs g++, or what `CXX` names.
        value_init: Initial value head of the critic: zero predicts 0 at first; small is a little noise.
        lora: Train low-rank adapters of the actor's linear layers in place of its weights (`rank`, `alpha`, `targets`,
            `sync`); it wants about ten times the learning rate. Left out, all weights are trained.
    """

    zero_stage: Literal[0, 1, 2, 3] = 1
    offload: Offload = "none"
    lr: NonNegative = 1e-6
    critic_lr: NonNegative | None = None
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    grad_clip: NonNegative = 1.0
    skip_limit: int = attrs.field(default=5, validator=attrs.validators.ge(0))
    schedule: Schedule = "constant"
    warmup_steps: Annotated[int, at_least(0)] = 0
    final_ratio: Share = 0.1
    micro_batch_tokens: int | Literal["auto"] = attrs.field(default=16384, validator=_positive_or_auto)
    rows: RowStyle = "padded"
    sequence_parallel: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    gradient_checkpointing: bool = False
    attention: Attention = "sdpa"
    compile: bool = False
    value_init: ValueInit = "zero"
    lora: Lora | None = None

    def __attrs_post_init__(self) -> None:
        if self.offload == "optimizer" and self.zero_stage == 0:
            raise ValueError("offload: optimizer needs zero_stage 1 or more; without ZeRO, DeepSpeed offloads nothing")
        if self.offload == "all" and self.zero_stage != 3:
            raise ValueError(f"offload: all needs zero_stage 3, which splits weights; got zero_stage {self.zero_stage}")
        if self.rows == "shared" and self.gradient_checkpointing:
            raise ValueError("rows: shared keeps the keys of prompts, gradient_checkpointing drops them; choose one")
        if self.rows in ("shared", "tree") and self.attention == "flash_attention_2":
            raise ValueError(
                f"rows: {self.rows} needs attention: sdpa or eager; use flash_attention_2 with rows: packed"
            )
        if self.sequence_parallel > 1 and (self.rows != "padded" or self.attention != "sdpa"):
            needed = "sequence_parallel needs rows: padded and attention: sdpa (torch's flash kernel on a GPU)"
            raise ValueError(f"{needed}; got rows: {self.rows} and attention: {self.attention}")
        if self.sequence_parallel > 1 and self.lora:
            raise ValueError("sequence_parallel and lora cannot be combined yet; choose one")
        if self.compile and (self.sequence_parallel > 1 or self.lora):
            raise ValueError("compile cannot be combined with sequence_parallel or lora yet; choose one")

    @property
    def requires(self) -> tuple[str, ...]:
        """Distributions that must be installed for these options."""
        flash = ("flash-attn",) if self.attention == "flash_attention_2" else ()
        return (*(("peft",) if self.lora else ()), *flash)

    @property
    def programs(self) -> tuple[str, ...]:
        """Programs these options need: `torch.compile` calls the compiler that `CXX` names, as torch parses it."""
        return (os.environ.get("CXX", "g++"),) if self.compile else ()

    def checkpoint_bytes(self, model: Any, dtype: DType, *, critic: bool) -> int:
        """Estimate a role's checkpoint: what is trained in `dtype`, and a copy and two moments of it in float32."""
        if self.lora is not None and not critic:
            trained = count_adapter(model, self.lora)
        else:
            trained = sum(p.numel() for p in model.parameters())
        return trained * (DTYPE_BYTES[dtype] + 12)

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

    def update_memory(self, roles: Roles, place: ActorSpec, shape: UpdateShape) -> Sequence[MemoryUse]:
        """Estimate the greatest memory of a rank, without loading weights; see `EstimatesUpdates`."""
        from rlsdk.learners.estimate import update_memory

        return update_memory(self, roles, place, shape)

    def model_faults(self, model: Any) -> Sequence[str]:
        """Say why a model cannot be trained with these options; it may have no weights."""
        from rlsdk.learners.model import policy_faults
        from rlsdk.vision import layout_faults

        adapter = self.lora and adapter_fault(model, self.lora)
        unseen = layout_faults(
            model,
            {
                f"sequence_parallel: {self.sequence_parallel} would cut them; leave it out": self.sequence_parallel > 1,
                "compile: true is not tried with them; leave it out": self.compile,
                "lora would adapt its vision tower, too, which engines do not take; leave it out": bool(self.lora),
            },
        )
        return [*policy_faults(model, self.attention, self.rows), *([adapter] if adapter else []), *unseen]

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
            "lora multiplies by the adapter separately, the engine by merged weights": self.lora is not None,
            f"sequence_parallel: {self.sequence_parallel} splits what the engine reads": self.sequence_parallel > 1,
            f"rows: {self.rows} lays several rollouts out together": self.rows != "padded",
            f"attention: {self.attention} sums in another order than the engine's sdpa": self.attention != "sdpa",
        }
        return [f"{reason}; leave it out" for reason, given in reasons.items() if given]

    def environment(self, place: ActorSpec) -> Mapping[str, str]:
        """Environment variables to set before the actor's process imports anything.

        Raises:
            LearnerError: `sequence_parallel` does not divide the ranks.
        """
        if place.world_size % self.sequence_parallel:
            needed = f"sequence_parallel: {self.sequence_parallel} needs as many learner ranks, or a multiple of them"
            raise LearnerError(f"{needed}; got {place.world_size}, change placement.learners")
        return environment(place, compiled=self.compile)
