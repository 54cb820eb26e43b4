"""Plugins whose import ends, copies, moves or blocks the process, or writes to its output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from rlsdk.errors import PluginError
from rlsdk.plugins import Plugins, guard


def importing(tmp_path: Path, code: str) -> None:
    (tmp_path / "lab.py").write_text(f"import os, sys, time\n{code}\n")
    Plugins([tmp_path / "lab.py"]).activate("lab")


def test_an_import_that_ends_the_process_is_reported(tmp_path):
    with pytest.raises(PluginError, match=r"lab.py\) fails to import: SystemExit: os._exit\(0\) \(.*lab.py, line 2\)"):
        importing(tmp_path, "os._exit(0)")
    assert os._exit.__module__ == "posix"


def test_an_import_that_changes_the_working_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PluginError, match=r"it changes the working folder from .* to /, .*; remove os.chdir"):
        importing(tmp_path, "os.chdir('/')")
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import logging.config\nlogging.config.dictConfig({'version': 1})", "whether rlsdk's loggers are disabled"),
        ("import torch\ntorch.set_default_dtype(torch.float16)", "torch's default dtype, from torch.float32"),
        ("import socket\nsocket.setdefaulttimeout(3)", "the timeout of new sockets, from None to 3.0"),
    ],
)
def test_an_import_that_changes_settings_of_the_process_is_named_and_they_are_changed_back(
    tmp_path, caplog, code, what
):
    for _ in range(2):  # each time that the plugin is imported, in whichever process
        importing(tmp_path, code)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith(f"plugin 'lab' ({tmp_path / 'lab.py'}) changes settings of the whole process: {what}")
    assert said[0].endswith("; they are changed back")
    assert not guard.log.disabled


def test_what_an_import_prints_is_no_output_of_the_command(tmp_path, capsys):
    importing(tmp_path, "print('banner')")
    assert capsys.readouterr() == ("", "banner\n")


def test_a_child_that_an_import_forks_ends_with_it(tmp_path, capfd):
    importing(tmp_path, "pid = os.fork()\nif pid:\n    os.waitpid(pid, 0)")
    assert "forks when it is imported; its child ends here" in capfd.readouterr().err


def test_an_import_that_takes_long_is_reported_with_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "SLOW_SECONDS", 0.01)
    reported = threading.Event()
    monkeypatch.setattr(guard.log, "warning", lambda *said: (told.append(said[0] % said[1:]), reported.set()))
    monkeypatch.setattr(guard, "reported", reported, raising=False)
    told: list[str] = []
    importing(tmp_path, "from rlsdk.plugins import guard\nguard.reported.wait(60)")
    assert len(told) == 1
    assert re.fullmatch(
        r"the import of plugin 'lab' \(.*lab.py\) has taken 0.01 s so far, at .*lab.py, line 3", told[0]
    )


def test_an_interrupted_import_is_named(tmp_path):
    (tmp_path / "lab.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "rlsdk", "plugins", "lab", "--plugin", "lab.py"]
    # A shell starts what runs in its background with SIGINT ignored, and children inherit that.
    listening = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    how = {"cwd": tmp_path, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **how, preexec_fn=listening) as process:  # noqa: PLW1509
        assert process.stderr is not None
        assert process.stderr.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert re.fullmatch(r"rlsdk: interrupted while importing plugin 'lab' \(lab.py\), at lab.py, line [23]\n", said)
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("def __getattr__(name): raise RuntimeError(name)\ndef __dir__(): return ['later']", "RuntimeError: later"),
        ("def __getattr__(name): sys.exit(name)\ndef __dir__(): return ['later']", "SystemExit: later"),
        ("def __dir__(): raise RuntimeError('none')", "RuntimeError: none"),
    ],
)
def test_a_module_whose_names_cannot_be_read_is_reported(tmp_path, code, cause):
    with pytest.raises(
        PluginError, match=rf"the names in its module .*lab cannot be read: {cause} \(.*lab.py, line \d"
    ):
        importing(tmp_path, code)


def test_a_table_of_modules_that_is_no_table_is_reported(tmp_path):
    with pytest.raises(PluginError, match="fails to import: TypeError"):
        importing(tmp_path, "MODULES = 3")


def test_a_proxy_of_nothing_in_a_module_is_no_component(tmp_path):
    importing(
        tmp_path,
        "class Proxy:\n    def __getattribute__(self, name): raise RuntimeError('nothing to stand for')\nit = Proxy()\n"
        "def __getattr__(name): raise RuntimeError(name)",
    )
