"""The asynchronous part of a run: what happens between the start of the actors and their end."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console

from rlsdk.config import Plan
from rlsdk.contracts import Run
from rlsdk.process import settle
from rlsdk.rollout.lifecycle import Counts
from rlsdk.rollout.producer import first_error
from rlsdk.runlog.attendance import Attendance, asked, tell
from rlsdk.runlog.progress import ProgressLine
from rlsdk.runlog.store import RolloutStore
from rlsdk.runlog.tables import Entry
from rlsdk.runlog.trackers import JsonlTracker, read_metrics
from rlsdk.runlog.writer import RolloutWriter
from rlsdk.trainer.explorer import Account
from rlsdk.trainer.loop import Loop

log = logging.getLogger(__name__)


class Session:
    """Evaluates, steps, logs and saves until the last step, or until a person interrupts."""

    def __init__(
        self,
        plan: Plan,
        loop: Loop,
        console: Console,
        resumed: int | None,
        seconds: dict[str, float],
        store: RolloutStore | None,
    ) -> None:
        self._plan, self._loop, self._console, self._resumed, self._seconds = plan, loop, console, resumed, seconds
        self._store = store
        self._writer: RolloutWriter | None = None
        self.samples: dict[str, Sequence[Mapping[str, Any]]] = {}
        self._attendance: Attendance | None = None

    async def go(self) -> dict[str, Any]:
        """Run to the end, or to an interruption."""
        plan, loop = self._plan, self._loop
        await self._begin()
        trackers = [JsonlTracker(), *(plan.plugins.resolve(t) for t in plan.trackers)]
        about = Run(plan.config.name, plan.folder, plan.tree, loop.done)
        plan.plugins.hook.rlsdk_run_start(config=plan.tree, folder=plan.folder)
        opened: list[Any] = []
        try:
            for tracker in trackers:
                tracker.open(about)
                opened.append(tracker)
            return await self._steps(opened)
        finally:
            for tracker in opened:
                tracker.close()

    async def _begin(self) -> None:
        """From the checkpoint, or from nothing: what a run that got no further than its first steps kept is gone."""
        if self._resumed is not None:
            await self._loop.restore(self._resumed, self._store)
            log.info("going on from step %d", self._resumed)
        elif self._store is not None:
            with self._store.transaction():
                self._store.rewind(0, {})

    async def _steps(self, trackers: Sequence[Any]) -> dict[str, Any]:
        plan, loop, section = self._plan, self._loop, self._plan.config.eval
        undo = on_interrupt(self._interrupt)
        writer = self._writer = RolloutWriter(self._store) if self._store is not None else None
        bar = ProgressLine(self._console, loop.steps, loop.done, max(1, loop.steps // 20), loop.sources)
        try:
            settle()
            await loop.publish(updated=False)
            if section.before and loop.explorer.eval_tasks and loop.done == 0:
                _log(trackers, 0, await self._evaluate("before", bar))
            while loop.done < loop.steps and not loop.interrupted:
                await self._attend()
                metrics, entries = await loop.step()
                if writer:
                    await writer.submit(partial(_keep, entries, step=loop.done, every=plan.config.save_rollouts))
                last = loop.done == loop.steps
                if loop.explorer.eval_tasks and (
                    (section.every and loop.done % section.every == 0) or (last and section.after)
                ):
                    metrics |= await self._evaluate("after", bar)
                _log(trackers, loop.done, metrics)
                bar.update(loop.done, metrics)
                plan.plugins.hook.rlsdk_step_end(step=loop.done, metrics=metrics)
                every = plan.config.checkpoint.every
                if last or loop.interrupted or (every and loop.done % every == 0):
                    await self._save(last=last or loop.interrupted)
        finally:
            account = await loop.explorer.end()
            _report(loop.explorer.failure)
            bar.close()
            if writer:
                await asyncio.to_thread(writer.close)
            undo()
        return self._summary(account)

    async def _attend(self) -> None:
        """Have as many engines as somebody asks for by `rlsdk engines`, and say which there are."""
        folder = self._plan.folder
        if not self._plan.needs_engine:
            return
        crew = await self._loop.explorer.attend(asked(folder))
        state = Attendance(**attrs.asdict(crew), driver=os.getpid())
        if state == self._attendance:
            return
        if crew.refused and (self._attendance is None or crew.refused != self._attendance.refused):
            log.warning("%s", crew.refused)
        tell(folder, state)
        self._attendance = state

    async def _evaluate(self, when: str, bar: ProgressLine) -> dict[str, float]:
        start = time.perf_counter()
        found = await self._loop.explorer.evaluate()
        self._seconds["evaluation"] = self._seconds.get("evaluation", 0.0) + time.perf_counter() - start
        self.samples[when] = found.samples
        shown = "  ".join(f"{name} {value:.1%}" for name, value in found.accuracy.items())
        bar.note(f"step {self._loop.done}: held-out accuracy {shown}")
        return found.metrics

    async def _save(self, *, last: bool) -> None:
        start, loop, writer = time.perf_counter(), self._loop, self._writer
        state, kept = await loop.snapshot()
        if writer:
            await writer.submit(lambda store: store.put(kept))
            await writer.flush()  # what the checkpoint refers to is there before it
        folder = await asyncio.to_thread(loop.save, state, last=last)
        if writer:
            every, done = self._plan.config.save_rollouts, loop.done
            await writer.submit(lambda store: store.forget(done, every))
        self._seconds["checkpoints"] = self._seconds.get("checkpoints", 0.0) + time.perf_counter() - start
        self._plan.plugins.hook.rlsdk_checkpoint_saved(step=self._loop.done, folder=folder)

    def _interrupt(self) -> None:
        if self._loop.interrupted:
            raise KeyboardInterrupt
        self.interrupt()

    def interrupt(self) -> None:
        """Finish and save the step, and end."""
        if not self._loop.interrupted:
            self._loop.interrupted = True
            self._console.print(
                "interrupted: this step is finished and saved, then the run ends; again ends it at once"
            )

    def _summary(self, account: Account) -> dict[str, Any]:
        plan, loop = self._plan, self._loop
        export = loop.p.checkpoints.path(loop.done) / "export"
        return {
            "name": plan.config.name,
            "status": "interrupted" if loop.interrupted and loop.done < loop.steps else "finished",
            "steps": loop.done,
            "eval_tasks": loop.explorer.eval_tasks,
            "accuracy_before": accuracy_at(plan.folder, 0),
            "accuracy_after": accuracy_at(plan.folder, loop.done),
            "invalid": {
                "rollouts": loop.unscored.total(),
                "share": loop.unscored.total() / max(loop.scored, 1),
                "reasons": dict(loop.unscored.most_common(5)),
            },
            "tasks": ledger(account.sources),
            "rollouts_reused": loop.reused,
            "environments": account.environments,
            "engines": account.engines,
            "explorers_lost": list(account.explorers_lost),
            "seconds": {**self._seconds, **loop.phases},
            "tokens_per_second": loop.tokens / max(loop.generating, 1e-9),
            "export": str(export) if export.is_dir() else None,
        }


def _keep(entries: Sequence[Entry], store: RolloutStore, *, step: int, every: int) -> None:
    """Keep a step's groups, or, between the steps whose groups are kept, what became of those that are there."""
    fresh = [entry for entry in entries if entry.step == step]
    if step % every == 0:
        store.put(fresh)
    store.settle([(e.number, e.state, e.step, e.uses) for e in entries])


