"""Plugins: discovered from package metadata, imported when named, resolved to one component per name.

A distribution declares an entry point in the group `rlsdk.v1`; its name is the prefix of its components (`mylab/exact`). A bare
name means `core/NAME`. A single file is a plugin named by its stem.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pluggy

from rlsdk import hookspecs
from rlsdk.components import KINDS, Component, Kind, component_of
from rlsdk.errors import FingerprintError, PluginError, UnknownComponentError
from rlsdk.options import nearest

GROUP = "rlsdk.v1"
CORE = "core"
CORE_MODULE = "rlsdk.builtins"
FILE_PACKAGE = "_rlsdk_files"
"""Top-level name under which single-file plugins live in `sys.modules`."""


@attrs.frozen
class Entry:
    """One plugin as package metadata tells it; nothing of it was imported.

    Attributes:
        name: Entry point, the prefix of its components.
        module: Dotted name of the module, or the path of a single file.
        distribution: The distribution that declares it; empty for a single file.
        version: Of that distribution.
        broken: Why it cannot be used; empty if nothing is known to be wrong.
        file: Whether `module` is a path.
    """

    name: str
    module: str
    distribution: str = ""
    version: str = ""
    broken: str = ""
    file: bool = False

    @property
    def origin(self) -> str:
        """Where it comes from, for messages."""
        return self.module if self.file else f"{self.distribution} {self.version}".strip()


@attrs.frozen
class Fingerprint:
    """What identifies a plugin's code: distribution, version and a hash of its sources."""

    distribution: str
    version: str
    source: str


@attrs.frozen
class Reference:
    """How a worker finds the component that the driver chose: by name, and by fingerprint.

    Attributes:
        kind: Of the component.
        name: `plugin/name`.
        options: As given, defaults left out.
        fingerprint: Of the plugin on the driver.
        file: (path, source) of a single-file plugin.
        obj: The marked object itself, where one stood in place of a name.
    """

    kind: Kind
    name: str
    options: Mapping[str, Any]
    fingerprint: Fingerprint
    file: tuple[str, str] | None = None
    obj: Any = None


