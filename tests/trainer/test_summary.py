"""The summary at the end of a run."""

from __future__ import annotations

import io
import json
import logging

import pytest
from rich.console import Console

from rlsdk.contracts.rollouts import TaskCounts
from rlsdk.runlog.report import draw_curves, print_report
from rlsdk.trainer import summary


def failed() -> BaseException:
    """Of a group of tasks, with its traceback."""
    try:
        try:
            raise ZeroDivisionError("by nought")
        except ZeroDivisionError as error:
            raise ExceptionGroup("tasks", [error]) from None
    except ExceptionGroup as group:
        return group


def test_what_failed_in_the_background_is_reported_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "rlsdk")
    summary.log_background_failure(failed())
    assert "after the last batch was taken: ZeroDivisionError: by nought" in caplog.text
    assert 'raise ZeroDivisionError("by nought")' in caplog.text


def test_the_ledger_adds_up_and_names_what_expired() -> None:
    counts = TaskCounts(trained=160, filtered=2, failed=1, available=3, scheduled=8, waiting=4, expired=18)
    found = summary.task_counts({"a": counts, "b": TaskCounts(trained=1, expired=1)})
    assert found == {"issued": 179, "trained": 161, "filtered": 2, "failed": 1, "returned": 15, "expired": 19}
    assert found["issued"] == sum(found[name] for name in ("trained", "filtered", "failed", "returned"))


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        (
            {"issued": 178, "trained": 160, "returned": 18, "expired": 20},
            "18 unfinished when the run ended; 20 groups expired before they",
        ),
        (
            {"issued": 160, "trained": 160, "returned": 0, "expired": 2},
            "0 unfinished when the run ended; 2 groups expired before they",
        ),
        (
            {"issued": 161, "trained": 160, "returned": 1, "expired": 0},
            "161 tasks: 160 trained, 1 unfinished when the run ended\n",
        ),
    ],
)
def test_the_table_at_the_end_names_what_expired(tasks: dict[str, int], said: str) -> None:
    out = io.StringIO()
    table = {"name": "run", "seconds": {}, "steps": 20, "tokens_per_second": 1.0, "tasks": tasks}
    print_report(Console(file=out, width=200), table, {})
    assert said in out.getvalue()


def test_a_long_path_is_on_one_line() -> None:
    out, path = io.StringIO(), "/scratch/" + "a" * 100 + "/export"
    table = {"name": "run", "seconds": {}, "steps": 1, "tokens_per_second": 1.0, "export": path}
    print_report(Console(file=out, width=80), table, {})
    assert f"export: {path}\n" in out.getvalue()


def test_phases_are_named_in_the_order_of_a_run() -> None:
    out = io.StringIO()
    seconds = {"start": 1.0, "credit": 2.0, "produce": 3.0, "whole": 9.0, "of a plugin": 0.5}
    print_report(Console(file=out, width=200), {"seconds": seconds, "steps": 1, "tokens_per_second": 1.0}, {})
    rows = [line.strip("│ ").split("│") for line in out.getvalue().splitlines() if line.startswith("│")]
    assert [tuple(map(str.strip, row)) for row in rows] == [
        ("of a plugin", "0.5"),
        ("start", "1.0"),
        ("sampling and scoring", "3.0"),
        ("filters and advantages", "2.0"),
        ("total", "9.0"),
    ]


def test_what_ended_the_run_is_not_reported_twice(caplog: pytest.LogCaptureFixture) -> None:
    error = failed()
    try:
        raise error
    except ExceptionGroup:
        summary.log_background_failure(error)
    summary.log_background_failure(None)
    assert caplog.text == ""


@pytest.mark.parametrize(("rewards", "low", "high"), [((0.1, 0.9), 0.0, 1.02), ((-4.0, 9.0), -4.26, 9.26)])
def test_the_picture_of_the_curves_shows_every_reward(tmp_path, monkeypatch, rewards, low, high):
    from matplotlib.figure import Figure

    limits, save = [], Figure.savefig

    def savefig(figure, *arguments, **options):
        limits.append(figure.axes[0].get_ylim())
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    lines = [{"step": step, "reward/mean": reward} for step, reward in enumerate((*rewards, float("inf")), start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw_curves(tmp_path, "trial")
    assert limits == [pytest.approx((low, high))]
