"""Prepare a run's folder: create it for a new run, or find what a resumed run continues from."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import yaml

from rlsdk.annotations import ANNOTATIONS
from rlsdk.checkpoints.checkpoint import LEARNER, Checkpoints
from rlsdk.config import Plan, Source, check, read
from rlsdk.config.kept import CODE, KeptConfig, kept_config
from rlsdk.config.paths import working_folder_note
from rlsdk.config.tree import normalise
from rlsdk.errors import ConfigError
from rlsdk.learners.checkpoint import find_other_settings, ranks_of
from rlsdk.opening.changes import (
    KEPT,
    Difference,
    check_code,
    differences,
    kept_files,
    left_out,
    replaced_code,
)
from rlsdk.plugins import short_name
from rlsdk.plurals import counted
from rlsdk.readiness.base_models import changed_models
from rlsdk.readiness.data_files import changed_data, data_fingerprints
from rlsdk.runlog.folder import (
    finish_removal,
    is_foreign,
    mark,
    naming,
    remove_compiled,
    remove_run,
    remove_unfinished,
    replace_text,
)
from rlsdk.runlog.metrics import METRICS, garbled_lines, lines_up_to
from rlsdk.runlog.report import SUMMARY
from rlsdk.runlog.store import DATABASE, damage_of, set_aside

TEMPLATE = "chat_template.jinja"
"""File with the text of a chat template from a file, below the code that a run keeps."""


@attrs.frozen
class Prepared:
    """A run folder that is ready for use.

    Attributes:
        step: Step to resume from; None for a new run.
        notices: Log lines on what has changed since the last start and how it was handled.
        keep_changes: Writes a changed configuration into the folder, and returns log lines. It is called once the
            checkpoint is loaded, since learner ranks may refuse the change.
        data: Fingerprints of the local files of the run's tasks; large files take time to read.
    """

    step: int | None
    notices: tuple[str, ...] = ()
    keep_changes: Callable[[], list[str]] = attrs.field(default=list, eq=False)
    data: Mapping[str, str] = attrs.field(factory=dict, eq=False)


def check_resumed(config: Source, overrides: Sequence[str], files: Sequence[str | Path]) -> Plan:
    """Check the configuration of a run to resume; errors name plugin files that the run had and the command lacks.

    Raises:
        ConfigError: Lists every fault; missing plugin files come first, since they may explain the others.
    """
    try:
        return check(config, overrides, files)
    except ConfigError as error:
        tree, _ = read(config, overrides)
        given = [str(file) for file in [*files, *(normalise(tree).get("plugins") or [])]]
        folder = Path(str(tree.get("out", "runs"))) / str(tree.get("name"))
        missing = [each for name, each in kept_files(folder).items() if name not in {Path(f).stem for f in given}]
        raise ConfigError([*(f"plugins: {left_out(file)}" for file in missing), *error.faults]) from error


def finished_before(plan: Plan, resume: bool | int, steps: int) -> dict[str, Any] | None:
    """Return the summary of a run that had trained all its steps before it is resumed.

    None if anything is left to do, or if other settings are given, with which the run would not have ended like this.

    Raises:
        ConfigError: The checkpoint to continue from is of a later step than the last one.
        CheckpointError: Every checkpoint is damaged.
    """
    checkpoints = Checkpoints(plan.folder, plan.config.checkpoint.keep)
    done = None if resume is False else checkpoints.latest() if resume is True else resume
    if done is not None and done >= steps and resume is True:
        done, _ = checkpoints.newest_whole()
    if done is None or done < steps:
        return None
    if done > steps:
        setting = "steps" if plan.config.steps is not None else "epochs"
        earlier = [step for step in checkpoints.steps() if step < steps]
        others = f" (there are checkpoints of: {', '.join(map(str, earlier))})" if earlier else ""
        fault = (
            f"{setting}: {counted(steps, 'step')} given, but {plan.folder} has a checkpoint of step {done}: nothing is "
            f"left to train; give more than {done} steps, continue from an earlier checkpoint with "
            f"--resume=STEP{others}, or choose another name=…"
        )
        raise ConfigError([fault])
    try:
        summary: dict[str, Any] = json.loads((plan.folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it was killed before it wrote one
        return None
    ended = isinstance(resume, bool) and (summary.get("status"), summary.get("steps")) == ("finished", done)
    if ended and (plan.folder / KEPT).exists() and not all(each.harmless for each in differences(plan)):
        return None  # the run is refused, or continued, as one that changes in the middle
    return summary if ended else None


def prepare_folder(
    plan: Plan, checkpoints: Checkpoints, *, resume: bool | int, overwrite: bool, allow_changes: bool
) -> Prepared:
    """Create a run's folder, or find the checkpoint to resume from; the options are those of `rlsdk.train`.

    Raises:
        ConfigError: The folder holds a run with finished steps, or the run to resume had different settings.
        PluginError: The code of a plugin differs from the checkpoint's.
        CheckpointError: The requested checkpoint, or every checkpoint, is unusable.
    """
    folder, resumes = plan.folder, resume is not False
    finish_removal(folder)
    if overwrite and not resumes:
        remove_run(folder)
    used = (folder / KEPT).exists()
    trained = used and _has_trained(folder)
    _check_free(folder, used=used, trained=trained and not resumes)
    found = differences(plan) if used else []
    grave = [each for each in found if not each.harmless]
    if grave and trained and not allow_changes:
        raise ConfigError([_refusal(folder, grave, [each for each in found if each.harmless])])
    notices = [f"changed since the run was last started: {each}" for each in found]
    if used and not trained:
        notices.insert(0, f"the earlier run in {folder} did not finish a step; it starts again from the beginning")
    if resumes:
        notices += [
            f"the run was killed while it replaced the checkpoint of step {step}: the earlier one of that step is kept"
            for step in checkpoints.recover()
        ]
    step, newer = _chosen(checkpoints, resume) if resumes else (None, {})
    replaced: Sequence[str] = ()
    data = data_fingerprints(plan)
    if step is not None:
        replaced, changed_since = _compare_checkpoint(plan, checkpoints, step, data, allow_changes=allow_changes)
        notices += changed_since
        if not used:
            notices.append(f"the run's folder has no {KEPT}: the settings are not compared with the previous ones")
    mark(folder)
    notices += _set_aside_newer(checkpoints, newer)
    if newer:
        which = ", the newest intact one" if isinstance(resume, bool) else ""
        notices.append(f"the run continues from the checkpoint of step {step}{which}")
    remove_compiled(folder)
    for each in (folder, folder / CODE):
        remove_unfinished(each)
    if resumes:
        notices += [*_unreadable(plan, step), *_run_code(plan)]
    (folder / "logs").mkdir(exist_ok=True)
    changed = used and bool(found or replaced)
    keep = partial(_keep_config, plan, changed=changed, new=not used, step=step or 0)
    if changed and step is not None:
        return Prepared(step, tuple(notices), keep, data=data)
    return Prepared(step, (*notices, *keep()), data=data)


def _compare_checkpoint(
    plan: Plan, checkpoints: Checkpoints, step: int, data: Mapping[str, str], *, allow_changes: bool
) -> tuple[list[str], list[str]]:
    """Compare ranks, base models, data files and plugin code with those at a checkpoint, before anything is changed.

    Returns:
        The code that the plan replaces, and log lines on accepted changes.

    Raises:
        ConfigError: The learner cannot load the checkpoint, or a base model or a data file has changed.
        PluginError: The code of a plugin has changed.
    """
    _require_loadable(plan, step, checkpoints.path(step) / LEARNER)
    state = checkpoints.read(step)
    models, files = changed_models(plan, state.get("models")), changed_data(plan, data, state.get("data"))
    changed = {**models, **files}
    if changed and not allow_changes:
        paths = {setting: getattr(plan.config.model, setting.removeprefix("model.")) for setting in models}
        refused = {**{setting: f"{what} in {paths[setting]}" for setting, what in models.items()}, **files}
        raise ConfigError([_content_refusal(plan, step, setting, what) for setting, what in refused.items()])
    notices = [f"{setting}: {what} differ from those at step {step}" for setting, what in changed.items()]
    replaced = replaced_code(plan, state["plugins"])
    return replaced, notices + check_code(plan, state["plugins"], replaced, allow_changes=allow_changes)


def _check_free(folder: Path, *, used: bool, trained: bool) -> None:
    """Refuse a folder that holds what a run would delete: a run that has `trained`, or files of something else."""
    if trained:
        ways = (
            "continue it with --resume, delete it with --overwrite (in Python: resume=True, overwrite=True), or choose "
            "another name=…"
        )
        raise ConfigError([f"name: {folder} already holds a run; {ways}"])
    if not used and is_foreign(folder):
        raise ConfigError([f"name: {folder} contains files that are not a run of rlsdk; choose another name=…"])


def _has_trained(folder: Path) -> bool:
    """Return whether starting again in a run's folder would lose a finished step, a checkpoint or annotations."""
    if any((folder / "checkpoints").glob("*")) or (folder / ANNOTATIONS).exists():
        return True
    path = folder / METRICS
    return any(json.loads(line)["step"] > 0 for line in lines_up_to(path, sys.maxsize)) or bool(garbled_lines(path))


