"""What the rollout browser of `rlsdk view` costs over a store of a million rollouts, beside one indexed query."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa

from rlsdk.runlog.query import query
from rlsdk.runlog.store import Address, RolloutStore
from rlsdk.runlog.tables import GROUPS
from tests.runlog.store_costs import SIZE, costs

ROLLOUTS = int(os.environ.get("RLSDK_VIEW_ROLLOUTS", "1000000"))
ROUNDS = 11
GROUPS_OF_A_STEP = 32
SECONDS = 1.0
"""Longest time of a page: conditions that no index decides are looked for in portions of 0.4 s."""
MEMORY = 64.0
"""MB that the server may grow by, over all requests."""
PAGES = {
    "first page": "",
    "reward": "order=highest",
    "step": "step_from=1000&step_to=1000",
    "state": "state=trained",
    "source": "source=sums",
    "status": "status=finished",
    "rare reward": "reward_from=0.5",
    "text": "text=answer may be 77",
    "text that is nowhere": "text=nowhere to be found",
}


def filled(folder: Path) -> Path:
    """Make the folder of a run with a million rollouts, all of which were trained."""
    run = folder / "runs" / "million"
    run.parent.mkdir(parents=True)
    costs(run, ROLLOUTS, 1, distinct=SIZE * 1024)
    (run / ".rlsdk-run").touch()
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    store = RolloutStore(Address.make(run, None, None))
    with store.transaction():
        step = GROUPS.c.number // GROUPS_OF_A_STEP + 1
        store._connection.execute(sa.update(GROUPS).values(state="trained", step=step, uses=1))
    store.close()
    return run


def milliseconds(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


@pytest.mark.bench
@pytest.mark.timeout(3000)
def test_a_page_of_a_million_rollouts_costs_a_few_indexed_queries(tmp_path: Path) -> None:
    run = filled(tmp_path)
    indexed = milliseconds(lambda: query(run, "number = 1000"))
    command = [sys.executable, "-m", "rlsdk.cli", "view", str(run), "--no-open", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line))).rstrip("/")
            process = psutil.Process(server.pid)

            def ask(path: str) -> object:
                url = f"{address}/api/{path}".replace(" ", "%20")
                with urllib.request.urlopen(url, timeout=60) as answer:
                    return json.loads(answer.read())

            (key,) = (each["id"] for each in ask("state")["runs"])  # type: ignore[index]
            ask(f"rollouts/{key}")
            before = process.memory_info().rss
            found = {name: milliseconds(lambda q=q: ask(f"rollouts/{key}?{q}")) for name, q in PAGES.items()}  # type: ignore[misc]
            grown = (process.memory_info().rss - before) / 1e6
        finally:
            server.terminate()
    print(f"one indexed query {indexed:.1f} ms; server {before / 1e6:.0f} MB, grew by {grown:.1f} MB")
    print({name: f"{value:.1f} ms, {value / indexed:.1f} times" for name, value in found.items()})
    assert max(found.values()) <= 1e3 * SECONDS, found
    assert grown <= MEMORY
