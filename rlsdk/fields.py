"""The fields of a batch: who computes each, along which axis, and which components may read it.

`needs=` of a mark is checked against this table, without importing torch. `CreditInputs` and `LossInputs` hold the
same fields, and derive from it which of them are always there; a test keeps both equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs

Inputs = Literal["credit", "loss"]
"""`CreditInputs` and `LossInputs`."""
Axis = Literal["token", "rollout", "batch", "clock", "context"]
"""A clock is one number for the whole batch that says how far the training is; the context is all tokens of a rollout,
its prompt among them, as a model reads them."""
Access = Literal["always", "on request"]
Model = Literal["actor", "reference", "critic"]

MARK = "__rlsdk_field__"
"""Attribute of a function that declares a field."""

READS: Mapping[str, Inputs] = {
    "shaping": "credit",
    "advantage": "credit",
    "policy_loss": "loss",
    "correction": "loss",
}
"""Kind of component -> the inputs that it is called with; the others read no batch."""


@attrs.frozen(kw_only=True)
class Field:
    """One field of a batch.

    Attributes:
        name: Name in the inputs.
        axis: One value per token, per rollout, or one for the whole batch, such as a clock. Fields of the context are
            read by the learner's model alone.
        producer: The part of a training step that computes it.
        credit: Access of shapings and advantages; None if they cannot read it.
        loss: Access of policy losses and corrections; None if they cannot read it.
        model: Model whose gradient-free forward pass computes it before the update; None for other producers.
        output: Name of the field among the outputs of that model.
        by_update: True if the update recomputes it with a gradient, so that losses do not get the earlier values.
        needs: Fields that its own producer reads.
        produce: Function of a plugin that computes it, `(batch: StepBatch) -> array [t]`; None for a field of the core.
        sample: Least and greatest value in the batches on which components that read it are checked.
    """

    name: str
    axis: Axis
    producer: Literal["rollout", "reward", "learner", "advantage", "trainer", "plugin"]
    credit: Access | None = None
    loss: Access | None = None
    model: Model | None = None
    output: str = ""
    by_update: bool = False
    needs: tuple[str, ...] = ()
    produce: Callable[[Any], Any] | None = None
    sample: tuple[float, float] = (-1.0, 1.0)


def _field(name: str, axis: Axis, producer: str, **access: Access) -> Field:
    return Field(name=name, axis=axis, producer=producer, **access)  # type: ignore[arg-type]


def _learned(name: str, model: Model, output: str = "", *, by_update: bool = False, **access: Access) -> Field:
    """A field per token that a model of the learner computes before the update."""
    passed = {"model": model, "output": output or name, "by_update": by_update}
    return Field(name=name, axis="token", producer="learner", **passed, **access)  # type: ignore[arg-type]


FIELDS: tuple[Field, ...] = (
    _field("rewards", "rollout", "reward", credit="always"),
    _field("token_rewards", "token", "reward", credit="always"),
    _field("reward_parts", "rollout", "reward", credit="on request"),
    _field("baseline_rewards", "rollout", "reward", credit="on request"),
    _field("groups", "rollout", "trainer", credit="always"),
    _field("sources", "rollout", "trainer", credit="on request"),
    _field("pairs", "rollout", "trainer", loss="on request"),
    _field("preferred", "rollout", "trainer", loss="on request"),
    _field("expert", "rollout", "trainer", loss="on request"),
    _field("lengths", "rollout", "rollout", credit="always"),
    _field("trajectories", "rollout", "rollout", credit="on request"),
    _field("steps", "rollout", "rollout", credit="on request"),
    _field("states", "rollout", "rollout", credit="on request"),
    _field("shared_scores", "rollout", "reward", credit="always"),
    _field("loss_mask", "token", "rollout", credit="always", loss="always"),
    _field("segments", "token", "rollout", loss="always"),
    _field("behaviour_logprobs", "token", "rollout", loss="always"),
    _field("routed_experts", "context", "rollout"),
    _learned("logprobs", "actor", by_update=True, credit="on request", loss="always"),
    _field("old_logprobs", "token", "learner", loss="always"),
    _learned("entropy", "actor", by_update=True, credit="on request", loss="on request"),
    _learned("probs_squared_sum", "actor", credit="on request"),
    _learned("ref_logprobs", "reference", "logprobs", credit="on request", loss="on request"),
    _learned("values", "critic", credit="on request", loss="on request"),
    _field("advantages", "token", "advantage", loss="always"),
    _field("offset", "batch", "trainer", loss="always"),
    _field("aggregate", "batch", "trainer", loss="always"),
    _field("step", "clock", "trainer", loss="always"),
    _field("of_steps", "clock", "trainer", loss="always"),
    _field("update", "clock", "trainer", loss="always"),
    _field("train_step", "clock", "trainer", credit="always", loss="always"),
    _field("train_steps", "clock", "trainer", credit="always", loss="always"),
)

FORWARD: Mapping[str, Field] = {field.name: field for field in FIELDS if field.model is not None}
"""Fields computed by the learner's gradient-free forward passes."""
UPDATE_FIELDS: tuple[str, ...] = tuple(n for n, field in FORWARD.items() if field.loss and not field.by_update)
"""Fields of `FORWARD` whose values from before the update a loss may read."""


def names(inputs: Inputs, *, access: Access | None = None, axis: Axis | None = None) -> tuple[str, ...]:
    """Names of the fields that `inputs` have, in the order of the table.

    Args:
        inputs: `credit` or `loss`.
        access: Only fields that components get in this way; None for all.
        axis: Only fields of this axis; None for all.
    """
    return tuple(
        field.name
        for field in FIELDS
        if (given := getattr(field, inputs)) is not None and access in (None, given) and axis in (None, field.axis)
    )


def readers(name: str) -> tuple[str, ...]:
    """The kinds of components that may read a field; none for an unknown name."""
    held = [field for field in FIELDS if field.name == name]
    inputs = {"credit": any(field.credit for field in held), "loss": any(field.loss for field in held)}
    return tuple(kind for kind, read in READS.items() if inputs[read])


def declared_by(value: Any) -> Field | None:
    """Return the field that a plugin's function declares by `rlsdk.field`; None for anything else."""
    found = getattr(value, "__dict__", {}).get(MARK)
    return found if isinstance(found, Field) else None
