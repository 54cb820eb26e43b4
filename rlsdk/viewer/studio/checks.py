"""Check configurations in a separate process, which imports the current plugins and can be killed.

It also describes the form: every configuration key and every option of the installed components, as plain values.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import attrs

from rlsdk.components import Use
from rlsdk.config.reference import ConfigKey, of_component, settings
from rlsdk.config.schema import LISTS
from rlsdk.errors import EnvironmentFault, PluginError, RlsdkError
from rlsdk.isolation.fork_server import Fork, ForkServer, ForkServerError, Work
from rlsdk.isolation.framing import receive, send
from rlsdk.kinds import KINDS, PART_LISTS, Kind
from rlsdk.plugins import CORE, Plugins

SECONDS = 120.0
"""Time limit of a check in seconds."""
_ENDED = "the check's process died; see the terminal of `rlsdk view`"


class Checker:
    """Describe the form, and check configurations.

    The server itself imports neither torch nor plugins. A second process imports torch, and its fork the plugins; it
    answers requests until a plugin's file changes, and a new fork replaces it.
    """

    def __init__(self) -> None:
        self._forks = ForkServer("checks of the studio", prepare, None)
        self._fork: Fork | None = None
        self._turn = asyncio.Lock()

    async def form(self, listed: list[Any], file: str | None) -> dict[str, Any]:
        """Describe the form: see `form_of`."""
        return await self._ask({"form": {"listed": listed, "file": file}})

    async def check(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Apply edits to a configuration and check it.

        Args:
            request: `text`; `edits` from the form; `file`, to which paths are relative, or null.

        Returns:
            `text` and `tree` after the edits; `faults` and `warnings`; if there are no faults, `plan`, `defaults`,
            `name` and `folder` of the run, and whether it `exists`.
        """
        return await self._ask({"check": dict(request)})

    def close(self) -> None:
        """End the processes."""
        self._drop()
        self._forks.close()

    async def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the previous process or, if a plugin has changed since, a new one."""
        async with self._turn:
            used = self._fork is not None
            try:
                answer = await self._answer(question)
            except EOFError:
                if not used:
                    raise EnvironmentFault(_ENDED) from None
                try:
                    answer = await self._answer(question)
                except EOFError:
                    raise EnvironmentFault(_ENDED) from None
        if "error" in answer:
            raise EnvironmentFault(answer["error"])
        return answer

    async def _answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        whole = False
        try:
            self._fork = self._fork or await self._forks.fork()
            async with asyncio.timeout(SECONDS):
                answer: dict[str, Any] = json.loads(await self._fork.ask(json.dumps(question).encode()))
            whole = True
            return answer
        except ForkServerError as error:
            raise EnvironmentFault(str(error)) from error
        except TimeoutError as error:
            raise EnvironmentFault(
                f"the check took longer than {SECONDS:.0f} s and was killed; does a plugin or a file system hang?"
            ) from error
        finally:
            if not whole:  # also if the page was closed meanwhile
                self._drop()

    def _drop(self) -> None:
        if self._fork is not None:
            self._fork.kill()
        self._fork = None


def prepare(_: Any) -> Work:
    """Import the modules that all checks need, before the first fork."""
    from rlsdk.readiness import explained  # noqa: F401
    from rlsdk.viewer.studio import edits  # noqa: F401

    Plugins().components(CORE)
    with contextlib.suppress(ImportError, RlsdkError):  # a check reports what is missing
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401 - takes most of the time
    return _serve


def _serve(connection: socket.socket) -> None:
    """Answer requests until a plugin's file has changed."""
    sys.stdout = sys.stderr  # libraries print banners
    seen: dict[str, float] = {}
    while True:
        question = json.loads(receive(connection))
        if any(_changed(file) != changed for file, changed in seen.items()):
            return
        try:
            found = form_of(**question["form"]) if "form" in question else checked(question["check"])
        except RlsdkError as error:
            found = {"error": str(error)}
        seen = {file: _changed(file) for file in _sources()} | seen
        send(connection, json.dumps(found, default=str).encode())


def _sources() -> set[str]:
    """Return the files of imported modules that users may edit: those outside Python's own folders."""
    own = (sys.prefix, sys.base_prefix)
    files = {str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())}
    return {file for file in files if file.endswith(".py") and not file.startswith(own)}


def _changed(file: str) -> float:
    try:
        return os.stat(file).st_mtime
    except OSError:
        return 0.0


