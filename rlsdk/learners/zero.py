"""Train a module with DeepSpeed: configuration, optimiser steps on the exact global gradient, and full tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from rlsdk.contracts import ActorSpec, Model
from rlsdk.errors import CheckpointError
from rlsdk.learners.deepspeed_options import DeepSpeedOptions
from rlsdk.learners.reference import MovingReference
from rlsdk.learners.statefile import read_pickled, read_state, write_state
from rlsdk.learners.trained import LearningRate, PhaseTimer, TrainedModule, Wanted

if TYPE_CHECKING:
    from torch import Tensor, nn

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""Parameter numbers of glibc's `mallopt`."""
_GREATEST_THRESHOLD = 32 * 2**20
"""Threshold that glibc reaches on its own after large tensors were freed; mapping every tensor would be slow."""
_DERIVED = ("loss_scaler", "param_slice_mappings")
"""Entries of an optimiser's state that hold DeepSpeed objects; a new engine creates the same ones."""
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""Counters of a DeepSpeed engine that a checkpoint holds."""


@attrs.frozen
class DeepSpeedConfig:
    """Configurations of DeepSpeed for a module.

    Attributes:
        options: Options of the learner.
        model: Model that the module is loaded from, in float32 or bfloat16.
        place: Placement of the rank.
        lr: Peak learning rate; 0 for a module that is not trained.
    """

    options: DeepSpeedOptions
    model: Model
    place: ActorSpec
    lr: float = 0.0

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        stage = self.options.zero_stage
        return 1 if self.model.dtype == "bfloat16" and stage == 0 else stage

    @property
    def deepspeed(self) -> dict[str, Any]:
        """DeepSpeed's own configuration."""
        config = {
            # Both are 1: the learner decides on the micro-batches and on when to step.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": self.lr,
                    "betas": list(self.options.betas),
                    "eps": self.options.eps,
                    "weight_decay": self.options.weight_decay,
                    # torch's fused AdamW needs no compiler; DeepSpeed's would compile an extension.
                    "torch_adam": True,
                    "fused": True,
                },
            },
            "zero_optimization": self._zero,
            # Without ZeRO, DeepSpeed clips but does not return the norm; `TrainedModule.follow` does both.
            "gradient_clipping": self.options.grad_clip if self.stage else 0.0,
            "zero_force_ds_cpu_optimizer": False,
        }
        if not self.options.uses_adamw:
            del config["optimizer"]
            config["zero_allow_untested_optimizer"] = True
        if self.model.dtype == "bfloat16":
            # bfloat16 would lose precision in sums over micro-batches and ranks.
            # An update with a non-finite gradient is skipped in bfloat16 as well.
            config |= {"bf16": {"enabled": True, "check_grad_overflow": True}, "communication_data_type": "fp32"}
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        return config

    @property
    def inference(self) -> dict[str, Any]:
        """DeepSpeed's configuration for a frozen module that is sharded across ranks."""
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": self._zero}
        return config | ({"bf16": {"enabled": True}} if self.model.dtype == "bfloat16" else {})

    @property
    def _zero(self) -> dict[str, Any]:
        device = {"device": "cpu", "pin_memory": self.place.device == "cuda"}
        zero: dict[str, Any] = {"stage": self.stage, "overlap_comm": self.place.device == "cuda"}
        if self.options.offload != "none":
            zero["offload_optimizer"] = device
        if self.options.offload == "all":
            zero["offload_param"] = device
        if self.stage == 3 and self.options.rows == "shared":
            # These rows call each layer twice. DeepSpeed reduces the gradients of some mixtures of experts after each
            # call, as if their experts were modules, and fails at the second one.
            zero["leaf_module"] = {"classes": []}
        return zero


