"""Train many cheap steps, sample the memory of every process, and write its growth to `docs/memory.md`.

    python tools/memory.py                # eight thousand steps
    python tools/memory.py --steps 400    # fewer

It is one asynchronous run of the small model with environments, in `runs/memory`. The exit status is 1 if the memory
of a process grows.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np
import psutil
import yaml
from curves import ROOT, git
from soak import CONFIG

PAGE = ROOT / "docs" / "memory.md"
WARM_UP = 0.5
"""Share of the steps to ignore, in which caches fill and allocators reach their size."""
BLOCKS = 12
"""Number of blocks to whose means the line is fitted, since neighbouring samples are not independent."""
QUANTILE = 2.228
"""Quantile of Student's t distribution with `BLOCKS - 2` degrees of freedom, for a 95 % interval."""
GROWS = 1.0
"""Threshold in KiB per step; a process grows if the whole interval of its slope is above it."""
SECONDS = 1.0
"""Seconds between two samples."""
HEAD = """# Memory over many steps

`make memory` trains the small model (`examples/models/countdown-nano`) in environments, with vLLM, rollouts up to two
batches ahead, an evaluation every four steps and a checkpoint every hundred. Once a second it samples each process's
private memory (USS). The first half of the steps is a warm-up and is ignored. The rest is averaged in twelve blocks,
and a line is fitted to their means: *slope* is the growth per step, with a 95 % confidence interval. A process *grows*
if the whole interval lies above 1 KiB per step, which is 1 GiB in a million steps.
"""
NEXT = "## What grows"


@attrs.frozen
class Slope:
    """Change of a process's memory over the run.

    Attributes:
        name: Name of the process.
        first: MiB in the first block.
        last: MiB in the last block.
        slope: KiB per step.
        error: Half the width of the 95 % confidence interval.
    """

    name: str
    first: float
    last: float
    slope: float
    error: float

    @property
    def grows(self) -> bool:
        """True if the whole interval is above the threshold."""
        return bool(self.slope - self.error > GROWS)


def name_of(process: psutil.Process) -> str:
    """Return a readable name of a process of the run; empty if it is gone."""
    with contextlib.suppress(psutil.Error):
        command = process.cmdline()
        if not command:
            return ""
        if found := re.match(r"ray::(\w+)", command[0]):
            return found.group(1)
        if "-c" in command and (found := re.search(r"from rlsdk\S*\.(\w+) import", " ".join(command))):
            return found.group(1)
        scripts = [Path(part).name for part in command if part.endswith(".py")]
        return scripts[0] if scripts else process.name()
    return ""


def sample(driver: psutil.Process) -> dict[tuple[int, str], float]:
    """Return the memory of the driver and of all its descendants, in MiB."""
    found = {}
    with contextlib.suppress(psutil.Error):
        for process in [driver, *driver.children(recursive=True)]:
            name = "driver" if process.pid == driver.pid else name_of(process)
            with contextlib.suppress(psutil.Error):
                if name:
                    found[process.pid, name] = process.memory_full_info().uss / 2**20
    return found


def fitted(name: str, steps: Sequence[float], sizes: Sequence[float]) -> Slope:
    """Fit a line to the means of blocks.

    Args:
        name: Name of the process.
        steps: Completed steps at each sample.
        sizes: Memory at each sample, in MiB.
    """
    x = np.array([block.mean() for block in np.array_split(np.asarray(steps, float), BLOCKS)])
    y = np.array([block.mean() for block in np.array_split(np.asarray(sizes, float), BLOCKS)])
    centred = x - x.mean()
    slope = (centred @ y) / (centred @ centred)
    rest = y - y.mean() - slope * centred
    error = QUANTILE * np.sqrt((rest @ rest) / (BLOCKS - 2) / (centred @ centred))
    return Slope(name, y[0], y[-1], slope * 1024, error * 1024)


class Watch:
    """A training and its samples."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.samples: dict[tuple[int, str], list[tuple[int, float]]] = defaultdict(list)
        self.seconds, self.stopped = 0.0, False
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        model = {"path": str(ROOT / "examples" / "models" / "countdown-nano"), "max_length": 64}
        own = {
            "out": str(folder),
            "model": model,
            "engine": "vllm",
            "steps": steps,
            "batch_size": 2,
            "group_size": 2,
            "max_empty_steps": None,
            "sampling": {"max_tokens": 4},
            "checkpoint": {"every": 100, "export": "never"},
            "placement": {"engine_threads": 1, "learner_threads": 1},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, **own}))

    def run(self, minutes: float) -> None:
        """Train for at most `minutes`, and sample."""
        command = [sys.executable, "-m", "rlsdk.cli", "train", str(self.folder / "config.yaml")]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "RLSDK_SOAK_RECORD": str(self.folder / "record.txt")}
        start = time.monotonic()
        with (self.folder / "console.log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        driver, reported = psutil.Process(process.pid), 0
        while process.poll() is None:
            step, now = self.step(), time.monotonic() - start
            if now > 60 * minutes and not self.stopped:
                self.stopped = True
                process.send_signal(signal.SIGINT)
            for key, size in sample(driver).items():
                self.samples[key].append((step, size))
            if step >= reported + 100:
                reported = step
                print(f"step {step}, {now:.0f} s", flush=True)
            time.sleep(SECONDS)
        self.seconds = time.monotonic() - start
        rows = [{"pid": pid, "name": name, "samples": some} for (pid, name), some in self.samples.items()]
        (self.folder / "samples.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        if process.returncode != (130 if self.stopped else 0):
            raise SystemExit(f"the run ended with {process.returncode}: {self.folder / 'console.log'}")

    def step(self) -> int:
        """Return the number of completed steps."""
        path = self.folder / "run" / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    def slopes(self) -> list[Slope]:
        """Fit the slope of each process that existed from the warm-up to the end."""
        found, steps = [], self.step()
        for (_, name), samples in self.samples.items():
            warm = [(step, size) for step, size in samples if WARM_UP * steps <= step < steps]
            if len(warm) >= 2 * BLOCKS and warm[-1][0] - warm[0][0] > (1 - WARM_UP) * steps * 0.8:
                found.append(fitted(name, *zip(*warm, strict=True)))
        return sorted(found, key=lambda slope: -slope.last)


def lines(watch: Watch) -> Iterator[str]:
    """Yield the lines of the page's table."""
    yield "| process | MiB after the warm-up | MiB at the end | slope, KiB per step | |"
    yield "| --- | ---: | ---: | ---: | --- |"
    for s in watch.slopes():
        yield f"| {s.name} | {s.first:.1f} | {s.last:.1f} | {s.slope:.2f} ± {s.error:.2f} | {'grows' * s.grows} |"
    yield ""
    commit = git("describe", "--always", "--dirty")
    yield f"{watch.step():,} steps in {watch.seconds:.0f} s, commit `{commit}`, {datetime.date.today()}."


def main() -> int:
    """Train, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--minutes", type=float, default=240.0, help="end the run after this many minutes")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "memory")
    asked = parser.parse_args()
    watch = Watch(asked.folder.resolve(), asked.steps)
    watch.run(asked.minutes)
    text = "\n".join(lines(watch))
    print(text)
    _, mark, rest = PAGE.read_text(encoding="utf-8").partition(
        NEXT
    )  # written by hand, and by tools/memory_estimates.py
    PAGE.write_text(f"{HEAD}\n{text}\n\n{mark}{rest}", encoding="utf-8")
    return int(any(slope.grows for slope in watch.slopes()))


if __name__ == "__main__":
    sys.exit(main())
