"""Compare core functions of peers and rlsdk on the same random data: equal results, ratio of medians, peak memory.

Each trainer has a worker in its own environment. The workers run in turn, so that a slowdown of the machine affects
both.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import attrs
import facts
import torch
from peer_venvs import PEERS

HERE = Path(__file__).resolve().parent
GROUP = 16
GAMMA, LAM = 1.0, 0.95
ROUNDS = 15
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
"""Tolerance for float32: the trainers sum in different orders, and rlsdk computes group statistics in float64."""
SHAPES = {
    "1,024 × 1,024, even": (1024, 1024, False),
    "1,024 × up to 2,048, uneven": (1024, 2048, True),
}
QUICK_SHAPES = {"128 × 128, even": (128, 128, False), "128 × up to 256, uneven": (128, 256, True)}
CASES = {
    "verl": ("grpo", "grpo (vectorised)", "rloo", "gae", "ppo loss", "kl k3"),
    "openrlhf": ("ppo loss", "kl k3"),
}
"""Peer -> compared functions, by their names in the workers."""


def make_data(rollouts: int, width: int, uneven: bool) -> dict[str, Any]:
    """Return random data as padded planes `[n, L]`, float32, zeros where the mask is False.

    Args:
        rollouts: Number of rollouts n, in groups of 16.
        width: Maximum length L.
        uneven: Draw lengths uniformly from 1/16 of the width to the width; otherwise all are equal to the width.
    """
    g = torch.Generator().manual_seed(0)
    lengths = torch.full((rollouts,), width)
    if uneven:
        lengths = torch.randint(width // 16, width + 1, (rollouts,), generator=g)
        lengths[0] = width
    mask = torch.arange(width)[None, :] < lengths[:, None]

    def noise(scale: float) -> torch.Tensor:
        return torch.where(mask, scale * torch.randn(mask.shape, generator=g), 0)

    rewards = torch.randint(0, 5, (rollouts,), generator=g) / 4
    token_rewards = torch.zeros(mask.shape)
    token_rewards[torch.arange(rollouts), lengths - 1] = rewards
    old = torch.where(mask, -noise(1.0).abs(), 0)
    return {
        "mask": mask,
        "groups": torch.arange(rollouts) // GROUP,
        "rewards": rewards,
        "token_rewards": token_rewards,
        "values": noise(0.5),
        "old_logprobs": old,
        "logprobs": old + noise(0.1),
        "ref_logprobs": old + noise(0.1),
        "advantages": noise(1.0),
        "config": {"gamma": GAMMA, "lam": LAM},
    }


class Worker:
    """A process with the functions of one trainer."""

    def __init__(self, python: Path, script: str) -> None:
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OMP_NUM_THREADS")}
        kept["OMP_WAIT_POLICY"] = "passive"  # or its threads keep spinning on the next worker's cores
        if script == "cores_rlsdk.py":
            kept["PYTHONPATH"] = str(HERE.parents[1])
        self._process = subprocess.Popen(
            [str(python), str(HERE / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=kept,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def ask(self, **question: Any) -> dict[str, Any]:
        """Send a request and wait for the answer.

        Raises:
            RuntimeError: The worker ended without an answer.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("CORES "):
                answer: dict[str, Any] = json.loads(line[len("CORES ") :])
                return answer
        raise RuntimeError(f"the worker {self._process.args} ended at {question}; run it by hand to see why")


@attrs.frozen
class Pair:
    """Workers of rlsdk and of a peer."""

    ours: Worker
    theirs: Worker

    def compare(self, case: str, folder: Path, rounds: int) -> dict[str, Any]:
        """Return times, their ratio, peak memory, and the difference of the results."""
        files = {}
        for name, worker in (("rlsdk", self.ours), ("peer", self.theirs)):
            files[name] = folder / f"{name}.pt"
            worker.ask(result=case, to=str(files[name]))  # also the warm-up
        a, b = (torch.load(path).double() for path in files.values())
        seconds: dict[str, list[float]] = {"rlsdk": [], "peer": []}
        for _ in range(rounds):
            seconds["rlsdk"].append(self.ours.ask(time=case)["seconds"])
            seconds["peer"].append(self.theirs.ask(time=case)["seconds"])
        median = {name: statistics.median(found) for name, found in seconds.items()}
        return {
            "case": case,
            "median_ms": {name: round(1e3 * value, 3) for name, value in median.items()},
            "ratio": round(median["peer"] / median["rlsdk"], 2),
            "peak_mib": {"rlsdk": self._peak(self.ours, case), "peer": self._peak(self.theirs, case)},
            "equal": bool(torch.allclose(a, b, **TOLERANCE)),
            "greatest_difference": float((a - b).abs().max()),
        }

    @staticmethod
    def _peak(worker: Worker, case: str) -> float:
        return float(statistics.median(worker.ask(memory=case)["peak_mib"] for _ in range(3)))


def compare_cores(peer: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Compare rlsdk's core functions with a peer's; return the record.

    Args:
        peer: Key of `CASES`, whose environment exists.
        folder: Folder for the data.
        quick: Use small shapes and few rounds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    load, found, rounds = facts.load(), [], ROUNDS // (3 if quick else 1)
    for shape, size in (QUICK_SHAPES if quick else SHAPES).items():
        data = make_data(*size)
        torch.save(data, folder / "data.pt")
        with (
            Worker(Path(sys.executable), "cores_rlsdk.py") as ours,
            Worker(PEERS[peer].python, f"cores_{peer}.py") as theirs,
        ):
            ours_at, theirs_at = (worker.ask(load=str(folder / "data.pt"))["versions"] for worker in (ours, theirs))
            pair, tokens = Pair(ours, theirs), int(data["mask"].sum())
            found += [{"shape": shape, "tokens": tokens, **pair.compare(case, folder, rounds)} for case in CASES[peer]]
    return {
        "kind": "cores",
        "peer": peer,
        "threads": 2,
        "rounds": rounds,
        "results": found,
        "load_average": {"before": load, "after": facts.load()},
        **facts.about(),
        "versions": {"rlsdk": ours_at, peer: theirs_at},
    }
