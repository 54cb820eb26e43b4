"""`make bench-peers`: equal work on both sides, its tables, and runs of the installed peers."""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import rlsdk
from rlsdk.config import check
from rlsdk.contracts.tasks import KeepsOrder

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "tools" / "bench"


@pytest.fixture(scope="module", autouse=True)
def siblings() -> Iterator[None]:
    """Modules of tools/bench import each other by name, as in a run by path."""
    sys.path.insert(0, str(BENCH))
    yield
    sys.path.remove(str(BENCH))
    for path in BENCH.glob("*.py"):
        sys.modules.pop(path.stem, None)


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def answers(count: int) -> Iterator[tuple[str, int, list[int]]]:
    """Answers of a model that is half trained: right, wrong, other numbers, broken brackets, no answer."""
    draw = random.Random(0)
    for _ in range(count):
        numbers = [draw.randint(1, 20) for _ in range(3)]
        a, b, c = draw.sample(numbers, 3)
        right = (f"({a}-{b})-{c}", f"{a}+{b}+{c}", f"{a}-({b}-{c})", f"{a}*{b}/{c}", f"{a}+-{b}+{c}")
        broken = (
            f"({a}+{b}-{c}",
            "<answer>",
            f"{a}+{b}{c}",
            "",
            f"{a}/({b}-{b})+{c}",
            f"{a}{b}+{c}",
            "1+x",
            f"{a}+{b}",
        )
        body = draw.choice([*right, *broken])
        closed = f"<answer>{body}</answer>"
        text = draw.choice(
            [closed, f"{closed}{a}", f"{body}</answer>", body, f"<answer>1</answer><answer> {body} </answer>"]
        )
        yield text, draw.choice([a - b - c, a + b + c, draw.randint(1, 100)]), numbers


def test_the_shared_reward_is_rlsdks_countdown() -> None:
    shared, own = module("shared_reward").countdown, rlsdk.load("reward", "countdown")
    seen = set()
    for text, target, numbers in answers(4000):
        task = rlsdk.Task(id="0", prompt="?", answer={"target": target, "numbers": numbers})
        expected = own(rlsdk.Rollout.from_text(task, text)).value
        assert shared(text, target, numbers) == expected, (text, target, numbers)
        seen.add(expected)
    assert seen == {0.0, 0.1, 1.0}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return module("learning").export_work(tmp_path_factory.mktemp("work"), steps=3, every=2, held_out=20, seed=1)


def test_both_sides_read_the_quickstarts_tasks_in_one_order(work: Any) -> None:
    rows = [json.loads(line) for line in Path(work.train).read_text().splitlines()]
    assert len(rows) == work.steps * work.tasks
    tasks = module("rlsdk_side").exported(path=work.train)
    assert isinstance(tasks, KeepsOrder) and tasks.ordered
    assert [(t.id, t.prompt, t.answer) for t in tasks] == [
        (row["id"], row["prompt"], {"target": row["target"], "numbers": row["numbers"]}) for row in rows
    ]
    options = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())["tasks"]["train"]
    source = rlsdk.load("tasks", options.pop("use"))(**options)
    prompts = {task.id: task.prompt for task in source}
    assert all(prompts[row["id"]] == row["prompt"] for row in rows)
    held_out = {json.loads(line)["id"] for line in Path(work.held_out).read_text().splitlines()}
    assert len(held_out) == 20 and not held_out & set(prompts)


def test_another_seed_is_another_order_of_the_same_tasks(tmp_path: Path) -> None:
    export = module("learning").export_work
    one, two = (export(tmp_path, steps=2, every=1, held_out=5, seed=seed) for seed in (0, 1))
    assert Path(one.train).read_text() != Path(two.train).read_text()
    assert Path(one.train).read_text() == Path(export(tmp_path, steps=2, every=1, held_out=5, seed=0).train).read_text()


def test_points_begin_before_training_and_end_with_it(work: Any) -> None:
    assert work.points == [0, 2, 3]


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_rlsdks_side_has_a_valid_configuration(work: Any, tmp_path: Path, engine: str) -> None:
    learning = module("learning")
    config = learning.rlsdk_config(work, engine, tmp_path, learning.RLSDK_OWN)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    check(str(file), (), (str(BENCH / "rlsdk_side.py"),))
    assert config["minibatches"] == work.minibatches == 2 and config["algorithm"]["filters"] == []


def record(side: str, **points: Any) -> dict[str, Any]:
    about = {
        "machine": {"cpu": "C", "cores": 2, "memory_gib": 8.0},
        "commit": "abc1234",
        "dirty": False,
        "date": "2026-11-25",
    }
    return {
        "kind": "learning", "side": side, "seed": 0, "steps": [{}] * 4,
        "median_step": 1.0, "tokens_per_second": 10000.0,
        "points": [{"batch": 0, "seconds": 0.0, "sampled": 0.3, "greedy": 0.4},
                   {"batch": 4, "seconds": 10.0, "sampled": 0.7, "greedy": 0.8}],
        "memory": {"peak_pss_mib": 1234}, "load_average": {"before": 0.1, "after": 2.0},
        "versions": {"python": "3", "torch": "2.13.0"}, **about,
    }  # fmt: skip


