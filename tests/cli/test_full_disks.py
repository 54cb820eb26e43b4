"""Commands that cannot write a file, since the disk or a quota is full, name it and leave what was there."""

from __future__ import annotations

import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from rlsdk.cli.lazy import FAILED
from rlsdk.runlog.folder import held, write_output
from tests.viewer.recorded import make_run

NOTHING = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
"""No file may grow in this process, as on a full disk."""


def start(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlsdk.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=NOTHING)


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (["report", "{0}/run"], "run/report.html"),
        (["compare", "{0}/run", "{0}/run", "--html", "{0}/both.html"], "both.html"),
        (["trace", "{0}/run"], "run/trace.json"),
        (["new", "reward", "lab", "--dir", "{0}"], "lab/pyproject.toml"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
@pytest.mark.parametrize("before", ["", "an older one"])
def test_a_file_that_cannot_be_written_is_named_and_the_previous_one_stays(
    tmp_path: Path, words: list[str], file: str, before: str
) -> None:
    make_run(tmp_path / "run", steps=2)
    path = tmp_path / file
    if before and words[0] != "new":  # which replaces nothing
        path.write_text(before)
    ended = start(*(word.format(tmp_path) for word in words))
    assert ended.returncode == FAILED, ended.stderr
    assert ended.stderr == f"rlsdk: {path}: File too large; --debug before the command shows where\n"
    assert (path.read_text() if path.exists() else "") == (before if words[0] != "new" else "")
    assert not [each for each in tmp_path.rglob("*") if "part" in each.suffix]


def test_a_lock_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    code = (
        f"from pathlib import Path\nfrom {held.__module__} import held\nwith held(Path({str(tmp_path / 'run')!r})): ..."
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, preexec_fn=NOTHING
    )
    assert ended.stderr.splitlines()[-1].endswith(f"File too large: '{tmp_path / '.run.lock'}'")


def test_a_link_or_a_device_is_written_and_not_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    write_output(link, "text")
    write_output(Path("/dev/null"), "text")
    assert link.is_symlink() and target.read_text() == "text" and Path("/dev/null").is_char_device()
