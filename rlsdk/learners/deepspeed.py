"""The DeepSpeed learner: ZeRO 0 to 3, with actor, critic and reference in one process per rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import attrs

from rlsdk.contracts import Model, TrainedRole
from rlsdk.errors import LearnerError
from rlsdk.isolation.process import hidden
from rlsdk.learners.base import TransformersLearner
from rlsdk.learners.deepspeed_options import DeepSpeedOptions
from rlsdk.learners.reference import MovingReference
from rlsdk.learners.zero import DeepSpeedConfig, ShardedReference, Trained, divided_while_loaded
from rlsdk.marks import learner

if TYPE_CHECKING:
    from torch import Tensor

    from rlsdk.learners.micro_batches import SharedRows
    from rlsdk.learners.ranks import Ranks
    from rlsdk.learners.trained import LearningRate


@learner("deepspeed")
@attrs.define(kw_only=True, eq=False, slots=False)
class DeepSpeedLearner(DeepSpeedOptions, TransformersLearner):
    """Train with DeepSpeed on CPUs or GPUs; splitting a batch into ranks and micro-batches affects only rounding.

    Its options are those of `DeepSpeedOptions`.
    """

    def preload(self) -> None:
        """Import DeepSpeed."""
        super().preload()
        _import_deepspeed()

    def connect(self, device: str) -> None:
        """Make DeepSpeed use the process group."""
        _import_deepspeed()
        import deepspeed

        deepspeed.init_distributed(dist_backend="nccl" if device == "cuda" else "gloo")

    def share_rows(self, ranks: Ranks) -> SharedRows | None:
        """Return the ranks that share the tokens of each rollout, if any; then a collective."""
        if self.sequence_parallel == 1:
            return super().share_rows(ranks)
        from rlsdk.learners.ulysses import SequenceGroup

        return SequenceGroup.join(ranks, self.sequence_parallel)

    def loading(self, model: Model) -> AbstractContextManager[None]:
        """Make ZeRO-3 shard a model tensor by tensor while it is loaded."""
        return divided_while_loaded(DeepSpeedConfig(self, model, self.place)) if self.zero_stage == 3 else nullcontext()

    def prepare(self, module: Any) -> None:
        """Compile a module if the options say so."""
        if self.compile:
            import torch._dynamo

            # Actor, critic and reference run the same code, each with and without gradients, prompts and masks. With
            # torch's default limit of 8, the ninth variant would run uncompiled.
            torch._dynamo.config.recompile_limit = 64
            # One graph serves rows of any number and width.
            module.model.base_model.compile(dynamic=True)

    def train(self, module: Any, model: Model, rate: LearningRate, role: TrainedRole) -> Trained:
        """Wrap a module in a DeepSpeed engine."""
        if self.needs_whole_tensors and model.dtype == "bfloat16":
            raise LearnerError(self.flattened_fault)
        return Trained(module, DeepSpeedConfig(self, model, self.place, rate.peak), rate, role=role)

    def freeze(self, module: Any, model: Model) -> Any:
        """Move a module to its device, or let ZeRO-3 shard it."""
        if self.zero_stage < 3:
            return module.to(self.place.device)
        import deepspeed

        return deepspeed.initialize(model=module, config=DeepSpeedConfig(self, model, self.place).inference)[0]

    def frozen_tensors(self, module: Any) -> Iterable[Tensor]:
        """Return the parameters of a module, or this rank's shards of them under ZeRO-3."""
        return (getattr(parameter, "ds_tensor", parameter) for parameter in module.parameters())

    def moving_reference(self, module: Any, mix: float) -> MovingReference:
        """Make the reference model follow the policy; under ZeRO-3, each rank moves its shards."""
        inner = module.module if self.zero_stage == 3 else module
        names = [name for name, _ in inner.named_parameters()]
        weights = dict(zip(names, self.frozen_tensors(inner), strict=True))
        if self.zero_stage < 3:
            return MovingReference(weights, mix, sharded=False)
        return ShardedReference(inner, weights, mix)

    @property
    def facts(self) -> Mapping[str, Any]:
        """Options that must be equal when a checkpoint is loaded."""
        # DeepSpeed keeps the optimiser's state by group of parameters.
        return {"zero_stage": self.zero_stage, "weight_decay_on": self.weight_decay_on}


def _import_deepspeed() -> None:
    """Import DeepSpeed for the first time in this process, without slow parts that rlsdk does not use.

    Its shared-memory collectives, for inference on CPUs, take 22 s to compile. Its autotuner imports MLflow if
    installed, which takes over a second.
    """
    with hidden("mlflow"):
        import deepspeed.ops
    # On GPUs, the table tries all extensions, and warns about each without CUDA's compiler, which none used here needs.
    if deepspeed.accelerator.get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
