"""The command line: one module a command, imported when the command is typed."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import click

from rlsdk.cli.lazy import LazyGroup

COMMANDS = {
    "check": "Check a plugin's components, or a model's tokenizer and chat template.",
    "compare": "Compare runs: settings that differ, results with confidence intervals, winners.",
    "config": "Show every key of a configuration, with its type, default, unit and meaning.",
    "data": "Make and inspect data sets.",
    "debug": "Serve a configuration's engine, and try its workflow on one task, without training.",
    "diagnose": "Say from its metrics what is wrong with a run, and what to do.",
    "doctor": "Check this machine: what is missing, and what to do about it.",
    "engines": "Show the engines of a run, and change their number while it trains.",
    "eval": "Evaluate a model on held-out tasks, without training.",
    "explain": "Check a configuration and say what it would run; nothing starts.",
    "export": "Write a run's model to a folder that transformers can open.",
    "migrate": "Convert a configuration of another trainer to one of rlsdk.",
    "model": "Make models.",
    "new": "Write a plugin to start from: a package, or one file.",
    "plugins": "List plugins, and the components and options that they offer.",
    "recipe": "List, show and run recipes: complete trainings, with measured curves.",
    "replay": "Recompute a batch that veRL, TRL, slime or OpenRLHF dumped, and show what differs.",
    "report": "Write a run's report: one HTML page without scripts or links to the network.",
    "rollouts": "Show the rollouts of a run that meet a condition.",
    "score": "Score the responses in a file with a reward.",
    "simulate": "Predict the step times of a training by simulation; nothing starts.",
    "sweep": "Train a configuration with every combination of some settings, and compare.",
    "tournament": "Compare algorithms over a suite of tasks and several seeds.",
    "trace": "Write the times of a run as a trace that Perfetto opens.",
    "train": "Train a model.",
    "view": "Show runs on a local web page, also while they train.",
    "what-if": "Show what another reward, algorithm or filter would have made of a run's rollouts.",
}
"""Name -> help; each is the attribute of that name, with underscores, in the module `rlsdk.cli.NAME`."""

NOT_READ = 141
"""Exit status by which a shell reports a process ended by SIGPIPE."""
EXIT_SECONDS = 60.0
"""Time that threads and exit hooks of plugins and libraries get once a command has ended."""
READS_MODELS = frozenset(
    {
        "data",
        "debug",
        "eval",
        "explain",
        "export",
        "migrate",
        "model",
        "replay",
        "simulate",
        "sweep",
        "tournament",
        "train",
        "what-if",
    }
)
"""Commands that import transformers, and so meet a torchvision that does not fit this torch."""


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from rlsdk.plugins import version

    click.echo(f"rlsdk {version()}")
    context.exit()


@click.group("rlsdk", cls=LazyGroup, builtin=COMMANDS, check_machine=READS_MODELS)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def root(debug: bool) -> None:
    """Train language models by reinforcement learning.

    Exit status: 0 success, 1 a failure, 2 a wrong configuration or command line, 130 interrupted, 141 nobody reads the
    output any more.
    """


def main(arguments: Sequence[str] | None = None) -> Any:
    """Run a command and leave the process with its exit status.

    Args:
        arguments: Command-line arguments; if omitted, `sys.argv`'s.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower().replace("-", "") != "utf8":
        # A bar or an arrow that the terminal cannot show must not end a command.
        sys.stdout.reconfigure(errors="replace")
    output = sys.stdout
    try:
        return root.main(args=None if arguments is None else list(arguments), prog_name="rlsdk")
    except SystemExit as leaving:
        if sys.stdout not in (output, None):  # click replaces an output that nobody reads any more, as in `| head`
            leaving.code = NOT_READ
        if arguments is None:  # the program's own command line: nothing of it is needed any more
            exits = threading.Timer(EXIT_SECONDS, _exit, (leaving.code,))
            exits.daemon = True
            exits.start()
        raise


def _exit(status: str | int | None) -> None:
    """Exit though threads of plugins or libraries still run, which Python would wait for."""
    own = (threading.main_thread(), threading.current_thread())
    names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread not in own]
    what = f"these threads still run: {', '.join(names)}" if names else "its exit hooks still run"
    sys.stderr.write(f"rlsdk: everything is done, but {what}; the process exits after {EXIT_SECONDS:g} s\n")
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))
