"""`rlsdk check`."""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
import time
from collections.abc import Mapping
from typing import Any, get_args

import attrs
import click
from click.core import ParameterSource
from rich.markup import escape

from rlsdk.calls import ARGUMENTS
from rlsdk.cli.listing import no_plugin
from rlsdk.cli.output import borderless, console
from rlsdk.cli.parameters import json_output, plugin_files
from rlsdk.components import Use, component_of
from rlsdk.errors import ConfigError, OptionError, PluginError, UnknownComponentError, ValueFault
from rlsdk.kinds import KINDS, Kind
from rlsdk.plugins import CORE, Plugins
from rlsdk.plugins.discovery import find
from rlsdk.plurals import counted
from rlsdk.testing.findings import PropertyResult, Report

FAULTY = 1
_STARTED: tuple[Kind, ...] = ("engine", "learner")
"""Kinds whose components are checked for their methods only, unless `--start` is given."""


@click.command()
@click.argument("plugin", metavar="PLUGIN | model")
@click.argument("path", required=False, metavar="[PATH]")
@click.option("--kind", type=click.Choice(KINDS), help="Check only components of this kind.")
@click.option("--component", metavar="NAME", help="Check only components with this name.")
@click.option(
    "--option",
    "options",
    metavar="COMPONENT.OPTION=VALUE",
    multiple=True,
    help="Set an option of a component, such as jsonl.path=tasks.jsonl; other options keep their defaults. "
    "With `model`: of the renderer, such as template.file=chat.jinja.",
)
@click.option(
    "--task",
    "tasks",
    metavar="YAML",
    multiple=True,
    help="""Task for the plugin's rewards and workflows, such as '{prompt: "1 + 1?", answer: 2}'.""",
)
@click.option(
    "--start",
    is_flag=True,
    help="Also start each engine and learner with a small model on the CPU and check what it does: half a minute each.",
)
@plugin_files
@click.option(
    "--max-length", type=click.IntRange(1), metavar="N", help="With `model`: the model.max_length of the run."
)
@click.option(
    "--renderer",
    metavar="NAME",
    default="template",
    show_default=True,
    help="With `model`: the model.renderer of the run.",
)
@click.option("--trust-remote-code", is_flag=True, help="With `model`: run Python code shipped with the model.")
@click.option(
    "--engine", metavar="NAME", help="With `model`: engine to compare with the learner.  [default: transformers]"
)
@click.option("--trace", is_flag=True, help="With `model`: find the first operation where engine and learner differ.")
@json_output
@click.pass_context
def check(
    context: click.Context,
    plugin: str,
    path: str | None,
    kind: Kind | None,
    component: str | None,
    options: tuple[str, ...],
    tasks: tuple[str, ...],
    start: bool,
    files: tuple[str, ...],
    max_length: int | None,
    renderer: str,
    trust_remote_code: bool,
    engine: str | None,
    trace: bool,
    as_json: bool,
) -> None:
    """Check that the components of PLUGIN, a name or a Python file, satisfy the contracts of their kinds.

    `rlsdk check FILE.py:NAME` checks one component of a file; or a function or class that is not marked: a tool, an
    agent, or a reward of another trainer, as its parameters tell. --kind workflow says that it is not a reward.

    `rlsdk check model PATH` instead checks a model's tokenizer, chat template and configuration and, if it has weights,
    that engine and learner compute the same logprobs; --trace shows where they begin to differ. Each violated property
    is shown with a small input that violates it. Exit status: 0 all properties hold, 1 some do not, 2 no such plugin,
    component, option or model, or a plugin without components.
    """
    if path is not None:
        if plugin != "model":
            raise click.UsageError(f"expected one PLUGIN, or `model PATH`; got {plugin!r} and {path!r}")
        if trace:
            return _trace_model(context, path, engine, trust_remote_code, as_json)
        use = Use(renderer, _options_of(renderer, options))
        how: dict[str, Any] = {"max_length": max_length, "renderer": use, "trust_remote_code": trust_remote_code}
        how |= {"plugins": Plugins(files)}
        return _check_model(context, path, how, engine, as_json)
    of_model = {"max_length", "renderer", "trust_remote_code", "engine", "trace"}
    if given := [
        each.opts[0]
        for each in context.command.params
        if each.name in of_model and context.get_parameter_source(each.name) is not ParameterSource.DEFAULT
    ]:
        raise click.UsageError(f"{', '.join(given)}: only with `model PATH`; got PLUGIN {plugin!r}, and no PATH")
    begun = time.monotonic()
    with contextlib.redirect_stdout(sys.stderr):  # components may print; keep standard output for the report
        report = _report(plugin, files, kind, component, options, tasks, start)
    if as_json:
        click.echo(json.dumps(report.describe(), indent=2))
    else:
        _print(report, time.monotonic() - begun, start)
    if not report.conforms:
        context.exit(FAULTY)


