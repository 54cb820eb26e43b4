"""The reward is tried on made-up answers before anything starts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlsdk.config import Plan, check
from rlsdk.errors import ConfigError
from rlsdk.opening.rehearsal import Rehearsal, rehearse
from rlsdk.trainer.assembly import train_tasks
from rlsdk.trainer.run import run

LAB = """
import os
import rlsdk
from rlsdk.errors import DataError
from rlsdk.kit import TextRenderer

@rlsdk.reward("raises")
def raises(rollout):
    return rollout.task.answer["gold"]

@rlsdk.reward("here", runs="driver")
def here(rollout):
    raise RuntimeError("no referee")

@rlsdk.reward("nothing")
def nothing(rollout):
    return None

@rlsdk.reward("words")
def words(rollout):
    return "good"

@rlsdk.reward("undefined")
def undefined(rollout):
    return float("nan")

@rlsdk.reward("ends")
def ends(rollout):
    os._exit(1)

@rlsdk.reward("refuses")
def refuses(rollout):
    return rlsdk.Score.invalid("this is no poem")

@rlsdk.reward("wrong")
def wrong(rollout):
    return 0.0

@rlsdk.reward("strict")
def strict(rollout):
    return float(rollout.text)

@rlsdk.reward("tokens")
def tokens(rollout):
    assert rollout.loss_mask.any() and rollout.messages[-1].role == "assistant"
    return float(len(rollout.token_ids))

@rlsdk.reward("together", batch=True)
def together(rollouts):
    return [0.5 for _ in rollouts]

@rlsdk.reward("compares", batch="group")
def compares(rollouts):
    assert len(rollouts) == 5
    return [rank / len(rollouts) for rank in range(len(rollouts))]

@rlsdk.reward("shaky", batch="group")
class Shaky:
    def __init__(self):
        self.called = False
    def __call__(self, rollouts):
        self.called, before = True, self.called
        assert before, "too busy"
        return [0.0 for _ in rollouts]

@rlsdk.reward("asks")
async def asks(rollout):
    raise OSError("nobody answers")

@rlsdk.reward("large", runs="actor")
def large(rollout):
    raise OSError("no memory")

@rlsdk.reward("gate")
def gate(rollout):
    return 0.0

@rlsdk.reward("lacking")
def lacking(rollout):
    raise DataError(f"task {rollout.task.id!r} has no answer")

@rlsdk.reward("counting")
class Counting:
    def __init__(self):
        self.calls = 0
    def __call__(self, rollout):
        self.calls += 1
        return 0.0
    def state(self):
        return {"calls": self.calls}
    def restore(self, state):
        self.calls = state["calls"]


@rlsdk.renderer("divides")
class Divides(TextRenderer):
    'Fails.'

    def render_text(self, messages, tools, *, add_generation_prompt, continue_final_message):
        return 1 / 0


@rlsdk.renderer("forgets")
class Forgets(TextRenderer):
    'Returns nothing.'

    def render_text(self, messages, tools, *, add_generation_prompt, continue_final_message):
        "".join(message["content"] for message in messages)
"""


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    path = tmp_path / "trial_lab.py"
    path.write_text(LAB)
    return path


def plan_of(lab: Path, reward: str, *settings: str) -> Plan:
    return check("examples/quickstart.yaml", [f"reward={reward}", f"out={lab.parent / 'runs'}", *settings], [lab])


def rehearsed(plan: Plan) -> Rehearsal:
    return asyncio.run(rehearse(plan, train_tasks(plan)))


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("raises", "KeyError: 'gold'"),
        ("here", "RuntimeError: no referee"),
        ("nothing", "None"),
        ("words", "good"),
        ("undefined", "nan"),
        ("ends", "its process ended: exit status 1"),
        ("refuses", "this is no poem"),
    ],
)
def test_a_reward_that_can_score_nothing_is_refused_with_task_and_cause(lab: Path, name: str, cause: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rehearsed(plan_of(lab, f"trial_lab/{name}"))
    (fault,) = caught.value.faults
    start = f"reward: 'trial_lab/{name}' could score none of 5 made-up answers to task 'countdown/train/"
    assert fault.startswith(start)
    assert cause in fault


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("divides", r"ZeroDivisionError: division by zero \(.*trial_lab\.py, line \d+\)"),
        ("forgets", "TypeError: render_text returned NoneType; expected str"),
    ],
)
def test_a_renderer_that_fails_is_refused_with_the_cause(lab: Path, name: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=f"refuses a conversation of user: {cause}$"):
        rehearsed(plan_of(lab, "countdown", f"model.renderer=trial_lab/{name}"))


def test_a_task_without_an_answer_is_not_said_to_have_one(lab: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "3,5>8:"}\n')
    plan = plan_of(lab, "trial_lab/raises", f"tasks.train={{use: jsonl, path: {tmp_path / 'a.jsonl'}}}")
    with pytest.raises(ConfigError, match=r"made-up answers to task 'a:0', which has no reference answer: .*TypeError"):
        rehearsed(plan)


def test_a_reward_is_tried_on_each_file_of_a_source(lab: Path, tmp_path: Path) -> None:
    rows = {"a": '{"prompt": "3,5>8:", "answer": "3+5"}', "b": '{"prompt": "1,5>6:"}'}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(f"{row}\n" * 100)
    files = f"[{tmp_path / 'a.jsonl'}, {tmp_path / 'b.jsonl'}]"
    with pytest.raises(ConfigError, match="reward: 'exact_match': task 'b:"):
        rehearsed(plan_of(lab, "exact_match", f"tasks.train={{use: jsonl, path: {files}}}"))


@pytest.mark.parametrize("name", ["wrong", "strict", "tokens", "together", "compares", "shaky", "counting"])
def test_a_wrong_answer_is_fine_and_so_is_a_reward_that_fails_on_some(lab: Path, name: str) -> None:
    assert rehearsed(plan_of(lab, f"trial_lab/{name}")) == Rehearsal()


CLASSES = """
from pathlib import Path

