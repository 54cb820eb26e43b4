"""DeepSpeed's full gradients, recorded in a learner's processes before each optimiser step clips them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from rlsdk.contracts import Model, TrainBatch


def keep_gradients(group: Any) -> None:
    """Make every rank keep the gradients of its next optimiser steps."""
    ray.get([actor.__ray_call__.remote(_record) for actor in group.actors])


def gradients(group: Any, role: str = "actor") -> list[dict[str, np.ndarray]]:
    """Of each rank, the full gradients of the last optimiser step before clipping, float32, by name."""
    return ray.get([actor.__ray_call__.remote(_recorded, role) for actor in group.actors])


def check_steps_are_torchs(
    start: Callable[[], Any],
    model: Model,
    batch: TrainBatch,
    minibatches: Sequence[np.ndarray],
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    decay: float,
    steps: int,
    checkpoint: Path,
) -> None:
    """Compare a learner, started again from its checkpoint before each step, with torch's optimiser on whole tensors.

    Args:
        start: Starts the learner, whose weight decay is on matrices.
        model: Its model.
        batch: Batch of each step.
        minibatches: Its one minibatch.
        make: Creates torch's optimiser of parameter groups.
        decay: Weight decay.
        steps: Number of steps.
        checkpoint: Folder to write the checkpoints to.
    """
    from transformers import AutoModelForCausalLM

    from rlsdk.weights import from_weights

    expected = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    named = dict(expected.named_parameters())
    groups = [{"params": [p for n, p in named.items() if "norm" not in n], "weight_decay": decay}]
    groups += [{"params": [p for n, p in named.items() if "norm" in n], "weight_decay": 0.0}]
    optimizer = make(groups)
    for step in range(steps):
        group = start()
        if step:
            group.load(checkpoint)
        keep_gradients(group)
        group.update(batch, minibatches, step)
        for name, gradient in gradients(group)[0].items():
            named[name].grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        group.save(checkpoint)
    rough = 2e-2 if model.dtype == "bfloat16" else 1e-5
    for name, tensor in from_weights(group.fetch_weights(steps)):
        torch.testing.assert_close(tensor.float(), expected.state_dict()[name], rtol=rough, atol=rough, msg=name)


def _record(actor: Any) -> None:
    from deepspeed.utils import safe_get_full_grad

    def full(trained: Any) -> dict[str, np.ndarray]:
        found = {}
        for name, parameter in trained.engine.module.named_parameters():
            if parameter.requires_grad:
                stage = trained.engine.zero_optimization_stage()
                gradient = safe_get_full_grad(parameter) if stage else parameter.grad
                gradient = parameter.new_zeros(parameter.shape) if gradient is None else gradient
                found[name.removeprefix("model.")] = gradient.detach().float().cpu().numpy().copy()
        return found

    def recording(trained: Any, step: Any) -> Any:
        def record() -> Any:
            actor.recorded[role_of[trained]] = full(trained)
            return step()

        return record

    actor.recorded = {}
    role_of = {trained: role for role, trained in actor._learner._trained.items()}
    for trained in role_of:
        trained.step = recording(trained, trained.step)


def _recorded(actor: Any, role: str) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = actor.recorded[role]
    return found
