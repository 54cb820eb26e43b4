"""The trainer with a scripted policy and a fake learner: no Ray, no model."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import re
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from rlsdk.cluster.nodes import DrainingNode
from rlsdk.contracts import TrainBatch, TrainedRole
from rlsdk.contracts.rollouts import Evaluation, NoRolloutsError, TakenBatch, TaskStatus, WeightSender
from rlsdk.errors import CheckpointError, RunError, ScoringError, ValueFault
from rlsdk.isolation.vitals import Identity
from rlsdk.rollout.step_batch import StepBatch
from rlsdk.runlog.store import Address, RolloutStore
from rlsdk.runlog.tables import Entry
from rlsdk.trainer import Callback, Trainer
from rlsdk.trainer.callbacks import LeavingNodes, standard_callbacks
from rlsdk.trainer.interactive import ThreadedRollouts
from tests.trainer.fakes import MODEL, SOURCE, FakeLearner, ScriptedRollouts, make_plan


class Noting(Callback):
    """Writes every call into the list that the rollouts write theirs into."""

    def __init__(self, said: list[str], name: str = "") -> None:
        self.said, self.name = said, name

    async def on_start(self, trainer: Trainer) -> None:
        self.said.append(f"{self.name}on_start {trainer.version}")

    async def before_training(self, trainer: Trainer, metrics: dict[str, float | None]) -> None:
        self.said.append(f"{self.name}before_training")

    async def before_step(self, trainer: Trainer) -> None:
        self.said.append(f"{self.name}before_step {trainer.version}")

    async def after_step(self, trainer: Trainer, metrics: dict[str, float | None]) -> None:
        self.said.append(f"{self.name}after_step {trainer.version}")
        metrics["mine"] = float(trainer.version)

    async def after_save(self, trainer: Trainer, folder: Path) -> None:
        self.said.append(f"{self.name}after_save {folder.name}")

    async def on_end(self, trainer: Trainer, *, failed: bool) -> None:
        self.said.append(f"{self.name}on_end{' failed' if failed else ''}")


def make_trainer(folder: Path, kind: type[Trainer] = Trainer, **changes: Any) -> Trainer:
    plan = make_plan(folder, **changes)
    return kind(plan, rollouts=ScriptedRollouts(plan), learner=FakeLearner())


def test_ten_steps_close_the_ledger_and_count_versions(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)

    async def ten_steps() -> list[dict[str, float]]:
        return [await trainer.step() for _ in range(10)]

    metrics = asyncio.run(ten_steps())
    rollouts, learner = trainer.rollouts, trainer.learner
    counts = rollouts.sources()[SOURCE]
    assert (counts.trained, counts.consumed, counts.available, counts.waiting) == (20, 20, 0, 0)
    assert trainer.version == 10
    assert [step for _, _, step in learner.updates] == list(range(10))
    versions = [batch.tokens["policy_versions"] for batch, _, _ in learner.updates]
    assert [set(v.tolist()) for v in versions] == [{step} for step in range(10)]
    assert all(m["staleness/max"] == 0 and m["groups/trained"] == 1 for m in metrics)
    assert [entry.state for entry in trainer.closed] == [TaskStatus.TRAINED] * 2


def test_demonstrations_have_no_ratio_to_a_policy_that_sampled_them(tmp_path: Path) -> None:
    class Measuring(FakeLearner):
        @property
        def _metrics(self) -> dict[str, float]:
            return {**super()._metrics, "actor/ratio": 0.8, "actor/kl_to_old": 0.2, "actor/kl_to_behaviour": 0.2}

    def trained(**changes: Any) -> tuple[dict[str, float], Measuring]:
        trainer, learner = make_trainer(tmp_path, **changes), Measuring()
        trainer.learner = learner
        return asyncio.run(trainer.step()), learner

    metrics, learner = trained()
    assert metrics["actor/kl_to_old"] == 0.2
    shown = {"use": "countdown", "size": 8, "template": "compact", "demonstrations": 1.0}
    metrics, learner = trained(algorithm="sft", tasks={"train": shown})
    assert metrics["actor/grad_norm"] == 1 and not {"actor/ratio", "actor/kl_to_old"} & metrics.keys()
    assert "old_logprobs" not in learner.updates[0][0].tokens and learner.fields == [()]
    reads = {"use": "sft", "advantage": {"use": "on_policy_distill"}}
    metrics, learner = trained(algorithm=reads, tasks={"train": shown}, model={"path": str(MODEL), "reference": "o/o"})
    assert learner.fields == [("logprobs", "ref_logprobs")]


@pytest.mark.parametrize("name", ["reward/mean", "advantages/nonzero", "time/step", "eval/greedy", "step"])
def test_a_metric_of_a_learner_that_the_trainer_has_itself_is_refused_with_the_learner(
    tmp_path: Path, name: str
) -> None:
    class Reporting(FakeLearner):
        @property
        def _metrics(self) -> dict[str, float]:
            return {**super()._metrics, name: 99.0}

    trainer = make_trainer(tmp_path)
    trainer.learner = Reporting()
    said = rf"metric '{name}' of Trainer.update with learner 'core/deepspeed' of rlsdk .*: the trainer has a metric of"
    with pytest.raises(RunError, match=said):
        asyncio.run(trainer.step())


def test_a_callback_may_replace_metrics_but_not_the_number_of_the_step(tmp_path: Path) -> None:
    class Reporting(Callback):
        name = "reward/mean"

        async def after_step(self, trainer: Trainer, metrics: dict[str, float | None]) -> None:
            metrics[self.name] = 99.0

    trainer = make_trainer(tmp_path, steps=1)
    trainer.callbacks = [Reporting()]
    trainer.train()
    trainer = make_trainer(tmp_path, steps=1)
    trainer.callbacks = [Reporting()]
    Reporting.name = "step"
    with pytest.raises(RunError, match=r"metric 'step' of callback Reporting: each line of metrics\.jsonl has"):
        trainer.train()


def test_a_learning_rate_of_zero_is_not_expected_to_change_the_engines(tmp_path: Path) -> None:
    for rate, told in ((1e-3, " updated"), (0.0, "")):
        trainer = make_trainer(tmp_path)
        trainer.learner.set_learning_rate(rate)
        asyncio.run(trainer.step())
        assert trainer.rollouts.said[-1] == f"publish weights 1{told}"


class CriticLearner(FakeLearner):
    """Reports the loss 1, 2, 3, … of the critic's optimiser steps, and the number of trained tokens as its values."""

    def optimizer_step(self, role: TrainedRole = "actor") -> dict[str, float]:
        super().optimizer_step(role)
        values = float(self.gradients[-1][0].loss_mask.sum())
        return {"critic/loss": float(len(self.stepped)), "critic/values": values, "critic/grad_norm": 1.0}


