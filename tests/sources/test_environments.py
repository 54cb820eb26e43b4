"""Groups of environments: partition, seeds, order, and faults of their configuration."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

import rlsdk
from rlsdk.config.schema import EvalSection
from rlsdk.contracts import RewardSpec, Sampling
from rlsdk.errors import OptionError
from rlsdk.evaluation.evaluation import evaluate, evaluation_of, produced_by
from rlsdk.rollout.chat import RolloutContext
from rlsdk.rollout.generator import RolloutGenerator
from rlsdk.rollout.stream import TaskStream
from rlsdk.scoring.scorer import RewardTerm, Scorer
from rlsdk.sources.environments import spread
from rlsdk.testing import ScriptedPolicy, check_component, run_workflow
from rlsdk.trainer.metrics import source_metrics
from rlsdk.types import Message, Observation, Step
from tests.rollout.codecs import plain


@rlsdk.environment("one")
class One:
    """Gives its reward at once."""

    def __init__(self, *, reward: float = 1.0) -> None:
        self.reward = reward

    def reset(self, seed: int) -> Observation:
        return Observation("go:")

    def step(self, text: str) -> Step:
        return Step(Observation(""), self.reward, True, metrics={"success": self.reward})


TWO = {"easy": {"use": One}, "hard": {"use": One, "reward": 0.0}}


def tasks(**options: Any) -> Any:
    return rlsdk.load("tasks", "environments", **{"environments": TWO, "groups": 4, **options})


def test_a_round_holds_the_partition_and_seeds_go_on() -> None:
    found = tasks(partition=[3, 1], rounds=2, prompt="Play.", system="You are a player.")
    assert len(found) == 8
    assert [t.source for t in found] == ["easy", "easy", "hard", "easy"] * 2
    seeds = [found[i].metadata["seed"] for i in range(8)]
    assert seeds == list(range(seeds[0], seeds[0] + 8))
    assert found[2].metadata["environment"] == {"use": One, "reward": 0.0}
    assert found[0].prompt == (Message("system", "You are a player."), Message("user", "Play."))
    assert tasks(form="text", prompt="Play.")[0].prompt == "Play."


def test_a_large_round_costs_one_byte_for_each_task() -> None:
    counts = [5_000, 3_000, 2_000]
    places = [((k + 0.5) / count, i) for i, count in enumerate(counts) for k in range(count)]
    found = spread(counts)
    assert found.tolist() == [i for _, i in sorted(places)] and found.nbytes == 10_000


def test_equal_shares_with_the_rest_to_the_first() -> None:
    three = {**TWO, "third": {"use": One}}
    counts = Counter(t.source for t in tasks(environments=three, groups=8, rounds=1))
    assert counts == {"easy": 3, "hard": 3, "third": 2}
    only = tasks(environments=three, groups=4, tags=["third", "easy"], rounds=1)
    assert Counter(t.source for t in only) == {"third": 2, "easy": 2}


def test_tests_have_other_seeds_and_the_same_each_time() -> None:
    train, first, again = tasks(rounds=50), tasks(split="test", groups=64), tasks(split="test", groups=64)
    assert not {t.metadata["seed"] for t in train} & {t.metadata["seed"] for t in first}
    assert [t.metadata["seed"] for t in first] == [t.metadata["seed"] for t in again]
    assert {t.metadata["seed"] for t in first} != {t.metadata["seed"] for t in tasks(split="test", groups=64, seed=1)}
    assert len(first) == 64
    assert min(t.metadata["seed"] for t in first) >= 2**30


def test_a_training_takes_them_in_order_so_that_each_step_holds_the_partition() -> None:
    found = tasks(groups=6, partition=[4, 2], rounds=3)
    stream = TaskStream(found, 0, lambda _: 1, 9, "drop")
    for _ in range(4):  # one step more than there are rounds
        assert Counter(t.source for t, _ in (stream.draw() for _ in range(6))) == {"easy": 4, "hard": 2}


def test_faults_are_reported_together_with_their_paths() -> None:
    wrong = {"a": {"use": One, "rewart": 1}, "b": {"use": "nosuch/world"}, "c": {"use": One, "reward": "x"}}
    with pytest.raises(OptionError) as caught:
        tasks(environments=wrong, groups=2, tags=["a", "d"], partition=[1, 2])
    faults = dict(caught.value.faults)
    assert faults["tags"] == "d is not among environments: a, b, c"
    assert "add up to groups=2; got [1, 2], together 3" in faults["partition"]
    assert "did you mean 'reward'" in faults["environments.a.rewart"]
    assert "unknown plugin 'nosuch'" in faults["environments.b"]
    assert "expected float, got 'x'" in faults["environments.c.reward"]
    for options, words in (
        ({"groups": 1}, "at least one for each of 2 tags; got 1"),
        ({"rounds": 0}, "rounds: at least 1; got 0"),
        ({"tags": ["easy", "easy"]}, "each once"),
        ({"environments": {}}, "expected at least one"),
        ({"form": "text", "system": "x"}, "form text has no system message"),
    ):
        with pytest.raises(OptionError, match=words):
            tasks(**options)


def test_the_source_conforms() -> None:
    report = check_component(rlsdk.load("tasks", "environments", environments=TWO, groups=4).__class__, {
        "environments": TWO, "groups": 4,
    })  # fmt: skip
    assert [f.rule for f in report if f.fault is not None] == []


def test_metrics_come_for_each_tag_where_there_are_several() -> None:
    scorer = Scorer([RewardTerm(RewardSpec("environment"), rlsdk.load("reward", "environment"))])
    workflow = rlsdk.load("workflow", "environment")
    groups = run_workflow(
        workflow, list(tasks(rounds=1, form="text")), plain(), lambda _: "1", scorer=scorer, group_size=2
    )
    found = source_metrics(groups, scored=True)
    assert found["source/easy/reward/mean"] == 1.0 and found["source/hard/reward/mean"] == 0.0
    assert found["source/easy/workflow/success"] == 1.0 and found["source/hard/accuracy/mean"] == 0.0
    alone = [g for g in groups if g.task.source == "easy"]
    assert source_metrics(alone, scored=True) == {}


def test_an_evaluation_reports_each_tag() -> None:
    async def nothing() -> None:
        return None

    async def go() -> Any:
        scorer = Scorer([RewardTerm(RewardSpec("environment"), rlsdk.load("reward", "environment"))])
        policy: Any = ScriptedPolicy(plain(), lambda _: "1")
        setting = RolloutContext(codec=plain(), client=policy, sampling=Sampling(), max_length=64)
        generator = RolloutGenerator(rlsdk.load("workflow", "environment"), scorer, 0)
        held_out = list(tasks(split="test", partition=[3, 1], form="text"))
        return await evaluate(
            produced_by(generator, setting), held_out, setting.sampling, EvalSection(samples=2), reseed=nothing
        )

    found = evaluation_of(asyncio.run(go()), 2)
    assert found.accuracy == {"greedy": 0.75, "sampled": 0.75, "pass@2": 0.75}
    assert found.metrics["eval/easy/greedy"] == 1.0 and found.metrics["eval/hard/pass@2"] == 0.0
    assert found.metrics["eval/easy/sampled_reward"] == 1.0 and found.metrics["eval/greedy_reward"] == 0.75