class Trained(TrainedModule):
    """A module trained by DeepSpeed."""

    def __init__(self, module: nn.Module, config: DeepSpeedConfig, rate: LearningRate, *, role: str) -> None:
        import deepspeed

        super().__init__(rate, role=role, skip_limit=config.options.skip_limit)
        undecayed = config.options.undecayed(module)
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        names = [[n for n in trained if n not in undecayed], [n for n in trained if n in undecayed]]
        groups: list[dict[str, Any]] = [
            {"params": [trained[name] for name in part], **more}
            for part, more in zip(names, ({}, {"weight_decay": 0.0}), strict=True)
        ]
        arguments: dict[str, Any] = {}
        if not config.options.uses_adamw:
            groups = [{**group, "param_names": part} for group, part in zip(groups, names, strict=True)]
            arguments["optimizer"] = partial(config.options.make_optimizer, lr=config.lr)
        arguments["model_parameters"] = [group for group in groups if group["params"]]  # DeepSpeed refuses an empty one
        self.engine = deepspeed.initialize(model=module, config=config.deepspeed, **arguments)[0]
        self._config, self._world = config, config.place.world_size

    @property
    def module(self) -> Any:
        """The module inside DeepSpeed's engine."""
        return self.engine.module

    def __call__(self, *args: Any) -> Any:
        """Run the module."""
        return self.engine(*args)

    def backward(self, losses: Iterator[Tensor], count: int, clock: PhaseTimer, *, last: bool) -> None:
        """Accumulate the gradient of losses; see `TrainedModule.backward`."""
        for i in range(count):
            # With one accumulation step, DeepSpeed sums over micro-batches and does not divide by their number.
            self.engine.set_gradient_accumulation_boundary(last and i == count - 1)
            with clock("forward_seconds"):
                loss = next(losses)
            with clock("update_seconds"):
                # DeepSpeed averages over ranks; the factor makes it a sum.
                self.engine.backward(loss * self._world)

    @property
    def repeat_fault(self) -> str:
        """Reason why the gradient of an optimiser step cannot be dropped and recomputed; empty if it can."""
        if self._world > 1:
            return "other ranks wait for this one, so it cannot restart"
        if self._config.stage == 3 or self._config.options.offload != "none":
            return "with zero_stage 3 or offload a step cannot restart"
        return ""

    def drop_gradients(self) -> None:
        """Drop the gradient of the optimiser step and the leftovers of an interrupted backward pass."""
        for parameter in self.engine.module.parameters():
            parameter.grad = None
        if self._config.stage == 0:
            return
        optimizer = self.engine.optimizer
        optimizer.zero_grad(set_to_none=True)
        if not hasattr(optimizer, "ipg_buckets"):  # bfloat16 in stage 1, with float32 gradient buffers
            return
        for buffer in (optimizer.averaged_gradients, optimizer.all_grad_tensors, optimizer.extra_large_param_to_reduce):
            buffer.clear()
        for bucket in optimizer.ipg_buckets.values():
            bucket.clear()
        optimizer.params_already_reduced[:] = [False] * len(optimizer.params_already_reduced)
        optimizer._release_ipg_buffers()
        while optimizer._backward_active_depth:
            optimizer.exit_backward()
        optimizer.clear_backward_seen_flag()

    def follow(self) -> float:
        """Take an optimiser step and return the gradient norm before clipping."""
        import torch

        for group in self.engine.optimizer.param_groups:
            group["lr"] = self.lr
        if self._config.stage == 0:
            clip = self._config.options.grad_clip or math.inf
            norm = float(torch.nn.utils.clip_grad_norm_(self.engine.module.parameters(), clip))
            if math.isfinite(norm):
                self.engine.step()
            else:
                self.engine.zero_grad()
            return norm
        # Skips the step and drops the gradient if it is not finite.
        self.engine.step()
        # DeepSpeed may return -1 instead of a non-finite norm.
        return float(self.engine.get_global_grad_norm())

    def save(self, folder: Path, rank: int, state: Mapping[str, Any], *, frozen: bool) -> None:
        """Write this rank's part of the state as safetensors, for `read`; a collective. See `TrainedModule.save`."""
        engine, optimizer = self.engine, self.engine.optimizer
        folder.mkdir(parents=True, exist_ok=True)
        with _checkpoint_event(optimizer):
            if rank == self._source(rank, 3):
                module = engine.module_state_dict(exclude_frozen_parameters=not frozen)
                counts = {name: getattr(engine, name) for name in _COUNTERS}
                run = {**self.progress, **state}
                write_state(folder / f"model-{rank}.safetensors", {"module": module, "engine": counts, "run": run})
            if rank == self._source(rank, 1):
                saved = {name: value for name, value in optimizer.state_dict().items() if name not in _DERIVED}
                write_state(folder / f"optimizer-{rank}.safetensors", saved)

    def read(self, folder: Path, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read what `save` wrote, or the pickles of rlsdk 0.1 without executing their contents.

        Args:
            folder: Folder visible to all ranks.
            rank: Rank of this process.

        Returns:
            States of the model and the optimiser, for `restore`.

        Raises:
            CheckpointError: A file is missing or has unexpected contents.
        """
        if (folder / "model-0.safetensors").is_file():
            model = read_state(folder / f"model-{self._source(rank, 3)}.safetensors")
            return model, read_state(folder / f"optimizer-{self._source(rank, 1)}.safetensors")
        return read_pickled(folder, rank, stage=self._config.stage, dtype=self._config.model.dtype)

    def restore(self, model: Mapping[str, Any], saved: dict[str, Any], rank: int, *, strict: bool) -> dict[str, Any]:
        """Resume from what `read` returned; a collective. See `TrainedModule.restore`.

        Raises:
            CheckpointError: The states do not fit.
        """
        engine, optimizer = self.engine, self.engine.optimizer
        try:
            with _checkpoint_event(optimizer):
                engine.load_module_state_dict({"module": model["module"]}, strict=strict)
                if self._config.stage:
                    if hasattr(optimizer, "loss_scaler"):
                        saved["loss_scaler"] = optimizer.loss_scaler
                    # DeepSpeed does not read the states of other ranks.
                    states: list[Any] = [None] * self._world
                    states[rank] = saved
                    full = engine.zero_load_from_fp32_weights()
                    optimizer.load_state_dict(state_dict_list=states, load_from_fp32_weights=full)
                else:
                    optimizer.load_state_dict(saved)
            for name in _COUNTERS:
                setattr(engine, name, int(model["engine"][name]))
            state: dict[str, Any] = model["run"]
            self.set_progress(state)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, AssertionError) as error:
            raise CheckpointError(
                f"the checkpoint's {self.role} does not fit this one: {type(error).__name__}: {error}"
            ) from error
        return state

    def _source(self, rank: int, split: int) -> int:
        """Return the rank whose file this rank reads: its own if the stage shards the content, otherwise rank 0."""
        return rank if self._config.stage >= split else 0

    def full_tensors(self, *, keep: bool, wanted: Wanted | None = None, host: bool = True) -> dict[str, Tensor]:
        """Return full tensors of the model by their `state_dict` names; a collective under ZeRO-3."""
        return full_tensors(self.engine.module.model, keep=keep, wanted=wanted, host=host)

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield float32 weights by parameter name; under ZeRO-3, this rank's shards of them. A collective."""
        import torch
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_local_fp32_param

        for name, parameter in self.engine.module.named_parameters():
            if hasattr(parameter, "ds_tensor"):
                yield name, safe_get_local_fp32_param(parameter) if parameter.requires_grad else parameter.ds_tensor
            elif parameter.requires_grad and parameter.dtype != torch.float32:
                yield name, safe_get_full_fp32_param(parameter)
            else:
                yield name, parameter.detach()

    def update_tensors(self) -> Iterator[Tensor]:
        """Yield the moments and, with ZeRO, the float32 copy of the weights and gradients that stay allocated."""
        import torch

        optimizer = self.engine.optimizer
        inner = getattr(optimizer, "optimizer", optimizer)  # torch's, which ZeRO wraps
        model = {id(parameter) for parameter in self.engine.module.parameters()}
        candidates = [value for parameter, state in inner.state.items() for value in (parameter, *state.values())]
        candidates += getattr(optimizer, "fp32_groups_gradients_flat", ())  # stage 1 in bfloat16
        candidates.append(getattr(optimizer, "grad_partitions_flat_buffer", None))  # stage 3
        for value in candidates:
            if isinstance(value, torch.Tensor) and id(value) not in model:
                yield value

    def close(self) -> None:
        """Free DeepSpeed's engine."""
        self.engine.destroy()


@contextmanager
def _checkpoint_event(optimizer: Any) -> Iterator[None]:
    """Tell an optimiser of ZeRO that its state is saved or loaded in the block."""
    announced = hasattr(optimizer, "checkpoint_event_prologue")  # torch's own optimisers have no such method
    if announced:
        optimizer.checkpoint_event_prologue()
    yield
    if announced:
        optimizer.checkpoint_event_epilogue()


class ShardedReference(MovingReference):
    """A reference model that follows the policy under ZeRO-3: each rank moves its shards."""

    def __init__(self, module: nn.Module, weights: Mapping[str, Tensor], mix: float) -> None:
        super().__init__(weights, mix, sharded=True)
        self._parameters: dict[str, Any] = dict(module.named_parameters())

    def changed(self, name: str) -> None:
        """Make the next pass gather the parameter again; DeepSpeed keeps small ones gathered between passes."""
        super().changed(name)
        if (parameter := self._parameters[name]).ds_status.name == "AVAILABLE":
            parameter.partition()


@contextmanager
def divided_while_loaded(config: DeepSpeedConfig) -> Iterator[None]:
    """Make `from_pretrained` shard each tensor on creation, so that no rank ever holds the whole model."""
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import DeepSpeedTensorOverride
    from transformers.integrations import HfDeepSpeedConfig

    init = deepspeed.zero.Init
    # By default it also rounds every buffer to the parameters' dtype. In bfloat16, rotary frequencies would be off by
    # up to 0.4 %: a token 1,000 positions back would appear shifted by up to four positions.
    deepspeed.zero.Init = partial(init, tensor_overrides=[DeepSpeedTensorOverride.device])
    enabled = HfDeepSpeedConfig(config.inference)  # `from_pretrained` finds this object while it is alive
    try:
        with _freed_at_once():
            yield
    finally:
        deepspeed.zero.Init = init
        del enabled


@contextmanager
def _freed_at_once() -> Iterator[None]:
    """Return the memory of large tensors to the system as soon as they are freed.

    Otherwise glibc keeps it between the remaining shards, and the process grows as if it held whole models.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        yield
        return
    mallopt(_MMAP_THRESHOLD, 2**20)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _GREATEST_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, 2 * _GREATEST_THRESHOLD)


def full_tensors(
    module: nn.Module, *, keep: bool, wanted: Wanted | None = None, host: bool = True
) -> dict[str, Tensor]:
    """Return full tensors of a module that ZeRO-3 may have sharded; see `TrainedModule.full_tensors`.

    Those sharded by ZeRO-3 are copies; others share the module's memory.
    """
    import deepspeed

    tensors: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if wanted is not None and not wanted(name):
            continue
        if not hasattr(tensor, "ds_id"):
            tensors[name] = tensor.detach()
            continue
        if id(tensor) not in copies:
            with deepspeed.zero.GatheredParameters([tensor]):
                whole = tensor.detach()
                copies[id(tensor)] = whole.to("cpu" if host else whole.device, copy=True) if keep else whole
        tensors[name] = copies[id(tensor)]
    return tensors if keep else {}
