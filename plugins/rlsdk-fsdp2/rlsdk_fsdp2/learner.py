"""The learner `fsdp2`: models divided among ranks by torch's `fully_shard`, over gloo on CPUs and nccl on GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

import rlsdk
from rlsdk.contracts import ActorSpec, Model, Roles, TrainedRole
from rlsdk.kit import TransformersLearner

if TYPE_CHECKING:
    from rlsdk.kit import LearningRate, RankMemory
    from rlsdk_fsdp2.sharded import Frozen, Sharded


@rlsdk.learner("fsdp2")
@attrs.define(kw_only=True, eq=False, slots=False)
class FSDP2Learner(TransformersLearner):
    """Trains on torch's fully_shard (FSDP2): weights, gradients and optimiser state are divided among all ranks.

    In bfloat16, ranks keep their shares of the weights in float32, and sum gradients in float32.

    Attributes:
        reshard_after_forward: Drop the gathered weights of a layer after its forward pass, and gather them again in the
            backward pass; false takes more memory and less communication.
    """

    reshard_after_forward: bool = True
    _mesh: Any = attrs.field(init=False)

    def connect(self, device: str) -> None:
        """Build the device mesh of all ranks; a collective."""
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        if device == "cuda":
            torch.cuda.set_device(0)  # Ray shows each rank its own GPU alone
        self._mesh = init_device_mesh(device, (self.place.world_size,), mesh_dim_names=("ranks",))

    def train(self, module: Any, model: Model, rate: LearningRate, role: TrainedRole) -> Sharded:
        """Divide a module among the ranks, with its gradients and optimiser state."""
        from rlsdk_fsdp2.sharded import AdamW, Sharded, divide

        divide(module, self._mesh, model.dtype, reshard=self.reshard_after_forward)
        adamw = AdamW(betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, grad_clip=self.grad_clip)
        return Sharded(module, adamw, rate, dtype=model.dtype, role=role, skip_limit=self.skip_limit)

    def freeze(self, module: Any, model: Model) -> Frozen:
        """Divide a module that is not trained among the ranks."""
        from rlsdk_fsdp2.sharded import Frozen, divide

        divide(module, self._mesh, model.dtype, reshard=True)
        return Frozen(module)

    @property
    def facts(self) -> Mapping[str, Any]:
        """Options that must be equal when a checkpoint is loaded."""
        return {"learner": "fsdp2"}

    def model_faults(self, model: Any) -> Sequence[str]:
        """Say why a model cannot be trained with these options; it may have no weights."""
        faults = list(super().model_faults(model))
        if hasattr(model.config, "vision_config"):
            faults.append(
                f"a {type(model).__name__} sees images: ranks with and without images would wait for each other in "
                "fully_shard; set learner=deepspeed"
            )
        return faults

    @property
    def memory_remedies(self) -> tuple[str, ...]:
        """Options that would lower the memory of a rank, those first that cost least."""
        found = {
            "learner.gradient_checkpointing=true": not self.gradient_checkpointing and self.rows != "shared",
            "learner.micro_batch_tokens=auto": self.micro_batch_tokens != "auto",
            "learner.reshard_after_forward=true": not self.reshard_after_forward,
            "more ranks (placement.learners)": True,
            "learner.lora": self.lora is None,
        }
        return tuple(name for name, open_ in found.items() if open_)

    def rank_memory(self, roles: Roles, place: ActorSpec) -> RankMemory:
        """Return what a rank holds beside the activations of its passes."""
        from rlsdk_fsdp2.memory import rank_memory

        return rank_memory(self, roles, place)