class Plugins(pluggy.PluginManager):
    """Collects what the decorators marked, and the hooks, of the plugins that a run names."""

    def __init__(self, files: Iterable[str | Path] = ()) -> None:
        super().__init__(hookspecs.PROJECT)
        self.add_hookspecs(hookspecs)
        self.entries = discover()
        self._files: dict[str, tuple[str, str]] = {}
        self._components: dict[str, dict[tuple[Kind, str], Component]] = {}
        self._tables: dict[str, dict[str, tuple[str, ...]]] = {}
        self._failed: dict[str, PluginError] = {}
        self._owners: dict[str, str] = {}
        for file in files:
            self.add_file(file)

    def add_file(self, path: str | Path, source: str | None = None) -> str:
        """Make a single file a plugin, named by its stem.

        Args:
            path: The file.
            source: Its text, where a worker got it with the run; left out, it is read.

        Returns:
            The plugin's name.

        Raises:
            PluginError: The file cannot be read, or its name is taken by an installed plugin.
        """
        path = Path(path)
        name = path.stem
        if name in self._files and self._files[name][0] == str(path):
            return name
        if taken := [*self.entries.get(name, ()), *([name] if name in self._files else [])]:
            raise PluginError(f"plugin file {path}: the name {name!r} is taken by {taken[0]}; rename the file")
        try:
            text = path.read_text(encoding="utf-8") if source is None else source
        except OSError as error:
            raise PluginError(f"plugin file {path} cannot be read: {error.strerror}") from error
        self._files[name] = (str(path), text)
        self.entries[name] = (Entry(name, str(path), file=True),)
        return name

    def activate(self, name: str) -> str:
        """Import a plugin, a name or a file's path, and register its hooks and components.

        Raises:
            PluginError: It is unknown, claimed twice, or fails to import (with the cause).
        """
        if name.endswith(".py"):
            name = self.add_file(name)
        if name in self._failed:
            raise self._failed[name]
        if name not in self._components:
            entry = self._entry(name)
            try:
                self._import(entry)
            except PluginError as error:
                self._failed[name] = error
                raise
        return name

    def names(self, kind: Kind, plugin: str = CORE) -> list[str]:
        """Names of a plugin's components of one kind, sorted."""
        return sorted(n for k, n in self.components(plugin, kind) if k == kind)

    def components(self, plugin: str, kind: Kind | None = None) -> dict[tuple[Kind, str], Component]:
        """A plugin's components, of one kind or of all; imports what it must."""
        plugin = self.activate(plugin)
        for each in [kind] if kind else KINDS:
            self._import_kind(plugin, each)
        return {k: c for k, c in self._components[plugin].items() if kind in (None, k[0])}

    def find(self, kind: Kind, name: str) -> tuple[Entry, Component]:
        """The component `plugin/name`; a bare name is one of `core`.

        Raises:
            UnknownComponentError: No such kind, plugin or component; suggests the nearest.
            PluginError: The plugin is broken.
        """
        if kind not in KINDS:
            raise UnknownComponentError(_unknown("kind", kind, KINDS, "rlsdk"))
        if not isinstance(name, str):
            raise UnknownComponentError(f"a {kind} is chosen by name or given as a marked object; got {name!r}")
        plugin, _, bare = name.rpartition("/")
        plugin = self.activate(plugin or CORE)
        found = self.components(plugin, kind)
        if (kind, bare) not in found:
            raise UnknownComponentError(_unknown(kind, name, [n for _, n in found], plugin))
        return self._entry(plugin), found[kind, bare]

    def reference(self, kind: Kind, name: Any, options: Mapping[str, Any] | None = None) -> Reference:
        """What a worker needs to resolve the same component; `name` may be a marked object."""
        options = dict(options or {})
        component = None if isinstance(name, str) else component_of(name)
        if component is not None:
            _expect_kind(component, kind, name)
            mark = Fingerprint("", "", _hash([_source(component.obj)]))
            return Reference(kind, component.name, options, mark, obj=component.obj)
        entry, component = self.find(kind, name)
        return Reference(kind, f"{entry.name}/{component.name}", options, self.fingerprint(entry.name), self._files.get(entry.name))

    def resolve(self, reference: Reference) -> Any:
        """What is ready to run, on a driver or a worker.

        Raises:
            FingerprintError: This process has other code than the driver that made the reference.
            OptionError: The options do not fit.
        """
        if reference.obj is not None:
            component = component_of(reference.obj)
            if component is None:
                raise PluginError(f"{reference.obj!r} lost its mark on the way to this worker; make @rlsdk.{reference.kind} outermost")
            return component.bind(reference.options)
        plugin = reference.name.partition("/")[0]
        if reference.file is not None:
            self.add_file(*reference.file)
        _, component = self.find(reference.kind, reference.name)
        here = self.fingerprint(plugin)
        if here != reference.fingerprint:
            raise FingerprintError(
                f"plugin {plugin!r} differs between driver and worker: driver {_describe(reference.fingerprint)}, "
                f"worker {_describe(here)}; install the same version on every node"
            )
        return component.bind(reference.options)

    def fingerprint(self, plugin: str) -> Fingerprint:
        """Distribution, version and source hash of a plugin."""
        entry = self._entry(plugin)
        if entry.file:
            return Fingerprint("", "", _hash([self._files[plugin][1]]))
        return Fingerprint(entry.distribution, entry.version, _package_hash(entry.module.partition(".")[0]))

    def used(self) -> dict[str, Fingerprint]:
        """Every plugin that was activated, with its fingerprint."""
        return {name: self.fingerprint(name) for name in sorted(self._components)}

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        """Called by pluggy for every attribute of a plugin: collects marks in the same pass."""
        if isinstance(plugin, types.ModuleType):
            self._collect(plugin, name)
        return super().parse_hookimpl_opts(plugin, name)

    def _entry(self, name: str) -> Entry:
        claims = self.entries.get(name, ())
        if not claims:
            raise PluginError(_unknown("plugin", name, self.entries, "this environment"))
        if len(claims) > 1:
            listing = " and ".join(c.origin for c in claims)
            raise PluginError(f"plugin {name!r} is claimed by {listing}; uninstall one of them")
        if claims[0].broken:
            raise PluginError(f"plugin {name!r} of {claims[0].origin} is broken: {claims[0].broken}")
        return claims[0]

    def _import(self, entry: Entry) -> None:
        try:
            module = self._load_file(entry.name) if entry.file else importlib.import_module(entry.module)
        except Exception as error:
            raise PluginError(
                f"plugin {entry.name!r} ({entry.origin}) fails to import: {type(error).__name__}: {error}"
            ) from error
        self._components[entry.name] = {}
        self._owners[module.__name__] = entry.name
        self._tables[entry.name] = dict(getattr(module, "MODULES", {}))
        try:
            self.register(module, entry.name)
            self.check_pending()
        except pluggy.PluginValidationError as error:
            del self._components[entry.name]
            self.unregister(module)
            raise PluginError(f"plugin {entry.name!r} ({entry.origin}): {error}") from error
        except PluginError:
            del self._components[entry.name]
            raise

    def _import_kind(self, plugin: str, kind: Kind) -> None:
        """Import the modules that the plugin's table `MODULES` keeps for `kind`, once."""
        for name in self._tables[plugin].pop(kind, ()):
            try:
                module = importlib.import_module(name)
            except Exception as error:
                raise PluginError(f"plugin {plugin!r}: module {name} fails to import: {type(error).__name__}: {error}") from error
            self._owners[name] = plugin
            self.register(module, f"{plugin}:{name}")

    def _load_file(self, name: str) -> types.ModuleType:
        path, source = self._files[name]
        parent = sys.modules.setdefault(FILE_PACKAGE, types.ModuleType(FILE_PACKAGE))
        parent.__path__ = []
        full = f"{FILE_PACKAGE}.{name}"
        spec = importlib.util.spec_from_loader(full, loader=None, origin=path)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        module.__file__ = path
        sys.modules[full] = module
        exec(compile(source, path, "exec"), module.__dict__)  # the user's own code, named by the user
        setattr(parent, name, module)
        return module

    def _collect(self, module: types.ModuleType, attribute: str) -> None:
        found = getattr(module, attribute, None)
        if isinstance(found, types.ModuleType) or found is None:
            return
        owned = vars(found).get("__rlsdk_component__") if hasattr(found, "__dict__") else None
        if not isinstance(owned, Component):
            return
        plugin = self._owners[module.__name__]
        if str(getattr(found, "__module__", "")).partition(".")[0] != module.__name__.partition(".")[0]:
            return
        if owned.obj is not found:
            raise PluginError(
                f"plugin {plugin!r}: {module.__name__}.{attribute} carries the mark of {owned.kind} {owned.name!r}, but another "
                f"decorator wraps it; make @rlsdk.{owned.kind} the outermost decorator"
            )
        key = (owned.kind, owned.name)
        previous = self._components[plugin].setdefault(key, owned)
        if previous is not owned:
            raise PluginError(f"plugin {plugin!r} declares {owned.kind} {owned.name!r} twice: {previous.obj!r} and {owned.obj!r}")


