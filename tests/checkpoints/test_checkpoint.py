"""Checkpoints are complete or absent."""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlsdk.checkpoints.checkpoint import EXPORT, LEARNER, SECTIONS, Checkpoints
from rlsdk.errors import CheckpointError, LearnerError
from rlsdk.learners.checkpoint import hash_files, write_manifest
from rlsdk.opening.record import _explained

STATE: dict[str, Any] = {name: {} for name in SECTIONS}


def write(folder: Path) -> None:
    (folder / "weights").write_text("w")


def learner(folder: Path) -> None:
    """Write the files of a learner with one rank."""
    (folder / LEARNER).mkdir()
    (folder / LEARNER / "shard.pt").write_text("weights")
    write_manifest(folder / LEARNER, 0, 1, {})


@pytest.fixture
def two(tmp_path: Path) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (4, 8):
        checkpoints.save(step, STATE, learner)
    return checkpoints


def test_saved_found_read_and_pruned(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 10, 15):
        checkpoints.save(step, {**STATE, "position": step}, write)
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
    left.mkdir()
    (left / "weights").write_text("half")
    assert checkpoints.recover() == [] and not left.exists()  # a resume need not wait for its first checkpoint
    assert checkpoints.steps() == [1, 2]


def test_a_full_disk_keeps_the_last_one_and_says_what_to_do(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(3, {}, write)

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(
        CheckpointError,
        match=r"step 4 cannot be written.*the disk is full \(.* free\); the checkpoint of step 3 is kept.*--resume",
    ):
        checkpoints.save(4, {}, full)
    assert checkpoints.steps() == [3]
    assert list((tmp_path / "checkpoints").glob(".*")) == []


def test_an_old_one_that_cannot_be_deleted_does_not_end_the_run_or_count_as_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints, delete = Checkpoints(tmp_path, keep=1), shutil.rmtree
    checkpoints.save(1, STATE, write)

    def busy(folder: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:  # as NFS says of a file that is read
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(folder))

    monkeypatch.setattr(shutil, "rmtree", busy)
    checkpoints.save(2, STATE, write)
    assert checkpoints.steps() == [2] and "cannot be deleted" in caplog.text
    checkpoints.save(3, STATE, write)
    monkeypatch.setattr(shutil, "rmtree", delete)
    checkpoints.save(4, STATE, write)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-4"]


def test_one_that_is_written_again_is_kept_where_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, rename = Checkpoints(tmp_path, keep=2), Path.rename
    checkpoints.save(3, {**STATE, "position": 1}, write)

    def fails_once(path: Path, target: Path) -> Path:
        if path.name == ".step-3.partial":
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails_once)
    with pytest.raises(CheckpointError, match="the checkpoint of step 3 is kept"):
        checkpoints.save(3, {**STATE, "position": 2}, write)
    assert checkpoints.read(3)["position"] == 1


