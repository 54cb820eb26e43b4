"""Findings are reported once, survive a broken rule, and are kept over a resume."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

import rlsdk
from rlsdk.contracts import Finding, History
from rlsdk.runlog.alerts import (
    Alert,
    Diagnoses,
    LatestAlert,
    append_alerts,
    begin_alerts,
    chosen_rules,
    diagnose,
    latest_alerts,
    read_alerts,
    unjudged,
)


def high(history: History) -> Finding | None:
    now = history["x"].last(1).mean
    return Finding(f"x is {now:g}", "lower it") if now > 1 else None


def broken(history: History) -> Finding | None:
    raise ZeroDivisionError("by hand")


def exits(history: History) -> Finding | None:
    sys.exit(3)


def trace(*values: float) -> list[dict[str, float]]:
    return [{"step": i, "x": value} for i, value in enumerate(values, 1)]


def test_what_lasts_is_found_once() -> None:
    assert diagnose(trace(0, 2, 3, 2, 2), {"high": high}) == [Alert(2, "high", "warning", "x is 2", "lower it")]


def test_a_short_pause_is_the_same_finding_and_a_long_one_a_new_one() -> None:
    assert [a.step for a in diagnose(trace(2, *[0] * 9, 2), {"high": high})] == [1]
    assert [a.step for a in diagnose(trace(2, *[0] * 10, 2), {"high": high})] == [1, 12]


@pytest.mark.parametrize("rule", [broken, exits])
def test_a_rule_that_raises_is_named_once_and_the_others_go_on(rule: Any, caplog: pytest.LogCaptureFixture) -> None:
    diagnoses = Diagnoses({"broken": rule, "high": high})
    with caplog.at_level(logging.WARNING):
        found = [diagnoses.look(History.of(trace(*[2] * n))) for n in (1, 2)]
    assert [[a.name for a in each] for each in found] == [["high"], []]
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["diagnosis broken failed and is not called again"]


def test_rules_that_need_more_values_are_named_with_what_a_shorter_window_shows() -> None:
    rules = chosen_rules({}, ["dead_groups", "entropy_collapse", "kl_runaway", "starving_source"])
    healthy = {"rollouts/entropy": 1.0, "actor/kl_to_old": 0.0, "source/a/share": 1.0}
    lines = [{"step": i, "groups/dead": 1.0, **healthy} for i in range(1, 7)]
    found = {each.name: each for each in unjudged(History.of(lines), rules)}
    counts = {name: (each.values, each.needed, each.window) for name, each in found.items()}
    assert counts == {"dead_groups": (6, 10, 6), "entropy_collapse": (6, 20, 3), "starving_source": (6, 20, 3)}
    assert [name for name, each in found.items() if each.finding] == ["dead_groups"]
    assert unjudged(History.of({**lines[0], "step": i} for i in range(1, 21)), rules) == []
    own = chosen_rules({"diagnoses": [{"use": "dead_groups", "window": 8}]}, ["dead_groups"])
    assert [(each.needed, each.window) for each in unjudged(History.of(lines), own)] == [(8, 6)]
    assert [each.window for each in unjudged(History.of(lines[:2]), own)] == [0]  # two values are no basis


def test_a_rule_that_returns_something_else_is_one_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    assert Diagnoses({"text": lambda _: "oh"}).look(History.of(trace(1))) == []  # type: ignore[dict-item,return-value]
    assert "diagnosis text failed" in caplog.text


def test_a_resumed_run_keeps_the_alerts_up_to_its_step(tmp_path: Path) -> None:
    assert read_alerts(tmp_path) is None
    begin_alerts(tmp_path, 0)
    assert read_alerts(tmp_path) == []
    alerts = [Alert(step, "high", "warning", "x is 2", "lower it") for step in (3, 7)]
    append_alerts(tmp_path, alerts)
    with (tmp_path / "alerts.jsonl").open("a") as file:
        file.write('{"step": 9}\n{"step": 8, "na')  # of another version; cut off by a kill
    assert read_alerts(tmp_path) == alerts
    begin_alerts(tmp_path, 5)
    assert read_alerts(tmp_path) == alerts[:1]
    line = json.loads((tmp_path / "alerts.jsonl").read_text())
    assert line == {
        "step": 3,
        "name": "high",
        "level": "warning",
        "message": "x is 2",
        "advice": "lower it",
        "metric": "",
    }
    begin_alerts(tmp_path, 0)
    assert read_alerts(tmp_path) == []


def test_what_stands_out_is_said_in_the_words_of_the_last_step_or_has_passed() -> None:
    told = [Alert(2, "high", "warning", "x is 2", "lower it"), Alert(3, "mylab/mine", "info", "m", "a")]
    rising = History.of({"step": i, "x": float(i)} for i in range(1, 6))
    assert latest_alerts(rising, told, {"high": high}) == [
        LatestAlert(Alert(2, "high", "warning", "x is 5", "lower it"), lasts=True),
        LatestAlert(told[1], lasts=False),
    ]
    assert latest_alerts(rising, [], {"high": high})[0].alert.step == 5  # nobody looked while it trained
    assert latest_alerts(rising.until(1), told[:1], {"high": high}) == [LatestAlert(told[0], lasts=False)]


def test_rules_have_the_options_of_the_run() -> None:
    trace = History.of({"step": i, "actor/clip_share": 0.35} for i in range(20))
    assert chosen_rules({}, ["clip_share"])["clip_share"](trace) is not None
    config = {"diagnoses": ["builtin", {"use": "clip_share", "high": 0.4}]}
    assert chosen_rules(config, ["clip_share"])["clip_share"](trace) is None
    assert sorted(chosen_rules(config)) == sorted(rlsdk.names("diagnosis"))
