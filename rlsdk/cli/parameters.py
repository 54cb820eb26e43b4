"""Parameters shared by several commands."""

from __future__ import annotations

import os
from typing import Any

import click
from click.shell_completion import CompletionItem

plugin_files = click.option(
    "--plugin",
    "files",
    metavar="FILE",
    multiple=True,
    help="Load a Python file as a plugin named after the file, without .py; repeatable.",
)


class RunPath(click.ParamType[str]):
    """Path of a run: a folder, or a URL, which `click.Path` would break."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text unchanged."""
        return str(os.fspath(value))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete folders in the shell."""
        return [CompletionItem(incomplete, type="dir")]
