"""Judge every cell of the fault matrix, and write `docs/faults.md`.

    python tools/faults.py                                             # all cells
    python tools/faults.py engine/SIGKILL/sync,engine/exception/sync   # these again, the others as judged last

Results are kept in `runs/faults/results.jsonl`. The status is 1 if a cell did not end as it must.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from curves import ROOT, git

sys.path.insert(0, str(ROOT))
from tests.faults.cells import CELLS, MOMENTS
from tests.faults.lineage import judge

PAGE = ROOT / "docs" / "faults.md"
FOLDER = ROOT / "runs" / "faults"
HEAD = """# Faults on purpose

`make faults` brings a small training (`examples/models/countdown-nano`, engine `transformers`, learner `deepspeed`, an
environment, a reward in a process of its own, a tracker) to a moment, makes something fail there for real, and judges:

* **went on**: the run does its next steps in the same processes, but for those that were replaced;
* **resumed**: the driver's process is gone, or what it needs is damaged, and `--resume` does the next steps;
* **stopped**: the run ends with status 1, the console names the culprit, and `--resume` does the next steps.

Nothing may hang for four minutes; when a run has ended, none of its processes is left; `metrics.jsonl` has every step
once, the summary's ledger adds up, and in `rollouts.db` no task is trained twice and every step has its groups. Where a
fault has no process of its own (a full disk), *driver* stands for the run.

`make test-slow` judges three cells that are *as expected* here, drawn by the day; `RLSDK_FAULTS=CELL,CELL` names them.
"""


def lines(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The page's table."""
    yield "| cell | end | the console says | result |"
    yield "| --- | --- | --- | --- |"
    for name, cell in CELLS.items():
        if name not in results:
            continue
        found = results[name]
        said = found["said"].replace(f"{ROOT}/", "").replace("|", r"\|").replace("`", "'")
        said = f"`{said[:100]}`" if said else ""
        yield f"| `{name}` | {cell.end} | {said} | {(found['fault'] and 'FAILED') or 'as expected'} |"
    yield ""
    yield f"Moments: {', '.join(MOMENTS)}. Cells by the commit and day of their last judgement:"
    yield ""
    for (commit, day), count in Counter((r["commit"], r["day"]) for r in results.values()).items():
        yield f"* {count} at `{commit}`, {day}"
    if missing := [name for name in CELLS if name not in results]:
        yield ""
        yield f"Not judged yet: {', '.join(f'`{name}`' for name in missing)}."


def main() -> int:
    """Judge cells, and write the page after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="?", default="", metavar="CELL,CELL", help="who/what/when; left out, all")
    asked = [name.strip() for name in parser.parse_args().cells.split(",") if name.strip()]
    FOLDER.mkdir(parents=True, exist_ok=True)
    record = FOLDER / "results.jsonl"
    commit, today = git("describe", "--always", "--dirty"), datetime.datetime.now()
    failed = 0
    for result in judge([CELLS[name] for name in asked or CELLS], FOLDER / f"{today:%Y%m%d-%H%M%S}"):
        print(f"{result.seconds:5.0f} s  {result.cell.name}: {result.fault or result.cell.end}", flush=True)
        failed += bool(result.fault)
        found = {"cell": result.cell.name, "fault": result.fault, "said": result.said, "seconds": result.seconds}
        with record.open("a") as file:
            file.write(json.dumps({**found, "commit": commit, "day": f"{today:%Y-%m-%d}"}) + "\n")
        judged = [json.loads(line) for line in record.read_text().splitlines()]
        results = {found["cell"]: found for found in judged if found["cell"] in CELLS}
        PAGE.write_text(f"{HEAD}\n" + "\n".join(lines(results)) + "\n", encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
