"""Transcripts in a terminal show texts of models, tools and tasks as data."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from transformers import AutoTokenizer

from rlsdk.cli.debug import show
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.serving.debug import Debugged
from rlsdk.types import Group, Rollout, Score, Task

MODEL = Path(__file__).parents[2] / "examples" / "models" / "countdown-nano"
HOSTILE = "first\n\x1b[2J\x1b]0;title\x07\u202eback"


def test_a_transcript_does_not_act_on_the_terminal_and_keeps_its_lines() -> None:
    task = Task(HOSTILE, HOSTILE)
    group = Group(task, [Rollout.from_text(task, HOSTILE)], [Score.invalid(HOSTILE)])
    codec = ChatTokenizer(AutoTokenizer.from_pretrained(MODEL))
    out = io.StringIO()
    found = Debugged(group=group, seconds=(0.1,), requests=(), notes=(HOSTILE,), codec=codec)
    show(found, Console(file=out, width=200))
    said = out.getvalue()
    assert not {"\x1b", "\x07", "\u202e"} & set(said)
    assert said.count("first\n" + r"\x1b[2J\x1b]0;title\x07\u202eback") >= 4  # prompt, response, reason, note