def test_a_goal_is_reached_on_the_line_between_two_points() -> None:
    reaches, points = module("peers_page").reaches, record("trl")["points"]
    assert reaches(points, 0.6) == pytest.approx(7.5)
    assert reaches(points, 0.2) == 0.0
    assert reaches(points, 0.7) == pytest.approx(10.0)
    assert reaches(points, 0.8) is None


def test_the_table_of_learning_has_a_row_for_each_run_and_its_origin() -> None:
    shown = module("peers_page").tables([record("trl"), record("rlsdk-vllm")])
    assert "| trl | 0 | 4 | 1.00 | 10,000 | 8 | not reached | 70.0% | 80.0% | 1,234 | 0.1 → 2.0 |" in shown
    assert "* rlsdk-vllm: C, 2 cores, 8.0 GiB; commit `abc1234`, 2026-11-25; torch 2.13.0" in shown


def test_the_page_shows_the_committed_runs() -> None:
    page, results = module("peers_page"), module("results")
    text = page.PAGE.read_text(encoding="utf-8")
    assert results.replace_block(text, "results", page.block(page.read())) == text


def test_nothing_to_run_is_a_failure_and_an_unknown_name_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = module("peers").main
    assert main(["--peers", "", "--sides", "", "--out", str(tmp_path / "out")]) == 1
    assert main(["--peers", "trll"]) == 2
    assert "unknown: trll; peers: trl, verl, openrlhf" in capsys.readouterr().out


def test_a_peer_that_cannot_be_had_is_named_and_no_failure_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = module("peers")
    monkeypatch.setattr(peers, "prepare", lambda peer: f"no {peer.name} here")
    monkeypatch.setattr(peers, "jobs", lambda given, ready: iter([("learning-x", lambda: record("rlsdk-vllm"))]))
    assert peers.main(["--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "verl: MISSING, no verl here" in said and "| rlsdk-vllm | 0 |" in said
    assert json.loads((tmp_path / "learning-x.json").read_text())["side"] == "rlsdk-vllm"
    assert (tmp_path / "learning.png").is_file()


def test_a_failed_run_is_reported_and_the_next_one_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> Any:
        raise RuntimeError("it broke")

    found = list(module("peers").run_all(iter([("a", fails), ("b", lambda: record("trl"))]), tmp_path))
    assert [each["side"] for each in found] == ["trl"]
    assert "a: FAILED, it broke" in capsys.readouterr().out


def test_data_of_core_functions_is_zero_beyond_each_length() -> None:
    cores = module("cores")
    data = cores.make_data(32, 64, True)
    lengths = data["mask"].sum(1)
    assert int(lengths.max()) == 64 and int(lengths.min()) >= 4 and len(set(lengths.tolist())) > 5
    for name in ("values", "old_logprobs", "logprobs", "ref_logprobs", "advantages", "token_rewards"):
        assert not data[name][~data["mask"]].any(), name
    assert data["token_rewards"].sum(1).tolist() == pytest.approx(data["rewards"].tolist())


def test_the_watch_counts_marked_processes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = module("memory_watch")
    monkeypatch.setattr(watch, "SECONDS", 0.05)
    grow = "x = bytearray(80 << 20); import time; print('ready', flush=True); time.sleep(60)"
    environment, own = {"PATH": "/usr/bin:/bin"}, f"the test in {os.getpid()}"  # the same test may run elsewhere
    marked = subprocess.Popen(
        [sys.executable, "-c", grow], env={**environment, watch.MARK: own}, stdout=subprocess.PIPE
    )
    other = subprocess.Popen(
        [sys.executable, "-c", grow], env={**environment, watch.MARK: f"not {own}"}, stdout=subprocess.PIPE
    )
    try:
        with watch.MemoryWatch(own) as found:
            for process in (marked, other):
                assert process.stdout is not None and process.stdout.readline()
            while not found.found()["peak_pss_mib"] > 80:
                pass
        assert found.found()["processes"] == 1 and found.found()["peak_pss_mib"] < 150
    finally:
        for process in (marked, other):
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["verl", "openrlhf"])
def test_core_functions_give_what_the_peers_give(peer: str, tmp_path: Path) -> None:
    cores = module("cores")
    if not module("peer_venvs").PEERS[peer].python.parents[1].joinpath(".installed").exists():
        pytest.skip(f"`make bench-peers` has not made .venv-{peer}")
    found = cores.compare_cores(peer, tmp_path, quick=True)["results"]
    assert {each["case"] for each in found} == set(cores.CASES[peer])
    assert all(each["equal"] for each in found), found


@pytest.mark.slow
@pytest.mark.stack
def test_rlsdks_side_trains_and_every_point_is_evaluated(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "peers.py"), "--quick", "--peers", "", "--sides", "rlsdk-transformers"]
    subprocess.run([*command, "--steps", "3", "--out", str(tmp_path)], check=True, cwd=ROOT)
    found = json.loads((tmp_path / "learning-rlsdk-transformers-seed0.json").read_text())
    assert [point["batch"] for point in found["points"]] == [0, 3]
    assert len(found["steps"]) == 3 and all(step["seconds"] > 0 for step in found["steps"])
    assert found["memory"]["processes"] > 3 and 0.2 < found["points"][0]["sampled"] < 0.4
