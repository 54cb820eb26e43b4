"""Options of learners that train models of transformers, and what they require of a model before anything starts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import attrs

from rlsdk.contracts import ActorSpec, DType, MemoryUse, Roles, UpdateShape
from rlsdk.contracts.generation import DTYPE_BYTES
from rlsdk.learners.lora import Lora, adapter_fault, count_adapter
from rlsdk.learners.rows import RowStyle
from rlsdk.learners.trained import Schedule
from rlsdk.limits import NonNegative, Share, at_least, below

if TYPE_CHECKING:
    from rlsdk.learners.estimate import RankMemory

Decay = Annotated[float, at_least(0), below(1)]
Attention = Literal["sdpa", "flash_attention_2", "eager"]
ValueInit = Literal["zero", "small"]
NO_FLOAT16 = "dtype float16 would need loss scaling, which skips steps; set model.dtype=bfloat16 or float32"


def _positive_or_auto(_: Any, __: Any, value: int | str) -> None:
    if value != "auto" and (isinstance(value, str) or value <= 0):
        raise ValueError(f"micro_batch_tokens: expected a number above 0, or auto; got {value!r}")


@attrs.define(kw_only=True, eq=False)
class LearnerOptions(ABC):
    """Options of `TransformersLearner`, which every learner that is built on it has.

    Attributes:
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
            each of which attends to itself (flash_attention_2, or sdpa; eager, layers with windows and compile read all
            of them behind a mask, which is slow); shared reads a prompt once for all its rollouts in a micro-batch,
            which pays where groups are large and prompts are not short beside responses (full attention, sdpa or
            eager); tree reads whatever rollouts of a micro-batch begin with once, earlier turns and branches, too.
        gradient_checkpointing: Compute activations again in the backward pass: a third more time, far less memory.
        attention: Implementation in transformers; on a CPU, eager is faster for rows of a few dozen tokens.
        value_init: Initial value head of the critic: zero predicts 0 at first; small is a little noise.
        lora: Train low-rank adapters of the actor's linear layers in place of its weights (`rank`, `alpha`, `targets`,
            `sync`); it wants about ten times the learning rate. Left out, all weights are trained.
    """

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
    gradient_checkpointing: bool = False
    attention: Attention = "sdpa"
    value_init: ValueInit = "zero"
    lora: Lora | None = None

    def __attrs_post_init__(self) -> None:
        if self.rows == "shared" and self.gradient_checkpointing:
            raise ValueError("rows: shared keeps the keys of prompts, gradient_checkpointing drops them; choose one")
        if self.rows in ("shared", "tree") and self.attention == "flash_attention_2":
            raise ValueError(
                f"rows: {self.rows} needs attention: sdpa or eager; use flash_attention_2 with rows: packed"
            )

    def check_readers(self, option: str) -> None:
        """Refuse rows of which several ranks cannot read a part each; `option` names the number of these ranks."""
        if self.readers > 1 and (self.rows not in ("padded", "packed") or self.attention != "sdpa"):
            needed = f"{option} needs rows: padded or packed and attention: sdpa (torch's flash kernel on a GPU)"
            raise ValueError(f"{needed}; got rows: {self.rows} and attention: {self.attention}")

    @property
    def requires(self) -> tuple[str, ...]:
        """Distributions that must be installed for these options."""
        flash = ("flash-attn",) if self.attention == "flash_attention_2" else ()
        return (*(("peft",) if self.lora else ()), *flash)

    @property
    def readers(self) -> int:
        """Number of ranks that share the tokens of each rollout."""
        return 1

    @property
    def packs_without_mask(self) -> bool:
        """True if packed rollouts attend one after another, where the model allows it; false if a mask parts them."""
        return self.rows == "packed" and self.attention == "sdpa"

    @abstractmethod
    def rank_memory(self, roles: Roles, place: ActorSpec) -> RankMemory:
        """Return what a rank holds beside the activations of its passes, from the configs of the models."""

    def update_memory(self, roles: Roles, place: ActorSpec, shape: UpdateShape) -> Sequence[MemoryUse]:
        """Estimate the greatest memory of a rank, without loading weights; see `EstimatesUpdates`."""
        from rlsdk.learners.estimate import update_memory

        return update_memory(self, roles, place, shape)

    def checkpoint_bytes(self, model: Any, dtype: DType, *, critic: bool) -> int:
        """Estimate a role's checkpoint: what is trained in `dtype`, and a copy and two moments of it in float32."""
        if self.lora is not None and not critic:
            trained = count_adapter(model, self.lora)
        else:
            trained = sum(p.numel() for p in model.parameters())
        return trained * (DTYPE_BYTES[dtype] + 12)

    def model_faults(self, model: Any) -> Sequence[str]:
        """Say why a model cannot be trained with these options; it may have no weights."""
        import torch

        from rlsdk.learners.model import policy_faults
        from rlsdk.vision import layout_faults

        narrow = [NO_FLOAT16] if model.dtype == torch.float16 else []
        adapter = self.lora and adapter_fault(model, self.lora)
        reason = "lora would adapt its vision tower, too, which engines do not take; leave it out"
        unseen = layout_faults(model, {reason: bool(self.lora)})
        policy = policy_faults(model, self.attention, self.rows, without_mask=self.packs_without_mask)
        return [*narrow, *policy, *([adapter] if adapter else []), *unseen]

    def exact_faults(self) -> Sequence[str]:
        """Say which options stand in the way of `model.exact`."""
        reasons = {
            "lora multiplies by the adapter separately, the engine by merged weights": self.lora is not None,
            f"rows: {self.rows} lays several rollouts out together": self.rows != "padded",
            f"attention: {self.attention} sums in another order than the engine's sdpa": self.attention != "sdpa",
        }
        return [f"{reason}; leave it out" for reason, given in reasons.items() if given]
