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
        start: Stage whose model it trains; `new` for the random weights that the recipe's `new_model` makes, null for
            the model that the configuration names.
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
        band: Least and greatest value of it that are expected.
        start: Value before the last stage that others reported, for a recipe that was never run here.
        end: Value after it that they reported.
        source: Who reported them, or why no more is known.
    """

    metric: str = "eval/sampled"
    band: tuple[float, float]
    start: float | None = None
    end: float | None = None
    source: str = ""


@attrs.frozen(kw_only=True)
class RecipeRun:
    """A run of the recipe, as `curve.json` holds it.

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
    """A recipe, as `recipe.yaml` holds it.

    Attributes:
        title: What it shows, in a line.
        task: What the model does.
        algorithm: How it learns.
        hardware: What it needs, as a person reads it.
        stages: Trainings, in their order.
        expected: Accuracy after the last stage.
        finds: What the last stage finds that no demonstration held; null if it brings out what had been taught.
        new_model: Options of `rlsdk model new nano`; null if the recipe starts from a model of a name or a folder.
        needs: Plugin -> how to install it.
        measured: `never run`, unless there is a `curve.json`.
        folder: Its folder, which no file says.
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
        """Return what was measured; None if the recipe was never run."""
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
        ValueFault: There is no such recipe.
        DataError: Its `recipe.yaml` is wrong.
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