def test_the_first_steps_train_the_critic_alone_and_publish_the_same_weights(tmp_path: Path) -> None:
    changes = {"algorithm": "ppo", "critic": {"warmup_steps": 2}, "minibatches": 3, "passes": 2, "max_empty_steps": 1}
    plan = make_plan(tmp_path, steps=4, **changes)
    rollouts, learner = ScriptedRollouts(plan), CriticLearner()

    class Counting(Trainer):
        optimised = 0

        async def optimise(self, batch: StepBatch, minibatches: Sequence[np.ndarray]) -> dict[str, float]:
            self.optimised += 1
            return await super().optimise(batch, minibatches)

    trainer = Counting(plan, rollouts=rollouts, learner=learner)
    metrics = [asyncio.run(trainer.step()) for _ in range(2)]
    assert [how for *_, how in learner.gradients] == [
        {"role": "critic", "step": step, "update": i, "updates": 6} for step in range(2) for i in range(6)
    ]
    assert learner.stepped == list(range(1, 13))
    for line, losses in zip(metrics, (range(1, 7), range(7, 13)), strict=True):
        assert line["critic/loss"] == np.mean(losses) and line["critic/skipped_updates"] == 0
        assert "actor/loss" not in line and "actor/grad_norm" not in line
    tokens = [float(batch.loss_mask.sum()) for batch, *_ in learner.gradients[:6]]
    assert metrics[0]["critic/values"] == pytest.approx(np.average(tokens, weights=tokens))
    assert not trainer.optimised and not learner.updates
    assert not trainer.monitor.empty and not trainer.ended
    state = trainer.save()

    resumed = Trainer(plan, rollouts=ScriptedRollouts(plan), learner=CriticLearner(), resume_from=2)
    asyncio.run(resumed.prepare())
    asyncio.run(resumed.step())
    assert state.name == "step-2" and [step for _, _, step in resumed.learner.updates] == [2]
    asyncio.run(trainer.step())
    assert trainer.optimised == 1 and len(learner.gradients) == 12
    published = [text for text in rollouts.said if text.startswith("publish")]
    assert published == ["publish weights 0", "publish weights 0", "publish weights 1 updated"]


