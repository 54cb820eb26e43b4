"""The conformance suite: check a component's properties, and find the smallest input that violates one.

`rlsdk check PLUGIN` and `pytest --rlsdk-plugin PLUGIN` run it; `check_component` checks one marked object.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import yaml

from rlsdk.components import Component, component_of
from rlsdk.errors import ConformanceFault, PluginError, UnknownComponentError, ValueFault, described
from rlsdk.kinds import KINDS, Kind
from rlsdk.options import did_you_mean
from rlsdk.plugins import Plugins
from rlsdk.plugins.guard import exits_raised
from rlsdk.testing import samples
from rlsdk.testing.findings import Case, NotApplicable, PropertyResult, Report, Violated, is_batch, show
from rlsdk.testing.subject import ON_BATCHES, Property, Subject, fault_of
from rlsdk.testing.trials import try_out
from rlsdk.types import Group, Task
from rlsdk.yaml_values import load_value

MODULES = (
    "general",
    "packed",
    "losses",
    "scoring",
    "environments",
    "samplers",
    "rendering",
    "optimizers",
    "schedules",
)
"""Modules of `rlsdk.testing.properties`, in checking order."""
ON_TENSORS = ("packed", "losses")
"""Those of them that need torch; components of other kinds can be checked without it."""
OF_STARTED: Mapping[Kind, str] = {"engine": "engines", "learner": "learners"}
"""Kind whose components are started -> the module of their further properties; both need torch."""
BEFORE_CALLS = ("contract", "defaults-valid")
"""Properties that must hold before a component is instantiated and called."""
Options = Mapping[str, Mapping[str, Any]]
"""Name of a component -> its options."""


def properties(component: Component, *, start: bool = False) -> tuple[Property, ...]:
    """Return a component's properties in checking order; `start` includes those of a started engine or learner."""
    tensors = component.kind in ON_BATCHES
    wanted = [name for name in MODULES if tensors or name not in ON_TENSORS]
    if start and component.kind in OF_STARTED:
        wanted.append(OF_STARTED[component.kind])
    modules = [importlib.import_module(f"rlsdk.testing.properties.{name}") for name in wanted]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Property)]
    unique = dict.fromkeys(found)  # a module may import another module's
    return tuple(p for p in unique if component.kind in p.kinds and p.only(component))


class Check:
    """Checks of one component; each property is checked when its result is first requested."""

    def __init__(self, subject: Subject, *, start: bool = False) -> None:
        self.properties = {p.name: p for p in properties(subject.component, start=start)}
        self.subject = subject
        self._tried: Mapping[str, Violated | NotApplicable | None] | None = None
        self._known: dict[str, PropertyResult] = {}
        self._declares: bool | None = None

    def finding(self, name: str) -> PropertyResult:
        """Check a property once, and return its result."""
        if name not in self._known:
            self._known[name] = self._found(self.properties[name])
        return self._known[name]

    def _found(self, prop: Property) -> PropertyResult:
        finding = PropertyResult(self.subject.component.kind, self.subject.name, prop.name, "passed")
        try:
            self._require(prop)
            fault = self._fault(prop)
        except NotApplicable as error:
            return attrs.evolve(finding, outcome="skipped", reason=str(error))
        return finding if fault is None else attrs.evolve(finding, outcome="failed", fault=fault)

    def findings(self) -> list[PropertyResult]:
        """Check every property."""
        return [self.finding(name) for name in self.properties]

    def _require(self, prop: Property) -> None:
        """Raise `NotApplicable` if an option is missing, or a property that this one depends on does not hold."""
        missing = self.subject.missing
        if prop.makes and missing:
            names = ", ".join(f"{option.name} ({option.type_name})" for option in missing)
            given = " ".join(f"--option {self.subject.component.name}.{option.name}=VALUE" for option in missing)
            raise NotApplicable(f"needs {'option' if len(missing) == 1 else 'options'} {names}: {given}")
        for before in (*(BEFORE_CALLS if prop.makes else ()), *prop.after):
            found = self.finding(before) if before in self.properties else None
            if found is not None and found.outcome != "passed":
                why = found.reason if found.outcome == "skipped" else f"{before} does not hold"
                raise NotApplicable(why)

    def _fault(self, prop: Property) -> ConformanceFault | None:
        if prop.starts:
            if self._tried is None:
                self._tried = try_out(self.subject, [p for p in self.properties.values() if p.starts])
            found = self._tried[prop.name]
            if isinstance(found, NotApplicable):
                raise found
            return None if found is None else _described(prop, self.subject, None, found)
        subject = attrs.evolve(self.subject, declares=self._declares_its_needs()) if prop.trims else self.subject
        with _one_thread(), exits_raised():
            for case in prop.inputs(subject):
                if case is not None and prop.trims:
                    case = Case(case.title, subject.trimmed(case.value))
                violated = _violation(prop, subject, case)
                if violated is not None:
                    return _described(prop, subject, *_smallest(prop, subject, case, violated))
        return None

    def _declares_its_needs(self) -> bool:
        if "needs-declared" not in self.properties or self.subject.missing or fault_of(self.subject.component):
            return True  # a component that cannot be called reads nothing
        if self._declares is None:
            from rlsdk.testing.properties.packed import reads_undeclared

            self._declares = not reads_undeclared(self.subject)
        return self._declares


