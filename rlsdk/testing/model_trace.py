"""Run the same tokens through engine and learner, module by module, to find the first difference.

`rlsdk check model PATH --trace`. Both sides read one sequence with one shape, so that kernels have no reason to round
differently: with the same weights, dtype and attention, the outputs are identical.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from rlsdk.contracts import TrainBatch
from rlsdk.learners.rows import to_exact_row

LOGPROBS = "logprobs"
"""Name of the last operation: token logprobs at temperature 1."""


@attrs.frozen
class Operation:
    """An operation of a model, compared between engine and learner.

    Attributes:
        name: Name of the module, such as `model.layers.0.self_attn.q_proj`, with `input of` before it if the difference
            arose between two modules, as in attention before `o_proj`.
        difference: Maximum absolute difference of the outputs; infinite if the shapes differ or a number is not finite
            on only one side.
        dtype: Dtype of the output; `ENGINE / LEARNER` if they differ.
        shape: Shape of the learner's output.
    """

    name: str
    difference: float
    dtype: str
    shape: tuple[int, ...]

    @property
    def differs(self) -> bool:
        """True if the two outputs differ in numbers or dtype."""
        return self.difference > 0 or "/" in self.dtype


def trace(engine: Any, policy: Any, token_ids: np.ndarray, width: int) -> list[Operation]:
    """Run the same tokens through both sides, and compare the outputs of all modules in execution order.

    Args:
        engine: The engine `transformers`, started with `Model.exact`.
        policy: The learner's `PolicyModel` of the same model.
        token_ids: int64 `[k]`, at least two and at most `width`.
        width: `max_length` with which the engine was started.

    Returns:
        Operations in the engine's execution order, `logprobs` last.
    """
    with _outputs(engine.net) as ours:
        sampled = engine.logprobs(token_ids)
    with _outputs(policy.model) as theirs, torch.no_grad():
        learned = policy(to_exact_row(whole_rollout(token_ids), width))[0]
    known = [name for name in ours if name in theirs]
    operations = [_compared(name, ours[name], theirs[name]) for name in known]
    return [*operations, _compared(LOGPROBS, (torch.from_numpy(sampled),), (learned,))]


def first_difference(operations: Sequence[Operation]) -> Operation | None:
    """Return the first operation that differs, in execution order; None if all agree.

    A module finishes after its submodules, so this finds the innermost one.
    """
    return next((each for each in operations if each.differs), None)


def pick(operations: Sequence[Operation], around: int = 3) -> list[Operation]:
    """Select operations to show: a few around the first difference, and the logprobs."""
    first = next((i for i, each in enumerate(operations) if each.differs), None)
    if first is None:
        return list(operations[-1:])
    shown = list(operations[max(0, first - around) : first + around + 1])
    return shown if operations[-1] in shown else [*shown, operations[-1]]


@contextmanager
def _outputs(net: nn.Module) -> Iterator[dict[str, tuple[Tensor, ...]]]:
    """Collect inputs of the innermost modules and outputs of all modules, by name, in execution order."""
    found: dict[str, tuple[Tensor, ...]] = {}
    head = net.get_output_embeddings()  # type: ignore[operator]

    def keep(name: str, values: Any) -> None:
        found[name] = tuple(tensor.detach().clone() for tensor in _tensors(values))

    def watch(name: str, module: nn.Module) -> Iterator[Any]:
        if not any(module.children()):
            yield module.register_forward_pre_hook(
                lambda _, args, options: keep(f"input of {name}", (args, options)), with_kwargs=True
            )
        yield module.register_forward_hook(lambda _, __, output: keep(name, output))

    with ExitStack() as stack:
        for name, module in net.named_modules():
            if name and module is not head:  # the learner's head returns no logits
                for handle in watch(name, module):
                    stack.callback(handle.remove)
        yield found


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        yield from (tensor for each in output.values() for tensor in _tensors(each))
    elif isinstance(output, tuple | list):
        yield from (tensor for each in output for tensor in _tensors(each))


def _compared(name: str, ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> Operation:
    kinds = [" ".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in side)) for side in (ours, theirs)]
    dtype = kinds[0] if kinds[0] == kinds[1] else " / ".join(kinds)
    shape = tuple(theirs[0].shape) if theirs else ()
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return Operation(name, float("inf"), dtype, shape)
    gaps = [_gap(one.double(), other.double()) for one, other in zip(ours, theirs, strict=True)]
    return Operation(name, max(gaps, default=0.0), dtype, shape)


def _gap(one: Tensor, other: Tensor) -> float:
    apart = torch.where(one == other, 0.0, (one - other).abs())
    apart = torch.where(one.isnan() & other.isnan(), 0.0, apart).nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(apart.max()) if apart.numel() else 0.0


def whole_rollout(token_ids: np.ndarray) -> TrainBatch:
    """Return a batch of one rollout; all tokens except the first are response tokens."""
    length = np.array([len(token_ids)], np.int64)
    return TrainBatch(
        token_ids=np.asarray(token_ids, np.int64),
        lengths=length,
        starts=np.ones(1, np.int64),
        responses=length - 1,
        loss_mask=np.ones(len(token_ids) - 1, bool),
    )
