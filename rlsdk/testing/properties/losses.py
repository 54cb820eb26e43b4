"""Properties of per-token computations: policy losses, corrections, KL estimators."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlsdk.batch import LossInputs
from rlsdk.batch.arithmetic import size
from rlsdk.errors import LearnerError
from rlsdk.fields import WHOLE_GROUPS
from rlsdk.learners.metrics import Memory
from rlsdk.testing import inputs
from rlsdk.testing.evaluate import Results, check_same, results
from rlsdk.testing.findings import NotApplicable, Violated, numbers, shape
from rlsdk.testing.inputs import places, select, units
from rlsdk.testing.properties.packed import FIXED, FORM, ordinary
from rlsdk.testing.subject import LOSSES, Subject, holds


@holds(
    "micro-batches",
    *LOSSES,
    inputs=ordinary,
    remedy="let a token's value depend only on its own rollout, and divide by no counts, which rlsdk does; a loss that "
    "compares the rollouts of a group must declare needs=('groups',), and one that needs the whole batch "
    "whole_batch=True, and read x.whole, where its tokens begin at x.offset",
    after=FIXED,
)
def micro_batches(subject: Subject, x: LossInputs) -> None:
    """Splitting the batch (not within groups that it reads) changes no token's value and no gradient."""
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
    """Return two micro-batches with their rollouts: the first unit of the batch, and the rest."""
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
    remedy="report the quantity to remember as a metric, and update the state in advance(metrics), which rlsdk calls "
    "once per optimiser step with the means over all micro-batches and ranks",
    after=(*FIXED, "memory"),
    only=lambda component: inspect.isclass(component.obj),
)
def memory_by_step(subject: Subject, x: LossInputs) -> None:
    """An optimiser step changes its state equally however the batch is split, and mere calls do not change it."""
    whole = _memory_after(subject, [x])
    split = _memory_after(subject, [part for _, part in _split(subject, x)])
    if not _alike(split, whole):
        raise Violated("value", f"the state {whole!r}, as unsplit, after two micro-batches", repr(split))


def _memory_after(subject: Subject, micro_batches: Sequence[LossInputs]) -> Any:
    """Return the state after one optimiser step; None for a stateless component."""
    try:
        memory = Memory.of(subject.make())
        if memory is None:
            return None
        for part in micro_batches:
            subject.call(memory.call, part)
        memory.advance(lambda mine: [mine])
        return memory.state()
    except LearnerError as error:
        raise Violated("value", "one state for all micro-batches of a step", str(error)) from error


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
    "also carries a gradient if needs=('entropy',) declares it",
    after=(*FORM, "finite-when-all-invalid"),
)
def gradient_through_logprobs(subject: Subject, x: LossInputs) -> None:
    """The gradient flows only through `logprobs` (and a declared `entropy`), and there is always a graph."""
    found = results(subject, x)
    if found.gradient is None:
        raise Violated("form", "a result that carries a gradient (even if nothing is trained)", "one without a graph")
    if found.strangers:
        raise Violated("form", "a gradient that ends at x.logprobs", "a graph that ends at tensors of its own as well")
    # Later, clipping may silence all tokens; and a loss may consist only of its entropy part.
    learns = subject.component.kind == "kl" or torch.equal(x.logprobs, x.old_logprobs)
    if learns and bool(x.loss_mask.any()) and not bool(found.gradient.any()) and not hasattr(x, "entropy"):
        raise Violated("value", "a non-zero gradient with respect to the logprobs", numbers(found.gradient))


@holds(
    "detached",
    "correction",
    inputs=ordinary,
    remedy="return weights.clamp(min=0).detach(): a correction scales the gradient of a token; it has none itself, and "
    "a negative weight would turn it around",
    after=FORM,
)
def detached(subject: Subject, x: LossInputs) -> None:
    """Its weights carry no gradient and are not negative."""
    found = results(subject, x)
    if found.gradient is not None:
        raise Violated("form", "weights without a graph", "weights that carry a gradient")
    if bool((found.values["values"] < 0).any()):
        raise Violated("value", "weights of 0 or more", numbers(found.values["values"]))


