"""The page on a real run while it trains: growing curves, rollouts, tokens, processes, held-out tasks, annotation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsdk.annotations import AnnotationFile
from tests.viewer.browser import Browser, chromium, served

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "quickstart.yaml"
START = 400.0
"""Seconds in which a training starts and does a step, on a machine that does much else."""
SETTINGS = (
    "name=live",
    "steps=30",
    "batch_size=8",
    "group_size=8",
    "engine=transformers",
    "placement.engines=1",
    "old_logprobs=learner",
    "eval.every=4",
    "eval.limit=12",
    "save_rollouts=1",
    "checkpoint.export=never",
)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A training in a process of its own; its folder is there, and nothing of it is done yet."""
    command = [sys.executable, "-m", "rlsdk.cli", "train", str(CONFIG), *SETTINGS, f"out={tmp_path}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    yield process
    process.terminate()
    process.communicate(timeout=120)


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.timeout(900)
def test_a_run_is_seen_while_it_trains(training: subprocess.Popen[str], tmp_path: Path) -> None:
    folder = tmp_path / "live"
    with chromium() as page:
        page.wait(lambda: (folder / "config.yaml").is_file() or training.poll() is not None, "no folder", START)
        assert training.poll() is None, training.stdout and training.stdout.read()
        with served(folder) as address:
            follow(page, address)
            assert training.poll() is None, "it has ended, and nothing was clicked while it trained"
            training.wait(600)
            [kept] = AnnotationFile(folder).read()
            assert (kept.kind, kept.value, kept.by) == ("pair", "first", "ann")
            page.click("nav a", "Curves")
            page.see(".head", "finished")
            for width, dark, name in ((1280, False, "curves"), (1280, True, "curves-dark"), (390, False, "phone")):
                page.size(width, 900, dark=dark)
                page.see(".chart", "Held-out accuracy")
                page.wait(lambda: page.run("return document.querySelectorAll('.chart canvas').length") > 5, "no charts")
                page.screenshot(f"view-{name}")
            page.size(1280, 900)
            page.click("nav a", "Rollouts")
            page.keys("jt")
            page.click(".choice button", "Logprob")
            page.screenshot("view-tokens")
            assert page.errors() == []


def follow(page: Browser, address: str) -> None:
    """Click through the pages while steps are added."""
    page.size(1280, 900)
    page.open(address)
    page.see(".chart", "Reward", START)
    first = int(page.see(".progress", "step").text.split()[1])
    page.wait(lambda: int(page.see(".progress").text.split()[1]) > first, "no further step", START)
    page.click("nav a", "Annotate")
    name = page.see("input[name=by]")
    name.clear()
    name.send_keys("ann\ue00c")  # escape: the next keys are the page's
    page.see(".question .column", "<answer>")
    page.keys("1")
    page.see(".annotate-progress", "1 done")
    page.click("nav a", "Processes")
    page.see("tr", "driver")
    page.see(".log", "training begins")
    page.click("nav a", "Rollouts")
    page.see(".detail h2", "countdown/train")
    page.keys("t")
    page.see(".token-detail", "logprob, engine")  # that of the learner is there for trained groups alone
    page.keys("t")
    page.see(".turn.policy", "<answer>")
    page.click("nav a", "Held-out")
    page.see(".timeline button", "0")
    page.see(".column", "<answer>")
