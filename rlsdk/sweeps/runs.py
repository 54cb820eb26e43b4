"""The runs of a sweep: settings with lists of values, and the configuration, folder and status of each run."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlsdk.config import Plan, check, read
from rlsdk.errors import ConfigError
from rlsdk.opening.changes import differences, settings_of
from rlsdk.runlog.files import read_json
from rlsdk.runlog.metrics import read_metrics
from rlsdk.runlog.report import SUMMARY
from rlsdk.storage.location import is_url

LONGEST_NAME = 80
LENGTH = frozenset({"steps", "epochs"})
"""Settings that, if changed, continue a finished run instead of keeping it."""
POINTS = 3
"""Default number of points of a range."""
MOST_RUNS = 1_000
"""Maximum number of runs; more are a mistake in a range or a number of seeds."""
OWN = ("name", "out")
"""Settings that the sweep sets for each run."""
_RANGE = re.compile(r"(log|lin):([^:]+):([^:]+)(?::([^:]+))?")
_OPENING = {"[": "]", "{": "}", "(": ")"}


@attrs.frozen
class SweepRun:
    """One run of a sweep.

    Attributes:
        name: Name of the run and of its folder.
        folder: Folder of the sweep.
        config: Configuration file.
        settings: Overrides other than name, folder and seed.
        seed: Random seed.
        plugins: Files of plugins.
        group: Settings shared by all seeds of this combination: name -> value.
    """

    name: str
    folder: Path
    config: Path
    settings: tuple[str, ...]
    seed: int
    plugins: tuple[str, ...] = ()
    group: Mapping[str, str] = {}

    @property
    def path(self) -> Path:
        """Folder of the run."""
        return self.folder / self.name

    @property
    def log(self) -> Path:
        """File with the run's output."""
        return self.folder / "logs" / f"{self.name}.log"

    @property
    def overrides(self) -> tuple[str, ...]:
        """All overrides of the configuration."""
        out = f"out={json.dumps(str(self.folder))}"
        return (*self.settings, f"seed={self.seed}", out, f"name={json.dumps(self.name)}")

    def check(self) -> Plan:
        """Check the run's configuration."""
        return check(self.config, self.overrides, self.plugins)

    @property
    def begun(self) -> bool:
        """True if an earlier sweep started the run."""
        return (self.path / "config.yaml").is_file()

    def finished(self, plan: Plan) -> bool:
        """Return whether it has been trained according to its plan."""
        if not self.begun or self.summary().get("status") != "finished":
            return False
        changed = differences(plan)
        return not any(each.path in LENGTH or not each.harmless for each in changed)

    def summary(self) -> dict[str, Any]:
        """Summary of the run; empty if it has none."""
        found = read_json(self.path / SUMMARY)
        return found if isinstance(found, dict) else {}

    def metrics(self) -> set[str]:
        """Names of all metrics in the run's `metrics.jsonl`."""
        return {name for line in read_metrics(self.path) for name in line}

    def result(self, metric: str) -> float | None:
        """Return a metric at the end of the run: the last value of an evaluation, or the mean of the last tenth.

        None if the run has no such metric, or if it is not finite there, since NaN cannot be ranked. Such a value is
        null in `metrics.jsonl`, as is an evaluation without a scored answer: an earlier value does not replace it.
        """
        lines = [line for line in read_metrics(self.path) if metric in line]
        tenth = [] if metric.startswith("eval/") else [n for n in lines if n["step"] > 0.9 * lines[-1]["step"]]
        values = [line[metric] for line in tenth or lines[-1:] if isinstance(line[metric], int | float)]
        found = sum(values) / len(values) if values else math.nan
        return found if math.isfinite(found) else None

    def failure(self, status: int) -> str:
        """Return why the run failed, from its log.

        Args:
            status: Exit status of its process; below 0, the signal that killed it.
        """
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        except OSError:
            return "it left no log"
        errors = [i for i, line in enumerate(lines) if line.startswith("rlsdk: ")]
        if errors and status > 0:
            return " ".join(" ".join(lines[errors[-1] :]).removeprefix("rlsdk: ").split())[:400]
        # It ended without a word: the log may hold the error of an earlier attempt, and the last line may say nothing.
        ended = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{ended}; last line of its log: {' '.join(''.join(lines[-1:]).split())[:300]}"


