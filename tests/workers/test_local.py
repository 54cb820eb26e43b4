"""Groups made in this process."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import rlsdk
from rlsdk.errors import ConfigError, RunError
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.workers.local import expert_of, local_maker
from tests.trainer.fakes import make_plan


@rlsdk.reward("novel")
class Novel:
    """1 for an answer that was never given before."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, rollout: rlsdk.Rollout) -> float:
        new = rollout.text not in self.seen
        self.seen += [rollout.text] * new
        return float(new)

    def state(self) -> list[str]:
        return self.seen

    def restore(self, state: list[str]) -> None:
        self.seen = list(state)


def test_a_reward_that_keeps_state_continues_from_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = make_plan(tmp_path, reward=[Novel, {"use": Novel, "weight": 0.5}])
    with local_maker(plan, ChatTokenizer.of(plan), (), None) as maker:
        assert maker.state() == {"test_local/novel": [], "test_local/novel_2": []}
        caplog.set_level(logging.WARNING, "rlsdk")
        maker.restore({"test_local/novel": ["1+2"]})
        kept = maker.state()
        assert kept == {"test_local/novel": ["1+2"], "test_local/novel_2": []}
        assert "the checkpoint holds no state of the reward test_local/novel_2" in caplog.text
        kept["test_local/novel"].append("3")
        assert maker.state()["test_local/novel"] == ["1+2"]  # what a checkpoint holds is a copy


def test_a_reward_is_named_whose_state_json_cannot_hold_or_that_cannot_use_it(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, reward=Novel)
    with local_maker(plan, ChatTokenizer.of(plan), (), None) as maker:
        maker.restore({"test_local/novel": ["1+2", {3}]})
        with pytest.raises(RunError, match=r"reward '.*novel' failed: TypeError: 'int' object is not iterable"):
            maker.restore({"test_local/novel": 3})
        with pytest.raises(RunError, match=r"state\(\) of reward '.*novel' cannot be saved: \[1\]: Object of type set"):
            maker.state()


def test_a_reward_that_keeps_state_is_refused_with_rollout_workers(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout.workers: the reward 'test_local/novel' keeps state.* set rollout.workers=0"
    ):
        make_plan(tmp_path, reward=Novel, rollout={"workers": 2})


def test_demonstrations_mixed_with_rollouts_offer_the_tools_of_the_workflow(tmp_path: Path) -> None:
    tools = [f"{Path(__file__).parents[2] / 'examples' / 'calculator.py'}:calculate"]
    workflow = {"use": "tools", "tools": tools, "parser": "hermes", "describe": False, "max_turns": 3}
    mixed = {"algorithm": {"use": "mix"}, "workflow": workflow}
    offers = expert_of(make_plan(tmp_path, **mixed))
    assert (list(offers.tools), offers.parser, offers.describe) == (tools, "hermes", False)
