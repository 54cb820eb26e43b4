"""The DeepSpeed learner: ZeRO 0 to 3, with actor, critic and reference in one process per rank."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import attrs

from rlsdk.contracts import Model, TrainedRole
from rlsdk.isolation.process import hidden
from rlsdk.learners.base import TransformersLearner
from rlsdk.learners.deepspeed_options import DeepSpeedOptions
from rlsdk.learners.zero import DeepSpeedConfig, Trained, divided_while_loaded
from rlsdk.marks import learner

if TYPE_CHECKING:
    from rlsdk.learners.passes import SharedRows
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
        return divided_while_loaded(self._config(model, 0.0)) if self.zero_stage == 3 else nullcontext()

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
        config, ranks = self._config(model, rate.peak), self.place.world_size
        return Trained(module, config, rate, ranks, role=role, skip_limit=self.skip_limit)

    def freeze(self, module: Any, model: Model) -> Any:
        """Move a module to its device, or let ZeRO-3 shard it."""
        if self.zero_stage < 3:
            return module.to(self.place.device)
        import deepspeed

        return deepspeed.initialize(model=module, config=self._config(model, 0.0).inference)[0]

    def _config(self, model: Model, lr: float) -> DeepSpeedConfig:
        return DeepSpeedConfig(
            lr=lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            grad_clip=self.grad_clip,
            stage=1 if model.dtype == "bfloat16" and self.zero_stage == 0 else self.zero_stage,
            offload=self.offload,
            dtype=model.dtype,
            device=self.place.device,
        )

    @property
    def facts(self) -> Mapping[str, Any]:
        """Options that must be equal when a checkpoint is loaded."""
        return {"zero_stage": self.zero_stage}


def _import_deepspeed() -> None:
    """Import DeepSpeed for the first time in this process, without slow parts that rlsdk does not use.

    Its shared-memory collectives, for inference, take 22 s to compile. Its autotuner imports MLflow if installed, which
    takes over a second.
    """
    with hidden("mlflow"):
        import deepspeed.ops
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
