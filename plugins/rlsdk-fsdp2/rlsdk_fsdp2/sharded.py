"""Modules sharded by torch's `fully_shard`: gradient sums, clipped AdamW steps, safetensors checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlsdk.errors import CheckpointError
from rlsdk.kit import LearningRate, MovingReference, PhaseTimer, TrainedModule, read_state, write_state
from rlsdk_fsdp2.tensor import partial_gradients

_MOMENTS = ("exp_avg", "exp_avg_sq")
_RUN = "run.safetensors"


@attrs.frozen(kw_only=True)
class AdamW:
    """Settings of the optimiser; see the learner's options of the same names.

    Attributes:
        betas: Decay rates of the two moments.
        eps: Addition to the denominator.
        weight_decay: Weight decay.
        grad_clip: Maximum norm of the gradient; 0 for no limit.
        undecayed: Names of parameters without weight decay.
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_clip: float
    undecayed: Collection[str] = ()


def divide(module: nn.Module, mesh: Any, dtype: str, *, reshard: bool, offload: bool) -> None:
    """Shard a policy or critic over the ranks of a mesh in place: each layer, and the rest.

    Trained parameters are kept in float32 for any dtype, since steps are smaller than bfloat16's resolution. Passes
    compute in the dtype, like the engine.

    Args:
        module: Unsharded module, with its transformers model as `model`.
        mesh: Torch device mesh with one dimension; layers may already be split along another one.
        dtype: float32 or bfloat16.
        reshard: Free a layer's gathered weights after its forward pass.
        offload: Keep shards of weights and gradients in main memory; steps run there.
    """
    for parameter in module.parameters():
        if parameter.requires_grad:
            # In place, like `Module.float`: layers may be tied or already sharded.
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().float()))  # type: ignore[no-untyped-call]
    how = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy(),
    }
    model: Any = module.model
    layers = set(model._no_split_modules or ())
    for each in [m for m in model.modules() if type(m).__name__ in layers]:
        fully_shard(each, **how, reshard_after_forward=reshard)
    # The output head may be tied to the embeddings but runs after all layers: gathered until both are done.
    fully_shard(module, **how, reshard_after_forward=False)
    for each in _divided(module):
        # Sums over ranks, not means: the loss is already divided by counts over all ranks. Gloo has no scaled sum.
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)


def _whole(tensor: DTensor) -> Tensor:
    """Gather or sum a sharded tensor on the device for communication; a collective."""
    share = tensor.to_local().to(tensor.device_mesh.device_type)  # it may be offloaded
    divided = DTensor.from_local(
        share, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
    )
    found: Tensor = divided.full_tensor()
    return found


def local_shard(tensor: Tensor) -> Tensor:
    """Return the tensor that holds this rank's shard: itself, not a view of it."""
    # `to_local` returns a view of a parameter.
    found: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return found


def _divided(module: nn.Module) -> list[FSDPModule]:
    return [each for each in module.modules() if isinstance(each, FSDPModule)]


class FrozenModule:
    """A sharded module that is not trained.

    Attributes:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any) -> Any:
        """Run the module; without a graph, no weights stay gathered."""
        try:
            return self.module(*args)
        finally:
            if not torch.is_grad_enabled():
                # Torch keeps them until a backward pass, and would use them as the weights after the next step.
                for each in _divided(self.module):
                    each.reshard()


class FSDPReference(MovingReference):
    """A sharded reference model that follows the policy; checkpoints have whole tensors, as those of `Sharded`."""

    def local(self, tensor: Tensor) -> Tensor:
        """Return the tensor that holds this rank's shard."""
        return local_shard(tensor)

    def save(self, folder: Path, rank: int) -> None:
        """Write this rank's shards as safetensors; a collective."""
        folder.mkdir(parents=True, exist_ok=True)
        held = {name: tensor.detach() for name, tensor in self.masters.items()}
        save_shards(held, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))

    def load(self, folder: Path, rank: int) -> None:
        """Read this rank's shards; a collective.

        Raises:
            CheckpointError: A file is missing or has unexpected content.
        """
        try:
            found = {name: torch.zeros_like(tensor.detach()) for name, tensor in self.masters.items()}
            load_shards(found, storage_reader=HuggingFaceStorageReader(str(folder)))
        except (KeyError, TypeError, ValueError, RuntimeError, AssertionError, CheckpointException) as error:
            raise CheckpointError(
                f"the checkpoint's reference model in {folder} does not fit this one: {type(error).__name__}: {error}"
            ) from error
        with torch.no_grad():
            for name, tensor in found.items():
                self.local(self.masters[name]).copy_(self.local(tensor))
                self.changed(name)