def test_a_damaged_or_foreign_one_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    folder = checkpoints.save(1, {}, write)
    (folder / "state.json").write_text('{"format": 99}')
    with pytest.raises(CheckpointError, match="has format 99; this rlsdk reads 2"):
        checkpoints.read(1)
    (folder / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoints.read(1)


@pytest.mark.parametrize("content", ["[]", "null", '{"format": 2}', '{"format": 2, "plugins": []}'])
def test_a_state_of_wrong_shape_is_named_with_its_file(tmp_path: Path, content: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    file = checkpoints.save(1, STATE, write) / "state.json"
    file.write_text(content)
    with pytest.raises(CheckpointError, match=rf"{file}: expected a JSON object"):
        checkpoints.read(1)


@pytest.mark.parametrize("content", ["{}", '{"format": null}', '{"format": "two"}'])
def test_a_newest_state_without_a_format_is_damaged_and_the_one_before_is_taken(tmp_path: Path, content: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        checkpoints.save(step, STATE, write)
    (checkpoints.path(2) / "state.json").write_text(content)
    newest, damaged = checkpoints.newest_whole()
    assert newest == 1 and "expected a number under format" in damaged[2]


def test_a_state_that_changed_is_found_although_it_is_well_formed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    file = checkpoints.save(1, {**STATE, "position": 17}, write) / "state.json"
    file.write_text(file.read_text().replace("17", "18"))
    with pytest.raises(CheckpointError, match=r"state\.json was changed after it was written"):
        checkpoints.read(1)


def test_a_state_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    file = checkpoints.save(1, STATE, learner) / "state.json"
    file.write_text(json.dumps({"format": 2, "step": 1, **STATE}))
    assert checkpoints.newest_whole() == (1, {})


def test_the_newest_is_taken_if_it_is_whole(two: Checkpoints, tmp_path: Path) -> None:
    assert two.newest_whole() == (8, {})
    assert Checkpoints(tmp_path / "empty", keep=1).newest_whole() == (None, {})


@pytest.mark.parametrize(
    ("file", "content", "fault"),
    [
        ("learner/shard.pt", "WEIGHTS", "changed since they were written: shard.pt"),
        ("learner/shard.pt", "weig", "not as long as written: shard.pt"),
        ("learner/shard.pt", None, "not as long as written: shard.pt"),
        ("learner/manifest-0.json", None, "not as long as written: manifest-0.json"),
        ("state.json", "", "state.json|cannot be read"),
        ("state.json", None, "cannot be read"),
    ],
)
def test_a_damaged_newest_one_is_named_and_the_one_before_is_taken(
    two: Checkpoints, file: str, content: str | None, fault: str
) -> None:
    path = two.path(8) / file
    path.unlink() if content is None else path.write_text(content)
    step, damaged = two.newest_whole()
    assert step == 4 and list(damaged) == [8]
    assert str(two.path(8)) in damaged[8] and any(words in damaged[8] for words in fault.split("|"))


def test_where_none_is_whole_all_are_named(two: Checkpoints) -> None:
    for step in two.steps():
        (two.path(step) / "learner" / "shard.pt").write_text("WEIGHTS")
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint in .* is intact:.*step-8.*step-4.*from a backup"):
        two.newest_whole()


def test_a_step_that_is_asked_for_must_be_there_and_whole(two: Checkpoints) -> None:
    two.require(4)
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 6; there are: 4, 8"):
        two.require(6)
    (two.path(4) / "learner" / "shard.pt").write_text("WEIGHTS")
    with pytest.raises(CheckpointError, match=r"step-4 is damaged: changed.*shard\.pt; other steps there: 8"):
        two.require(4)


def test_checkpoints_that_a_run_deletes_while_they_are_read_are_not_called_damaged(
    two: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def after_a_save(step: int) -> dict[str, Any]:
        monkeypatch.undo()
        for newer in (12, 16):  # of which two are kept
            two.save(newer, STATE, learner)
        return two.read(step)

    monkeypatch.setattr(two, "read", after_a_save)
    assert two.newest_whole() == (16, {})
    monkeypatch.setattr(two, "read", lambda step: shutil.rmtree(two.path(step)) or Checkpoints.read(two, step))
    with pytest.raises(CheckpointError, match=r"step-12 was deleted while it was read: .*export a newer one$"):
        two.require(12)
    assert two.newest_whole() == (None, {})


def test_the_export_is_compared_where_the_model_is_wanted(tmp_path: Path) -> None:
    def both(folder: Path) -> None:
        learner(folder)
        (folder / EXPORT).mkdir()
        (folder / EXPORT / "model.safetensors").write_text("model")

    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, STATE, both if step < 3 else learner)
    (checkpoints.path(2) / EXPORT / "model.safetensors").write_text("MODEL")
    (checkpoints.path(1) / LEARNER / "shard.pt").write_text("WEIGHTS")
    checkpoints.verify(2)
    checkpoints.verify(1, "model")
    checkpoints.verify(3, "model")
    with pytest.raises(CheckpointError, match=r"changed since they were written: model\.safetensors"):
        checkpoints.verify(2, "model")
    (checkpoints.path(2) / EXPORT / "more.py").touch()
    with pytest.raises(CheckpointError, match=r"missing from export, or added to it: more\.py"):
        checkpoints.verify(2, "model")
    (checkpoints.path(3) / LEARNER / "shard.pt").write_text("WEIGHTS")
    assert checkpoints.newest_whole("model")[0] == 1
    assert checkpoints.newest_whole("learner")[0] == 2


def test_the_hashing_of_large_files_is_announced(
    two: Checkpoints, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two.verify(8)
    assert not capsys.readouterr().err
    monkeypatch.setattr("rlsdk.checkpoints.checkpoint._LARGE", 1)
    two.verify(8)
    assert f"checking the hashes of {two.path(8) / LEARNER}, 0.0 GiB" in capsys.readouterr().err


def test_all_bytes_of_several_files_are_counted(tmp_path: Path) -> None:
    sizes = {f"{i}": 1000 * i for i in range(5)}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(b"x" * size)
    seen: list[int] = []
    found = hash_files(tmp_path, sizes, seen.append)
    assert sum(seen) == sum(sizes.values())
    assert found == {name: hashlib.sha256(b"x" * size).hexdigest() for name, size in sizes.items()}


def test_one_of_another_format_is_not_taken_for_damaged(two: Checkpoints) -> None:
    (two.path(8) / "state.json").write_text('{"format": 99}')
    with pytest.raises(CheckpointError, match="has format 99"):
        two.newest_whole()


def test_one_that_is_set_aside_counts_no_longer(two: Checkpoints) -> None:
    assert two.set_aside(8, "damaged").name == "step-8.damaged"
    assert two.steps() == [4]
    two.save(8, STATE, learner)
    assert two.set_aside(8, "damaged").name == "step-8.damaged-2"
    assert two.steps() == [4]


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EROFS, "read-only: make it writable"),
        (errno.EACCES, "permission to write"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EIO, "dmesg"),
        (errno.EDQUOT, "quota"),
    ],
)
def test_the_advice_fits_the_error(tmp_path: Path, code: int, remedy: str) -> None:
    def fails(folder: Path) -> None:
        raise OSError(code, os.strerror(code), str(folder))

    with pytest.raises(CheckpointError, match=remedy) as caught:
        Checkpoints(tmp_path, keep=1).save(1, STATE, fails)
    assert os.strerror(code) in str(caught.value)
    assert ("Free space" in str(caught.value)) == (code == errno.EDQUOT)

    def fails_in_a_rank(folder: Path) -> None:
        raise LearnerError(f"learner rank 0 failed in save: SafetensorError: {os.strerror(code)} (os error {code})")

    with pytest.raises(CheckpointError, match=remedy):
        Checkpoints(tmp_path, keep=1).save(1, STATE, fails_in_a_rank)
    said = str(_explained(OSError(code, os.strerror(code), "metrics.jsonl"), Checkpoints(tmp_path, keep=1)))
    assert remedy in said and "metrics.jsonl" in said and "there is no checkpoint yet" in said
