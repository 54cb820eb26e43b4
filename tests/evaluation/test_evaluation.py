"""If the reward fails in an evaluation, results are unavailable, never zero; too many failures end it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from rich.console import Console

from rlsdk.config.schema import EvalSection
from rlsdk.contracts import Run, Sampling
from rlsdk.errors import ScoringError
from rlsdk.evaluation.evaluation import Answers, evaluate, evaluation_of
from rlsdk.runlog.report import print_report
from rlsdk.runlog.trackers import JsonlTracker
from rlsdk.trainer.summary import accuracy_at
from rlsdk.types import Group, Rollout, Score, Task


def graded(*scores: Score, source: str = "") -> Group:
    task = Task(id="t", prompt="?", source=source)
    return Group(task, [Rollout.from_text(task, "x")] * len(scores), scores)


def test_an_evaluation_whose_reward_fails_is_not_available_and_never_zero() -> None:
    failed = Score.invalid("referee is ill")
    answers = Answers((graded(failed),), (graded(failed, failed),))
    found = evaluation_of(answers, 2)
    assert found.accuracy == {"greedy": None, "sampled": None, "pass@2": None}
    assert found.metrics["eval/greedy_reward"] is None and found.metrics["eval/sampled_reward"] is None
    assert found.metrics["eval/invalid"] == 3
    assert (found.samples[0]["correct"], found.samples[0]["reward"]) == (None, None)
    assert json.loads(json.dumps(found.metrics))["eval/greedy"] is None


def test_an_evaluation_of_a_run_without_a_reward_has_no_accuracy() -> None:
    found = evaluation_of(Answers((graded(Score(0.0)),), (graded(Score(0.0)),)), 1, scored=False)
    assert found.accuracy == {"greedy": None, "sampled": None}
    assert (found.metrics["eval/sampled_reward"], found.samples[0]["correct"]) == (None, None)


def test_an_evaluation_leaves_out_what_could_not_be_scored() -> None:
    failed, right, wrong = Score.invalid("referee is ill"), Score(1.0), Score(0.0)
    found = evaluation_of(Answers((graded(right), graded(failed)), (graded(right, wrong), graded(right, failed))), 2)
    assert found.accuracy == {"greedy": 1.0, "sampled": 2 / 3, "pass@2": 1.0}
    one = evaluation_of(Answers((graded(right, source="a"), graded(failed, source="b")), ()), 1)
    assert (one.metrics["eval/a/greedy"], one.metrics["eval/b/greedy"]) == (1.0, None)


def test_an_evaluation_estimates_that_one_or_all_of_k_answers_are_right() -> None:
    right, wrong = Score(1.0), Score(0.0)
    answers = Answers((), (graded(right, right, right, wrong), graded(right, wrong, wrong, wrong)))
    metrics = evaluation_of(answers, 4).metrics
    # C(3, 2) / C(4, 2) and 0 for all of two; 1 - C(1, 2) / C(4, 2) and 1 - C(3, 2) / C(4, 2) for one of two.
    assert (metrics["eval/all@2"], metrics["eval/pass@2"]) == (0.25, 0.75)
    assert (metrics["eval/all@4"], metrics["eval/pass@4"]) == (0.0, 1.0)
    assert evaluation_of(Answers((), (graded(right, Score.invalid("ill")),)), 2).metrics["eval/all@2"] is None


def test_an_evaluation_counts_the_votes_of_answers() -> None:
    right, four, five, none = Score(1.0, answer="3"), Score(0.0, answer="4"), Score(0.0, answer="5"), Score(0.0)
    other = attrs.evolve(right, answer="6/2")  # spelled differently, and right, too
    groups = (
        graded(right, four, other, five),  # a tie, then a tie; 2 of 4
        graded(four, four, right, right),  # wrong, right; a tie
        graded(none, none, right, none),  # nothing, right; right
        graded(none, none, none, none),  # nothing at all
    )
    metrics = evaluation_of(Answers((), groups), 4).metrics
    assert metrics["eval/maj@2"] == pytest.approx((0.5 + 0.5 + 0.5 + 0.0) / 4)
    assert metrics["eval/maj@4"] == pytest.approx((1.0 + 0.5 + 1.0 + 0.0) / 4)
    silent = (graded(Score(1.0), Score(0.0), source="b"),)  # a scorer that tells no answers
    assert "eval/maj@2" not in evaluation_of(Answers((), silent), 2).metrics
    both = evaluation_of(Answers((), (graded(right, right, source="a"), *silent)), 2).metrics
    assert (both["eval/maj@2"], both["eval/a/maj@2"], "eval/b/maj@2" in both) == (1.0, 1.0, False)
    assert evaluation_of(Answers((), (graded(right, Score.invalid("ill")),)), 2).metrics["eval/maj@2"] is None


def test_an_evaluation_tells_how_long_its_sampled_answers_are_and_how_many_were_cut_off() -> None:
    task = Task("t", "?")
    short = Rollout(task, (), range(4), [False, True, True, False], [0.0] * 4, [-1, 0, 0, -1])
    cut = Rollout(task, (), range(6), [False, *[True] * 5], [0.0] * 6, [-1] + [0] * 5, status="truncated")
    group = Group(task, [short, short, cut, cut], [Score(1.0)] * 4)
    metrics = evaluation_of(Answers((graded(Score(1.0)),), (group,)), 4).metrics
    assert (metrics["eval/length"], metrics["eval/truncated"]) == (3.5, 0.5)


def test_more_failures_than_max_invalid_end_an_evaluation_with_the_cause() -> None:
    failed, right = Score.invalid("referee is ill"), Score(1.0)
    answers = Answers((graded(right),), (graded(right, failed, right),))
    answers.check_scores(0.25, "evaluation at step 3")
    with pytest.raises(
        ScoringError, match=r"evaluation at step 3: 1 of 4 .* max_invalid=0.2 .* task 't': referee is ill"
    ):
        answers.check_scores(0.2, "evaluation at step 3")


def test_what_is_not_available_is_null_in_the_summary_and_not_available_in_the_report(tmp_path: Path) -> None:
    tracker = JsonlTracker()
    tracker.open(Run("a", tmp_path, {}))
    tracker.log(0, {"eval/greedy": None, "eval/sampled": None, "eval/pass@2": None, "eval/invalid": 3.0})
    tracker.close()
    assert accuracy_at(tmp_path, 0) == {"greedy": None, "sampled": None, "pass@2": None}
    out = Console(file=io.StringIO(), width=80)
    seconds = {"steps": 0, "seconds": {}, "tokens_per_second": 0.0}
    samples = {"before": [{"prompt": "?", "response": "x", "reward": None, "correct": None}]}
    print_report(out, {"name": "a", "accuracy_before": accuracy_at(tmp_path, 0), **seconds}, samples)
    said = out.file.getvalue()  # type: ignore[attr-defined]
    assert "n/a" in said and "(not scored)" in said and "0.0%" not in said


def test_an_evaluation_samples_as_its_section_says_whatever_training_samples_at() -> None:
    trained = Sampling(temperature=0.7, top_p=0.9, top_k=5, max_tokens=16, stop=("x",))
    asked: list[Any] = []

    async def produce(tasks: Sequence[Task], sampling: Sampling, size: int, key: str) -> list[Group]:
        asked.append((key, size, sampling))
        return [graded(*[Score(1.0)] * size) for _ in tasks]

    async def reseed() -> None:
        asked.append("reseed")

    def answers(section: EvalSection) -> Answers:
        asked.clear()
        return asyncio.run(evaluate(produce, [Task("t", "?")], trained, section, reseed=reseed))

    plain = Sampling(max_tokens=16, stop=("x",))
    answers(EvalSection())
    greedy = ["reseed", ("eval greedy", 1, attrs.evolve(plain, temperature=0.0))]
    assert asked == [*greedy, "reseed", ("eval sampled", 1, plain)]
    found = answers(EvalSection(samples=4, temperature=0.6, top_p=0.95, top_k=20, max_tokens=32, greedy=False))
    drawn = Sampling(temperature=0.6, top_p=0.95, top_k=20, max_tokens=32, stop=("x",))
    assert asked == ["reseed", ("eval sampled", 4, drawn)]
    assert list(evaluation_of(found, 4).accuracy) == ["sampled", "pass@2", "pass@4"]
    assert set(evaluation_of(found, 4).metrics) == {
        *("eval/sampled", "eval/pass@2", "eval/pass@4", "eval/all@2", "eval/all@4", "eval/sampled_reward"),
        *("eval/invalid", "eval/length", "eval/truncated"),
    }
    answers(EvalSection(temperature=0.6))
    assert asked == [*greedy, "reseed", ("eval sampled", 1, attrs.evolve(plain, temperature=0.6))]


def test_a_report_without_greedy_answers_has_no_row_for_them(tmp_path: Path) -> None:
    tracker = JsonlTracker()
    tracker.open(Run("a", tmp_path, {}))
    tracker.log(0, {"eval/sampled": 0.5, "eval/pass@2": 0.75})
    tracker.close()
    assert accuracy_at(tmp_path, 0) == {"sampled": 0.5, "pass@2": 0.75}
    out = Console(file=io.StringIO(), width=80)
    seconds = {"steps": 0, "seconds": {}, "tokens_per_second": 0.0}
    print_report(out, {"name": "a", "accuracy_before": accuracy_at(tmp_path, 0), **seconds}, {})
    said = out.file.getvalue()  # type: ignore[attr-defined]
    assert "50.0%" in said and "greedy" not in said


def test_what_a_model_wrote_does_not_act_on_the_terminal_at_the_end_of_a_run() -> None:
    out = Console(file=io.StringIO(), width=200)
    hostile = "\x1b]0;title\x07[red]x\u202e"
    summary = {
        "steps": 0,
        "seconds": {},
        "tokens_per_second": 0.0,
        "invalid": {"rollouts": 1, "share": 1.0, "reasons": {hostile: 1}},
    }
    print_report(out, summary, {"after": [{"prompt": hostile, "response": hostile, "correct": True}]})
    said = out.file.getvalue()  # type: ignore[attr-defined]
    assert said.count(r"\x1b]0;title\x07[red]x\u202e") == 3
    assert not {"\x1b", "\x07", "\u202e"} & set(said)
