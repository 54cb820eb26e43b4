"""Run recipes, and write `curve.json` and `transcript.txt` to their folders, and docs/recipes.md.

    python tools/recipes.py                 # only docs/recipes.md, from the recipes' folders
    python tools/recipes.py reverse-text    # run these recipes (those for two cores), then write the page

A recipe that ends outside its band is also recorded: change the recipe or its band, and document it in its README.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rlsdk.cli.recipe import NUMBERS, curve, summary
from rlsdk.recipes import catalogue

ROOT = Path(__file__).resolve().parent.parent
RUNS = Path("runs") / "recipes"
MACHINE = "two cores, other programs running alongside"
PAGE = ROOT / "docs" / "recipes.md"
MARK = "<!-- table: tools/recipes.py -->"
SAMPLES = 6


def main(names: list[str]) -> int:
    """Run `names`, then write the page."""
    for name in names:
        measure(catalogue.read(name))
    write_page()
    return 0


def measure(recipe: catalogue.Recipe) -> None:
    """Run a recipe from scratch and record its curve."""
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "rlsdk.cli", "recipe", "run", recipe.name, "--overwrite"], cwd=ROOT, check=False
    )
    minutes = (time.monotonic() - began) / 60
    last = ROOT / RUNS / recipe.name / recipe.stages[-1].name
    commit = ["git", "rev-parse", "--short=7", "HEAD"]
    found = {
        "commit": subprocess.run(commit, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip(),
        "date": datetime.date.today().isoformat(),
        "machine": MACHINE,
        "minutes": round(minutes, 1),
        "points": catalogue.evaluations(last),
    }
    (recipe.folder / "curve.json").write_text(as_text(found), encoding="utf-8")
    (recipe.folder / "transcript.txt").write_text(transcript(last), encoding="utf-8")


def as_text(found: dict[str, Any]) -> str:
    """Return JSON with a line for each evaluation."""
    head = "".join(f" {json.dumps(k)}: {json.dumps(v)},\n" for k, v in found.items() if k != "points")
    points = ",\n".join(f"  {json.dumps(point)}" for point in found["points"])
    return f'{{\n{head} "points": [\n{points}\n ]\n}}\n'


def transcript(run: Path) -> str:
    """Return rollouts of a run's first and last saved steps, one of each task."""
    command = [sys.executable, "-m", "rlsdk.cli", "rollouts", str(run), "--json", "--limit", "100000"]
    rows = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    blocks: list[str] = []
    for step in (min(row["step"] for row in rows), max(row["step"] for row in rows)):
        shown = {row["task"]: row for row in rows if row["step"] == step}
        taken = list(shown.values())[:SAMPLES]
        blocks += [f"step {step}, reward {row['reward']:.2f}\n{row['prompt']}{row['response']}\n" for row in taken]
    return "\n".join(blocks)


def write_page() -> None:
    """Write the table and the curves of docs/recipes.md after its mark."""
    rows = [summary(catalogue.read(name)) for name in catalogue.names()]
    columns = ["recipe", "task", "algorithm", "hardware", *NUMBERS, "measured"]
    lines = [f"| {' | '.join(columns)} |", "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | --- |"]
    for row in rows:
        figures = ["–" if row[name] is None else form.format(row[name]) for name, form in NUMBERS.items()]
        cells = [f"`{row['name']}`", row["task"], row["algorithm"], row["hardware"], *figures, row["measured"]]
        lines.append(f"| {' | '.join(cells)} |")
    for row in rows:
        recipe = catalogue.read(row["name"])
        if measured := recipe.measurement():
            drawn = "\n".join(curve(measured, recipe.expected.metric))
            lines += ["", f"### {row['name']}", "", f"{row['title']}.", "", f"```text\n{drawn}\n```"]
    head = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    PAGE.write_text(head + MARK + "\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
