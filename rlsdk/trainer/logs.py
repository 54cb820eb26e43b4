"""Where the package's own log goes."""

from __future__ import annotations

import logging

from rich.console import Console
from rich.logging import RichHandler

from rlsdk.config import Plan


def log_to(plan: Plan, console: Console, file: str = "") -> None:
    """Send the package's log to a person, as the config says, and all of it to a file.

    Args:
        plan: The plan.
        console: The person's.
        file: Name of the file in the run's folder `logs`; empty: none.
    """
    root = logging.getLogger("rlsdk")
    root.setLevel(logging.DEBUG)
    root.propagate = False
    for handler in list(root.handlers):
        root.removeHandler(handler)
    shown = RichHandler(console=console, show_path=False)
    shown.setLevel(plan.config.log_level.upper())
    root.addHandler(shown)
    if file:
        kept = logging.FileHandler(plan.folder / "logs" / file, encoding="utf-8")
        kept.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(kept)
