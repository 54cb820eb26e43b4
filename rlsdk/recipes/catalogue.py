"""Read the folders of recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import attrs
import yaml

from rlsdk.errors import DataError, ValueFault
from rlsdk.options import structure, unknown

FOLDER = Path(__file__).parent
NEVER_RUN = "never run"
T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Stage:
    """One training of a recipe.

    Attributes:
        name: Name of its run folder.
        config: Configuration file in the recipe's folder.
        start: Stage whose model it trains; `new` for the random weights of the recipe's `new_model`, null for the model
            named by the configuration.
        reference: Stage whose model is its reference model.
    """

    name: str
    config: str
    start: str | None = None
    reference: str | None = None


@attrs.frozen(kw_only=True)
class Expected:
    """Held-out accuracy after the last stage.

    Attributes:
        metric: Key of the lines of metrics.jsonl.
        band: Minimum and maximum expected value.
        start: Value before the last stage as reported elsewhere, for a recipe that was never run here.
        end: Value after the last stage as reported elsewhere.
        source: Source of these values, or why they are unknown.
    """

    metric: str = "eval/sampled"
    band: tuple[float, float]
    start: float | None = None
    end: float | None = None
    source: str = ""


@attrs.frozen(kw_only=True)
class RecipeRun:
    """A run of the recipe, read from `curve.json`.

    Attributes:
        commit: Commit of rlsdk.
        date: Day of the run.
        machine: Machine it ran on.
        minutes: Time of all stages.
        points: Evaluations of the last stage: step and metrics.
    """

    commit: str
    date: str
    machine: str
    minutes: float
    points: tuple[dict[str, float], ...]


@attrs.frozen(kw_only=True)
class Recipe:
    """A recipe, read from `recipe.yaml`.

    Attributes:
        title: One-line summary.
        task: What the model does.
        algorithm: How it learns.
        hardware: Required hardware, in words.
        stages: Trainings, in order.
        expected: Accuracy after the last stage.
        finds: What the last stage discovers beyond the demonstrations; null if it only reinforces what was taught.
        new_model: Options of `rlsdk model new nano`; null if the recipe starts from an existing model.
        needs: Plugin -> how to install it.
        measured: `never run`, unless there is a `curve.json`.
        folder: Folder of the recipe, not read from the file.
    """

    title: str
    task: str
    algorithm: str
    hardware: str
    stages: tuple[Stage, ...]
    expected: Expected
    finds: str | None = None
    new_model: dict[str, Any] | None = None
    needs: dict[str, str] = attrs.field(factory=dict)
    measured: str | None = None
    folder: Path = FOLDER

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.folder.name

    def measurement(self) -> RecipeRun | None:
        """Return the measured run; None if the recipe was never run."""
        file = self.folder / "curve.json"
        if not file.is_file():
            return None
        return _structured(json.loads(file.read_text(encoding="utf-8")), RecipeRun, file)

    def text(self, file: str) -> str:
        """Return the text of one of its files."""
        return (self.folder / file).read_text(encoding="utf-8")


def names() -> list[str]:
    """Return the names of all recipes."""
    return sorted(file.parent.name for file in FOLDER.glob("*/recipe.yaml"))


def read(name: str) -> Recipe:
    """Read a recipe.

    Args:
        name: Name of its folder.

    Raises:
        ValueFault: The recipe does not exist.
        DataError: Its `recipe.yaml` is invalid.
    """
    known = names()
    if name not in known:
        raise ValueFault(f"{unknown('recipe', name, known)}; `rlsdk recipe list` shows them")
    return read_folder(FOLDER / name)


def read_folder(folder: Path) -> Recipe:
    """Read the recipe of a folder."""
    file = folder / "recipe.yaml"
    return attrs.evolve(_structured(yaml.safe_load(file.read_text(encoding="utf-8")), Recipe, file), folder=folder)


def _structured(value: Any, kind: type[T], file: Path) -> T:
    found: T
    found, faults = structure(value, kind)
    if faults:
        raise DataError("; ".join(f"{file}: {path.lstrip('.')}: {text}" for path, text in faults))
    return found
