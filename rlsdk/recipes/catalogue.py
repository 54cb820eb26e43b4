"""Recipes: read their folders, run their stages, and check the final accuracy."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import yaml

from rlsdk.errors import DataError, RlsdkError, ValueFault
from rlsdk.options import structure, unknown
from rlsdk.runlog.folder import replace_text

FOLDER = Path(__file__).parent
NEVER_RUN = "never run"
T = TypeVar("T")
QUICK_STEPS = 2
QUICK = (f"steps={QUICK_STEPS}", "batch_size=4", "eval.limit=8", "eval.every=0", "eval.samples=1", "checkpoint.every=0")
"""Settings of `--quick` for each stage: just enough to see that everything starts and trains."""
RECORD = "recipe.json"


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
    """A run of the recipe, read from `curve.json`."""

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


class StageError(RlsdkError):
    """A stage of a recipe failed; `status` is the exit status of its command."""

    def __init__(self, message: str, status: int) -> None:
        self.status = status
        super().__init__(message)

    def __reduce__(self) -> tuple[type[StageError], tuple[str, int]]:
        return (StageError, (str(self), self.status))


@attrs.frozen
class RecipeStep:
    """One command of a recipe.

    Attributes:
        title: Short description.
        arguments: Arguments of `rlsdk`.
        result: File or folder that exists once the command has finished.
    """

    title: str
    arguments: tuple[str, ...]
    result: Path

    def __str__(self) -> str:
        return shlex.join(["rlsdk", *self.arguments])


def commands(recipe: Recipe, out: Path, settings: Sequence[str] = (), *, quick: bool = False) -> list[RecipeStep]:
    """Return the commands of a recipe, in order; `settings` are those of its last stage, `quick` runs only a few steps.

    Raises:
        ValueFault: The settings name a run or its folder, in which its result would not be found.
    """
    own = [key for key in (setting.partition("=")[0] for setting in settings) if key in ("name", "out")]
    if own:
        raise ValueFault(f"{own[0]}: every stage of a recipe has its own; --out gives the folder of all")
    steps = []
    if recipe.new_model is not None:
        shape = [part for key, value in recipe.new_model.items() for part in _flag(key, value)]
        made = ("model", "new", "nano", f"{out / 'model'}", *shape, "--overwrite")
        steps.append(RecipeStep("model", made, out / "model" / "config.json"))
    for stage in recipe.stages:
        given = [f"name={stage.name}", f"out={out}"]
        for key, origin in (("model.path", stage.start), ("model.reference", stage.reference)):
            if origin is not None:
                given.append(f"{key}={_model(recipe, origin, out, quick=quick)}")
        own_settings = settings if stage is recipe.stages[-1] else ()
        replaced = {each.partition("=")[0] for each in own_settings}  # such as a whole section `eval`
        given += [each for each in QUICK if quick and each.partition(".")[0] not in replaced]
        given += own_settings
        arguments = ("train", str(recipe.folder / stage.config), *given)
        steps.append(RecipeStep(stage.name, arguments, out / stage.name / "summary.json"))
    return steps


def _flag(key: str, value: Any) -> tuple[str, ...]:
    option = f"--{key.replace('_', '-')}"
    return (option,) if value is True else (option, str(value))


def _model(recipe: Recipe, origin: str, out: Path, *, quick: bool) -> Path:
    """Return the folder of the model that a stage produces, or of the new one."""
    if origin == "new":
        return out / "model"
    stage = next(stage for stage in recipe.stages if stage.name == origin)
    steps = QUICK_STEPS if quick else config(recipe, stage)["steps"]
    return out / origin / "checkpoints" / f"step-{steps}" / "export"


def config(recipe: Recipe, stage: Stage) -> dict[str, Any]:
    """Return the configuration of a stage, as in its file."""
    found: dict[str, Any] = yaml.safe_load(recipe.text(stage.config))
    return found


def run(
    recipe: Recipe,
    out: Path,
    steps: Sequence[RecipeStep],
    tell: Callable[[str], None],
    *,
    overwrite: bool,
    quick: bool = False,
) -> None:
    """Run the unfinished commands of a recipe; an interrupted training is resumed.

    Args:
        recipe: The recipe.
        out: Folder of its runs.
        steps: Its commands.
        tell: Called with a line before each command.
        overwrite: Start from scratch.
        quick: Count a stage that ran all its steps as finished, even if it learned nothing.

    Raises:
        ValueFault: The folder contains stages with different settings, or of another version of the recipe.
        StageError: A command failed.
    """
    changed = overwrite
    record = {"recipe": _digest(recipe), "commands": {step.title: list(step.arguments) for step in steps}}
    if not overwrite:
        _check_record(out, record)
    out.mkdir(parents=True, exist_ok=True)
    replace_text(out / RECORD, json.dumps(record, indent=1))
    for number, step in enumerate(steps, start=1):
        head = f"{recipe.name}, {number} of {len(steps)}: "
        if not changed and ended(step):
            tell(f"{head}{step.title} is done ({step.result.parent})")
            continue
        saved = any(step.result.parent.glob("checkpoints/step-*/state.json"))
        how = "--resume" if saved and not changed else "--overwrite"
        more = () if step.title == "model" else (how,)
        tell(f"{head}{step}")
        command = [sys.executable, "-m", "rlsdk.cli", *step.arguments, *more]
        status = subprocess.run(command, check=False, stdout=2).returncode  # standard output is reserved for the result
        if status and not (quick and _took_its_steps(step)):
            again = f"`rlsdk recipe run {recipe.name}` with the same settings continues from there"
            raise StageError(f"recipe {recipe.name}: {step.title} ended with status {status}; {again}", status)
        changed = True  # later stages were built on an older one


def _took_its_steps(step: RecipeStep) -> bool:
    """Return True if a stage with `--quick` ran to its end."""
    if step.title == "model" or not step.result.is_file():
        return False
    return bool(json.loads(step.result.read_text(encoding="utf-8"))["steps"] == QUICK_STEPS)


def ended(step: RecipeStep) -> bool:
    """Return True if a command has finished its work."""
    if not step.result.is_file():
        return False
    return step.title == "model" or json.loads(step.result.read_text(encoding="utf-8"))["status"] == "finished"


def _check_record(out: Path, record: dict[str, Any]) -> None:
    file = out / RECORD
    if not file.is_file():
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    if before == record:
        return
    what = "another version of the recipe" if before["recipe"] != record["recipe"] else "different settings"
    raise ValueFault(f"{out} holds a run with {what}; begin from scratch with --overwrite, or give another --out")


def _digest(recipe: Recipe) -> str:
    """Hash everything that affects training: configurations and plugins."""
    files = sorted(path for path in recipe.folder.iterdir() if path.suffix in (".yaml", ".py"))
    whole = hashlib.sha256()
    for path in files:
        if path.name != "recipe.yaml":
            whole.update(path.name.encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()


def evaluations(folder: Path) -> list[dict[str, float]]:
    """Return the evaluations of a run: step, accuracies and rewards."""
    points = []
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        metrics = json.loads(line)
        if "eval/sampled" in metrics:
            values = {k: v for k, v in metrics.items() if re.fullmatch(r"eval/[^/]+", k) and isinstance(v, float)}
            points.append({"step": metrics["step"], **{k: round(v, 4) for k, v in values.items()}})
    return points


def verdict(expected: Expected, points: Sequence[dict[str, float]]) -> tuple[bool, str]:
    """Return whether the last evaluation lies in the expected band, and a sentence about it."""
    least, most = expected.band
    value = points[-1].get(expected.metric) if points else None
    if value is None:
        return False, f"no evaluation with {expected.metric} was found"
    band = f"the expected band, {least:g} to {most:g}"
    if least <= value <= most:
        return True, f"{expected.metric} {value:.3f} lies in {band}"
    return False, f"{expected.metric} {value:.3f} is {'below' if value < least else 'above'} {band}"
