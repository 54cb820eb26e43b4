"""Learning per second: the quickstart's GRPO in rlsdk and in TRL, on the same tasks, reward, model and settings.

`Work` is derived from `examples/quickstart.yaml` and written to a folder as JSON, with the tasks as JSONL; both sides
read these files. Each point of a curve is a saved model, which `evaluate_points.py` evaluates afterwards.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import facts
import yaml
from memory_watch import MARK, MemoryWatch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
TASKS, LR = 64, 4e-4
"""Tasks per batch and peak learning rate, instead of the quickstart's, whose batches are too small to time."""
RLSDK_ENGINES = {"rlsdk-vllm": "vllm", "rlsdk-transformers": "transformers"}
EQUAL = {
    "algorithm": {
        "use": "grpo",
        "kl_coef": 0.0,
        "aggregate": "token-mean",
        "filters": [],
        "policy_loss": {"dual_clip": None},
    },
    "eval": {"every": 0, "before": False, "after": False},
    "save_rollouts": 0,
}
"""Changes to the quickstart that make the work equal: TRL also trains groups of equal rewards, without a dual clip."""
RLSDK_OWN = {"learners": 2, "rows": "shared", "attention": "eager"}
"""rlsdk's settings that affect only speed: two ranks of one thread, prompts processed once, faster short rows."""
TRL_OWN = {"threads": 2, "micro_batch": 0, "attention": "sdpa", "compile": False, "paged": False}
"""TRL's settings that affect only speed, the fastest found without compilation; micro_batch 0 is a whole minibatch."""


@attrs.frozen(kw_only=True)
class Work:
    """The work that each trainer does.

    Attributes:
        model: Folder of the warm-started model.
        train: JSONL of the tasks, in training order.
        held_out: JSONL of the evaluation tasks.
        steps: Number of batches.
        tasks: Tasks per batch.
        group: Completions per task.
        minibatches: Optimiser steps per batch.
        lr: Peak learning rate.
        betas: Betas of AdamW, whose eps is 1e-8 and weight decay 0.
        warmup: Optimiser steps of linear warm-up.
        final_ratio: Final learning rate as a share of the peak, after a linear decay.
        temperature: Sampling temperature.
        max_tokens: Maximum tokens of a completion.
        clip: Maximum distance of a ratio from 1.
        grad_clip: Maximum gradient norm.
        every: Batches between two points of the curve.
        seed: Random seed.
    """

    model: str
    train: str
    held_out: str
    steps: int
    tasks: int
    group: int
    minibatches: int
    lr: float
    betas: tuple[float, float]
    warmup: int
    final_ratio: float
    temperature: float
    max_tokens: int
    clip: float = 0.2
    grad_clip: float = 1.0
    every: int
    seed: int

    @property
    def points(self) -> list[int]:
        """Batches after which the model is evaluated; 0 is the initial model."""
        return sorted({*range(0, self.steps + 1, self.every), self.steps})

    def save(self, path: Path) -> None:
        """Write the JSON that both trainers read."""
        path.write_text(json.dumps(attrs.asdict(self), indent=1), encoding="utf-8")


def export_work(folder: Path, *, steps: int, every: int, held_out: int, seed: int) -> Work:
    """Write the tasks to `folder`, and return the work, with the quickstart's other values.

    Args:
        folder: Folder to write to.
        steps: Number of batches; 0 for the quickstart's.
        every: Batches between two points of the curve.
        held_out: Number of evaluation tasks.
        seed: Random seed of the training and of the task order.
    """
    import random

    config = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    steps, tasks = steps or config["steps"], TASKS
    folder.mkdir(parents=True, exist_ok=True)
    train = export_tasks(config["tasks"]["train"])
    random.Random(seed).shuffle(train)
    write_lines(folder / f"train-{seed}.jsonl", train[: steps * tasks])
    write_lines(folder / "held-out.jsonl", export_tasks({**config["tasks"]["eval"], "size": held_out}))
    learner = config["learner"]
    return Work(
        model=str(QUICKSTART.parent / config["model"]["path"]),
        train=str(folder / f"train-{seed}.jsonl"),
        held_out=str(folder / "held-out.jsonl"),
        steps=steps,
        tasks=tasks,
        group=config["group_size"],
        minibatches=config["minibatches"],
        lr=LR,
        betas=tuple(learner["betas"]),
        warmup=learner["warmup_steps"],
        final_ratio=learner["final_ratio"],
        temperature=config["sampling"]["temperature"],
        max_tokens=config["sampling"]["max_tokens"],
        every=every,
        seed=seed,
    )


