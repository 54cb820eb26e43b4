"""What actors compile is kept in the user's cache: for which processes, and when it stays in the run."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest

from rlsdk.cluster import compiled
from rlsdk.cluster.compiled import keep_compiled
from rlsdk.contracts import ActorSpec
from rlsdk.engines.vllm import Vllm

PLACE = ActorSpec(role="engine", rank=1, cache="/run/cache/engine-1")
ENGINE = Vllm()
FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "VLLM_CACHE_ROOT": "vllm",
}


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache of the user, in a process that starts an engine of a run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for variable, folder in FOLDERS.items():
        monkeypatch.setenv(variable, f"{PLACE.cache}/{folder}")
    compiled._reserved.cache_clear()
    return tmp_path / "rlsdk"


def kept(home: Path) -> Path:
    """The folder of one version of torch and one kind of processor."""
    (found,) = home.iterdir()
    return found


def folders() -> dict[str, str]:
    """Values of the variables."""
    return {variable: os.environ[variable] for variable in FOLDERS}


def test_an_actor_uses_its_folder_in_the_users_cache_and_again_when_it_starts_a_second_time(home: Path) -> None:
    place = keep_compiled(ENGINE, PLACE)
    assert place == attrs.evolve(PLACE, cache=str(kept(home) / "engine-1"))
    assert folders() == {variable: f"{place.cache}/{folder}" for variable, folder in FOLDERS.items()}
    assert kept(home).stat().st_mode & 0o777 == 0o700
    assert keep_compiled(ENGINE, PLACE) == place


def test_variables_that_name_no_cache_are_left_to_the_seat_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert ENGINE.environment(PLACE)["OMP_NUM_THREADS"] == "1"
    keep_compiled(ENGINE, PLACE)
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_an_actor_without_a_run_keeps_nothing(home: Path) -> None:
    place = ActorSpec(role="engine")
    assert keep_compiled(ENGINE, place) is place
    assert not home.exists()


@pytest.mark.parametrize("obstacle", ["others may write", "of another user", "a file", "little room", "in use"])
def test_what_is_compiled_stays_in_the_run_where_the_users_cache_cannot_be_trusted_or_used(
    obstacle: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = folders()
    keep_compiled(ENGINE, attrs.evolve(PLACE, cache="/run/cache/engine-0"))
    folder = kept(home)
    for variable, value in before.items():
        monkeypatch.setenv(variable, value)
    match obstacle:
        case "others may write":
            folder.chmod(0o777)
        case "of another user":
            monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
        case "a file":
            shutil.rmtree(home)
            home.write_text("")
        case "little room":
            monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=compiled.LEAST_ROOM - 1))
        case _:
            (folder / "engine-1").mkdir()
            fcntl.flock(os.open(folder / "engine-1", os.O_RDONLY), fcntl.LOCK_EX)
    assert keep_compiled(ENGINE, PLACE) is PLACE
    assert folders() == before


def test_another_processor_has_its_own_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_compiled(ENGINE, PLACE)
    monkeypatch.setattr("platform.machine", lambda: "another")
    compiled._reserved.cache_clear()
    keep_compiled(ENGINE, PLACE)
    assert len(list(home.iterdir())) == 2


def test_a_killed_actor_leaves_its_folder_to_the_next_one_without_the_locks_of_its_builds(home: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from rlsdk.cluster.compiled import keep_compiled
from rlsdk.contracts import ActorSpec
from rlsdk.engines.vllm import Vllm
place = keep_compiled(Vllm(), ActorSpec(role="engine", rank=1, cache={PLACE.cache!r}))
build = Path(place.cache, "extensions", "py311_cpu", "comm")
build.mkdir(parents=True)
(build / "lock").touch()
(build / "comm.so").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False, cwd=Path(__file__).parents[2])
    assert killed.returncode < 0
    place = keep_compiled(ENGINE, PLACE)
    build = Path(place.cache, "extensions", "py311_cpu", "comm")
    assert build.is_relative_to(home)
    assert [path.name for path in build.iterdir()] == ["comm.so"]
