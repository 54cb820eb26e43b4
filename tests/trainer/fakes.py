"""A trainer without Ray: scripted rollouts, and a learner that computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlsdk.batch import Totals
from rlsdk.config import Plan, check
from rlsdk.contracts import Sampling, TrainBatch, TrainedRole
from rlsdk.contracts.rollouts import (
    EngineStatus,
    Evaluation,
    RolloutCounters,
    RolloutSnapshot,
    RolloutSummary,
    TakenBatch,
    TaskCounts,
    TaskStatus,
    WeightSender,
)
from rlsdk.engines.actor import STEP
from rlsdk.rollout.chat import RolloutContext
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.rollout.generator import RolloutGenerator
from rlsdk.rollout.task_ledger import TaskLedger
from rlsdk.testing import ScriptedPolicy
from rlsdk.types import Group, Score, Task

MODEL = Path(__file__).parents[2] / "examples" / "models" / "countdown-nano"
SOURCE = "scripted"


def make_plan(folder: Path, **changes: Any) -> Plan:
    """A plan of ten steps of two groups of two, by GRPO."""
    tasks = {"use": "countdown", "size": 8, "template": "compact"}
    return check(
        {
            "name": "run",
            "out": str(folder),
            "model": {"path": str(MODEL), "max_length": 64},
            "tasks": {"train": {**tasks, "split": "train"}, "eval": {**tasks, "split": "test"}},
            "reward": "countdown",
            "algorithm": {"use": "grpo", "kl_coef": 0.0},
            "sampling": {"max_tokens": 10},
            "steps": 10,
            "batch_size": 2,
            "group_size": 2,
            **changes,
        }
    )


class ScriptedRollouts:
    """Rollouts of a scripted policy, with the ledger of a real run; every call is written down.

    Attributes:
        said: Calls, in their order.
        ledger: The ledger.
        eval_tasks: Number of held-out tasks.
        failure: No task runs in the background.
    """

    def __init__(self, plan: Plan, reward: Callable[[int, int], float] = lambda task, rollout: float(rollout)) -> None:
        self.plan, self.reward = plan, reward
        codec = ChatTokenizer.of(plan)
        self.policy: Any = ScriptedPolicy(codec, lambda text: "1+2")
        sampling = Sampling(max_tokens=plan.config.sampling.max_tokens)
        self.context = RolloutContext(codec=codec, client=self.policy, sampling=sampling, max_length=64)
        self.generator = RolloutGenerator(plan.plugins.resolve(plan.workflow), None, 0)
        self.ledger = TaskLedger([SOURCE])
        self.said: list[str] = []
        self.eval_tasks, self.failure, self.position = 8, None, 0

    async def take(self, version: int) -> TakenBatch:
        self.said.append(f"take {version}")
        records = []
        for _ in range(self.plan.config.batch_size):
            number, self.position = self.position, self.position + 1
            task = Task(id=number, prompt=f"{number}=", source=SOURCE, metadata={"demonstration": "1+2"})
            record = self.ledger.issue(SOURCE, task, number)
            self.ledger.move(record, TaskStatus.RUNNING)
            group = await self.generator.group(record.task, self.context, self.plan.config.group_size, str(number))
            scores = [Score(self.reward(number, i)) for i in range(len(group))]
            self.ledger.move(record, TaskStatus.COMPLETED, attrs.evolve(group, scores=scores))
            self.ledger.take(record)
            records.append(record)
        return TakenBatch(records=tuple(records))

    def settle(self, taken: TakenBatch, states: Sequence[TaskStatus]) -> None:
        self.said.append(f"settle {' '.join(states)}")
        for record, state in zip(taken.records, states, strict=True):
            self.ledger.move(record, state)

    async def publish(self, learner: WeightSender, version: int, *, updated: bool) -> float:
        self.said.append(f"publish {learner.weights(version)}{' updated' if updated else ''}")
        self.policy._version = version
        return 0.0

    async def sleep(self) -> None:
        self.said.append("sleep")

    async def evaluate(self) -> Evaluation:
        self.said.append("evaluate")
        return Evaluation({"greedy": 0.5}, {"eval/greedy": 0.5}, ())

    async def tasks(self, places: Mapping[int, tuple[str, int]]) -> dict[int, Task]:
        return {}

    async def restore(self, version: int, state: Mapping[str, Any], groups: Mapping[int, Group]) -> tuple[int, int]:
        self.position = state["tasks"]["position"]
        self.ledger.restore(state["production"])
        return 0, 0

    async def snapshot(self) -> RolloutSnapshot:
        state = {"tasks": {"position": self.position}, "production": {**self.ledger.state(), "kept": []}}
        return RolloutSnapshot(state, ())

    async def counters(self) -> RolloutCounters:
        names = ("engine", "engines", "steps", *(f"all_{name}" for name in STEP), "tokens")
        return RolloutCounters(dict.fromkeys(names, 0.0), 0)

    async def scale(self, engines: int | None) -> EngineStatus:
        return EngineStatus(1, (0,), 0, "")

    def sources(self) -> dict[str, TaskCounts]:
        return {SOURCE: self.ledger.counts(SOURCE)}

    async def pause(self) -> RolloutSummary:
        self.said.append("pause")
        return RolloutSummary(self.sources(), {}, {})

    async def close(self) -> None:
        self.said.append("close")


class FakeLearner:
    """A learner that records its calls and returns constants.

    Attributes:
        updates: Batches of the updates, with the minibatches and the step.
        gradients: Calls of `forward_backward`: batch, totals and the keywords that were given.
        stepped: Number of gradients at each call of `optimizer_step`.
        rates: Learning rates that were set.
        moves: Number of updates at each move of the reference model.
        kl: The metric `actor/kl_to_old` of optimiser steps.
    """

    def __init__(self) -> None:
        self.updates: list[tuple[TrainBatch, list[list[int]], int]] = []
        self.gradients: list[tuple[TrainBatch, Totals | None, dict[str, Any]]] = []
        self.stepped: list[int] = []
        self.rates: list[float] = []
        self.moves: list[int] = []
        self.kl = 0.0
        self.fields: list[tuple[str, ...]] = []

    @property
    def training_calls(self) -> int:
        return len(self.updates) + len(self.gradients) + len(self.stepped)

    def forward(self, batch: TrainBatch, fields: Sequence[str]) -> dict[str, np.ndarray]:
        self.fields.append(tuple(fields))
        return {name: np.full(len(batch.loss_mask), -0.5, np.float32) for name in fields}

    def update(self, batch: TrainBatch, minibatches: Sequence[np.ndarray], step: int) -> dict[str, float]:
        self.updates.append((batch, [part.tolist() for part in minibatches], step))
        return self._metrics

    def forward_backward(self, batch: TrainBatch, totals: Totals | None = None, **how: Any) -> None:
        self.gradients.append((batch, totals, how))

    def optimizer_step(self, role: TrainedRole = "actor") -> dict[str, float]:
        self.stepped.append(len(self.gradients))
        return {**self._metrics, "actor/kl_to_old": self.kl}

    def set_learning_rate(self, lr: float, role: TrainedRole = "actor") -> None:
        self.rates.append(lr)

    def move_reference(self) -> None:
        self.moves.append(len(self.updates))

    @property
    def _metrics(self) -> dict[str, float]:
        lr = self.rates[-1] if self.rates else 1e-3
        return {"actor/grad_norm": 1.0, "actor/loss": 0.0, "actor/skipped_updates": 0.0, "actor/lr": lr}

    def weights(self, version: int) -> Any:
        return f"weights {len(self.updates)}"

    def canary(self, token_ids: np.ndarray) -> np.ndarray:
        return np.zeros(len(token_ids) - 1, np.float32)

    def checksums(self) -> dict[str, str]:
        return {}

    def clock(self) -> dict[str, float]:
        return {"forward_seconds": 0.0, "update_seconds": 0.0}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "updates").write_text(str(len(self.updates)))

    def load(self, folder: Path) -> None:
        assert (folder / "updates").is_file()

    def export(self, folder: Path) -> None:
        folder.mkdir(parents=True)
