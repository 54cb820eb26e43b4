"""A group of commands that imports a command when it is typed, and turns errors into messages and exit statuses."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Mapping
from typing import Any

import click

from rlsdk import preflight
from rlsdk.cli import external
from rlsdk.errors import ConfigError, RlsdkError, install_command
from rlsdk.options import nearest

FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130
"""Exit status by which a shell reports a process ended by SIGINT."""


class LazyGroup(click.Group):
    """Commands known by name and help; their modules, and those of plugins' commands, are imported when typed."""

    def __init__(
        self, *args: Any, builtin: Mapping[str, str], check_machine: frozenset[str] = frozenset(), **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._builtin = builtin
        self._check_machine = check_machine

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands, those of plugins last."""
        return [*sorted(self._builtin), *(n for n in external.commands(self._builtin) if n not in self._builtin)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name in self._builtin:
            if cmd_name in self._check_machine:
                preflight.require(preflight.torch_companions())
            module = importlib.import_module(f"rlsdk.cli.{cmd_name}")
            command: click.Command = getattr(module, cmd_name)
            return command
        found = external.commands(self._builtin).get(cmd_name)
        return found.load() if found else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find what was typed; an unknown command is answered with the nearest."""
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-"):
            near = nearest(args[0], names)
            hint = f" Did you mean {near!r}?" if near else f" There are: {', '.join(names)}."
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing one."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(self._builtin.items()))
        others = external.commands(self._builtin)
        if others:
            with formatter.section("Commands of plugins"):
                formatter.write_dl([(name, command.summary) for name, command in others.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of rlsdk becomes its message, anything else keeps its traceback."""
        try:
            return super().invoke(ctx)
        except RlsdkError as error:
            if ctx.params.get("debug"):
                click.echo(traceback.format_exc(), err=True, nl=False)
            else:
                click.echo(f"rlsdk: {error}", err=True)
            ctx.exit(WRONG_INPUT if isinstance(error, ConfigError) else FAILED)
        except ModuleNotFoundError as error:
            remedy = install_command(error)
            if not remedy or ctx.params.get("debug"):
                raise
            stack = ctx.invoked_subcommand in self._check_machine
            more = "; a training needs the whole stack, 'rlsdk[cpu]' or 'rlsdk[gpu]'" if stack else ""
            click.echo(f"rlsdk: this needs {error.name}, which is not installed: {remedy}{more}", err=True)
            ctx.exit(FAILED)
        except KeyboardInterrupt:
            click.echo("rlsdk: interrupted", err=True)
            ctx.exit(INTERRUPTED)
