"""Code of plugins that changes settings of the whole process."""

from __future__ import annotations

import logging
import logging.config
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rlsdk.isolation.process_settings import settings_kept, told

CHANGES: dict[str, tuple[Callable[[], object], str]] = {
    "dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        "torch's default dtype, from torch.float32 to torch.float64",
    ),
    "device": (lambda: torch.set_default_device("meta"), "torch's default device, from cpu to meta"),
    "gradients": (lambda: torch.set_grad_enabled(False), "torch's recording of gradients, from on to off"),
    "NumPy": (lambda: np.seterr(all="raise"), "NumPy's handling of floating-point errors, from {'divide': 'warn'"),
    "sockets": (lambda: socket.setdefaulttimeout(0.5), "the timeout of new sockets, from None to 0.5"),
    "level": (lambda: logging.disable(logging.ERROR), "the level below which nothing is logged, from 0 to 40"),
    "loggers": (
        lambda: logging.config.dictConfig({"version": 1}),
        "whether rlsdk's loggers are disabled, from False to True",
    ),
    "folder": (lambda: os.chdir("/"), "the working folder, from "),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told_and_undone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    change, said = CHANGES[name]
    with settings_kept() as before:
        pass
    with settings_kept() as changes:
        change()
    assert told(changes).startswith(said)
    with settings_kept() as after:
        assert torch.zeros(1).dtype == torch.float32 and torch.zeros(1).device.type == "cpu"
        assert torch.is_grad_enabled() and socket.socket().gettimeout() is None
        assert Path.cwd() == tmp_path and logging.getLogger("rlsdk.trainer").isEnabledFor(logging.WARNING)
    assert before == after == {}


def test_a_change_before_an_error_is_undone() -> None:
    with pytest.raises(ZeroDivisionError), settings_kept():
        torch.set_grad_enabled(False)
        _ = 1 / 0
    assert torch.is_grad_enabled()


def test_closed_standard_streams_are_opened_again_and_stay_one_where_they_were() -> None:
    code = """
import contextlib, sys
from rlsdk.isolation.process_settings import settings_kept, told
with settings_kept() as changes:
    sys.stdout.close()
print("data", flush=True)
with contextlib.redirect_stdout(sys.stderr):  # as in commands whose standard output is data
    with settings_kept() as again:
        sys.stdout.close()
    print("text")
    print(told(again), file=sys.stderr)
print(told(changes))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "data\nclosed standard streams, from none to stdout\n"
    assert ran.stderr == "text\nclosed standard streams, from none to stderr, stdout\n"


@pytest.mark.parametrize("closed", ["1", "2", "1, 2"])
def test_closed_descriptors_are_opened_again_before_another_file_gets_their_number(closed: str, tmp_path: Path) -> None:
    code = f"""
import os, sys
from rlsdk.isolation.process_settings import settings_kept, told
with settings_kept() as changes:
    for number in ({closed},):
        os.close(number)
with open("own", "w") as file:
    print("text", flush=True)
    file.write(told(changes))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    names = {"1": "stdout", "2": "stderr", "1, 2": "stderr, stdout"}[closed]
    assert (tmp_path / "own").read_text() == f"closed descriptors of standard streams, from none to {names}"
    assert (ran.stdout, ran.stderr) == {"1": ("", "text\n"), "2": ("text\n", ""), "1, 2": ("", "")}[closed]
