"""Parameters shared by several commands, and commands that accept `key=value` settings after a config."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import attrs
import click
from click.shell_completion import CompletionItem

from rlsdk.errors import RlsdkError

_Command = TypeVar("_Command", bound=Callable[..., Any])
json_output = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
plugin_files = click.option(
    "--plugin",
    "files",
    metavar="FILE",
    multiple=True,
    help="Load a Python file as a plugin named after the file, without .py; repeatable.",
)


def config_and_settings(command: _Command) -> _Command:
    """Add the arguments CONFIG and `KEY=VALUE…` to a command."""
    settings = click.argument("settings", metavar="[KEY=VALUE]...", nargs=-1)
    return click.argument("config", type=click.Path(path_type=Path))(settings(command))


class RunPath(click.ParamType[str]):
    """Path of a run: a folder, or a URL, which `click.Path` would break."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text unchanged."""
        return str(os.fspath(value))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete folders in the shell."""
        return [CompletionItem(incomplete, type="dir")]


class FiniteRange(click.FloatRange):
    """A range of numbers; click's own lets NaN pass, and infinity where it has no limit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read a number, and refuse one that is not finite."""
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


class SettingsCommand(click.Command):
    """A command with `key=value` settings; an option such as `--batch_size 4` gets a hint how to write the setting."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; for an unknown option that looks like a setting, explain how settings are written."""
        given = list(args)  # click removes them one by one
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            key = error.option_name.lstrip("-")
            if key in ("config", "config-file", "config_file", "config-path", "config-name"):
                hint = f"{error.message} The configuration is given without an option: {ctx.command_path} CONFIG.yaml"
                raise click.NoSuchOption(error.option_name, hint, ctx=ctx) from None
            from rlsdk.config import Config  # only if something is wrong: some commands need no configuration
            from rlsdk.migration.recognition import hint as counterpart

            is_setting = key.partition(".")[0] in {field.name for field in attrs.fields(Config)}
            if not is_setting and (owners := _commands_with(error.option_name, ctx)):
                hint = f"{error.message} It is an option of {' and '.join(owners)}."
                raise click.NoSuchOption(error.option_name, hint, ctx=ctx) from None
            known = "" if is_setting else counterpart(key)
            if error.option_name.startswith("--") and (known or is_setting or not error.possibilities):
                written = known or f": {key}=…{_written(error.option_name, given)}"
                hint = f"{error.message} Settings have no dashes{written}"
                raise click.NoSuchOption(error.option_name, hint, ctx=ctx) from None
            raise


def _commands_with(option: str, ctx: click.Context) -> list[str]:
    """Names of the other commands of the program that have an option."""
    if ctx.parent is None or not isinstance(group := ctx.parent.command, click.Group):
        return []
    found = []
    for name in group.list_commands(ctx.parent):
        with suppress(RlsdkError, ImportError):  # broken, or its packages are not installed: the others still count
            command = group.get_command(ctx.parent, name)
            if command is not None and any(option in parameter.opts for parameter in command.params):
                found.append(f"`{ctx.parent.command_path} {name}`")
    return found


def _written(option: str, args: Sequence[str]) -> str:
    """Return a hint how to write a setting given with dashes, including its value; empty without a value."""
    for arg, following in itertools.pairwise([*args, ""]):
        name, _, value = arg.partition("=")
        if name == option and (value := value or following) and not value.startswith("-"):
            return f"; write {name.lstrip('-')}={value}"
    return ""
