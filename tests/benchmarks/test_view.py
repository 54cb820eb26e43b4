"""Speed of the rollout browser of `rlsdk view` on a million rollouts, compared with one indexed query."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest
import sqlalchemy as sa

from rlsdk.runlog.query import query
from rlsdk.runlog.store import Address, RolloutStore
from rlsdk.runlog.tables import GROUPS
from rlsdk.runlog.tables import ROLLOUTS as ROLLOUTS_TABLE
from tests.runlog.store_costs import SIZE, costs
from tests.turns import medians

BENCHMARK = "The viewer"
ROLLOUTS = int(os.environ.get("RLSDK_VIEW_ROLLOUTS", "1000000"))
ROOT = Path(__file__).parents[2]
ROUNDS = 21
REQUESTS = 200
"""Requests over which the server's CPU time and growth are measured."""
GROUPS_OF_A_STEP = 32
TIMES = 5.0
"""Greatest CPU time of a page that an index decides, in indexed queries."""
SECONDS = 1.0
"""Longest time of a page: conditions that no index decides are looked for in portions of 0.4 s."""
MEMORY = 64.0
"""MB that the server may grow by, over all requests."""
PAGES = {
    "first page": "",
    "a page in the middle": "?cursor=[60000,3]",
    "step": "?step_from=1000&step_to=1000",
    "task": "?task=t",
    "state": "?state=trained",
    "source": "?source=sums",
    "status": "?status=finished",
    "order of reward": "?order=highest",
    "reward range": "?reward_from=0.05&reward_to=0.5",
    "rare reward": "?reward_from=0.7&reward_to=0.8",
    "source and rare reward": "?source=sums&reward_from=0.7&reward_to=0.8",
    "values to filter by": "/facets",
}
SEARCHES = {"text": "?text=answer may be 77", "text that is nowhere": "?text=nowhere to be found"}


def filled(folder: Path) -> Path:
    """Create the folder of a run with a million trained rollouts."""
    run = folder / "runs" / "million"
    run.parent.mkdir(parents=True)
    costs(run, ROLLOUTS, 1, distinct=SIZE * 1024)
    (run / ".rlsdk-run").touch()
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    store = RolloutStore(Address.make(run, None, None))
    with store.transaction():
        step = GROUPS.c.number // GROUPS_OF_A_STEP + 1
        store._connection.execute(sa.update(GROUPS).values(state="trained", step=step, uses=1))
        rare = (ROLLOUTS_TABLE.c.number < 320) & (ROLLOUTS_TABLE.c.rollout == 0) & (ROLLOUTS_TABLE.c.number % 8 == 0)
        store._connection.execute(sa.update(ROLLOUTS_TABLE).where(rare).values(reward=0.75))
    store.close()
    return run


@attrs.frozen
class Viewer:
    """A server over one run: its process, and how to ask it for a page of rollouts."""

    process: psutil.Process
    ask: Callable[[str], object]

    def cpu(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


@contextmanager
def viewed(run: Path, code: Path = ROOT) -> Iterator[Viewer]:
    command = [sys.executable, "-m", "rlsdk.cli", "view", str(run), "--no-open", "--port", "0"]
    env = os.environ | {"PYTHONPATH": str(code)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=code) as server:
        try:
            assert server.stdout is not None
            address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line))).rstrip("/")

            def get(path: str) -> Any:
                url = f"{address}/api/{path}".replace(" ", "%20")
                with urllib.request.urlopen(url, timeout=60) as answer:
                    return json.loads(answer.read())

            (key,) = (each["id"] for each in get("state")["runs"])
            yield Viewer(psutil.Process(server.pid), lambda q: get(f"rollouts/{key}{q}"))
        finally:
            server.terminate()


def measured(run: Path, viewer: Viewer) -> dict[str, dict[str, float]]:
    """Times in ms of an indexed query and of all pages: on the clock, and of the CPU."""
    pages = {name: partial(viewer.ask, q) for name, q in PAGES.items()}
    searches = {name: partial(viewer.ask, q) for name, q in SEARCHES.items()}
    indexed = partial(query, run, "number = 1000")
    clock = medians({"indexed query": indexed, **pages, **searches}, ROUNDS)
    began = time.process_time()
    for _ in range(REQUESTS):
        indexed()
    cpu = {"indexed query": 1e3 * (time.process_time() - began) / REQUESTS}
    for name, page in pages.items():
        began = viewer.cpu()
        for _ in range(REQUESTS):
            page()
        cpu[name] = 1e3 * (viewer.cpu() - began) / REQUESTS
    return {"clock": clock, "cpu": cpu}


@pytest.mark.bench
@pytest.mark.timeout(3000)
def test_a_page_of_a_million_rollouts_costs_a_few_indexed_queries(tmp_path: Path, check: Callable[..., None]) -> None:
    run = filled(tmp_path)
    with viewed(run) as viewer:
        viewer.ask("")
        before = viewer.process.memory_info().rss
        found = measured(run, viewer)
        grown = (viewer.process.memory_info().rss - before) / 1e6
    print(f"server {before / 1e6:.0f} MB, grew by {grown:.1f} MB")
    for kind, times in found.items():
        unit = times["indexed query"]
        print(kind, {name: f"{value:.1f} ms, {value / unit:.1f} times" for name, value in times.items()})
    slowest, cpu, case = max(found["clock"].values()) / 1e3, found["cpu"], f"{ROLLOUTS:,} rollouts"
    check("slowest page, s", slowest, case=case, at_most=SECONDS, figures={"milliseconds": found})
    check("CPU of a page, in indexed queries", max(cpu.values()) / cpu["indexed query"], case=case, at_most=TIMES)
    check("memory that the server grew by, MB", grown, case=case, at_most=MEMORY)
