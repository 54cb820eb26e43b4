"""Call a component on a batch and split its output into values, metrics and gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from rlsdk.batch import Credit, CreditInputs, LossInputs
from rlsdk.schedules import at
from rlsdk.testing.findings import Violated, numbers, shape
from rlsdk.testing.inputs import copied, lengths_of
from rlsdk.testing.subject import Subject

LOOSE, TIGHT = 0.06, 1e-4
"""Relative tolerances, as shares of the largest value: after bfloat16 arithmetic, and after float32 arithmetic."""


@attrs.frozen(eq=False)
class Results:
    """Outputs of a component on a batch.

    Attributes:
        values: Name -> `[n]` or `[t]`, detached.
        metrics: Metrics reported by a loss or correction.
        gradient: Gradient of a weighted sum of trained tokens' losses with respect to the logprobs, `[t]`; None
            without a graph.
        strangers: True if the graph has leaves other than inputs.
    """

    values: Mapping[str, Tensor]
    metrics: Mapping[str, Any] = attrs.field(factory=dict)
    gradient: Tensor | None = None
    strangers: bool = False

    def map(self, change: Callable[[Tensor], Tensor]) -> Results:
        """Apply a function to values and gradient."""
        gradient = None if self.gradient is None else change(self.gradient)
        return Results({name: change(value) for name, value in self.values.items()}, self.metrics, gradient)


def invoke(subject: Subject, made: Callable[..., Any], x: CreditInputs | LossInputs) -> Any:
    """Call a component by its kind's convention."""
    if subject.component.kind == "kl" and isinstance(x, LossInputs):
        return subject.call(at(made, x.train_step), x.logprobs, x.ref_logprobs)
    return subject.call(made, x)


def results(
    subject: Subject,
    x: CreditInputs | LossInputs,
    *,
    made: Callable[..., Any] | None = None,
    weights: Tensor | None = None,
) -> Results:
    """Run a component on a batch and check the shapes of its outputs.

    Args:
        subject: The component.
        x: The batch; it is copied first.
        made: Instance to call; by default, a new one.
        weights: Weights of the tokens' losses in the differentiated sum, `[t]`; by default, rising from 1/2 to 2.

    Raises:
        Violated: The component raised, or its output does not have the form required by its kind.
    """
    made = subject.make() if made is None else made
    if isinstance(x, CreditInputs):
        return Results(_credit(subject, invoke(subject, made, copied(x)), x))
    leaves = [x.logprobs.clone().requires_grad_()]
    changed = {"logprobs": leaves[0]}
    if hasattr(x, "entropy"):
        leaves.append(x.entropy.clone().requires_grad_())
        changed["entropy"] = leaves[1]
    answer = invoke(subject, made, copied(x).replace(**changed))
    values, metrics = _pair(subject, answer, len(x.logprobs))
    gradient, strangers = None, False
    if values.requires_grad:
        weights = torch.linspace(0.5, 2, len(values)) if weights is None else weights
        total = torch.where(x.loss_mask, values * weights, 0).sum()
        gradients = subject.call(lambda: torch.autograd.grad(total, leaves, allow_unused=True))
        gradient = torch.zeros_like(leaves[0]) if gradients[0] is None else gradients[0]
        strangers = any(all(leaf is not own for own in leaves) for leaf in _leaves(values))
    return Results({"values": values.detach()}, metrics, gradient, strangers)


def _credit(subject: Subject, answer: Any, x: CreditInputs) -> dict[str, Tensor]:
    n, t = len(x.rewards), len(x.loss_mask)
    name = "rewards" if subject.component.kind == "shaping" else "advantages"
    if isinstance(answer, Credit) and name == "advantages":
        parts = {"advantages": answer.advantages, "returns": answer.returns}
        wanted = {t: f"[{t}] (one per token)"}
    else:
        parts = {name: answer}
        wanted = {n: f"[{n}] (one per rollout)", t: f"[{t}] (one per token)"}
    for part, value in parts.items():
        _check_tensor(part, value, wanted)
    return {part: value.detach() for part, value in parts.items()}


def _pair(subject: Subject, answer: Any, t: int) -> tuple[Tensor, Mapping[str, Any]]:
    metrics: Any = {}
    if isinstance(answer, tuple) and subject.component.kind != "kl":
        if len(answer) != 2 or not isinstance(answer[1], Mapping):
            raise Violated("form", f"a tensor [{t}], or the tensor and a dict of metrics", shape(answer))
        answer, metrics = answer
    _check_tensor("the result", answer, {t: f"[{t}] (one value per token; rlsdk takes the mean)"})
    return answer, metrics


def _check_tensor(name: str, value: Any, wanted: Mapping[int, str]) -> None:
    fits = isinstance(value, Tensor) and value.dim() == 1 and len(value) in wanted and value.is_floating_point()
    if not fits or value.layout is not torch.strided or value.device.type != "cpu":
        raise Violated("form", f"{name}: a tensor of floats {' or '.join(wanted.values())}", shape(value))


def _leaves(values: Tensor) -> list[Tensor]:
    """Return the leaf tensors of a graph, where gradients would accumulate."""
    found, seen, waiting = [], set(), [values.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found


def check_finite(found: Results, x: CreditInputs | LossInputs) -> None:
    """Reject non-finite values: anywhere in credit, and at trained tokens of a loss.

    Raises:
        Violated: A value is not finite; the message shows all values.
    """
    for name, value in found.values.items():
        counted = value if isinstance(x, CreditInputs) else value[x.loss_mask]
        if not bool(counted.isfinite().all()):
            raise Violated("value", f"finite {name}", numbers(value))
    if found.gradient is not None and not bool(found.gradient.isfinite().all()):
        raise Violated("value", "a finite gradient with respect to the logprobs", numbers(found.gradient))


def check_same(
    found: Results, wanted: Results, x: CreditInputs | LossInputs, why: str, *, tolerance: float = TIGHT
) -> None:
    """Compare the results of all rollouts, and of the tokens included by `loss_mask`.

    Args:
        found: Results on the changed input.
        wanted: Results on the original input, in the order of the changed one.
        x: The changed input.
        why: Reason why they must be equal.
        tolerance: Maximum difference, as a share of the largest value.

    Raises:
        Violated: They differ.
    """
    pairs = {name: (found.values[name], value) for name, value in wanted.values.items() if name in found.values}
    if found.gradient is not None and wanted.gradient is not None:
        pairs["the gradient with respect to the logprobs"] = (found.gradient, wanted.gradient)
    for name, (value, expected) in pairs.items():
        if value.shape != expected.shape:
            raise Violated("form", f"{name} {list(expected.shape)} {why}", shape(value))
        per_rollout = name in ("rewards", "advantages") and len(value) == len(lengths_of(x))
        counted = torch.ones_like(value, dtype=torch.bool) if per_rollout else x.loss_mask
        if bool((_differing(value, expected, tolerance) & counted).any()):
            kept = [torch.where(counted, each, 0) for each in (expected, value)]
            raise Violated("value", f"{name} {numbers(kept[0])}, {why}", numbers(kept[1]))


def _differing(found: Tensor, wanted: Tensor, tolerance: float) -> Tensor:
    """Return a bool tensor, True where two tensors differ by more than a share of the largest expected value."""
    found, wanted = found.detach().double(), wanted.detach().double()
    scale = max(0.1, float(wanted.abs().nan_to_num(0.0).max())) if wanted.numel() else 0.1
    return ~torch.isclose(found, wanted, rtol=0.0, atol=tolerance * scale, equal_nan=True)
