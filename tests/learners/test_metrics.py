"""State of policy losses and corrections, and options that change during training."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from rlsdk.batch import LossInputs, Totals
from rlsdk.components import component_of
from rlsdk.contracts import LossSpec, Model, Roles, TrainBatch
from rlsdk.errors import LearnerError, OptionError
from rlsdk.learners.metrics import Memory, MetricAccumulator
from rlsdk.learners.objective import Objective, UpdateContext
from rlsdk.marks import correction, kl, policy_loss, reward
from rlsdk.plugins import ComponentRef, Plugins, load
from rlsdk.schedules import EntropyTarget, Schedule
from rlsdk.testing import check_component

Launch = Callable[..., Any]
Make = Callable[..., TrainBatch]
HERE = Plugins()
CLOCK = ("train_step", "train_steps", "step", "of_steps", "update")


@correction("counter")
class Counter:
    """Counts optimiser steps in its calls, without `advance`."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: LossInputs) -> tuple[torch.Tensor, dict[str, float]]:
        """Weights of one, and the count."""
        self.calls += 1
        return torch.ones_like(x.advantages), {"calls": float(self.calls)}

    def state(self) -> dict[str, int]:
        """The count."""
        return {"calls": self.calls}

    def restore(self, state: Mapping[str, int]) -> None:
        """Take it up."""
        self.calls = state["calls"]


@policy_loss("baseline")
@attrs.define(kw_only=True)
class Baseline:
    """Remembers a running mean of the advantages over optimiser steps; tells the time.

    Attributes:
        decay: Share of the old mean that stays.
    """

    decay: float = 0.5
    mean: float = attrs.field(init=False, default=0.0)

    def __call__(self, x: LossInputs) -> tuple[torch.Tensor, dict[str, Any]]:
        """The policy gradient against the running mean."""
        told = {name: float(getattr(x, name)) for name in CLOCK}
        found = {"seen": x.advantages, "baseline": self.mean, "decay": self.decay, **told}
        return -(x.advantages - self.mean) * x.logprobs, found

    def advance(self, metrics: Mapping[str, float]) -> None:
        """Take up the mean of an optimiser step."""
        self.mean = self.decay * self.mean + (1 - self.decay) * metrics["seen"]

    def state(self) -> dict[str, float]:
        """The mean."""
        return {"mean": self.mean}

    def restore(self, state: Mapping[str, float]) -> None:
        """Take it up."""
        self.mean = state["mean"]


@correction("of_the_micro_batch")
class OfTheMicroBatch(Baseline):
    """Remembers the contents of micro-batches in its calls."""

    advance = None  # type: ignore[assignment]

    def __call__(self, x: LossInputs) -> Any:
        """Weights of one."""
        self.mean = float(x.advantages.sum())
        return torch.ones_like(x.advantages)


@correction("longest")
class Longest:
    """Remembers the longest answer of the optimiser steps."""

    def __init__(self) -> None:
        self.length = 0.0

    def __call__(self, x: LossInputs) -> tuple[torch.Tensor, dict[str, Any]]:
        """Weights of one, the longest answer here, and that of earlier steps."""
        longest = float(torch.bincount(x.segments).max())
        return torch.ones_like(x.advantages), {"length_max": longest, "seen_max": self.length}

    def advance(self, metrics: Mapping[str, float]) -> None:
        """Take up the maximum of an optimiser step."""
        self.length = max(self.length, metrics["length_max"])

    def state(self) -> dict[str, float]:
        """The maximum."""
        return {"length": self.length}

    def restore(self, state: Mapping[str, float]) -> None:
        """Take it up."""
        self.length = state["length"]


def alone(value: Any) -> list[Any]:
    return [value]


class Meeting:
    """Exchanges values between threads that stand for ranks."""

    def __init__(self, count: int) -> None:
        self.held: list[Any] = [None] * count
        self.all_there = threading.Barrier(count)

    def __call__(self, rank: int, value: Any) -> list[Any]:
        """Result of each call."""
        self.held[rank] = value
        self.all_there.wait(10)
        return self.held


