"""An environment of verifiers as its authors would write it: one question, one answer, two rewards and a metric."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def exact(self, task, trace) -> float:
        if trace.last_reply == "boom":
            raise RuntimeError("the grader is down")
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.5)
    async def brief(self, trace) -> float:
        return 1.0 if len(trace.last_reply) < 4 else 0.0

    @vf.metric
    async def turns(self, trace) -> float:
        return trace.num_turns

    @vf.metric
    async def cut(self, trace) -> float:
        return trace.is_truncated


class SumsConfig(vf.TasksetConfig):
    largest: int = 9


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterator[SumTask]:
        numbers = range(1, self.config.largest + 1)
        for a in numbers:
            for b in numbers:
                data = SumData(prompt=f"{a}+{b}?", answer=str(a + b), system_prompt="Add.")
                yield SumTask(data, self.config.task)
