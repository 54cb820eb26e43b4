"""Import the code of plugins without letting it end, copy, move or block the process unnoticed."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from types import ModuleType
from typing import NoReturn

from rlsdk.errors import place_in, place_of
from rlsdk.isolation.process_settings import WORKING_FOLDER, settings_kept, told

log = logging.getLogger(__name__)
SLOW_SECONDS = 20.0
"""Seconds after which an import that is still running is reported."""
_IMPORTERS = (__name__, "rlsdk.plugins.manager", "rlsdk.plugins.discovery", "rlsdk.cli.lazy")
"""Modules that import plugins."""


def import_module(name: str, what: str) -> ModuleType:
    """Import a module of a plugin, within `imported` if its code has yet to run."""
    with nullcontext() if name in sys.modules else imported(what):
        return importlib.import_module(name)


@contextmanager
def imported(what: str) -> Iterator[None]:
    """Import a plugin in this block.

    What it prints goes to standard error, since standard output is the command's. An import that takes long is
    reported, and an interrupted one is named. Settings of the process that it changes, such as torch's default dtype,
    are changed back, with a warning.

    Raises:
        ImportError: The import changed the working folder, which is changed back.
        SystemExit: The import called `os._exit`.
    """
    process, main = os.getpid(), threading.get_ident()
    slow = threading.Timer(SLOW_SECONDS, _report, (what, main))
    slow.daemon = True
    slow.start()
    try:
        with settings_kept() as changes, exits_raised(), redirect_stdout(sys.stderr):
            yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"while importing {what}{_at(place_of(error))}") from error
    finally:
        slow.cancel()
        if os.getpid() != process:
            os.write(2, f"rlsdk: {what} forks when it is imported; its child ends here\n".encode())
            os._exit(1)  # two processes would write to the same output and run folder
        slow.join()
    if WORKING_FOLDER in changes:
        folder, moved = changes[WORKING_FOLDER]
        raise ImportError(
            f"it changes the working folder from {folder} to {moved}, where relative paths of the configuration would "
            "be looked up; remove os.chdir, and build paths of its own files from Path(__file__).parent"
        )
    if changes:
        log.warning("%s changes settings of the whole process: %s; they are changed back", what, told(changes))


@contextmanager
def exits_raised() -> Iterator[None]:
    """Let `os._exit` raise SystemExit in this thread, so that code that calls it is reported instead of ending all."""
    leave, process, thread = os._exit, os.getpid(), threading.get_ident()

    def raised(status: int) -> NoReturn:
        if (os.getpid(), threading.get_ident()) != (process, thread):  # a forked process must really end
            leave(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = raised
    try:
        yield
    finally:
        os._exit = leave


def _report(what: str, thread: int) -> None:
    frame = sys._current_frames().get(thread)
    calls = traceback.walk_stack(frame) if frame is not None else ()
    of_plugin = [*itertools.takewhile(lambda call: call[0].f_globals.get("__name__") not in _IMPORTERS, calls)]
    place = place_in(reversed(of_plugin))
    log.warning("the import of %s has taken %g s so far%s", what, SLOW_SECONDS, _at(place))


def _at(place: str) -> str:
    return f", at {place}" if place else ""
