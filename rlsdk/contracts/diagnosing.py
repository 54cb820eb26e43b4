"""The history of a run's metrics, the input of diagnoses, and their findings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

import attrs

if TYPE_CHECKING:
    import numpy as np

Level = Literal["info", "warning", "critical"]


def _frozen(values: Any, dtype: str) -> np.ndarray:
    import numpy as np  # imported late: reading a configuration does not need it

    array: np.ndarray = np.asarray(values, dtype=dtype)
    if array.flags.writeable:  # a part of a frozen array needs no copy
        array = array.copy()
        array.flags.writeable = False
    return array


# Named functions, since mypy understands no other converters.
def _integers(values: Any) -> np.ndarray:
    return _frozen(values, "int64")


def _floats(values: Any) -> np.ndarray:
    return _frozen(values, "float64")


class _Buffer:
    """Steps and values of a series, with room for further ones.

    Attributes:
        steps: int64 `[capacity]`.
        values: float64 `[capacity]`.
        used: Number of values written.
    """

    def __init__(self, series: Series) -> None:
        import numpy as np

        self.used, room = len(series), np.zeros(len(series) + 8)  # twice the size, so that few steps copy
        self.steps = np.concatenate([series.steps, room.astype("int64")])
        self.values = np.concatenate([series.values, room])

    def first(self, array: np.ndarray) -> np.ndarray:
        """Return the used part of one of the arrays, read-only."""
        part = array[: self.used]
        part.flags.writeable = False
        return part


@attrs.frozen(eq=False)
class Series:
    """One metric over the steps of a run, oldest value first; steps without a finite value are left out.

    Attributes:
        steps: int64 `[k]`.
        values: float64 `[k]`.
        name: Name of the metric; empty for values that are not one of the run's metrics.
    """

    steps: np.ndarray = attrs.field(default=(), converter=_integers)
    values: np.ndarray = attrs.field(default=(), converter=_floats)
    name: str = ""
    _buffer: _Buffer | None = attrs.field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.values)

    def then(self, step: int, value: float) -> Series:
        """Return a new series with one more value; it shares the memory of this one where that has room."""
        buffer = self._buffer
        # A buffer with more values belongs to another series that was made from this one.
        if buffer is None or buffer.used != len(self) or buffer.used == len(buffer.values):
            buffer = _Buffer(self)
        buffer.steps[buffer.used], buffer.values[buffer.used] = step, value
        buffer.used += 1
        return Series(buffer.first(buffer.steps), buffer.first(buffer.values), self.name, buffer)

    def first(self, count: int) -> Series:
        """Return the oldest values, at most `count`."""
        return Series(self.steps[:count], self.values[:count], self.name)

    def last(self, count: int) -> Series:
        """Return the newest values, at most `count`."""
        begin = max(0, len(self) - count)
        return Series(self.steps[begin:], self.values[begin:], self.name)

    def until(self, step: int) -> Series:
        """Return the values up to and including a step."""
        end = int(self.steps.searchsorted(step, side="right"))
        return Series(self.steps[:end], self.values[:end], self.name)

    @property
    def mean(self) -> float:
        """Mean of the values; NaN if there are none."""
        return float(self.values.mean()) if len(self) else math.nan

    @property
    def median(self) -> float:
        """Median of the values; NaN if there are none."""
        return statistics.median(self.values.tolist()) if len(self) else math.nan


@attrs.frozen(eq=False)
class History:
    """All metrics of a run up to a step; immutable: a later step creates a new history.

    Attributes:
        series: Name of a metric -> its values.
        step: The last step.
    """

    series: Mapping[str, Series] = attrs.field(factory=dict)
    step: int = 0

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> Self:
        """Create a history from the lines of a `metrics.jsonl`: each has a `step` and metrics."""
        steps: dict[str, list[int]] = {}
        values: dict[str, list[float]] = {}
        last = 0
        for line in lines:
            last = int(line["step"])
            for name, value in finite(line).items():
                steps.setdefault(name, []).append(last)
                values.setdefault(name, []).append(value)
        return cls({name: Series(steps[name], values[name], name) for name in values}, last)

    def __getitem__(self, name: str) -> Series:
        """Return a metric; an empty series if the run does not have it."""
        return self.series.get(name) or Series(name=name)

    def then(self, step: int, metrics: Mapping[str, Any]) -> History:
        """Return a new history with the metrics of one more step."""
        added = {name: self[name].then(step, value) for name, value in finite(metrics).items()}
        return History({**self.series, **added}, step)

    def until(self, step: int) -> History:
        """Return the history as it was after a step."""
        cut = {name: series.until(step) for name, series in self.series.items()}
        return History({name: series for name, series in cut.items() if len(series)}, step)

    def first_of(self, *names: str) -> Series:
        """Return the first of these metrics that the run has; an empty series if it has none of them."""
        return next((self.series[name] for name in names if name in self.series), Series(name=names[0]))

    def enough(self, series: Series, values: int) -> bool:
        """Return True if a metric has `values` values or more; `rlsdk diagnose` names the rules that need more."""
        return len(series) >= max(1, values)

    def current(self, series: Series, values: int = 1) -> bool:
        """Return True if a metric has `values` values or more, the newest of the last step (old ones are not news)."""
        return self.enough(series, values) and int(series.steps[-1]) == self.step

    def between(self, prefix: str, suffix: str = "") -> dict[str, Series]:
        """Return the metrics with this prefix and suffix, keyed by what lies between: `source/`, NAME, `/share`."""
        return {
            name[len(prefix) : len(name) - len(suffix)]: series
            for name, series in self.series.items()
            if name.startswith(prefix) and name.endswith(suffix) and len(name) > len(prefix) + len(suffix)
        }


def finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are finite numbers, without the step."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


@attrs.frozen
class Finding:
    """A problem or notable fact in a run, and what to do about it.

    Attributes:
        message: One sentence with the numbers: what was observed, and the value it is compared with.
        advice: What to do about it.
        level: `info`, `warning`, or `critical` for what ruins the training if nothing is done.
        metric: The metric whose curve shows it best; empty if there is none.
    """

    message: str
    advice: str
    level: Level = "warning"
    metric: str = ""
