"""The fields of a batch: the producer of each, its axis, and the components that may read it.

`needs=` of a mark is checked against this table, without importing torch. `CreditInputs` and `LossInputs` have the
same fields, and derive from the table which of them are always set; a test keeps them in sync.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs

Inputs = Literal["credit", "loss"]
"""`CreditInputs` and `LossInputs`."""
Axis = Literal["token", "rollout", "batch", "clock", "context"]
"""A clock is one number for the whole batch that measures training progress; the context is all tokens of a rollout,
including its prompt, as read by a model."""
Access = Literal["always", "on request"]
Model = Literal["actor", "reference", "critic"]

MARK = "__rlsdk_field__"
"""Attribute of a function that declares a field."""

WHOLE_GROUPS = frozenset({"groups", "pairs"})
"""Fields by which a loss reads the group of each rollout: groups are then never split over micro-batches."""
READS: Mapping[str, Inputs] = {
    "shaping": "credit",
    "advantage": "credit",
    "policy_loss": "loss",
    "correction": "loss",
}
"""Kind of component -> the inputs it is called with; other kinds read no batch."""


@attrs.frozen(kw_only=True)
class Field:
    """One field of a batch.

    Attributes:
        name: Name in the inputs.
        axis: One value per token, per rollout, or for the whole batch, such as a clock. Only the learner's model reads
            fields of the context.
        producer: Part of the training step that computes the field.
        credit: Access of shapings and advantages; None if they cannot read it.
        loss: Access of policy losses and corrections; None if they cannot read it.
        model: Model whose gradient-free forward pass computes the field before the update; None for other producers.
        output: Name of the field among that model's outputs.
        by_update: True if the update recomputes the field with a gradient, so that losses do not get earlier values.
        needs: Fields that its own producer reads.
        produce: Plugin function that computes the field, `(batch: StepBatch, *, …) -> array [t]`; None for core fields.
        options: Values for keyword-only parameters of that function.
        sample: Minimum and maximum in the sample batches used to check components that read the field.
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
    options: Mapping[str, Any] = attrs.field(factory=dict, eq=False)
    sample: tuple[float, float] = (-1.0, 1.0)


def _field(name: str, axis: Axis, producer: str, **access: Access) -> Field:
    return Field(name=name, axis=axis, producer=producer, **access)  # type: ignore[arg-type]


def _learned(name: str, model: Model, output: str = "", *, by_update: bool = False, **access: Access) -> Field:
    """Return a per-token field that a model of the learner computes before the update."""
    passed = {"model": model, "output": output or name, "by_update": by_update}
    return Field(name=name, axis="token", producer="learner", **passed, **access)  # type: ignore[arg-type]


FIELDS: tuple[Field, ...] = (
    _field("rewards", "rollout", "reward", credit="always"),
    _field("token_rewards", "token", "reward", credit="always"),
    _field("reward_parts", "rollout", "reward", credit="on request"),
    _field("reward_weights", "batch", "reward", credit="on request"),
    _field("baseline_rewards", "rollout", "reward", credit="on request"),
    _field("groups", "rollout", "trainer", credit="always", loss="on request"),
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

HELPERS = frozenset(
    {
        *("ALWAYS", "CLOCK", "clock", "detach", "edits", "extra", "from_padded", "generator", "group_mean"),
        *("group_size", "group_std", "group_sum", "only", "outcomes", "per_token", "replace", "rollout_mean"),
        *("rollout_sum", "rollouts", "rows"),
        *("sampled_tokens", "sequence_mean", "sequence_sum", "shaped", "to", "to_padded", "whole", "width"),
        "with_extra",
    }
)
"""Other public attributes of the inputs, which a field must not hide."""

FORWARD: Mapping[str, Field] = {field.name: field for field in FIELDS if field.model is not None}
"""Fields computed by the learner's gradient-free forward passes."""
UPDATE_FIELDS: tuple[str, ...] = tuple(n for n, field in FORWARD.items() if field.loss and not field.by_update)
"""Fields of `FORWARD` whose pre-update values a loss may read."""


def names(inputs: Inputs, *, access: Access | None = None, axis: Axis | None = None) -> tuple[str, ...]:
    """Return the field names of `inputs`, in table order.

    Args:
        inputs: `credit` or `loss`.
        access: Only fields with this access; None for all.
        axis: Only fields of this axis; None for all.
    """
    return tuple(
        field.name
        for field in FIELDS
        if (given := getattr(field, inputs)) is not None and access in (None, given) and axis in (None, field.axis)
    )


def readers(name: str) -> tuple[str, ...]:
    """Return the kinds of components that may read a field; empty for an unknown name."""
    held = [field for field in FIELDS if field.name == name]
    inputs = {"credit": any(field.credit for field in held), "loss": any(field.loss for field in held)}
    return tuple(kind for kind, read in READS.items() if inputs[read])


def declared_by(value: Any) -> Field | None:
    """Return the field that a plugin function declares with `rlsdk.field`; None for anything else."""
    found = getattr(value, "__dict__", {}).get(MARK)
    return found if isinstance(found, Field) else None