def discover() -> dict[str, tuple[Entry, ...]]:
    """Every plugin that package metadata declares, by name; nothing is imported."""
    entries: dict[str, list[Entry]] = {}
    seen: set[tuple[str, str]] = set()
    for point in importlib.metadata.entry_points(group=GROUP):
        distribution = point.dist.name if point.dist else ""
        release = point.dist.version if point.dist else ""
        if (point.name, distribution) in seen:  # an egg-info beside a dist-info
            continue
        seen.add((point.name, distribution))
        if point.name == CORE and point.value == CORE_MODULE:
            continue
        broken = f"the name {CORE!r} belongs to rlsdk; {distribution} must choose another" if point.name == CORE else ""
        entries.setdefault(point.name, []).append(Entry(point.name, point.module, distribution, release, broken))
    core = Entry(CORE, CORE_MODULE, "rlsdk", version())
    shadows = entries.pop(CORE, [])
    found = {CORE: (core,), **{name: tuple(claims) for name, claims in sorted(entries.items())}}
    return {**found, **{f"{CORE} of {s.distribution}": (s,) for s in shadows}}


def version() -> str:
    """The version of rlsdk that is installed."""
    try:
        return importlib.metadata.version("rlsdk")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


def _expect_kind(component: Component, kind: Kind, given: Any) -> None:
    if component.kind != kind:
        raise UnknownComponentError(f"{given!r} is marked as {component.kind} {component.name!r}; a {kind} is expected here")


