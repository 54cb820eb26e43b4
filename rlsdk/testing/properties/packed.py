"""Properties of components that read packed batches: advantages, shaping, losses, corrections, KL estimators."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from rlsdk.batch import CreditInputs, LossInputs
from rlsdk.batch.arithmetic import pad
from rlsdk.errors import RlsdkError
from rlsdk.fields import FORWARD
from rlsdk.isolation.threads import run_to_end
from rlsdk.learners.metrics import Memory
from rlsdk.rollout.step_batch import StepBatch, pack, produce
from rlsdk.testing import inputs, samples
from rlsdk.testing.evaluate import LOOSE, check_finite, check_same, invoke, results
from rlsdk.testing.findings import Case, NotApplicable, Violated, numbers, time_limit
from rlsdk.testing.inputs import copied, lengths_of, places, select, to_dtype
from rlsdk.testing.subject import CREDIT, ON_BATCHES, WITH_NEEDS, Inputs, Subject, holds, undeclared
from rlsdk.types import Group, Score

SECONDS = 60.0
"""Time limit in seconds for the fields of one batch; training computes them once per step."""


def _batch(subject: Subject, responses: Sequence[str], groups: int) -> StepBatch:
    """Pack groups of equal responses; the learner's fields are those that a producer declares, in multiples of 1/8."""
    task = (*subject.tasks, *samples.TASKS)[0]
    rollouts = [samples.rollout(task, response) for response in responses]
    packed = pack([Group(task, rollouts, [Score(i / 2) for i in range(len(rollouts))])] * groups)
    assert packed is not None
    needed = sorted({name for field in subject.component.fields for name in field.needs if name in FORWARD})
    draws = np.random.default_rng(0).integers(-24, 0, (len(needed), len(packed.arrays.loss_mask)))
    return packed.with_fields(**{name: (draw / 8).astype(np.float32) for name, draw in zip(needed, draws, strict=True)})


def _batches(subject: Subject) -> Iterator[Case[StepBatch]]:
    yield Case("two groups of four rollouts", _batch(subject, samples.RESPONSES, 2))
    yield Case("one rollout of one token", _batch(subject, "4", 1))


@holds(
    "fields-produced",
    *WITH_NEEDS,
    inputs=_batches,
    remedy="return one finite number per response token, in the order of batch.rollouts; name what the function reads "
    "of the learner, @rlsdk.field(…, needs=(…,)); if it reads more of a task, give one: --task '{\"prompt\": …}'",
    makes=False,
    trims=False,
    only=lambda component: bool(component.fields),
)
def fields_produced(subject: Subject, batch: StepBatch) -> None:
    """The functions of its own fields return one finite number per response token."""
    with time_limit(SECONDS):
        try:
            run_to_end(produce(batch, subject.component.fields, in_thread=False))
        except RlsdkError as error:
            if isinstance(error.__cause__, OSError):
                raise NotApplicable(f"it cannot be called here: {error}") from error
            raise Violated("raised", f"{len(batch.arrays.loss_mask)} finite numbers", str(error)) from error


Batch = CreditInputs | LossInputs
FORM = ("shapes",)
FIXED = ("shapes", "deterministic")
"""Conditions that must hold before two results are compared."""


def _either(credit: Callable[[], Iterable[Case[Any]]], loss: Callable[[], Iterable[Case[Any]]]) -> Inputs:
    return lambda subject: credit() if subject.component.kind in CREDIT else loss()


ordinary = _either(inputs.ordinary_credit, inputs.ordinary_losses)


@holds(
    "needs-declared",
    *WITH_NEEDS,
    inputs=ordinary,
    remedy="name the field in the mark, needs=(…,): only declared fields are computed",
    trims=False,
)
def needs_declared(subject: Subject, x: Batch) -> None:
    """It reads only basic fields and the optional fields declared in its mark."""
    try:
        invoke(subject, subject.make(), x.only(subject.component.needs))
    except Violated as error:
        if message := undeclared(error):
            raise Violated("form", f"reads of {list(subject.component.needs)} at most", message) from error


def reads_undeclared(subject: Subject) -> bool:
    """Return True if the component reads an optional field that its mark does not declare."""
    try:
        for case in ordinary(subject):
            needs_declared.rule(subject, case.value if case else None)
    except Violated:
        return True
    return False


