"""Tensor parallelism: consecutive ranks split a model's linear layers by transformers' plan for it.

These ranks run each micro-batch together, taking turns: first one rank's micro-batch, then the next one's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlsdk.kit import SequenceGroup

_PARTIAL = "replicated_with_grad_allreduce"
"""Transformers' style of per-head norms: each rank has the whole norm, and the gradient of its own heads."""
_KNOWN = ("colwise", "rowwise", _PARTIAL)


@attrs.frozen(eq=False)
class TensorGroup:
    """The ranks that split layers with this one; see `rlsdk.kit.SharedRows`.

    Attributes:
        mesh: Device mesh of these ranks.
    """

    mesh: Any

    @property
    def rank(self) -> int:
        """Rank of this process within the group."""
        return int(self.mesh.get_local_rank())

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return int(self.mesh.size())

    @property
    def slices(self) -> int:
        """Return 1, since every rank reads all tokens of a micro-batch."""
        return 1

    def adopt(self, model: Any, path: str) -> None:
        """Do nothing: `divide_layers` changes the model once it has its adapters."""

    def turns(self, rows: Any) -> list[Any]:
        """Return the rows of all ranks of the group, by rank."""
        held: list[Any] = [None] * self.size
        dist.all_gather_object(held, rows, group=self.mesh.get_group())
        return held

    def __call__(self, model: Callable[..., Any], rows: Any, *args: Any) -> Any:
        """Run a model on rows that all ranks of the group hold; the gradient of its results is summed over them."""
        results = model(rows, *args)
        group = self.mesh.get_group()
        given = results if isinstance(results, tuple) else (results,)
        # In one exchange, which runs in the backward pass of all ranks or of none.
        stacked = torch.stack([each for each in given if each is not None])
        whole = iter(_Shared.apply(stacked, group))  # type: ignore[no-untyped-call]
        found = tuple(None if g is None else next(whole) if g.requires_grad else next(whole).detach() for g in given)
        return found if isinstance(results, tuple) else found[0]


@attrs.frozen(eq=False)
class NestedGroup:
    """Grid of ranks that split the tokens of rollouts and the layers; see `rlsdk.kit.SharedRows`.

    Attributes:
        context: Ranks with the same part of each layer as this one, but other tokens.
        tensor: Ranks with the same tokens as this one, but other parts of each layer.
    """

    context: SequenceGroup
    tensor: TensorGroup

    @property
    def rank(self) -> int:
        """Rank of this process within the grid."""
        return self.context.rank * self.tensor.size + self.tensor.rank

    @property
    def size(self) -> int:
        """Number of ranks in the grid."""
        return self.context.size * self.tensor.size

    @property
    def slices(self) -> int:
        """Number of slices that the tokens of a micro-batch are split into."""
        return self.context.slices

    def adopt(self, model: Any, path: str) -> None:
        """Make a transformers model exchange tokens for heads in its attention."""
        self.context.adopt(model, path)

    def turns(self, rows: Any) -> list[Any]:
        """Return the rows of all ranks of the group, by rank."""
        return [each for among in self.context.turns(self.tensor.turns(rows)) for each in among]

    def __call__(self, model: Callable[..., Any], rows: Any, *args: Any) -> Any:
        """Run a model on rows that all ranks of the group hold; the gradient of its results is summed over them."""
        return self.tensor(partial(self.context, model), rows, *args)


class _Shared(torch.autograd.Function):
    """Results held by all ranks of a group and used differently by each: gradients are summed."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return results.view_as(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def plan_of(model: Any) -> dict[str, str]:
    """Return transformers' plan for a model's layers: names below its base, with `*` for numbers -> styles.

    Embeddings, which the plan may name, stay whole on each rank, like the output head.
    """
    plan = getattr(model.base_model.config.get_text_config(), "base_model_tp_plan", None) or {}
    return {name: style for name, style in plan.items() if ".*." in name}


def _styles(model: Any) -> dict[str, str]:
    """Return the styles of a model's modules by name below its base, without modules that have none."""
    plan, names = plan_of(model), [name for name, _ in model.base_model.named_modules()]
    found = ((name, next((style for pattern, style in plan.items() if fnmatch(name, pattern)), None)) for name in names)
    return {name: style for name, style in found if style is not None}


