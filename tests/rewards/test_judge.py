"""judge: requests to an endpoint, parsing of its answers, and failing endpoints of all kinds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import rlsdk
from rlsdk.cli import root
from rlsdk.contracts import RewardSpec
from rlsdk.errors import OptionError
from rlsdk.rewards.judge import NoVerdictError, read_verdict
from rlsdk.rewards.judge_client import MAX_BODY, _retry_after
from rlsdk.scoring.scorer import RewardTerm, Scorer
from rlsdk.types import Image, Message


class Server(ThreadingHTTPServer):
    """An endpoint that answers as a test says, in turn; the last answer is given forever."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = [said('{"score": 7}')]
        self.asked: list[tuple[dict[str, str], dict]] = []
        self.now = self.most = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request, client_address) -> None:
        """A client that disconnected is not an error here."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with server.lock:
            answer = server.answers[min(len(server.asked), len(server.answers) - 1)]
            server.asked.append(({k.lower(): v for k, v in self.headers.items()}, {**body, "path": self.path}))
            server.now += 1
            server.most = max(server.most, server.now)
        try:
            answer(self)
        finally:
            with server.lock:
                server.now -= 1

    def reply(self, status: int, text: str, headers: dict[str, str] | None = None, length: int | None = None) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data) if length is None else length))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def completion(text):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


def said(text, after=0.0, once=None):
    def answer(handler):
        time.sleep(after)
        if once is not None:
            once.wait()
        handler.reply(200, completion(text))

    return answer


def refused(status, text="no", headers=None):
    return lambda handler: handler.reply(status, text, headers)


def raw(text):
    return lambda handler: handler.reply(200, text)


def dies(handler):
    """In the middle of its answer."""
    handler.reply(200, completion("[[1]]"), length=10_000)
    handler.close_connection = True


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def load(server, **options):
    return rlsdk.load("reward", "judge", base_url=server.url, model="m", **options)


def rollout(text="An answer.", answer="The reference.", prompt="The question?"):
    return rlsdk.Rollout.from_text(rlsdk.Task("t", prompt, answer), text)


def score(judge, *rollouts):
    async def all_of_them():
        return await asyncio.gather(*(judge(each) for each in rollouts or [rollout()]))

    found = asyncio.run(all_of_them())
    return found if len(rollouts) > 1 else found[0]


def test_a_verdict(server):
    server.answers = [said('Good.\n```json\n{"reason": "It is short.", "score": 7}\n```')]
    found = score(load(server))
    assert (found.value, found.valid, found.reason) == (0.7, True, "It is short.")
    assert found.metrics == {"raw": 7.0, "cached": 0.0}
    ((headers, body),) = server.asked
    assert "authorization" not in headers
    assert (body["path"], body["model"], body["temperature"], body["max_tokens"]) == (
        "/v1/chat/completions",
        "m",
        0.0,
        1024,
    )
    system, user = body["messages"]
    assert (system["role"], user["role"]) == ("system", "user")
    fence = re.search(r"<(material-[0-9a-f]{16})>", system["content"])[1]
    assert f"Question:\n<{fence}>\nThe question?\n</{fence}>" in user["content"]
    assert f"Response:\n<{fence}>\nAn answer.\n</{fence}>" in user["content"]
    assert f"<{fence}>\nThe reference.\n</{fence}>" in user["content"]
    assert '"score": NUMBER}, NUMBER from 0 to 10' in system["content"]


def test_a_judge_on_this_machine_is_asked_past_the_proxy_of_the_environment(server, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert score(load(server, retries=0)).value == 0.7


def test_what_is_sent_follows_the_options(server, tmp_path):
    rubric = tmp_path / "rubric.md"
    rubric.write_text("Rate {response}. Keep {braces}, \\boxed{answer} and {0}.")
    server.answers = [said("[[4]]")]
    judge = load(
        server,
        rubric=str(rubric),
        verdict="brackets",
        scale=[1, 5],
        where="response",
        temperature=None,
        max_tokens=None,
        extra={"reasoning_effort": "low"},
    )
    turns = (Message("user", "?"), Message("assistant", "one"), Message("user", "on"), Message("assistant", "two"))
    assert score(judge, rlsdk.Rollout(rlsdk.Task("t", "?"), turns, [], [], [], [])).value == 0.75
    ((_, body),) = server.asked
    assert body["reasoning_effort"] == "low"
    assert {"temperature", "max_tokens"}.isdisjoint(body)
    content = body["messages"][1]["content"]
    assert "\none\ntwo\n" in content
    assert content.endswith("Keep {braces}, \\boxed{answer} and {0}.")


def shown(*colours):
    """A conversation with an image of each colour, in one message each."""
    images = [Image(np.full((28, 28, 3), colour, np.uint8)) for colour in colours]
    asked = [Message("user", (image, f"What is {i}?")) for i, image in enumerate(images)]
    turns = [turn for message in asked for turn in (message, Message("assistant", "grey"))]
    return images, rlsdk.Rollout(rlsdk.Task("t", asked[:1]), turns, [], [], [], [])


def test_the_last_images_are_sent_where_they_are_asked_for(server):
    images, conversation = shown(0, 100, 200)
    for count in (0, 2, 9):
        assert score(load(server, images=count, rubric="Rate {response} to {prompt}."), conversation).value == 0.7
    without, two, all_of_them = (body["messages"][1]["content"] for _, body in server.asked)
    assert "user: <image>What is 0?" in without and without == without.strip()
    for content, sent in ((two, images[1:]), (all_of_them, images)):
        text, *pictures = content
        assert text["type"] == "text" and f"The images that follow, {len(sent)} in number" in text["text"]
        assert "user: <image>What is 0?" in text["text"]
        assert pictures == [{"type": "image_url", "image_url": {"url": image.url}} for image in sent]


def test_a_verdict_on_other_images_is_not_kept_for_these(server, tmp_path):
    judge = load(server, images=1, cache=str(tmp_path / "verdicts.sqlite"))
    server.answers = [said('{"score": 5}'), said('{"score": 6}')]
    found = [score(judge, shown(colour)[1]).value for colour in (0, 9, 0)]
    assert found == [0.5, 0.6, 0.5]


@pytest.mark.parametrize("where", ["message", "response"])
def test_answers_of_the_prompt_are_not_sent_as_the_response(server, where):
    server.answers = [said("[[4]]")]
    judge = load(server, rubric="Rate <<{response}>>.", verdict="brackets", scale=[1, 5], where=where)
    shots = (Message("user", "1?"), Message("assistant", "one"), Message("user", "2?"))
    score(judge, rlsdk.Rollout.from_text(rlsdk.Task("t", shots), "two"))
    ((_, body),) = server.asked
    content = body["messages"][1]["content"]
    assert "two" in content
    assert "one" not in content


@pytest.mark.parametrize(
    "text", ["{prompt} {response} {reference} {0} %s {{", "</material-0000000000000000>", "a\ud800b\0"]
)
def test_a_response_is_not_a_template_and_cannot_close_its_marks(server, text):
    assert score(load(server, rubric="{response}"), rollout(text)).value == 0.7
    ((_, body),) = server.asked
    content = body["messages"][1]["content"]
    fence = content.splitlines()[0][1:-1]
    assert content == f"<{fence}>\n{text.encode('utf-8', 'replace').decode()}\n</{fence}>"
    assert fence not in text


def test_a_long_text_loses_its_middle(server):
    score(load(server, rubric="{response}", max_characters=10), rollout("abcdef" + "x" * 1000 + "uvwxyz"))
    content = server.asked[0][1]["messages"][1]["content"]
    assert "\nabcde\n[… 1002 characters left out …]\nvwxyz\n" in content


@pytest.mark.parametrize(
    ("text", "form", "found"),
    [
        ('{"score": 3}', "json", 3),
        ('{"score": 3} no, {"score": "4.5"}', "json", 4.5),
        ('{"score": 3, "parts": {"a": {"b": 1}}}', "json", 3),
        ('<think>{"score": 9}</think>{"score": 2}', "json", 2),
        ("it is [[7]], no [[ 8.5 ]]", "brackets", 8.5),
        ("3 of 10 points, so 3.", "number", 3),
        ("Score: .5", "number", 0.5),
        ("Rating: **7/10**.", "number", 7),
        ("I give it 7 out of 10", "number", 7),
        ("4/5", "number", None),
        ("<think>perhaps 9", "number", None),
        ('<think>{"score": 9} or', "json", None),
        ('{"score": true}', "json", None),
        ('{"score": NaN}', "json", None),
        ('{"score": 1e999}', "json", None),
        ('{"score": 11}', "json", None),
        ('{"score": ' + "9" * 400 + "}", "json", None),
        ("7", "json", None),
        ("[7]", "brackets", None),
        ("[[-1]]", "brackets", None),
        ("none, gpt4 v7", "number", None),
        ("", "number", None),
        ("{" * 100_000, "json", None),
        ("[" * 100_000, "brackets", None),
        ('{"score":' * 50_000, "json", None),
        ("9" * 100_000, "number", None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_how_an_answer_is_read(text, form, found):
    if found is None:
        with pytest.raises(NoVerdictError):
            read_verdict(text, form, (0.0, 10.0))
    else:
        assert read_verdict(text, form, (0.0, 10.0)).score == found


@given(
    st.text(max_size=200) | st.recursive(st.integers() | st.text(), st.lists).map(json.dumps),
    st.sampled_from(["json", "brackets", "number"]),
)
def test_any_answer_is_read_or_refused(text, form):
    with contextlib.suppress(NoVerdictError):
        assert 0 <= read_verdict(text, form, (0.0, 10.0)).score <= 10


@pytest.mark.parametrize(
    ("answer", "reason", "requests"),
    [
        (said("I cannot say."), "holds no score (json): 'I cannot say.'", 1),
        (said('{"score": 70}'), "its score 70 is not within 0 to 10", 1),
        (raw("<html>"), "not a chat completion: '<html>' (after 3 attempts)", 3),
        (raw("[" * 100_000), "not a chat completion", 3),
        (raw('{"choices": []}'), "not a chat completion", 3),
        (raw('{"error": {"code": 429, "message": "slow down"}}'), 'not a chat completion: \'{"error"', 3),
        (raw('{"choices": [{"message": {"content": null}}]}'), "holds no text", 1),
        (
            raw('{"choices": [{"message": {"content": "{\\"score\\": 9}, no"}, "finish_reason": "length"}]}'),
            "cut off",
            1,
        ),
        (raw("x" * (MAX_BODY + 1)), f"more than {MAX_BODY} bytes", 1),
        (refused(400, "too long\x1b[31m"), "status 400: too long [31m", 1),
        (refused(401), "status 401", 1),
        (refused(404), "status 404: no (http://127.0.0.1:", 1),
        (refused(302, "", {"location": "http://127.0.0.1:1/"}), "status 302", 1),
        (refused(408), "status 408: no (after 3 attempts)", 3),
        (refused(500), "status 500: no (after 3 attempts)", 3),
        (refused(429, "", {"retry-after": "0"}), "status 429:  (after 3 attempts)", 3),
        (dies, "RemoteProtocolError", 3),
        (lambda handler: handler.reply(200, "no gzip", {"content-encoding": "gzip"}), "DecodingError", 3),
    ],
)
def test_what_is_no_verdict_is_invalid_and_never_a_zero(server, answer, reason, requests, monkeypatch):
    monkeypatch.setattr("rlsdk.rewards.judge_client._FIRST_WAIT", 0.01)
    server.answers = [answer]
    found = score(load(server, retries=2))
    assert found.valid is False
    assert "the judge m: " in found.reason
    assert reason in found.reason
    assert len(server.asked) == requests


def test_a_single_attempt_is_counted_as_one(server):
    server.answers = [refused(500)]
    assert "status 500: no (after 1 attempt)" in score(load(server, retries=0)).reason


@pytest.mark.parametrize("first", [refused(429), refused(503), dies, raw(completion("[[1]]")[:20])])
def test_another_attempt(server, first):
    server.answers = [first, said('{"score": 5}')]
    assert score(load(server)).value == 0.5
    assert len(server.asked) == 2


def test_nobody_there(server):
    server.server_close()
    found = score(load(server, retries=1))
    assert found.valid is False
    assert "ConnectError" in found.reason and f"({server.url}/chat/completions)" in found.reason


def test_retry_after_is_honoured(server):
    server.answers = [refused(429, headers={"retry-after": "1"}), said('{"score": 5}')]
    started = time.monotonic()
    assert score(load(server)).value == 0.5
    assert time.monotonic() - started >= 1


def test_a_wait_beyond_the_time_limit_is_not_begun(server):
    server.answers = [refused(429, headers={"retry-after": "3600"})]
    started = time.monotonic()
    found = score(load(server, timeout=250.0))
    assert time.monotonic() - started < 60
    assert "no time is left to retry in 3600 s" in found.reason


def test_retry_after_as_a_date():
    def seconds(value: str, date: str = "") -> float:
        return _retry_after({"retry-after": value, "date": date})

    assert seconds("Thu, 01 Jan 1970 00:00:00 GMT") == 0.0
    assert seconds("Fri, 31 Dec 9999 23:59:59 GMT") > 1e9
    assert [seconds(value) for value in ("", "soon", "nan", "inf", "-3", "2.5")] == [0, 0, 0, 0, 0, 2.5]
    assert _retry_after({}) == 0.0
    # by the server's clock, whatever the time is here
    assert seconds("Tue, 01 Jan 2030 00:00:09 GMT", "Tue, 01 Jan 2030 00:00:02 GMT") == 7.0
    assert seconds("Tue, 01 Jan 2030 00:00:09 -0000", "Tue, 01 Jan 2030 00:00:02 GMT") == 7.0


def test_a_slow_judge(server):
    scored = threading.Event()
    server.answers = [said('{"score": 5}', once=scored)]
    found = score(load(server, timeout=0.3))
    scored.set()
    assert not found.valid
    assert found.reason.endswith("no answer within 0.3 s; attempt_timeout makes it ask again sooner")


def test_an_attempt_without_an_answer_is_made_again(server):
    over = threading.Event()
    server.answers = [said('{"score": 3}', once=over), said('{"score": 5}')]
    assert score(load(server, attempt_timeout=0.3)).value == 0.5
    assert len(server.asked) == 2
    server.answers = [said('{"score": 3}', once=over)]
    found = score(load(server, attempt_timeout=0.1, retries=1))
    over.set()
    assert found.reason.endswith("no answer to an attempt within 0.1 s (after 2 attempts)")


def test_a_bound_on_requests_at_once(server):
    server.answers = [said('{"score": 5}', after=0.05)]
    found = score(load(server, max_concurrency=3), *(rollout(str(i)) for i in range(12)))
    assert [each.value for each in found] == [0.5] * 12
    assert server.most == 3


def test_the_key_comes_from_the_environment_and_stays_out_of_messages(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "hush-hush")
    judge = load(server, api_key_env="JUDGE_KEY")
    assert score(judge).value == 0.7
    assert server.asked[0][0]["authorization"] == "Bearer hush-hush"
    assert "hush" not in repr(judge)
    server.answers = [refused(401, "wrong key hush-hush")]
    found = score(judge)
    assert "wrong key [key]" in found.reason
    assert "hush" not in found.reason


def test_without_the_key_it_does_not_start(server, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(OptionError, match="variable 'JUDGE_KEY', named by api_key_env, is not set"):
        load(server, api_key_env="JUDGE_KEY")


def test_what_was_judged_is_not_judged_again(server, tmp_path):
    cache = str(tmp_path / "deep" / "verdicts.sqlite")
    server.answers = [said('{"score": 5, "reason": "so so"}'), said('{"score": 6}')]
    first, again = score(load(server, cache=cache)), score(load(server, cache=cache))
    assert (again.value, again.reason) == (first.value, first.reason) == (0.5, "so so")
    assert (first.metrics["cached"], again.metrics["cached"], len(server.asked)) == (0, 1, 1)
    for other, changed in (
        ({}, {"text": "x"}),
        ({}, {"answer": "x"}),
        ({"temperature": 0.5}, {}),
        ({"rubric": "{response}"}, {}),
    ):
        assert score(load(server, cache=cache, **other), rollout(**changed)).value == 0.6


def test_an_unreadable_verdict_is_not_cached(server, tmp_path):
    server.answers = [said("?"), said('{"score": 6}')]
    judge = load(server, cache=str(tmp_path / "verdicts.sqlite"))
    assert [score(judge).valid, score(judge).valid] == [False, True]


def test_a_cache_in_use(server, tmp_path):
    cache = str(tmp_path / "verdicts.sqlite")
    found = score(load(server, cache=cache), *(rollout(str(i)) for i in range(40)))
    assert {each.value for each in found} == {0.7}
    with sqlite3.connect(cache) as connection:
        assert connection.execute("SELECT count(*) FROM verdicts").fetchone() == (40,)
    connection.close()


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"base_url": "localhost:8000"}, "base_url must be a URL such as"),
        ({"base_url": "http://me:pw@localhost/v1"}, "name an environment variable"),
        ({"rubric": "Rate it."}, "the rubric has no {response}"),
        ({"rubric": "Is {answer} right?"}, "the rubric has {answer}, which is not filled"),
        (
            {"rubric": "Rate {response} to {question}."},
            "the rubric has {question}, which is not filled: write {prompt}",
        ),
        (
            {"rubric": "{response} or {{answer}}"},
            "has {answer}, which is not filled: write {response} for the policy's",
        ),
        ({"rubric": "no/such/file.md"}, "rubric 'no/such/file.md' cannot be read"),
        ({"scale": [1, 1]}, "scale must be the minimum and maximum"),
        ({"scale": [0, float("inf")]}, "scale[1]: expected a finite number, got inf"),
        ({"images": -1}, "expected images of at least 0, got -1"),
        (
            {"retries": -1, "max_concurrency": 0},
            "expected max_concurrency of at least 1, got 0; retries of at least 0, got -1",
        ),
        ({"timeout": 0.0}, "timeout: expected float > 0, got 0.0"),
        ({"extra": {"messages": []}}, "extra must not hold messages"),
        ({"verdict": "text"}, "expected 'json'"),
        ({"cache": "/dev/null/verdicts"}, "cannot be used as a file of verdicts"),
    ],
)
def test_options_that_cannot_work(options, fault):
    with pytest.raises(OptionError, match=re.escape(fault)):
        rlsdk.load("reward", "judge", **{"base_url": "http://localhost/v1", "model": "m", **options})


def test_a_file_that_is_not_a_cache(server, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("not a database, but more than a page of text\n" * 200)
    with pytest.raises(OptionError, match="cannot be used as a file of verdicts"):
        load(server, cache=str(file))


def test_as_a_part_of_a_reward(server):
    server.answers = [said('{"score": 5}'), refused(404)]
    scorer = Scorer([RewardTerm(RewardSpec("judge", 2.0), load(server))])
    good, bad = asyncio.run(scorer.score(rollout())), asyncio.run(scorer.score(rollout()))
    assert (good.value, good.metrics["reward/judge"], good.metrics["raw"]) == (1.0, 0.5, 5.0)
    assert (bad.valid, "judge: " in bad.reason) == (False, True)


def test_rlsdk_score(server, tmp_path):
    rows = [{"prompt": "2+2?", "answer": "4", "response": str(i)} for i in range(5)]
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [f"base_url={server.url}", "model=m", "scale=[0,14]"]
    flags = [word for option in options for word in ("--option", option)]
    ran = CliRunner().invoke(root, ["score", str(file), "--reward", "judge", *flags, "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert (found["valid"], found["mean"], len(server.asked)) == (5, 0.5, 5)
