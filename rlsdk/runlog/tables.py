"""The database tables of rollouts and their rows: columns for queries, and the whole group as bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import sqlalchemy as sa

from rlsdk.runlog.serialization import Learned, encode, prompt_text, to_text
from rlsdk.types import Group, Rollout, Score

METADATA = sa.MetaData()
GROUPS = sa.Table(
    "rlsdk_groups",
    METADATA,
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("run", sa.Text, primary_key=True),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("task", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("step", sa.BigInteger),
    sa.Column("uses", sa.BigInteger, nullable=False),
    sa.Column("kept_at", sa.BigInteger),
    sa.Column("newest", sa.BigInteger, nullable=False),
    sa.Column("payload", sa.LargeBinary, nullable=False),
    sa.Index("rlsdk_groups_step", "step", "number"),
    sa.Index("rlsdk_groups_task", "task", "number"),
    sa.Index("rlsdk_groups_source", "source", "number"),
    sa.Index("rlsdk_groups_state", "state", "number"),
)
"""One row per group. `kept_at`: step of the last checkpoint that needs it; `newest`: its newest policy version. Groups
of evaluations have negative numbers, see `evaluated_entries`."""
_EVALUATIONS = sa.text("(+number) < 0")  # exactly as in the viewer, or SQLite would not use the index
_EVALUATIONS_ALONE: dict[str, Any] = {"sqlite_where": _EVALUATIONS, "postgresql_where": _EVALUATIONS}
ROLLOUTS = sa.Table(
    "rlsdk_rollouts",
    METADATA,
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("run", sa.Text, primary_key=True),
    sa.Column("rollout", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("reward", sa.Double),
    sa.Column("valid", sa.Boolean, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("parts", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("length", sa.BigInteger, nullable=False),
    sa.Column("least_version", sa.BigInteger),
    sa.Column("greatest_version", sa.BigInteger),
    sa.Column("trajectory", sa.Text, nullable=False),
    sa.Column("prompt", sa.Text, nullable=False),
    sa.Column("response", sa.Text, nullable=False),
    sa.Index("rlsdk_rollouts_reward", "reward", "number", "rollout"),
    sa.Index("rlsdk_rollouts_status", "status", "number", "rollout"),
    sa.Index("rlsdk_rollouts_tokens", "tokens", "number", "rollout"),
    # Covers the viewer's filters, so that it can scan a million rollouts without reading their texts.
    sa.Index("rlsdk_rollouts_scan", "number", "rollout", "reward", "status", "tokens"),
    # Evaluations in these orders: in the indices above, many training rollouts lie between them.
    sa.Index("rlsdk_rollouts_evaluated_reward", "reward", "number", "rollout", **_EVALUATIONS_ALONE),
    sa.Index("rlsdk_rollouts_evaluated_tokens", "tokens", "number", "rollout", **_EVALUATIONS_ALONE),
)
"""One row per rollout."""
EVALUATED: tuple[str, ...] = ("eval greedy", "eval sampled")
"""States of the groups of an evaluation."""
_EVALUATION = 2**22
"""Number of ids reserved for the groups of one evaluation."""
_LAST_STEP = 2**40 - 1
"""Last step whose evaluation numbers fit into a database."""
_OF_GROUP = ("step", "source", "task", "number", "state", "uses")
COLUMNS = (*_OF_GROUP, *(c.name for c in ROLLOUTS.columns if c.name not in ("run", "number")))
"""Columns of a query's result."""
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
"""Characters that databases reject in text; the group stored as bytes keeps them."""


@attrs.frozen(kw_only=True, eq=False)
class Entry:
    """A stored group.

    Attributes:
        number: Number of its task record.
        source: Name of its task source; the column of that name holds the source of the task itself, if it has one.
        state: Status of the group.
        step: Step in which it was trained or dropped; None while it waits.
        uses: Number of times it was trained.
        kept_at: Step of the checkpoint that restores it; None if none does.
        group: The group.
        learned: The learner's results for it; see `serialization.encode`.
    """

    number: int
    source: str
    state: str
    step: int | None
    uses: int
    group: Group
    kept_at: int | None = None
    learned: Learned = attrs.field(factory=dict)


def evaluated_entries(step: int, batches: Mapping[str, Sequence[Group]]) -> list[Entry]:
    """Return the entries of an evaluation's groups, by state; their numbers are negative and decrease with the step."""
    groups = [(state, group) for state in EVALUATED for group in batches.get(state, ())]
    first = -(step + 1) * _EVALUATION
    return [
        Entry(number=first + i, source=group.task.source, state=state, step=step, uses=0, group=group)
        for i, (state, group) in enumerate(groups)
    ]


def evaluated_numbers(step_from: int | None, step_to: int | None) -> range:
    """Return the numbers of evaluation groups in a range of steps; a bound of None is open."""
    first = min(max(step_from or 0, 0), _LAST_STEP)
    last = _LAST_STEP if step_to is None else min(step_to, _LAST_STEP)
    return range(-(last + 1) * _EVALUATION, -first * _EVALUATION)


def create_indices(connection: sa.Connection) -> list[str]:
    """Create indices missing from a database of an earlier rlsdk, and return their names."""
    there = {index["name"] for table in (GROUPS, ROLLOUTS) for index in sa.inspect(connection).get_indexes(table.name)}
    lacking = [index for table in (GROUPS, ROLLOUTS) for index in table.indexes if index.name not in there]
    for index in lacking:
        index.create(connection, checkfirst=True)
    return sorted(str(index.name) for index in lacking)


def group_row(run: str, entry: Entry) -> dict[str, Any]:
    """Return the row of a group in `GROUPS`."""
    return {
        "run": run,
        "number": entry.number,
        "source": _text(entry.group.task.source or entry.source),
        "task": _text(entry.group.task.id),
        "state": entry.state,
        "step": entry.step,
        "uses": entry.uses,
        "kept_at": entry.kept_at,
        "newest": max((int(r.policy_versions.max(initial=-1)) for r in entry.group.rollouts), default=-1),
        "payload": encode(entry.group, entry.learned),
    }


def rollout_rows(run: str, entry: Entry) -> list[dict[str, Any]]:
    """Return the rows of a group's rollouts in `ROLLOUTS`."""
    pairs: Sequence[tuple[Rollout, Score]] = tuple(zip(entry.group.rollouts, entry.group.scores, strict=True))
    return [
        {"run": run, "number": entry.number, "rollout": i, **_row(rollout, score)}
        for i, (rollout, score) in enumerate(pairs)
    ]


def _row(rollout: Rollout, score: Score) -> dict[str, Any]:
    least, greatest = version_range(rollout)
    parts = {k: float(v) if math.isfinite(v) else None for k, v in score.metrics.items()}
    return {
        "reward": score.value if score.valid else None,
        "valid": score.valid,
        "reason": _text(score.reason),
        "parts": _text(to_text(parts)),
        "status": rollout.status,
        "tokens": int(rollout.loss_mask.sum()),
        "length": len(rollout.token_ids),
        "least_version": least,
        "greatest_version": greatest,
        "trajectory": _text(rollout.trajectory),
        "prompt": _text(prompt_text(rollout.task)),
        "response": _text(rollout.response),
    }


def version_range(rollout: Rollout) -> tuple[int | None, int | None]:
    """Return the oldest and the newest policy version that sampled a token; None if none was sampled."""
    sampled = rollout.policy_versions[rollout.policy_versions >= 0]
    return (int(sampled.min()), int(sampled.max())) if len(sampled) else (None, None)


def _text(text: str) -> str:
    return _UNSTORABLE.sub("\ufffd", text)
