"""Import plugins when they are named, collect their marked components, and resolve names to components."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import pluggy

from rlsdk import hookspecs
from rlsdk.components import Component, Product, component_of, own_mark
from rlsdk.errors import (
    FILE_PACKAGE,
    FingerprintError,
    PluginError,
    UnknownComponentError,
    defined_at,
    described,
    nearest,
    package,
)
from rlsdk.kinds import KINDS, Kind
from rlsdk.options import unknown
from rlsdk.plugins import fingerprints, guard
from rlsdk.plugins.discovery import CORE, PluginEntry, discover, impostors, misspelt_group, misspelt_module, unreadable
from rlsdk.plugins.fingerprints import ComponentRef, Fingerprint, code_differs, overwritten, plugin_name, source_of
from rlsdk.plugins.own_parts import with_own_parts

_MARKS = frozenset({*KINDS, "field", "hookimpl"})
"""Names of the decorators that mark a component, field or hook."""
_UNMARKABLE = frozenset({str, int, float, bool, dict, list, tuple, set, frozenset, types.ModuleType})
"""Types of the names in a module that carry no mark, whatever the module is."""
_HOOK_MARK = f"{hookspecs.PROJECT}_impl"
_IN_REPOSITORY = ("agents", "fsdp2", "gridworlds", "ifeval", "reasoning_gym", "verifiers", "zoo")
"""Plugins in the folder `plugins` of rlsdk's repository."""
_PRESENT: ContextVar[Plugins | None] = ContextVar("present", default=None)


