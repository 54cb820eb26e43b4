"""Rollouts that `--show` prints."""

from __future__ import annotations

import io

import pytest
from click.testing import CliRunner
from rich.console import Console

from rlsdk.cli import root
from rlsdk.evaluation.evaluation import Answers, evaluation_of
from rlsdk.runlog.tables import Entry
from rlsdk.trainer.observing import sample_lines
from rlsdk.types import Group, Message, Rollout, Score, Task


def entry(number, value):
    task, said = Task("t", f"{number}+1=", "2"), Message("assistant", f"answer {number}\n\x1b[31m")
    rollout = Rollout(task, [said], [1, 2], [False, True], [0.0, -1.0], [-1, 0])
    score = Score(value or 0.0, valid=value is not None)
    group = Group(task, [rollout], [score])
    return Entry(number=number, source="s", state="trained", step=1, uses=1, group=group)


@pytest.mark.parametrize(("count", "numbers"), [(2, [0, 3]), (0, []), (9, [0, 1, 2, 3, 4, 5])])
def test_samples_are_spread_over_the_batch(count, numbers):
    lines = sample_lines([entry(i, i / 10) for i in range(6)], count)
    assert [line.plain.split("  ")[1] for line in lines] == [f"reward {i / 10:.3f}" for i in numbers]


def test_a_line_is_one_line_and_acts_on_no_terminal():
    written = io.StringIO()
    for line in sample_lines([entry(1, None)], 1):
        Console(file=written, width=80).print(line, no_wrap=True, overflow="ellipsis")
    assert written.getvalue() == "  not scored  1+1= -> answer 1\\n\\x1b[31m\n"


def test_what_an_environment_answers_is_shown_between_the_turns():
    task = Task("t", (Message("user", "Find the goal."),))
    said = [
        *task.prompt,
        Message("user", "start"),
        Message("assistant", "left"),
        Message("user", "wall"),
        Message("assistant", "down"),
    ]
    group = Group(task, [Rollout(task, said, [1, 2], [False, True], [0.0, -1.0], [-1, 0])], [Score(1.0)])
    played = Entry(number=1, source="s", state="trained", step=1, uses=1, group=group)
    prompt, response = "user: Find the goal.\nuser: start", "left\nuser: wall\ndown"
    (line,) = sample_lines([played], 1)
    assert line.plain == "  reward 1.000  " + repr(f"{prompt} -> {response}")[1:-1]
    (sample,) = evaluation_of(Answers((group,), (group,)), 1).samples
    assert (sample["prompt"], sample["response"]) == (prompt, response)


def test_other_modes_are_refused():
    ran = CliRunner().invoke(root, ["train", "x.yaml", "--mode", "train", "--show", "2"])
    assert ran.exit_code == 2
    assert "--show works only with --mode both" in ran.stderr