def _metric_lengths(x: LossInputs) -> list[int]:
    lengths = [len(x.loss_mask), x.rollouts]
    lengths += [size(getattr(x, name)) for name in WHOLE_GROUPS if hasattr(x, name)]
    if hasattr(x, "expert"):
        by_expert = x.expert[x.segments]
        lengths += [int((x.loss_mask & origin).sum()) for origin in (by_expert, ~by_expert)]
    return lengths


@holds(
    "metrics",
    "policy_loss",
    "correction",
    inputs=ordinary,
    remedy="return {name: number}, detached; rlsdk averages a metric with one value per token, rollout, group or pair, "
    "or per trained token of an expert or of the policy",
    after=FORM,
)
def metrics(subject: Subject, x: LossInputs) -> None:
    """Each metric is a finite number, or one per token, rollout, group, pair or token of one origin; no gradient."""
    lengths = _metric_lengths(x)
    for name, value in results(subject, x).metrics.items():
        if not isinstance(name, str):
            raise Violated("form", "metric names that are text", repr(name))
        if isinstance(value, Tensor) and value.requires_grad:
            raise Violated("form", f"metric {name!r} without a gradient", f"{shape(value)} that carries one")
        per_token = isinstance(value, Tensor) and value.shape == x.loss_mask.shape
        plain = isinstance(value, bool | int | float) or (isinstance(value, Tensor) and not value.dim())
        if not plain and not (isinstance(value, Tensor) and value.dim() == 1 and len(value) in lengths):
            wanted = " or ".join(f"[{length}]" for length in dict.fromkeys(lengths))
            raise Violated("form", f"metric {name!r} as a number, or a tensor {wanted}", shape(value))
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
        raise Violated("value", "0 for every token", numbers(values))


@holds(
    "positive-on-average",
    "kl",
    remedy="estimate KL(policy ‖ reference), so log_ratio = logprobs - ref_logprobs; with the opposite sign, the "
    "penalty drives the policy away from the reference",
    after=(*FORM, "zero-where-equal"),
)
def positive_on_average(subject: Subject, _: Any) -> None:
    """Averaged over tokens sampled by the policy, the distance from another policy is positive."""
    policy, reference = torch.tensor([[0.7, 0.3]]), torch.tensor([[0.4, 0.6]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    now = policy.log()
    x = LossInputs.from_padded(now, now, torch.zeros(1, 2), mask, behaviour_logprobs=now, ref_logprobs=reference.log())
    average = float((policy[0] * results(subject, x).values["values"].detach()).sum())
    if not average > 0:
        where = "two tokens with probabilities 0.7 and 0.3 under the policy, 0.4 and 0.6 under the reference"
        raise Violated("value", f"an average above 0 (the KL is 0.184) for {where}", f"{average:.3g}")


@holds(
    "follows-the-advantage",
    "policy_loss",
    inputs=lambda _: inputs.on_policy_losses(),
    remedy="a loss is minimised: return -x.advantages * …, so that positive advantages raise a probability and "
    "negative ones lower it",
    after=(*FIXED, "gaps", "gradient-only-through-logprobs"),
)
def follows_the_advantage(subject: Subject, x: LossInputs) -> None:
    """With the policy unchanged since sampling, an advantage of 1 makes tokens no less likely than one of -1 does."""
    if not bool(x.loss_mask.any()):
        raise NotApplicable("nothing is trained")
    up, down = (_push(subject, x, advantage) for advantage in (1.0, -1.0))
    if up > down + 1e-6:
        raise Violated(
            "value",
            "a gradient with respect to the logprobs that is lower for advantage 1 than for advantage -1",
            f"{up:.3g} for 1 and {down:.3g} for -1, summed over the trained tokens",
        )


def _push(subject: Subject, x: LossInputs, advantage: float) -> float:
    """Return the loss gradient with respect to the logprobs, summed over trained tokens, for equal advantages."""
    found = results(subject, x.replace(advantages=torch.full_like(x.advantages, advantage))).gradient
    return 0.0 if found is None else float(found[x.loss_mask].sum())
