"""What the processes of a run do with themselves."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path


def redirect(path: str | os.PathLike[str]) -> None:
    """Send what this process writes to stdout and stderr, C code included, to the end of a file."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with file.open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def settle() -> None:
    """Keep the garbage collector from going through what was imported and loaded, again and again: it stays."""
    gc.collect()
    gc.freeze()
