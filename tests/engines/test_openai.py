"""The engine `openai` with a server on this machine: requests, responses, and errors."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsdk.config import check
from rlsdk.contracts import ActorSpec, Completion, Model, Request, Sampling, Weights
from rlsdk.engines import openai
from rlsdk.engines.openai import OpenAI
from rlsdk.errors import ConfigError, EngineError
from rlsdk.readiness.checks import examine

ROOT = Path(__file__).resolve().parents[2]
MODEL = Model(path=str(ROOT / "examples" / "models" / "countdown-nano"), max_length=32)
PROMPT = np.array([5, 6, 7])


class Server(ThreadingHTTPServer):
    """Answers as the test says, and records its requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.choice: dict[str, Any] = {"text": "1+2", "finish_reason": "stop"}
        self.status = 200
        self.busy = 0  # answers with status 429 before the others
        self.drips: tuple[str, ...] = ()  # methods whose answers arrive a byte every 0.1 s
        self.over = threading.Event()
        self.broken = 0  # connections closed without an answer, before them
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "served"}]})

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._answer({"choices": [self.server.choice]})

    def _answer(self, found: Any) -> None:
        self.server.keys.append(self.headers["authorization"])
        body = json.dumps(found).encode()
        self.server.broken -= 1
        if self.server.broken >= 0:
            self.close_connection = True
            return
        self.server.busy -= 1
        self.send_response(429 if self.server.busy >= 0 else self.server.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command not in self.server.drips:
            self.wfile.write(body)
            return
        for byte in body:
            self.wfile.write(bytes([byte]))
            if self.server.over.wait(0.1):
                return

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    """A server in a thread."""
    found = Server()
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.over.set()
    found.shutdown()
    found.server_close()


def started(server: Server, **options: Any) -> OpenAI:
    engine = OpenAI(base_url=server.url, **options)
    engine.start(MODEL, ActorSpec(role="engine"))
    return engine


def answers(engine: OpenAI) -> list[Completion]:
    found, end = [], time.monotonic() + 30
    while engine.unfinished and time.monotonic() < end:
        found += engine.step()
    return sorted(found, key=lambda completion: completion.index)


def test_ids_and_logprobs_of_the_server_are_taken_as_they_are(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    server.choice = {
        "text": "x",
        "finish_reason": "length",
        "token_ids": [8, 9],
        "logprobs": {"token_logprobs": [-0.5, -1]},
    }
    engine = started(server, api_key_env="MY_KEY")
    sampling = Sampling(max_tokens=2, temperature=0.7, stop=(">",))
    engine.add([Request(id="a", prompt_ids=PROMPT, sampling=sampling, n=2, seed=3)])
    first, second = answers(engine)
    assert (first.index, second.index, first.finish) == (0, 1, "length")
    assert first.token_ids.tolist() == [8, 9] and first.logprobs.tolist() == [-0.5, -1.0]
    assert set(server.keys) == {"Bearer secret"}
    asked = sorted(server.asked, key=lambda body: body["seed"])
    assert [body["seed"] for body in asked] == [3, 4]  # continuations differ
    assert asked[0] | {"seed": 0} == {
        "model": "served",
        "prompt": [5, 6, 7],
        "max_tokens": 2,
        "temperature": 0.7,
        "top_p": 1.0,
        "seed": 0,
        "logprobs": 1,
        "return_token_ids": True,
        "stop": [">"],
        "include_stop_str_in_output": True,
    }
    engine.stop()


def test_a_seed_of_zero_is_sent_along(server: Server) -> None:
    engine = started(server)
    engine.add([Request(id="a", prompt_ids=PROMPT, sampling=Sampling(max_tokens=2), n=1, seed=0)])
    answers(engine)
    assert server.asked[0]["seed"] == 0


def test_text_is_tokenised_here_and_ends_as_the_model_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    engine = started(server, model="other", prompts="text")
    engine.add([Request(id="a", prompt_ids=PROMPT, sampling=Sampling(max_tokens=9))])
    [found] = answers(engine)
    tokens = engine._tokenizer.encode("1+2", add_special_tokens=False)
    assert found.token_ids.tolist() == [*tokens, engine._ends[0]]
    assert found.logprobs.tolist() == [0.0] * len(found.token_ids) and found.finish == "stop"
    assert server.asked[0]["model"] == "other" and isinstance(server.asked[0]["prompt"], str)
    assert not {"logprobs", "return_token_ids"} & set(server.asked[0])  # other servers refuse what they do not know
    assert server.keys == [None]
    engine.stop()


def test_aborted_requests_end_at_once_and_others_go_on(server: Server) -> None:
    engine = started(server, parallel=1)
    engine.add([Request(id=name, prompt_ids=PROMPT, sampling=Sampling(max_tokens=4)) for name in "abc"])
    [gone] = engine.abort(["c"])
    assert (gone.request, gone.finish, len(gone.token_ids)) == ("c", "abort", 0)
    assert {completion.request for completion in answers(engine)} == {"a", "b"}
    engine.stop()


def test_a_busy_server_is_asked_again_within_the_timeout(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "FIRST_RETRY", 0.01)
    engine = started(server)
    request = Request(id="a", prompt_ids=PROMPT, sampling=Sampling(max_tokens=4))
    server.broken, server.busy = 1, 2
    engine.add([request])
    assert [completion.request for completion in answers(engine)] == ["a"]
    assert len(server.asked) == 4
    engine.stop()
    engine = started(server, timeout=0.2)
    server.busy = 1000
    engine.add([request])
    with pytest.raises(EngineError, match="/completions answered with status 429"):
        answers(engine)
    engine.stop()


def test_an_aborted_request_is_not_sent_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "FIRST_RETRY", 60)
    engine = started(server, parallel=1)
    server.busy = 1
    engine.add([Request(id="a", prompt_ids=PROMPT, sampling=Sampling(max_tokens=4))])
    while not server.asked:
        time.sleep(0.01)
    engine.abort()
    engine.add([Request(id="b", prompt_ids=PROMPT, sampling=Sampling(max_tokens=4))])  # needs the only thread
    assert [completion.request for completion in answers(engine)] == ["b"]
    assert len(server.asked) == 2
    engine.stop()


@pytest.mark.parametrize("command", ["GET", "POST"])
def test_an_answer_that_arrives_byte_by_byte_ends_at_the_timeout(
    server: Server, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(openai, "LATE_SECONDS", 0.1)
    server.drips, server.choice["text"] = (command,), "1+2" * 1000
    with pytest.raises(EngineError, match=r"gave no complete answer within 0\.5 s \(engine\.timeout\)$"):
        engine = started(server, timeout=0.5)
        engine.add([Request(id="a", prompt_ids=PROMPT, sampling=Sampling(max_tokens=4))])
        answers(engine)


def test_a_missing_key_and_a_missing_server_are_named(server: Server) -> None:
    engine = started(server, api_key_env="THE_KEY")
    server.status = 401
    engine.add([Request(id="a", prompt_ids=PROMPT, sampling=Sampling(max_tokens=4))])
    with pytest.raises(EngineError, match="status 401: set the key in the environment variable THE_KEY"):
        answers(engine)
    engine.stop()
    nobody = OpenAI(base_url="http://127.0.0.1:1/v1")
    with pytest.raises(EngineError, match=r"http://127.0.0.1:1/v1 cannot be reached"):
        nobody.start(MODEL, ActorSpec(role="engine"))


def test_training_is_refused_in_words_before_anything_starts_and_evaluation_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    plan = check(ROOT / "examples" / "quickstart.yaml", ["engine={use: openai, base_url: 'http://127.0.0.1:1/v1'}"], ())
    with pytest.raises(ConfigError, match=r"engine: the engine `openai` samples on .* no model can be trained"):
        examine(plan).require()
    assert not examine(plan, trains=False).faults
    engine = plan.plugins.resolve(plan.engine)
    for refused in (lambda: engine.load_weights(Weights(1, {}, {})), lambda: engine.logprobs(PROMPT)):
        with pytest.raises(EngineError, match="no model can be trained with it"):
            refused()