def checked(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run a check: see `Checker.check`."""
    from rlsdk.viewer.studio.edits import edited, pruned, read_text, write_text

    text, edits, file = str(request["text"]), request.get("edits") or (), request.get("file")
    tree, faults = read_text(text)
    if tree is None:
        return {"text": text, "tree": None, "faults": [attrs.asdict(each) for each in faults], "warnings": []}
    if edits:
        tree, faults = edited(tree, edits)
        tree = pruned(tree, form_of(tree.get("plugins"), file), sorted(_set_elsewhere(tree, file)))
        text = write_text(tree)
        tree, _ = read_text(text)
    wrong = {each.path for each in faults}
    found = _examined(tree or {}, file)
    listed = [*map(attrs.asdict, faults), *(each for each in found.pop("faults") if each["path"] not in wrong)]
    return {"text": text, "tree": tree, "faults": listed, **found}


def _plugin_files(listed: Any, file: str | None) -> list[str]:
    """Return the plugins that a configuration lists; those next to its file, as seen from the working folder."""
    from rlsdk.config.paths import resolve_paths

    names = [each for each in listed if isinstance(each, str)] if isinstance(listed, list) else []
    return list(resolve_paths({"plugins": names}, Path(file))["plugins"]) if file else names


def _set_elsewhere(tree: Mapping[str, Any], file: str | None) -> set[str]:
    """Return the keys whose defaults the configuration's algorithm sets."""
    from rlsdk.config.defaults import ALGORITHM
    from rlsdk.config.tree import current_path
    from rlsdk.plugins import Plugins

    given = tree.get("algorithm")
    name = given.get("use") if isinstance(given, Mapping) else given
    try:
        plugins = Plugins()
        for each in _plugin_files(tree.get("plugins"), file):
            plugins.activate(each)
        algorithm = plugins.resolve(plugins.reference("algorithm", name or ALGORITHM.name))
    except RlsdkError:  # a wrong name or missing options, which the check reports
        return set()
    return set(map(current_path, algorithm.defaults))


def _examined(tree: dict[str, Any], file: str | None) -> dict[str, Any]:
    """Check a configuration like `rlsdk explain --full`."""
    from rlsdk.config import check
    from rlsdk.config.paths import resolve_paths
    from rlsdk.errors import ConfigError
    from rlsdk.readiness.checks import examine
    from rlsdk.readiness.disk import in_words
    from rlsdk.readiness.explained import batch, describe, finding_of
    from rlsdk.readiness.memory import estimate_memory
    from rlsdk.readiness.memory import in_words as memory_in_words

    try:
        plan = check(resolve_paths(tree, Path(file)) if file else tree)
    except ConfigError as error:
        return {"faults": [attrs.asdict(finding_of(text)) for text in error.faults], "warnings": []}
    found = examine(plan, starts=False)
    words = {
        "batch": batch(plan),
        "memory": memory_in_words(estimate_memory(plan, found.built)),
        "disk": in_words(plan, found.disk) if found.disk else {},
        **describe(plan),
    }
    return {
        "faults": [attrs.asdict(each) for each in found.faults],
        "warnings": [attrs.asdict(each) for each in found.warnings],
        "plan": {section: content for section, content in words.items() if content},
        "defaults": plan.defaulted,
        "name": plan.config.name,
        "folder": str(plan.folder.absolute()),
        "exists": (plan.folder / "config.yaml").is_file(),
    }


Plain = dict[str, Any]
_SIMPLE: Mapping[Any, str] = {bool: "flag", int: "number", float: "number", str: "text"}


def form_of(listed: Any = None, file: str | None = None) -> Plain:
    """Describe the form.

    Args:
        listed: Value of `plugins`: plugin files to offer in addition to installed plugins.
        file: Configuration next to which the plugin files may lie.

    Returns:
        `fields`, the configuration keys; `components`, kind -> name -> summary, plugin and fields; `broken`, messages
        about plugins that cannot be imported.
    """
    plugins = Plugins()
    components: dict[Kind, dict[str, Plain]] = {kind: {} for kind in KINDS}
    broken: list[str] = []
    for name in dict.fromkeys([*plugins.entries, *_plugin_files(listed, file)]):
        try:
            plugin = plugins.activate(name)
            found = plugins.components(plugin)
        except PluginError as error:
            broken.append(str(error))
            continue
        for key in sorted(found):
            component = found[key]
            shown = component.name if plugin == CORE else f"{plugin}/{component.name}"
            # Below the path `algorithm`, an algorithm's keys are known to be components.
            options = of_component(component, "algorithm" if component.kind == "algorithm" else "-")
            # An option that is a group of options is written as YAML on one line.
            fields = [_field(attrs.evolve(option, section=None)) for option in options]
            components[component.kind][shown] = {"plugin": plugin, "summary": component.summary, "fields": fields}
    # Keys of sections, and keys next to the components of a list, are `fields` of their parents.
    keys = {key.path: _field(key) for key in settings()}
    for path, described in keys.items():
        if parent := path.rpartition(".")[0]:
            keys[parent].setdefault("fields", []).append(described)
    top = [described for path, described in keys.items() if "." not in path]
    return {"fields": top, "components": components, "broken": broken}


def _field(key: ConfigKey) -> Plain:
    """Describe a key: name, type, default, help, and the widget that sets it."""
    name, arms = key.path.rpartition(".")[2], _arms(key.type)
    kind = key.kind or next((kind for kind in KINDS if kind == name and Use in arms), None)
    others = [arm for arm in arms if arm is not type(None)]
    only = others[0] if len(others) == 1 else None
    if kind:
        widget = "components" if key.path in LISTS or name in PART_LISTS else "component"
    elif key.section:
        widget = "section"
    else:
        widget = "choice" if get_origin(only) is Literal else _SIMPLE.get(only, "value")
    return {
        "name": name,
        "type": key.type_name,
        "widget": widget,
        "nullable": type(None) in arms,
        "required": key.required,
        "default": None if key.required or widget == "section" else plain_value(key.default),
        "help": key.help,
        **({"unit": key.unit} if key.unit else {}),
        **({"kind": kind} if kind else {}),
        **({"choices": list(get_args(only))} if widget == "choice" else {}),
    }


def _arms(kind: Any) -> list[Any]:
    """Return the types of a union without their limits; for any other type, the type itself."""
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(kind) is Literal or not get_args(kind) or get_origin(kind) in (list, tuple):
        return [kind]
    arms = get_args(kind) if type(None) in get_args(kind) or Use in get_args(kind) else (kind,)
    return [get_args(arm)[0] if get_origin(arm) is Annotated else arm for arm in arms]


def plain_value(value: Any) -> Any:
    """Return a default as written in a configuration."""
    if isinstance(value, Use):
        return {"use": plain_value(value.name), **{name: plain_value(each) for name, each in value.options.items()}}
    if attrs.has(type(value)):
        return plain_value(attrs.asdict(value, recurse=False))
    if isinstance(value, list | tuple):
        return [plain_value(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): plain_value(each) for key, each in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)
