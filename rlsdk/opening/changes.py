"""Compare the settings and the code of a resumed run with those it was started with."""

from __future__ import annotations

import contextlib
import filecmp
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml

from rlsdk.config import Plan, check
from rlsdk.config.kept import CODE, kept_config, names_only, plugin_files
from rlsdk.config.paths import WRITTEN, absolute_paths, noted_folder
from rlsdk.config.tree import current, leaves, plain, spelled_out
from rlsdk.errors import ConfigError, PluginError, RlsdkError
from rlsdk.plugins import CORE, ComponentRef, short_name
from rlsdk.readiness.base_models import contents
from rlsdk.schedules import EntropyTarget

KEPT = "config.yaml"
"""File in a run's folder that holds its configuration."""
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
    "profile",
)
"""Settings and sections that do not affect the training; a resumed run may change them freely."""
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
"""Settings and sections whose values do not name code."""


@attrs.frozen
class Difference:
    """A setting that differs in a resumed run."""

    path: str
    was: str
    now: str

    @property
    def harmless(self) -> bool:
        """True if the setting does not affect the training."""
        return any(self.path == known or self.path.startswith((f"{known}.", f"{known}[")) for known in HARMLESS)

    def __str__(self) -> str:
        return f"{self.path}: was {self.was}, is {self.now}"


def differences(plan: Plan) -> list[Difference]:
    """Compare a plan with the configuration in its folder, setting by setting, defaults included.

    Checking the stored configuration fills in its defaults, but imports the code that it names. If that might run code
    that the plan does not name, the raw values are compared instead.

    Raises:
        ConfigError: The file in the folder contains no configuration.
    """
    kept, started = None, None
    with contextlib.suppress(yaml.YAMLError, UnicodeDecodeError):
        text = (plan.folder / KEPT).read_text(encoding="utf-8")
        kept, started = yaml.safe_load(text), noted_folder(text, plan.folder)
    if not isinstance(kept, dict):
        remedy = "restore it from a copy, or delete it to resume without a comparison of the settings"
        raise ConfigError([f"name: {plan.folder / KEPT} is damaged: it contains no configuration; {remedy}"])
    kept, given = current(kept), kept_config(plan).tree
    files: list[str | Path] = [*plan.plugins.files, *_own_code(plan)]
    for tree in (kept, given):
        tree.pop("plugins", None)  # they only observe; their code is compared with the checkpoint's
    then, now = dict(leaves(spelled_out(kept))), dict(leaves(spelled_out(given)))
    if names_only(kept, given, _PLAIN):
        # Removed components and decorated objects cannot be checked; the raw values are compared then.
        with contextlib.suppress(RlsdkError):
            then, now = settings_of(check(kept, (), files)), settings_of(plan)
    old, new = {path: _shown(v) for path, v in then.items()}, {path: _shown(v) for path, v in now.items()}
    old_paths, new_paths = absolute_paths(old, started), absolute_paths(new, started and Path.cwd())
    found, none = [], "nothing"
    for path in dict.fromkeys([*new, *old]):
        was, now_is = old.get(path, none), new.get(path, none)
        meant = old_paths.get(path, none), new_paths.get(path, none)
        if was == now_is and path not in WRITTEN and _differ(*meant):
            found.append(Difference(path, *meant))
        elif was != now_is and meant[0] != meant[1]:
            found.append(Difference(path, was, now_is))
    return found


def _differ(old: str, new: str) -> bool:
    """Return whether two texts name files, or folders of files, with different content."""
    if old == new:
        return False
    if os.path.isfile(old) and os.path.isfile(new):
        return not filecmp.cmp(old, new, shallow=False)
    return os.path.isdir(old) and os.path.isdir(new) and contents(Path(old)) != contents(Path(new))


def kept_files(folder: Path) -> dict[str, str]:
    """Name -> path of each plugin file that the run in a folder was last started with."""
    try:
        text = (folder / KEPT).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    return plugin_files(text)


def left_out(file: str) -> str:
    """Return the fault that a command lacks a plugin file of the run."""
    return f"the run was started with the plugin file {file}, which this command lacks; add --plugin {file}"


