"""Environments with scripted policies: whole conversations, rewards, and hanging calls."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path

import attrs
import pytest

import rlsdk
from rlsdk.contracts import RewardSpec
from rlsdk.errors import DataError, OptionError
from rlsdk.isolation.threads import Threads
from rlsdk.scoring.scorer import RewardTerm, Scorer
from rlsdk.testing import run_workflow
from rlsdk.types import Group, Message, Observation, Score, Step, Task
from tests.rollout.codecs import chatml, plain


@rlsdk.environment("count")
class Count:
    """Asks for the successor of the number that it shows, until `upto` right answers are given.

    Attributes:
        upto: Right answers to the end.
    """

    closed: list[int] = []  # noqa: RUF012 - of all instances

    def __init__(self, *, upto: int = 2) -> None:
        self.upto = upto

    def reset(self, seed: int) -> Observation:
        self.seed, self.right, self.steps = seed, 0, 0
        self.number = random.Random(seed).randrange(10)
        return Observation(f"{self.number}:")

    def step(self, text: str) -> Step:
        if text == "13":
            raise ValueError("unlucky")
        while text == "99":
            time.sleep(0.01)
            if stop.is_set():
                break
        self.steps += 1
        right = text == str(self.number + 1)
        self.right, self.number = self.right + right, self.number + right
        done = self.right == self.upto
        metrics = {"success": float(done), "actions": float(self.steps)}
        return Step(Observation(f"{self.number}:"), 1.0 if right else -0.25, done, self.steps == 5, metrics)

    def close(self) -> None:
        self.closed.append(getattr(self, "seed", -1))


stop = threading.Event()


@pytest.fixture(autouse=True)
def release():
    stop.clear()
    yield
    stop.set()


def task(seed: int = 3, **extra: object) -> Task:
    return Task(id=f"s{seed}", prompt="", metadata={"seed": seed, **extra})


def scorer() -> Scorer:
    return Scorer([RewardTerm(RewardSpec("environment"), rlsdk.load("reward", "environment"))])


def play(script, *tasks: Task, codec=None, group_size: int = 1, max_length: int = 512, **options) -> list[Group]:
    workflow = rlsdk.load("workflow", "environment", **{"environment": Count, **options})
    return run_workflow(
        workflow,
        tasks or [task()],
        codec or plain(),
        script,
        scorer=scorer(),
        group_size=group_size,
        max_length=max_length,
    )


def test_a_whole_episode_token_by_token() -> None:
    start = random.Random(3).randrange(10)
    [group] = play(lambda text: "0" if text == f"{start}:" else str(int(text.rpartition("\n")[2][:-1]) + 1))
    [rollout], [score] = group.rollouts, group.scores
    codec = plain()
    shown = [f"{start}:", f"{start}:", f"{start + 1}:", f"{start + 2}:"]
    said = ["0", str(start + 1), str(start + 2)]
    turns = [m for pair in zip(shown, said, strict=False) for m in pair]
    assert [m.content for m in rollout.messages] == [*turns, shown[-1]]
    assert [m.role for m in rollout.messages] == ["user", "assistant"] * 3 + ["user"]
    assert codec.decode([rollout.token_ids]) == [f"{shown[0]}0\n{shown[1]}{said[1]}\n{shown[2]}{said[2]}"]
    # prompt 2, answer and end 2; then line break, number and colon 3, answer and end 2, twice
    assert rollout.rewards == ((3, -0.25), (8, 1.0), (13, 1.0))
    assert rollout.loss_mask.nonzero()[0].tolist() == [2, 3, 7, 8, 12, 13]
    assert rollout.status == "finished"
    assert rollout.metrics == {"turns": 3, "tokens": 6, "success": 1.0, "actions": 3.0}
    assert score.value == 1.75 and score.token_rewards == rollout.rewards
    assert score.metrics["correct"] == 1.0 and score.metrics["reward/environment"] == 1.75


def test_rewards_of_turns_reach_the_advantage_at_their_tokens() -> None:
    from rlsdk.rollout.step_batch import pack
    from rlsdk.trainer.credit import credit_inputs

    groups = play(lambda _: "0", task(3), max_turns=2)
    packed = pack(groups)
    assert packed is not None
    x = credit_inputs(packed, frozenset())
    # from the first sampled token on: answer and end, three tokens of the environment, answer and end
    assert x.loss_mask.tolist() == [True, True, False, False, False, True, True]
    assert x.token_rewards.tolist() == [0, -0.25, 0, 0, 0, 0, -0.25]


def test_a_rollout_without_a_state_is_compared_with_no_other() -> None:
    from rlsdk.rollout.step_batch import pack
    from rlsdk.trainer.credit import credit_inputs

    groups = play(lambda _: "0", task(3), max_turns=2, group_size=4)
    [group] = groups
    states = zip(group.rollouts, ["door", "", "door", ""], strict=True)
    packed = pack([attrs.evolve(group, rollouts=[attrs.evolve(r, state=state) for r, state in states])])
    assert packed is not None
    x = credit_inputs(packed, frozenset({"states"}))
    one, other, same, last = x.states.tolist()
    assert one == same
    assert len({one, other, last}) == 3


def test_with_a_chat_template_the_first_observation_joins_the_prompt() -> None:
    chat = Task(id="c", prompt=[Message("system", "Count."), Message("user", "Begin:")], metadata={"seed": 3})
    [group] = play(lambda _: "x", chat, codec=chatml(), max_turns=1)
    start = random.Random(3).randrange(10)
    contents = [m.content for m in group.rollouts[0].messages]
    assert contents == ["Count.", f"Begin:\n{start}:", "x", f"{start}:"]


def test_a_group_begins_in_one_state_that_the_tasks_id_gives_where_no_seed_is() -> None:
    tasks = [Task(id=name, prompt="") for name in "abcdef"]
    first, again = (play(lambda _: "0", *tasks, group_size=3, max_turns=1) for _ in range(2))
    starts = [[r.messages[0].content for r in g.rollouts] for g in first]
    assert all(len(set(group)) == 1 for group in starts)
    assert len({group[0] for group in starts}) > 1
    assert starts == [[r.messages[0].content for r in g.rollouts] for g in again]
    with pytest.raises(ExceptionGroup) as caught:
        play(lambda _: "0", Task(id="z", prompt="", metadata={"seed": "7"}))
    assert caught.group_contains(DataError, match="task 'z': metadata 'seed' is '7'; expected a whole number")


def test_limits_on_turns_tokens_and_the_environments_own_truncate() -> None:
    [by_turns] = play(lambda _: "0", max_turns=2)
    assert by_turns.rollouts[0].metrics["turns"] == 2
    [by_world] = play(lambda _: "0")
    assert by_world.rollouts[0].metrics["turns"] == 5
    [by_room] = play(lambda _: "0", max_length=14)
    assert by_room.rollouts[0].metrics["turns"] == 3
    for group in (by_turns, by_world, by_room):
        assert group.rollouts[0].status == "truncated"
        assert group.scores[0].value == -0.25 * group.rollouts[0].metrics["turns"]


def test_one_that_hangs_or_raises_fails_with_its_reason_while_others_go_on() -> None:
    def script(text: str) -> str:
        shown = int(text.split(":")[0])
        start = {random.Random(s).randrange(10): answer for s, answer in bad.items()}.get(shown)
        return start or "0"

    seeds = [next(s for s in range(99) if random.Random(s).randrange(10) == n) for n in range(10)]
    bad = {seeds[1]: "99", seeds[2]: "13"}
    began = time.perf_counter()
    groups = play(script, *(task(s) for s in seeds), step_timeout=0.3, group_size=2)
    assert time.perf_counter() - began < 60
    by_seed = dict(zip(seeds, groups, strict=True))
    for seed, reason in (
        (seeds[1], "TimeoutError: environment 'test_environment/count' (seed {}): step 1: it took longer than 0.3 s"),
        (seeds[2], "RuntimeError: environment 'test_environment/count' (seed {}): step 1 raised ValueError: unlucky ("),
    ):
        group = by_seed.pop(seed)
        assert [r.status for r in group.rollouts] == ["failed"] * 2
        told = f"workflow failed: {reason.format(seed)}"
        assert [s.reason.startswith(told) for s in group.scores] == [True] * 2, group.scores[0].reason
        assert not any(s.valid for s in group.scores)
    assert all(s.valid for g in by_seed.values() for s in g.scores)
    assert all(r.metrics["turns"] == 5 for g in by_seed.values() for r in g.rollouts)


def test_time_of_a_whole_episode() -> None:
    @rlsdk.environment("slow")
    class Slow(Count):
        """Takes its time."""

        def step(self, text: str) -> Step:
            time.sleep(0.3)
            return super().step(text)

    [group] = play(lambda _: "0", environment=Slow, timeout=1.0)
    [rollout] = group.rollouts
    assert rollout.status == "truncated" and 1 <= rollout.metrics["turns"] <= 4
    assert len(rollout.rewards) == rollout.metrics["turns"] - 1  # the last answer was never judged
    assert group.scores[0].valid


def test_a_slow_step_blocks_no_other() -> None:
    """Sixteen environments step at once: each step waits for the other fifteen."""
    others = threading.Barrier(16)

    @rlsdk.environment("sleeps")
    class Sleeps(Count):
        """Sleeps."""

        def step(self, text: str) -> Step:
            others.wait(60)
            return super().step(text)

    groups = play(lambda _: "0", *(task(s) for s in range(16)), environment=Sleeps, max_turns=3)
    assert [rollout.metrics["turns"] for group in groups for rollout in group.rollouts] == [3] * 16


def test_what_ends_is_closed() -> None:
    async def settle() -> None:
        workflow = rlsdk.load("workflow", "environment", environment=Count)
        Count.closed.clear()
        from rlsdk.contracts import Sampling
        from rlsdk.rollout.chat import RolloutContext
        from rlsdk.rollout.generator import RolloutGenerator
        from rlsdk.testing import ScriptedPolicy

        policy = ScriptedPolicy(plain(), lambda _: "0")
        setting = RolloutContext(codec=plain(), client=policy, sampling=Sampling(), max_length=64)
        await RolloutGenerator(workflow, None, 0).produce([task(7)], setting, 2, "k")
        for _ in range(100):
            if len(Count.closed) == 2:
                break
            await asyncio.sleep(0.01)

    asyncio.run(settle())
    assert Count.closed == [7, 7]


def test_options_are_checked_before_anything_starts(tmp_path: Path) -> None:
    for options, words in (
        ({"environment": {"use": Count, "upto": "3"}}, r"environment.upto: expected int, got '3'"),
        ({"environment": "nosuch/one"}, "unknown plugin 'nosuch'"),
        ({"environment": Count, "max_turns": 0}, "max_turns: expected int >= 1, got 0"),
        ({"environment": Count, "timeout": -1.0}, "timeout: expected float > 0 or null, got -1.0"),
        ({"environment": Count, "max_tokens": 0}, "max_tokens: expected int >= 1 or null, got 0"),
    ):
        with pytest.raises(OptionError, match=words):
            rlsdk.load("workflow", "environment", **options)


def test_the_environment_of_a_file_is_found_and_its_rewards_count_where_none_is_named(tmp_path: Path) -> None:
    from rlsdk.config import check
    from rlsdk.errors import ConfigError

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    file = tmp_path / "worlds_lab.py"
    file.write_text(
        "import rlsdk\n@rlsdk.environment('door')\nclass Door:\n    '''A door.'''\n"
        "    def reset(self, seed):\n        return rlsdk.Observation('door')\n"
        "    def step(self, text):\n        return rlsdk.Step(rlsdk.Observation(''), 1.0, True)\n"
    )
    config = {
        "name": "x",
        "model": str(tmp_path / "model"),
        "tasks": {"train": {"use": "seeds", "size": 9}},
        "workflow": {"use": "environment", "environment": "worlds_lab/door"},
        "steps": 1,
        "batch_size": 2,
    }
    plan = check(config, plugins=[str(file)])
    assert [(p.rule.name, p.reference.name) for p in plan.rewards] == [("environment", "core/environment")]
    assert "worlds_lab" in plan.code
    assert [p.rule.name for p in check({**config, "reward": "countdown"}, plugins=[str(file)]).rewards] == ["countdown"]
    with pytest.raises(ConfigError, match=r"reward: none given; .* a workflow that gives rewards itself"):
        check({**config, "workflow": "single_turn"})


def test_a_rollout_without_a_reward_is_invalid() -> None:
    score: Score = rlsdk.load("reward", "environment")(rlsdk.Rollout.from_text(task(), "x"))
    assert not score.valid and "gave a reward" in score.reason


def test_seeds_of_training_and_tests_are_apart() -> None:
    train, tests = (rlsdk.load("tasks", "seeds", split=split, size=5, prompt="Go.")() for split in ("train", "test"))
    assert [t.metadata["seed"] for t in train] == [0, 1, 2, 3, 4]
    assert not {t.id for t in train} & {t.id for t in tests}
    assert train[0].prompt == (Message("user", "Go."),)
    with pytest.raises(OptionError, match="where the seeds of tests begin"):
        rlsdk.load("tasks", "seeds", start=999_999_999)()


def test_threads_are_bounded_and_those_that_hang_are_left() -> None:
    active, most = [0], [0]
    lock = threading.Lock()

    def work(value: int) -> int:
        with lock:
            active[0] += 1
            most[0] = max(most[0], active[0])
        time.sleep(0.02)
        with lock:
            active[0] -= 1
        return value

    async def go() -> None:
        threads = Threads(3)
        assert await asyncio.gather(*(threads.call(work, i, seconds=1) for i in range(12))) == list(range(12))
        assert most[0] == 3
        with pytest.raises(TimeoutError, match=r"longer than 0.05 s"):
            await threads.call(stop.wait, seconds=0.05)
        with pytest.raises(RuntimeError, match="SystemExit: 3"):
            await threads.call(exit, 3)
        assert await threads.call(work, 7, seconds=1) == 7

    asyncio.run(go())