def run_name(group: Mapping[str, str], seed: int) -> str:
    """Name a run by its settings and seed, in characters valid in every file system."""
    keys = [key.rpartition(".")[2] for key in group]
    whole = "_".join(f"{key}={value}" for key, value in zip(keys, group.values(), strict=True))
    plain = re.sub(r"[^\w.=,+-]+", "-", whole, flags=re.ASCII).strip("-")
    if plain != whole or len(plain) > LONGEST_NAME or len(set(keys)) < len(keys):
        digest = hashlib.sha256(repr(sorted(group.items())).encode()).hexdigest()[:6]
        plain = f"{plain[:LONGEST_NAME]}-{digest}"
    return "_".join(filter(None, [plain, f"seed={seed}"]))


def check_all(runs: Sequence[SweepRun]) -> dict[str, Plan]:
    """Check all runs before any starts; return name -> plan.

    Raises:
        ConfigError: Lists each fault once, with the combinations that have it unless all do.
    """
    plans: dict[str, Plan] = {}
    faults: dict[str, list[SweepRun]] = {}
    for run in runs:
        try:
            plans[run.name] = run.check()
        except ConfigError as error:
            for fault in error.faults:
                faults.setdefault(fault, []).append(run)
    if faults:
        raise ConfigError([_fault_text(fault, wrong, len(runs)) for fault, wrong in faults.items()])
    return plans


def refuse_equal(runs: Sequence[SweepRun], plans: Mapping[str, Plan]) -> None:
    """Refuse combinations that give the same configuration, such as those of `grpo` and `core/grpo`.

    Raises:
        ConfigError: Names two such combinations.
    """
    runs = [run for run in runs if run.seed == runs[0].seed]
    settings = [settings_of(plans[run.name]) | dict.fromkeys(OWN) for run in runs]
    plugins = [plans[run.name].config.plugins for run in runs]
    for one, other in itertools.combinations(range(len(runs)), 2):
        if settings[one] == settings[other] and plugins[one] == plugins[other]:
            both = f"{_combination(runs[one])} and {_combination(runs[other])}"
            raise ConfigError([f"{both} give the same configuration; leave one out (--seeds N repeats every run)"])


def _combination(run: SweepRun) -> str:
    return ", ".join(f"{key}={value}" for key, value in run.group.items())


def _fault_text(fault: str, wrong: Sequence[SweepRun], count: int) -> str:
    if len(wrong) == count:
        return fault
    groups = dict.fromkeys(map(_combination, wrong))
    shown = [*groups][:3]
    more = f" and {len(groups) - 3} more" if len(groups) > 3 else ""
    return f"{fault} (with {'; '.join(shown)}{more})"


def sweep_of(
    config: Path, settings: Sequence[str], plugins: Sequence[str], *, seeds: int
) -> tuple[Path, list[SweepRun], Mapping[str, Plan]]:
    """Return the folder of a sweep, its runs and their checked plans.

    Raises:
        ConfigError: Lists all faults of all combinations, or names two equal ones.
    """
    axes, fixed = axes_of(settings)
    seeded = [axis for axis in axes if axis.key == "seed"]
    if seeded and seeds > 1:
        raise ConfigError(["seed: give either several values or --seeds"])
    require_few({axis.key: len(axis.values) for axis in axes} | {"--seeds": seeds})
    tree, _ = read(config, fixed)
    out, name, first = str(tree.get("out", "runs")), tree.get("name"), tree.get("seed", 0)
    if is_url(out):
        raise ConfigError([f"out: a sweep needs a local folder for its processes' logs; got {out!r}"])
    if not isinstance(name, str) or not isinstance(first, int):
        check(config, fixed, plugins)  # reports their faults
    numbers = _seeds(seeded[0].values) if seeded else range(first, first + seeds)
    folder = Path(out) / f"{name}-sweep"
    own = [setting for setting in settings if setting.partition("=")[0] not in ("name", "out", "seed")]

    def chosen(setting: str, group: Mapping[str, str]) -> str:
        key = setting.partition("=")[0]
        return setting if setting in fixed else f"{key}={group[key]}"

    runs = [
        SweepRun(
            name=run_name(group, seed),
            folder=folder,
            config=config,
            settings=tuple(chosen(setting, group) for setting in own),
            seed=seed,
            plugins=tuple(plugins),
            group=group,
        )
        for group in combinations([axis for axis in axes if axis.key != "seed"])
        for seed in numbers
    ]
    plans = check_all(runs)
    refuse_equal(runs, plans)
    return folder, runs, plans


def require_few(counts: Mapping[str, int]) -> None:
    """Refuse more runs than anyone means to start.

    Args:
        counts: Option or setting -> its number of values; their product is the number of runs.

    Raises:
        ConfigError: The number of runs is above `MOST_RUNS`.
    """
    if (runs := math.prod(counts.values())) > MOST_RUNS:
        factors = " × ".join(f"{count:,} ({what})" for what, count in counts.items() if count > 1)
        raise ConfigError([f"{factors} = {runs:,} runs; at most {MOST_RUNS:,} are started at once: give fewer values"])


