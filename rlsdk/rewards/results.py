"""Conversion of other trainers' reward results into scores; a value that is not a number gives an invalid score."""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import attrs

from rlsdk.plurals import counted
from rlsdk.types import Score, is_reward

_NOTHING = "it returned None: not applicable here; with `none: zero`, it counts as 0"


def _plain(value: Any) -> Any:
    """Convert a tensor or array of one element to a number; return anything else unchanged."""
    if isinstance(value, Real | str | bytes) or not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except (ValueError, RuntimeError):  # of several elements
        return value


def number(value: Any) -> Score:
    """Convert a number, or a tensor of one element, to a score."""
    plain = _plain(value)
    if plain is None:
        return Score.invalid(_NOTHING)
    if inspect.iscoroutine(plain):
        plain.close()  # Python warns of one that nobody awaited
        return Score.invalid(f"it returned the coroutine {plain.__qualname__} without awaiting it; expected a number")
    if not isinstance(plain, Real):
        return Score.invalid(f"it returned {reprlib.repr(value)}; expected a number")
    value = _float(plain)
    return Score(value) if is_reward(value) else Score.invalid(f"it returned {value}; expected a reward within ±1e18")


def _float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def numbers(values: Mapping[Any, Any]) -> dict[str, float]:
    """Select the values that can be logged."""
    plain = {str(name): _plain(value) for name, value in values.items()}
    found = {name: _float(value) for name, value in plain.items() if isinstance(value, Real)}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def scored(value: Any) -> Score:
    """Convert a number, or a mapping with `score`, whose other numbers are metrics, as veRL and XTuner do."""
    if not isinstance(value, Mapping):
        return number(value)
    if "score" not in value:
        return Score.invalid(f"it returned a mapping without 'score'; its keys: {', '.join(map(str, value)) or 'none'}")
    return _with(number(value["score"]), numbers({k: v for k, v in value.items() if k != "score"}))


def summed(value: Any) -> Score:
    """Sum a mapping of numbers, which also become metrics, as Trinity-RFT does."""
    if not isinstance(value, Mapping):
        return number(value)
    if not value:
        return Score.invalid("it returned an empty mapping; expected at least one component")
    parts = {str(name): number(part) for name, part in value.items()}
    wrong = [f"{name}: {score.reason}" for name, score in parts.items() if not score.valid]
    if wrong:
        return Score.invalid("; ".join(wrong))
    values = {name: score.value for name, score in parts.items()}
    return _with(number(math.fsum(values.values())), values)


def one(read: Callable[[Any], Score]) -> Callable[[Any, int], list[Score]]:
    """Turn a reader of one result into a reader of calls with one rollout."""
    return lambda value, _: [read(value)]


def openrlhf(value: Any, count: int) -> list[Score]:
    """Convert the `rewards` of a mapping, whose `scores` and `extra_logs` become metrics, as OpenRLHF does."""
    if not isinstance(value, Mapping):
        return per_rollout(_column(value), count)
    if "rewards" not in value:
        text = f"it returned a mapping without 'rewards'; its keys: {', '.join(map(str, value)) or 'none'}"
        return [Score.invalid(text)] * count
    logs = value.get("extra_logs")
    logged = {"scores": value.get("scores"), **(logs if isinstance(logs, Mapping) else {})}
    columns = {name: _listed(_column(values)) for name, values in logged.items()}
    found = per_rollout(_column(value["rewards"]), count)
    return [
        _with(score, numbers({name: column[i] for name, column in columns.items() if column and i < len(column)}))
        for i, score in enumerate(found)
    ]


def _column(value: Any) -> Any:
    """Wrap a number, or a tensor without an axis, in a list."""
    plain = _plain(value) if getattr(value, "ndim", 0) == 0 else value
    return [plain] if isinstance(plain, Real) else value


def _listed(value: Any) -> Sequence[Any] | None:
    """Convert a list, tuple, array or tensor, also one of a single column, to a list; None for anything else."""
    if getattr(value, "ndim", 0) == 2 and value.shape[1] == 1:
        value = value[:, 0]
    value = value.tolist() if hasattr(value, "tolist") else value
    return value if isinstance(value, list | tuple) else None


@attrs.define
class Log:
    """Values that a TRL function logs in a call for `count` rollouts: columns with a number for each, and means."""

    count: int
    columns: dict[str, list[Any]] = attrs.field(factory=dict)
    means: dict[str, Any] = attrs.field(factory=dict)

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """`log_extra(column, values)`."""
        self.columns.setdefault(column, []).extend(values)

    def metric(self, name: str, value: Any) -> None:
        """`log_metric(name, value)`."""
        self.means[name] = value

    def of(self, index: int) -> dict[str, float]:
        """Return the numbers of one rollout."""
        columns = {name: values[index] for name, values in self.columns.items() if len(values) == self.count}
        return numbers({**self.means, **columns})


def per_rollout(value: Any, count: int, log: Log | None = None) -> list[Score]:
    """Convert a list with one result per rollout; if the length differs, all scores are invalid."""
    listed = _listed(value)
    if listed is None:
        wrong = f"it returned {reprlib.repr(value)}; expected a list of {counted(count, 'number')}"
        return [Score.invalid(wrong)] * count
    if len(listed) != count:
        wrong = f"it returned {counted(len(listed), 'reward')} for {counted(count, 'rollout')}; expected one for each"
        return [Score.invalid(wrong)] * count
    return [_with(scored(each), log.of(i) if log else {}) for i, each in enumerate(listed)]


def _with(score: Score, metrics: Mapping[str, float]) -> Score:
    return attrs.evolve(score, metrics={**score.metrics, **metrics}) if metrics and score.valid else score
