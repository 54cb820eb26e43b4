"""A command group that imports commands on use, and turns errors into messages and exit statuses."""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Container, Mapping
from typing import Any

import attrs
import click

from rlsdk import preflight
from rlsdk.errors import ConfigError, PluginError, RlsdkError, described, install_command, nearest
from rlsdk.plugins.discovery import declared
from rlsdk.plugins.guard import imported

GROUP = "rlsdk.v1.commands"
"""Entry point group of plugin commands."""
FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130
"""Exit status that shells report for a process ended by SIGINT."""
_OF_FILES = frozenset(
    {
        errno.EACCES,
        errno.EBADF,
        errno.EDQUOT,
        errno.EEXIST,
        errno.EFBIG,
        errno.EIO,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOSPC,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)
"""Errors about a file that the user named, or about the disk: the user can fix them without a traceback."""
_PRINTERS = frozenset({"click.utils", "rich.console"})
"""Modules through which commands print."""


@attrs.frozen
class PluginCommand:
    """A plugin's command, read from package metadata without importing it.

    Attributes:
        name: Name of the command as typed.
        origins: The distributions that declare it, with their versions; more than one is a conflict.
        point: The entry point.
        shadows: True if rlsdk has a command of the same name, which then takes precedence.
    """

    name: str
    origins: tuple[str, ...]
    point: importlib.metadata.EntryPoint
    shadows: bool = False

    @property
    def summary(self) -> str:
        """One-line description for the listing."""
        if self.shadows:
            return f"broken: the name belongs to rlsdk; {self.origins[0]} must choose another"
        if len(self.origins) > 1:
            return f"broken: claimed by {' and '.join(self.origins)}"
        return f"of {self.origins[0]}"

    def load(self) -> click.Command:
        """Import the command.

        Raises:
            PluginError: Two distributions claim it, it fails to import, or it is not a click command.
        """
        if len(self.origins) > 1:
            raise PluginError(
                f"command {self.name!r} is claimed by {' and '.join(self.origins)}; uninstall one of them"
            )
        try:
            with imported(f"command {self.name!r} of {self.origins[0]}"):
                found = self.point.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit, or the panic of a library in Rust
            raise PluginError(f"command {self.name!r} of {self.origins[0]} is broken: {described(error)}") from error
        if not isinstance(found, click.Command):
            raise PluginError(
                f"command {self.name!r} of {self.origins[0]} is broken: {self.point.value} is a "
                f"{type(found).__name__}; expected a click command"
            )
        return found


def plugin_commands(builtin: Container[str]) -> dict[str, PluginCommand]:
    """Return the commands that installed distributions declare, by name, without importing them."""
    found: dict[str, dict[str, importlib.metadata.EntryPoint]] = {}
    for point in declared(GROUP):
        origin = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
        found.setdefault(point.name, {}).setdefault(origin, point)  # once if there is both an egg-info and a dist-info
    return {
        name: PluginCommand(name, tuple(claims), next(iter(claims.values())), name in builtin)
        for name, claims in sorted(found.items())
    }


class SuggestingGroup(click.Group):
    """A group that suggests the nearest command for an unknown one.

    Attributes:
        noun: What its commands are, in the error message.
        other_names: Other name -> name of the command.
    """

    noun = "command"
    other_names: Mapping[str, str] = {}

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the typed command."""
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-"):
            near = self.other_names.get(args[0]) or nearest(args[0], names)
            hint = f"Did you mean {near!r}?" if near else f"There are: {', '.join(names)}."
            ctx.fail(f"No such {self.noun} {args[0]!r}. {hint}")
        return super().resolve_command(ctx, args)


class LazyGroup(SuggestingGroup):
    """Commands listed by name and help; their modules, and those of plugin commands, are imported on use."""

    def __init__(
        self, *args: Any, builtin: Mapping[str, str], check_machine: frozenset[str] = frozenset(), **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._builtin = builtin
        self._check_machine = check_machine

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, those of plugins last."""
        return [*sorted(self._builtin), *(n for n in plugin_commands(self._builtin) if n not in self._builtin)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name in self._builtin:
            if cmd_name in self._check_machine:
                preflight.require(preflight.torch_companions())
            name = cmd_name.replace("-", "_")
            module = importlib.import_module(f"rlsdk.cli.{name}")
            command: click.Command = getattr(module, name)
            return command
        found = plugin_commands(self._builtin).get(cmd_name)
        return found.load() if found else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(self._builtin.items()))
        others = plugin_commands(self._builtin)
        if others:
            with formatter.section("Commands of plugins"):
                formatter.write_dl([(name, command.summary) for name, command in others.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; print rlsdk's errors as messages, any others with a traceback."""
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
            more = "; training needs the whole stack, 'rlsdk[cpu]' or 'rlsdk[gpu]'" if stack else ""
            click.echo(f"rlsdk: this needs {error.name}, which is not installed: {remedy}{more}", err=True)
            ctx.exit(FAILED)
        except OSError as error:
            if error.errno not in _OF_FILES or ctx.params.get("debug"):
                raise
            named = isinstance(error.filename, str | bytes | os.PathLike)  # not if a descriptor was opened
            place = os.fsdecode(error.filename) if named else "a file"
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            if error.filename is None and any(frame.f_globals["__name__"] in _PRINTERS for frame in frames):
                place = "standard output"
                sys.stdout = None  # Python would try again at exit, and fail again
            click.echo(f"rlsdk: {place}: {error.strerror}; --debug before the command shows where", err=True)
            ctx.exit(FAILED)
        except KeyboardInterrupt as error:
            click.echo(f"rlsdk: interrupted {error}".rstrip(), err=True)
            ctx.exit(INTERRUPTED)