def replaced_code(plan: Plan, then: Mapping[str, Any]) -> list[str]:
    """Describe the code that has another version or source than at the checkpoint, except rlsdk's own."""
    now = plan.code
    names = [name for name in sorted(({*then} & {*now}) - {CORE}) if then[name] != now[name]]
    # Objects, files of rewards and chat templates have several words.
    whats = {name: name if " " in name else f"plugin {name}" for name in names}
    return [f"{what} was {_mark(then[name])}, is {_mark(now[name])}" for name, what in whats.items()]


def check_code(plan: Plan, then: Mapping[str, Any], replaced: Sequence[str], *, allow_changes: bool) -> list[str]:
    """Reject code that differs from the checkpoint's; return log lines on allowed differences."""
    now, files = plan.code, kept_files(plan.folder)
    notices = list(replaced) if allow_changes else []
    wrong = [] if allow_changes else list(replaced)
    for name in sorted(({*then} ^ {*now}) - {CORE}):
        code, others = (now[name], then) if name in now else (then[name], now)
        if " " in name and code in others.values():
            continue  # the same file, named from another folder; a different function in it is a changed setting
        if allow_changes:
            notices.append(f"plugin {name} is {'new' if name in now else 'left out'}")
        elif name in now:
            wrong.append(f"plugin {name} ({_mark(code)}) is new; leave it out, or pass --allow-changes")
        elif name in files:
            wrong.append(left_out(files[name]))
        else:
            wrong.append(f"plugin {name} ({_mark(code)}) is left out; name it under `plugins:`")
    if wrong:
        raise PluginError(
            "\n".join(
                [
                    f"the run in {plan.folder} cannot be resumed, because its code has changed since the checkpoint:",
                    *(f"  - {each}" for each in wrong),
                    "restore that code, accept the changes with --allow-changes (in Python: allow_changes=True), or "
                    "start another run with name=…",
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


def _own_code(plan: Plan) -> list[Path]:
    """Return the files in a run's folder with the sources of objects that were passed to the plan.

    A file counts only if its text equals the object's source, so that nothing else in the folder is executed.
    """
    given = {plan.folder / CODE / f"{name}.py": text for name, text in plan.plugins.kept_sources().items()}
    return [file for file, text in given.items() if file.is_file() and file.read_text(encoding="utf-8") == text]


def _shown(value: Any) -> str:
    """Format a value for a message; omits the address of an object, which differs in every process."""
    if isinstance(value, str):
        return re.sub(r" at 0x[0-9a-f]+", "", value) or "''"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings_of(plan: Plan) -> dict[str, Any]:
    """Return every setting of a plan by its path, defaults included."""

    def of(reference: ComponentRef | None) -> Any:
        if reference is None:
            return None
        if reference.parts:
            return [of(part) for part in reference.parts]
        component = plan.plugins.component(reference)
        options = {o.name: o.default for o in component.options if not o.required} | dict(reference.options)
        named = {
            name: of(plan.plugins.reference(kind, use.name, use.options))
            for name, kind, use in component.named_by(options)
        }
        return {"use": short_name(reference.name), **options, **named}

    tree = attrs.asdict(plan.config)
    tree |= {"workflow": of(plan.workflow), "engine": of(plan.engine), "learner": of(plan.learner)}
    tree["rollout"] |= {"sampler": of(plan.sampler), "buffer": of(plan.buffer), "stop": of(plan.stop)}
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
        **{name: str(each) for name, each in plan.schedules.items() if "." not in name},
        **({"entropy_coef": str(loss.entropy_coef)} if isinstance(loss.entropy_coef, EntropyTarget) else {}),
        **{name: of(part) for name, part in parts.items()},
        **{name: [of(part) for part in some] for name, some in lists.items()},
    }
    del tree["plugins"]  # they only observe; their code is compared with the checkpoint's
    return dict(leaves(_alone(_plain(tree))))


def _plain(value: Any) -> Any:
    """Convert to plain values; option classes become mappings."""
    if attrs.has(type(value)):
        return _plain(attrs.asdict(value))
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else plain(value)


def _alone(value: Any) -> Any:
    """Replace a list of one component by the component, so that its path has no index."""
    if isinstance(value, Mapping):
        return {k: _alone(v) for k, v in value.items()}
    if isinstance(value, list):
        items = [_alone(v) for v in value]
        return items[0] if len(items) == 1 and isinstance(items[0], Mapping) else items
    return value
