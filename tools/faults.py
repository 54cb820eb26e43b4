"""Test every cell of the fault matrix, and write `docs/faults.md`.

    python tools/faults.py                                             # all cells
    python tools/faults.py engine/SIGKILL/sync,engine/exception/sync   # these; the page's other rows stay

If a cell does not end as expected, its run is kept in `runs/faults`, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from collections.abc import Mapping

from curves import ROOT, git

sys.path.insert(0, str(ROOT))
from tests.faults.cells import CELLS, MOMENTS
from tests.faults.lineage import Result, judge

PAGE = ROOT / "docs" / "faults.md"
FOLDER = ROOT / "runs" / "faults"
HEAD = """# Faults on purpose

`make faults` starts a small run (`examples/models/countdown-nano`, engine `transformers`, learner `deepspeed`, an
environment, a reward in a separate process, a tracker), waits for a certain moment, causes a real failure, and checks
what follows:

* **continued**: the run takes its next steps in the same processes, except for replaced ones;
* **resumed**: the driver is gone, or something that it needs is damaged, and `--resume` takes the next steps;
* **stopped**: the run ends with status 1, the console names the culprit, and `--resume` takes the next steps.

In every case, nothing hangs for more than four minutes, and no process is left when a run has ended. Each step is in
`metrics.jsonl` once, the ledger in the summary adds up, and in `rollouts.db` no task is trained twice and every step
has its groups. A fault that is not in a single process (a full disk) is listed under *driver*.

`make test-slow` repeats three cells that are *as expected* here, different ones each day; `RLSDK_FAULTS=CELL,CELL`
selects cells by name.
"""


def row(result: Result, judged: str) -> str:
    """Return a cell's row in the page's table.

    Args:
        result: Result of the cell.
        judged: Commit and day of the test.
    """
    said = result.said.replace(f"{ROOT}/", "").replace("|", r"\|").replace("`", "'")
    said = f"`{said[:100]}`" if said else ""
    found = "FAILED" if result.fault else "as expected"
    return f"| `{result.cell.name}` | {result.cell.end} | {said} | {found} | {judged} |"


def write_page(rows: Mapping[str, str]) -> None:
    """Write the page.

    Args:
        rows: Cell -> its table row.
    """
    table = [rows[name] for name in CELLS if name in rows]
    page = [HEAD, "| cell | end | the console says | result | judged |", "| --- | --- | --- | --- | --- |", *table]
    page += ["", f"Moments: {', '.join(MOMENTS)}."]
    if missing := [f"`{name}`" for name in CELLS if name not in rows]:
        page += ["", f"Not tested yet: {', '.join(missing)}."]
    PAGE.write_text("\n".join(page) + "\n", encoding="utf-8")


def main() -> int:
    """Test cells, and write the page after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="?", default="", metavar="CELL,CELL", help="who/what/when; default: all cells")
    asked = [name.strip() for name in parser.parse_args().cells.split(",") if name.strip()]
    today = datetime.datetime.now()
    judged = f"{git('describe', '--always', '--dirty')}, {today:%Y-%m-%d}"
    page, failed = PAGE.read_text(encoding="utf-8"), 0
    rows = {found[1]: found[0] for found in re.finditer(r"^\| `(.+?)` \|.*$", page, re.MULTILINE)}
    for result in judge([CELLS[name] for name in asked or CELLS], FOLDER / f"{today:%Y%m%d-%H%M%S}"):
        print(f"{result.seconds:5.0f} s  {result.cell.name}: {result.fault or result.cell.end}", flush=True)
        failed += bool(result.fault)
        rows[result.cell.name] = row(result, judged)
        write_page(rows)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
