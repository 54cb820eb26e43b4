"""The page in headless Chromium: all its pages for a recorded run, hostile text, keys, widths, and planted faults."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import rlsdk
from rlsdk.runlog.alerts import Alert, append_alerts
from rlsdk.runlog.folder import MARKER
from rlsdk.runlog.metrics import note_ledger
from rlsdk.runlog.tables import Entry
from rlsdk.types import Group, Message
from rlsdk.viewer import rollouts
from tests.viewer.browser import Browser, chromium, proxied, served
from tests.viewer.recorded import fill, group, make_run


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "first")
    with served(folder) as where:
        yield where


@pytest.fixture
def page(browser: Browser, address: str) -> Browser:
    browser.size(1280, 900)
    browser.open(address)
    browser.see("nav a", "Curves")
    browser.errors()
    return browser


def test_all_pages_show_a_run_without_an_error(page: Browser) -> None:
    page.see(".chart", "Reward")
    page.click("nav a", "Time")
    page.see(".share", "sampling and scoring")
    page.click("nav a", "Processes")
    page.see(".log .warn", "engine 1 is silent")
    page.click("nav a", "Settings")
    page.see(".settings tr", "steps")
    page.click("nav a", "Held-out")
    page.click(".item", "What is 101?")
    page.see(".column", "answer 6")
    page.keys("\ue012")  # arrow left
    page.see(".column", "answer 3")
    assert page.errors() == []


def test_a_run_before_its_first_step_says_so(browser: Browser, tmp_path: Path) -> None:
    run = tmp_path / "new"
    run.mkdir()
    (run / MARKER).touch()
    (run / "config.yaml").write_text("name: new\nsteps: 4\n")
    with served(run) as address:
        browser.size(1280, 900)
        browser.open(address)
        browser.see(".empty", "No step is finished yet")
        browser.click("nav a", "Annotate")
        browser.see(".trouble", "this run has stored no rollouts yet")
        assert "left" not in browser.text()
        browser.errors()  # Chromium logs the refused requests


def test_a_run_without_greedy_answers_has_its_sampled_ones_on_the_held_out_page(
    browser: Browser, tmp_path: Path
) -> None:
    with served(make_run(tmp_path / "sampled", greedy=False)) as address:
        browser.size(1280, 900)
        browser.open(f"{address}#/held-out")
        browser.see(".item", "What is 101?")
        assert [each.text for each in browser.all(".bar .choice button")] == ["Sampled"]
        assert browser.errors() == []


def test_scores_without_a_range_are_explained(page: Browser, address: str) -> None:
    page.open(f"{address}#/annotate?ask=score&low=5&high=1")
    page.see(".verdict", "Scores from 5 to 1: expected two numbers, the lower one first.")


def test_the_browser_of_rollouts_is_used_with_keys(page: Browser) -> None:
    page.click("nav a", "Rollouts")
    first = page.see(".detail h2", "sums/11").text
    page.keys("jjj")
    page.see(".detail h2", "words/10")
    page.keys("k")
    assert page.see(".detail h2", "sums/11").text != first
    page.keys("t")
    page.see(".token-detail", "advantage")
    page.click(".choice button", "Ratio")
    page.see(".token-view .hint", "Red: below 1")
    page.keys("g")
    assert len(page.wait(lambda: page.all(".columns .column"), "no columns")) == 3
    page.keys("/")
    page.driver.switch_to.active_element.send_keys("What is 5?")
    page.wait(lambda: {e.text.split(" #")[0] for e in page.all(".detail h2")} == {"sums/5"}, "the search finds nothing")
    page.click(".item", "the judge timed out")
    page.see(".trouble", "No score: the judge timed out")
    page.driver.switch_to.active_element.send_keys("\ue00c")
    page.keys("?")
    page.see("dialog", "next rollout")
    page.keys("?")
    page.wait(lambda: not page.run("return document.querySelector('dialog').open"), "the list of keys stays")
    assert page.errors() == []


def test_rows_of_choices_and_logs_are_moved_through_with_arrow_keys(browser: Browser, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    make_run(tmp_path / "first")
    (tmp_path / "first/logs/engine-0.log").write_text("engine 0 is ready\n")

    def press(key: str, value: str) -> None:
        browser.driver.switch_to.active_element.send_keys(key)
        state = "a => [a.dataset.value, a.ariaChecked ?? a.ariaSelected, a.tabIndex].join()"
        seen = f"return ({state})(document.activeElement)"
        browser.wait(lambda: browser.run(seen) == f"{value},true,0", f"{value} is not chosen")

    with served(tmp_path) as address:
        browser.open(address)
        browser.click("nav a", "Rollouts")
        browser.click(".detail .choice button", "Conversation")
        press(Keys.RIGHT, "tokens")
        press(Keys.DOWN, "group")
        press(Keys.RIGHT, "turns")  # around the end
        press(Keys.END, "group")
        browser.click("nav a", "Processes")
        browser.click(".tab", "driver")
        press(Keys.RIGHT, "engine-0")
        browser.see(".log", "engine 0 is ready")
        press(Keys.LEFT, "driver")
        assert browser.run("return document.querySelectorAll('.tab[tabindex=\"0\"]').length") == 1
        assert browser.errors() == []


def test_a_search_continues_after_pages_without_matches(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "searched", steps=1)
    answers = ["needle"] * 2 + ["hay"] * 4 + ["needle"] * 10 + ["hay"] * 4
    groups = {n: group(n, answers=(text, text)) for n, text in enumerate(answers, 10)}
    fill(run, [Entry(number=n, source="sums", state="trained", uses=1, step=n, group=g) for n, g in groups.items()])
    monkeypatch.setattr(rollouts, "SECONDS", -1.0)
    monkeypatch.setattr(rollouts, "TEXT_WINDOW", 4)
    with served(run) as address:
        browser.size(1280, 900)
        browser.open(f"{address}#/rollouts?text=needle")
        browser.see(".detail h2", "sums/25")
        browser.see(".list-foot", "20 shown, searched to step 16")
        browser.run("const pane = document.querySelector('.list-pane'); pane.scrollTop = pane.scrollHeight")
        browser.see(".list-foot", "24 shown")
        browser.open(f"{address}#/rollouts?text=nowhere")
        browser.see(".detail", "No rollout matches these filters")
        assert browser.errors() == []


def trained(number: int, *answers: str) -> Entry:
    return Entry(
        number=number, source="sums", state="trained", uses=1, step=number, group=group(number, answers=answers)
    )


@pytest.mark.slow
def test_after_the_last_rollout_the_list_says_that_these_were_all(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "long", steps=1)
    fill(run, [trained(n, *["needle" if n >= 200 else "hay"] * 3) for n in range(10, 700)])
    with served(run) as address:
        browser.size(1280, 900)
        browser.open(f"{address}#/rollouts?text=needle")
        browser.see(".list-foot", "shown")

        def scrolled() -> bool:
            browser.run("const pane = document.querySelector('.list-pane'); pane.scrollTop = pane.scrollHeight")
            return browser.run("return document.querySelector('.list-foot button') !== null")

        browser.wait(scrolled, "the list has no end")
        browser.click(".list-foot button", "1,500 shown; continue from here")
        browser.see(".detail", "No more rollouts match these filters, after the previous 1,500.")
        assert browser.errors() == []


def test_a_search_without_matches_is_repeated_while_the_run_continues_without_disturbing_typing(
    browser: Browser, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "live")
    with served(run) as address:
        browser.size(1280, 900)
        browser.open(f"{address}#/rollouts?text=needle")
        browser.see(".detail", "No rollout matches these filters")
        field = "document.querySelector('input[name=step_from]')"
        browser.run(f"{field}.focus()")
        fill(run, [trained(900, "needle", "hay")])
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 7, "reward/mean": 0.5}\n')
        browser.see(".detail h2", "sums/900")
        browser.see(".list-foot", "all 1 shown")
        assert browser.run(f"return document.activeElement === {field}")
        assert browser.errors() == []


def test_filters_are_in_the_address_and_can_be_taken_back(page: Browser, address: str) -> None:
    page.open(f"{address}#/rollouts?status=truncated&source=words")
    page.see(".chips", "status: truncated")
    page.wait(lambda: len(page.all(".list .item")) == 6, "not the six truncated rollouts of words")
    page.click(".chips .tag", "source")
    page.wait(lambda: len(page.all(".list .item")) == 12, "not all truncated rollouts")


def test_what_a_model_wrote_is_seen_and_never_acts(page: Browser, address: str) -> None:
    page.open(f"{address}#/rollouts?text=%3Cscript%3E")
    page.see(".turn.policy", "<script>document.title='owned'</script></textarea><img src=x")
    shown = page.see(".turn.policy").text
    assert "␛[31mred" in shown and "⟨U+202E⟩" in shown and "\ufffd" in shown and "␀" in shown
    for key in "tg":
        page.keys(key)
        time.sleep(0.3)
    inside = "return document.querySelectorAll('main script, main img, main textarea').length"
    assert page.run(inside) == 0
    assert page.run("return document.title") == "first · rlsdk"
    assert page.errors() == []


def test_the_pictures_of_an_environment_are_seen(browser: Browser, tmp_path: Path) -> None:
    lake = np.zeros((24, 32, 3), np.uint8)
    made = group(900)
    answer = made.rollouts[0].messages[-1]
    played = attrs.evolve(made.rollouts[0], messages=(Message("user", (rlsdk.Image(lake), "Find the goal.")), answer))
    run = make_run(tmp_path / "seen", steps=1)
    shown = Group(made.task, [played, *made.rollouts[1:]], made.scores, uid=made.uid)
    fill(run, [Entry(number=900, source="sums", state="trained", uses=1, step=900, group=shown)])
    with served(run) as address:
        browser.size(1280, 900)
        browser.open(f"{address}#/rollouts?step_from=900&at=900.0")
        browser.see(".turn.user", "Find the goal.")
        size = (
            "const p = document.querySelector('.turn.user img.picture'); return p && [p.naturalWidth, p.naturalHeight]"
        )
        browser.wait(lambda: browser.run(size) == [32, 24], "no picture")
        assert browser.errors() == []


def test_a_text_of_a_megabyte_does_not_hold_up_the_page(browser: Browser, tmp_path: Path) -> None:
    from rlsdk.types import Group, Score, Task
    from tests.viewer.recorded import rollout

    run = make_run(tmp_path / "long", steps=1)
    task = Task("long", "say much", source="sums")
    much = Group(task, [rollout(task, "word " * 200_000)], [Score(1.0)])
    fill(run, [Entry(number=99, source="sums", state="trained", step=2, uses=1, group=much)])
    with served(run) as address:
        browser.size(1280, 900)
        browser.open(f"{address}#/rollouts?task=long")
        browser.see(".turn.policy", "show all 200,000 characters")
        assert "The message has 1,000,000 characters" in browser.text()
        assert browser.run("return document.querySelector('.turn.policy').textContent.length") < 10_000


def test_the_page_works_below_a_path_of_a_proxy(browser: Browser, tmp_path: Path) -> None:
    with served(make_run(tmp_path / "first")) as server, proxied(server, "/lab/runs/") as address:
        browser.size(1280, 900)
        browser.open(address)
        browser.see(".chart", "Reward")
        browser.click("nav a", "Annotate")
        browser.click(".verdict button", "A is better")
        browser.see(".annotate-progress", "1 done")
        assert browser.errors() == []


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_on_a_phone_nothing_is_wider_than_the_screen(page: Browser, address: str, dark: bool) -> None:
    page.size(390, 844, dark=dark)
    page.open(address)
    for name in ("Curves", "Time", "Rollouts", "Held-out", "Annotate", "Processes", "Settings"):
        page.click("nav a", name)
        page.wait(lambda: page.run("return !document.querySelector('main .loading')"), "it stays empty")
        assert page.run("return document.documentElement.scrollWidth") <= 390, name
    ground = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(19, 21, 24)") is dark
    page.click("nav a", "Rollouts")
    page.click(".item")
    page.see(".detail h2")
    assert not page.all(".list-pane")[0].is_displayed()
    page.click(".back")
    page.see(".list-pane")


# Runs in which something is wrong: what their folders hold, and the words by which the page says so.

STEPS = 40


def metrics_of(i: int) -> dict[str, float]:
    """Metrics of a healthy run after a step."""
    learned = 1 - math.exp(-i / 15)
    noise = 0.02 * math.sin(i * 1.7)
    return {
        "reward/mean": 0.2 + 0.6 * learned + noise,
        "reward/std": 0.4,
        "reward/answer": 0.1 + 0.6 * learned,
        "reward/format": 0.9,
        "accuracy/mean": 0.1 + 0.6 * learned + noise,
        "groups/trained": 0.8 + noise,
        "groups/dead": 0.2 - noise,
        "rollouts/length": 120 + 10 * noise,
        "rollouts/truncated": 0.02,
        "actor/entropy": 0.5 + 0.3 * (1 - learned),
        "engines/alive": 2.0,
        "time/step": 2.0,
        "time/produce": 1.2,
        "time/update": 0.7,
        "source/math/rollouts/tokens": 4000.0,
        "source/code/rollouts/tokens": 3000.0,
        "source/math/share": 0.6,
        "source/code/share": 0.4,
    }


def write(folder: Path, lines: list[dict[str, Any]]) -> Path:
    run = make_run(folder, steps=2)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return run


def dead_groups(folder: Path) -> None:
    zero = {"reward/mean": 0.0, "reward/std": 0.0, "accuracy/mean": 0.0, "reward/answer": 0.0, "reward/format": 0.0}
    write(folder, [{"step": i, **metrics_of(i), **zero, "groups/dead": 0.97} for i in range(1, STEPS)])


def length_explosion(folder: Path) -> None:
    flat = {"reward/mean": 0.3, "accuracy/mean": 0.2}
    write(
        folder,
        [{"step": i, **metrics_of(i), **flat, "rollouts/length": 100 * 1.04**i} for i in range(1, STEPS)],
    )


def starving_source(folder: Path) -> None:
    lines = [{"step": i, **metrics_of(i)} for i in range(1, STEPS)]
    for line in lines[12:]:
        del line["source/code/rollouts/tokens"], line["source/code/share"]
    run = write(folder, lines)
    note_ledger(run, STEPS, {"math": {"trained": 900, "filtered": 60}, "code": {"trained": 40, "waiting": 8}})


def hung_engine(folder: Path) -> None:
    run = write(folder, [{"step": i, **metrics_of(i)} for i in range(1, STEPS)])
    silent = "uses neither CPU nor a disk and does not answer"
    actors = [
        {"name": "engine 0", "pid": 41, "host": "far", "state": "running", "memory": 2**31, "log": "engine-0.log"},
        {"name": "engine 1", "pid": 42, "host": "far", "state": "running", "memory": 2**31, "silent": silent,
         "silent_for": 240.0, "log": "engine-1.log"},
    ]  # fmt: skip
    found = {"written": time.time(), "stage": "in take for 244 s", "actors": actors}
    (run / "actors.json").write_text(json.dumps(found), encoding="utf-8")


def format_alone(folder: Path) -> None:
    def line(i: int) -> dict[str, Any]:
        form = min(1.0, 0.2 + i / 30)
        parts = {"reward/format": form, "reward/answer": 0.05, "reward/mean": 0.5 * form + 0.05}
        return {"step": i, **metrics_of(i), **parts, "accuracy/mean": 0.05}

    write(folder, [line(i) for i in range(1, STEPS)])


FAULTS = {
    dead_groups: ("Dead groups", "In 97% of the groups, all rollouts have the same reward"),
    length_explosion: ("Lengths grow", "Rollouts have grown from 195 to 427 tokens, and the reward from 0.3 to 0.3"),
    starving_source: ("A source starves", "Source 'code' provided 0.0% of the"),
    hung_engine: ("engine 1", "uses neither CPU nor a disk and does not answer"),
    format_alone: (
        "Format learned, task not",
        "reward/format has gone from 0.38 to 1.00 while the accuracy stays at 5.0%",
    ),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_newcomer_finds_a_planted_fault_on_the_first_page(browser: Browser, tmp_path: Path, fault: Any) -> None:
    title, text = FAULTS[fault]
    fault(tmp_path / "bad")
    with served(tmp_path / "bad") as address:
        browser.size(1280, 900)
        browser.open(address)
        browser.see(".stands, .trouble", text)
        assert title in browser.text()
        others = [words for words, _ in FAULTS.values() if words != title and words in browser.text()]
        assert not others
        browser.screenshot(fault.__name__)
        if fault is hung_engine:
            browser.click("nav a", "Processes")
            assert "silent" in browser.see("tr", "engine 1").text
        if fault is starving_source:
            browser.see(".ledger tr", "code")


def test_alerts_have_plain_titles_stand_by_cause_and_link_to_what_shows_them(browser: Browser, tmp_path: Path) -> None:
    run = write(tmp_path / "told", [{"step": i, **metrics_of(i)} for i in range(1, STEPS)])
    told = [
        Alert(20, "mylab/slow_sync", "info", "syncs take 50% of a step", "raise rollout.sync_interval"),
        Alert(24, "repeated_phrases", "warning", "40% of the phrases in rollouts are repetitions", "read some"),
        Alert(31, "clip_share", "warning", "clipping removes the gradient of 40%", "lower learner.lr"),
    ]
    append_alerts(run, told)
    with served(run) as address:
        browser.open(address)
        browser.see(".stands li", "Updates are clipped")
        texts = [entry.text for entry in browser.all(".stands li")]
        assert [text.splitlines()[0] for text in texts] == [
            "Updates are clipped at step 31, no longer",
            "Answers repeat themselves at step 24, no longer",
            "mylab/slow_sync at step 20, no longer",
        ]
        assert "Syncs take 50% of a step. Raise rollout.sync_interval." in texts[2]
        browser.click(".stands button", "Read the longest answers")
        browser.see(".chips", "order: longest")


def test_nothing_stands_out_in_a_healthy_run(browser: Browser, tmp_path: Path) -> None:
    write(tmp_path / "good", [{"step": i, **metrics_of(i)} for i in range(1, STEPS)])
    with served(tmp_path / "good") as address:
        browser.open(address)
        browser.see(".chart", "Reward")
        assert not any(each.is_displayed() for each in browser.all(".stands, .trouble, .chart-warning"))


def test_seeds_of_one_experiment_share_a_line(browser: Browser, tmp_path: Path) -> None:
    for seed in (0, 1):
        run = write(tmp_path / "runs" / f"seed-{seed}", [{"step": i, "reward/mean": i + seed} for i in range(1, 9)])
        (run / "config.yaml").write_text(f"name: seed-{seed}\nseed: {seed}\nsteps: 8\n")
    with served(tmp_path / "runs") as address:
        browser.open(address)
        for box in browser.wait(lambda: browser.all(".run input"), "no runs"):
            if not box.is_selected():
                box.click()
                break
        browser.see(".chart-values", "×2")
        assert "8.5" in browser.see(".chart-values", "×2").text
        browser.click(".check")
        browser.wait(lambda: len(browser.all(".chart:first-child .value")) >= 2, "one line for each seed")