def _seeds(values: Sequence[str]) -> list[int]:
    try:
        return [int(value) for value in values]
    except ValueError:
        raise ConfigError([f"seed: expected whole numbers, got {','.join(values)}"]) from None


@attrs.frozen
class Axis:
    """A setting with several values."""

    key: str
    values: tuple[str, ...]


def axes_of(settings: Sequence[str]) -> tuple[list[Axis], list[str]]:
    """Split settings into those with several values and those with one.

    Args:
        settings: `key=value`, `key=a,b,c`, `key=log:LOW:HIGH[:POINTS]` or `key=lin:LOW:HIGH[:POINTS]`. Commas within
            brackets or quotes belong to a value.

    Raises:
        ConfigError: Lists all faults.
    """
    axes, fixed, faults = [], [], []
    for setting in settings:
        key, _, text = setting.partition("=")
        try:
            values = _values(text)
        except ValueError as error:
            faults.append(f"{key}: {error}")
            continue
        if len(values) < 2:
            fixed.append(setting)
        elif key in OWN:
            faults.append(f"{key}: each run of a sweep gets its own; give one value, which names the sweep")
        else:
            axes.append(Axis(key, values))
    twice = [key for key, count in Counter(axis.key for axis in axes).items() if count > 1]
    faults += [f"{key}: several values are given more than once; write them as one list, {key}=a,b,c" for key in twice]
    if faults:
        raise ConfigError(faults)
    return axes, fixed


def combinations(axes: Sequence[Axis]) -> Iterator[dict[str, str]]:
    """Yield all combinations of values: key -> value."""
    for values in itertools.product(*(axis.values for axis in axes)):
        yield {axis.key: value for axis, value in zip(axes, values, strict=True)}


def _values(text: str) -> tuple[str, ...]:
    if text.startswith(("log:", "lin:")):
        return _range(text)
    values = _parted(text)
    if len(values) > 1:
        if "" in values:
            raise ValueError(f"{text!r} has an empty value between its commas")
        for one, other in itertools.combinations(values, 2):
            if _read(one) == _read(other):
                raise ValueError(
                    f"{text!r} has a duplicate value ({one} and {other}); use --seeds for several runs of one setting"
                )
    return values


def _read(value: str) -> float | str:
    """Return a value for comparison: as numbers, 0.001 and 1e-3 are equal."""
    try:
        return float(value)
    except ValueError:
        return value


def _parted(text: str) -> tuple[str, ...]:
    """Split at commas outside brackets and quotes."""
    parts, closing, quote = [""], [], ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in _OPENING:
            closing.append(_OPENING[character])
        elif closing and character == closing[-1]:
            closing.pop()
        elif character == "," and not closing:
            parts.append("")
            continue
        parts[-1] += character
    return tuple(part.strip() for part in parts)


def _range(text: str) -> tuple[str, ...]:
    found = _RANGE.fullmatch(text)
    form = f"expected {text[:3]}:LOW:HIGH or {text[:3]}:LOW:HIGH:POINTS, as in {text[:3]}:1e-6:1e-3:4; got {text!r}"
    if found is None:
        raise ValueError(form)
    try:
        low, high, points = float(found[2]), float(found[3]), int(found[4] or POINTS)
    except ValueError:
        raise ValueError(form) from None
    if points < 2 or not -math.inf < low < high < math.inf or (found[1] == "log" and low <= 0):
        above = ", above 0" if found[1] == "log" else ""
        raise ValueError(f"a range needs LOW below HIGH{above}, both finite, and at least 2 points; got {text!r}")
    if points > MOST_RUNS:
        raise ValueError(f"{text!r} gives {points:,} values; a sweep has at most {MOST_RUNS:,} runs: give fewer points")
    shares = [i / (points - 1) for i in range(points)]
    if found[1] == "log":
        numbers = [low ** (1 - share) * high**share for share in shares]
    else:
        numbers = [low + share * (high - low) for share in shares]
    values = tuple(map(_number, numbers))
    if len(set(values)) < points:
        raise ValueError(f"the points of {text!r} are equal in six digits; list them, as in {low!r},{high!r}")
    return values


def _number(value: float) -> str:
    """Return a number in six digits, and all digits of a whole one, which may be a count of steps or tokens."""
    whole = round(value)
    return str(whole) if math.isclose(value, whole, rel_tol=1e-9) else f"{value:.6g}"
