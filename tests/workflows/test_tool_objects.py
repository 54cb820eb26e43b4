"""Classes as tools: one object for each rollout, its methods, its reward, and what rewards read of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import rlsdk
from rlsdk.config import check
from rlsdk.contracts import runs_user_code
from rlsdk.errors import DataError, OptionError
from rlsdk.plugins.discovery import find
from rlsdk.readiness.checks import examine
from rlsdk.readiness.tool_objects import unstartable
from rlsdk.runlog.serialization import decode, encode
from rlsdk.testing import run_workflow
from rlsdk.types import Group, Message, Rollout, Score, Task
from rlsdk.workflows.tool_objects import public_state
from tests.rollout.codecs import chatml

SOURCE = '''
import asyncio, time
LOG = []

class Counter:
    """Count."""

    def __init__(self):
        self.count, self._steps, self.client = 0, 0, object()
        LOG.append("made")

    def reset(self, target: int, start: int = 0, **others):
        self.target, self.count, self.others = target, start, sorted(others)
        others["marks"].append(1)
        return f"Count to {target}."

    def add(self, step: int = 1) -> int:
        """Add to the counter.

        Args:
            step: Value to add.
        """
        if step < 0:
            raise ValueError("only upwards")
        self.count += step
        return self.count

    @property
    def reached(self) -> bool:
        return self.count == self.target

    @staticmethod
    def helper(x): ...

    def _private(self, x): ...

    def get_reward(self):
        return float(self.reached)

    def close(self):
        LOG.append(f"closed at {self.count}")

class Slow:
    async def wait(self, seconds: float) -> str:
        """Wait."""
        await asyncio.sleep(seconds)
        return "waited"

    def hang(self) -> str:
        """Hang."""
        time.sleep(0.6)
        self.returned = True

    def late(self) -> str:
        """Be too late by itself."""
        raise TimeoutError("the server is late")

    def close(self):
        LOG.append("closed")
        raise OSError("gone")

class Broken:
    def __init__(self):
        raise ConnectionError("refused")
    def use(self) -> str:
        """Use."""

class Wrong:
    def reset(self):
        return 5
    def use(self) -> str:
        """Use."""

class Judged(Wrong):
    def reset(self):
        return None
    def get_reward(self):
        raise KeyError("score")

class Needs:
    def __init__(self, url): ...
    def use(self) -> str: ...
class Nothing:
    def reset(self): ...
class Untyped:
    def use(self, x): ...
class Positional:
    def reset(self, target, /): ...
    def use(self) -> str: ...
class NeedsReward:
    def get_reward(self, text): ...
    def use(self) -> str: ...
def add(step: int) -> int: ...
'''
TASK = Task(
    id="t", prompt=[Message("user", "A task.")], answer="3", metadata={"target": 3, "marks": []}, source="counting"
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("lab") / "objects_lab.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.fixture
def log(file: str) -> list[str]:
    found: list[str] = find(f"{file}:LOG")
    found.clear()
    return found


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(
    tools: list[str], *answers: str, task: Task = TASK, group_size: int = 1, read: Any = None, **options: Any
) -> Group:
    """Run a group whose rollouts all give these answers."""

    def script(text: str) -> str:
        if read is not None:
            read.append(text)
        return answers[text.count("<tool_call>")]

    workflow = rlsdk.load("workflow", "tools", **{"tools": tools, "call_timeout": 0.2, **options})
    [group] = run_workflow(workflow, [task], chatml(), script, group_size=group_size, max_tokens=500, max_length=9000)
    return group


def results(rollout: Rollout) -> list[str]:
    return [message.text for message in rollout.messages if message.role == "tool"]


def test_each_rollout_of_a_group_has_its_own_object(file: str, log: list[str]) -> None:
    read: list[str] = []
    group = play([f"{file}:Counter"], call("add"), call("add", step=2), "3", group_size=4, read=read)
    assert [results(rollout) for rollout in group.rollouts] == [["1", "3"]] * 4
    assert [rollout.rewards for rollout in group.rollouts] == [((len(r.token_ids) - 1, 1.0),) for r in group.rollouts]
    assert sorted(log) == ["closed at 3"] * 4 + ["made"] * 4
    assert all("helper" not in text and "reset" not in text for text in read)


def test_reset_gets_the_fields_of_the_task_and_its_text_joins_the_prompt(file: str) -> None:
    rollout = play([f"{file}:Counter"], "no").rollouts[0]
    assert [message.text for message in rollout.messages if message.role == "user"] == ["A task.\nCount to 3."]
    state = rollout.task.metadata["tool_state"]["Counter"]
    assert state["others"] == ["answer", "ground_truth", "marks", "prompt", "seed", "solution"]
    assert TASK.metadata["marks"] == [] and "tool_state" not in TASK.metadata  # reset got a copy
    other = play([f"{file}:Counter"], "no", task=attrs.evolve(TASK, metadata={"target": 5, "marks": [], "start": 5}))
    assert [value for _, value in other.rollouts[0].rewards] == [1.0]


def test_the_rollouts_task_holds_the_public_attributes_at_the_end(file: str) -> None:
    group = play([f"{file}:Counter"], call("add", step=3), "done")
    state = group.rollouts[0].task.metadata["tool_state"]
    expected = {"count": 3, "target": 3, "reached": True, "others": state["Counter"]["others"]}
    assert state == {"Counter": expected}  # neither the client, which JSON cannot express, nor _steps
    assert group.task == TASK


def test_attributes_are_kept_as_json_has_them() -> None:
    class Slotted:
        __slots__ = ("_own", "best", "client", "unset")

        def __init__(self) -> None:
            self.best, self.client, self._own = np.float32(0.5), open, 1

        @property
        def broken(self) -> int:
            raise KeyError

    class Wide(Slotted):
        def __init__(self) -> None:
            super().__init__()
            self.path, self.table, self.cycle, self.array = (1, 2), {1: None}, [], np.zeros(2)
            self.cycle.append(self.cycle)

    assert public_state(Slotted()) == {"best": 0.5}
    assert public_state(Wide()) == {"best": 0.5, "path": [1, 2], "table": {"1": None}}


def test_what_a_method_raises_is_its_result(file: str) -> None:
    calls = [call("add", step=-1), call("add", step="x"), call("reset", target=1), call("_private", x=1)]
    rollout = play([f"{file}:Counter", f"{file}:Slow"], *calls, call("late"), call("wait", seconds=0), "done").rollouts[
        0
    ]
    told = results(rollout)
    assert told[0] == "error: ValueError: only upwards"
    assert told[1].startswith("error: add: step: expected int")
    assert told[2].startswith("error: there is no tool 'reset'") and told[3].startswith("error: there is no tool")
    assert told[4:] == ["error: TimeoutError: the server is late", "waited"]
    assert rollout.metrics["failed_calls"] == 5 and rollout.status == "finished"
    assert set(rollout.task.metadata["tool_state"]) == {"Counter", "Slow"}


@pytest.mark.parametrize(
    ("cls", "answer", "reason"),
    [
        ("Slow", call("hang"), "Slow.hang took longer than 0.2 s"),
        ("Slow", call("wait", seconds=9), "Slow.wait took longer than 0.2 s"),
        ("Broken", "done", "Broken.__init__: ConnectionError: refused"),
        ("Wrong", "done", "Wrong.reset returned 5; expected text for the prompt"),
        ("Judged", "done", "Judged.get_reward: KeyError: 'score'"),
    ],
)
def test_an_object_in_an_unknown_state_fails_its_rollout(file: str, cls: str, answer: str, reason: str) -> None:
    group = play([f"{file}:{cls}"], answer, "done")
    assert group.rollouts[0].status == "failed" and not group.scores[0].valid
    assert group.scores[0].reason.startswith(f"workflow failed: ToolObjectError: {reason}")


def test_a_call_that_the_rollouts_time_limit_interrupts_ends_before_the_state_is_read(file: str) -> None:
    rollout = play([f"{file}:Slow"], call("hang"), "done", timeout=0.2, call_timeout=9.0).rollouts[0]
    assert rollout.status == "truncated"
    assert rollout.task.metadata["tool_state"] == {"Slow": {"returned": True}}
    group = play([f"{file}:Slow"], call("hang"), "done", timeout=0.1, call_timeout=0.3)
    assert group.scores[0].reason == "workflow failed: ToolObjectError: Slow.hang took longer than 0.3 s"


def test_an_object_is_closed_however_its_rollout_ends(
    file: str, log: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for answer in ("done", call("hang")):
        play([f"{file}:Slow"], answer, "done")
    play([f"{file}:Slow", f"{file}:Broken"], "done")
    assert log == ["closed"] * 3
    assert "Slow.close: OSError: gone" in caplog.text


def test_a_task_without_a_field_that_reset_requires_is_an_error(file: str) -> None:
    with pytest.RaisesGroup(
        pytest.RaisesExc(DataError, match="task 'u': Counter.reset requires target"), flatten_subgroups=True
    ):
        play([f"{file}:Counter"], "no", task=(task := Task(id="u", prompt="Count.")))
    workflow = rlsdk.load("workflow", "tools", tools=[f"{file}:Counter"])
    assert unstartable(workflow, [TASK, task]).startswith(
        "task 'u': Counter.reset requires target, which the task does"
    )
    assert unstartable(workflow, [TASK]) == unstartable(rlsdk.load("workflow", "single_turn"), [task]) == ""


def test_classes_are_checked_before_a_run(file: str) -> None:
    for names, words in (
        (["Needs"], r"tools\[0\]: Needs is called without arguments, but requires url"),
        (["Nothing"], "Nothing has no public method for the policy to call"),
        (["Untyped"], "Untyped: tool 'use': parameter x must be named and typed"),
        (["Positional"], "Positional.reset gets a task's fields by name, but target is positional-only"),
        (["NeedsReward"], "NeedsReward.get_reward is called without arguments, but requires text"),
        (["Counter", "add"], "several functions or methods are named add; rename them"),
        (["Counter", "Counter"], "expected functions with different names"),
    ):
        with pytest.raises(OptionError, match=words):
            rlsdk.load("workflow", "tools", tools=[f"{file}:{name}" for name in names])


def test_async_methods_run_on_the_users_loop(file: str) -> None:
    def load(name: str) -> Any:
        return rlsdk.load("workflow", "tools", tools=[f"{file}:{name}"])

    assert runs_user_code(load("Slow")) and not runs_user_code(load("Counter"))


def play_rewarded(file: str, code: str, tmp_path: Path, *answers: str) -> list[Any]:
    """Score a rollout of `Counter` and one that called nothing, with a reward of TRL."""
    (tmp_path / "rewards.py").write_text(code)
    reward = rlsdk.load("reward", "foreign", path=f"{tmp_path / 'rewards.py'}:reward")
    rollouts = [play([f"{file}:Counter"], *given).rollouts[0] for given in (answers, ["no"])]
    return list(reward(rollouts))


def test_rewards_of_trl_read_the_objects_as_environments(file: str, tmp_path: Path) -> None:
    code = "def reward(environments, **kwargs): return [env.count + 10 * env.reached for env in environments]"
    scores = play_rewarded(file, code, tmp_path, call("add", step=3), "done")
    assert [score.value for score in scores] == [13.0, 0.0]
    code = "def reward(completions, **kwargs): return [float(env.client) for env in kwargs['environments']]"
    [score, _] = play_rewarded(file, code, tmp_path, "no")
    assert not score.valid
    assert "keeps only the public attributes of Counter that JSON can express (count, target, others" in score.reason


def test_a_stored_rollout_is_scored_again(file: str, tmp_path: Path) -> None:
    [before] = play([f"{file}:Counter"], call("add", step=3), "done").rollouts
    [after] = decode(encode(Group(TASK, (before,), (Score(1.0),), uid="u"))).rollouts
    (tmp_path / "rewards.py").write_text("def reward(environments): return [env.count for env in environments]")
    reward = rlsdk.load("reward", "foreign", path=f"{tmp_path / 'rewards.py'}:reward")
    assert [score.value for score in reward([after])] == [3.0]
    with pytest.raises(DataError, match="asks for environments, but the workflow has no tool class, or several"):
        reward([Rollout.from_text(TASK, "done")])


def test_a_run_whose_tasks_or_reward_do_not_fit_its_classes_is_refused(file: str, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def reward(environments): return [env.count for env in environments]")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "Count.", "answer": 1}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    whole = {
        "name": "t",
        "model": str(tmp_path / "model"),
        "tasks": {"train": {"use": "jsonl", "path": str(tmp_path / "tasks.jsonl")}},
        "reward": {"use": "foreign", "path": f"{tmp_path / 'rewards.py'}:reward"},
        "engine": "transformers",
        "steps": 1,
    }

    def faults(*names: str) -> list[str]:
        plan = check({**whole, "workflow": {"use": "tools", "tools": [f"{file}:{name}" for name in names]}})
        return [str(each) for each in examine(plan, starts=False).faults if not each.path.startswith("model")]

    assert faults("Judged") == []
    assert [each.partition(": name one")[0] for each in faults("add")] == [
        "workflow: the reward reads the object of a tool class, of which 'core/tools' has none"
    ]
    assert "has Judged, Slow: name one class" in faults("Judged", "Slow")[0]
