"""Properties of what is computed for each token: policy losses, corrections, KL estimators."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlsdk.batch import LossInputs
from rlsdk.errors import LearnerError
from rlsdk.learners.memory import Memory
from rlsdk.testing import inputs
from rlsdk.testing.evaluate import Results, check_same, results
from rlsdk.testing.findings import NotApplicable, Violated
from rlsdk.testing.parts import places, select, units
from rlsdk.testing.properties.base import LOSSES, holds
from rlsdk.testing.properties.packed import FIXED, FORM, ordinary
from rlsdk.testing.show import numbers, shape
from rlsdk.testing.subject import Subject


@holds(
    "micro-batches",
    *LOSSES,
    inputs=ordinary,
    remedy="let a token's value depend on its own rollout alone; one that needs the whole batch declares "
    "whole_batch=True and reads x.whole, in which x.offset is where its tokens begin",
    after=FIXED,
)
def micro_batches(subject: Subject, x: LossInputs) -> None:
    """Splitting the batch between rollouts (pairs kept together) changes no token's value, and no gradient."""
    weights = torch.linspace(0.5, 2, len(x.loss_mask))
    whole = results(subject, x, weights=weights)
    parts = _split(subject, x)
    found = [results(subject, part, weights=weights[places(x, rows)]) for rows, part in parts]
    if found:
        first = parts[0][0]
        split = f"as unsplit (micro-batches: rollout{'s' if len(first) > 1 else ''} {first}, then the rest)"
        gradients = [part.gradient for part in found if part.gradient is not None]
        values = {"values": torch.cat([part.values["values"] for part in found])}
        joined = Results(values, gradient=torch.cat(gradients) if len(gradients) == len(found) else None)
        check_same(joined, whole, x, split)


def _split(subject: Subject, x: LossInputs) -> list[tuple[list[int], LossInputs]]:
    """Two micro-batches, each with its rollouts: the first unit of the batch, and the others."""
    held = units(x)
    found: list[tuple[list[int], LossInputs]] = []
    offset = 0
    for rows in (held[0], [row for unit in held[1:] for row in unit]) if held else ():
        part = select(x, rows)
        if subject.component.whole_batch:
            part = part.replace(whole=x.detach(), offset=offset)
        found.append((rows, part))
        offset += len(part.loss_mask)
    return found


@holds(
    "memory-by-step",
    "policy_loss",
    "correction",
    inputs=ordinary,
    remedy="report what is to be remembered as a metric, and take it up in advance(metrics), which rlsdk calls once "
    "per optimiser step with the means over all micro-batches and ranks",
    after=(*FIXED, "memory"),
    only=lambda component: inspect.isclass(component.obj),
)
def memory_by_step(subject: Subject, x: LossInputs) -> None:
    """An optimiser step leaves the same memory however its batch is split, and calls alone do not advance it."""
    whole = _memory_after(subject, [x])
    split = _memory_after(subject, [part for _, part in _split(subject, x)])
    if not _alike(split, whole):
        raise Violated("value", f"the state {whole!r}, as unsplit, after two micro-batches", repr(split))


def _memory_after(subject: Subject, micro_batches: Sequence[LossInputs]) -> Any:
    """The state after one optimiser step; None for a stateless component."""
    try:
        memory = Memory.of(subject.make())
        if memory is None:
            return None
        for part in micro_batches:
            subject.call(memory.call, part)
        memory.advance(lambda mine: [mine])
        return memory.state()
    except LearnerError as error:
        raise Violated("value", "one memory for all micro-batches of a step", str(error)) from error


