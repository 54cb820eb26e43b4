"""`rlsdk view`."""

from __future__ import annotations

import asyncio
import webbrowser
from pathlib import Path

import click

from rlsdk.cli.parameters import RunPath

PORT = 7842
"""Default port of the page, if it is free."""


@click.command()
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=RunPath())
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="PORT", help="Port to listen on.  [default: 7842, or a free one]"
)
@click.option(
    "--host",
    metavar="HOST",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; if it is not local, clients need the printed token.",
)
@click.option("--no-open", is_flag=True, help="Do not open a browser.")
@click.option(
    "--studio",
    is_flag=True,
    help="Add the studio: edit configurations in a form, saved below this folder; start, stop and resume runs.",
)
def view(runs: tuple[str, ...], port: int | None, host: str, no_open: bool, studio: bool) -> None:
    """Show runs on a local web page, live while they train: curves, timings, processes, every rollout and token.

    RUN is the folder of a run, a folder of such folders, or a URL that runs are uploaded to; by default, `runs`. The
    address of the page is printed on its own line. Ctrl-C stops the server; runs started from the studio continue.
    """
    from rlsdk.errors import RunError

    if not runs and not studio and not Path("runs").exists():
        raise RunError(
            "there is no folder `runs` here; start `rlsdk view` in the folder in which you trained, or name the folder "
            "or URL of a run"
        )
    asyncio.run(_view(runs or ("runs",), port, host, opens=not no_open, studio=studio))


async def _view(runs: tuple[str, ...], port: int | None, host: str, *, opens: bool, studio: bool) -> None:
    from rlsdk.errors import EnvironmentFault
    from rlsdk.loops.signals import on_interrupt
    from rlsdk.viewer.service import ViewerService, new_token, secret, serve
    from rlsdk.viewer.studio.studio import Studio

    ended = asyncio.Event()
    on_interrupt(ended.set)
    if studio:  # with a token on any address: other users of this machine can reach loopback, too
        service = ViewerService(runs, token=secret(), studio=Studio(Path.cwd()))
    else:
        service = ViewerService(runs, token=new_token(host))

    def ready(address: str) -> None:
        click.echo(address)
        click.echo("Ctrl-C stops the server.", err=True)
        if opens:
            webbrowser.open(address)

    try:
        try:
            await serve(service, host, PORT if port is None else port, ready, ended)
        except EnvironmentFault:
            if port is not None:
                raise
            await serve(service, host, 0, ready, ended)
    finally:
        service.close()
