"""Training on conversations of a model without a chat template, which a file has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

import rlsdk
from tests.run.conftest import TASK

pytestmark = [pytest.mark.stack, pytest.mark.slow]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
"""The text of a conversation alone, so that prompts have the tokens of the same prompts as text."""


def write_conversations(file: Path, split: str) -> dict[str, Any]:
    """Write countdown tasks as conversations, and return their source."""
    options = {**TASK, "split": split, "size": 16}
    tasks = rlsdk.load("tasks", options.pop("use"), **options)()
    rows = ({"prompt": [{"role": "user", "content": task.prompt}], "answer": task.answer} for task in tasks)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"use": "jsonl", "path": str(file), "source": "countdown"}


def test_conversations_train_like_the_same_text_and_exports_carry_the_template(runner: Any, tmp_path: Path) -> None:
    short = ("engine=transformers", "steps=2", "rollout.workers=1", "tasks.train.size=16", "tasks.eval.size=16")
    runner.train(*short, "name=text")
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    config = yaml.safe_load(runner.config.read_text())
    config["model"]["renderer"] = {"file": "chat.jinja"}
    config["tasks"] = {
        name: write_conversations(tmp_path / f"{name}.jsonl", split)
        for name, split in (("train", "train"), ("eval", "test"))
    }
    runner.config.write_text(yaml.safe_dump(config))
    runner.train(*short[:3], "name=chat")
    text, chat = runner.summary("text"), runner.summary("chat")
    assert text["accuracy_after"] == chat["accuracy_after"] and text["accuracy_before"] == chat["accuracy_before"]
    assert AutoTokenizer.from_pretrained(chat["export"]).chat_template == TEMPLATE
    command = [sys.executable, "-m", "rlsdk.cli", "eval", str(runner.config), *short[:2], "--json"]
    for more in (
        ("--checkpoint", str(runner.path("chat"))),
        ("--checkpoint", chat["export"], "model.renderer=template", "name=own"),
    ):
        ran = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        assert json.loads(ran.stdout)["accuracy"] == chat["accuracy_after"]
