"""Create optimisers from components, and measure the size of their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlsdk.components import naming, title_of
from rlsdk.errors import LearnerError

if TYPE_CHECKING:
    from torch.optim import Optimizer

Group = dict[str, Any]
"""A parameter group of torch: `params`, `param_names`, `lr`, `weight_decay`, and what an optimiser adds."""
Factory = Callable[[list[Group]], Any]
"""An optimiser component, bound to its options."""
_SIDE = 64
"""Rows and columns of the matrices on which the size of an optimiser's state is measured."""


def created(factory: Factory, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """Create an optimiser of parameter groups.

    Raises:
        LearnerError: The component returned something else, or an optimiser of other parameters.
        RunError: The component failed.
    """
    import torch

    given = [parameter for group in groups for parameter in group["params"]]
    with naming(factory):
        made = factory([{**group, "params": list(group["params"])} for group in groups])
    if not isinstance(made, torch.optim.Optimizer):
        raise LearnerError(f"{title_of(factory)} returned a {type(made).__name__}; expected a torch.optim.Optimizer")
    held = [parameter for group in made.param_groups for parameter in group["params"]]
    if len(held) != len(given) or {id(each) for each in held} != {id(each) for each in given}:
        raise LearnerError(
            f"{title_of(factory)} has {len(held)} of {len(given)} parameters in its groups; each parameter that it is "
            "given must be in one group"
        )
    return made


def state_bytes(factory: Factory) -> float:
    """Measure the bytes of an optimiser's state per parameter, on small float32 tensors.

    If its state differs between layers and embeddings, the greater number counts, since embeddings may be most of a
    small model.

    Raises:
        LearnerError: It is not an optimiser; see `created`.
        RunError: It failed.
    """
    import torch

    most = 0.0
    for name in ("model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"):
        parameter = torch.nn.Parameter(torch.ones(_SIDE, _SIDE))
        made = created(factory, [{"params": [parameter], "param_names": [name], "lr": 1e-3, "weight_decay": 0.0}])
        parameter.grad = torch.ones_like(parameter)
        with naming(factory):
            made.step()
        held = [each for each in made.state[parameter].values() if isinstance(each, torch.Tensor) and each.dim()]
        most = max(most, sum(each.numel() * each.element_size() for each in held) / parameter.numel())
    return most