def inputs(*advantages: float, **changes: Any) -> LossInputs:
    plane = torch.zeros(1, len(advantages))
    return LossInputs.from_padded(plane, plane, torch.tensor([advantages]), torch.ones_like(plane), **changes)


def following() -> LossSpec:
    """A loss of zero, and a bonus that holds an entropy of one nat."""
    zero = HERE.reference("policy_loss", scaled, {"factor": 0.0})
    return LossSpec(policy_loss=zero, entropy_coef=EntropyTarget(target=1.0, delta=0.1, initial=0.2, max=0.3))


def halved(batch: TrainBatch, halves: tuple[np.ndarray, np.ndarray]) -> float:
    """Trained tokens of the first half, as a multiple of those of the second."""
    first, second = (int(batch.trained_tokens[half].sum()) for half in halves)
    return first / second


def run_part(
    objective: Objective, batch: TrainBatch, entropy: float, totals: Totals, accumulator: MetricAccumulator
) -> float:
    """Part of the loss of a micro-batch whose tokens all have this entropy."""
    now = torch.from_numpy(batch.tokens["old_logprobs"])
    context = UpdateContext(update=0, updates=1, totals=totals, seed=0)
    return float(objective(objective.inputs(batch, now, torch.full_like(now, entropy), context), totals, accumulator))


def remembering(obj: Any, **options: Any) -> Memory:
    component = component_of(obj)
    assert component is not None
    memory = Memory.of(load(component.kind, obj, **options))
    assert memory is not None
    return memory


class TestMemory:
    def test_a_step_is_counted_once_whatever_the_micro_batches(self) -> None:
        memory = remembering(Counter)
        for step in (1, 2):
            assert [memory.call(inputs(1.0))[1]["calls"] for _ in range(3)] == [step] * 3
            memory.advance(alone)
            assert memory.state() == {"calls": step}

    def test_advance_gets_the_means_over_micro_batches_and_ranks(self) -> None:
        ranks = [remembering(Baseline) for _ in range(3)]
        for mean in (2.5, 3.75):  # half of 5, then half of that and half of 5
            ranks[0].call(inputs(1.0, 2.0))
            ranks[0].call(inputs(6.0))
            ranks[1].call(inputs(11.0))  # the third has no micro-batch
            with ThreadPoolExecutor(3) as pool:
                meeting = Meeting(3)
                list(pool.map(lambda rank, meet=meeting: rank[1].advance(partial(meet, rank[0])), enumerate(ranks)))
            assert [memory.state() for memory in ranks] == [{"mean": mean}] * 3

    def test_a_skipped_step_leaves_the_memory_as_it_was(self) -> None:
        for memory in (remembering(Counter), remembering(Baseline)):
            before = memory.state()
            memory.call(inputs(3.0))
            memory.advance(alone, taken=False)
            assert memory.state() == before
            memory.call(inputs(5.0))
            memory.advance(alone)
            assert memory.state() in ({"calls": 1}, {"mean": 2.5})

    def test_a_state_that_hangs_on_the_micro_batch_is_refused(self) -> None:
        memory = remembering(OfTheMicroBatch)
        memory.call(inputs(1.0))
        memory.call(inputs(2.0))
        with pytest.raises(LearnerError, match=r"correction 'of_the_micro_batch': .*advance\(metrics\).*1\.0.*2\.0"):
            memory.advance(alone)

    def test_half_a_memory_is_refused(self) -> None:
        class Half:
            def advance(self, metrics: Mapping[str, float]) -> None: ...

            def state(self) -> dict[str, int]:
                return {}

        with pytest.raises(LearnerError, match=r"has no restore\(\)"):
            Memory.of(Half())
        assert Memory.of(load("policy_loss", "ppo")) is None

    def test_the_suite_takes_counters_and_advance_and_nothing_that_hangs_on_micro_batches(self) -> None:
        failed = {
            obj: [f.rule for f in check_component(obj) if f.fault is not None]
            for obj in (Counter, Baseline, OfTheMicroBatch)
        }
        assert failed == {Counter: [], Baseline: [], OfTheMicroBatch: ["memory-by-step"]}


