"""Commands that take `key=value` settings behind a config."""

from __future__ import annotations

import click


class SettingsCommand(click.Command):
    """A command whose settings have no dashes, and which says so to whoever writes `--batch_size 4`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; an unknown option that looks like a setting is answered with how a setting is written."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if not error.possibilities and error.option_name.startswith("--"):
                key, _, value = error.option_name.lstrip("-").partition("=")
                hint = f"{error.message} Settings have no dashes: {key}={value or '…'}"
                raise click.NoSuchOption(error.option_name, hint, ctx=ctx) from None
            raise