class Sharded(TrainedModule):
    """A trained module, sharded over all ranks with its gradients and optimiser state.

    Attributes:
        optimizer: Torch's AdamW on this rank's shards.
    """

    def __init__(
        self,
        module: nn.Module,
        adamw: AdamW,
        rate: LearningRate,
        tensor_group: Any,
        *,
        dtype: str,
        role: str,
        skip_limit: int,
    ) -> None:
        super().__init__(rate, role=role, skip_limit=skip_limit)
        self._run, self._adamw, self._dtype = FrozenModule(module), adamw, getattr(torch, dtype)
        self._trained: dict[str, Any] = {name: p for name, p in module.named_parameters() if p.requires_grad}
        # Norms, like torch's fused step, cover parameters that are sharded alike.
        self._alike: dict[Any, list[Any]] = {}
        for parameter in self._trained.values():
            self._alike.setdefault(parameter.device_mesh, []).append(parameter)
        self._group = tensor_group
        self._partial = set() if tensor_group is None else partial_gradients(module)
        groups: dict[Any, list[Any]] = {}
        for name, parameter in self._trained.items():
            groups.setdefault((parameter.device_mesh, name in adamw.undecayed), []).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": parameters, "weight_decay": 0.0 if undecayed else adamw.weight_decay}
                for (_, undecayed), parameters in groups.items()
            ],
            lr=self.lr,
            betas=adamw.betas,
            eps=adamw.eps,
            fused=True,
        )

    @property
    def module(self) -> Any:
        """The sharded module."""
        return self._run.module

    def __call__(self, *args: Any) -> Any:
        """Run the module, with a graph or without."""
        return self._run(*args)

    def backward(self, losses: Iterator[Tensor], count: int, clock: PhaseTimer, *, last: bool) -> None:
        """Add the gradient of losses to the optimiser step's gradient; see `TrainedModule.backward`."""
        for _ in range(count):
            with clock("forward_seconds"):
                loss = next(losses)
            with clock("update_seconds"):
                torch.autograd.backward(loss)

    @property
    def repeat_fault(self) -> str:
        """Explain why an optimiser step cannot be repeated."""
        return "fully_shard cannot restart an interrupted pass"

    def drop_gradients(self) -> None:
        """Discard the gradient of the optimiser step."""
        self.optimizer.zero_grad(set_to_none=True)

    def follow(self) -> float:
        """Take a clipped AdamW step, and return the norm of the whole gradient before clipping."""
        gradients = self._gradients()
        norm = self._norm(gradients)
        if math.isfinite(norm):
            limit = self._adamw.grad_clip
            if limit and norm > limit:
                for each in gradients:
                    torch._foreach_mul_(each, limit / (norm + 1e-6))
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _gradients(self) -> list[list[Tensor]]:
        """Return this rank's complete gradient shards, grouped by how they are sharded."""
        for name in sorted(self._partial):
            gradient = self._trained[name].grad
            if gradient is not None:
                share = gradient.to_local()
                whole = share.to(gradient.device_mesh.device_type)  # shards may be offloaded
                dist.all_reduce(whole, group=self._group)
                share.copy_(whole)
        found = [[p.grad for p in parameters if p.grad is not None] for parameters in self._alike.values()]
        return [gradients for gradients in found if gradients]

    @staticmethod
    def _norm(gradients: Sequence[Sequence[Any]]) -> float:
        """Return the gradient norm over all ranks, equal on each; a collective.

        Torch's own function communicates on the shards' device, which NCCL cannot do if they are offloaded.
        """
        found = 0.0
        for each in gradients:
            mesh: Any = each[0].device_mesh
            squares = torch.stack(torch._foreach_norm([gradient.to_local() for gradient in each])).double().square()
            copies = [math.prod(mesh.size(i) for i, p in enumerate(g.placements) if p.is_replicate()) for g in each]
            total = (squares / squares.new_tensor(copies)).sum().to(mesh.device_type)
            for dimension in range(mesh.ndim):
                dist.all_reduce(total, group=mesh.get_group(dimension))
            found += float(total)
        return math.sqrt(found)

    def save(self, folder: Path, rank: int, state: Mapping[str, Any], *, frozen: bool) -> None:
        """Write this rank's shards of weights and moments as safetensors; a collective."""
        folder.mkdir(parents=True, exist_ok=True)
        save_shards(
            self._tensors(frozen=frozen, moments=self._steps()),
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
        )
        if rank == 0:
            write_state(folder / _RUN, {"run": {**self.progress, **state}, "steps": self._steps(), "frozen": frozen})

    def read(self, folder: Path, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read this rank's shards into new memory; a collective.

        Raises:
            CheckpointError: A file is missing or has unexpected content.
        """
        run = read_state(folder / _RUN)  # the same file on all ranks, with the same fault
        try:
            held = self._tensors(frozen=run["frozen"], moments=run["steps"])
            found = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
            load_shards(found, storage_reader=HuggingFaceStorageReader(str(folder)))
        except (KeyError, TypeError, ValueError, RuntimeError, AssertionError, CheckpointException) as error:
            raise CheckpointError(
                f"the checkpoint's {self.role} in {folder} does not fit this one: {type(error).__name__}: {error}"
            ) from error
        return {"tensors": found, "run": run["run"], "frozen": run["frozen"]}, {"steps": run["steps"]}

    def restore(self, model: Mapping[str, Any], saved: dict[str, Any], rank: int, *, strict: bool) -> dict[str, Any]:
        """Continue from what `read` returned; see `TrainedModule.restore`."""
        tensors: Mapping[str, Tensor] = model["tensors"]
        with torch.no_grad():
            for name, tensor in self._weights(frozen=model["frozen"]).items():
                tensor.copy_(tensors[f"weights.{name}"])
        self.optimizer.state.clear()
        for name, steps in saved["steps"].items():
            parameter = self._trained[name]
            self.optimizer.state[parameter] = {
                "step": torch.tensor(steps, dtype=torch.float32, device=parameter.device),
                **{moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS},
            }
        state: dict[str, Any] = model["run"]
        self.set_progress(state)
        return state

    def _weights(self, *, frozen: bool) -> dict[str, Tensor]:
        """Return this rank's shards of parameters and buffers by name, each once."""
        if not frozen:
            return {name: parameter.detach() for name, parameter in self._trained.items()}
        held = self.module.state_dict(keep_vars=True)
        return {name: t.detach() for name, t in {id(t): (name, t) for name, t in reversed(held.items())}.values()}

    def _steps(self) -> dict[str, float]:
        """Return the number of optimiser steps of each parameter that has taken any."""
        states = {name: self.optimizer.state.get(p) for name, p in self._trained.items()}
        return {name: float(state["step"]) for name, state in states.items() if state}

    def _tensors(self, *, frozen: bool, moments: Mapping[str, float]) -> dict[str, Tensor]:
        """Return this rank's shards of a checkpoint's tensors, with moments of these parameters."""
        found = {f"weights.{name}": tensor for name, tensor in self._weights(frozen=frozen).items()}
        for name in moments:
            parameter = self._trained[name]
            held = self.optimizer.state.get(parameter) or dict.fromkeys(_MOMENTS, parameter.detach())
            found |= {f"{moment}.{name}": held[moment] for moment in _MOMENTS}
        return found

    def full_tensors(
        self, *, keep: bool, wanted: Callable[[str], bool] | None = None, host: bool = True
    ) -> dict[str, Tensor]:
        """Return the model's unsharded tensors by `state_dict` name, in its dtype; a collective."""
        found: dict[str, Tensor] = {}
        copies: dict[int, Tensor] = {}
        for name, tensor in self.module.model.state_dict(keep_vars=True).items():
            if wanted is not None and not wanted(name):
                continue
            if id(tensor) not in copies:
                whole = tensor.detach()
                if isinstance(whole, DTensor):
                    whole = _whole(whole)
                    # With `host`, there is one unsharded tensor at a time on the GPU.
                    whole = whole.to("cpu" if host else whole.device, self._dtype) if keep else whole.new_empty(0)
                copies[id(tensor)] = whole
            found[name] = copies[id(tensor)]
        return found if keep else {}

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the sharded parameters by name, which are in float32."""
        yield from self.module.named_parameters()

    def update_tensors(self) -> Iterator[Tensor]:
        """Yield this rank's shards of the moments."""
        for state in self.optimizer.state.values():
            yield from (local_shard(state[moment]) for moment in _MOMENTS)

    def close(self) -> None:
        """Do nothing: there is only memory to free."""
