"""Destinations of the package's own log."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
from contextlib import suppress

from rich.console import Console
from rich.logging import RichHandler

from rlsdk.config import Plan
from rlsdk.plugins import version

log = logging.getLogger(__name__)


class _LogFile(logging.FileHandler):
    """Log file that may become unwritable; the other handlers report this once, and the run continues."""

    _reported = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - a name of `logging`
        """Log the first error of the file system; without this, each record would print a stack trace."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._reported:
            self._reported = True
            log.warning("%s cannot be written: %s", self.baseFilename, error.strerror)

    def close(self) -> None:
        """Close the file; records that did not fit on the disk are lost."""
        with suppress(OSError):
            super().close()


def _handler(console: Console) -> logging.Handler:
    """Return a handler that wraps records in a terminal, and otherwise writes one line per record, for grep."""
    if console.is_terminal:
        return RichHandler(console=console, show_path=False)
    handler = logging.StreamHandler(console.file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    return handler


def log_to(plan: Plan, console: Console | logging.Handler, file: str = "") -> None:
    """Send the package's log to a console, at the config's level, and in full to a file that begins with the settings.

    Args:
        plan: The plan.
        console: Console for the user, or a handler in its place.
        file: Name of the file in the run's folder `logs`; empty for none.
    """
    root = logging.getLogger("rlsdk")
    root.setLevel(logging.DEBUG)
    root.propagate = False
    for handler in list(root.handlers):
        root.removeHandler(handler)
        if isinstance(handler, _LogFile):  # from an earlier run in this process
            handler.close()
    shown = _handler(console) if isinstance(console, Console) else console
    shown.setLevel(plan.config.log_level.upper())
    root.addHandler(shown)
    if file:
        kept = _LogFile(plan.folder / "logs" / file, encoding="utf-8")
        kept.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(kept)
        log.debug("rlsdk %s: run %r in %s", version(), plan.config.name, plan.folder)
        log.debug("process %d on %s", os.getpid(), platform.node())
        log.debug("settings: %s", json.dumps(plan.tree, default=str))
