"""Six recorded trainings with a planted fault, each of which a newcomer finds with a few clicks.

tools/bad_runs.py planted the faults, trained, and wrote the archives.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.viewer.browser import Browser, chromium, served

ARCHIVES = Path(__file__).parent / "bad_runs"
MOST_CLICKS = 6


class Newcomer:
    """Clicks on the page, and counts the clicks.

    Attributes:
        page: The page.
        clicks: Number of clicks so far.
    """

    def __init__(self, page: Browser) -> None:
        self.page = page
        self.clicks = 0

    def click(self, selector: str, text: str = "") -> None:
        self.clicks += 1
        self.page.click(selector, text)

    def follow(self, finding: str, link: str) -> None:
        """Click a link of the finding with this title."""
        entry = self.page.see(".stands li", finding)
        assert entry.text.startswith(finding)
        links = {button.text: button for button in entry.find_elements("css selector", "button")}
        assert link in links
        self.clicks += 1
        links[link].click()

    def reads(self, selector: str, text: str = "") -> str:
        """Return the text of an element that is seen."""
        return str(self.page.see(selector, text).text)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@contextmanager
def opened(browser: Browser, folder: Path, name: str) -> Iterator[Newcomer]:
    """Open the page of a recorded run at its beginning."""
    with tarfile.open(ARCHIVES / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    with served(folder / name) as address:
        browser.size(1280, 900)
        browser.open(address)
        browser.see(".chart", "Reward")
        browser.errors()
        newcomer = Newcomer(browser)
        yield newcomer
        browser.screenshot(name)
        assert browser.errors() == []
        assert newcomer.clicks <= MOST_CLICKS


def paid_for_form(newcomer: Newcomer) -> None:
    """The reward pays ten times as much for a plain sum as for the right answer."""
    told = newcomer.reads(".stands li", "Format learned, task not")
    assert "reward/format has gone from 0.72 to 1.00 while the accuracy stays" in told
    newcomer.follow("Format learned, task not", "Read the newest answers")
    newcomer.click(".item", "is not the target")
    score = newcomer.reads(".score", "is not the target")
    assert re.search(r"reward 1\b.*format 1\b.*countdown 0\b", score, re.DOTALL)
    newcomer.click("nav a", "Settings")
    assert [newcomer.reads(".settings tr", f"reward.{i}.weight") for i in (0, 1)] == [
        "reward.0.weight 1",
        "reward.1.weight 0.1",
    ]


def learning_rate(newcomer: Newcomer) -> None:
    """The learning rate is twenty times too high; the run ended because it no longer learned anything."""
    assert newcomer.reads(".stands li:first-child").startswith("Updates go too far")
    newcomer.follow("Updates go too far", "Show the curve")
    assert "Healthy: below 0.1" in newcomer.reads("dialog.large")
    newcomer.click("dialog.large button", "Close")
    newcomer.follow("Updates go too far", "See learner.lr")
    assert newcomer.reads(".sought") == "learner.lr 0.008"


def wrong_answers(newcomer: Newcomer) -> None:
    """The targets of one of two sources have slipped by one row."""
    newcomer.follow("A source is never solved", "Read answers of more_sums")
    newcomer.click(".item", "is not the target")
    asked = re.search(r">(\d+):", newcomer.reads(".turn.user"))
    expected = re.search(r"is not the target (\d+)", newcomer.reads(".score"))
    assert asked and expected and asked[1] != expected[1]


def cut_off(newcomer: Newcomer) -> None:
    """Answers need ten tokens and may have six."""
    assert "100%" in newcomer.reads(".stands li", "Answers are cut off")
    newcomer.follow("Answers are cut off", "Read answers that were cut off")
    assert "truncated" in newcomer.reads(".detail .item-about", "truncated")
    assert "</answer>" not in newcomer.reads(".turn.policy")
    newcomer.click("nav a", "Curves")
    newcomer.follow("Answers are cut off", "See sampling.max_tokens")
    assert newcomer.reads(".sought") == "sampling.max_tokens 6"


def careless_reward(newcomer: Newcomer) -> None:
    """The reward raises for answers without a minus."""
    newcomer.follow("Answers without a score", "Read why they have no score")
    reason = newcomer.reads(".detail .trouble", "No score")
    assert "IndexError: list index out of range (runs/bad/bad_runs_lab.py, line" in reason
    assert "-" not in newcomer.reads(".turn.policy .content")


def hungry_engine(newcomer: Newcomer) -> None:
    """The engine keeps data that it never uses, and ends when it has too much of it."""
    assert "engine 0 died 4 times" in newcomer.reads(".head .trouble")
    newcomer.click("nav a", "Processes")
    newcomer.click("tr", "engine 0")
    log = newcomer.reads(".log", "MiB of scores are kept for later")
    assert log.count("at most 512 MiB: it ends") == 4
    newcomer.click(".tab", "driver")
    assert newcomer.reads(".log .line.warn", "engine died and will be replaced")


SCRIPTS: list[Callable[[Newcomer], None]] = [paid_for_form, hungry_engine]
SLOW: list[Callable[[Newcomer], None]] = [learning_rate, wrong_answers, cut_off, careless_reward]


@pytest.mark.parametrize(
    "script",
    [*SCRIPTS, *(pytest.param(script, marks=pytest.mark.slow) for script in SLOW)],
    ids=lambda script: script.__name__,
)
def test_a_newcomer_finds_the_fault_of_a_recorded_run(
    browser: Browser, tmp_path: Path, script: Callable[[Newcomer], None]
) -> None:
    with opened(browser, tmp_path, script.__name__) as newcomer:
        script(newcomer)
