"""Groups that are too small to learn from, and rewards that change nothing, are faults of the configuration."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

import rlsdk
from rlsdk.config import check
from rlsdk.config.groups import group_faults, pair_faults
from rlsdk.errors import ConfigError
from rlsdk.trainer import Trainer
from tests.trainer.fakes import FakeLearner, ScriptedRollouts, make_plan

QUICKSTART = "examples/quickstart.yaml"


def faults(*settings: str) -> Sequence[str]:
    try:
        check(QUICKSTART, ["group_size=1", *settings])
    except ConfigError as error:
        return error.faults
    return ()


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "gpg", "opo", "reinforce_plus_plus_baseline", "gigpo"])
def test_an_advantage_that_compares_rollouts_with_one_for_each_task_is_refused(algorithm: str) -> None:
    (fault,) = faults(f"algorithm={{use: {algorithm}, filters: []}}")
    assert fault.startswith("group_size: 1 given, but the advantage '")
    assert "set group_size to 2 or more" in fault


@pytest.mark.parametrize("algorithm", ["reinforce_plus_plus", "remax", "ppo", "mix", "sft"])
def test_what_learns_from_single_rollouts_is_accepted(algorithm: str) -> None:
    assert faults(f"algorithm={algorithm}") == ()


def test_a_critic_needs_an_advantage_that_gives_returns() -> None:
    (fault,) = faults("group_size=4", "algorithm={use: grpo, critic: true}")
    assert fault.startswith("algorithm.critic: a critic learns the returns that an advantage gives, and 'grpo' gives")
    assert faults("group_size=4", "algorithm={use: grpo, critic: true, advantage: reinforce_plus_plus}") == ()


@pytest.mark.parametrize("name", ["nonzero_variance", "min_std", "pass_rate", "best_worst"])
def test_a_filter_that_drops_every_group_of_one_is_refused(name: str) -> None:
    (fault,) = faults(f"algorithm={{use: reinforce_plus_plus, filters: [{name}]}}")
    assert f"the filter {name!r} drops every group of fewer than 2 rollouts" in fault


@pytest.mark.parametrize(
    ("size", "filters", "left"),
    [(2, "[]", "two equal rewards"), (4, "[nonzero_variance]", "4 rollouts"), (3, "[]", "3 rollouts")],
)
def test_a_loss_for_pairs_needs_filters_that_leave_pairs(size: int, filters: str, left: str) -> None:
    (fault,) = faults(f"group_size={size}", f"algorithm={{use: dpo, filters: {filters}}}")
    assert fault == (
        "algorithm.filters: the policy loss 'dpo' learns from pairs of a better and a worse rollout, but with "
        f"group_size={size} these filters leave groups of {left}; add the filter 'best_worst'"
    )


@pytest.mark.parametrize("algorithm", ["{use: grpo, policy_loss: sft, filters: []}", "{use: ppo, policy_loss: sft}"])
def test_rewards_must_change_something(algorithm: str) -> None:
    (fault,) = faults("group_size=4", f"algorithm={algorithm}")
    assert fault.startswith("algorithm.policy_loss: 'sft' learns from all rollouts alike, whatever their advantages")


@pytest.mark.parametrize(("size", "k"), [(1, 1), (4, 4), (4, 9)])
def test_a_filter_that_leaves_out_no_rollout_of_groups_of_this_size_is_refused_if_nothing_else_reads_rewards(
    size: int, k: int
) -> None:
    (fault,) = faults(f"group_size={size}", f"algorithm={{use: raft, filters: [{{use: top_k, k: {k}}}]}}")
    assert fault.startswith(f"group_size: {size} given, but algorithm.filters leave out only rollouts of larger groups")
    assert "the advantage 'constant' reads no rewards: rewards would change nothing" in fault


@pytest.mark.parametrize(
    "algorithm",
    [
        "raft",
        "{use: raft, filters: []}",
        "{use: raft, filters: [nonzero_variance]}",
        "{use: grpo, policy_loss: sft, filters: [nonzero_variance]}",
        "{use: grpo, policy_loss: gspo, aggregate: seq-mean-token-mean, filters: []}",
        "kto",
        "{use: grpo, filters: [{use: top_k, k: 4}]}",
    ],
)
def test_rewards_that_select_or_weigh_rollouts_are_accepted(algorithm: str) -> None:
    assert faults("group_size=4", f"algorithm={algorithm}") == ()


@pytest.mark.parametrize(("size", "filters"), [(2, "[nonzero_variance]"), (2, "[best_worst]"), (4, "[best_worst]")])
def test_filters_that_leave_pairs_are_accepted(size: int, filters: str) -> None:
    assert faults(f"group_size={size}", f"algorithm={{use: dpo, filters: {filters}}}") == ()


def test_a_filter_may_drop_a_group_by_returning_none_of_it() -> None:
    @rlsdk.policy_loss("paired", needs=("pairs",))
    def paired(x: rlsdk.LossInputs) -> torch.Tensor:
        return -x.logprobs

    assert pair_faults(4, paired, [lambda group: attrs.evolve(group, rollouts=[], scores=[])]) == []
    assert pair_faults(4, paired, [])


@rlsdk.policy_loss("contrast", needs=("groups",), aggregates=("seq-mean-token-mean",))
def contrast(x: rlsdk.LossInputs) -> torch.Tensor:
    return -x.advantages * x.logprobs


@rlsdk.advantage("grouped", needs=("groups",))
def grouped(x: rlsdk.CreditInputs) -> torch.Tensor:
    return x.rewards


@pytest.mark.parametrize(
    ("algorithm", "whole"),
    [
        ({"use": "grpo", "policy_loss": contrast, "aggregate": "seq-mean-token-mean"}, True),
        ({"use": "dpo"}, True),
        ({"use": "grpo", "advantage": grouped}, False),
    ],
)
def test_only_a_loss_that_reads_groups_needs_whole_ones(algorithm: Any, whole: bool, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, algorithm=algorithm, minibatches=2)
    assert plan.whole_groups == whole
    trainer = Trainer(plan, rollouts=ScriptedRollouts(plan), learner=FakeLearner())
    asyncio.run(trainer.step())
    (batch, parts, _), *_ = trainer.learner.updates
    assert batch.rollouts.get("groups", np.zeros(0)).tolist() == ([0, 0, 1, 1] if algorithm.get("policy_loss") else [])
    if not whole:
        assert make_plan(tmp_path, algorithm=algorithm, minibatches=3)
        return
    assert sorted(sorted(part) for part in parts) == [[0, 1], [2, 3]]
    with pytest.raises(ConfigError, match=r"minibatches: 3 of 2 groups leaves some empty.*give at most 2"):
        make_plan(tmp_path, algorithm=algorithm, minibatches=3)


def test_a_huge_group_size_is_checked_with_a_smaller_group() -> None:
    @rlsdk.policy_loss("paired", needs=("pairs",))
    def paired(x: rlsdk.LossInputs) -> torch.Tensor:
        return -x.logprobs

    sizes = []

    def record(group: rlsdk.Group) -> bool:
        sizes.append(len(group))
        return True

    assert "leave groups of" in pair_faults(10**9, paired, [record])[0]
    assert group_faults(10**9, None, [record]) == []
    assert 8 < max(sizes) < 10_000


def test_options_count_a_pass_rate_without_bounds_keeps_groups_of_one() -> None:
    assert faults("algorithm={use: reinforce_plus_plus, filters: [{use: pass_rate, low: -1, high: 2}]}") == ()


@rlsdk.advantage("median")
def median(x: rlsdk.CreditInputs) -> torch.Tensor:
    return x.rewards - torch.stack([x.rewards[x.groups == group].median() for group in x.groups])


@rlsdk.advantage("crooked")
def crooked(x: rlsdk.CreditInputs) -> torch.Tensor:
    raise RuntimeError("not of this kind")


@rlsdk.advantage("leaving")
def leaving(x: rlsdk.CreditInputs) -> torch.Tensor:
    sys.exit(0)


@rlsdk.filter("many")
def many(group: rlsdk.Group) -> Any:
    return torch.tensor([True, False])


@rlsdk.advantage("asking")
async def asking(x: rlsdk.CreditInputs) -> torch.Tensor:
    return x.rewards * 0


@rlsdk.filter("three")
def three(group: rlsdk.Group) -> bool:
    return len(group) >= 3


def test_a_plugins_own_advantage_and_filter_are_tried_without_declaring_anything() -> None:
    assert "'median' compares" in group_faults(1, rlsdk.load("advantage", median), [])[0]
    assert group_faults(2, rlsdk.load("advantage", median), []) == []
    assert "fewer than 3 rollouts" in group_faults(2, None, [rlsdk.load("filter", three)])[0]


@pytest.mark.parametrize("part", [crooked, leaving, asking])
def test_what_cannot_be_tried_is_left_to_the_run(part: Any) -> None:
    assert group_faults(1, rlsdk.load("advantage", part), []) == []
    assert group_faults(1, None, [rlsdk.load("filter", many)]) == []