def _require_loadable(plan: Plan, step: int, folder: Path) -> None:
    """Raise before anything is changed or started if a learner cannot load what different ranks or options wrote."""
    config, faults = plan.config, []
    learners = [("learner", "placement.learners", config.placement.learners, plan.learner, folder)]
    if "critic" in plan.apart:
        learners.append(("critic", "critic.ranks", config.critic.ranks, plan.apart["critic"], folder / "apart"))
    for path, setting, ranks, learner, written in learners:
        before = ranks_of(written)
        reshards = getattr(plan.plugins.component(learner).obj, "reshards", True)  # unknown of another base class
        if before not in (None, ranks) and not reshards:
            faults.append(
                f"{setting}: the checkpoint of step {step} was written by {counted(before, 'rank')}; the learner "
                f"{short_name(learner.name)} loads it only with as many, got {ranks}; set {setting}={before}, or start "
                "another run with name=…"
            )
        facts = getattr(plan.plugins.resolve(learner), "option_facts", {})
        if fault := find_other_settings(written, facts):
            faults.append(f"{path}: {fault}")
    if faults:
        raise ConfigError(faults)


def _keep_config(plan: Plan, *, changed: bool, new: bool, step: int) -> list[str]:
    """Write the configuration and the code of a run's marked objects into its folder; return notices.

    If the configuration has `changed`, the previous one is kept alongside. The folder may have none yet (`new`).
    """
    folder, notices = plan.folder, []
    if changed:
        names = (f"config.step-{step}{f'-{again}' if again > 1 else ''}.yaml" for again in itertools.count(1))
        aside = next(folder / name for name in names if not (folder / name).exists())
        replace_text(aside, (folder / KEPT).read_text(encoding="utf-8"))
        notices.append(f"the previous configuration is kept as {aside.name}")
        (folder / SUMMARY).unlink(missing_ok=True)  # of the previous configuration
    kept = kept_config(plan)
    for name, text in kept.files.items():
        (folder / CODE).mkdir(exist_ok=True)
        replace_text(folder / CODE / f"{name}.py", text)
    if plan.chat_template is not None:
        _keep_template(folder / CODE / TEMPLATE, plan.chat_template, step)
    if changed or new:
        replace_text(folder / KEPT, _kept_text(plan, kept))
    notices += [
        f"the source of {each} cannot be kept, since it is not defined at the top level of a file or notebook cell: "
        "rlsdk eval, rlsdk explain and --resume on the command line will not find it"
        for each in kept.lost
    ]
    return notices


