"""The folder of a run: created for a new one, compared with the configuration when a run is resumed."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml

from rlsdk.checkpoints.checkpoint import Checkpoints
from rlsdk.config import Plan, Source, check, read
from rlsdk.config.kept import CODE, KeptConfig, kept_config
from rlsdk.config.tree import normalise
from rlsdk.errors import ConfigError, PluginError
from rlsdk.plugins import CORE
from rlsdk.runlog.folder import is_foreign, mark, remove_run
from rlsdk.runlog.metrics import METRICS, garbled_lines
from rlsdk.runlog.store import DATABASE, damage_of, set_aside
from rlsdk.trainer.changes import KEPT, Difference, differences

COMPILED = "cache"
"""Folder of a run with programs that its actors compiled, which a resumed run must not reuse."""
_FILE = re.compile(r"^# plugin (\S+): file (.+), source (\w+)$", re.MULTILINE)


@attrs.frozen
class Prepared:
    """A run's folder that is ready.

    Attributes:
        step: Step to resume from; None for a new run.
        notices: Lines for the run's log: what differs from before, and how that was handled.
    """

    step: int | None
    notices: tuple[str, ...] = ()


def check_resumed(config: Source, overrides: Sequence[str], files: Sequence[str | Path]) -> Plan:
    """Check the configuration of a run to be resumed; a plugin file that the run had and that is missing is named.

    Args:
        config: A YAML file, an `rlsdk.Config` or a mapping.
        overrides: `key=value` texts.
        files: Files of plugins.

    Raises:
        ConfigError: With every fault; first the missing plugin files, which may explain the others.
    """
    try:
        return check(config, overrides, files)
    except ConfigError as error:
        tree, _ = read(config, overrides)
        given = [str(file) for file in [*files, *(normalise(tree).get("plugins") or [])]]
        folder = Path(str(tree.get("out", "runs"))) / str(tree.get("name"))
        missing = [each for name, each in kept_files(folder).items() if name not in {Path(f).stem for f in given}]
        raise ConfigError([*(f"plugins: {_left_out(file)}" for file in missing), *error.faults]) from error


def kept_files(folder: Path) -> dict[str, str]:
    """Name -> path of each plugin file that the run in a folder was last started with."""
    try:
        text = (folder / KEPT).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    return {name: file for name, file, _ in _FILE.findall(text)}


def _left_out(file: str) -> str:
    return f"the run was started with the plugin file {file}, which this command lacks; add --plugin {file}"


def prepare_folder(
    plan: Plan, checkpoints: Checkpoints, *, resume: bool | int, overwrite: bool, allow_changes: bool
) -> Prepared:
    """Create a run's folder, or find the checkpoint from which it is resumed.

    Args:
        plan: The plan.
        checkpoints: Checkpoints in the folder.
        resume: Continue from the newest whole checkpoint, or from that of this step; newer ones are set aside.
        overwrite: Delete what is there.
        allow_changes: Resume although settings differ that change the meaning of the run.

    Raises:
        ConfigError: The folder holds a run already, or the run to be resumed was another training.
        PluginError: The code of a plugin differs from the checkpoint's.
        CheckpointError: No checkpoint can be resumed from although there are some, or not the requested one.
    """
    folder, resumes = plan.folder, resume is not False
    if overwrite and not resumes:
        remove_run(folder)
    used = (folder / KEPT).exists()
    if used and not resumes:
        ways = (
            "continue it with --resume, delete it with --overwrite (in Python: resume=True, overwrite=True), or choose "
            "another name=…"
        )
        raise ConfigError([f"name: {folder} already holds a run; {ways}"])
    if not used and is_foreign(folder):
        raise ConfigError([f"name: {folder} holds files, but not a run of rlsdk; choose another name=…"])
    found = differences(plan) if used else []
    grave = [each for each in found if not each.harmless]
    if grave and not allow_changes:
        raise ConfigError([_refusal(folder, grave, [each for each in found if each.harmless])])
    notices = [f"changed since the run was last started: {each}" for each in found]
    if resumes:
        notices += [
            f"the run was killed while the checkpoint of step {step} was replaced: the earlier one of that step is kept"
            for step in checkpoints.recover()
        ]
    step, newer = _chosen(checkpoints, resume) if resumes else (None, {})
    if step is not None:
        notices += _same_code(plan, checkpoints.read(step)["plugins"], allow_changes=allow_changes)
    mark(folder)
    for later, fault in newer.items():
        aside = checkpoints.set_aside(later, "damaged" if fault else "superseded")
        notices.append(f"{fault or f'the checkpoint of step {later} is superseded'}; it is kept as {aside.name}")
    if newer:
        which = ", the newest intact one" if isinstance(resume, bool) else ""
        notices.append(f"the run continues from the checkpoint of step {step}{which}")
    if resumes:
        _remove_compiled(folder)
        notices += [*_unreadable(plan), *_run_code(plan)]
    (folder / "logs").mkdir(exist_ok=True)
    notices += _keep_config(plan, changed=bool(found), new=not used, step=step or 0)
    return Prepared(step, tuple(notices))


def _keep_config(plan: Plan, *, changed: bool, new: bool, step: int) -> list[str]:
    """Write the configuration and the code of a run's marked objects into its folder; return notices.

    Args:
        plan: The plan.
        changed: The folder's configuration is another one, which is kept beside the new one.
        new: The folder has no configuration.
        step: Step from which the run continues.
    """
    folder, notices = plan.folder, []
    if changed:
        names = (f"config.step-{step}{f'-{again}' if again > 1 else ''}.yaml" for again in itertools.count(1))
        aside = next(folder / name for name in names if not (folder / name).exists())
        shutil.copyfile(folder / KEPT, aside)
        notices.append(f"the previous configuration is kept as {aside.name}")
    kept = kept_config(plan)
    for name, text in kept.files.items():
        (folder / CODE).mkdir(exist_ok=True)
        (folder / CODE / f"{name}.py").write_text(text, encoding="utf-8")
    if changed or new:
        partial = folder / f".{KEPT}.partial"
        partial.write_text(_kept_text(plan, kept), encoding="utf-8")
        partial.replace(folder / KEPT)  # a run that is killed here has one of the two, and whole
    notices += [
        f"the source of {each} cannot be kept, since it is not defined at the top of a file or a notebook's cell: "
        "rlsdk eval, rlsdk explain and --resume on the command line will not find it"
        for each in kept.lost
    ]
    return notices


def _chosen(checkpoints: Checkpoints, resume: bool | int) -> tuple[int | None, dict[int, str]]:
    """Return the step to resume from, and the newer ones with the fault of each; empty if it is only newer."""
    if isinstance(resume, bool):
        return checkpoints.newest_whole()
    checkpoints.require(resume)
    return resume, {later: "" for later in checkpoints.steps() if later > resume}


def _remove_compiled(folder: Path) -> None:
    """Delete compiled programs, so that actors do not run those of a folder that may be somebody else's."""
    compiled = folder / COMPILED
    if compiled.is_symlink():
        compiled.unlink()
    elif compiled.exists():
        shutil.rmtree(compiled)


