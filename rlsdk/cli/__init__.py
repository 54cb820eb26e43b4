"""The command line: one module per command, imported when the command is used."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

try:
    import click

    from rlsdk.cli.lazy import LazyGroup
    from rlsdk.isolation.process import interrupt_on_hangup, interrupt_on_sigterm
except KeyboardInterrupt:  # before `LazyGroup` can report it
    sys.stderr.write("rlsdk: interrupted\n")
    sys.exit(130)

COMMANDS = {
    "check": "Check a plugin's components, or a model's tokenizer and chat template.",
    "compare": "Compare runs: settings that differ, results with confidence intervals, winners.",
    "config": "Show all configuration keys with type, default, unit and description.",
    "data": "Create and inspect data sets.",
    "debug": "Serve a configuration's engine and try its workflow on one task, without training.",
    "diagnose": "Diagnose problems of a run from its metrics, with advice.",
    "doctor": "Check this machine for missing requirements, with remedies.",
    "engines": "Show the engines of a run, or change their number while it trains.",
    "eval": "Evaluate a model on held-out tasks, without training.",
    "explain": "Check a configuration and show what it would run, without starting it.",
    "export": "Export a run's model in transformers format.",
    "migrate": "Convert another trainer's configuration to rlsdk's.",
    "model": "Create models.",
    "new": "Create a plugin from a template: a package, or one file.",
    "plugins": "List plugins with their components and options.",
    "recipe": "List, show and run recipes: complete training runs with measured results.",
    "replay": "Recompute a batch dumped by veRL, TRL, slime or OpenRLHF, and show differences.",
    "report": "Write a run's report: one self-contained HTML page without scripts.",
    "rollouts": "Query the rollouts of a run.",
    "score": "Score the responses in a file with a reward.",
    "simulate": "Predict the step times of a run by simulation, without starting it.",
    "sweep": "Train a configuration with every combination of given settings, and compare.",
    "tournament": "Compare algorithms over a suite of tasks and several seeds.",
    "trace": "Export the timings of a run as a trace for Perfetto.",
    "train": "Train a model.",
    "view": "Show runs on a local web page, live while they train.",
    "what-if": "Apply another reward, algorithm or filter to a run's saved rollouts.",
}
"""Name -> help; a command is the attribute of its name, with underscores, in the module `rlsdk.cli.NAME`."""

NOT_READ = 141
"""Exit status that shells report for a process ended by SIGPIPE."""
EXIT_SECONDS = 60.0
"""Seconds that threads and exit hooks of plugins and libraries get after a command has ended."""
INSPECTION_EXIT_SECONDS = 2.0
"""The same after a command that only inspects plugins and configurations: nothing is left to save or to send."""
INSPECTS = frozenset({"check", "config", "explain", "plugins"})
"""These commands."""
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
"""Commands that import transformers, and thereby a torchvision that may not match torch."""


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from rlsdk.plugins import version

    click.echo(f"rlsdk {version()}")
    context.exit()


@click.group("rlsdk", cls=LazyGroup, builtin=COMMANDS, check_machine=READS_MODELS)
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
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

    Exit status: 0 success, 1 failure, 2 invalid configuration or command line, 130 interrupted, 141 output pipe closed.
    """


def main(arguments: Sequence[str] | None = None) -> Any:
    """Run a command and exit the process with its status.

    Args:
        arguments: Command-line arguments; defaults to those of `sys.argv`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Neither an arrow that the terminal cannot encode nor a folder whose name is not UTF-8 makes a command fail.
        is_utf8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "replace")
    if arguments is None and "--json" in sys.argv:
        _reserve_stdout()
    output = sys.stdout
    if arguments is None and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, interrupt_on_sigterm)
    if arguments is None and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # under `nohup`, it stays ignored
        signal.signal(signal.SIGHUP, interrupt_on_hangup)
    try:
        return root.main(args=None if arguments is None else list(arguments), prog_name="rlsdk")
    except SystemExit as leaving:
        if sys.stdout not in (output, None):  # click replaces an output whose reader is gone, as in `| head`
            leaving.code = NOT_READ
        if arguments is None:  # only if this is the process's own command line, so that nothing else needs the process
            command = next((each for each in sys.argv[1:] if not each.startswith("-")), "")
            seconds = INSPECTION_EXIT_SECONDS if command in INSPECTS else EXIT_SECONDS
            exits = threading.Timer(seconds, _exit, (leaving.code, seconds))
            exits.daemon = True
            exits.start()
        raise


def _reserve_stdout() -> None:
    """Keep standard output for this command's JSON: what libraries and their processes write to it goes to stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stderr is not None:
        sys.stdout.flush()
        own = os.dup(1)
        os.dup2(2, 1)
        sys.stdout = open(own, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: SIM115 - to the end


def _exit(status: str | int | None, seconds: float) -> None:
    """Exit even if threads of plugins or libraries, which Python would wait for, are still running."""
    own = (threading.main_thread(), threading.current_thread())
    names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread not in own]
    what = f"these threads still run: {', '.join(names)}" if names else "its exit hooks still run"
    sys.stderr.write(f"rlsdk: everything is done, but {what}; the process exits after {seconds:g} s\n")
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))
