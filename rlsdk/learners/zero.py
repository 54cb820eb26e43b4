"""One module under DeepSpeed: its configuration, steps along exactly the gradient of the global loss, its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import attrs

from rlsdk.errors import LearnerError

if TYPE_CHECKING:
    from torch import Tensor, nn

Schedule = Literal["constant", "linear", "cosine"]
Offload = Literal["none", "optimizer", "all"]


@attrs.frozen(kw_only=True)
class Setting:
    """How DeepSpeed trains a module; see the learner's options of the same names.

    Attributes:
        lr: Peak learning rate.
        betas: Of AdamW.
        eps: Of AdamW.
        weight_decay: Of AdamW.
        grad_clip: Greatest norm of the gradient; 0 for none.
        stage: Of ZeRO.
        offload: What lies in main memory.
        dtype: float32 or bfloat16.
        device: cpu or cuda.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_clip: float
    stage: int
    offload: Offload
    dtype: str
    device: str

    @property
    def deepspeed(self) -> dict[str, Any]:
        """DeepSpeed's own configuration."""
        config = {
            # Both 1: the learner decides what a micro-batch is, and when a step is due.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": self.lr,
                    "betas": list(self.betas),
                    "eps": self.eps,
                    "weight_decay": self.weight_decay,
                    # torch's fused AdamW needs no compiler; DeepSpeed's own would build one of its extensions.
                    "torch_adam": True,
                    "fused": True,
                },
            },
            "zero_optimization": self._zero,
            # Without ZeRO, DeepSpeed clips but does not tell the norm; `Trained.step` does both.
            "gradient_clipping": self.grad_clip if self.stage else 0.0,
            "zero_force_ds_cpu_optimizer": False,
        }
        if self.dtype == "bfloat16":
            # Sums of many micro-batches and over ranks lose their digits in bfloat16.
            config |= {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        return config

    @property
    def inference(self) -> dict[str, Any]:
        """DeepSpeed's configuration of a module that is not trained, split over the ranks."""
        found = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": self._zero}
        return found | ({"bf16": {"enabled": True}} if self.dtype == "bfloat16" else {})

    @property
    def _zero(self) -> dict[str, Any]:
        there = {"device": "cpu", "pin_memory": self.device == "cuda"}
        zero: dict[str, Any] = {"stage": self.stage, "overlap_comm": self.device == "cuda"}
        if self.offload != "none":
            zero["offload_optimizer"] = there
        if self.offload == "all":
            zero["offload_param"] = there
        return zero


class Trained:
    """A module that DeepSpeed trains.

    Attributes:
        engine: DeepSpeed's.
        updates: Optimiser steps done; the schedule depends on it alone.
        gradients: Full gradients by name, of the last step, where `record` is set (tests and diagnosis).
        record: Whether to keep them.
    """

    def __init__(self, module: nn.Module, setting: Setting, factor: Callable[[int], float], world: int) -> None:
        import deepspeed

        parameters = [p for p in module.parameters() if p.requires_grad]
        self.engine = deepspeed.initialize(model=module, model_parameters=parameters, config=setting.deepspeed)[0]
        self.updates = 0
        self.record = False
        self.gradients: dict[str, Tensor] = {}
        self._setting, self._factor, self._world = setting, factor, world

    def __call__(self, *args: Any) -> Any:
        """Run the module."""
        return self.engine(*args)

    def step(self, losses: Iterator[Tensor], count: int, clock: Clock) -> float:
        """One optimiser step.

        Args:
            losses: This rank's parts of the loss, one per micro-batch; those of all ranks add up to the loss.
            count: How many, as many on every rank.
            clock: Takes the time.

        Returns:
            Norm of the gradient before clipping.

        Raises:
            LearnerError: It is not finite.
        """
        for i in range(count):
            # A sum over micro-batches: with one accumulation step, DeepSpeed divides by no count of them.
            self.engine.set_gradient_accumulation_boundary(i == count - 1)
            with clock("forward_seconds"):
                loss = next(losses)
            with clock("update_seconds"):
                # A sum over ranks: DeepSpeed takes their mean.
                self.engine.backward(loss * self._world)
        with clock("update_seconds"):
            return self._apply()

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._setting.lr * self._factor(self.updates)

    def _apply(self) -> float:
        import torch

        for group in self.engine.optimizer.param_groups:
            group["lr"] = self.lr
        if self.record:
            self.gradients = self._full_gradients()
        if self._setting.stage == 0:
            clip = self._setting.grad_clip or math.inf
            norm = float(torch.nn.utils.clip_grad_norm_(self.engine.module.parameters(), clip))
            self._expect_finite(norm)
            self.engine.step()
        else:
            self.engine.step()
            norm = float(self.engine.get_global_grad_norm())
            self._expect_finite(norm)
        self.updates += 1
        return norm

    def _expect_finite(self, norm: float) -> None:
        # DeepSpeed gives a norm of -1 where it met an infinite one.
        if norm < 0 or not math.isfinite(norm):
            step = self.updates + 1
            raise LearnerError(
                f"the gradient of optimiser step {step} is not finite (norm {norm}); resume from a checkpoint"
            )

    def _full_gradients(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_grad

        found = {}
        for name, parameter in self.engine.module.named_parameters():
            if not parameter.requires_grad:
                continue
            gradient = parameter.grad if self._setting.stage == 0 else safe_get_full_grad(parameter)
            found[name] = (parameter.new_zeros(parameter.shape) if gradient is None else gradient).detach().clone()
        return found


def full_tensors(module: nn.Module, *, keep: bool, wanted: Callable[[str], bool] | None = None) -> dict[str, Tensor]:
    """All tensors of a module, by the names of its `state_dict`; a collective under ZeRO-3.

    Args:
        module: That DeepSpeed may have split over the ranks.
        keep: Whether this rank wants them; without, it only takes part.
        wanted: Says by name which ones; left out, all.

    Returns:
        Detached tensors. Those that ZeRO-3 held in parts are copies; others are the module's own memory.
    """
    import deepspeed

    found: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if wanted is not None and not wanted(name):
            continue
        split = hasattr(tensor, "ds_id")
        if not split:
            found[name] = tensor.detach()
        elif id(tensor) not in copies:
            with deepspeed.zero.GatheredParameters([tensor]):
                copies[id(tensor)] = tensor.detach().cpu().clone() if keep else tensor.detach()
        if split:
            found[name] = copies[id(tensor)]
    return found if keep else {}


def schedule(kind: Schedule, warmup: int, final: float, total: int) -> Callable[[int], float]:
    """Factor of the learning rate by optimiser steps done.

    Args:
        kind: What follows the linear warm-up: constant, linear or cosine down to `final`.
        warmup: Steps that it takes to the peak.
        final: Factor at the end.
        total: Steps in all.
    """

    def factor(done: int) -> float:
        rise = min(1.0, (done + 1) / max(warmup, 1))
        progress = min(max((done - warmup) / max(total - warmup, 1), 0.0), 1.0)
        if kind == "linear":
            return rise * (1 - (1 - final) * progress)
        if kind == "cosine":
            return rise * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))
        return rise

    return factor


class Clock:
    """Adds up seconds by name."""

    def __init__(self) -> None:
        self.seconds = {"forward_seconds": 0.0, "update_seconds": 0.0}

    def __call__(self, name: str) -> _Span:
        """A context whose duration is added to `name`."""
        return _Span(self.seconds, name)


class _Span:
    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        import time

        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        import time

        self._seconds[self._name] += time.perf_counter() - self._start


def no_communication_op() -> None:
    """Keep DeepSpeed from compiling its shared-memory collectives: 22 s of g++ for an op that inference alone calls."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
