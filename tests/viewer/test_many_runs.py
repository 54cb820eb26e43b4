"""The page for many runs in headless Chromium: finding, comparing and telling them apart, while some of them train."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from rlsdk.runlog.alerts import Alert, append_alerts
from rlsdk.runlog.tables import evaluated_entries
from rlsdk.types import Score
from tests.viewer.browser import Browser, chromium, served
from tests.viewer.recorded import fill, group, make_run

RUNS = 13
"""More than there are colours, and enough for the list to be searched."""
BEGIN = "qwen-math-"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        found.size(1280, 900)
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for n in range(RUNS):
        run = make_run(folder / f"{BEGIN}{n}", steps=2)
        # Each run is an experiment of its own.
        (run / "config.yaml").write_text(f"name: {run.name}\nsteps: 8\nbatch_size: {n + 1}\nbetas: [0.9, 0.9{n}]\n")
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(folder) as where:
        yield where


@pytest.fixture
def page(browser: Browser, address: str) -> Browser:
    browser.open(address)
    browser.see(".chart", "Reward")
    browser.errors()
    return browser


def find(page: Browser, words: str, count: int) -> None:
    """Type words, and wait until the list has as many runs as match."""
    page.see(".side input").send_keys(words)
    page.wait(lambda: len(page.all(".run")) == count, f"{words} finds other runs")


def compare_four(page: Browser) -> None:
    find(page, "math 1", 4)  # 1, 10, 11, 12
    page.click(".runs .link", "Compare these 4")
    page.see("h1", "4 runs")


def test_runs_are_found_by_name_and_compared_in_colours_of_their_own(page: Browser) -> None:
    assert len(page.all(".run")) == RUNS
    compare_four(page)
    page.see(".chart .value", "…12")
    colours = page.run("return [...document.querySelectorAll('.run.on .swatch')].map((each) => each.style.cssText)")
    assert len(set(colours)) == len(colours) == 4
    page.run("document.querySelector('.run input').focus()")
    page.driver.switch_to.active_element.send_keys("\ue007")  # enter
    page.wait(lambda: len(page.all(".run.on")) == 1, "the other runs stay")
    find(page, "nothing", 0)
    page.see(".runs", "No run has this name")
    assert page.errors() == []


def test_findings_of_several_runs_name_their_run_and_open_it(page: Browser, folder: Path) -> None:
    for n in (10, 11):
        append_alerts(
            folder / f"{BEGIN}{n}", [Alert(2, "clip_share", "warning", "clipping: 40%", "lower `learner.lr`")]
        )
    compare_four(page)
    page.see(".stands", "Updates are clipped")
    page.wait(lambda: len(page.all(".stands .link")) == 2, "no runs are named")
    page.click(".stands .link", f"{BEGIN}11")
    page.see("h1", f"{BEGIN}11")
    page.see(".stands code", "learner.lr")
    page.click(".stands .link", "See learner.lr")
    page.see(".settings tr", "[0.9, 0.911]")
    assert page.errors() == []


def test_the_settings_of_several_runs_show_what_differs_beside_their_names(page: Browser) -> None:
    compare_four(page)
    page.click("nav a", "Settings")
    page.see(".settings tr", "batch_size")
    assert [each.text for each in page.all(".settings tbody th")] == ["batch_size", "betas"]


def test_focus_and_open_lists_stay_while_a_run_trains(page: Browser, folder: Path) -> None:
    run = folder / f"{BEGIN}3"

    def train(step: int) -> None:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "reward/mean": 0.7}) + "\n")

    train(6)
    newest = "return document.querySelector('.run-select option').textContent"
    page.wait(lambda: page.run(newest) == run.name, "it is not the first of the list")
    find(page, "math 3", 1)
    page.click(".run-name", run.name)
    page.see("h1", run.name)
    page.run(
        "document.querySelector('.run input').focus(); window.option = document.querySelector('.run-select option')"
    )
    train(7)
    page.see(".run-about", "7 of 8")
    assert page.run("return document.activeElement === document.querySelector('.run input')")
    assert page.run("return window.option.isConnected")


def test_held_out_tasks_are_sorted_by_reward_and_stepped_through_with_arrow_keys(page: Browser, folder: Path) -> None:
    answered = [attrs.evolve(group(n, answers=("an answer",)), scores=[Score(n % 3 / 3)]) for n in (4, 5, 6)]
    fill(folder / f"{BEGIN}5", evaluated_entries(9, {"eval greedy": answered}))
    find(page, "math 5", 1)
    page.click(".run-name", f"{BEGIN}5")
    page.click("nav a", "Held-out")
    page.see(".item.chosen", "What is 4?")
    page.click(".list-pane button", "Lowest reward first")
    page.run("document.querySelector('.list').focus()")
    for key, task in (("\ue013", "What is 6?"), ("\ue015", "What is 4?"), ("\ue015", "What is 5?")):
        page.driver.switch_to.active_element.send_keys(key)
        page.see(".item.chosen", task)
    page.click("nav a", "Rollouts")
    page.see(".item.chosen", "#2")
    page.run("document.querySelector('.list').focus()")
    page.driver.switch_to.active_element.send_keys("\ue015")
    page.see(".item.chosen", "#1")
    assert page.errors() == []