def _unknown(what: str, name: str, known: Iterable[str], where: str) -> str:
    offers = sorted(known)
    near = nearest(name.rpartition("/")[2], offers)
    prefix = name.rpartition("/")[0]
    hint = f"; did you mean {f'{prefix}/{near}' if prefix else near!r}?" if near else ""
    return f"unknown {what} {name!r}; {where} offers: {', '.join(offers) or 'none'}{hint}"


def _describe(mark: Fingerprint) -> str:
    return f"{mark.distribution} {mark.version} (source {mark.source[:12]})".strip()


def _source(obj: Any) -> str:
    try:
        return inspect.getsource(obj)
    except (OSError, TypeError):  # typed into an interpreter: its compiled form stands for it
        code = getattr(obj, "__code__", None)
        return repr((code.co_code, code.co_consts, code.co_names)) if code else repr(obj)


def _hash(texts: Iterable[str | bytes]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() if isinstance(text, str) else text)
        digest.update(b"\0")
    return digest.hexdigest()


_hashes: dict[str, str] = {}


def _package_hash(package: str) -> str:
    if package not in _hashes:
        spec = importlib.util.find_spec(package)
        roots = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
        files = sorted(f for root in roots for f in root.rglob("*.py")) or ([Path(spec.origin)] if spec and spec.origin else [])
        named = ((f.relative_to(roots[0]).as_posix() if roots else f.name, f.read_bytes()) for f in files)
        _hashes[package] = _hash(part for pair in named for part in pair)
    return _hashes[package]


@functools.cache
def _default() -> Plugins:
    return Plugins()


def load(kind: Kind, name: Any, /, **options: Any) -> Any:
    """What is ready to run: a component by name, or a marked object, with its options checked.

    Args:
        kind: Such as "reward", "advantage", "policy_loss".
        name: `grpo` (built in), `mylab/exact` (of a plugin), or a marked object.
        **options: As the component declares them.

    Returns:
        A callable that takes the positional arguments of its kind, or an instance of the component's class.

    Raises:
        UnknownComponentError: No such kind, plugin or component.
        OptionError: An option is unknown, missing or of the wrong type.
        PluginError: The plugin is broken.
    """
    plugins = _default()
    return plugins.resolve(plugins.reference(kind, name, options))


def names(kind: Kind) -> list[str]:
    """Names of all installed components of a kind, those of plugins with their prefix; broken plugins are left out."""
    plugins = _default()
    if kind not in KINDS:
        raise UnknownComponentError(_unknown("kind", kind, KINDS, "rlsdk"))
    found = plugins.names(kind)
    for plugin in plugins.entries:
        if plugin == CORE:
            continue
        try:
            found += [f"{plugin}/{name}" for name in plugins.names(kind, plugin)]
        except PluginError:  # `rlsdk plugins` says what is broken; a name of it cannot be loaded
            continue
    return found
