"""Measurements of a finished run, read from its folder: speeds of its parts, lengths of responses, idle times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import attrs
import numpy as np

from rlsdk.errors import RunError
from rlsdk.runlog.files import read_yaml
from rlsdk.runlog.metrics import read_metrics
from rlsdk.runlog.query import query
from rlsdk.runlog.store import Address
from rlsdk.simulation.rates import Lengths, Rates

MEASURED = (
    *("step_seconds", "sequence_seconds", "prompt_tokens", "score_seconds", "driver_seconds"),
    *("token_seconds", "learner_seconds", "sync_seconds", "bandwidth", "filtered"),
)
"""Rates that can be measured in a run."""
WARM_UP = 3
"""Number of first steps to skip, which compilation and first allocations distort."""
CERTAIN = 4
"""Standard errors from zero at which a batch's fixed seconds count as measured: one slow step deceives a lower one."""
LEARNER = ("logprobs", "credit", "update")
"""Phases of the learner."""


@attrs.frozen(kw_only=True)
class MeasuredRun:
    """Figures of a finished run.

    Attributes:
        rates: Fitted rates of its parts.
        lengths: Lengths of its responses.
        step: Mean seconds of a step.
        step_p95: 95th percentile of the seconds of a step.
        tokens_per_second: Trained tokens per second; rollouts that were trained on again count with the mean length.
        learner_idle: Share of time in which the learner waited for rollouts.
        engines_idle: Share of time in which engines were idle; None if it was not logged.
        staleness: Mean staleness of trained tokens; None if it was not logged.
        staleness_max: Maximum staleness.
        steps: Number of steps measured.
        batch_size: Tasks per step.
        group_size: Rollouts per task.
    """

    rates: Rates
    lengths: Lengths
    step: float
    step_p95: float
    tokens_per_second: float
    learner_idle: float
    engines_idle: float | None
    staleness: float | None
    staleness_max: int
    steps: int
    batch_size: int
    group_size: int


def measure(folder: Path, defaults: Rates) -> MeasuredRun:
    """Measure the speed of a run's parts.

    An engine's seconds per decode step and per sequence are taken from the run's log. If they were not logged, they are
    fitted to the decode steps, tokens and engine seconds of each training step. The learner's rates are fitted to
    trained tokens and the seconds of its phases. Steps with nearly equal numbers of tokens do not show what a step
    without any would take; all the learner's seconds then count as per token. Both include prompt processing. In a
    synchronous run, a batch's time outside the engines counts as scoring; time outside all phases counts as the
    learner's.

    Args:
        folder: Folder of the run.
        defaults: Values that are not logged: efficiency, slots, size of the weights, and the minimum bandwidth.

    Raises:
        RunError: The folder is not a run's, or the run has too few steps.
    """
    lines = [line for line in read_metrics(folder) if "time/step" in line and "time/update" in line][WARM_UP:]
    if len(lines) < 2 or not (folder / "config.yaml").is_file():
        raise RunError(
            f"{folder}: expected the folder of a run, with config.yaml and metrics.jsonl of at least {WARM_UP + 2} "
            f"training steps; found {len(lines)} steps after a warm-up of {WARM_UP}"
        )
    config = read_yaml(folder / "config.yaml")
    place = {"engines": 1, "learners": 1, **(config.get("placement") or {})}
    section = config.get("rollout") or config.get("production") or {}  # its name until 0.2
    synchronous = not section.get("max_staleness") and section.get("sync_interval", 1) == 1
    lengths = lengths_of(folder, lines, int((config.get("sampling") or {}).get("max_tokens", 256)))
    batch, group = config.get("batch_size", 64), config.get("group_size", 8)
    rollouts = batch * group / place["engines"]
    seconds, produce = _column(lines, "time/step"), _column(lines, "time/produce")
    again = _column(lines, "rollouts/reused") * _column(lines, "rollouts/length")
    trained = _column(lines, "rollouts/tokens") * _column(lines, "groups/trained", 1.0) + again
    scoring = np.maximum(produce - _column(lines, "time/engine_inside"), 0.0)
    rates = attrs.evolve(
        _learner_rates(lines, trained, place["learners"], defaults),
        **_engine_rates(lines, place["engines"], np.ceil(rollouts / defaults.slots), lengths),
        prompt_tokens=0,
        **_driver_rates(float(np.mean(scoring)) if synchronous else 0.0, config, defaults),
        filtered=float(np.clip(1 - _column(lines, "groups/trained", 1.0).mean(), 0, 1)),
    )
    return MeasuredRun(
        rates=rates,
        lengths=lengths,
        step=float(seconds.mean()),
        step_p95=float(np.percentile(seconds, 95)),
        tokens_per_second=float(trained.sum() / seconds.sum()),
        learner_idle=float(produce.sum() / seconds.sum()),
        engines_idle=_mean(lines, "time/engines_idle"),
        staleness=0.0 if synchronous else _mean(lines, "staleness/mean"),
        staleness_max=int(_column(lines, "staleness/max").max()),
        steps=len(lines),
        batch_size=batch,
        group_size=group,
    )