def _keep_template(path: Path, text: str, step: int) -> None:
    """Write the text of a chat template from a file, and keep the one before under the step until which it was used."""
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        if path.read_bytes() == text.encode():
            return
        path.replace(path.with_name(f"{path.stem}.step-{step}{path.suffix}"))
    with naming(path):
        path.write_bytes(text.encode())


def _chosen(checkpoints: Checkpoints, resume: bool | int) -> tuple[int | None, dict[int, str]]:
    """Return the step to resume from, and newer steps mapped to their faults; an intact one has an empty fault."""
    if isinstance(resume, bool):
        return checkpoints.newest_whole()
    checkpoints.require(resume)
    return resume, {later: "" for later in checkpoints.steps() if later > resume}


def _set_aside_newer(checkpoints: Checkpoints, newer: Mapping[int, str]) -> list[str]:
    """Rename the checkpoints after the one to resume from, given with their faults; return log lines."""
    notices = []
    for later, fault in newer.items():
        aside = checkpoints.set_aside(later, "damaged" if fault else "superseded")
        notices.append(f"{fault or f'the checkpoint of step {later} is superseded'}; it is kept as {aside.name}")
    return notices


def _run_code(plan: Plan) -> list[str]:
    """Return log lines that name the code files that this run executes, from the command and the configuration."""
    files = {Path(file).stem: file for file in plan.plugins.files}
    return [
        f"this run executes {f'the plugin file {files[name]}' if name in files else name}, source {mark['source'][:16]}"
        for name, mark in plan.code.items()
        if name in files or not (mark["distribution"] or name.endswith("(object)"))
    ]


