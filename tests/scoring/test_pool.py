"""The pool kills calls that take too long, survives crashes, and continues."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlsdk.contracts import RewardSpec, ScoringLimits
from rlsdk.errors import DataError, ScoringError
from rlsdk.plugins import Plugins
from rlsdk.scoring.scorer import RewardTerm, Scorer
from rlsdk.simulation.clock import run_virtually
from rlsdk.types import Rollout, Score, Task
from tests.examples import many

LAB = Path(__file__).with_name("hostile_lab.py")
TIMEOUT = 0.5


def rollout(text: str, name: str = "t") -> Rollout:
    return Rollout.from_text(Task(id=name, prompt="?", answer="!"), text)


def part(name: str, **options: Any) -> RewardTerm:
    plugins = Plugins([LAB])
    reference = plugins.reference("reward", name, options)
    return RewardTerm(RewardSpec(name.rpartition("/")[2]), plugins.resolve(reference), reference)


@pytest.fixture
def scorer() -> Iterator[Callable[..., Scorer]]:
    made: list[Scorer] = []

    def make(*names: str, **limits: Any) -> Scorer:
        chosen = ScoringLimits(**{"timeout": TIMEOUT, "workers": 2, **limits})
        made.append(Scorer([part(name) for name in names], chosen))
        return made[-1]

    yield make
    for each in made:
        each.close()


def score(scorer: Scorer, *texts: str, run: Callable[..., list[Score]] = asyncio.run) -> list[Score]:
    async def all_of_them() -> list[Score]:
        return await asyncio.gather(*(scorer.score(rollout(text)) for text in texts))

    return run(all_of_them())


def test_it_scores_in_other_processes(scorer: Callable[..., Scorer]) -> None:
    pids = {found.value for found in score(scorer("hostile_lab/pid"), *map(str, range(20)))}
    assert os.getpid() not in pids
    assert 1 <= len(pids) <= 2
    assert [found.answer for found in score(scorer("math"), r"\boxed{ 3 }", "3")] == ["3", ""]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sleep 600", "it took longer than 0.5 s and was killed"),
        ("spin 600", "it took longer than 0.5 s and was killed"),
        ("crash", "its process ended: killed by SIGSEGV"),
        ("kill", "its process ended: killed by SIGKILL"),
        ("exit", "its process ended: exit status 3"),
        ("leave", "SystemExit: 3"),
        ("memory", "MemoryError: it needs more than scoring.memory allows"),
        ("raise " + "x" * 5000, "ValueError: " + "x" * 1000),
        ("nan", "a valid score must be finite"),
        ("huge", "a valid score must be finite and within ±1e+18, got 1e+30"),
        ("words", "ten"),
    ],
)
@pytest.mark.parametrize("reward", ["one", "many"])
def test_what_fails_is_invalid_and_the_next_calls_work(
    scorer: Callable[..., Scorer], reward: str, text: str, reason: str
) -> None:
    running = scorer(f"hostile_lab/{reward}")
    start = time.monotonic()
    before, failed, after, more = score(running, "good", text, "fine!", "x" * 100_000)
    again = score(running, "again")[0]
    assert time.monotonic() - start < 20
    assert not failed.valid
    assert failed.reason.startswith(f"{reward}: ")
    assert reason in failed.reason
    assert len(failed.reason) < 2_100
    assert [s.value for s in (before, after, more, again)] == [4, 5, 100_000, 5]


def test_several_rewards_that_exit_in_one_call_fail_with_their_reason_alone(scorer: Callable[..., Scorer]) -> None:
    running = scorer("hostile_lab/one", workers=1)
    score(running, *["warm"] * 50)  # from then on, a call scores many
    found = score(running, *["leave", "good"] * 50)
    assert {each.reason.partition(" (")[0] for each in found[::2]} == {"one: SystemExit: 3"}
    assert [each.value for each in found[1::2]] == [4] * 50


def test_a_forked_process_that_returns_answers_no_call(scorer: Callable[..., Scorer]) -> None:
    running = scorer("hostile_lab/one", workers=1)
    for text in ("fork", "good day", "fork", "fine"):
        assert score(running, text)[0].value == len(text)


def test_a_task_that_cannot_be_scored_stops(scorer: Callable[..., Scorer]) -> None:
    running = scorer("hostile_lab/one")
    with pytest.raises(DataError, match="the task has no answer"):
        score(running, "task")
    assert score(running, "good")[0].value == 4


def test_a_task_that_cannot_be_sent_to_the_processes_stops_and_its_source_is_named(
    scorer: Callable[..., Scorer],
) -> None:
    odd = Rollout.from_text(Task(id="odd", prompt="?", metadata={"check": lambda text: True}, source="mine"), "good")

    with pytest.raises(DataError, match="task 'odd' of source 'mine' cannot be sent to another process: its answer"):
        asyncio.run(scorer("hostile_lab/one").score(odd))


def test_what_a_killed_call_started_dies_with_it(scorer: Callable[..., Scorer]) -> None:
    mark = f"mark-{time.monotonic_ns()}"
    assert not score(scorer("hostile_lab/one"), f"child {mark}")[0].valid
    psutil.wait_procs(_running(mark), timeout=10)
    assert not _running(mark)


def _running(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found += [p for p in [process] if mark in p.cmdline() and p.status() != psutil.STATUS_ZOMBIE]
    return found


def test_hanging_calls_do_not_hold_up_the_others(scorer: Callable[..., Scorer]) -> None:
    running = scorer("hostile_lab/one", timeout=120.0)
    score(running, *["warm"] * 200)

    async def work() -> None:
        hanging = [asyncio.create_task(running.score(rollout("sleep 600"))) for _ in range(8)]
        await asyncio.sleep(0.1)  # all workers hang
        found = await asyncio.gather(*(running.score(rollout("x" * i)) for i in range(1, 200)))
        assert [s.value for s in found] == list(range(1, 200))
        assert not any(task.done() for task in hanging)
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)

    asyncio.run(work())
    assert running.counts["killed"] == 0


def test_a_cancelled_call_frees_its_process(scorer: Callable[..., Scorer]) -> None:
    running = scorer("hostile_lab/one", timeout=60.0)

    async def work() -> Score:
        hanging = [asyncio.create_task(running.score(rollout("sleep 600"))) for _ in range(3)]
        await asyncio.sleep(0.5)
        for each in hanging:
            each.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        return await running.score(rollout("good"))

    assert asyncio.run(work()).value == 4


def test_a_killed_fork_server_is_started_again(scorer: Callable[..., Scorer]) -> None:
    running = scorer("hostile_lab/one")

    async def work() -> list[Score]:
        first = await running.score(rollout("good"))
        for child in psutil.Process().children():
            if "rlsdk.isolation.fork_server" in " ".join(child.cmdline()):
                forks = child.children()  # they end with it
                child.kill()
                assert psutil.wait_procs([child, *forks], timeout=10)[1] == []
        return [first, await running.score(rollout("found"))]

    assert [s.value for s in asyncio.run(work())] == [4, 5]


def test_no_process_is_left(scorer: Callable[..., Scorer]) -> None:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    running = scorer("hostile_lab/one")
    score(running, "a", "b")
    started = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert len(started) >= 2
    running.close()
    psutil.wait_procs(started, timeout=10)
    assert not [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_equal_rollouts_are_scored_once_where_the_reward_allows_it(scorer: Callable[..., Scorer]) -> None:
    running = scorer("hostile_lab/cached")
    first = score(running, "same")[0]
    second, other = score(running, "same", "other")
    assert first.value == second.value != other.value
    assert running.counts["calls"] == 2


def test_a_failure_is_not_kept(scorer: Callable[..., Scorer]) -> None:
    running = scorer("hostile_lab/cached")
    assert [s.valid for s in (score(running, "exit") + score(running, "exit"))] == [False, False]
    assert running.counts["calls"] == 2


@pytest.mark.skipif(sys.platform != "linux", reason="needs the CPU seconds of a process")
def test_a_call_that_computes_for_long_gives_way_to_others(scorer: Callable[..., Scorer]) -> None:
    running = scorer("hostile_lab/computes", workers=1, timeout=60.0)
    assert score(running, "until it does")[0].value == 1.0


def test_async_rewards_wait_together_in_the_driver_and_have_a_limit(scorer: Callable[..., Scorer]) -> None:
    running = scorer("hostile_lab/waits", timeout=1.0)
    took = []

    async def timed(scores: Awaitable[list[Score]]) -> list[Score]:
        began = asyncio.get_running_loop().time()
        found = await scores
        took.append(asyncio.get_running_loop().time() - began)
        return found

    found = score(running, *["0.3"] * 50, "60", run=lambda scores: run_virtually(timed(scores)))
    assert took == [1.0]
    assert {s.value for s in found[:-1]} == {os.getpid()}
    assert found[-1].reason == "waits: it took longer than 1 s"
    assert score(running, "own")[0].reason.startswith("waits: TimeoutError: a server is silent")


@pytest.mark.parametrize(("text", "reason"), [("leave", "SystemExit: 0"), ("leaked", "CancelledError: of its own")])
def test_a_reward_in_the_driver_that_exits_or_leaks_a_cancellation_is_invalid(
    scorer: Callable[..., Scorer], text: str, reason: str
) -> None:
    found = score(scorer("hostile_lab/waits"), "0", text)
    assert [each.valid for each in found] == [True, False]
    assert found[1].reason.startswith(f"waits: {reason}")


def test_async_calls_beyond_max_concurrency_wait_without_using_up_their_time(
    scorer: Callable[..., Scorer],
) -> None:
    running = scorer("hostile_lab/in_turn", timeout=0.5)
    for _ in range(2):  # each `score` has its own event loop
        assert {s.value for s in score(running, *["0.2"] * 10, run=run_virtually)} == {1.0, 2.0}
    assert score(running, "60", run=run_virtually)[0].reason == "in_turn: it took longer than 0.5 s"


def test_an_option_timeout_of_a_function_extends_the_limit_as_that_of_a_class_does() -> None:
    running = Scorer([part("hostile_lab/patient")], ScoringLimits(timeout=0.2))
    assert score(running, "0.4")[0].valid


def test_a_batch_of_another_length_is_invalid(scorer: Callable[..., Scorer]) -> None:
    assert (
        score(scorer("hostile_lab/too_few"), "a")[0].reason
        == "too_few: it returned 0 scores for 1 rollout; expected one for each"
    )


def test_a_reward_that_cannot_be_imported_there_stops_with_the_cause(tmp_path: Path) -> None:
    file = tmp_path / "elsewhere.py"
    file.write_text(
        "import os, rlsdk\n"
        f"if os.getpid() != {os.getpid()}: raise ImportError('not on this side')\n"
        "@rlsdk.reward('r')\n"
        "def r(rollout):\n    '''One.'''\n    return 1.0\n"
    )
    plugins = Plugins([file])
    reference = plugins.reference("reward", "elsewhere/r")
    running = Scorer([RewardTerm(RewardSpec("r"), plugins.resolve(reference), reference)])
    with pytest.raises(ScoringError, match="not on this side"):
        score(running, "x")


def test_whatever_a_reward_prints_it_is_scored_and_its_log_has_it(tmp_path: Path) -> None:
    import rlsdk

    @rlsdk.reward("loud")
    def loud(rollout: Rollout) -> float:
        """One, loudly."""
        print("x" * 1_000_000, "\ud800")
        os.write(1, b"\xff\x00 is not text\n")
        os.write(2, b"\xfe")
        return 1.0

    plugins, log = Plugins(), tmp_path / "scoring.log"
    reference = plugins.reference("reward", loud)
    term = RewardTerm(RewardSpec("loud"), plugins.resolve(reference), reference)
    running = Scorer([term], ScoringLimits(workers=1), log_to=log)
    assert [each.value for each in score(running, "a", "b")] == [1.0, 1.0]
    running.close()
    said = log.read_bytes()
    assert said.count(b"\xff\x00 is not text\n") == said.count(b"\xfe") == 2
    assert b"x \\ud800\n" in said


def test_a_marked_object_of_a_script_is_scored_there() -> None:
    import rlsdk

    offset = 2.0

    @rlsdk.reward("local")
    def local(rollout: Rollout) -> float:
        """The length and two."""
        return len(rollout.response) + offset + os.getpid() * 0

    plugins = Plugins()
    reference = plugins.reference("reward", local)
    running = Scorer([RewardTerm(RewardSpec("local"), plugins.resolve(reference), reference)])
    assert score(running, "xxx")[0].value == 5
    running.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Scorer]:
    made = Scorer([part("math"), part("hostile_lab/one")], ScoringLimits(timeout=10.0, workers=2))
    yield made
    made.close()


hostile = st.one_of(
    st.text(),
    st.builds(
        lambda c, n: c * n,
        st.sampled_from(["(", "{", "[", "|", "9", "\\frac{", "^{9", "\\sqrt{", "٣", "−"]),
        st.integers(1, 10_000),
    ),
    st.builds(lambda n: "^".join("9" * n), st.integers(1, 50)),
    st.builds(lambda n: f"{n}!" * 3, st.integers(0, 10**9)),
    st.builds(lambda a, b: f"\\sum_{{k=1}}^{{{a}}} k^{{{b}}}", st.integers(), st.integers()),
    st.sampled_from(["\\boxed{", "}", "\x00", "\ud800", "__import__('os').system('true')", "x" * 1_000_000]),
)


@settings(max_examples=many(400), deadline=None, suppress_health_check=list(HealthCheck))
@given(texts=st.lists(hostile, min_size=1, max_size=8))
def test_hostile_answers_return_and_the_pool_continues(shared: Scorer, texts: list[str]) -> None:
    start = time.monotonic()
    found = score(shared, *[f"\\boxed{{{text}}}" for text in texts], "good")
    assert time.monotonic() - start < 30
    assert all(isinstance(s, Score) for s in found)
    assert all(s.valid for s in found), [s.reason for s in found]
    assert shared.counts["killed"] == 0