class Plugins(pluggy.PluginManager):
    """Collects marked components and hooks of the plugins that a run names."""

    def __init__(self, files: Iterable[str | Path] = ()) -> None:
        super().__init__(hookspecs.PROJECT)
        self.add_hookspecs(hookspecs)
        self.entries = discover()
        self._files: dict[str, tuple[str, str]] = {}
        self._components: dict[str, dict[tuple[Kind, str], Component]] = {}
        self._tables: dict[str, dict[str, tuple[str, ...]]] = {}
        self._failed: dict[tuple[str, str], PluginError] = {}
        self._owners: dict[str, str] = {}
        self._objects: dict[str, tuple[Any, Fingerprint]] = {}
        for file in files:
            self.add_file(file)

    def add_file(self, path: str | Path, source: str | None = None) -> str:
        """Add a single file as a plugin, named by its stem or, for an `__init__.py`, by its folder.

        Args:
            path: The file.
            source: Text of the file, if a worker received it with the run; by default, the file is read.

        Returns:
            The plugin's name.

        Raises:
            PluginError: The file cannot be read, or its name is taken by another plugin.
        """
        path = Path(path)
        if path.name == "__init__.py":  # absolute: the name must be the same in every working folder
            path = path.absolute()
        name = path.parent.name if path.name == "__init__.py" else path.stem
        if name in self._files and Path(self._files[name][0]).absolute() == path.absolute():
            return name
        if taken := self.entries.get(name):
            raise PluginError(f"plugin file {path}: the name {name!r} is taken by {taken[0].origin}; rename the file")
        try:
            text = path.read_text(encoding="utf-8-sig") if source is None else source  # editors may add a BOM
        except (OSError, UnicodeDecodeError) as error:
            self._failed[name, ""] = PluginError(f"plugin file {unreadable(path, error)}")
            raise self._failed[name, ""] from error
        self._files[name] = (str(path), text)
        self.entries[name] = (PluginEntry(name, str(path), file=True),)
        return name

    @property
    def files(self) -> list[str]:
        """Paths of the single-file plugins, as given."""
        return [path for path, _ in self._files.values()]

    @property
    def sources(self) -> tuple[tuple[str, str], ...]:
        """Path and text of each single-file plugin."""
        return tuple(self._files.values())

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the activated plugins."""
        return tuple(sorted(self._components))

    def activate(self, name: str) -> str:
        """Import a plugin, given by name or file path, and register its hooks and components.

        Returns:
            The plugin's name.

        Raises:
            PluginError: The plugin is unknown, claimed twice, or fails to import (with the cause).
        """
        if name.endswith(".py"):
            name = self.add_file(name)
        if name not in self._components:
            entry = self._entry(name)
            self._once(name, "", partial(self._import, entry))
        return name

    def names(self, kind: Kind, plugin: str = CORE) -> list[str]:
        """Return the sorted names of a plugin's components of one kind."""
        return sorted(n for k, n in self.components(plugin, kind) if k == kind)

    def components(self, plugin: str, kind: Kind | None = None) -> dict[tuple[Kind, str], Component]:
        """Return a plugin's components, of one kind or of all, importing modules as needed."""
        plugin = self.activate(plugin)
        for each in [kind] if kind else KINDS:
            self._import_kind(plugin, each)
        return {k: c for k, c in self._components[plugin].items() if kind in (None, k[0])}

    def hooks(self, plugin: str) -> list[str]:
        """Return the sorted names of the hooks that the imported modules of a plugin implement."""
        held = [module for name, module in self.list_name_plugin() if name.partition(":")[0] == plugin]
        return sorted({hook.name for module in held for hook in self.get_hookcallers(module) or ()})

    def find(self, kind: Kind, name: str) -> tuple[PluginEntry, Component]:
        """Return the component `plugin/name`; a bare name refers to `core`.

        Raises:
            UnknownComponentError: No such kind, plugin or component; the message suggests the nearest.
            PluginError: The plugin is broken.
        """
        check_kind(kind)
        if not isinstance(name, str):
            raise UnknownComponentError(f"{kind}: expected a name, or a marked object in its place; got {name!r}")
        if kind == "tasks" and name.endswith((".jsonl", ".parquet")):
            use = name.rpartition(".")[2]
            raise UnknownComponentError(f"{name!r} is a file; write {{use: {use}, path: {name}}}")
        file, _, inside = name.partition(":")
        if file.endswith(".py"):
            raise UnknownComponentError(
                f"{name!r} is a file; load it with --plugin {file} (in a configuration: plugins: [{file}]), "
                f"and name its component: {PurePath(file).stem}/{inside or 'NAME'}"
            )
        plugin, _, bare = name.rpartition("/")
        plugin = self.activate(plugin or CORE)
        self._import_kind(plugin, kind)
        if (kind, bare) not in self._components[plugin]:
            raise UnknownComponentError(self._unknown_component(kind, name, self.names(kind, plugin), plugin))
        return self._entry(plugin), self._components[plugin][kind, bare]

    def reference(self, kind: Kind, name: Any, options: Mapping[str, Any] | None = None) -> ComponentRef:
        """Create a reference for workers to resolve the same component; `name` may be a marked object."""
        check_kind(kind)
        options = dict(options or {})
        component = None if isinstance(name, str) else component_of(name)
        if component is None:
            entry, component = self.find(kind, name)
            mark, file = self.fingerprint(entry.name), self._files.get(entry.name)
            named = self._named(component, options)
            return ComponentRef(kind, f"{entry.name}/{component.name}", options, mark, file, named=named)
        if component.kind != kind:
            raise UnknownComponentError(
                f"{name!r} is marked as {component.kind} {component.name!r}; expected here: {kind}"
            )
        mark = fingerprints.of_object(component.obj)
        self._objects[f"{kind} {component.name} (object)"] = (component.obj, mark)
        kept = self.kept_name(component.obj)
        own = f"{kept}/{component.name}" if kept else component.name
        return ComponentRef(kind, own, options, mark, obj=component.obj, named=self._named(component, options))

    def _named(self, component: Component, options: Mapping[str, Any]) -> tuple[ComponentRef, ...]:
        """Return references of the components that options name; those that do not exist are reported elsewhere."""
        with contextlib.suppress(PluginError):
            return tuple(self.reference(kind, use.name, use.options) for _, kind, use in component.named_by(options))
        return ()

    def resolve(self, reference: ComponentRef) -> Any:
        """Instantiate a referenced component, on a driver or a worker.

        Raises:
            FingerprintError: The code in this process differs from that of the driver that created the reference.
            OptionError: The options are invalid.
        """
        if reference.parts:
            return self._product(reference)
        for each in reference.named:
            self.component(each)  # adds its file, and compares fingerprints
        made = self.bind(self.component(reference), reference.options)
        if reference.kind != "algorithm":
            return made
        plugin = "" if reference.obj is not None else reference.name.rpartition("/")[0]
        return with_own_parts(self, plugin, made, given=reference.options)

    def _product(self, reference: ComponentRef) -> Product:
        """Instantiate several components that act as one."""
        parts = {name: self.resolve(part) for name, part in reference.singles.items()}
        components = [self.component(part) for part in reference.parts]
        needs = tuple(dict.fromkeys(name for each in components for name in each.needs))
        fields = tuple(dict.fromkeys(field for each in components for field in each.fields))
        return Product(Component(reference.kind, reference.name, Product, needs=needs, fields=fields), parts)

    def component(self, reference: ComponentRef) -> Component:
        """Return the component that a reference names, on a driver or a worker.

        Raises:
            FingerprintError: The code in this process differs from that of the driver that created the reference.
        """
        if reference.obj is not None:
            component = component_of(reference.obj)
            if component is None:
                raise PluginError(
                    f"{reference.obj!r} lost its mark when sent to this worker; make @rlsdk.{reference.kind} outermost"
                )
            return component
        plugin = reference.name.partition("/")[0]
        if reference.file is not None:
            self.add_file(*reference.file)
        _, component = self.find(reference.kind, reference.name)
        here = self.fingerprint(plugin)
        if here != reference.fingerprint:
            raise FingerprintError(code_differs(plugin, reference.fingerprint, here))
        return component

    def bind(self, component: Component, options: Mapping[str, Any]) -> Any:
        """Instantiate a component; components that it loads in the process are looked up among these plugins."""
        token = _PRESENT.set(self)
        try:
            return component.bind(options)
        finally:
            _PRESENT.reset(token)

    def fingerprint(self, plugin: str) -> Fingerprint:
        """Return distribution, version and source hash of a plugin."""
        entry = self._entry(plugin)
        if entry.file:
            return fingerprints.of_text(self._files[plugin][1])
        return fingerprints.of_package(entry.distribution, entry.version, entry.module.partition(".")[0])

    def used(self) -> dict[str, Fingerprint]:
        """Return all activated plugins, and all objects given in place of names, with their fingerprints."""
        plugins = {name: self.fingerprint(name) for name in sorted(self._components)}
        kept = {name: fingerprints.of_text(text) for name, text in self.kept_sources().items()}
        objects = {name: mark for name, (obj, mark) in sorted(self._objects.items()) if not self.kept_name(obj)}
        return plugins | kept | objects

    def offers(self, plugin: str, component: Component) -> bool:
        """Return whether an imported plugin offers this exact component."""
        if plugin not in self._components:
            return False
        return self.components(plugin, component.kind).get((component.kind, component.name)) is component

    def kept_name(self, obj: Any) -> str | None:
        """Return the plugin name for saving a marked object's source; None if it is a plugin's, or has no source."""
        top = package(str(obj.__module__))
        if top == FILE_PACKAGE or top.startswith(f"{FILE_PACKAGE}."):
            return None
        if any(each.module.partition(".")[0] == top for claims in self.entries.values() for each in claims):
            return None
        name = plugin_name(obj)
        return f"{name}_code" if name in self.entries else name

    def kept_sources(self) -> dict[str, str]:
        """Return name -> text of the plugins with the sources of objects given in place of names."""
        found: dict[str, list[Any]] = {}
        for obj, _ in self._objects.values():
            if name := self.kept_name(obj):
                found.setdefault(name, []).append(obj)
        return {name: source_of(objects) for name, objects in sorted(found.items())}

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        """Collect marks; pluggy calls this for every attribute of a plugin."""
        if isinstance(plugin, types.ModuleType):
            found = vars(plugin).get(name)
            if type(found) in _UNMARKABLE:
                return None
            try:
                routine, cls = inspect.isroutine(found), found if inspect.isclass(found) else None
            except Exception:  # noqa: BLE001 - a library's proxy of an object that does not exist yet
                return None
            self._collect(plugin, name)
            if cls is not None:
                self._check_methods(plugin, cls)
            if not routine:  # pluggy would find the same, but ten times slower
                return None
            if type(found) is types.FunctionType and _HOOK_MARK not in vars(found) and not hasattr(hookspecs, name):
                return None
        options = super().parse_hookimpl_opts(plugin, name)
        if isinstance(plugin, types.ModuleType):
            self._check_hook(plugin, name, marked=bool(options))
        return options

    def _check_hook(self, module: types.ModuleType, name: str, *, marked: bool) -> None:
        """Refuse a hook that would never run: one without its mark, or an `async def` that nothing awaits."""
        function = getattr(module, name)
        if not hasattr(hookspecs, name) or getattr(function, "__module__", "") != module.__name__:
            return
        self._check_overwritten(self._owners[module.__name__], function)
        where = f"plugin {self._owners[module.__name__]!r}: {defined_at(function)}"
        if not marked and name.startswith(f"{hookspecs.PROJECT}_"):
            raise PluginError(
                f"{where} is not marked as a hook, and would not be called; write @rlsdk.hookimpl above it"
            )
        if inspect.iscoroutinefunction(function):
            raise PluginError(f"{where} is async def, but hooks are called without await; write def")

    def _check_methods(self, module: types.ModuleType, cls: type) -> None:
        """Refuse hooks among the methods of a class, which would never be called."""
        if cls.__module__ != module.__name__:
            return
        if hooks := [method for method in vars(cls).values() if hasattr(method, _HOOK_MARK)]:
            raise PluginError(
                f"plugin {self._owners[module.__name__]!r}: {defined_at(hooks[0])} is a method, and would not be "
                "called; write the hook as a function of the module"
            )

    def _check_overwritten(self, plugin: str, obj: Any) -> None:
        """Refuse a component or hook whose name is defined again in its module: Python keeps only the last one."""
        module = sys.modules.get(obj.__module__)
        if plugin == CORE or module is None:
            return
        try:
            lost = overwritten(inspect.getsource(module), _MARKS)
        except (OSError, TypeError, SyntaxError):  # a worker may lack the file
            return
        if lost is not None:
            name, first, last = lost
            raise PluginError(
                f"plugin {plugin!r}: {name} is marked in line {first} of {Path(module.__file__ or '').name} and "
                f"defined again in line {last}, which replaces it; rename one of them"
            )

    def _unknown_component(self, kind: Kind, name: str, offers: Iterable[str], plugin: str) -> str:
        """Return a sentence about an unknown name, suggesting another plugin's component with its prefix."""
        text = _unknown(kind, name, offers, plugin)
        others = [each for each, found in self._components.items() if each != plugin and (kind, name) in found]
        if others:
            return f"{text.partition('; did you mean')[0]}; did you mean {others[0] + '/' + name!r}?"
        bare = name.rpartition("/")[2]
        searched = self._components if bare == name else [plugin]
        kinds = sorted(
            f"{each}/{n} is of kind {k}" for each in searched for k, n in self._components[each] if n == bare
        )
        if kinds:
            return f"{text.partition('; did you mean')[0]}; {', '.join(kinds)}"
        if name.startswith(f"{CORE}/"):
            return text + impostors()
        if plugin == CORE and name in self.entries:
            return f"{text.partition('; did you mean')[0]}; a component of the plugin {name!r} is written {name}/NAME"
        if self._components[plugin] or self._tables[plugin]:
            return text
        return f"{text}. It marks nothing: put @rlsdk.{kind}({name.rpartition('/')[2]!r}) above the function or class"

    def _entry(self, name: str) -> PluginEntry:
        claims = self.entries.get(name, ())
        if not claims and (name, "") in self._failed:
            raise self._failed[name, ""]
        if not claims:
            usable = [known for known, found in self.entries.items() if not found[0].broken]
            unknown = _unknown("plugin", name, usable, "this environment")
            here = f"plugins/rlsdk-{name.replace('_', '-')}, in a clone of rlsdk" if name in _IN_REPOSITORY else "…"
            raise PluginError(
                f"{unknown}; install its package (pip install {here}), or give its file (--plugin {name}.py)"
                f"{misspelt_group(name)}"
            )
        if len(claims) > 1:
            listing = " and ".join(c.origin for c in claims)
            raise PluginError(f"plugin {name!r} is claimed by {listing}; uninstall one of them")
        if claims[0].broken:
            raise PluginError(f"plugin {name!r} of {claims[0].origin} is broken: {claims[0].broken}")
        return claims[0]

    def _once(self, plugin: str, kind: str, load: Callable[[], None]) -> None:
        """Call `load`; if it failed before, raise the original error again, not one caused by it."""
        if failed := self._failed.get((plugin, kind)):
            raise failed
        try:
            load()
        except PluginError as error:
            self._failed[plugin, kind] = error
            raise

    def _import(self, entry: PluginEntry) -> None:
        what = f"plugin {entry.name!r} ({entry.origin})"
        try:
            if entry.file:
                with guard.imported(what):
                    module = self._load_file(entry.name)
            else:
                module = guard.import_module(entry.module, what)
            table = dict(vars(module).get("MODULES", {}))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit, or the panic of a library in Rust
            cause = described(error)
            if isinstance(error, ModuleNotFoundError) and error.name == entry.module.partition(".")[0]:
                cause += misspelt_module(entry)
            raise PluginError(f"{what} fails to import: {cause}") from error
        self._components[entry.name] = {}
        self._tables[entry.name] = table
        try:
            self._register(module, entry.name, entry.name)
        except PluginError:
            del self._components[entry.name]
            raise

    def _import_kind(self, plugin: str, kind: Kind) -> None:
        """Import the modules that the plugin's table `MODULES` lists for `kind`, once."""
        modules = self._tables[plugin].pop(kind, ())
        self._once(plugin, kind, partial(self._import_modules, plugin, modules))

    def _import_modules(self, plugin: str, modules: Iterable[str]) -> None:
        for name in modules:
            what = f"plugin {plugin!r}: module {name}"
            try:
                module = guard.import_module(name, what)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # also SystemExit, or the panic of a library in Rust
                raise PluginError(f"{what} fails to import: {described(error)}") from error
            if plugin == CORE:
                self._components[CORE].update(_built_in(module))
            elif not self.is_registered(module):  # one module may serve several kinds
                self._register(module, f"{plugin}:{name}", plugin)

    def _register(self, module: types.ModuleType, name: str, plugin: str) -> None:
        self._owners[module.__name__] = plugin
        try:
            self.register(module, name)
            self.check_pending()
        except pluggy.PluginValidationError as error:
            hooks = {name: hook for name, hook in vars(self.hook).items() if isinstance(hook, pluggy.HookCaller)}
            strange = [name for name, hook in hooks.items() if not hook.has_spec() and hook.get_hookimpls()]
            known = (name for name, hook in hooks.items() if hook.has_spec())
            said = unknown("hook", strange[0], known) if strange else _arguments_of_hook(error)
            if self.is_registered(module):
                self.unregister(module)
            raise PluginError(f"plugin {plugin!r} ({self._entry(plugin).origin}): {said}") from error
        except PluginError:
            raise
        except (Exception, SystemExit) as error:  # such as a `__getattr__` or `__dir__` of the module
            cause = f"the names in its module {module.__name__} cannot be read: {described(error)}"
            raise PluginError(f"plugin {plugin!r} ({self._entry(plugin).origin}): {cause}") from error

    def _load_file(self, name: str) -> types.ModuleType:
        path, source = self._files[name]
        parent = sys.modules.setdefault(FILE_PACKAGE, types.ModuleType(FILE_PACKAGE))
        parent.__path__ = []
        full = f"{FILE_PACKAGE}.{name}"
        module = types.ModuleType(full)
        module.__file__ = path
        sys.modules[full] = module
        try:
            exec(compile(source, path, "exec"), module.__dict__)  # noqa: S102 - the user's own code, named by the user
        except BaseException:
            del sys.modules[full]
            raise
        setattr(parent, name, module)
        return module

    def _collect(self, module: types.ModuleType, attribute: str) -> None:
        found = getattr(module, attribute, None)
        owned = own_mark(found)
        if owned is None or package(str(getattr(found, "__module__", ""))) != package(module.__name__):
            return  # not marked, or marked by another package
        plugin = self._owners[module.__name__]
        if owned.obj is not found:
            where = f"{module.__name__.removeprefix(f'{FILE_PACKAGE}.')}.{attribute}"
            raise PluginError(
                f"plugin {plugin!r}: {where} carries the mark of {owned.kind} {owned.name!r}, "
                f"but another decorator wraps it; make @rlsdk.{owned.kind} the outermost decorator"
            )
        self._check_overwritten(plugin, found)
        previous = self._components[plugin].setdefault((owned.kind, owned.name), owned)
        if previous is not owned:
            both = f"{defined_at(previous.obj)} and {defined_at(owned.obj)}"
            raise PluginError(
                f"plugin {plugin!r} declares {owned.kind} {owned.name!r} twice: {both}; rename one of them"
            )


