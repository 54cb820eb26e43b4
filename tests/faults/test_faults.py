"""A daily sample of the fault matrix: cells that passed in the last `make faults`.

`RLSDK_FAULTS=driver/SIGKILL/update,engine/exception/sync` takes these cells; `RLSDK_FAULTS_SEED=2026327` draws those of
another day.
"""

from __future__ import annotations

import os
import random
import re
import time
from pathlib import Path

import pytest

from tests.faults import room
from tests.faults.cells import CELLS, Cell
from tests.faults.lineage import judge

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"


def test_every_cell_of_the_page_is_in_the_matrix_and_passed() -> None:
    names = re.findall(r"^\| `(.+?)` \|", PAGE.read_text(), re.MULTILINE)
    assert {*names} <= CELLS.keys()
    assert passed()


@pytest.mark.skipif(not room.available(), reason="this kernel lets no user mount a file system")
def test_a_disk_is_full_once_it_was_filled_and_has_room_again_afterwards(tmp_path: Path) -> None:
    small = room.Room(tmp_path)
    try:
        file = small.seen(tmp_path) / "file"
        empty = small.fill(tmp_path)
        with pytest.raises(OSError, match="No space left"):
            file.write_bytes(bytes(4096))
        empty()
        assert file.write_bytes(bytes(4096)) == 4096
    finally:
        small.close()


def passed() -> list[Cell]:
    """Cells that the page says ended as they must."""
    names = re.findall(r"^\| `(.+?)` \|.*\| as expected \| .* \|$", PAGE.read_text(), re.MULTILINE)
    return [CELLS[name] for name in names if name in CELLS]


def drawn(seed: int) -> list[Cell]:
    """One fault that a run survives, one that it does not, and one around a start or of a disk."""
    draw = random.Random(seed)
    # Which of its files a process cannot open any more depends on what it happens to do next.
    cells = [cell for cell in passed() if cell.what != "few open files"]
    if not room.available():
        cells = [cell for cell in cells if not cell.room]
    plain = [cell for cell in cells if not (cell.room or cell.prepared or cell.fresh or cell.when == "start")]
    kinds = [
        (1, [cell for cell in plain if cell.end == "continued"]),
        (1, [cell for cell in plain if cell.end != "continued"]),
        (1, [cell for cell in cells if cell not in plain]),
    ]
    return [cell for count, kind in kinds for cell in draw.sample(kind, min(count, len(kind)))]


@pytest.mark.stack
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_sample_of_faults_ends_as_it_must(tmp_path: Path) -> None:
    today = time.gmtime()
    seed = int(os.environ.get("RLSDK_FAULTS_SEED") or today.tm_year * 1000 + today.tm_yday)
    asked = [name.strip() for name in os.environ.get("RLSDK_FAULTS", "").split(",") if name.strip()]
    cells = [CELLS[name] for name in asked] or drawn(seed)
    again = f"seed {seed}; again with RLSDK_FAULTS='{','.join(cell.name for cell in cells)}'"
    print(again)
    failed = []
    for result in judge(cells, tmp_path / "first"):
        print(f"{result.seconds:5.0f} s  {result.cell.name}: {result.fault or result.cell.end}")
        if result.fault:
            failed.append(result.cell)
    # A machine that stood still for minutes fails a cell, too: one that is wrong is wrong again, alone.
    wrong = [f"{each.cell.name}: {each.fault}" for each in judge(failed, tmp_path / "second") if each.fault]
    assert not wrong, "\n".join([again, *wrong])
