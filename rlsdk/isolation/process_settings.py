"""Settings of the whole process that code of plugins may change, such as torch's default dtype: notice and undo it."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)
WORKING_FOLDER = "the working folder"
"""Name of that setting."""
_STREAMS = ("stdout", "stderr")
_NUMPY_DEFAULT = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}


def _module(name: str) -> Any:
    """Return an imported module; None if it is not imported yet, so that its settings have their defaults."""
    module = sys.modules.get(name)
    return None if module is None or getattr(module.__spec__, "_initializing", False) else module


def _working_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _enable_log(disabled: bool) -> None:
    for name, each in list(logging.root.manager.loggerDict.items()):
        if name.split(".")[0] == "rlsdk" and isinstance(each, logging.Logger):
            each.disabled = disabled


def _closed() -> frozenset[str]:
    return frozenset(name for name in _STREAMS if getattr(getattr(sys, name), "closed", False))


def _closed_descriptors() -> frozenset[str]:
    closed = set()
    for number, name in enumerate(_STREAMS, 1):
        try:
            os.fstat(number)
        except OSError:
            closed.add(name)
    return frozenset(closed)


def _reopen_descriptors(but: frozenset[str]) -> None:
    """Open descriptors 1 and 2 again; otherwise the next file or socket gets the number, and all output goes into it.

    Where a closed descriptor led is lost, so it leads to the other stream, or nowhere if that is closed as well.
    """
    closed = _closed_descriptors()
    for name in sorted(closed - but):
        number = _STREAMS.index(name) + 1
        if len(closed) < len(_STREAMS):
            os.dup2(3 - number, number)
            continue
        nowhere = os.open(os.devnull, os.O_WRONLY)  # may get a lower number, since that is closed, too
        if nowhere != number:
            os.dup2(nowhere, number)
            os.close(nowhere)


def reopen_streams(but: frozenset[str] = frozenset()) -> None:
    """Open standard streams that were closed, since what a program says next would raise an error; leave out `but`."""
    one = sys.stdout is sys.stderr  # as in a command whose standard output is data
    for name in _closed() - but:  # their descriptors are still open
        number = _STREAMS.index(name) + 1
        setattr(sys, name, open(number, "w", buffering=1, errors="backslashreplace", closefd=False))  # noqa: SIM115
    if one:
        sys.stdout = sys.stderr


def _torch(read: Callable[[Any], str], default: str) -> Callable[[], str]:
    return lambda: read(torch) if (torch := _module("torch")) else default


_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "torch's default dtype": (
        _torch(lambda torch: str(torch.get_default_dtype()), "torch.float32"),
        lambda before: sys.modules["torch"].set_default_dtype(
            getattr(sys.modules["torch"], before.removeprefix("torch."))
        ),
    ),
    "torch's default device": (
        _torch(lambda torch: str(torch.get_default_device()), "cpu"),
        lambda before: sys.modules["torch"].set_default_device(None if before == "cpu" else before),
    ),
    "torch's recording of gradients": (
        _torch(lambda torch: "on" if torch.is_grad_enabled() else "off", "on"),
        lambda before: sys.modules["torch"].set_grad_enabled(before == "on"),
    ),
    "NumPy's handling of floating-point errors": (
        lambda: numpy.geterr() if (numpy := _module("numpy")) else _NUMPY_DEFAULT,
        lambda before: sys.modules["numpy"].seterr(**before),
    ),
    "the timeout of new sockets": (socket.getdefaulttimeout, socket.setdefaulttimeout),
    "the level below which nothing is logged": (lambda: logging.root.manager.disable, logging.disable),
    # `logging.config.dictConfig` turns off all loggers that it finds, unless it is told not to.
    "whether rlsdk's loggers are disabled": (lambda: log.disabled, _enable_log),
    "closed descriptors of standard streams": (_closed_descriptors, _reopen_descriptors),
    "closed standard streams": (_closed, reopen_streams),
    WORKING_FOLDER: (_working_folder, lambda before: None if before is None else os.chdir(before)),
}
"""Name -> function that returns a setting, and function that sets it back."""


class ProcessSettings:
    """The settings of this process as they are when it is created."""

    def __init__(self) -> None:
        self._before = {name: read() for name, (read, _) in _SETTINGS.items()}

    def undo(self) -> dict[str, tuple[Any, Any]]:
        """Undo all changes since then; return the name of each changed setting, with its values before and after."""
        changes = {}
        for name, (read, write) in _SETTINGS.items():
            before, now = self._before[name], read()
            if now != before:
                write(before)
                changes[name] = before, now
        return changes


@contextmanager
def settings_kept() -> Iterator[dict[str, tuple[Any, Any]]]:
    """Undo changes that the block makes to settings of the process, also if it raises.

    Yields:
        Name of each changed setting -> its values before and after, filled in when the block ends.
    """
    settings = ProcessSettings()
    changes: dict[str, tuple[Any, Any]] = {}
    try:
        yield changes
    finally:
        changes |= settings.undo()


def told(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Return changes of settings in words."""
    return "; ".join(f"{name}, from {_shown(before)} to {_shown(now)}" for name, (before, now) in changes.items())


def _shown(value: Any) -> str:
    return ", ".join(sorted(value)) or "none" if isinstance(value, frozenset) else str(value)
