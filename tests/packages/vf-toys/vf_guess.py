"""An environment of several turns: the policy guesses a number, and is told whether it is higher or lower."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

__all__ = ["GuessEnv", "GuessTaskset"]


class GuessData(vf.TaskData):
    number: int = 0


class GuessState(vf.State):
    guesses: list[str] = Field(default_factory=list)


class GuessTask(vf.Task[GuessData, GuessState, vf.TaskConfig]):
    async def setup(self, trace) -> None:
        trace.info["ready"] = True

    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return trace.num_turns > 0 and trace.last_reply == "I give up"

    @vf.reward
    async def found(self, task, trace) -> float:
        assert trace.info["ready"]
        return float(trace.last_reply == str(task.number))

    @vf.metric
    async def guesses(self, trace) -> float:
        return len(trace.state.guesses)


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self) -> Iterator[GuessTask]:
        for number in (3, 5):
            yield GuessTask(GuessData(prompt="Guess a number from 1 to 9.", number=number), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=4)


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents) -> None:
        async with agents.player.interaction(task) as game:
            said = await game.turn()
            while not said.terminated:
                game.trace.state.guesses.append(said.last_reply)
                if said.last_reply == str(task.data.number):
                    break
                if said.last_reply == "crash":
                    raise RuntimeError("the game crashed")
                lower = said.last_reply.isdigit() and int(said.last_reply) > task.data.number
                said = await game.turn("lower" if lower else "higher")

    async def finalize(self, task, episode) -> None:
        (trace,) = episode.traces
        trace.record_reward("early", 1.0 / max(trace.num_turns, 1), weight=0.5)