def _alike(one: Any, other: Any) -> bool:
    """Return True if two states are equal up to rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6)
    return bool(one == other)


@holds(
    "gradient-only-through-logprobs",
    "policy_loss",
    "kl",
    inputs=lambda subject: [
        *(inputs.ordinary_losses() if subject.component.kind == "kl" else inputs.on_policy_losses()),
        *inputs.empty_losses(),
    ],
    remedy="compute the loss from x.logprobs itself, without detach(), no_grad, item() or numpy in between; x.entropy "
    "carries a gradient too, where needs=('entropy',) declares it",
    after=(*FORM, "finite-when-all-invalid"),
)
def gradient_through_logprobs(subject: Subject, x: LossInputs) -> None:
    """The gradient flows through `logprobs` (and a declared `entropy`) alone, and there is always a graph."""
    found = results(subject, x)
    if found.gradient is None:
        raise Violated(
            "form", "a result that carries a gradient (even where nothing is trained)", "one without a graph"
        )
    if found.strangers:
        raise Violated("form", "a gradient that ends at x.logprobs", "a graph that ends at tensors of its own as well")
    # Later a clip may silence every token; and the entropy's part may be all that a loss consists of.
    learns = subject.component.kind == "kl" or torch.equal(x.logprobs, x.old_logprobs)
    if learns and bool(x.loss_mask.any()) and not bool(found.gradient.any()) and not hasattr(x, "entropy"):
        raise Violated("value", "a gradient by the logprobs other than zero", numbers(found.gradient))


@holds(
    "detached",
    "correction",
    inputs=ordinary,
    remedy="return weights.detach(): a correction weights the gradient and has no gradient itself",
    after=FORM,
)
def detached(subject: Subject, x: LossInputs) -> None:
    """Its weights carry no gradient, and are not below zero."""
    found = results(subject, x)
    if found.gradient is not None:
        raise Violated("form", "weights without a graph", "weights that carry a gradient")
    if bool((found.values["values"] < 0).any()):
        raise Violated("value", "weights of 0 or more", numbers(found.values["values"]))


@holds(
    "metrics",
    "policy_loss",
    "correction",
    inputs=ordinary,
    remedy="return {name: number} with .detach() on what has a graph; a metric per token is averaged by rlsdk",
    after=FORM,
)
def metrics(subject: Subject, x: LossInputs) -> None:
    """Each metric is a finite number, or one for each token, without a gradient."""
    for name, value in results(subject, x).metrics.items():
        if not isinstance(name, str):
            raise Violated("form", "names of metrics that are text", repr(name))
        if isinstance(value, Tensor) and value.requires_grad:
            raise Violated("form", f"metric {name!r} without a gradient", f"{shape(value)} that carries one")
        per_token = isinstance(value, Tensor) and value.dim() == 1 and len(value) == len(x.loss_mask)
        numeric = per_token or isinstance(value, bool | int | float) or (isinstance(value, Tensor) and not value.dim())
        if not numeric:
            raise Violated("form", f"metric {name!r} as a number, or a tensor [{len(x.loss_mask)}]", shape(value))
        counted = torch.as_tensor(value)[x.loss_mask] if per_token else torch.as_tensor(value)
        if not bool(counted.double().isfinite().all()):
            raise Violated("value", f"metric {name!r} finite", numbers(torch.as_tensor(value)))


@holds(
    "zero-where-equal",
    "kl",
    inputs=lambda _: inputs.on_policy_losses(),
    remedy="an estimate of KL(policy ‖ reference) is a function of logprobs - ref_logprobs that is 0 at 0",
    after=FORM,
)
def zero_where_equal(subject: Subject, x: LossInputs) -> None:
    """The distance of a policy from itself is zero."""
    values = results(subject, x).values["values"]
    if bool(values.abs().max() > 1e-6):
        raise Violated("value", "0 for each token", numbers(values))


@holds(
    "positive-on-average",
    "kl",
    remedy="estimate KL(policy ‖ reference), so log_ratio = logprobs - ref_logprobs; with the sign turned round, the "
    "penalty drives the policy away from the reference",
    after=(*FORM, "zero-where-equal"),
)
def positive_on_average(subject: Subject, _: Any) -> None:
    """Averaged over tokens that the policy samples, the distance from another policy is above zero."""
    policy, reference = torch.tensor([[0.7, 0.3]]), torch.tensor([[0.4, 0.6]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    now = policy.log()
    x = LossInputs.from_padded(now, now, torch.zeros(1, 2), mask, behaviour_logprobs=now, ref_logprobs=reference.log())
    average = float((policy[0] * results(subject, x).values["values"].detach()).sum())
    if not average > 0:
        where = "two tokens, of probabilities 0.7 and 0.3 by the policy, 0.4 and 0.6 by the reference"
        raise Violated("value", f"an average above 0 (the KL is 0.184) for {where}", f"{average:.3g}")


@holds(
    "follows-the-advantage",
    "policy_loss",
    inputs=lambda _: inputs.on_policy_losses(),
    remedy="a loss is minimised: return -x.advantages * …, and let one sign of the advantage raise a probability "
    "and the other lower it",
    after=(*FIXED, "gaps", "gradient-only-through-logprobs"),
)
def follows_the_advantage(subject: Subject, x: LossInputs) -> None:
    """Tokens become no less likely by an advantage of 1 than by one of -1, while the policy is as it was sampled."""
    if not bool(x.loss_mask.any()):
        raise NotApplicable("nothing is trained")
    up, down = (_push(subject, x, advantage) for advantage in (1.0, -1.0))
    if up > down + 1e-6:
        raise Violated(
            "value",
            "a gradient by the logprobs that is lower where the advantage is 1 than where it is -1",
            f"{up:.3g} for 1 and {down:.3g} for -1, summed over the trained tokens",
        )


def _push(subject: Subject, x: LossInputs, advantage: float) -> float:
    """The gradient of the loss by the logprobs, summed over trained tokens, if all advantages were alike."""
    found = results(subject, x.replace(advantages=torch.full_like(x.advantages, advantage))).gradient
    return 0.0 if found is None else float(found[x.loss_mask].sum())