def _unreadable(plan: Plan, step: int | None) -> list[str]:
    """Set a damaged rollout database aside; return log lines on it and on garbled or lost lines of metrics."""
    path = plan.folder / METRICS
    notices = [f"{fault}; the line is skipped" for fault in garbled_lines(path)]
    if step and path.is_file() and all(json.loads(line)["step"] != step for line in lines_up_to(path, step)):
        notices.append(f"{path} has no line of step {step}, although its checkpoint is intact: the metrics are lost")
    if plan.config.save_rollouts and plan.config.rollout.storage.url is None:
        file = plan.folder / DATABASE
        if fault := damage_of(file):
            aside = set_aside(file)
            lost = "waiting groups will be sampled again, and earlier ones cannot be trained again"
            notices.append(
                f"{file} cannot be read ({fault}); it is kept as {aside.name} and a new one is started: {lost}"
            )
    return notices


def _refusal(folder: Path, grave: Sequence[Difference], harmless: Sequence[Difference]) -> str:
    lines = [f"name: the run in {folder} was started with different settings; resuming it would mix two training runs:"]
    lines += [f"      {each}" for each in grave]
    if harmless:
        lines += ["    also changed, but harmless:", *(f"      {each}" for each in harmless)]
    ways = (
        "accept them with --allow-changes (in Python: allow_changes=True), restore the old values, or start another "
        "run with name=…"
    )
    return "\n".join([*lines, f"    {ways}"])


def _content_refusal(plan: Plan, step: int, setting: str, what: str) -> str:
    return (
        f"{setting}: {what} differ from those that the run in {plan.folder} had loaded at the checkpoint of "
        f"step {step}; restore them, accept the change with --allow-changes (in Python: allow_changes=True), or start "
        "another run with name=…"
    )


def _kept_text(plan: Plan, kept: KeptConfig) -> str:
    """Return the configuration as YAML, after comments with each plugin's code fingerprint and the working folder."""
    files = {Path(file).stem: file for file in plan.plugins.files} | {name: f"{CODE}/{name}.py" for name in kept.files}
    marks = {
        name: f"file {files[name]}, source {mark['source']}" if name in files else " ".join(filter(None, mark.values()))
        for name, mark in plan.code.items()
    }
    head = "".join(f"# plugin {name}: {mark}\n" for name, mark in marks.items())
    return head + working_folder_note(plan.folder) + yaml.safe_dump(kept.tree, sort_keys=False, allow_unicode=True)
