"""Run folders as a training leaves them, created in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from rlsdk.runlog.folder import MARKER
from rlsdk.runlog.store import Address, RolloutStore
from rlsdk.runlog.tables import Entry, evaluated_entries
from rlsdk.types import Group, Message, Rollout, Score, Task

HOSTILE = (
    "<script>document.title='owned'</script></textarea><img src=x onerror=\"document.title='owned'\">"
    "\x1b[31mred\x1b[0m \u202egnihton\u202c \ud800 \x00 ${1+1} {{7*7}}"
)
"""An answer that tries to act instead of being read."""


def rollout(task: Task, text: str, *, tokens: int = 4, version: int = 0, status: Any = "finished") -> Rollout:
    mask = [False, *[True] * tokens]
    return Rollout(
        task,
        (Message("user", str(task.prompt)), Message("assistant", text)),
        np.arange(tokens + 1) + 3,
        mask,
        [0.0, *[-0.5] * tokens],
        [-1, *[version] * tokens],
        status,
    )


def group(number: int, *, source: str = "sums", answers: tuple[str, ...] = ("yes", "no"), version: int = 0) -> Group:
    task = Task(f"{source}/{number}", f"What is {number}?", number, source=source)
    rollouts = [
        rollout(task, text, tokens=4 + i, version=version, status="truncated" if i % 3 == 2 else "finished")
        for i, text in enumerate(answers)
    ]
    scores = [Score(1.0 - i, metrics={"reward/exact": 1.0 - i, "format": 1.0}) for i in range(len(answers))]
    return Group(task, rollouts, scores, uid=f"uid-{number}")


def fill(folder: Path, entries: list[Entry]) -> None:
    store = RolloutStore(Address.make(folder, None, None))
    with store.transaction():
        store.put(entries)
    store.close()


def make_run(folder: Path, *, steps: int = 6, greedy: bool = True) -> Path:
    """Write the files of a run of some steps, with two sources, an invalid score, evaluations and a hostile answer."""
    folder.mkdir(parents=True)
    (folder / MARKER).touch()
    (folder / "logs").mkdir()
    (folder / "logs" / "driver.log").write_text("began\nWARNING engine 1 is silent\n", encoding="utf-8")
    (folder / "config.yaml").write_text(f"name: {folder.name}\nseed: 0\nsteps: 8\n", encoding="utf-8")
    lines = [
        {"step": i, "reward/mean": i / 10, "time/step": 2.0, "time/produce": 1.5, "groups/trained": 0.5}
        for i in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    entries = []
    for n in range(2 * steps):
        made = group(n, source="sums" if n % 2 else "words", answers=("yes", HOSTILE if n == 3 else "no", "cut"))
        if n == 5:
            made = Group(
                made.task, made.rollouts, [Score.invalid("the judge timed out"), *made.scores[1:]], uid="uid-5"
            )
        tokens = [np.linspace(-1, 1, len(r.token_ids), dtype=np.float32) for r in made.rollouts]
        learned = {"advantages": tokens, "learner_logprobs": [t * 0 - 0.25 for t in tokens]} if n % 2 else {}
        entries.append(
            Entry(
                number=n,
                source=made.task.source,
                state="trained" if n % 2 else "filtered",
                step=n // 2 + 1,
                uses=n % 2,
                group=made,
                learned=learned,
            )
        )
    for step in (0, 3, 6):
        answers = [group(100 + n, answers=(f"answer {step}",), version=step) for n in range(3)]
        entries += evaluated_entries(step, {**({"eval greedy": answers} if greedy else {}), "eval sampled": answers})
    fill(folder, entries)
    return folder
