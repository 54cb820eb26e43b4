"""The learner `fsdp2`: models sharded over ranks by torch's `fully_shard`, with gloo on CPUs and nccl on GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs

import rlsdk
from rlsdk.contracts import ActorSpec, Model, Roles, TrainedRole
from rlsdk.errors import LearnerError
from rlsdk.kit import TransformersLearner
from rlsdk.limits import Count

if TYPE_CHECKING:
    from torch import Tensor

    from rlsdk.kit import LearningRate, MovingReference, RankMemory, SharedRows
    from rlsdk_fsdp2.sharded import FrozenModule, Sharded


@rlsdk.learner("fsdp2")
@attrs.define(kw_only=True, eq=False, slots=False)
class FSDP2Learner(TransformersLearner):
    """Train with torch's fully_shard (FSDP2): weights, gradients and optimiser state are sharded over all ranks.

    In bfloat16, ranks keep their shards of the weights in float32, and sum gradients in float32.

    Attributes:
        reshard_after_forward: Free a layer's gathered weights after its forward pass, and gather them again in the
            backward pass; false takes more memory and less communication.
        offload: Parts kept in main memory instead of the GPU's: none, or all (weights, gradients and optimiser state;
            optimiser steps then run on the CPU).
        tensor_parallel: Number of consecutive ranks that split each linear layer and run every micro-batch together,
            in turns, for layers too large for one rank. Must divide the numbers of ranks and of the model's heads.
        context_parallel: Number of consecutive ranks that split the tokens of each rollout (Ulysses), for rollouts too
            long for one rank; each processes `micro_batch_tokens` of a micro-batch. With `tensor_parallel`, each of
            them is a group of that many ranks. Must divide the numbers of ranks and of the model's heads.
    """

    reshards: ClassVar[bool] = True  # checkpoints have whole tensors, however ranks shard models

    takes_optimizers: ClassVar[bool] = True

    reshard_after_forward: bool = True
    offload: Literal["none", "all"] = "none"
    tensor_parallel: Count = 1
    context_parallel: Count = 1
    _mesh: Any = attrs.field(init=False)
    _slices: Any = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.check_readers("context_parallel")
        if self.needs_whole_tensors:
            raise ValueError(
                f"optimizer: {self.optimizer_name} needs whole tensors, but fsdp2 splits them over ranks; set "
                "learner: {use: deepspeed, zero_stage: 0, …}"
            )

    @property
    def sequence_parallel(self) -> int:
        """Number of consecutive ranks that run rollouts together; on GPUs, they are placed on one node."""
        return self.context_parallel * self.tensor_parallel

    @property
    def readers(self) -> int:
        """Number of ranks that split the tokens of each rollout."""
        return self.context_parallel

    def environment(self, place: ActorSpec) -> Mapping[str, str]:
        """Environment variables to set before the actor's process imports anything.

        Raises:
            LearnerError: `context_parallel` and `tensor_parallel` do not divide the ranks.
        """
        if place.world_size % self.sequence_parallel:
            given = {"context_parallel": self.context_parallel, "tensor_parallel": self.tensor_parallel}
            options = " times ".join(f"{name}: {size}" for name, size in given.items() if size > 1)
            needed = f"{options} needs {self.sequence_parallel} learner ranks or a multiple"
            raise LearnerError(f"{needed}; got {place.world_size}; change placement.learners")
        return super().environment(place)

    def preload(self) -> None:
        """Import the modules that shard models."""
        from rlsdk_fsdp2 import sharded  # noqa: F401

        super().preload()

    def connect(self, device: str) -> None:
        """Build the device meshes of all ranks; a collective."""
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        if device == "cuda":
            torch.cuda.set_device(0)  # Ray shows each rank only its own GPU
        # Ranks that share rollouts shard weights like ranks with separate rollouts.
        shards = self.place.world_size // self.tensor_parallel
        self._mesh = init_device_mesh(device, (shards, self.tensor_parallel), mesh_dim_names=("data", "tensor"))
        if self.context_parallel > 1:
            shape = (shards // self.context_parallel, self.context_parallel, self.tensor_parallel)
            self._slices = init_device_mesh(device, shape, mesh_dim_names=("data", "context", "tensor"))["context"]

    def share_rows(self, ranks: Any) -> SharedRows | None:
        """Return the ranks that split linear layers, or the tokens of rollouts, with this one."""
        if self.sequence_parallel == 1:
            return super().share_rows(ranks)
        from rlsdk.kit import SequenceGroup
        from rlsdk_fsdp2.tensor import NestedGroup, TensorGroup

        tensor = TensorGroup(self._mesh["tensor"])
        if self.context_parallel == 1:
            return tensor
        rank, size = self._slices.get_local_rank(), self.context_parallel
        context = SequenceGroup(rank, size, self._slices.get_group(), "context_parallel", divided=self.tensor_parallel)
        return NestedGroup(context, tensor) if self.tensor_parallel > 1 else context

    def train(self, module: Any, model: Model, rate: LearningRate, role: TrainedRole) -> Sharded:
        """Shard a module over the ranks, with its gradients and optimiser state."""
        from rlsdk_fsdp2.sharded import Sharded, Stepping

        self._divide(module, model, reshard=self.reshard_after_forward)
        undecayed = self.undecayed(module)
        stepping = Stepping(make_optimizer=self.make_optimizer, grad_clip=self.grad_clip, undecayed=undecayed)
        group = self._mesh["tensor"].get_group() if self.tensor_parallel > 1 else None
        return Sharded(module, stepping, rate, group, dtype=model.dtype, role=role, skip_limit=self.skip_limit)

    def freeze(self, module: Any, model: Model) -> FrozenModule:
        """Shard a module that is not trained over the ranks."""
        from rlsdk_fsdp2.sharded import FrozenModule

        self._divide(module, model, reshard=True)
        return FrozenModule(module)

    def frozen_tensors(self, module: FrozenModule) -> Iterator[Tensor]:
        """Yield this rank's shards of a frozen module."""
        from rlsdk_fsdp2.sharded import local_shard

        return (local_shard(parameter) for parameter in module.module.parameters())

    def moving_reference(self, module: FrozenModule, mix: float) -> MovingReference:
        """Make the reference model follow the policy; each rank moves its shards."""
        from rlsdk_fsdp2.sharded import FSDPReference

        return FSDPReference(dict(module.module.named_parameters()), mix, sharded=True)

    def reference_faults(self) -> Sequence[str]:
        """Report options with which the reference model cannot follow the policy."""
        adapted = "lora trains an adapter beside a frozen base, which is the reference model; train all weights instead"
        return [adapted] if self.lora else []

    def _divide(self, module: Any, model: Model, *, reshard: bool) -> None:
        from rlsdk_fsdp2.sharded import divide
        from rlsdk_fsdp2.tensor import divide_layers

        if self.tensor_parallel > 1:
            divide_layers(module.model, self._mesh["tensor"])
        divide(module, self._mesh["data"], model.dtype, reshard=reshard, offload=self.offload == "all")

    @property
    def facts(self) -> Mapping[str, Any]:
        """Options that must be equal when a checkpoint is loaded."""
        return {"learner": "fsdp2"}

    def model_faults(self, model: Any) -> Sequence[str]:
        """Explain why a model, possibly without weights, cannot be trained with these options."""
        faults = list(super().model_faults(model))
        if hasattr(model.config, "vision_config"):
            faults.append(
                f"a {type(model).__name__} reads images: ranks with and without images would wait for each other in "
                "fully_shard; set learner=deepspeed"
            )
        if self.tensor_parallel > 1:
            from rlsdk_fsdp2.tensor import faults as tensor_faults

            faults += tensor_faults(model, self.tensor_parallel)
        if self.context_parallel > 1:
            from rlsdk.kit import sequence_faults

            faults += sequence_faults(model, self.context_parallel, "context_parallel", divided=self.tensor_parallel)
        return faults

    def exact_faults(self) -> Sequence[str]:
        """Report options that are incompatible with `model.exact`."""
        reasons = {
            f"context_parallel: {self.context_parallel} splits what the engine reads": self.context_parallel > 1,
            f"tensor_parallel: {self.tensor_parallel} adds up parts of layers": self.tensor_parallel > 1,
        }
        return [*(f"{reason}; leave it out" for reason, given in reasons.items() if given), *super().exact_faults()]

    @property
    def memory_remedies(self) -> tuple[str, ...]:
        """Return options that would lower a rank's memory, cheapest first."""
        found = {
            "learner.gradient_checkpointing=true": not self.gradient_checkpointing and self.rows != "shared",
            "learner.micro_batch_tokens=auto": self.micro_batch_tokens != "auto",
            "learner.reshard_after_forward=true": not self.reshard_after_forward,
            "learner.offload=all (GPUs only)": self.offload == "none",
            "more ranks (placement.learners), and learner.context_parallel for long rollouts": True,
            "learner.lora": self.lora is None,
        }
        return tuple(name for name, open_ in found.items() if open_)

    def rank_memory(self, roles: Roles, place: ActorSpec) -> RankMemory:
        """Return the memory of a rank without activations."""
        from rlsdk_fsdp2.memory import rank_memory

        return rank_memory(self, roles, place)