def _options_of(renderer: str, options: tuple[str, ...]) -> dict[str, Any]:
    """Return the options given for a renderer; refuse those of other components."""
    from rlsdk.testing.conformance import read_options

    try:
        found = read_options(options)
    except ValueFault as error:
        raise click.UsageError(str(error)) from error
    name = renderer.rpartition("/")[2]
    if others := sorted(found.keys() - {name}):
        raise click.UsageError(
            f"--option: with `model PATH`, only options of the renderer {name!r}; got {', '.join(others)}"
        )
    return found.get(name, {})


def _check_model(context: click.Context, path: str, how: Mapping[str, Any], engine: str | None, as_json: bool) -> None:
    from rlsdk.testing.model_agreement import ENGINE, agreement
    from rlsdk.testing.model_check import check_model
    from rlsdk.testing.model_subject import open_subject

    try:
        subject = open_subject(path, **how)
    except ConfigError as error:
        raise click.UsageError("; ".join(error.faults)) from error
    except (PluginError, OptionError) as error:
        raise click.UsageError(f"--renderer: {error}") from error
    common = {name: how[name] for name in ("trust_remote_code", "plugins")}
    compared = agreement(subject, path, engine=engine or ENGINE, **common)
    properties = [*check_model(subject), compared]
    ok = all(each.ok for each in properties)
    if as_json:
        described = [{"name": each.name, "ok": each.ok, "reason": each.reason} for each in properties]
        click.echo(json.dumps({"ok": ok, "properties": described}, indent=2, ensure_ascii=False))
    else:
        table = borderless(show_header=False)
        for each in properties:
            held = {"True": "[green]holds[/green]", "False": "[red]broken[/red]"}.get(str(each.ok), "[dim]n/a[/dim]")
            table.add_row(f"[cyan]{each.name}[/cyan]", held, escape(each.reason))
        console().print(table)
    if not ok:
        context.exit(FAULTY)


def _trace_model(context: click.Context, path: str, engine: str | None, trust_remote_code: bool, as_json: bool) -> None:
    from rlsdk.testing.model_agreement import ENGINE, first_difference, pick, traced
    from rlsdk.testing.model_subject import open_subject

    if engine not in (None, ENGINE):
        raise click.UsageError(
            f"--trace follows the modules of the engine {ENGINE!r}; got --engine {engine}. Without --trace, its "
            "logprobs are compared"
        )
    try:
        operations = traced(open_subject(path, trust_remote_code=trust_remote_code), path, trust_remote_code)
    except ConfigError as error:
        raise click.UsageError("; ".join(error.faults)) from error
    first = first_difference(operations)
    if as_json:
        # JSON has no infinity, which marks outputs of different shapes
        rows = [attrs.asdict(each) | {"difference": min(each.difference, 1e308)} for each in operations]
        click.echo(json.dumps({"ok": first is None, "first": first and first.name, "operations": rows}, indent=2))
    else:
        table = borderless("operation", "largest difference", "dtype", "shape")
        for each in pick(operations):
            colour = "red" if each is first else "cyan"
            shape = " × ".join(map(str, each.shape))
            table.add_row(f"[{colour}]{escape(each.name)}[/{colour}]", f"{each.difference:.3g}", each.dtype, shape)
        console().print(table)
        agree = f"engine and learner give the same numbers in all {len(operations)} operations"
        console().print(f"\nfirst difference: {first.name}" if first else f"\n{agree}", soft_wrap=True, markup=False)
    if first is not None:
        context.exit(FAULTY)


def _report(
    plugin: str,
    files: tuple[str, ...],
    kind: Kind | None,
    component: str | None,
    options: tuple[str, ...],
    tasks: tuple[str, ...],
    start: bool,
) -> Report:
    from rlsdk.testing.conformance import check_plugin, read_options, read_tasks

    plugins = Plugins(files)
    given = list(options)
    if plugin.rpartition(":")[0].endswith(".py"):
        if component:
            raise click.UsageError(f"--component {component}: {plugin} already names what is checked")
        plugin, kind, component, own = _named(plugins, plugin, kind)
        given += own
    if plugin not in plugins.entries and not plugin.endswith(".py"):
        hint = "; to check a model, give its folder: rlsdk check model PATH." if plugin == "model" else ""
        raise click.BadParameter(no_plugin(plugins, plugin, hint=hint), param_hint="PLUGIN")
    try:
        chosen: dict[str, Any] = {"options": read_options(given), "tasks": read_tasks(tasks)}
        report = check_plugin(plugins, plugin, kind=kind, component=component, start=start, **chosen)
    except (ValueFault, OptionError, UnknownComponentError) as error:
        raise click.UsageError(str(error)) from error
    if not report.findings and not report.broken:
        hooks = ", ".join(plugins.hooks(report.plugin))
        only = f"; its hooks ({hooks}) are not checked" if hooks else ""
        hint = f"mark a function or class as one, for example with @rlsdk.{kind or 'reward'}('NAME')"
        tool = f"; a tool needs no mark: rlsdk check {plugin}:NAME" if plugin.endswith(".py") else ""
        raise click.UsageError(f"no {kind or 'component'} found in {report.origin}{only}; {hint}{tool}")
    return report


