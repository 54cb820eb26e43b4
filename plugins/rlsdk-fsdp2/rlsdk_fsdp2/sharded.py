"""Modules sharded by torch's `fully_shard`: gradient sums, clipped optimiser steps, safetensors checkpoints."""

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

from rlsdk.errors import CheckpointError, LearnerError
from rlsdk.kit import LearningRate, MovingReference, PhaseTimer, TrainedModule, read_state, write_state
from rlsdk_fsdp2.tensor import partial_gradients

_MOMENTS = ("exp_avg", "exp_avg_sq")
_RUN = "run.safetensors"
State = tuple[list[str], dict[str, Any]]
"""An optimiser's state of a parameter: the names of its sharded tensors, and its other values."""


@attrs.frozen(kw_only=True)
class Stepping:
    """Settings of optimiser steps.

    Attributes:
        make_optimizer: Creates the optimiser of parameter groups with a learning rate.
        grad_clip: Maximum norm of the gradient; 0 for no limit.
        undecayed: Names of parameters without weight decay.
    """

    make_optimizer: Callable[[list[dict[str, Any]], float], torch.optim.Optimizer]
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
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a parameter group without its parameters, and without the learning rate of a step."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names", "lr")}


def _divided(module: nn.Module) -> list[FSDPModule]:
    return [each for each in module.modules() if isinstance(each, FSDPModule)]