def _driver_rates(scoring: float, config: Mapping[str, Any], defaults: Rates) -> dict[str, Any]:
    """Split a batch's seconds outside the engines into the driver's work and waiting for scores."""
    rollouts = config.get("batch_size", 64) * config.get("group_size", 8)
    driver = min(defaults.driver_seconds, scoring / rollouts)
    return {"driver_seconds": driver, "score_seconds": scoring - driver * rollouts}


def _engine_rates(lines: Sequence[Mapping[str, Any]], engines: int, waves: float, lengths: Lengths) -> dict[str, Any]:
    """Return the seconds of an engine per decode step and per sequence; `waves`: how often it fills all slots."""
    if (logged := _mean(lines, "engine/step_seconds")) is not None:
        return {"step_seconds": logged, "sequence_seconds": _mean(lines, "engine/sequence_seconds") or 0.0}
    decode_steps = _column(lines, "engine/steps", float(waves * max(lengths.seen, default=lengths.limit)))
    fitted = fit(decode_steps, _column(lines, "rollouts/tokens") / engines, _column(lines, "time/engine_inside"))
    return dict(zip(("step_seconds", "sequence_seconds"), fitted, strict=True))


def _learner_rates(lines: Sequence[Mapping[str, Any]], trained: np.ndarray, ranks: int, defaults: Rates) -> Rates:
    """Return the default rates with those of the learner and of syncs measured; `trained`: tokens, float `[steps]`."""
    learning = np.sum([_column(lines, f"time/{phase}") for phase in LEARNER], axis=0)
    fixed, per_token = fit(np.ones(len(lines)), trained, learning)
    if fixed < CERTAIN * _intercept_error(trained, learning - fixed - per_token * trained):
        fixed, per_token = fit(np.zeros(len(lines)), trained, learning)
    sync = _column(lines, "time/sync")
    rest = _column(lines, "time/step") - learning - sync - _column(lines, "time/produce")
    one_sync = float(sync[sync > 0].mean()) if sync.any() else 0.0
    bandwidth = max(defaults.bandwidth, defaults.weights_bytes / one_sync if one_sync else 0.0)
    return attrs.evolve(
        defaults,
        token_seconds=per_token * (1 + (ranks - 1) * defaults.efficiency),
        learner_seconds=max(0.0, fixed + max(0.0, float(rest.mean())) - defaults.exchange(ranks)),
        sync_seconds=max(0.0, one_sync - defaults.weights_bytes / bandwidth),
        bandwidth=bandwidth,
    )


def _intercept_error(x: np.ndarray, residuals: np.ndarray) -> float:
    """Return the standard error of the intercept of a line fitted to points at `x`; all arrays are float `[n]`."""
    n, variation = len(x), float(((x - x.mean()) ** 2).sum())
    if n < 3 or not variation:
        return np.inf
    return float(np.sqrt((residuals @ residuals) / (n - 2) * (x @ x) / (n * variation)))


def fit(first: np.ndarray, second: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Fit non-negative seconds per unit of two quantities, by least squares.

    Args:
        first: Amounts of the first quantity, float `[n]`.
        second: Amounts of the second quantity, float `[n]`.
        seconds: Total seconds, float `[n]`.
    """
    (a, b), *_ = np.linalg.lstsq(np.stack([first, second], 1), seconds, rcond=None)
    if a >= 0 and b >= 0:
        return float(a), float(b)
    alone = [max(0.0, float(x @ seconds / (x @ x))) if x.any() else 0.0 for x in (first, second)]
    left = [float(((x * rate - seconds) ** 2).sum()) for x, rate in zip((first, second), alone, strict=True)]
    return (alone[0], 0.0) if left[0] <= left[1] else (0.0, alone[1])


def lengths_of(folder: Path, lines: Sequence[Mapping[str, Any]], limit: int) -> Lengths:
    """Return the lengths of a run's saved responses; without any, log-normal ones with the mean of the run."""
    if Address.of(folder) is not None:
        seen = tuple(row["tokens"] for row in query(folder, "tokens > 0 and step is not null"))
        if seen:
            return Lengths(median=float(np.median(seen)), limit=limit, seen=seen)
    lengths = Lengths(limit=limit)
    return attrs.evolve(lengths, median=_median_for(float(_column(lines, "rollouts/length").mean()), lengths))


def _median_for(mean: float, lengths: Lengths) -> float:
    """Return the median with which log-normal lengths have this mean after they are cut off."""
    spread = np.exp(lengths.sigma * np.array(NormalDist().quantiles(1000)))
    low, high = 1e-3, 1e3 * lengths.limit
    for _ in range(60):
        middle = (low * high) ** 0.5
        short = np.clip(middle * spread, 1, lengths.limit).mean() < mean
        low, high = (middle, high) if short else (low, middle)
    return float(low)


def _column(lines: Sequence[Mapping[str, Any]], name: str, default: float = 0.0) -> np.ndarray:
    return np.array([float(line.get(name, default)) for line in lines])


def _mean(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    found = [float(line[name]) for line in lines if name in line]
    return float(np.mean(found)) if found else None