def check_component(obj: Any, options: Mapping[str, Any] | None = None) -> list[PropertyResult]:
    """Check one component.

    Args:
        obj: A marked function or class, or its `Component`.
        options: Options to check it with; others keep their defaults.

    Returns:
        A result for each property of its kind.

    Raises:
        UnknownComponentError: The object is not marked.
        OptionError: The options are invalid.
    """
    component = component_of(obj)
    if component is None:
        raise UnknownComponentError(f"{obj!r} is not marked; write @rlsdk.KIND('name') above it")
    return Check(_subject(Subject(component, dict(options or {})))).findings()


def checks(
    plugins: Plugins,
    plugin: str,
    *,
    kind: Kind | None = None,
    component: str | None = None,
    options: Options | None = None,
    tasks: Sequence[Task] = (),
    start: bool = False,
) -> tuple[list[Check], dict[str, str]]:
    """Prepare checks for the components of a plugin; also return the kinds that cannot be imported.

    Args:
        plugins: Plugins to look it up in.
        plugin: Name of the plugin, or path of a file.
        kind: Only components of this kind.
        component: Only components of this name.
        options: Options by component.
        tasks: Tasks that its rewards can score.
        start: Also start its engines and learners, each with a small model in a child process.

    Raises:
        PluginError: There is no such plugin, or it cannot be imported.
        UnknownComponentError: The plugin has no component of that name.
        OptionError: Options are invalid.
    """
    name = plugins.activate(plugin)
    components, broken = _collect(plugins, name, [kind] if kind else KINDS)
    bare = None if component is None else component.removeprefix(f"{name}/")
    chosen = [each for each in components if bare in (None, each.name)]
    known = {each.name for each in components}
    for wanted in [*([bare] if bare else []), *(options or {})]:
        if wanted not in known:
            hint = did_you_mean(wanted, known)
            raise UnknownComponentError(f"plugin {name!r} has no component {wanted!r}{hint}")
    origin = plugins.entries[name][0].origin
    found = []
    for each in chosen:
        # Components of several kinds may share a name: omit the options that only another one declares.
        own = {option.name for option in each.options}
        others = {option.name for c in components if c.name == each.name for option in c.options}
        asked = (options or {}).get(each.name, {})
        given = {key: value for key, value in asked.items() if key in own or key not in others}
        found.append(Check(_subject(Subject(each, given, name, origin, plugins, tuple(tasks))), start=start))
    return found, broken


def check_plugin(plugins: Plugins, plugin: str, **chosen: Any) -> Report:
    """Check the components of a plugin.

    Args:
        plugins: Plugins to look it up in.
        plugin: Name of the plugin, or path of a file.
        **chosen: Keyword arguments of `checks`: `kind`, `component`, `options` by component, `tasks` for rewards, and
            `start`.

    Raises:
        PluginError: There is no such plugin, or it cannot be imported.
        UnknownComponentError: The plugin has no component of that name.
        OptionError: Options are invalid.
    """
    found, broken = checks(plugins, plugin, **chosen)
    name = plugins.activate(plugin)
    findings = [finding for check in found for finding in check.findings()]
    return Report(name, plugins.entries[name][0].origin, tuple(findings), broken)