class FrozenModule:
    """A sharded module that is not trained."""

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
        optimizer: Optimiser of this rank's shards.
    """

    def __init__(
        self,
        module: nn.Module,
        stepping: Stepping,
        rate: LearningRate,
        tensor_group: Any,
        *,
        dtype: str,
        role: str,
        skip_limit: int,
    ) -> None:
        super().__init__(rate, role=role, skip_limit=skip_limit)
        self._run, self._stepping, self._dtype = FrozenModule(module), stepping, getattr(torch, dtype)
        self._trained: dict[str, Any] = {name: p for name, p in module.named_parameters() if p.requires_grad}
        # Norms, like torch's fused step, cover parameters that are sharded alike.
        self._alike: dict[Any, list[Any]] = {}
        for parameter in self._trained.values():
            self._alike.setdefault(parameter.device_mesh, []).append(parameter)
        self._group = tensor_group
        self._partial = set() if tensor_group is None else partial_gradients(module)
        groups: dict[Any, list[str]] = {}
        for name, parameter in self._trained.items():
            groups.setdefault((parameter.device_mesh, name in stepping.undecayed), []).append(name)
        self.optimizer = stepping.make_optimizer(
            [
                {
                    "params": [self._trained[name] for name in names],
                    "param_names": names,
                    **({"weight_decay": 0.0} if undecayed else {}),
                }
                for (_, undecayed), names in groups.items()
            ],
            self.lr,
        )
        self._settings = [_settings(group) for group in self.optimizer.param_groups]

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
        """Take a clipped optimiser step, and return the norm of the whole gradient before clipping."""
        gradients = self._gradients()
        norm = self._norm(gradients)
        if math.isfinite(norm):
            limit = self._stepping.grad_clip
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
        """Write this rank's shards of weights and optimiser state as safetensors; a collective."""
        folder.mkdir(parents=True, exist_ok=True)
        states = self._states()
        save_shards(
            self._tensors(frozen=frozen, states=states),
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
        )
        if rank == 0:
            kept = {"run": {**self.progress, **state}, "frozen": frozen}
            changed = self._changed_settings()
            if any(changed) or any((*sharded, *values) != (*_MOMENTS, "step") for sharded, values in states.values()):
                kept |= {"states": states, "groups": changed}
            else:  # AdamW's, as earlier versions wrote and read it
                kept["steps"] = {name: float(values["step"]) for name, (_, values) in states.items()}
            write_state(folder / _RUN, kept)

    def read(self, folder: Path, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read this rank's shards into new memory; a collective.

        Raises:
            CheckpointError: A file is missing or has unexpected content.
        """
        run = read_state(folder / _RUN)  # the same file on all ranks, with the same fault
        try:
            states = run["states"] if "states" in run else self._adamw_states(run["steps"])
            held = self._tensors(frozen=run["frozen"], states=states)
            found = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
            load_shards(found, storage_reader=HuggingFaceStorageReader(str(folder)))
        except (KeyError, TypeError, ValueError, RuntimeError, AssertionError, CheckpointException) as error:
            raise CheckpointError(
                f"the checkpoint's {self.role} in {folder} does not fit this one: {type(error).__name__}: {error}"
            ) from error
        optimizer = {"states": states, "groups": run.get("groups", ())}
        return {"tensors": found, "run": run["run"], "frozen": run["frozen"]}, optimizer

    def restore(self, model: Mapping[str, Any], saved: dict[str, Any], rank: int, *, strict: bool) -> dict[str, Any]:
        """Continue from what `read` returned; see `TrainedModule.restore`."""
        tensors: Mapping[str, Tensor] = model["tensors"]
        with torch.no_grad():
            for name, tensor in self._weights(frozen=model["frozen"]).items():
                tensor.copy_(tensors[f"weights.{name}"])
        self.optimizer.state.clear()
        for name, (sharded, values) in saved["states"].items():
            held = {key: tensors[f"{key}.{name}"] for key in sharded}
            self.optimizer.state[self._trained[name]] = {**values, **held}
        for group, changed in zip(self.optimizer.param_groups, saved["groups"], strict=False):
            group.update(changed)
        state: dict[str, Any] = model["run"]
        self.set_progress(state)
        return state

    def _weights(self, *, frozen: bool) -> dict[str, Tensor]:
        """Return this rank's shards of parameters and buffers by name, each once."""
        if not frozen:
            return {name: parameter.detach() for name, parameter in self._trained.items()}
        held = self.module.state_dict(keep_vars=True)
        return {name: t.detach() for name, t in {id(t): (name, t) for name, t in reversed(held.items())}.values()}

    def _states(self) -> dict[str, State]:
        """Return the optimiser's state of each parameter that has any.

        Raises:
            LearnerError: A tensor of the state is not sharded as its parameter is.
        """
        found: dict[str, State] = {}
        for name, parameter in self._trained.items():
            state = self.optimizer.state.get(parameter) or {}
            values = {key: value for key, value in state.items() if not isinstance(value, DTensor)}
            for key, value in values.items():
                if isinstance(value, Tensor) and value.dim():
                    raise LearnerError(
                        f"the state {key!r} of the optimiser {type(self.optimizer).__name__} has another shape than "
                        f"{name}, which fsdp2 cannot save; mark it with whole_tensors=True, and use another learner"
                    )
            if state:
                found[name] = ([key for key in state if key not in values], values)
        return found

    def _adamw_states(self, steps: Mapping[str, float]) -> dict[str, State]:
        """Return what `_states` does, for AdamW after these numbers of optimiser steps."""
        device = {name: parameter.device for name, parameter in self._trained.items()}
        return {
            name: (list(_MOMENTS), {"step": torch.tensor(count, dtype=torch.float32, device=device[name])})
            for name, count in steps.items()
        }

    def _changed_settings(self) -> list[dict[str, Any]]:
        """Return the entries of each parameter group that the optimiser has changed, such as a counter of steps."""
        pairs = zip(self.optimizer.param_groups, self._settings, strict=True)
        return [
            {key: value for key, value in _settings(group).items() if key not in first or first[key] != value}
            for group, first in pairs
        ]

    def _tensors(self, *, frozen: bool, states: Mapping[str, State]) -> dict[str, Tensor]:
        """Return this rank's shards of a checkpoint's tensors, with these parts of the optimiser's state."""
        found = {f"weights.{name}": tensor for name, tensor in self._weights(frozen=frozen).items()}
        for name, (sharded, _) in states.items():
            parameter = self._trained[name]
            held = self.optimizer.state.get(parameter) or dict.fromkeys(sharded, parameter.detach())
            found |= {f"{key}.{name}": held[key] for key in sharded}
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
        """Yield this rank's shards of the optimiser's state."""
        for state in self.optimizer.state.values():
            yield from (local_shard(value) for value in state.values() if isinstance(value, DTensor))

    def close(self) -> None:
        """Do nothing: there is only memory to free."""
