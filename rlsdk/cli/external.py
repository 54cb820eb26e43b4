"""Commands that plugins bring: entry points of `rlsdk.v1.commands`, known from metadata, loaded when typed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Container

import attrs
import click

from rlsdk.errors import PluginError
from rlsdk.plugins.entries import declared

GROUP = "rlsdk.v1.commands"


@attrs.frozen
class External:
    """A plugin's command, read from package metadata without importing it.

    Attributes:
        name: Name of the command as typed.
        origins: The distributions that declare it, with their versions; more than one is a clash.
        point: The entry point.
        shadows: True if rlsdk has a command of the same name, which then takes precedence.
    """

    name: str
    origins: tuple[str, ...]
    point: importlib.metadata.EntryPoint
    shadows: bool = False

    @property
    def summary(self) -> str:
        """One line for the listing."""
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
            found = self.point.load()
        except Exception as error:  # a plugin's import may raise anything; the user learns whose fault it is
            cause = f"{type(error).__name__}: {error}"
            raise PluginError(f"command {self.name!r} of {self.origins[0]} is broken: {cause}") from error
        if not isinstance(found, click.Command):
            raise PluginError(
                f"command {self.name!r} of {self.origins[0]} is broken: {self.point.value} is a "
                f"{type(found).__name__}; expected a click command"
            )
        return found


def commands(builtin: Container[str]) -> dict[str, External]:
    """Every command that installed distributions declare, by name; nothing is imported.

    Args:
        builtin: Names that nobody else may take.
    """
    found: dict[str, dict[str, importlib.metadata.EntryPoint]] = {}
    for point in declared(GROUP):
        origin = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
        found.setdefault(point.name, {}).setdefault(origin, point)  # once for an egg-info beside a dist-info
    return {
        name: External(name, tuple(claims), next(iter(claims.values())), name in builtin)
        for name, claims in sorted(found.items())
    }
