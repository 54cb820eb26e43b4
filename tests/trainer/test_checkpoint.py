"""Checkpoints: complete or not there."""

import errno
from pathlib import Path

import pytest

from rlsdk.errors import CheckpointError
from rlsdk.trainer.checkpoint import Checkpoints


def write(folder: Path) -> None:
    (folder / "weights").write_text("w")


def test_saved_found_read_and_pruned(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 10, 15):
        checkpoints.save(step, {"position": step}, write)
    assert checkpoints.steps() == [10, 15]
    assert checkpoints.latest() == 15
    assert checkpoints.read(15)["position"] == 15
    assert (checkpoints.path(15) / "weights").read_text() == "w"


def test_an_unfinished_one_is_never_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, {}, write)
    left = tmp_path / "checkpoints" / ".step-2.partial"
    left.mkdir()
    (left / "weights").write_text("half")
    assert checkpoints.latest() == 1
    checkpoints.save(2, {}, write)
    assert not left.exists()
    assert (checkpoints.path(2) / "weights").read_text() == "w"


def test_a_full_disk_keeps_the_last_one_and_says_what_to_do(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(3, {}, write)

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(
        CheckpointError, match=r"step 4 cannot be written.*the disk is full; the checkpoint of step 3 is kept.*--resume"
    ):
        checkpoints.save(4, {}, full)
    assert checkpoints.steps() == [3]
    assert list((tmp_path / "checkpoints").glob(".*")) == []


def test_a_damaged_or_foreign_one_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    folder = checkpoints.save(1, {}, write)
    (folder / "state.json").write_text('{"format": 99}')
    with pytest.raises(CheckpointError, match="has format 99; this rlsdk reads 2"):
        checkpoints.read(1)
    (folder / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoints.read(1)
