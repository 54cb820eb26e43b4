"""An environment that needs what rlsdk cannot give: a runtime for its reward."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["BoxedTaskset"]


class BoxedTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def tests_pass(self, runtime) -> float:
        return float((await runtime.run(["true"], {})).exit_code == 0)


class BoxedTaskset(vf.Taskset[BoxedTask, vf.TasksetConfig]):
    def load(self) -> list[BoxedTask]:
        return [BoxedTask(vf.TaskData(prompt="Fix it."), self.config.task)]
