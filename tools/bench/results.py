"""Results of `make bench`: a JSON file for each file of tests/benchmarks, and the table of all results.

    python tools/bench/results.py           # print the table of docs/benchmarks, and write it to docs/benchmarks.md
    python tools/bench/results.py FOLDER    # print the table of another folder

A file is a list of results:

* `test`: the test that measured it; `benchmark`, `case`, `figure`: a description of the measurement;
* `value`, `at_least` or `at_most` (the limit that the test asserts), `passed`;
* `figures`: all other figures that the test reports;
* `machine`, `load_average` (before and after), `commit`, `dirty`, `date`, `versions`: null if not recorded;
* `source`: origin of a figure that predates these files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "benchmarks"
PAGE = ROOT / "docs" / "benchmarks.md"
REQUIRED = ("test", "benchmark", "case", "figure", "value", "at_least", "at_most", "passed", "figures", "machine",
            "load_average", "commit", "dirty", "date", "versions", "source")  # fmt: skip
HEAD = ("benchmark", "case", "figure", "measured", "asserted", "commit", "date", "load average")
MANY = 12
"""Number of cases of a benchmark from which the table shows only the case nearest to its limit."""


def read(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Return the results of a folder, file by file, those against TRL first."""
    paths = sorted(folder.glob("*.json"), key=lambda path: (path.stem != "grpo_step", path.stem))
    return [result for path in paths for result in json.loads(path.read_text(encoding="utf-8"))]


def write(path: Path, results: Iterable[Mapping[str, Any]]) -> None:
    """Add results to a file, replacing those of the same test and figure."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    found = {_key(result): result for result in [*kept, *results]}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(result, ensure_ascii=False) for result in found.values())
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _key(result: Mapping[str, Any]) -> tuple[str, str]:
    return result["test"], result["figure"]


def table(results: Iterable[Mapping[str, Any]]) -> str:
    """Return the table of results in Markdown, in their order."""
    rows = [HEAD, ("---", "---", "---", "---:", "---:", "---", "---", "---")]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["benchmark"], result["figure"]), []).append(result)
    for found in groups.values():
        if len(found) > MANY:
            worst = min(found, key=margin)
            rows.append(_row({**worst, "case": f"{worst['case']}: worst of {len(found)}"}))
        else:
            rows += [_row(result) for result in found]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def margin(result: Mapping[str, Any]) -> float:
    """Return the margin of a value to its limit as a ratio, below 1 if it fails; infinite without a limit."""
    value, least, most = result["value"], result["at_least"], result["at_most"]
    if least:
        return float(value / least)
    return float(most / max(value, 1e-12)) if most else float("inf")


def _row(result: Mapping[str, Any]) -> tuple[str, ...]:
    limits = ((result["at_least"], "≥"), (result["at_most"], "≤"))
    asserted = ", ".join(f"{sign} {shown(limit)}" for limit, sign in limits if limit is not None) or "–"
    load = result["load_average"] or {}
    loads = [f"{load[when]:.1f}" for when in ("before", "after") if load.get(when) is not None]
    value = shown(result["value"])
    return (
        result["benchmark"],
        result["case"],
        result["figure"],
        f"**{value}**" if result["passed"] else f"{value} (fails)",
        asserted,
        f"`{result['commit']}`" + (" with changes" if result["dirty"] else "") if result["commit"] else "–",
        result["date"] or "–",
        " → ".join(loads) or "–",
    )


def shown(value: float) -> str:
    """Return a number with three significant digits, without an exponent."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def replace_block(page: str, name: str, text: str) -> str:
    """Return a page with a text between the markers `<!-- NAME -->` and `<!-- /NAME -->`.

    Raises:
        ValueError: A marker is missing.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"expected the markers {begin} and {end} once each in the page")
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"


def main(arguments: list[str]) -> int:
    """Print the table, and write the page's table."""
    folder = Path(arguments[0]).resolve() if arguments else FOLDER
    results = read(folder)
    if not results:
        print(f"no results in {folder}; `make bench` writes them", file=sys.stderr)
        return 1
    found = table(results)
    print(found)
    if folder == FOLDER:
        PAGE.write_text(replace_block(PAGE.read_text(encoding="utf-8"), "results", found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
