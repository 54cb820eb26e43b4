"""The viewer's server: answers about a run, access control, and handling of models' texts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlsdk
from rlsdk.cli.view import view
from rlsdk.errors import RunError
from rlsdk.runlog.actors import STATUS
from rlsdk.viewer.service import COOKIE, STATIC, ViewerService, new_token, serve
from tests.viewer.recorded import HOSTILE, make_run

Ask = Callable[..., Any]


@pytest.fixture
def service(run: Path) -> ViewerService:
    return ViewerService([str(run)])


def test_the_state_names_runs_and_pages(service: ViewerService, ask: Ask, run: Path) -> None:
    status, headers, content = ask(service, "/api/state")
    (shown,) = content["runs"]
    assert status == 200
    assert (shown["name"], shown["step"], shown["steps"], shown["last"]["reward/mean"]) == ("first", 6, 8, 0.6)
    assert [page["name"] for page in content["pages"]][:3] == ["curves", "time", "rollouts"]
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert "unsafe-inline" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_runs_of_one_name_are_told_apart_by_their_folders(ask: Ask, run: Path, tmp_path: Path) -> None:
    copies = [shutil.copytree(run, tmp_path / person / run.name) for person in ("alice", "bob")]
    shown = ask(ViewerService([str(copy) for copy in copies]), "/api/state")[2]["runs"]
    assert {each["name"] for each in shown} == {f"first ({each['path']})" for each in shown}
    assert len({each["name"] for each in shown}) == 2


def test_curves_follow_a_file_that_grows_and_one_that_is_cut_back(service: ViewerService, ask: Ask, run: Path) -> None:
    (key,) = service._runs
    path = f"/api/curves?runs={key}&names=reward/mean,unknown"
    ask(service, "/api/state")
    assert ask(service, path)[2] == {key: {"reward/mean": [[1, 2, 3, 4, 5, 6], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]]}}
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "reward/mean": NaN}\n{"step": 8, "rew')
    assert ask(service, "/api/state")[2]["runs"][0]["step"] == 7
    with (run / "metrics.jsonl").open("a") as file:
        file.write('ard/mean": 0.9}\n')
    ask(service, "/api/state")
    assert ask(service, path)[2][key]["reward/mean"] == [[1, 2, 3, 4, 5, 6, 8], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.9]]
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert ask(service, "/api/state")[2]["runs"][0]["generation"] == 1
    assert ask(service, path)[2][key]["reward/mean"] == [[1], [0.5]]


def test_damaged_files_of_one_run_cost_the_page_nothing(service: ViewerService, ask: Ask, run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 1{"0" * 30}}}\n{{"step": 7, "x": 1{"0" * 400}}}\n{{"step": 8, "reward/mean": 0.9}}\n')
    (run / STATUS).write_text('"x"')
    (run / "config.yaml").write_text(f"name: {'x' * 2**24}")
    status, _, content = ask(service, "/api/state")
    assert content["runs"][0]["name"] == run.name
    assert (status, content["runs"][0]["step"], content["runs"][0]["last"]["reward/mean"]) == (200, 8, 0.9)
    status, _, content = ask(service, f"/api/rollouts/{content['runs'][0]['id']}/groups/1{'0' * 30}")
    assert (status, "too large" in content["error"]) == (400, True)


def test_a_name_and_its_long_form_are_the_same_setting(service: ViewerService, ask: Ask, run: Path) -> None:
    (key,), found = service._runs, []
    for form in ("grpo", "{use: grpo}"):
        (run / "config.yaml").write_text(f"name: first\nalgorithm: {form}\nreward: countdown\n")
        settings = ask(service, f"/api/settings/{key}")[2]["config"]
        found.append((settings["algorithm"], settings["reward"], service.runs[0].experiment))
    assert found[0] == found[1] and found[0][:2] == ({"use": "grpo"}, [{"use": "countdown"}])


def test_a_run_that_was_cut_back_and_continued_is_read_again(service: ViewerService, ask: Ask, run: Path) -> None:
    (key,) = service._runs

    def standing(kl: float, begin: int, end: int) -> list[str]:
        kept = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[: begin - 1]
        lines = [json.dumps({"step": step, "actor/kl_to_old": kl}) + "\n" for step in range(begin, end + 1)]
        (run / "metrics.jsonl").write_text("".join([*kept, *lines]))
        return [each["alert"]["name"] for each in ask(service, f"/api/findings?runs={key}")[2][key]]

    assert standing(0.001, 1, 20) == []
    assert standing(0.5, 21, 30) == ["kl_runaway"]
    assert standing(0.001, 21, 33) == []
    steps, values = ask(service, f"/api/curves?runs={key}&names=actor/kl_to_old")[2][key]["actor/kl_to_old"]
    assert (steps, set(values)) == ([*range(1, 34)], {0.001})


def test_a_long_curve_is_thinned_out_to_means(run: Path) -> None:
    lines = [json.dumps({"step": i, "x": float(i % 2)}) + "\n" for i in range(1, 10_001)]
    (run / "metrics.jsonl").write_text("".join(lines))
    metrics = ViewerService([str(run)]).runs[0].metrics
    metrics.refresh()
    steps, values = metrics.points(["x"])["x"]
    assert (len(steps), steps[-1]) == (2000, 10_000)
    assert set(values) == {0.4, 0.6}


def test_a_group_is_told_with_scores_and_the_reason_of_an_invalid_one(service: ViewerService, ask: Ask) -> None:
    (key,) = service._runs
    content = ask(service, f"/api/rollouts/{key}/groups/5")[2]
    assert (content["task"], content["answer"], len(content["rollouts"])) == ("sums/5", 5, 3)
    first, second, _ = content["rollouts"]
    assert (first["valid"], first["reason"], first["reward"]) == (False, "the judge timed out", None)
    assert (second["parts"], second["tokens"]) == ({"reward/exact": 0.0, "format": 1.0}, 5)
    assert [message["role"] for message in second["messages"]] == ["user", "assistant"]


def test_tokens_carry_what_the_learner_computed_where_it_was_stored(service: ViewerService, ask: Ask) -> None:
    (key,) = service._runs
    trained = ask(service, f"/api/rollouts/{key}/groups/3/0/tokens")[2]
    assert trained["mask"] == [0, 1, 1, 1, 1]
    assert trained["columns"]["advantage"] == [None, -0.5, 0.0, 0.5, 1.0]
    assert trained["columns"]["ratio"][1] == pytest.approx(1.28403, abs=1e-5)  # exp(-0.25 + 0.5)
    assert trained["versions"] == [-1, 0, 0, 0, 0]
    left_out = ask(service, f"/api/rollouts/{key}/groups/2/0/tokens")[2]
    assert set(left_out["columns"]) == {"logprob"}
    assert left_out["texts"] == ["⟨3⟩", "⟨4⟩", "⟨5⟩", "⟨6⟩", "⟨7⟩"]  # this run's model has no tokenizer
    assert ask(service, f"/api/rollouts/{key}/groups/3/9/tokens")[0] == 400


def test_a_held_out_task_is_followed_through_the_evaluations(service: ViewerService, ask: Ask) -> None:
    (key,) = service._runs
    tasks = ask(service, f"/api/held-out/{key}")[2]["rows"]
    assert [row["task"] for row in tasks] == ["sums/100", "sums/101", "sums/102"]
    assert ask(service, f"/api/held-out/{key}?sampled=1")[2]["sampled"] is True
    history = ask(service, f"/api/held-out/{key}?task=sums/101&sampled=1")[2]["rows"]
    assert [(row["step"], row["response"]) for row in history] == [(0, "answer 0"), (3, "answer 3"), (6, "answer 6")]


def test_a_run_without_greedy_answers_shows_the_sampled_ones(tmp_path: Path, ask: Ask) -> None:
    folder = make_run(tmp_path / "sampled", greedy=False)
    service = ViewerService([str(folder)])
    (key,) = service._runs
    for query in ("", "?sampled=0", "?sampled=1"):
        found = ask(service, f"/api/held-out/{key}{query}")[2]
        assert [row["task"] for row in found["rows"]] == ["sums/100", "sums/101", "sums/102"]
        assert (found["sampled"], found["kinds"]) == (True, ["eval sampled"])


def test_hostile_text_arrives_as_data_and_as_json_alone(service: ViewerService, ask: Ask) -> None:
    (key,) = service._runs
    status, headers, content = ask(service, f"/api/rollouts/{key}/groups/3")
    assert content["rollouts"][1]["messages"][1]["content"] == HOSTILE
    assert (status, headers["Content-Type"]) == (200, "application/json; charset=utf-8")
    rows = ask(service, f"/api/rollouts/{key}?text=%3Cscript%3E")[2]["rows"]
    assert [(row["number"], row["rollout"]) for row in rows] == [(3, 1)]


def test_the_page_writes_text_only_as_text() -> None:
    scripts = list(STATIC.glob("*.js"))
    assert len(scripts) > 8
    for path in scripts:
        text = path.read_text(encoding="utf-8")
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "http"):
            assert way not in text.replace("http-equiv", ""), f"{path.name}: {way}"
    assert "<script>" not in (STATIC / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "path", ["/static/../service.py", "/static/%2e%2e/service.py", "/static/vendor", "/static/x.js"]
)
def test_only_files_of_the_page_are_served(service: ViewerService, ask: Ask, path: str) -> None:
    assert ask(service, path)[0] == 404


def test_a_loopback_server_answers_under_its_own_name_alone(service: ViewerService, ask: Ask) -> None:
    status, _, content = ask(service, "/api/state", headers={"Host": "evil.example"})
    assert (status, "not as 'evil.example'" in content["error"]) == (403, True)
    status, _, content = ask(service, "/api/state", method="POST", headers={"Origin": "http://evil.example"})
    assert (status, content["error"]) == (403, "changes are accepted only from the viewer's own page")


def test_changes_are_accepted_through_a_proxy_that_names_the_host_of_the_page(service: ViewerService, ask: Ask) -> None:
    (key,) = service._runs
    for names, expected in (({}, 403), ({"X-Forwarded-Host": "lab.example"}, 200), ({"X-Forwarded-Host": ""}, 403)):
        sent = {"Origin": "https://lab.example", **names}
        status, _, _ = ask(
            service, f"/api/annotate/{key}/undo", method="POST", headers=sent, content={"by": "a person"}
        )
        assert status == expected


def test_replies_are_compressed(service: ViewerService) -> None:
    async def sizes() -> list[int]:
        from aiohttp.test_utils import TestClient, TestServer

        found = []
        async with TestClient(TestServer(service.application()), auto_decompress=False) as client:
            for accepted in ("identity", "gzip"):
                response = await client.get("/static/app.js", headers={"Accept-Encoding": accepted})
                found.append(len(await response.read()))
        return found

    whole, compressed = asyncio.run(sizes())
    assert compressed < whole / 2


def test_with_a_token_nothing_is_answered_without_it(run: Path, ask: Ask) -> None:
    service = ViewerService([str(run)], token="secret-ü")
    assert ask(service, "/api/state")[0] == 403
    assert ask(service, "/static/app.js")[0] == 403
    assert ask(service, "/api/state?token=wrong")[0] == 403
    assert ask(service, "/api/state", headers={"Authorization": "Bearer x"})[0] == 403
    status, headers, _ = ask(service, "/?token=secret-%C3%BC")
    assert (status, headers["Location"]) == (303, "./")
    assert {"HttpOnly", "SameSite=Strict"} <= set(headers["Set-Cookie"].split("; "))
    assert COOKIE in headers["Set-Cookie"]
    assert ask(service, "/api/state?token=secret-%C3%BC")[0] == 200


def test_logs_are_sent_from_where_the_reader_is(service: ViewerService, ask: Ask, run: Path) -> None:
    (key,) = service._runs
    first = ask(service, f"/api/processes/{key}/logs/driver")[2]
    assert first["text"].startswith("began")
    with (run / "logs" / "driver.log").open("a") as file:
        file.write("more\n")
    assert ask(service, f"/api/processes/{key}/logs/driver?after={first['end']}")[2]["text"] == "more\n"
    assert ask(service, f"/api/processes/{key}/logs/..%2Fconfig")[0] in (400, 404)


def test_new_runs_in_a_folder_appear(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "one")
    service = ViewerService([str(tmp_path / "runs")])
    assert [run.state()["name"] for run in service.runs] == ["one"]
    make_run(tmp_path / "runs" / "two")
    service.look()
    assert {run.state()["name"] for run in service.runs} == {"one", "two"}


def test_a_folder_without_runs_is_refused_with_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="expected a folder with a config"):
        ViewerService([str(tmp_path)])
    with pytest.raises(RunError, match="there is no such folder"):
        ViewerService([str(tmp_path / "none")])
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="file is a file; expected the folder of a run"):
        ViewerService([str(tmp_path / "file")])


def test_in_a_folder_without_runs_the_command_says_where_to_start_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="no folder `runs` here; start `rlsdk view` in the folder in which you trained"):
        view.main(["--no-open"], standalone_mode=False)


def test_the_command_prints_its_address_and_ends_on_an_interrupt(run: Path) -> None:
    command = [sys.executable, "-m", "rlsdk.cli", "view", str(run), "--port", "0", "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    address = process.stdout.readline().strip()
    try:
        assert address.startswith("http://127.0.0.1:")
        process.send_signal(2)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_printed_address_opens_the_page(host: str, run: Path) -> None:
    service = ViewerService([str(run)], token=new_token(host))

    async def serve_once() -> tuple[str, int]:
        import aiohttp

        ready, ended = asyncio.get_running_loop().create_future(), asyncio.Event()
        serving = asyncio.create_task(serve(service, host, 0, ready.set_result, ended))
        address: str = await ready
        async with aiohttp.ClientSession() as client, client.get(address, allow_redirects=False) as response:
            status = response.status
        ended.set()
        await serving
        return address, status

    address, status = asyncio.run(serve_once())
    assert "//0.0.0.0" not in address
    assert status == (303 if service.token else 200)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        (["--host", "203.0.113.1"], "cannot listen on 203.0.113.1: .*; choose another --host"),
        (["--host", "127.0.0.1", "--port", "PORT"], "cannot listen on 127.0.0.1, port .*in use; choose another --port"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_with_the_option_to_change(
    run: Path, where: list[str], says: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        options = [port if word == "PORT" else word for word in where]
        command = [sys.executable, "-m", "rlsdk.cli", "view", str(run), "--no-open", *options]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert re.search(says, ended.stderr)


def test_the_server_imports_none_of_the_stack(run: Path) -> None:
    code = (
        "import sys; from rlsdk.viewer.service import ViewerService; "
        f"ViewerService([{str(run)!r}]).application(); "
        "print([m for m in ('torch', 'ray', 'vllm', 'deepspeed', 'transformers') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_alerts_and_a_silent_run_are_reported(service: ViewerService, ask: Ask, run: Path) -> None:
    (key,) = service._runs
    alert: dict[str, Any] = {"step": 4, "name": "length", "level": "warning", "message": "m", "advice": "a"}
    (run / "alerts.jsonl").write_text(json.dumps(alert) + "\n{broken\n" + json.dumps({"step": 5}) + "\n")
    old = time.time() - 3600
    os.utime(run / "metrics.jsonl", (old, old))
    state = ask(service, "/api/state")[2]["runs"][0]
    assert (state["status"], state["alerts"]) == ("quiet", 1)
    assert state["trouble"].startswith("no step for 60 min; a step usually takes 2 s")
    assert ask(service, f"/api/findings?runs={key}")[2] == {key: [{"alert": {**alert, "metric": ""}, "lasts": False}]}


def test_the_page_has_a_title_for_every_built_in_diagnosis() -> None:
    script = (STATIC / "findings.js").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^  (\w+): \{ title: ", script, re.MULTILINE)) == sorted(rlsdk.names("diagnosis"))