@holds(
    "shapes",
    *ON_BATCHES,
    inputs=ordinary,
    remedy="return a tensor with one float per rollout or token, as the kind requires, never a mean or sum over them",
)
def shapes(subject: Subject, x: Batch) -> None:
    """It returns one finite number per token (or per rollout, if its kind allows that)."""
    check_finite(results(subject, x), x)


@holds(
    "deterministic",
    *ON_BATCHES,
    inputs=ordinary,
    remedy="draw no random numbers, or draw them from x.generator, which is the same wherever a batch is split",
    after=FORM,
)
def deterministic(subject: Subject, x: Batch) -> None:
    """The same batch gives the same numbers."""
    check_same(results(subject, x), results(subject, x), x, "as in the first call", tolerance=0.0)


@holds(
    "finite-on-singletons",
    *ON_BATCHES,
    inputs=_either(inputs.singleton_credit, inputs.singleton_losses),
    remedy="a group may be left with one member: its standard deviation is 0, and there are no others to compare with",
    after=FORM,
)
def finite_on_singletons(subject: Subject, x: Batch) -> None:
    """Groups of one rollout, and rollouts of one token, give finite results."""
    check_finite(results(subject, x), x)


@holds(
    "finite-on-equal-rewards",
    *ON_BATCHES,
    inputs=_either(inputs.equal_credit, inputs.equal_losses),
    remedy="add a small number to a standard deviation before dividing by it, or use torch.where(spread > 0, …)",
    after=FORM,
)
def finite_on_equal_rewards(subject: Subject, x: Batch) -> None:
    """Equal rewards, and the zero advantages that result from them, give finite results."""
    check_finite(results(subject, x), x)


@holds(
    "finite-when-all-invalid",
    *ON_BATCHES,
    inputs=_either(inputs.empty_credit, inputs.empty_losses),
    remedy="clamp counts used as divisors (.clamp(min=1)); max, mean and std of empty tensors raise or are NaN",
    after=FORM,
)
def finite_when_all_invalid(subject: Subject, x: Batch) -> None:
    """If all rollouts are invalid, empty or untrained, it still returns finite (or no) numbers."""
    check_finite(results(subject, x), x)


@holds(
    "finite-on-extremes",
    *ON_BATCHES,
    inputs=_either(inputs.extreme_credit, inputs.extreme_losses),
    remedy="clamp a log-ratio before its exponential; subtract the mean before summing squares",
    after=FORM,
)
def finite_on_extremes(subject: Subject, x: Batch) -> None:
    """Large rewards, unlikely tokens and distant policies give finite results in float32."""
    check_finite(results(subject, x), x)


@holds(
    "permutation",
    *ON_BATCHES,
    inputs=ordinary,
    remedy="use x.groups or x.segments to tell rollouts apart, never their position in the batch",
    after=FIXED,
)
def permutation(subject: Subject, x: Batch) -> None:
    """The order of rollouts and the numbering of groups change nothing."""
    if isinstance(x, LossInputs):
        drawn = [results(subject, x.replace(generator=torch.Generator().manual_seed(seed))) for seed in range(4)]
        values = [torch.where(x.loss_mask, each.values["values"], 0) for each in drawn]
        if any(not torch.equal(each, values[0]) for each in values):
            raise NotApplicable("it draws random numbers, which hit other tokens if the order changes")
    count = len(lengths_of(x))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3)).tolist()
    tokens, moved = places(x, order), select(x, order)
    if isinstance(moved, CreditInputs) and count:
        moved = moved.replace(groups=moved.groups.max() - moved.groups)
    weights = torch.linspace(0.5, 2, len(x.loss_mask))
    wanted = results(subject, x, weights=weights).map(lambda v: _moved(v, order, tokens))
    found = results(subject, moved, weights=weights[tokens])
    check_same(found, wanted, moved, f"as in the original order (now {order})")


def _moved(values: Tensor, order: list[int], tokens: Tensor) -> Tensor:
    return values[order] if len(values) == len(order) != len(tokens) else values[tokens]


@holds(
    "packing",
    *WITH_NEEDS,
    inputs=ordinary,
    remedy="sum along x.segments or x.lengths (x.sequence_sum, x.sequence_mean); a mean over to_padded counts padding",
    after=FIXED,
)
def packing(subject: Subject, x: Batch) -> None:
    """A batch from `from_padded`, with extra padding, gives the same results as the packed one."""
    check_same(results(subject, _padded(x)), results(subject, x), x, "as when packed without padding")


