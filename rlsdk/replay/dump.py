"""A dumped batch in a common form for all trainers: a list of rollouts with the recorded per-token values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rlsdk.errors import ArgumentError, ConfigError, DataError
from rlsdk.replay.files import IGNORED, NAMES, Recognised
from rlsdk.types import is_reward

TOKEN_FIELDS = (
    "old_logprobs", "logprobs", "behaviour_logprobs", "ref_logprobs", "values", "advantages", "ratios", "losses",
    "gradient",
)  # fmt: skip
"""Fields with a value per response token."""
Rows = tuple[np.ndarray, ...]


@attrs.frozen(kw_only=True, eq=False)
class Dump:
    """A dumped batch.

    Attributes:
        framework: The trainer that wrote it.
        names: rlsdk's field -> its name in the file.
        prompts: Tokens before the first sampled one, without padding, int64; empty if unknown.
        responses: Tokens covered by the mask, int64; zeros if unknown.
        masks: True for response tokens sampled by the policy.
        tokens: Field -> values of each rollout's response, float64, including padding.
        scores: float64 `[n]`, reward of each rollout before any penalty; NaN if it is not a number. Zeros if
            `scored` is False.
        scored: True if rewards are recorded; without them, there must be advantages.
        rewards: float64 `[n]`, reward from which the trainer computed advantages, if recorded.
        groups: Label of each rollout's group.
        numbers: `loss` and `gradient_norm`, if recorded.
        width: Length of the longest response, including padding.
        has_ids: True if the tokens are known.
        notes: Remarks for the user.
    """

    framework: str
    names: Mapping[str, str]
    prompts: Rows
    responses: Rows
    masks: Rows
    tokens: Mapping[str, Rows]
    scores: np.ndarray
    scored: bool
    rewards: np.ndarray | None
    groups: tuple[str, ...]
    numbers: Mapping[str, float]
    width: int
    has_ids: bool
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.masks)


def dump_of(found: Recognised, *, rewards: Sequence[str] = (), group_size: int | None = None) -> Dump:
    """Convert the fields of a file to the common form.

    Args:
        found: Fields with known names.
        rewards: Columns whose sum is the reward, if it has several parts.
        group_size: Rollouts per group, if they are consecutive; None to use labels or prompts.

    Raises:
        DataError: Fields are missing or inconsistent; names the field, the rollout and the expected value.
    """
    reader = _FieldReader(found)
    masks = reader.masks()
    scores, shaped = reader.rewards(rewards, masks)
    prompts, responses = reader.ids(masks)
    values = {name: reader.per_token(name, masks) for name in TOKEN_FIELDS if name in found.values}
    for name, rows in values.items():
        _expect_finite(found.names[name], rows, masks)
    return Dump(
        framework=found.framework,
        names=found.names,
        prompts=prompts,
        responses=responses,
        masks=masks,
        tokens=values,
        scores=np.zeros(len(masks)) if scores is None else scores,
        scored=scores is not None,
        rewards=shaped,
        groups=reader.groups(prompts, group_size),
        numbers=reader.numbers(),
        width=reader.width,
        has_ids=reader.has_ids,
        notes=tuple(reader.notes),
    )


class _FieldReader:
    """Read the fields of one file."""

    def __init__(self, found: Recognised) -> None:
        self.found, self.notes = found, list[str]()
        self.width = 0
        self.has_ids = "response_ids" in found.values or "sequences" in found.values
        self.count = self._count()

    def _count(self) -> int:
        """Return the number of rollouts, and check that all fields with rows agree on it."""
        lengths = {
            self.found.names[name]: len(value)
            for name, value in self.found.values.items()
            if isinstance(value, list | np.ndarray) and np.ndim(value[:0] if isinstance(value, list) else value) > 0
        }
        for name in ("loss", "gradient_norm"):  # one value, or one per micro-batch
            lengths.pop(self.found.names.get(name, ""), None)
        if not lengths or not max(lengths.values()):
            known = ", ".join(sorted({n for each in NAMES.values() for names in each.values() for n in names}))
            given = ", ".join(sorted(self.found.others)) or "none"
            raise DataError(f"no field of a batch was found (fields: {given}); known names are {known}")
        counts = set(lengths.values())
        if len(counts) > 1:
            listed = ", ".join(f"{name} {count}" for name, count in sorted(lengths.items()))
            raise DataError(f"fields have different numbers of rollouts: {listed}; expected the same number in all")
        return counts.pop()

    def masks(self) -> Rows:
        """Return the mask of each response, without padding."""
        rows = self._rows("response_mask")
        if rows is None:
            rows = self._masks_without_field()
        self.width = max(map(len, rows), default=0)
        lengths = self._lengths(rows)
        masks = tuple(row[:length] > 0 for row, length in zip(rows, lengths, strict=True))
        tools = self._rows("tool_mask")
        if tools is not None:
            masks = tuple(m & (t[: len(m)] > 0) for m, t in zip(masks, tools, strict=True))
        if not any(mask.any() for mask in masks):
            name = self.found.names.get("response_mask", "the mask")
            raise DataError(f"{name} is 0 everywhere: no token of the batch would be trained")
        return masks

    def _masks_without_field(self) -> Rows:
        lengths = self.found.values.get("response_lengths")
        if lengths is not None:
            return tuple(np.ones(int(length)) for length in lengths)
        for name in ("old_logprobs", "logprobs", "response_ids"):
            if name in self.found.values and not isinstance(self.found.values[name], np.ndarray):  # not padded
                return tuple(np.ones(len(row)) for row in self._rows(name) or ())
        attention = self._attention()
        if attention is not None and "response_ids" in self.found.values:
            return attention
        if self.has_ids or any(name in self.found.values for name in ("old_logprobs", "logprobs")):
            raise DataError(
                "no mask of the responses was found; expected one of "
                f"{', '.join(sorted({n for names in NAMES['response_mask'].values() for n in names}))}"
            )
        self.notes.append("the file has no tokens: each rollout counts as one; only rewards and advantages are shown")
        return tuple(np.ones(1) for _ in range(self.count))

    def _attention(self) -> Rows | None:
        """Return the response part of the attention mask."""
        responses, attention = self._rows("response_ids"), self._rows("attention_mask")
        if responses is None or attention is None:
            return None
        return tuple(a[len(a) - len(r) :] for a, r in zip(attention, responses, strict=True))

    def _lengths(self, rows: Rows) -> list[int]:
        """Return the number of tokens of each response without padding, up to the last attended or sampled one."""
        given = self.found.values.get("response_lengths")
        if given is not None:
            return [int(length) for length in given]
        attention = self._attention()
        if attention is not None and all(len(a) == len(r) for a, r in zip(attention, rows, strict=True)):
            rows = tuple(np.maximum(a, r) for a, r in zip(attention, rows, strict=True))
        return [int(np.flatnonzero(row > 0)[-1]) + 1 if (row > 0).any() else 0 for row in rows]

    def ids(self, masks: Rows) -> tuple[Rows, Rows]:
        """Return the tokens of prompts and responses."""
        sequences, responses = self._rows("sequences"), self._rows("response_ids")
        if responses is None and sequences is not None:
            return self._split(sequences, masks)
        zeros = tuple(np.zeros(len(mask), np.int64) for mask in masks)
        if responses is None:
            return tuple(np.zeros(0, np.int64) for _ in masks), zeros
        prompts, attended = self._rows("prompt_ids"), self._rows("prompt_mask")
        if attended is None and prompts is not None and "attention_mask" in self.found.values:
            rows = self._rows("attention_mask") or ()
            attended = tuple(a[: len(p)] for a, p in zip(rows, prompts, strict=True))
        if prompts is not None and attended is not None:
            prompts = tuple(p[a > 0] for p, a in zip(prompts, attended, strict=True))
        known = prompts or tuple(np.zeros(0, np.int64) for _ in masks)
        cut = tuple(r[: len(mask)].astype(np.int64) for r, mask in zip(responses, masks, strict=True))
        leading = [r[: first_trained(mask)] for r, mask in zip(cut, masks, strict=True)]
        return tuple(np.concatenate([p.astype(np.int64), x]) for p, x in zip(known, leading, strict=True)), cut

    def _split(self, sequences: Rows, masks: Rows) -> tuple[Rows, Rows]:
        """Split whole sequences: the mask, whatever its width, covers their last tokens."""
        given = self._rows("response_mask") or masks
        attention = self._rows("attention_mask")
        prompts, responses = [], []
        for i, (row, width, mask) in enumerate(zip(sequences, map(len, given), masks, strict=True)):
            if width > len(row):
                raise DataError(f"rollout {i}: a mask of {width} values, but {len(row)} tokens")
            begin = len(row) - width
            before = row[: begin + first_trained(mask)]
            attended = before if attention is None else before[attention[i][: len(before)] > 0]
            prompts.append(attended.astype(np.int64))
            responses.append(row[begin : begin + len(mask)].astype(np.int64))
        return tuple(prompts), tuple(responses)

    def per_token(self, name: str, masks: Rows) -> Rows:
        """Return a field with one value per response token; a single value per rollout applies to all its tokens."""
        value, label = self.found.values[name], self.found.names[name]
        if all(np.ndim(each) == 0 for each in value):
            try:
                return tuple(np.full(len(m), float(v)) for m, v in zip(masks, value, strict=True))
            except (TypeError, ValueError) as error:
                raise DataError(f"{label}: {error}; expected one number per rollout or per token") from error
        rows = self._rows(name) or ()
        for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
            if len(row) < len(mask):
                raise DataError(f"{label}: rollout {i} has {len(row)} values; expected {len(mask)}, one per token")
        return tuple(row.astype(np.float64) for row in rows)

    def rewards(self, columns: Sequence[str], masks: Rows) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return each rollout's reward before penalties, and that of the advantages; None if not recorded."""
        if columns:
            return self._named_columns(columns), None
        scores, shaped = (self._totals(name, masks) for name in ("scores", "rewards"))
        if scores is None and shaped is None:
            scores = self._numeric_columns()
        if scores is None:
            scores, shaped = shaped, None
        if scores is None and "advantages" in self.found.values:
            self.notes.append(
                "no rewards were recorded: losses start from the recorded advantages, which are not checked"
            )
            return None, None
        assert scores is not None
        return np.where([is_reward(v) for v in scores], scores, np.nan), shaped

    def _totals(self, name: str, masks: Rows) -> np.ndarray | None:
        value = self.found.values.get(name)
        if value is None:
            return None
        label = self.found.names[name]
        try:
            return np.array(
                [
                    np.sum(np.asarray(v, np.float64)[: len(m)]) if np.ndim(v) else _float(v)
                    for v, m in zip(value, masks, strict=True)
                ]
            )
        except (TypeError, ValueError) as error:
            raise DataError(f"{label}: {error}; expected one number per rollout or per token") from error

    def _named_columns(self, columns: Sequence[str]) -> np.ndarray:
        every = {**self.found.others, **{self.found.names[k]: v for k, v in self.found.values.items()}}
        if unknown := [name for name in columns if name not in every]:
            raise ConfigError(
                [f"--reward: the file has no column {n!r}; it has {', '.join(sorted(every))}" for n in unknown]
            )
        return _summed([every[name] for name in columns])

    def _numeric_columns(self) -> np.ndarray | None:
        """Return the sum of numeric columns without another meaning: TRL names columns after reward functions.

        None if there are none, and none are needed.
        """
        parts = {
            name: value
            for name, value in self.found.others.items()
            if name not in IGNORED
            and isinstance(value, list)
            and len(value) == self.count
            and all(isinstance(v, int | float) or v is None for v in value)
        }
        if not parts and "advantages" in self.found.values:
            return None
        if not parts:
            raise DataError(
                f"no rewards were found (fields: {', '.join(sorted({*self.found.names.values(), *self.found.others}))}"
                "); name their columns with --reward"
            )
        self.notes.append(f"the reward is the sum of {', '.join(parts)}; use --reward for other columns")
        return _summed(list(parts.values()))

    def groups(self, prompts: Rows, size: int | None) -> tuple[str, ...]:
        """Return the label of each rollout's group."""
        if size is not None:
            if self.count % size:
                raise ArgumentError([f"--group-size: {self.count} rollouts are not a multiple of {size}"])
            return tuple(str(i // size) for i in range(self.count))
        labels = self.found.values.get("groups", self.found.values.get("prompts"))
        if labels is not None:
            return tuple(str(label) for label in labels)
        if not any(len(prompt) for prompt in prompts):
            raise DataError("cannot tell which rollouts share a task (no labels, no prompts); give --group-size")
        self.notes.append("rollouts with equal prompts form a group; use --group-size to change this")
        return tuple(prompt.tobytes().hex() for prompt in prompts)

    def numbers(self) -> dict[str, float]:
        """Return the loss and the gradient norm, if recorded: a single number, or the mean of several."""
        found = {}
        for name in ("loss", "gradient_norm"):
            if name not in self.found.values:
                continue
            label = self.found.names[name]
            try:
                values = np.asarray(self.found.values[name], np.float64)
            except (TypeError, ValueError) as error:
                raise DataError(f"{label}: {error}; expected a number") from error
            if values.size and np.isfinite(values).all():
                found[name] = float(values.mean())
            else:
                self.notes.append(f"{label} has no finite number and is not compared")
        return found

    def _rows(self, name: str) -> Rows | None:
        """Return a field as one array per rollout."""
        value = self.found.values.get(name)
        if value is None:
            return None
        try:
            rows = tuple(np.asarray(each) for each in value)
            if any(row.ndim != 1 or row.dtype.kind not in "biuf" for row in rows):
                raise ValueError("it contains values other than numbers, one per token")
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{self.found.names[name]}: {error}; expected a list of numbers for each rollout"
            ) from error
        return rows


def first_trained(mask: np.ndarray) -> int:
    """Return the position of the first sampled token; the end if there is none."""
    return int(np.argmax(mask)) if mask.any() else len(mask)


def _summed(columns: Sequence[Sequence[Any]]) -> np.ndarray:
    total: np.ndarray = np.sum(np.array([[_float(v) for v in column] for column in columns]), axis=0)
    return total


def _float(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _expect_finite(name: str, rows: Rows, masks: Rows) -> None:
    for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        wrong = np.flatnonzero(mask & ~np.isfinite(row[: len(mask)]))
        if len(wrong):
            raise DataError(
                f"{name}: rollout {i}, response token {wrong[0]} is {row[wrong[0]]}; expected a number at every "
                "sampled token. Either the training first went wrong here, or the mask is wrong"
            )