@policy_loss("scaled")
def scaled(x: LossInputs, *, factor: float = 1.0) -> torch.Tensor:
    """The logprobs by a factor.

    Args:
        x: The batch.
        factor: The factor.
    """
    return factor * x.logprobs


@kl("distance")
def distance(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    """A multiple of the squared distance.

    Args:
        logprobs: Of the policy.
        ref_logprobs: Of the reference.
        scale: The multiple.
    """
    return scale * (logprobs - ref_logprobs) ** 2


class TestSchedules:
    @pytest.mark.parametrize(
        ("shape", "values"),
        [("linear", [0.9, 0.65, 0.4, 0.15, -0.1, -0.1]), ("cosine", [0.9, 0.753553, 0.4, 0.046447, -0.1, -0.1])],
    )
    def test_values(self, shape: Any, values: list[float]) -> None:
        schedule = Schedule(0.9, -0.1, 4, shape)
        assert [schedule.at(step) for step in range(6)] == pytest.approx(values, abs=1e-6)
        assert schedule.at(4) == schedule.at(10_000) == -0.1

    def test_an_option_follows_the_training_step(self) -> None:
        loss = load("policy_loss", "ppo", clip_high={"from": 0.4, "to": 0.2, "over": 4})
        x = inputs(1.0, 1.0).replace(logprobs=torch.full((2,), 0.6))
        # exp(0.6) = 1.82 is clipped at 1 + 0.4, 1 + 0.35, 1 + 0.2
        found = [float(loss(x.replace(train_step=step))[0][0]) for step in (0, 1, 4, 9, 0)]
        assert found == pytest.approx([-1.4, -1.35, -1.2, -1.2, -1.4])

    def test_coefficients_and_an_estimator_follow_it(self, make_batch: Make) -> None:
        batch = make_batch(3)
        spec = LossSpec(
            policy_loss=HERE.reference("policy_loss", scaled, {"factor": {"from": 0.0, "to": 1.0, "over": 2}}),
            kl=HERE.reference("kl", distance, {"scale": {"from": 1.0, "to": 3.0, "over": 2}}),
            kl_coef=Schedule(0.0, 0.5, 2),
            entropy_coef=Schedule(0.0, 4.0, 4),
        )
        objective = Objective(spec)
        assert objective.entropy == "gradient"
        now = torch.from_numpy(batch.tokens["ref_logprobs"] + 2.0)
        mask = torch.from_numpy(batch.loss_mask)
        mean = float(now[mask].double().mean())
        segments = torch.from_numpy(np.repeat(np.arange(len(batch)), batch.responses))
        totals = Totals.of(mask, segments)
        found = []
        for step in (0, 1, 2):
            moment = UpdateContext(update=0, updates=1, totals=totals, seed=0, train_step=step)
            x = objective.inputs(batch, now, torch.full_like(now, 1.5), moment)
            found.append(float(objective(x, totals, MetricAccumulator())))
        # the KL is 4, twice and three times that: factor · mean + kl_coef · KL - entropy_coef · 1.5
        expected = [0.0, 0.5 * mean + 0.25 * 8 - 1.5, mean + 0.5 * 12 - 3.0]
        assert found == pytest.approx(expected, rel=1e-4)

    def test_the_entropy_bonus_follows_a_target(self, make_batch: Make) -> None:
        batch, halves = make_batch(4), (np.arange(2), np.arange(2, 4))
        objective = Objective(following())
        assert objective.entropy == "gradient"
        applied, taken = [], [1.5, 0.5, 0.5, 2.0, 0.4, 0.4]
        for entropy in taken:
            accumulator, loss = MetricAccumulator(), 0.0
            for half, shift in zip(halves, (-0.45, 0.45 * halved(batch, halves)), strict=True):
                loss += run_part(objective, batch.select(half), entropy + shift, batch.totals, accumulator)
            found = accumulator.means()
            assert found["actor/entropy"] == pytest.approx(entropy, abs=1e-6)
            applied.append(found["actor/entropy_coef"])
            assert loss == pytest.approx(-applied[-1] * entropy, abs=1e-6)
            if len(applied) == 3:  # a skipped step is as if it had not been
                objective.advance(alone, taken=False)
                run_part(objective, batch, entropy, batch.totals, MetricAccumulator())
            objective.advance(alone)
            if len(applied) == 2:  # resumed
                state = objective.state()
                objective = Objective(following())
                objective.restore(state)
        # Above the target: 0.2 - 0.1. Then up, by 0.1 each, and applied one step later; at most 0.3, and off above.
        assert applied == pytest.approx([0.0, 0.0, 0.2, 0.3, 0.0, 0.3])

    def test_each_of_several_corrections_keeps_its_own_memory(self, make_batch: Make) -> None:
        batch, halves = make_batch(4), (np.arange(2), np.arange(2, 4))
        parts = [HERE.reference("correction", each) for each in (Counter, "tis", Longest)]
        loss = HERE.reference("policy_loss", scaled, {"factor": 1.0})
        spec = LossSpec(policy_loss=loss, correction=ComponentRef.combined(parts))
        counter, longest = "correction/test_metrics/counter", "correction/test_metrics/longest"

        def step(objective: Objective) -> dict[str, float]:
            accumulator = MetricAccumulator()
            for half in halves:
                run_part(objective, batch.select(half), 1.0, batch.totals, accumulator)
            objective.advance(alone)
            return accumulator.means()

        objective = Objective(spec)
        assert step(objective)[f"actor/{longest}/seen_max"] == 0
        saved = objective.state()
        assert {key: each["state"] for key, each in saved.items()} == {
            counter: {"calls": 1},
            longest: {"length": float(batch.responses.max())},
        }
        after, state = step(objective), objective.state()
        assert after[f"actor/{counter}/calls"] == 2
        assert after[f"actor/{longest}/seen_max"] == batch.responses.max()
        resumed = Objective(spec)
        resumed.restore(saved)
        assert (step(resumed), resumed.state()) == (after, state)

    def test_a_class_takes_new_values_and_keeps_its_memory(self) -> None:
        memory = remembering(Baseline, decay={"from": 0.5, "to": 0.0, "over": 1})
        memory.call(inputs(4.0))
        memory.advance(alone)
        assert memory.state() == {"mean": 2.0}
        _, metrics = memory.call(inputs(6.0, train_step=1))
        assert (metrics["decay"], metrics["baseline"]) == (0.0, 2.0)
        memory.advance(alone)
        assert memory.state() == {"mean": 6.0}

    def test_the_penalty_in_the_reward_follows_it_and_an_adaptive_one_refuses(self) -> None:
        schedule = {"from": 0.4, "to": 0.0, "over": 4}
        penalty = load("shaping", "kl_penalty", coef=schedule)
        assert [penalty.at(step).value for step in (0, 1, 3, 4)] == pytest.approx([0.4, 0.3, 0.1, 0.0])
        with pytest.raises(OptionError, match="coef: only sets the component's initial state"):
            load("shaping", "kl_penalty", coef={**schedule, "to": 0.1}, target=0.1)

    @pytest.mark.parametrize(
        ("given", "path", "text"),
        [
            ({"from": 1, "over": 3}, "clip_high.to", r"is required \(float >= 0\)"),
            ({"from": 1, "to": 2, "over": 0}, "clip_high.over", "expected int >= 1, got 0"),
            ({"from": 1, "to": 2, "over": 2.5}, "clip_high.over", r"expected int, got 2\.5"),
            ({"from": 1, "to": -0.5, "over": 3}, "clip_high.to", r"expected float >= 0, got -0\.5"),
            ({"from": 1, "to": math.inf, "over": 3}, "clip_high.to", "expected a finite number, got inf"),
            ({"from": 1, "to": 2, "ovr": 2, "over": 3}, "clip_high.ovr", "did you mean 'over'"),
            ({"from": 1, "to": math.nan, "over": 3}, "clip_high.to", "expected a finite number, got nan"),
            ({"from": 1, "to": 2, "over": 3, "shape": "linaer"}, "clip_high.shape", "did you mean 'linear'"),
        ],
    )
    def test_faults_name_their_place(self, given: dict[str, Any], path: str, text: str) -> None:
        with pytest.raises(OptionError, match=text) as caught:
            load("policy_loss", "ppo", clip_high=given, clip_low="x")
        assert [where for where, _ in caught.value.faults] == ["clip_low", path] or path in str(caught.value)
        assert "clip_low" in str(caught.value)

    @pytest.mark.parametrize(("obj", "option"), [(scaled, "factor"), (distance, "scale"), (Baseline, "decay")])
    def test_the_suite_tries_components_with_schedules(self, obj: Any, option: str) -> None:
        found = check_component(obj, {option: {"from": 0.5, "to": 1.0, "over": 4}})
        assert [f.rule for f in found if f.fault is not None] == []

    def test_only_floats_of_what_learns_may_be_scheduled(self) -> None:
        schedule = {"from": 1, "to": 2, "over": 3}

        @reward("scored")
        def scored(rollout: Any, *, weight: float = 1.0) -> float:
            """A weight."""
            return weight

        with pytest.raises(OptionError, match="weight: expected float"):
            load("reward", scored, weight=schedule)
        with pytest.raises(OptionError, match="max_length: expected int"):
            load("shaping", "overlong", max_length=schedule)


@pytest.mark.stack
def test_memory_is_one_on_all_ranks_and_survives_a_checkpoint(
    tied: Model, launch: Launch, make_batch: Make, tmp_path: Path
) -> None:
    import ray

    batch = make_batch(12)
    halves = np.array_split(np.arange(12), 2)
    schedule = {"from": 0.5, "to": 0.25, "over": 2}
    loss = HERE.reference("policy_loss", Baseline, {"decay": schedule})
    spec = LossSpec(policy_loss=loss, correction=HERE.reference("correction", Counter), train_steps=3)

    HERE.resolve(spec.policy_loss)  # as the check of a configuration does: annotations are read where their module is

    def run(group: Any, step: int, trained_on: TrainBatch = batch) -> tuple[dict[str, float], list[Any]]:
        metrics = group.update(trained_on, halves, step)
        states = [a.__ray_call__.remote(lambda self: self._learner._updates.objective.state()) for a in group.actors]
        return metrics, ray.get(states)

    group = launch(2, Roles(actor=tied), spec, micro_batch_tokens=60, lr=1e-3)
    baseline = 0.0
    for step, decay in ((0, 0.5), (1, 0.375)):
        metrics, states = run(group, step)
        used = []
        for half in halves:
            used.append(baseline)
            part = batch.select(half)
            seen = float(part.tokens["advantages"][part.loss_mask].mean())
            baseline = decay * baseline + (1 - decay) * seen
        trained = [int(batch.select(half).loss_mask.sum()) for half in halves]
        assert metrics["actor/baseline"] == pytest.approx(np.average(used, weights=trained), abs=1e-6)
        assert states[0] == states[1]
        assert states[0]["correction"]["state"] == {"calls": 2 * step + 2}
        assert states[0]["policy_loss"]["state"]["mean"] == pytest.approx(baseline, rel=1e-5)
    told = {name: metrics[f"actor/{name}"] for name in ("train_step", "train_steps", "of_steps", "decay")}
    assert told == {"train_step": 1, "train_steps": 3, "of_steps": 2, "decay": 0.375}
    assert 2 < metrics["actor/update"] < 3
    group.save(tmp_path / "checkpoint")
    alone, _ = run(group, 2)
    group = launch(2, Roles(actor=tied), spec, micro_batch_tokens=60, lr=1e-3)
    group.load(tmp_path / "checkpoint")
    resumed, states = run(group, 2)
    assert resumed == alone
    assert resumed["actor/decay"] == 0.25
    assert 4 < resumed["actor/update"] < 5
    assert 5 < resumed["actor/calls"] < 6
    assert states[0] == states[1]
    assert states[0]["correction"] == {"name": "test_metrics/counter", "state": {"calls": 6}}
    endless = batch.with_tokens(advantages=np.full_like(batch.tokens["advantages"], np.inf))
    metrics, after = run(group, 3, endless)
    assert metrics["actor/skipped_updates"] == 2
    assert after == states


@pytest.mark.stack
def test_all_ranks_follow_a_target_of_the_entropy_which_survives_a_checkpoint(
    tied: Model, launch: Launch, make_batch: Make, tmp_path: Path
) -> None:
    batch, everything = make_batch(12), [np.arange(12)]
    loss = HERE.reference("policy_loss", Baseline, {"decay": 0.5})
    target = EntropyTarget(target=3.0, delta=0.25, initial=0.5, min=0.25, max=0.75)
    spec = LossSpec(policy_loss=loss, entropy_coef=target)

    def begun(world: int) -> Any:
        return launch(world, Roles(actor=tied), spec, micro_batch_tokens=60, lr=3e-2)

    group, coef, low = begun(2), 0.5, False
    lines = []
    for step in range(8):
        if step == 3:
            group.save(tmp_path / "checkpoint")
        lines.append(group.update(batch, everything, step))
        assert lines[-1]["actor/entropy_coef"] == (coef if low else 0.0)
        low = lines[-1]["actor/entropy"] <= 3.0
        coef = min(max(coef + (0.25 if low else -0.25), 0.25), 0.75)
    assert len({line["actor/entropy_coef"] for line in lines}) > 1
    group = begun(2)
    group.load(tmp_path / "checkpoint")
    assert [group.update(batch, everything, step) for step in range(3, 8)] == lines[3:]
    group = begun(1)
    alone = [group.update(batch, everything, step) for step in range(3)]
    for name in ("actor/entropy", "actor/entropy_coef", "actor/grad_norm"):
        assert [line[name] for line in alone] == pytest.approx([line[name] for line in lines[:3]], rel=1e-4)


@policy_loss("reads_entropy", needs=("entropy",))
def reads_entropy(x: LossInputs) -> torch.Tensor:
    """The policy gradient of certain tokens; the entropy only selects them."""
    return -x.advantages * x.logprobs * (x.entropy.detach() < 3.0)


@pytest.mark.stack
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("loss", "coef"),
    [(scaled, EntropyTarget(target=0.1)), (scaled, Schedule(0.5, 0.0, 1)), (reads_entropy, 0.0)],
)
def test_ranks_with_more_micro_batches_than_others_do_not_wait_for_ever_if_the_loss_leaves_out_the_entropy(
    loss: Any, coef: Any, tied: Model, launch: Launch, make_grouped_batch: Make
) -> None:
    """With ZeRO-3, every rank must run the same backward passes, also for an empty micro-batch."""
    spec = LossSpec(policy_loss=HERE.reference("policy_loss", loss), entropy_coef=coef)
    group = launch(2, Roles(actor=tied), spec, zero_stage=3, micro_batch_tokens=40)
    batch = make_grouped_batch(11)
    assert group.update(batch, np.array_split(np.arange(11), 2), 1)["actor/grad_norm"] > 0
