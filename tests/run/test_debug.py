"""`rlsdk debug`: an engine in one process, workflows in others, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from tests.run.conftest import CONFIG, alive, descendants, title_of, wait_for

TOKENS = {"logprobs": 0, "return_token_ids": True}
pytestmark = [pytest.mark.slow, pytest.mark.stack]

LAB = '''
import rlsdk

@rlsdk.workflow("twice")
async def twice(task, chat):
    """Asks twice."""
    await chat.sample(max_tokens=4)
    chat.say("{said}")
    await chat.sample(max_tokens=4)
    return chat.finish()
'''


class Debugging:
    """A folder with a configuration, and the engine that serves it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.config = folder, folder / "config.yaml"
        changed = {"out": str(folder), "model": {"path": str(model), "max_length": 32}, "engine": "transformers"}
        self.config.write_text(yaml.safe_dump({**CONFIG, **changed}))
        command = [sys.executable, "-m", "rlsdk.cli", "debug", "engine", str(self.config)]
        with (folder / "console.log").open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, (folder / "console.log").read_text()

    def workflow(self, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """`rlsdk debug workflow`, with Ray nowhere in its process."""
        code = "import sys; sys.modules['ray'] = None; from rlsdk.cli import main; main(sys.argv[1:])"
        command = [sys.executable, "-c", code, "debug", "workflow", str(self.config), *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=self.folder, timeout=120, check=False)
        assert ran.returncode == status, f"{ran.stdout}\n{ran.stderr}"
        return ran


@pytest.fixture(scope="module")
def debugging(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Debugging]:
    made = Debugging(tmp_path_factory.mktemp("debug"), model)
    yield made
    if made.process.poll() is None:
        os.killpg(made.process.pid, signal.SIGKILL)
    made.process.communicate()


def post(url: str, **body: Any) -> Any:
    response = httpx.post(url, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_engine_answers_and_is_found(debugging):
    file = debugging.folder / "run" / "debug.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(file.read_text())["base_url"] == debugging.url
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/v1", debugging.url)
    (listed,) = httpx.get(debugging.url + "/models").json()["data"]
    assert listed["id"].endswith("countdown-nano")
    found = post(debugging.url + "/completions", prompt="3,5,17>9:", n=2, max_tokens=6, temperature=1.0, **TOKENS)
    for choice in found["choices"]:
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == len(choice["versions"]) <= 6
        assert set(choice["versions"]) == {0}
    ids = found["choices"][0]["prompt_token_ids"]
    greedy = [
        post(debugging.url + "/completions", prompt=p, temperature=0, max_tokens=6, **TOKENS)
        for p in (ids, "3,5,17>9:")
    ]
    assert greedy[0]["choices"][0]["token_ids"] == greedy[1]["choices"][0]["token_ids"]
    messages = [{"role": "user", "content": "3,5,17>9:"}]
    chat = post(debugging.url + "/chat/completions", messages=messages, temperature=0, max_tokens=6)
    assert chat["choices"][0]["message"]["content"] == greedy[0]["choices"][0]["text"]
    long = httpx.post(debugging.url + "/completions", json={"prompt": [5] * 40})
    assert long.json()["error"]["code"] == "context_length_exceeded"


def test_a_workflow_of_a_file_that_is_edited_meanwhile(debugging):
    lab, out = debugging.folder / "lab.py", debugging.folder / "rollouts.jsonl"
    for said in ("3>", "7>"):
        lab.write_text(LAB.replace("{said}", said))
        chosen = ("--plugin", str(lab), "workflow=lab/twice", "--task", "3", "--samples", "2", "--out", str(out))
        ran = debugging.workflow(*chosen)
        assert "reward:" in ran.stdout and f"user: {said}" in ran.stdout and "sampled, in ⟦ ⟧): " in ran.stdout
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert len(rows) == 2
        for row in rows:
            assert [m["role"] for m in row["messages"]] == ["user", "assistant", "user", "assistant"]
            mask, logprobs = np.array(row["loss_mask"]), np.array(row["logprobs"])
            assert mask.sum() == row["metrics"]["tokens"] and len(mask) == len(row["token_ids"])
            assert (logprobs[mask] < 0).all() and not logprobs[~mask].any()
            assert row["valid"] and row["seconds"] > 0


def test_rollouts_are_shown_even_if_they_cannot_be_written(debugging):
    ran = debugging.workflow("--out", str(debugging.folder), status=1)
    assert "reward:" in ran.stdout
    assert f"{debugging.folder}: Is a directory" in ran.stderr


def test_zz_ctrl_c_ends_it_with_status_0_and_nothing_left(debugging):
    family = descendants(debugging.process.pid)
    assert len(family) > 3  # Ray and the engine
    os.kill(debugging.process.pid, signal.SIGINT)
    assert debugging.process.wait(60) == 0, (debugging.folder / "console.log").read_text()
    wait_for(lambda: not alive(family), 20)
    assert not (debugging.folder / "run" / "debug.json").exists()


def test_zz_a_killed_engine_ends_it_with_its_name(model, tmp_path):
    other = Debugging(tmp_path, model)
    family = descendants(other.process.pid)
    engine = next(process for process in family if title_of(process).startswith("ray::EngineActor"))
    engine.kill()
    assert other.process.wait(60) == 1
    said = (tmp_path / "console.log").read_text()
    assert re.search(
        r"rlsdk: engine \d failed while serving: its process died: it crashed, or something killed it", said
    )
    wait_for(lambda: not alive(family), 20)
    assert not (tmp_path / "run" / "debug.json").exists()