def divide_layers(model: Any, mesh: Any) -> None:
    """Split the linear layers of a transformers model over ranks, by rows or columns, and adapters alike.

    Args:
        model: An unsharded model, possibly adapted by peft; modified in place.
        mesh: Device mesh of the ranks.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for name, style in _styles(model).items():
        layer = model.base_model.get_submodule(name)
        linear: Any = getattr(layer, "base_layer", layer)
        if style == "colwise":
            for each in (linear, *getattr(layer, "lora_B", {}).values()):
                parallelize_module(each, mesh, ColwiseParallel())
        elif style == "rowwise":
            for each in (linear, *getattr(layer, "lora_A", {}).values()):
                parallelize_module(each, mesh, RowwiseParallel())


def partial_gradients(module: nn.Module) -> set[str]:
    """Return names of trained parameters for which each rank of a group has only part of the gradient."""
    model: Any = module.model
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    patterns = [f"{name}.*" for name, style in plan_of(model).items() if style == _PARTIAL]
    return {
        names[id(parameter)]
        for name, parameter in model.base_model.named_parameters()
        if parameter.requires_grad and any(fnmatch(name, pattern) for pattern in patterns)
    }


def faults(model: Any, size: int) -> Sequence[str]:
    """Explain why this many ranks cannot split the layers of a model, possibly without weights."""
    kind, text, plan = type(model).__name__, model.config.get_text_config(), plan_of(model)
    leave = "set learner.tensor_parallel=1"
    if not plan:
        return [f"transformers has no tensor-parallel plan for a {kind}; {leave}"]
    found = []
    if unknown := sorted(set(plan.values()) - set(_KNOWN)):
        found.append(f"layers of a {kind} would be divided as {', '.join(unknown)}, which is not supported; {leave}")
    styles = _styles(model)
    if between := _between(model, styles):
        found.append(
            f"{', '.join(between)} of a {kind} would see only part of its input on each rank, for which transformers' "
            f"plan has no rule; {leave}"
        )
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    for what, count in {"heads": heads, "key-value heads": key_heads}.items():
        if count % size:
            found.append(f"{count} {what} cannot be divided among {size} ranks; set learner.tensor_parallel otherwise")
    if not found and (uneven := _uneven(model, styles, size)):
        found.append(
            f"{', '.join(uneven)} of a {kind} cannot be divided among {size} ranks evenly; set learner.tensor_parallel "
            "otherwise"
        )
    return found


def _between(model: Any, styles: Mapping[str, str]) -> list[str]:
    """Return names of parameters between split layers, such as an activation's, for which the plan has no rule."""
    parents = {name.rpartition(".")[0] for name, style in styles.items() if style in ("colwise", "rowwise")}
    left = [
        f"{parent}.{name}"
        for parent in parents
        for name, _ in model.base_model.get_submodule(parent).named_parameters()
        if f"{parent}.{name}".rpartition(".")[0] not in styles
    ]
    return _numbered(left)


def _uneven(model: Any, styles: Mapping[str, str], size: int) -> list[str]:
    """Return names of layers that this many ranks cannot split evenly."""
    sides = {"colwise": "out_features", "rowwise": "in_features"}
    divided = {name: sides[style] for name, style in styles.items() if style in sides}
    modules = {name: model.base_model.get_submodule(name) for name in divided}
    return _numbered([name for name, side in divided.items() if getattr(modules[name], side, size) % size])


def _numbered(names: Sequence[str]) -> list[str]:
    """Return names with `*` for layer numbers, each once."""
    return sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})
