"""Tables and picture of `make bench-peers`, from the JSON of its runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from results import ROOT, replace_block, shown

FOLDER = ROOT / "docs" / "benchmarks" / "peers"
PAGE = ROOT / "docs" / "benchmarks_peers.md"
PICTURE = ROOT / "docs" / "assets" / "benchmarks_peers.png"
GOALS = (0.6, 0.8)
"""Sampled accuracies for which the table shows the time."""
NONE = "No run has been published yet: `make bench-peers` measures, and `PUBLISH=1` writes its tables here."
Record = Mapping[str, Any]


def read(folder: Path = FOLDER) -> list[Record]:
    """Return the records of a folder."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def tables(records: Sequence[Record]) -> str:
    """Return all tables of these records, in Markdown."""
    learning = [record for record in records if record["kind"] == "learning"]
    cores = [record for record in records if record["kind"] == "cores"]
    parts = []
    if learning:
        parts += ["### Learning per second", learning_table(learning)]
    if cores:
        parts += ["### Core functions", cores_table(cores)]
    if records:
        parts.append("\n".join(dict.fromkeys(origin(record) for record in records)))
    return "\n\n".join(parts) if parts else NONE


def learning_table(records: Iterable[Record]) -> str:
    """Return the table of the trainings."""
    times = [f"s to {goal:.0%} sampled" for goal in GOALS]
    head = ["trainer", "seed", "batches", "s a batch, median", "tokens a second", *times,
            "sampled, last", "greedy, last", "peak memory, MiB", "load average"]  # fmt: skip
    rows = [head, ["---", *["---:"] * (len(head) - 2), "---"]]
    for record in records:
        last, reached = record["points"][-1], [reaches(record["points"], goal) for goal in GOALS]
        load = record["load_average"]
        rows.append([
            record["side"], str(record["seed"]), str(len(record["steps"])), f"{record['median_step']:.2f}",
            f"{record['tokens_per_second']:,.0f}", *("not reached" if t is None else f"{t:.0f}" for t in reached),
            f"{last['sampled']:.1%}", f"{last['greedy']:.1%}", f"{record['memory']['peak_pss_mib']:,}",
            f"{load['before']:.1f} → {load['after']:.1f}",
        ])  # fmt: skip
    return _markdown(rows)


def reaches(points: Sequence[Mapping[str, float]], goal: float) -> float | None:
    """Return the seconds until sampled accuracy first reaches a goal, interpolated linearly; None if it never does."""
    for before, after in itertools.pairwise(points):
        if before["sampled"] >= goal:
            return before["seconds"]
        if after["sampled"] >= goal:
            share = (goal - before["sampled"]) / (after["sampled"] - before["sampled"])
            return before["seconds"] + share * (after["seconds"] - before["seconds"])
    return points[-1]["seconds"] if points and points[-1]["sampled"] >= goal else None


def cores_table(records: Iterable[Record]) -> str:
    """Return the table of the core functions."""
    head = ["peer", "shape", "function", "rlsdk, ms", "peer, ms", "times as fast", "rlsdk, MiB", "peer, MiB", "equal"]
    rows = [head, ["---", "---", "---", *["---:"] * 5, "---"]]
    for record in records:
        for found in record["results"]:
            numbers = (*found["median_ms"].values(), found["ratio"], *found["peak_mib"].values())
            equal = "yes" if found["equal"] else f"no: {found['greatest_difference']:.2g} apart"
            rows.append([record["peer"], found["shape"], found["case"], *map(shown, numbers), equal])
    return _markdown(rows)


def _markdown(rows: Iterable[Iterable[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def origin(record: Record) -> str:
    """Return a line with machine, commit, date and versions of a record."""
    machine, versions = record["machine"], record["versions"]
    plain = versions if record["kind"] == "learning" else versions.get(record["peer"], {})
    named = ", ".join(f"{name} {version}" for name, version in plain.items() if name not in ("python", "numpy"))
    who = record["side"] if record["kind"] == "learning" else record["peer"]
    commit = f"commit `{record['commit']}`" + (" with changes" if record["dirty"] else "")
    on = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    return f"* {who}: {on}; {commit}, {record['date']}; {named}"


def draw(records: Iterable[Record], path: Path) -> None:
    """Draw sampled accuracy by seconds and by batches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    colours: dict[str, str] = {}
    for record in records:
        points, side = record["points"], record["side"]
        style = {"color": colours.setdefault(side, f"C{len(colours)}"), "marker": "o", "ms": 3}
        sampled, label = [point["sampled"] for point in points], f"{side}, seed {record['seed']}"
        left.plot([point["seconds"] for point in points], sampled, label=label, **style)
        right.plot([point["batch"] for point in points], sampled, **style)
    left.set(xlabel="seconds of training", ylabel="held-out accuracy, sampled", ylim=(0, 1))
    right.set(xlabel="batches")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def block(records: Sequence[Record]) -> str:
    """Return the generated part of the page."""
    picture = "\n\n![Held-out accuracy by seconds and by batches](assets/benchmarks_peers.png)"
    return tables(records) + (picture if any(record["kind"] == "learning" for record in records) else "")


def write_page(records: Sequence[Record]) -> None:
    """Write the generated part of the page and its picture."""
    if learning := [record for record in records if record["kind"] == "learning"]:
        draw(learning, PICTURE)
    PAGE.write_text(replace_block(PAGE.read_text(encoding="utf-8"), "results", block(records)), encoding="utf-8")