def export_tasks(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tasks of one of the quickstart's sources, as lines of a JSONL file."""
    import rlsdk

    source = rlsdk.load("tasks", options["use"])
    tasks = source(**{name: value for name, value in options.items() if name != "use"})
    return [{"id": task.id, "prompt": task.prompt, **task.answer} for task in tasks]


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def rlsdk_config(work: Work, engine: str, folder: Path, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of rlsdk's run, which is the quickstart's with the exported tasks and equal work."""
    config = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    learner = {**config["learner"], "rows": own["rows"], "attention": own["attention"], "grad_clip": work.grad_clip}
    learner["lr"] = work.lr
    return {
        **config,
        **EQUAL,
        "name": "run",
        "out": str(folder),
        "seed": work.seed,
        "model": {**config["model"], "path": work.model},
        "tasks": {"train": {"use": "rlsdk_side/exported", "path": work.train}},
        "reward": "rlsdk_side/shared",
        "steps": work.steps,
        "batch_size": work.tasks,
        "engine": {"use": engine, **own.get("engine", {})},
        "learner": learner,
        "placement": {**config["placement"], "learners": own["learners"]},
        "checkpoint": {"every": work.every, "keep": len(work.points) + 1, "export": "every"},
    }


def train_rlsdk(work: Work, side: str, folder: Path, own: Mapping[str, Any]) -> dict[str, Any]:
    """Train with rlsdk; return steps, points and peak memory.

    Args:
        work: Work to do.
        side: Key of `RLSDK_ENGINES`.
        folder: Empty folder for the run.
        own: Settings that affect only speed.
    """
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(rlsdk_config(work, RLSDK_ENGINES[side], folder, own)), encoding="utf-8")
    command = [sys.executable, "-m", "rlsdk.cli", "train", str(file), "--plugin", str(HERE / "rlsdk_side.py")]
    memory = call(command, folder / "output.log", PYTHONPATH=f"{ROOT}{os.pathsep}{HERE}", OMP_NUM_THREADS="1")
    run = folder / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [
        {"seconds": m["time/step"], "tokens": m["rollouts/tokens"], "reward": m["reward/mean"]}
        for m in lines
        if "time/step" in m
    ]
    exports = {int(path.parent.name.rpartition("-")[2]): path for path in run.glob("checkpoints/*/export")}
    return {"steps": steps, "points": {0: work.model, **exports}, "memory": memory, "versions": facts.versions()}


def train_trl(work: Work, python: Path, folder: Path, own: Mapping[str, Any]) -> dict[str, Any]:
    """Train with TRL in its own environment; return the same as `train_rlsdk`.

    Args:
        work: Work to do.
        python: Python of TRL's environment.
        folder: Empty folder for the run.
        own: Settings that affect only speed.
    """
    work.save(folder / "work.json")
    (folder / "own.json").write_text(json.dumps(own), encoding="utf-8")
    command = [str(python), str(HERE / "learn_trl.py"), str(folder)]
    memory = call(command, folder / "output.log", OMP_NUM_THREADS=str(own["threads"]))
    found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    points = {0: work.model, **{int(step): path for step, path in found["points"].items()}}
    return {"steps": found["steps"], "points": points, "memory": memory, "versions": found["versions"]}


def call(command: Sequence[str], log: Path, **variables: str) -> dict[str, Any]:
    """Run a trainer to its end with its output in a file; return the peak memory of its processes.

    Raises:
        RuntimeError: The trainer failed; the message contains the end of its output.
    """
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    mark = f"{os.getpid()}-{log.parent.name}"
    with log.open("w", encoding="utf-8") as file:
        child = subprocess.Popen(
            command, cwd=ROOT, env={**kept, **variables, MARK: mark}, stdout=file, stderr=subprocess.STDOUT
        )
        with MemoryWatch(mark) as watch:
            status = child.wait()
    if status:
        end = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        raise RuntimeError(f"{' '.join(command)} ended with status {status}; the end of {log}:\n{end}")
    return watch.found()


def evaluate(work: Work, points: Mapping[int, str | Path]) -> dict[int, dict[str, float]]:
    """Return sampled and greedy accuracy, 0 to 1, of each saved model by batch, from the evaluator of all trainers."""
    asked = {"held_out": work.held_out, "max_tokens": work.max_tokens, "temperature": work.temperature}
    asked["points"] = {str(step): str(path) for step, path in points.items()}
    command = [sys.executable, str(HERE / "evaluate_points.py"), json.dumps(asked)]
    ran = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"the evaluation failed:\n{ran.stderr[-3000:]}")
    return {int(step): found for step, found in json.loads(ran.stdout.splitlines()[-1]).items()}


def record(side: str, work: Work, own: Mapping[str, Any], trained: Mapping[str, Any], load: float) -> dict[str, Any]:
    """Evaluate the points of a run, and return its record.

    Args:
        side: Name of the trainer.
        work: Work that it did.
        own: Settings that affect only speed.
        trained: Result of `train_rlsdk` or `train_trl`.
        load: Load average before the run.
    """
    after, steps = facts.load(), trained["steps"]
    if len(steps) != work.steps:
        raise RuntimeError(f"{side}: expected {work.steps} batches, found the seconds of {len(steps)}")
    clock = [0.0]
    for step in steps:
        clock.append(clock[-1] + step["seconds"])
    accuracy = evaluate(work, trained["points"])
    settings = {name: value for name, value in attrs.asdict(work).items() if name not in ("model", "train", "held_out")}
    return {
        "kind": "learning",
        "side": side,
        "seed": work.seed,
        "work": settings,
        "own": dict(own),
        "steps": [{**step, "since_start": round(t, 3)} for step, t in zip(steps, clock[1:], strict=True)],
        "points": [{"batch": b, "seconds": round(clock[b], 3), **accuracy[b]} for b in sorted(accuracy)],
        "median_step": round(statistics.median(step["seconds"] for step in steps), 4),
        "tokens_per_second": round(sum(step["tokens"] for step in steps) / clock[-1], 1),
        "memory": trained["memory"],
        "load_average": {"before": load, "after": after},
        **facts.about(),
        "versions": trained["versions"],
    }
