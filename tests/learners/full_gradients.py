"""DeepSpeed's full gradients, recorded in a learner's processes before each optimiser step clips them."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray


def keep_gradients(group: Any) -> None:
    """Make every rank keep the gradients of its next optimiser steps."""
    ray.get([actor.__ray_call__.remote(_record) for actor in group.actors])


def gradients(group: Any, role: str = "actor") -> list[dict[str, np.ndarray]]:
    """Of each rank, the full gradients of the last optimiser step before clipping, float32, by name."""
    return ray.get([actor.__ray_call__.remote(_recorded, role) for actor in group.actors])


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