@functools.cache
def _built_in(module: types.ModuleType) -> Mapping[tuple[Kind, str], Component]:
    """Return the components of a built-in module, read once per process: it has no hooks, and tests check its marks."""
    marks = [mark for mark in map(own_mark, vars(module).values()) if mark is not None]
    return {(mark.kind, mark.name): mark for mark in marks if package(mark.obj.__module__) == package(module.__name__)}


def _arguments_of_hook(error: pluggy.PluginValidationError) -> str:
    """Return the sentence about a hook that takes an argument which its specification lacks, with those that exist."""
    found = re.search(r"for hook '(\w+)'.*Argument\(s\) \{(.+)\}", str(error), re.DOTALL)
    if found is None or not (spec := getattr(hookspecs, found[1], None)):
        return str(error)
    known = ", ".join(inspect.signature(spec).parameters)
    return f"the hook {found[1]} has no argument {found[2]}; it may take any of: {known}"


def present() -> Plugins | None:
    """Return the plugins that are currently instantiating a component; its own loads are looked up among them."""
    return _PRESENT.get()


def check_kind(kind: str) -> None:
    """Refuse an unknown kind."""
    if kind not in KINDS:
        raise UnknownComponentError(_unknown("kind", str(kind), KINDS, "rlsdk"))


def _unknown(what: str, name: str, known: Iterable[str], where: str) -> str:
    offers = sorted(known)
    prefix, slash, bare = name.rpartition("/")
    near = nearest(bare, offers) if len(offers) > 1 else None  # a single offer needs no suggestion
    hint = f"; did you mean {prefix + slash + near!r}?" if near else ""
    return f"unknown {what} {name!r}; {where} offers: {', '.join(offers) or 'none'}{hint}"