def _named(plugins: Plugins, path: str, kind: Kind | None) -> tuple[str, Kind, str, list[str]]:
    """Return plugin, kind and name of the component by which `FILE.py:NAME` is checked, and options for it.

    It is a component of the file, or what its parameters tell: an agent, a reward of another trainer or else a tool.
    """
    file, _, name = path.rpartition(":")
    own = [each for (of, _), each in plugins.components(file).items() if each.name == name and kind in (None, of)]
    try:
        found: Any = None if own else find(path)
    except ValueFault as error:
        raise click.UsageError(str(error)) from error
    if component := own[0] if own else component_of(found):
        if kind not in (None, component.kind):
            raise click.UsageError(f"--kind {kind}: {path} is a {component.kind}")
        return file, component.kind, component.name, []
    if kind not in (None, "reward", "workflow"):
        raise click.UsageError(f"--kind {kind}: {path} is not marked; write @rlsdk.{kind}({name!r}) above it")
    try:
        parameters = tuple(inspect.signature(found).parameters)
    except (TypeError, ValueError):  # such as a value, or a function in C
        parameters = ()
    for native in ("reward", "workflow"):
        if parameters == ARGUMENTS[native]:
            text = f"{path} takes {', '.join(parameters)} like a {native}, but is not marked"
            raise click.UsageError(f"{text}; write @rlsdk.{native}({name!r}) above it")
    if kind == "reward" or (kind is None and _scores(plugins, path, found)):
        return CORE, *_with_option(plugins, "reward", "style", "path", path)
    if parameters[:3] == ("task", "base_url", "api_key"):
        return CORE, *_with_option(plugins, "workflow", "agent", "agent", path)
    return CORE, *_with_option(plugins, "workflow", "tools", "tools", [path])


def _scores(plugins: Plugins, path: str, obj: Any) -> bool:
    """Return True if an object in a file is a reward of another trainer, and not a tool, which may return text."""
    call = getattr(obj, "__call__", None) if inspect.isclass(obj) else obj  # noqa: B004 - of the class, not its type
    if not inspect.isfunction(call) or inspect.signature(call).return_annotation in (str, "str"):
        return False
    kind, component, _ = _with_option(plugins, "reward", "style", "path", path)
    try:
        plugins.resolve(plugins.reference(kind, component, {"path": path}))
    except OptionError as error:
        return "style" not in dict(error.faults)
    return True


def _with_option(plugins: Plugins, kind: Kind, marked_by: str, option: str, value: Any) -> tuple[Kind, str, list[str]]:
    """Return the built-in component that has an option, and the text that sets one of its options."""
    components = plugins.components(CORE, kind=kind).values()
    name = next(each.name for each in components if any(o.name == marked_by for o in each.options))
    return kind, name, [f"{name}.{option}={json.dumps(value)}"]


def _print(report: Report, seconds: float, started: bool) -> None:
    out = console()
    by_component = report.by_component()
    for kind in (kind for kind in get_args(Kind) if any(kind == k for k, _ in by_component)):
        table = borderless(title=kind, title_style="bold", show_header=False)
        for (held, name), findings in by_component.items():
            if held == kind:
                passed = sum(finding.outcome == "passed" for finding in findings)
                failed = sum(finding.outcome == "failed" for finding in findings)
                counts = f"[green]{passed} passed[/green]", f"[red]{failed} failed[/red]" if failed else ""
                table.add_row(f"[cyan]{escape(name)}[/cyan]", *counts, _remarks(findings))
        out.print(table)
    for finding in report.failed:
        out.print(f"\n[red]{escape(str(finding.fault))}[/red]", soft_wrap=True)
    for kind, cause in report.broken.items():
        out.print(f"\n[red]{kind}: {escape(cause)}[/red]", soft_wrap=True)
    held_kinds = [kind for kind in _STARTED if any(kind == held for held, _ in by_component)]
    if held_kinds and not started:
        told = " and ".join(f"{kind}s" for kind in held_kinds)
        more = f"rlsdk check {report.origin if report.origin.endswith('.py') else report.plugin} --start"
        out.print(
            f"\nonly the methods of {told} were checked; to start them with a small model and check what they do, "
            f"half a minute each: {more}",
            soft_wrap=True,
            markup=False,
        )
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in report.counts().items())
    plugin = f"{escape(report.plugin)} ({escape(report.origin)})"
    out.print(f"\n{plugin}: {counted(len(by_component), 'component')}, {outcomes} in {seconds:.1f} s")


def _remarks(findings: tuple[PropertyResult, ...]) -> str:
    """Return the names of the properties that failed, and why others were skipped."""
    failed = [finding.rule for finding in findings if finding.outcome == "failed"]
    reasons: dict[str, list[str]] = {}
    for finding in findings:
        if finding.outcome == "skipped":
            reasons.setdefault(finding.reason, []).append(finding.rule)
    skipped = [f"skipped {', '.join(rules)}: {reason}" for reason, rules in reasons.items()]
    return "; ".join(
        [*(f"[red]{escape(name)}[/red]" for name in failed), *(f"[dim]{escape(s)}[/dim]" for s in skipped)]
    )