def test_a_step_takes_trains_settles_and_publishes_in_this_order(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    asyncio.run(trainer.step())
    assert trainer.rollouts.said == ["take 0", "sleep", "settle trained trained", "publish weights 1 updated"]


def test_weights_are_published_every_so_many_steps_and_after_the_last(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, steps=5, rollout={"max_staleness": 1, "sync_interval": 2})
    asyncio.run(trainer.train_async())
    published = [text for text in trainer.rollouts.said if text.startswith("publish")]
    assert published == ["publish weights 0", *(f"publish weights {n} updated" for n in (2, 4, 5))]


def test_a_step_that_fails_settles_nothing_and_is_not_done(tmp_path: Path) -> None:
    class Failing(Trainer):
        async def update(self, batch: StepBatch, minibatches: Sequence[np.ndarray]) -> dict[str, float]:
            raise RuntimeError("out of memory")

    trainer = make_trainer(tmp_path, Failing)
    trainer.callbacks = [Noting(trainer.rollouts.said)]
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert trainer.version == 0
    assert trainer.rollouts.said[-4:] == ["take 0", "sleep", "pause", "on_end failed"]


class Held(FakeLearner):
    """Learner whose calls of one kind wait until the test lets them go on."""

    def __init__(self, held: str) -> None:
        super().__init__()
        self.held, self.begun, self.free = held, threading.Event(), threading.Event()

    def _wait(self, call: str) -> None:
        if call == self.held:
            self.begun.set()
            assert self.free.wait(60)

    def forward(self, batch: TrainBatch, fields: Sequence[str]) -> dict[str, np.ndarray]:
        self._wait("forward")
        return super().forward(batch, fields)

    def update(self, batch: TrainBatch, minibatches: Sequence[np.ndarray], step: int) -> dict[str, float]:
        self._wait("update")
        return super().update(batch, minibatches, step)


class Again(ScriptedRollouts):
    """Rollouts that give a batch again until it is settled, as those of a run do."""

    batch: TakenBatch | None = None

    async def take(self, version: int) -> TakenBatch:
        self.batch = self.batch or await super().take(version)
        return self.batch

    def settle(self, taken: TakenBatch, states: Sequence[TaskStatus]) -> None:
        super().settle(taken, states)
        self.batch = None


def interrupted_in(folder: Path, call: str, interrupts: int = 1) -> Trainer:
    """Interrupt a step while the learner works on a call, then let the learner go on."""
    plan = make_plan(folder)
    learner = Held(call)
    trainer = Trainer(plan, rollouts=Again(plan), learner=learner)

    async def run() -> None:
        step = asyncio.ensure_future(trainer.step())
        await asyncio.to_thread(learner.begun.wait, 60)
        for _ in range(interrupts):
            step.cancel()
            await asyncio.sleep(0.1)
        learner.free.set()
        with pytest.raises(asyncio.CancelledError):
            await step

    asyncio.run(run())
    return trainer


def test_a_step_that_is_interrupted_during_its_update_is_finished_and_its_batch_is_not_trained_on_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = interrupted_in(tmp_path, "update")
    assert "step 1 will be finished first; interrupt again to end at once" in caplog.text
    assert trainer.version == 1 and trainer.rollouts.said[-1] == "publish weights 1 updated"
    asyncio.run(trainer.step())
    assert [step for *_, step in trainer.learner.updates] == [0, 1]
    assert trainer.rollouts.sources()[SOURCE].trained == 4


def test_a_step_that_is_interrupted_before_its_update_is_repeated_with_the_same_batch(tmp_path: Path) -> None:
    trainer = interrupted_in(tmp_path, "forward")
    assert trainer.version == 0 and not trainer.learner.updates
    asyncio.run(trainer.step())
    assert trainer.version == 1 and trainer.rollouts.said.count("take 0") == 1


def test_a_trainer_whose_update_was_cut_off_neither_continues_nor_saves(tmp_path: Path) -> None:
    trainer = interrupted_in(tmp_path, "update", interrupts=2)
    for call in (lambda: asyncio.run(trainer.step()), trainer.save, trainer.train, trainer.evaluate):
        with pytest.raises(RunError, match=r"step 1 was cut off while .* continue from a checkpoint"):
            call()


def test_a_closed_trainer_says_so_instead_of_waiting_for_what_is_stopped(tmp_path: Path) -> None:
    with make_trainer(tmp_path) as trainer:
        asyncio.run(trainer.step())
    for call in (lambda: asyncio.run(trainer.step()), trainer.save, trainer.train, trainer.evaluate):
        with pytest.raises(RunError, match=r"this trainer is closed.* from_config\(…, resume=True\)"):
            call()
    trainer.close()


def test_an_update_that_fails_may_be_repeated(tmp_path: Path) -> None:
    class Failing(Trainer):
        async def optimise(self, batch: StepBatch, minibatches: Sequence[np.ndarray]) -> dict[str, float]:
            if not self.learner.moves:
                self.learner.moves.append(0)
                raise KeyError("actor/klto_old")
            return await super().optimise(batch, minibatches)

    plan = make_plan(tmp_path)
    trainer = Failing(plan, rollouts=Again(plan), learner=FakeLearner())
    with pytest.raises(KeyError):
        asyncio.run(trainer.step())
    assert asyncio.run(trainer.step())["groups/trained"] == 1 and trainer.version == 1


def half_an_update(trainer: Trainer) -> None:
    trainer.learner.forward_backward(None)
    trainer.learner.optimizer_step()


@pytest.mark.parametrize("stage", ["update", "ledger"])
def test_a_step_that_fails_once_the_learner_has_trained_in_it_is_not_repeated(tmp_path: Path, stage: str) -> None:
    class Failing(Trainer):
        async def optimise(self, batch: StepBatch, minibatches: Sequence[np.ndarray]) -> dict[str, float]:
            if stage == "ledger":
                return await super().optimise(batch, minibatches)
            half_an_update(self)
            raise KeyError("actor/klto_old")

        def close_ledger(self, *args: Any) -> dict[str, float]:
            raise KeyError("a replay buffer of one's own")

    plan = make_plan(tmp_path)
    trainer = Failing(plan, rollouts=Again(plan), learner=FakeLearner())
    with pytest.raises(KeyError):
        asyncio.run(trainer.step())
    for call in (lambda: asyncio.run(trainer.step()), trainer.save, trainer.train):
        with pytest.raises(RunError, match=r"step 1 was cut off while .* continue from a checkpoint"):
            call()
    assert trainer.learner.training_calls == (1 if stage == "ledger" else 2)


def test_a_learner_that_does_not_count_its_calls_may_have_trained_when_a_step_fails(tmp_path: Path) -> None:
    class Failing(Trainer):
        async def optimise(self, batch: StepBatch, minibatches: Sequence[np.ndarray]) -> dict[str, float]:
            raise KeyError("actor/klto_old")

    class Uncounted:
        def __init__(self, learner: FakeLearner) -> None:
            for name in ("forward", "update", "weights", "clock"):
                setattr(self, name, getattr(learner, name))

    trainer = make_trainer(tmp_path, Failing)
    trainer.learner = Uncounted(trainer.learner)
    with pytest.raises(KeyError):
        asyncio.run(trainer.step())
    with pytest.raises(RunError, match="step 1 was cut off"):
        asyncio.run(trainer.step())


@pytest.mark.parametrize("then", ["step", "evaluate"])
def test_weights_whose_sync_failed_are_published_before_the_next_rollouts(tmp_path: Path, then: str) -> None:
    class Failing(ScriptedRollouts):
        async def publish(self, learner: WeightSender, version: int, *, updated: bool) -> float:
            if "failed" not in self.said:
                self.said.append("failed")
                raise RunError("an engine died")
            return await super().publish(learner, version, updated=updated)

    plan = make_plan(tmp_path)
    trainer = Trainer(plan, rollouts=Failing(plan), learner=FakeLearner())
    with pytest.raises(RunError, match="an engine died"):
        asyncio.run(trainer.step())
    asyncio.run(trainer.step()) if then == "step" else trainer.evaluate()
    said = trainer.rollouts.said
    assert said[said.index("failed") + 1 :][:2] == ["publish weights 1 updated", {"step": "take 1"}.get(then, then)]


def test_weights_are_published_before_the_next_rollouts_if_the_reference_model_could_not_move(tmp_path: Path) -> None:
    class Failing(FakeLearner):
        def move_reference(self) -> None:
            super().move_reference()
            if len(self.moves) == 1:
                raise RunError("a rank died")

    plan = make_plan(tmp_path, algorithm="grpo", reference={"update_every": 1})
    trainer = Trainer(plan, rollouts=ScriptedRollouts(plan), learner=Failing())
    asyncio.run(trainer.prepare())
    with pytest.raises(RunError, match="a rank died"):
        asyncio.run(trainer.step())
    asyncio.run(trainer.step())
    assert trainer.version == 2 and trainer.rollouts.said[-5:-3] == ["publish weights 1 updated", "take 1"]


def test_the_batch_of_a_step_that_is_repeated_is_counted_once(tmp_path: Path) -> None:
    trainer = interrupted_in(tmp_path, "forward")
    asyncio.run(trainer.step())
    assert trainer.counters.scored == 4


def test_a_training_that_was_cut_off_by_a_second_interrupt_continues_with_the_next_call(tmp_path: Path) -> None:
    class Impatient(Callback):
        interrupts = 2

        async def before_step(self, trainer: Trainer) -> None:
            if self.interrupts:
                self.interrupts = 0
                trainer.interrupt()
                raise KeyboardInterrupt

    trainer = make_trainer(tmp_path, steps=2)
    trainer.callbacks = [Impatient()]
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.train()["status"] == "finished" and trainer.version == 2


def test_a_trainer_whose_checkpoint_could_not_be_loaded_does_not_start_without_it(tmp_path: Path) -> None:
    class Failing(FakeLearner):
        loads = 0

        def load(self, folder: Path) -> None:
            self.loads += 1
            if self.loads == 1:
                raise RunError("a rank died")

    trainer = make_trainer(tmp_path)
    asyncio.run(trainer.step())
    trainer.save()
    resumed = Trainer(trainer.plan, rollouts=ScriptedRollouts(trainer.plan), learner=Failing(), resume_from=1)
    with pytest.raises(RunError, match="a rank died"):
        resumed.train()
    asyncio.run(resumed.prepare())
    assert resumed.version == 1 and resumed.learner.loads == 2


def test_groups_without_a_reward_are_filtered_and_no_update_is_taken(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, algorithm={"use": "grpo", "kl_coef": 0.0, "filters": ["nonzero_variance"]})
    rollouts = ScriptedRollouts(plan, reward=lambda task, rollout: float(rollout) if task else 0.0)
    trainer = Trainer(plan, rollouts=rollouts, learner=FakeLearner())
    asyncio.run(trainer.step())
    assert rollouts.said == ["take 0", "sleep", "settle filtered trained", "publish weights 1 updated"]
    assert [len(batch) for batch, _, _ in trainer.learner.updates] == [2]


def test_a_group_that_sampled_nothing_does_not_count_as_trained(tmp_path: Path) -> None:
    class Silent(ScriptedRollouts):
        async def take(self, version: int) -> TakenBatch:
            taken = await super().take(version)
            record = taken.records[0]
            assert record.group is not None
            silent = [attrs.evolve(r, loss_mask=np.zeros_like(r.loss_mask)) for r in record.group.rollouts]
            record.group = attrs.evolve(record.group, rollouts=silent)
            return taken

    plan = make_plan(tmp_path)
    trainer = Trainer(plan, rollouts=Silent(plan), learner=FakeLearner())
    metrics = asyncio.run(trainer.step())
    assert trainer.rollouts.said[2] == "settle filtered trained"
    assert metrics["groups/trained"] == 0.5


def test_callbacks_run_in_their_order_around_each_step_and_end_in_reverse(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, steps=1)
    said = trainer.rollouts.said
    trainer.callbacks = [Noting(said, "a."), Noting(said, "b.")]
    summary = trainer.train()
    assert said == [
        "a.on_start 0", "b.on_start 0", "publish weights 0", "a.before_training", "b.before_training",
        "a.before_step 0", "b.before_step 0", "take 0", "sleep", "settle trained trained", "publish weights 1 updated",
        "a.after_step 1", "b.after_step 1", "pause", "b.on_end", "a.on_end",
    ]  # fmt: skip
    assert summary["tasks"] == {"issued": 2, "trained": 2, "filtered": 0, "failed": 0, "returned": 0, "expired": 0}


class Told:
    """Observers without plugins."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def tell(self, hook: str, **arguments: Any) -> None: ...

    def open(self, trackers: Any, run: Any) -> None: ...

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.logged.append((step, metrics))

    def close_trackers(self, seconds: float) -> dict[str, str]:
        return {}


def test_evaluation_comes_before_ones_own_callbacks_and_logging_and_saving_after(tmp_path: Path) -> None:
    from rich.console import Console

    trainer = make_trainer(tmp_path, steps=2, checkpoint={"every": 1})
    trainer.plan.folder.mkdir(parents=True)
    said, observers = trainer.rollouts.said, Told()
    own = Noting(said)
    trainer.callbacks = standard_callbacks(Console(quiet=True), observers, None, [own])  # type: ignore[arg-type]
    trainer.train()
    steps = [text for text in said if re.match("evaluate|after|before_step", text)]
    assert steps == [
        "evaluate", "before_step 0", "after_step 1", "after_save step-1",
        "before_step 1", "evaluate", "after_step 2", "after_save step-2",
    ]  # fmt: skip
    lines = [json.loads(line) for line in (trainer.plan.folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line.get("mine"), line.get("eval/greedy")) for line in lines] == [
        (0, None, 0.5), (1, 1.0, None), (2, 2.0, 0.5),
    ]  # fmt: skip
    assert [step for step, _ in observers.logged] == [0, 1, 2]


@pytest.mark.parametrize(
    "steps, section, reward, expected",
    [
        (8, {"every": 3}, 1.0, [0, 4, 6, 8]),
        (8, {"every": 3}, 0.0, [0, 3]),
        (9, {"every": 4, "after": False}, 1.0, [0, 4, 8]),  # step 8 is not evaluated again at the end
        (9, {"every": 9, "after": False}, 1.0, [0, 9]),
    ],
)
def test_evaluations_have_the_weights_of_their_step_whatever_the_sync_interval(
    tmp_path: Path, steps: int, section: dict[str, Any], reward: float, expected: list[int]
) -> None:
    from rich.console import Console

    class Evaluated(ScriptedRollouts):
        versions: ClassVar[list[tuple[int, int]]] = []

        async def evaluate(self) -> Evaluation:
            self.versions.append((trainer.version, self.policy._version))
            return await super().evaluate()

    changes = {"steps": steps, "eval": section, "rollout": {"sync_interval": 2}, "max_empty_steps": 3}
    plan = make_plan(tmp_path, **changes)
    plan.folder.mkdir(parents=True)
    trainer = Trainer(plan, rollouts=Evaluated(plan, lambda _, i: i * reward), learner=FakeLearner())
    trainer.callbacks = standard_callbacks(Console(quiet=True), Told(), None)  # type: ignore[arg-type]
    Evaluated.versions.clear()
    trainer.train()
    assert Evaluated.versions == [(step, step) for step in expected]


def test_steps_by_hand_up_to_the_last_end_with_an_evaluation_and_an_exported_checkpoint(tmp_path: Path) -> None:
    from rich.console import Console

    trainer = make_trainer(tmp_path, steps=2, checkpoint={"every": 0, "export": "last"})
    trainer.plan.folder.mkdir(parents=True)
    said = trainer.rollouts.said
    trainer.callbacks = standard_callbacks(Console(quiet=True), Told(), None, [Noting(said)])  # type: ignore[arg-type]
    for _ in range(2):
        asyncio.run(trainer.step())
    trainer.save()
    summary = trainer.train()
    assert (summary["status"], summary["steps"]) == ("finished", 2)
    assert (trainer.checkpoints.path(2) / "export").is_dir() and summary["export"]
    lines = [json.loads(line) for line in (trainer.plan.folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["eval/greedy"]) for line in lines] == [(2, 0.5)]
    done = len(said)
    trainer.train()
    assert not {"evaluate", "after_save step-2"} & {*said[done:]}  # nothing is done twice


def test_a_run_that_is_interrupted_while_it_saves_has_its_export_nevertheless(tmp_path: Path) -> None:
    from rich.console import Console

    class Interrupting(Noting):
        async def before_save(self, trainer: Trainer, kept: Sequence[Entry]) -> None:
            trainer.interrupt()
            stale.append(summary.exists())

    trainer = make_trainer(tmp_path, checkpoint={"every": 1, "export": "last"})
    trainer.plan.folder.mkdir(parents=True)
    summary, stale = trainer.plan.folder / "summary.json", list[bool]()
    summary.write_text('{"status": "interrupted"}')
    own = Interrupting(trainer.rollouts.said)
    trainer.callbacks = standard_callbacks(Console(quiet=True), Told(), None, [own])  # type: ignore[arg-type]
    trainer.train()
    assert trainer.version == 1
    assert (trainer.checkpoints.path(1) / "export").is_dir()
    assert stale == [False, False]  # a kill must not leave the summary of an earlier start
    assert sorted(path.name for path in trainer.checkpoints.path(1).parent.iterdir()) == ["step-1"]


def test_an_interrupted_run_that_gets_no_more_rollouts_saves_what_it_has_trained(tmp_path: Path) -> None:
    class Ending(ScriptedRollouts):
        async def take(self, version: int) -> TakenBatch:
            if version == 2:
                trainer.interrupt()
                raise NoRolloutsError("the explorer has ended")
            return await super().take(version)

    plan = make_plan(tmp_path, checkpoint={"every": 100})
    trainer = Trainer(plan, rollouts=Ending(plan), learner=FakeLearner())
    summary = trainer.train()
    assert (trainer.version, summary["status"], trainer.checkpoints.steps()) == (2, "interrupted", [2])


def test_a_run_that_waits_for_rollouts_in_vain_saves_what_it_has_trained_and_fails(tmp_path: Path) -> None:
    class Ending(ScriptedRollouts):
        async def take(self, version: int) -> TakenBatch:
            if version == 2:
                raise NoRolloutsError("no explorer connected")
            return await super().take(version)

    plan = make_plan(tmp_path, checkpoint={"every": 100})
    trainer = Trainer(plan, rollouts=Ending(plan), learner=FakeLearner())
    with pytest.raises(NoRolloutsError, match="no explorer connected"):
        trainer.train()
    assert trainer.checkpoints.steps() == [2]


@pytest.mark.parametrize("file", ["", "metrics.jsonl", "rollouts.db"])
def test_a_run_whose_folder_or_file_is_deleted_saves_what_it_has_trained_and_fails(tmp_path: Path, file: str) -> None:
    from rich.console import Console

    class Deleting(Noting):
        async def before_step(self, trainer: Trainer) -> None:
            if trainer.version != 1:
                return
            if file:
                (trainer.plan.folder / file).unlink()
                (trainer.plan.folder / file).mkdir()  # as little can be written there
            else:
                shutil.rmtree(trainer.plan.folder)

    trainer = make_trainer(tmp_path, checkpoint={"every": 1})
    trainer.plan.folder.mkdir(parents=True)
    own = Deleting(trainer.rollouts.said)
    store = RolloutStore(Address.make(trainer.plan.folder, None, None))
    trainer.callbacks = standard_callbacks(Console(quiet=True), Told(), store, [own])  # type: ignore[arg-type]
    gone = file or "metrics.jsonl"
    with pytest.raises(RunError, match=rf"{gone} was deleted or moved.* up to step 2 is saved in .*step-2"):
        trainer.train()
    store.close()
    assert trainer.checkpoints.latest() == 2


def test_what_was_trained_is_saved_before_an_evaluation_that_cannot_be_scored_ends_the_run(tmp_path: Path) -> None:
    from rich.console import Console

    class Unscored(ScriptedRollouts):
        async def evaluate(self) -> Evaluation:
            raise ScoringError("evaluation at step 2: 8 of 8 trajectories could not be scored")

    plan = make_plan(tmp_path, steps=2, eval={"before": False}, checkpoint={"export": "last"})
    plan.folder.mkdir(parents=True)
    trainer = Trainer(plan, rollouts=Unscored(plan), learner=FakeLearner())
    trainer.callbacks = standard_callbacks(Console(quiet=True), Told(), None, [])  # type: ignore[arg-type]
    with pytest.raises(ScoringError, match="8 of 8 trajectories"):
        trainer.train()
    assert (trainer.checkpoints.path(2) / "export").is_dir()


class Here:
    """Actor of a learner rank, on a node of this name."""

    def __init__(self, node: str) -> None:
        self.node = node

    @property
    def identity(self) -> Here:
        return self

    async def remote(self) -> Identity:
        return Identity(pid=1, started=0.0, host="", machine="", node=self.node)


class Ranks:
    """Learner of two ranks and a critic of one, as a callback sees it."""

    def named_actors(self) -> dict[str, Here]:
        return {"learner rank 0": Here("a"), "learner rank 1": Here("b"), "critic rank 0": Here("b")}


@pytest.mark.stack
def test_a_run_ends_after_its_step_with_a_checkpoint_before_the_export_if_the_node_of_a_rank_is_drained(
    tmp_path: Path, cluster: None
) -> None:
    from rich.console import Console

    leaving = LeavingNodes(Ranks())  # type: ignore[arg-type]

    class Draining(Noting):
        async def before_step(self, trainer: Trainer) -> None:
            nodes = [DrainingNode("c", "a node")] if trainer.version < 2 else [DrainingNode("b", "node b")]
            for _ in range(2):
                await leaving.leave(trainer, nodes)

        async def after_save(self, trainer: Trainer, folder: Path) -> None:
            await super().after_save(trainer, folder)
            self.said.append(f"export {(folder / 'export').is_dir()}")

    trainer = make_trainer(tmp_path, checkpoint={"every": 100, "export": "last"})
    trainer.plan.folder.mkdir(parents=True)
    own = Draining(trainer.rollouts.said)
    trainer.callbacks = standard_callbacks(Console(quiet=True), Told(), None, [own], [leaving])  # type: ignore[arg-type]
    summary = trainer.train()
    assert trainer.version == 3 and summary["status"] == "interrupted"
    assert [each for each in trainer.rollouts.said if "export" in each] == ["export False", "export True"]
    assert summary["warnings"] == [
        "learner rank 1 and critic rank 0 are on node b, which leaves the cluster (Ray is draining it). The run ends "
        "after its step, with a checkpoint; --resume continues it on other nodes"
    ]


def test_a_checkpoint_is_continued_from(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    asyncio.run(trainer.step())
    folder = trainer.save()
    assert folder.name == "step-1"
    plan = trainer.plan
    resumed = Trainer(plan, rollouts=ScriptedRollouts(plan), learner=FakeLearner(), resume_from=1)
    asyncio.run(resumed.prepare())
    assert resumed.version == 1
    asyncio.run(resumed.step())
    assert resumed.rollouts.said == ["publish weights 0", "take 1", "sleep", "settle trained trained",
                                     "publish weights 1 updated"]  # fmt: skip
    assert resumed.rollouts.sources()[SOURCE].trained == 4


def test_a_changed_configuration_is_kept_once_the_learner_has_loaded_the_checkpoint(tmp_path: Path) -> None:
    class Refusing(FakeLearner):
        def load(self, folder: Path) -> None:
            raise CheckpointError("written by a learner with other settings")

    trainer = make_trainer(tmp_path)
    asyncio.run(trainer.step())
    trainer.save()
    loaded = []
    for learner in (Refusing(), FakeLearner()):
        resumed = Trainer(trainer.plan, rollouts=ScriptedRollouts(trainer.plan), learner=learner, resume_from=1)
        resumed.record = SimpleNamespace(keep_changes=lambda of=learner: loaded.append(of) or [])  # type: ignore[assignment]
        with contextlib.suppress(CheckpointError):
            asyncio.run(resumed.restore())
    assert loaded == [learner]


def test_checkpoints_wait_for_the_next_sync_so_that_a_resumed_run_has_the_weights_of_one_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from rich.console import Console

    def started(resume_from: int | None = None, *own: Callback) -> Trainer:
        changes = {"steps": 8, "checkpoint": {"every": 3, "keep": 9}, "rollout": {"sync_interval": 2}}
        plan = make_plan(tmp_path, **changes)
        plan.folder.mkdir(parents=True, exist_ok=True)
        trainer = Trainer(plan, rollouts=ScriptedRollouts(plan), learner=FakeLearner(), resume_from=resume_from)
        trainer.callbacks = standard_callbacks(Console(quiet=True), Told(), None, own)  # type: ignore[arg-type]
        return trainer

    class Asking(Callback):
        async def before_step(self, trainer: Trainer) -> None:
            if trainer.version == 0:
                trainer.save_soon()
            if trainer.version == 4:
                trainer.interrupt()

    trainer = started()
    trainer.train()
    assert trainer.checkpoints.steps() == [4, 6, 8]
    shutil.rmtree(tmp_path / "run")
    with caplog.at_level("INFO"):
        started(None, Asking()).train()
        assert trainer.checkpoints.steps() == [2, 4, 5]
        assert "checkpoint requested: step 2 will be saved" in caplog.text
        asyncio.run(started(4).prepare())
        assert "between two weight syncs" not in caplog.text
        asyncio.run(started(5).prepare())
    assert "step 5 is between two weight syncs (rollout.sync_interval=2)" in caplog.text


def test_steps_and_plain_calls_share_rollouts_whatever_event_loop_runs(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    loops = set()
    scripted = trainer.rollouts
    take = scripted.take

    async def taking(version: int) -> Any:
        loops.add(id(asyncio.get_running_loop()))
        return await take(version)

    scripted.take = taking  # type: ignore[method-assign]
    trainer.rollouts = ThreadedRollouts(scripted)
    asyncio.run(trainer.step())
    asyncio.run(trainer.step())

    async def notebook() -> Any:
        await trainer.step()
        return trainer.evaluate()  # a plain call where a loop runs

    assert asyncio.run(notebook()).accuracy == {"greedy": 0.5}
    assert trainer.version == 3 and len(loops) == 1
    asyncio.run(trainer.rollouts.close())
    assert trainer.rollouts._loop.is_closed()


def test_the_step_fits_on_a_screen() -> None:
    assert len(inspect.getsource(Trainer.step).splitlines()) <= 45


def test_the_reference_model_moves_every_so_many_steps_between_update_and_sync(tmp_path: Path) -> None:
    trained = {"algorithm": {"use": "grpo", "kl": "k3", "kl_coef": 0.1}, "reference": {"update_every": 3, "mix": 0.5}}
    trainer = make_trainer(tmp_path, **trained)

    async def steps(count: int) -> list[dict[str, float]]:
        return [await trainer.step() for _ in range(count)]

    metrics = asyncio.run(steps(4))
    assert [found["reference/age"] for found in metrics] == [1.0, 2.0, 0.0, 1.0]
    assert trainer.learner.moves == [3]
    assert trainer.learner.fields[0] == ("logprobs", "ref_logprobs")


def test_the_reference_model_moves_after_a_step_without_anything_to_train_on(tmp_path: Path) -> None:
    class Dropping(Trainer):
        def filter(self, groups: Sequence[Any]) -> list[Any]:
            return [] if self.version == 1 else super().filter(groups)

    algorithm = {"use": "grpo", "kl": "k3", "kl_coef": 0.1}
    trainer = make_trainer(tmp_path, Dropping, algorithm=algorithm, reference={"update_every": 2})

    async def steps(count: int) -> None:
        for _ in range(count):
            await trainer.step()

    asyncio.run(steps(2))
    assert trainer.learner.moves == [1]
    assert trainer.rollouts.said[-4:] == ["take 1", "settle filtered filtered", "sleep", "publish weights 1"]


def test_a_reference_model_that_stays_is_not_reported(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    assert "reference/age" not in asyncio.run(trainer.step()) and not trainer.learner.moves


@pytest.mark.parametrize("prompts", ["2+2", ["2+2"], [5, 6], [[[5]]], [[0.5]], [["5"]]])
def test_a_prompt_that_is_no_list_of_token_ids_is_not_sampled(tmp_path: Path, prompts: Any) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(ValueFault, match=r"each a list of token ids, \[tokenizer.encode\(text\)\]; got "):
        trainer.sample(prompts)


def test_rollouts_without_engines_of_their_own_cannot_be_sampled_by_hand(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    trainer = Trainer(plan, rollouts=ScriptedRollouts(plan), learner=FakeLearner())
    with pytest.raises(RunError, match="ScriptedRollouts has no method `sample`"):
        trainer.sample([[1, 2]])