def _run_code(plan: Plan) -> list[str]:
    """Return lines that name the files of code that this run executes, as command and configuration give them."""
    files = {Path(file).stem: file for file in plan.plugins.files}
    return [
        f"this run executes {f'the plugin file {files[name]}' if name in files else name}, source {mark['source'][:16]}"
        for name, mark in plan.code.items()
        if name in files or not (mark["distribution"] or name.endswith("(object)"))
    ]


def _unreadable(plan: Plan) -> list[str]:
    """Set a damaged database of rollouts aside; returns log lines about it and about garbled lines of metrics."""
    notices = [f"{fault}; the line is skipped" for fault in garbled_lines(plan.folder / METRICS)]
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
    lines = [f"name: the run in {folder} was started with other settings; to resume it would mix two trainings:"]
    lines += [f"      {each}" for each in grave]
    if harmless:
        lines += ["    also changed, but harmless:", *(f"      {each}" for each in harmless)]
    ways = (
        "accept them with --allow-changes (in Python: allow_changes=True), restore the old values, or start another "
        "run with name=…"
    )
    return "\n".join([*lines, f"    {ways}"])


def _kept_text(plan: Plan, kept: KeptConfig) -> str:
    """Return the configuration as YAML, with each plugin's code fingerprint as a comment before it."""
    files = {Path(file).stem: file for file in plan.plugins.files} | {name: f"{CODE}/{name}.py" for name in kept.files}
    marks = {
        name: f"file {files[name]}, source {mark['source']}" if name in files else " ".join(filter(None, mark.values()))
        for name, mark in plan.code.items()
    }
    head = "".join(f"# plugin {name}: {mark}\n" for name, mark in marks.items())
    return head + yaml.safe_dump(kept.tree, sort_keys=False, allow_unicode=True)


def _same_code(plan: Plan, then: Mapping[str, Any], *, allow_changes: bool) -> list[str]:
    """Refuse code that differs from the checkpoint's; returns log lines where it may differ."""
    now, files = plan.code, kept_files(plan.folder)
    wrong, notices = [], []
    for name in sorted({*then, *now} - {CORE}):
        if then.get(name) == now.get(name):
            continue
        if name in then and name in now:
            wrong.append(f"plugin {name} was {_mark(then[name])}, is {_mark(now[name])}")
        elif allow_changes:
            notices.append(f"plugin {name} is {'new' if name in now else 'left out'}")
        elif name in now:
            wrong.append(f"plugin {name} ({_mark(now[name])}) was not there; leave it out, or give --allow-changes")
        elif name in files:
            wrong.append(_left_out(files[name]))
        else:
            wrong.append(f"plugin {name} ({_mark(then[name])}) is left out; name it under `plugins:`")
    if wrong:
        raise PluginError(
            "\n".join(
                [
                    f"the run in {plan.folder} cannot be resumed, because its code has changed since the checkpoint:",
                    *(f"  - {each}" for each in wrong),
                    "restore that code, or start another run with name=…",
                ]
            )
        )
    if then.get(CORE) != now.get(CORE):
        notices.append(f"the checkpoint was made by {_mark(then.get(CORE) or {})}; this is {_mark(now[CORE])}")
    return notices


def _mark(mark: Mapping[str, str]) -> str:
    """Describe a code fingerprint in words."""
    origin = f"{mark.get('distribution', '')} {mark.get('version', '')}".strip()
    return f"{origin}, source {mark.get('source', '')[:12]}".lstrip(", ")
