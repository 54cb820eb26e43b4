"""Cost of a growing rollout store: adding a group, loading one, querying."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = "The store of rollouts"
SIZES = (10**3, 10**4, 10**5, 10**6)
SLACK = 2.0
"""Times by which a cost may exceed its growth by the logarithm: caches, and a disk that others use."""
MEMORY = 64.0
"""MB that a store may hold more at the end than at the beginning, however large it is."""
WORKER = Path(__file__).parents[1] / "runlog" / "store_costs.py"


@pytest.mark.bench
@pytest.mark.timeout(3000)
def test_a_million_rollouts_cost_no_more_than_the_logarithm(tmp_path: Path, check: Callable[..., None]) -> None:
    found: dict[int, dict[str, Any]] = {}
    for size in SIZES:
        folder = tmp_path / str(size)
        command = [sys.executable, str(WORKER), str(folder), str(size), "15"]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        found[size] = json.loads(ran.stdout)
        shutil.rmtree(folder)
        print(size, {name: round(value, 3) for name, value in found[size].items()})
    least, most = found[SIZES[1]], found[SIZES[-1]]  # at 10³ everything is in the caches
    growth = math.log(SIZES[-1]) / math.log(SIZES[1])
    timed = ("put", "take", "by_step", "by_reward", "by_number")
    greatest = max(most[name] / least[name] / growth for name in timed)
    figure, figures = "greatest growth, in that of the logarithm", {"costs": found}
    check(figure, greatest, case="10⁴ to 10⁶ rollouts", at_most=SLACK, figures=figures)
    memory = max(costs["memory"] for costs in found.values())
    check("memory, MB", memory, case="10⁶ rollouts", at_most=MEMORY)