def ledger(sources: Mapping[str, Counts]) -> dict[str, int]:
    """What became of the tasks that were issued; the others add up to `issued`."""
    ends = {name: sum(getattr(c, name) for c in sources.values()) for name in ("trained", "filtered", "failed")}
    left = sum(c.available + c.scheduled + c.waiting for c in sources.values())
    return {"issued": sum(ends.values()) + left, **ends, "returned": left}


def _report(failure: BaseException | None) -> None:
    """Say what failed in the background, unless it is what ended the run."""
    if failure is not None and failure is not sys.exception():
        cause = first_error(failure)
        log.error("a task failed after the last batch was taken: %s: %s", type(cause).__name__, cause, exc_info=failure)


def accuracy_at(folder: Path, step: int) -> dict[str, float] | None:
    """What the evaluation of a step found, from `metrics.jsonl`; None if there was none."""
    lines = [line for line in read_metrics(folder) if line["step"] == step and "eval/greedy" in line]
    if not lines:
        return None
    return {k.removeprefix("eval/"): v for k, v in lines[-1].items() if re.fullmatch(r"eval/[^/]+(?<!_reward)", k)}


def _log(trackers: Sequence[Any], step: int, metrics: Mapping[str, float]) -> None:
    for tracker in trackers:
        tracker.log(step, metrics)


def on_interrupt(call: Callable[[], None]) -> Callable[[], None]:
    """Have Ctrl-C call `call`; returns what undoes it. Only the main thread of a program can."""
    try:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, call)
    except (NotImplementedError, RuntimeError, ValueError):  # a notebook, or another thread
        return lambda: None

    def undo() -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    return undo