def _collect(plugins: Plugins, name: str, kinds: Iterable[Kind]) -> tuple[list[Component], dict[str, str]]:
    components: list[Component] = []
    broken: dict[str, str] = {}
    for kind in kinds:
        try:
            held = plugins.components(name, kind)
        except PluginError as error:
            broken[kind] = str(error)
            continue
        components += [held[key] for key in sorted(held)]
    return components, broken


def _subject(subject: Subject) -> Subject:
    """Create the component once if options were given: invalid ones are the caller's fault, not the component's."""
    if subject.given and not subject.missing:
        subject.make()
    return subject


def _violation(prop: Property, subject: Subject, case: Case[Any] | None) -> Violated | None:
    try:
        prop.rule(subject, None if case is None else case.value)
    except Violated as error:
        return error
    except SystemExit as error:  # raised where the rule does not use `subject.call`, as in a workflow's task
        return Violated("raised", "a result", described(error))
    return None


def _smallest(
    prop: Property, subject: Subject, case: Case[Any] | None, violated: Violated
) -> tuple[Case[Any] | None, Violated]:
    """Shrink an input to the fewest rollouts and tokens that violate the rule in the same way."""
    shrunk = case is not None and violated.sort != "late"  # each smaller input would take as long
    title = f"reduced from: {case.title}" if case else ""
    while case is not None and shrunk:
        shrunk = False
        for value in _smaller(case.value):
            try:
                found = _violation(prop, subject, Case(case.title, value))
            except NotApplicable:
                continue
            if found is not None and found.sort == violated.sort:
                case, violated, shrunk = Case(title, value), found, True
                break
    return case, violated


def _smaller(value: Any) -> Iterator[Any]:
    if is_batch(value):
        from rlsdk.testing import inputs

        return inputs.smaller(value)
    return samples.smaller(value) if isinstance(value, Group) else iter(())


def _described(prop: Property, subject: Subject, case: Case[Any] | None, violated: Violated) -> ConformanceFault:
    return ConformanceFault(
        str(subject),
        prop.name,
        demand=prop.demand,
        given=show(Case(case.title, attrs.evolve(subject, declares=True).trimmed(case.value)) if case else None),
        expected=violated.expected,
        got=violated.got,
        remedy=prop.remedy,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one torch thread: with tensors of a few numbers, more threads would only wait for each other."""
    torch = sys.modules.get("torch")
    if torch is None:  # not imported, so nothing is computed with it
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def read_options(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Parse options by component from texts such as `jsonl.path=tasks.jsonl`; values are YAML.

    Raises:
        ValueFault: A text does not have this form.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        target, equals, value = text.partition("=")
        component, dot, key = target.rpartition(".")
        if not (equals and dot and component and key):
            raise ValueFault(f"option {text!r}: expected COMPONENT.OPTION=VALUE, such as top_k.k=4")
        found.setdefault(component.rpartition("/")[2], {})[key] = _yaml(value, text)
    return found


def read_tasks(texts: Iterable[str]) -> tuple[Task, ...]:
    """Parse tasks from texts such as `{"prompt": "1 + 1?", "answer": "2"}`.

    Raises:
        ValueFault: A text does not describe a task.
    """
    return tuple(_task(text, i) for i, text in enumerate(texts))


def _task(text: str, index: int) -> Task:
    held = _yaml(text, text)
    fields = ("prompt", "answer", "metadata", "source", "id")
    if not isinstance(held, dict) or "prompt" not in held or not set(held) <= set(fields):
        raise ValueFault(f"task {text!r}: expected a mapping with a prompt and, as needed: {fields[1:]}")
    return Task(**{"id": f"given/{index}", **held})


def _yaml(value: str, text: str) -> Any:
    try:
        return load_value(value)
    except yaml.YAMLError as error:
        raise ValueFault(f"{text!r} is not YAML: {error}") from error
