"""`rlsdk train --mode serve` as a process, with both engines: OpenAI's client, new checkpoints, and its end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsdk.checkpoints.checkpoint import EXPORT, LEARNER, Checkpoints
from tests.run.conftest import CONFIG, alive, descendants, wait_for

openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.slow, pytest.mark.stack]
ASK = {"model": "nano", "prompt": "3,5,17>9:", "max_tokens": 12, "temperature": 0}


class Serving:
    """A run's folder with one checkpoint, and the process that serves it."""

    def __init__(self, folder: Path, model: Path, engine: str) -> None:
        self.model, self.run = model, folder / "run"
        self.log = folder / "console.log"
        config = {**CONFIG, "out": str(folder), "model": {"path": str(model), "max_length": 512}, "engine": engine}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        self.run.mkdir()
        shutil.copy(folder / "config.yaml", self.run)
        self.foreign = self.run / "serve" / "cache" / "engine-0" / "program.so"
        self.foreign.parent.mkdir(parents=True)
        self.foreign.touch()
        self.save(1, 1.0)
        command = [sys.executable, "-m", "rlsdk.cli", "train", str(folder / "config.yaml"), "--mode", "serve"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--port", "0", "--served-name", "nano"],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, "RLSDK_API_KEY": "sesame"},
            )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, self.log.read_text()
        self.client = openai.OpenAI(base_url=self.url, api_key="sesame", timeout=120, max_retries=0)

    def save(self, step: int, factor: float) -> None:
        """Write a checkpoint whose model is the shipped one, its last norm times a factor."""
        from safetensors.torch import load_file, save_file

        def write(partial: Path) -> None:
            (partial / LEARNER).mkdir()
            shutil.copytree(self.model, partial / EXPORT)
            tensors = load_file(self.model / "model.safetensors")
            tensors["model.norm.weight"] *= factor
            save_file(tensors, partial / EXPORT / "model.safetensors", {"format": "pt"})

        sections = {"plugins": {}, "tasks": {}, "production": {}, "components": {}}
        Checkpoints(self.run, keep=3).save(step, sections, write)

    def step(self) -> Any:
        """Return the step that is served."""
        return self.client.models.retrieve("nano").step


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def serving(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Serving]:
    made = Serving(tmp_path_factory.mktemp(request.param), model, request.param)
    yield made
    if made.process.poll() is None:
        os.killpg(made.process.pid, signal.SIGKILL)
    made.process.communicate()


def test_openais_client_is_answered(serving):
    client = serving.client
    assert [m.id for m in client.models.list()] == ["nano"] and serving.step() == 1
    whole = client.completions.create(**ASK, n=2, logprobs=2, extra_body={"return_token_ids": True})
    one, two = whole.choices
    assert one.text == two.text and one.versions == [1] * len(one.token_ids)
    assert [max(top, key=top.get) for top in one.logprobs.top_logprobs] == one.logprobs.tokens
    likeliest = [max(top.values()) for top in one.logprobs.top_logprobs]
    assert likeliest == pytest.approx(one.logprobs.token_logprobs, abs=1e-4)
    lists = client.completions.create(**{**ASK, "prompt": [ASK["prompt"], "3,5>8:"]})
    assert lists.choices[0].text == one.text and len(lists.choices) == 2
    chat = {"model": "nano", "messages": [{"role": "user", "content": ASK["prompt"]}], "max_tokens": 12}
    said = client.chat.completions.create(**chat, temperature=0, logprobs=True, top_logprobs=1).choices[0]
    assert said.message.content == one.text
    assert all(t.token == t.top_logprobs[0].token for t in said.logprobs.content)
    seeded = [client.chat.completions.create(**chat, n=3, seed=4).choices for _ in range(2)]
    assert [c.message.content for c in seeded[0]] == [c.message.content for c in seeded[1]]
    chunks = list(client.completions.create(**ASK, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == one.text
    with pytest.raises(openai.BadRequestError, match="leave no room") as full:
        client.completions.create(**{**ASK, "prompt": [5] * 600})
    assert full.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="guess").models.list()


def test_no_compiled_program_of_the_runs_folder_is_used(serving):
    assert not serving.foreign.exists()


def test_a_long_answer_comes_in_many_chunks(serving):
    long = {**ASK, "max_tokens": 400, "extra_body": {"ignore_eos": True}, "stream": True}
    chunks = list(serving.client.completions.create(**long))
    assert len(chunks) > 2


def test_new_checkpoints_are_taken_up_and_a_damaged_one_is_not(serving):
    before = serving.client.completions.create(**ASK, logprobs=0).choices[0].logprobs.token_logprobs
    serving.save(2, 0.1)
    wait_for(lambda: serving.step() == 2, 120)
    found = serving.client.completions.create(**ASK, logprobs=0, extra_body={"return_token_ids": True})
    assert set(found.choices[0].versions) == {2} and found.system_fingerprint == "step-2"
    assert found.choices[0].logprobs.token_logprobs[0] != pytest.approx(before[0], abs=1e-3)
    serving.save(3, 1.0)
    (serving.run / "checkpoints" / "step-3" / EXPORT / "model.safetensors").write_bytes(b"nothing")
    serving.save(4, 1.0)
    wait_for(lambda: serving.step() == 4, 120)
    assert "now serving the checkpoint of step 4" in serving.log.read_text()


def test_zz_sigterm_finishes_in_flight_requests(serving):
    family = descendants(serving.process.pid)
    long = {**ASK, "max_tokens": 400, "extra_body": {"ignore_eos": True}, "stream": True}
    stream = serving.client.completions.create(**long)
    first = next(iter(stream))
    os.kill(serving.process.pid, signal.SIGTERM)
    rest = list(stream)
    assert (rest or [first])[-1].choices[0].finish_reason == "length"
    assert serving.process.wait(120) == 0, serving.log.read_text()
    assert "ending once the requests in progress are finished" in serving.log.read_text()
    wait_for(lambda: not alive(family), 60)