def _padded(x: Batch) -> Batch:
    """Return the batch padded to three tokens more than its longest rollout, and packed again."""
    lengths = lengths_of(x)
    width = int(lengths.max()) + 3
    extra = x.extra
    tensors = {name: value for name, value in vars(x).items() if isinstance(value, Tensor) and name not in extra}
    required = {field.name for field in attrs.fields(type(x)) if not field.kw_only}
    optional: dict[str, Any] = {
        name: pad(value, lengths, width) if len(value) == len(x.loss_mask) else value
        for name, value in tensors.items()
        if name not in required
    }
    mask = pad(x.loss_mask, lengths, width)
    if isinstance(x, CreditInputs):
        parts = {name: vars(x)[name] for name in ("reward_parts", "reward_weights") if hasattr(x, name)}
        credit = CreditInputs.from_padded(x.rewards, mask, x.groups, lengths=lengths, **optional, **parts, **x.clock)
        return credit.with_extra(**extra)
    logprobs, old, advantages = (pad(v, lengths, width) for v in (x.logprobs, x.old_logprobs, x.advantages))
    loss = LossInputs.from_padded(logprobs, old, advantages, mask, lengths=lengths, **optional, **x.clock)
    return loss.with_extra(**extra)


@holds(
    "gaps",
    *WITH_NEEDS,
    inputs=lambda subject: [case for case in ordinary(subject) if case and not bool(case.value.loss_mask.all())],
    remedy="mask before summing: x.sequence_sum and x.sequence_mean do, torch.where(x.loss_mask, …, 0) does",
    after=FIXED,
)
def gaps(subject: Subject, x: Batch) -> None:
    """Values at tokens with a false loss_mask (tool results, observations) change nothing."""
    soiled = inputs.soiled(x)
    check_same(
        results(subject, soiled), results(subject, x), x, "as with different numbers at tokens where loss_mask is 0"
    )


@holds(
    "bf16-and-fp32",
    *ON_BATCHES,
    inputs=ordinary,
    remedy="convert to float32 before arithmetic, values.float(); create tensors by values.new_zeros or zeros_like",
    after=FIXED,
)
def precision(subject: Subject, x: Batch) -> None:
    """In bfloat16, it gives the same results as in float32, up to rounding."""
    full = results(subject, x)
    for name, value in full.values.items():
        if torch.finfo(value.dtype).bits < 32:
            raise Violated("form", f"{name} in float32, as the input", numbers(value))
    half = results(subject, to_dtype(x, torch.bfloat16))
    values_only = type(full)(full.values)  # a token at a clipping boundary may fall on either side
    check_same(half, values_only, x, "as in float32, for the same numbers in bfloat16", tolerance=LOOSE)
    check_finite(half, x)


@holds(
    "inputs-unchanged",
    *ON_BATCHES,
    inputs=ordinary,
    remedy="other code reads the same tensors: do not use methods that end in '_', +=, or x.field[…] = … on them",
    after=FORM,
)
def inputs_unchanged(subject: Subject, x: Batch) -> None:
    """It does not change its inputs in place."""
    held = copied(x)
    invoke(subject, subject.make(), held)
    for name, before in vars(x).items():
        after = vars(held).get(name)
        if isinstance(before, Tensor) and isinstance(after, Tensor) and not torch.equal(before, after):
            raise Violated("value", f"{name} {numbers(before)} afterwards, too", numbers(after))


@holds(
    "memory",
    *WITH_NEEDS,
    inputs=ordinary,
    remedy="give the class state(), which returns its whole state as plain JSON, and restore(state)",
    after=FIXED,
    only=lambda component: inspect.isclass(component.obj),
)
def memory(subject: Subject, x: Batch) -> None:
    """`state()` returns all state kept between batches as plain JSON, and `restore` restores it."""
    made: Any = subject.make()
    first = results(subject, x, made=made)
    if not (hasattr(made, "state") and hasattr(made, "restore")):
        check_same(results(subject, x, made=made), first, x, "as in the first call: it has no state() and restore()")
        return
    if callable(getattr(made, "advance", None)):
        remembered = Memory(made)
        subject.call(remembered.call, x)
        subject.call(remembered.advance, lambda mine: [mine])
    resumed: Any = subject.make()
    state = subject.restore(made, resumed)
    wanted = results(subject, x, made=made)
    check_same(results(subject, x, made=resumed), wanted, x, f"as without a stop, after restore({state!r})")
