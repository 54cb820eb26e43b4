"""Arguments that name a run: a folder, or the URL of one."""

from __future__ import annotations

import os
from typing import Any

import click
from click.shell_completion import CompletionItem


class RunPath(click.ParamType[str]):
    """A folder, or a URL, which `click.Path` would take apart."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text as it was given."""
        return str(os.fspath(value))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Let the shell complete a folder."""
        return [CompletionItem(incomplete, type="dir")]
