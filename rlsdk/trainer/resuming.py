"""The folder of a run: created for a new one, compared with the configuration when a run is resumed."""

from __future__ import annotations

import contextlib
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
from rlsdk.config.named_code import names_only
from rlsdk.config.renamed import current
from rlsdk.config.schema import normalise
from rlsdk.config.tree import leaves, plain
from rlsdk.errors import ConfigError, PluginError, RlsdkError
from rlsdk.plugins import CORE, ComponentRef, short_name
from rlsdk.runlog.folder import is_foreign, mark, remove_run
from rlsdk.runlog.metrics import METRICS, garbled_lines
from rlsdk.runlog.store import DATABASE, damage_of, set_aside

KEPT = "config.yaml"
HARMLESS = (
    "name",
    "out",
    "mirror",
    "log_level",
    "steps",
    "epochs",
    "trackers",
    "diagnoses",
    "placement",
    "critic.threads",
    "critic.resources",
    "reference.ranks",
    "reference.threads",
    "reference.resources",
    "checkpoint",
    "save_rollouts",
    "rollout.workers",
    "rollout.storage",
    "rollout.pause_timeout",
    "scoring.workers",
    "environments.workers",
    "environments.per_worker",
    "environments.threads",
    "eval.every",
    "eval.before",
    "eval.after",
    "eval.environments",
    "watchdog",
)
"""Settings, or sections, that leave the training itself unchanged: a resumed run may change them without asking."""
_PLAIN = (
    "name",
    "out",
    "log_level",
    "model.path",
    "model.tokenizer",
    "model.reference",
    "model.critic",
    "placement",
    "checkpoint",
)
"""Settings, or sections, whose text does not name code."""
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


@attrs.frozen
class Difference:
    """A setting that differs in a resumed run."""

    path: str
    was: str
    now: str

    @property
    def harmless(self) -> bool:
        """True if the run stays the same training."""
        return any(self.path == known or self.path.startswith((f"{known}.", f"{known}[")) for known in HARMLESS)

    def __str__(self) -> str:
        return f"{self.path}: was {self.was}, is {self.now}"


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
        ways = "continue it with --resume, delete it with --overwrite, or choose another name=…"
        raise ConfigError([f"name: {folder} already holds a run; {ways}"])
    if not used and is_foreign(folder):
        raise ConfigError([f"name: {folder} holds files, but not a run of rlsdk; choose another name=…"])
    found = differences(plan) if used else []
    grave = [each for each in found if not each.harmless]
    if grave and not allow_changes:
        raise ConfigError([_refusal(folder, grave, [each for each in found if each.harmless])])
    notices = [f"changed since the run was last started: {each}" for each in found]
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
    ways = "accept them with --allow-changes, restore the old values, or start another run with name=…"
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


def differences(plan: Plan) -> list[Difference]:
    """Compare a plan with the configuration that its folder keeps, setting by setting, defaults included.

    Defaults are filled in by checking the stored configuration, which imports the code it names. Where that might run
    code that the plan does not name, the text is compared.
    """
    kept = yaml.safe_load((plan.folder / KEPT).read_text(encoding="utf-8")) or {}
    if not isinstance(kept, dict):
        raise ConfigError([f"name: {plan.folder / KEPT} is not the configuration of a run; restore it from a copy"])
    kept, given = current(kept), kept_config(plan).tree
    files: list[str | Path] = [*plan.plugins.files, *_own_code(plan)]
    for tree in (kept, given):
        tree.pop("plugins", None)  # they only observe; their code is compared with the checkpoint's
    then, now = dict(leaves(normalise(kept))), dict(leaves(given))
    if names_only(kept, given, _PLAIN):
        # What is gone, or a marked object, cannot be checked: then what is written is compared.
        with contextlib.suppress(RlsdkError):
            then, now = settings_of(check(kept, (), files)), settings_of(plan)
    old, new = {path: _shown(v) for path, v in then.items()}, {path: _shown(v) for path, v in now.items()}
    paths = dict.fromkeys([*new, *old])
    none = "nothing"
    return [
        Difference(path, old.get(path, none), new.get(path, none))
        for path in paths
        if old.get(path, none) != new.get(path, none)
    ]


def _own_code(plan: Plan) -> list[Path]:
    """Return the files of a run's folder that hold the sources of objects which the plan was given.

    A file counts only with the very text of the plan's objects, so that nothing else in the folder is executed.
    """
    given = {plan.folder / CODE / f"{name}.py": text for name, text in plan.plugins.kept_sources().items()}
    return [file for file, text in given.items() if file.is_file() and file.read_text(encoding="utf-8") == text]


def _shown(value: Any) -> str:
    """Write a value as a person would; an object without its address, which differs in every process."""
    if isinstance(value, str):
        return re.sub(r" at 0x[0-9a-f]+", "", value) or "''"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings_of(plan: Plan) -> dict[str, Any]:
    """Every setting of a plan by its path; what a configuration leaves out has its default."""

    def of(reference: ComponentRef | None) -> dict[str, Any] | None:
        if reference is None:
            return None
        options = {o.name: o.default for o in plan.plugins.component(reference).options if not o.required}
        return {"use": short_name(reference.name), **options, **reference.options}

    tree = attrs.asdict(plan.config)
    tree |= {"workflow": of(plan.workflow), "engine": of(plan.engine), "learner": of(plan.learner)}
    tree["rollout"] |= {"buffer": of(plan.buffer), "stop": of(plan.stop)}
    tree["trackers"] = [of(tracker) for tracker in plan.trackers]
    tree["tasks"] = {
        key: [{**(of(s.reference) or {}), "source": s.name, "weight": s.weight} for s in sources]
        for key, sources in (("train", plan.tasks_train), ("eval", plan.tasks_eval))
    }
    tree["reward"] = [{**(of(part.reference) or {}), **attrs.asdict(part.rule)} for part in plan.rewards]
    loss = plan.loss
    parts = {"advantage": plan.advantage, "policy_loss": loss.policy_loss, "correction": loss.correction, "kl": loss.kl}
    lists = {"shaping": plan.shaping, "filters": plan.filters}
    tree["algorithm"] = {
        "use": short_name(plan.plugins.reference("algorithm", plan.config.algorithm.name).name),
        **attrs.asdict(plan.algorithm),  # type: ignore[arg-type]
        **{name: of(part) for name, part in parts.items()},
        **{name: [of(part) for part in some] for name, some in lists.items()},
    }
    del tree["plugins"]  # they only observe; their code is compared with the checkpoint's
    return dict(leaves(_alone(_plain(tree))))


def _plain(value: Any) -> Any:
    """Convert to plain values; classes of options become mappings."""
    if attrs.has(type(value)):
        return _plain(attrs.asdict(value))
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else plain(value)


def _alone(value: Any) -> Any:
    """Write a list of one component without its index."""
    if isinstance(value, Mapping):
        return {k: _alone(v) for k, v in value.items()}
    if isinstance(value, list):
        items = [_alone(v) for v in value]
        return items[0] if len(items) == 1 and isinstance(items[0], Mapping) else items
    return value


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
