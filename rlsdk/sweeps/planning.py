"""Which runs a sweep consists of, each checked before the first one starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlsdk.config import Plan, check, read
from rlsdk.errors import ConfigError
from rlsdk.storage.location import is_url
from rlsdk.sweeps.axes import axes_of, combinations
from rlsdk.sweeps.runs import SweepRun, check_all, run_name


def sweep_of(
    config: Path, settings: Sequence[str], plugins: Sequence[str], *, seeds: int
) -> tuple[Path, list[SweepRun], Mapping[str, Plan]]:
    """Return the folder of a sweep, its runs and their checked plans.

    Args:
        config: YAML file.
        settings: Settings, with several values or one.
        plugins: Files of plugins.
        seeds: Runs of each combination.

    Raises:
        ConfigError: With every fault of every combination.
    """
    axes, fixed = axes_of(settings)
    seeded = [axis for axis in axes if axis.key == "seed"]
    if seeded and seeds > 1:
        raise ConfigError(["seed: give either several values or --seeds"])
    tree, _ = read(config, fixed)
    out, name, first = str(tree.get("out", "runs")), tree.get("name"), tree.get("seed", 0)
    if is_url(out):
        raise ConfigError([f"out: a sweep needs a local folder for its processes' logs; got {out!r}"])
    if not isinstance(name, str) or not isinstance(first, int):
        check(config, fixed, plugins)  # says what is wrong with them
    numbers = _seeds(seeded[0].values) if seeded else range(first, first + seeds)
    folder = Path(out) / f"{name}-sweep"
    own = [setting for setting in fixed if setting.partition("=")[0] not in ("name", "out", "seed")]
    runs = [
        SweepRun(
            name=run_name(group, seed),
            folder=folder,
            config=config,
            settings=(*own, *(f"{key}={value}" for key, value in group.items())),
            seed=seed,
            plugins=tuple(plugins),
            group=group,
        )
        for group in combinations([axis for axis in axes if axis.key != "seed"])
        for seed in numbers
    ]
    return folder, runs, check_all(runs)


def _seeds(values: Sequence[str]) -> list[int]:
    try:
        return [int(value) for value in values]
    except ValueError:
        raise ConfigError([f"seed: expected whole numbers, got {','.join(values)}"]) from None
