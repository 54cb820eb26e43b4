"""Parameters that several commands share."""

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
    help="Load a Python file as a plugin, under the file's name without .py; repeatable.",
)


class RunPath(click.ParamType[str]):
    """Path of a run: a folder, or a URL, which `click.Path` would take apart."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text as it was given."""
        return str(os.fspath(value))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Let the shell complete a folder."""
        return [CompletionItem(incomplete, type="dir")]