class Counter:
    def __init__(self):
        self.count = 0
    def reset(self, answer):
        self.wanted = answer
        return "Count."
    def add(self, step: int) -> int:
        "Adds."
        self.count += step
        return self.count
    def close(self):
        with Path(__file__).with_name("closed").open("a") as log:
            log.write("closed ")

class Refused(Counter):
    def reset(self, answer):
        raise ConnectionError("the sandbox is away")

class Unreachable(Counter):
    def __init__(self):
        raise KeyError("TOKEN")
"""


@pytest.mark.parametrize(
    ("name", "code", "fault"),
    [
        ("Counter", "[float(e.count) for e in environments]", ""),
        ("Counter", "[float(e.total) for e in environments]", "could score none of 5 made-up answers"),
        ("Refused", "[0.0]", "Refused.reset: ConnectionError: the sandbox is away"),
        ("Unreachable", "[0.0]", "Unreachable.__init__: KeyError: 'TOKEN'"),
    ],
)
def test_a_reward_is_tried_with_new_objects_of_a_tool_class(
    lab: Path, tmp_path: Path, name: str, code: str, fault: str
) -> None:
    (tmp_path / "counting.py").write_text(CLASSES)
    (tmp_path / "judging.py").write_text(f"def judge(environments, **kwargs): return {code}")
    reward = f"{{use: foreign, path: '{tmp_path / 'judging.py'}:judge'}}"
    plan = plan_of(lab, reward, f"workflow={{use: tools, tools: ['{tmp_path / 'counting.py'}:{name}']}}")
    found = rehearsed(plan)
    assert found.notes == ()
    assert len(found.warnings) == bool(fault) and fault in "".join(found.warnings)
    closed = (tmp_path / "closed").read_text().split() if (tmp_path / "closed").exists() else []
    assert len(closed) == (name != "Unreachable")


@pytest.mark.parametrize(("name", "why"), [("asks", "it is async"), ("large", "it runs in its own actor")])
def test_checks_that_cannot_run_here_are_skipped_and_reported(lab: Path, name: str, why: str) -> None:
    (skipped,) = rehearsed(plan_of(lab, f"[countdown, trial_lab/{name}]")).notes
    assert skipped.startswith(f"reward[1]: 'trial_lab/{name}' is not tried out before the start: {why}")


def test_a_part_after_a_gate_is_tried_and_one_for_other_sources_is_not(lab: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\[1\]: 'trial_lab/here' could score none"):
        rehearsed(plan_of(lab, "[{use: trial_lab/gate, gate: 1.0}, trial_lab/here]"))
    plan = plan_of(lab, "[countdown, {use: trial_lab/here, sources: [poems]}]")
    assert rehearsed(plan) == Rehearsal()


def test_a_task_that_cannot_be_scored_is_named(lab: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward: 'trial_lab/lacking': task 'countdown/train/0' has no answer$"):
        rehearsed(plan_of(lab, "trial_lab/lacking"))


def test_a_task_whose_answer_is_in_another_column_is_told_how_to_name_it(lab: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "3,5>8:", "goal": 8}\n')
    with pytest.raises(ConfigError, match=r"got None; the task has no answer: .*\(goal\).* set columns: {answer: …}"):
        rehearsed(plan_of(lab, "countdown", f"tasks.train={{use: jsonl, path: {tmp_path / 'a.jsonl'}}}"))


@pytest.mark.parametrize("setting", ["workflow={use: dialogue, turns: 2}", "max_invalid=1"])
def test_where_failing_need_not_end_the_run_it_is_a_warning(lab: Path, setting: str) -> None:
    (warning,) = rehearsed(plan_of(lab, "trial_lab/here", setting)).warnings
    assert "RuntimeError: no referee" in warning


def test_a_workflow_that_gives_rewards_and_a_config_that_wants_no_trial_skip_it(lab: Path) -> None:
    assert rehearsed(plan_of(lab, "trial_lab/here", "scoring.trial=false")) == Rehearsal()
    plan = plan_of(lab, "environment", "workflow=environment")
    (skipped,) = rehearsed(plan).notes
    assert "workflow 'environment' gives it" in skipped


def test_a_reward_of_what_the_workflow_gives_is_not_tried_unless_the_workflow_cannot_give_any(lab: Path) -> None:
    found = rehearsed(plan_of(lab, "[countdown, environment]", "workflow={use: dialogue, turns: 2}"))
    (skipped,) = found.notes
    assert skipped.startswith("reward[1]: 'environment' is not tried out before the start: it reads rewards that")
    assert not found.warnings
    with pytest.raises(ConfigError, match="'environment' could score none of 5 made-up answers"):
        rehearsed(plan_of(lab, "environment"))


def test_a_reward_with_a_memory_starts_the_run_without_a_trace_of_the_trial(lab: Path) -> None:
    plan = plan_of(lab, "trial_lab/counting")
    reward: Any = plan.plugins.resolve(plan.rewards[0].reference)
    rehearsed(plan)
    assert reward.calls == plan.plugins.resolve(plan.rewards[0].reference).calls == 0


def test_a_training_refuses_such_a_reward_before_there_is_a_folder(lab: Path) -> None:
    plan = plan_of(lab, "trial_lab/raises")
    with pytest.raises(ConfigError, match="could score none of 5 made-up answers"):
        run(plan)
    assert not plan.folder.exists()
