"""Rewards that compare a group's rollouts get all of them in one call; those that take lists get any."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import rlsdk
from rlsdk import nano
from rlsdk.config import check
from rlsdk.contracts import Chat, RewardSpec, Sampling, ScoringLimits, batch_of
from rlsdk.errors import ConfigError, PluginError, ScoringError
from rlsdk.plugins import Plugins
from rlsdk.rollout.chat import RolloutContext
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.rollout.generator import RolloutGenerator
from rlsdk.scoring.batching import Batcher
from rlsdk.scoring.outcome import check_budget
from rlsdk.scoring.scorer import RewardTerm, Scorer
from rlsdk.testing import ScriptedPolicy, run_workflow
from rlsdk.types import Group, Rollout, Score, Task
from tests.scoring.group_lab import CALLS

LAB = Path(__file__).with_name("group_lab.py")
Make = Callable[..., Scorer]
NONE_OF_THREE = "; the call was for all 3 rollouts of the task, so none of them has a score"


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    return tmp_path / "calls.txt"


@pytest.fixture
def task(calls: Path) -> Task:
    return Task(id="t", prompt="3>9:", metadata={CALLS: str(calls)})


@pytest.fixture
def scorer() -> Iterator[Make]:
    made: list[Scorer] = []

    def make(*names: str | tuple[str, RewardSpec], **limits: Any) -> Scorer:
        plugins = Plugins([LAB])
        parts = []
        for each in names:
            name, rule = each if isinstance(each, tuple) else (each, RewardSpec(each.rpartition("/")[2]))
            reference = plugins.reference("reward", name)
            parts.append(RewardTerm(rule, plugins.resolve(reference), reference))
        made.append(Scorer(parts, ScoringLimits(**{"timeout": 20.0, "workers": 1, **limits})))
        return made[-1]

    yield make
    for each in made:
        each.close()


def answers(task: Task, *texts: str) -> list[Rollout]:
    return [Rollout.from_text(task, text) for text in texts]


def group(scorer: Scorer, rollouts: Sequence[Rollout]) -> list[Score]:
    return asyncio.run(scorer.score_group(rollouts))


def values(scores: Sequence[Score]) -> list[float | None]:
    return [score.value if score.valid else None for score in scores]


# --- batch="group"


@pytest.mark.parametrize("name", ["rank", "rank_here"])
def test_a_group_reward_is_called_once_with_the_whole_group_in_order(
    scorer: Make, task: Task, calls: Path, name: str
) -> None:
    found = group(scorer(f"group_lab/{name}"), answers(task, "bbb", "a", "cccc", "dd"))
    assert values(found) == [pytest.approx(1 / 3), 1.0, 0.0, pytest.approx(2 / 3)]
    assert calls.read_text() == "bbb,a,cccc,dd\n"


def test_the_rollouts_of_a_task_reach_a_group_reward_together_however_they_finish(
    scorer: Make, task: Task, calls: Path
) -> None:
    """The answers are of different lengths, so that they finish in turns of the event loop that lie apart."""
    said = iter(["1", "1+1+1+1", "1+1"])

    @rlsdk.workflow("uneven")
    async def uneven(task: Task, chat: Chat) -> Rollout:
        await chat.sample()
        for _ in range(len(chat.finish().text)):
            await asyncio.sleep(0)
        return chat.finish()

    running = scorer("group_lab/rank")
    workflow = rlsdk.load("workflow", uneven)
    [made] = run_workflow(
        workflow, [task], ChatTokenizer(nano.make_tokenizer(100)), lambda _: next(said), scorer=running, group_size=3
    )
    assert calls.read_text() == "1,1+1+1+1,1+1\n"
    assert [score.value for score in made.scores] == [1.0, 0.0, 0.5]


def test_groups_are_never_mixed(scorer: Make, task: Task, calls: Path) -> None:
    running = scorer("group_lab/rank")
    run_workflow(
        rlsdk.load("workflow", "single_turn"),
        [task] * 4,
        ChatTokenizer(nano.make_tokenizer(100)),
        lambda _: "1",
        scorer=running,
        group_size=3,
    )
    assert calls.read_text() == "1,1,1\n" * 4


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("raise", rf"picky: KeyError: 'x' \(.*group_lab.py, line 44\){NONE_OF_THREE}"),
        ("hang", f"picky: it took longer than 1 s and was killed{NONE_OF_THREE}"),
        ("few", "picky: it returned 2 scores for 3 rollouts; expected one for each"),
    ],
)
def test_a_group_reward_that_fails_invalidates_the_whole_group(scorer: Make, task: Task, text: str, cause: str) -> None:
    running = scorer("group_lab/picky", timeout=1.0)
    found = group(running, answers(task, "a", text, "b"))
    assert values(found) == [None] * 3
    for score in found:
        assert re.fullmatch(cause, score.reason), score.reason
    assert values(group(running, answers(task, "a", "b"))) == [1.0, 1.0]


def test_a_failed_request_costs_only_its_own_rollout_a_score_if_none_are_compared(
    scorer: Make, task: Task, calls: Path
) -> None:
    found = group(scorer("group_lab/asks"), answers(task, "a", "raise", "bb"))
    assert values(found) == [1.0, None, 2.0]
    assert re.fullmatch(r"asks: OSError: the server is down \(.*group_lab.py, line \d+\)", found[1].reason)
    assert calls.read_text() == "a,raise,bb\na\nraise\nbb\n"


def test_one_that_failed_or_that_a_gate_shuts_out_is_not_compared(scorer: Make, task: Task, calls: Path) -> None:
    running = scorer(("group_lab/tags", RewardSpec("tags", gate=1.0)), "group_lab/rank")
    found = group(running, answers(task, "::::", "no tags", ":", "::"))
    assert calls.read_text() == "::::,:,::\n"
    assert values(found) == [1.0, 0.0, 2.0, 1.5]
    assert found[1].metrics["reward/rank"] == 0.0


def test_a_gate_on_a_group_reward_shuts_out_what_comes_after_it(scorer: Make, task: Task) -> None:
    running = scorer(("group_lab/rank", RewardSpec("rank", gate=0.5)), "group_lab/tags")
    assert values(group(running, answers(task, "::", ":"))) == [0.0, 2.0]


def test_a_failed_rollout_is_left_out_and_the_others_are_compared(scorer: Make, task: Task, calls: Path) -> None:
    @rlsdk.workflow("breaks_once")
    async def breaks_once(task: Task, chat: Chat) -> Rollout:
        await chat.sample()
        if chat.finish().text == "2":
            raise RuntimeError("tool is down")
        return chat.finish()

    said = iter(["1", "2", "1+1"])
    [made] = run_workflow(
        rlsdk.load("workflow", breaks_once),
        [task],
        ChatTokenizer(nano.make_tokenizer(100)),
        lambda _: next(said),
        scorer=scorer("group_lab/rank"),
        group_size=3,
    )
    assert calls.read_text() == "1,1+1\n"
    assert values(made.scores) == [1.0, None, 0.0]


def test_the_steps_of_trajectories_are_compared_in_order(scorer: Make, task: Task, calls: Path) -> None:
    @rlsdk.workflow("steps")
    async def steps(task: Task, chat: Chat) -> list[Rollout]:
        await chat.sample()
        return [chat.finish(trajectory="a"), chat.finish(trajectory="a")]

    said = iter(["1", "1+1"])
    [made] = run_workflow(
        rlsdk.load("workflow", steps),
        [task],
        ChatTokenizer(nano.make_tokenizer(100)),
        lambda _: next(said),
        scorer=scorer("group_lab/rank"),
        group_size=2,
    )
    assert calls.read_text() == "1,1,1+1,1+1\n"
    assert len(made.scores) == 4 and all(score.valid for score in made.scores)


def test_a_group_that_was_stopped_is_compared_when_it_is_whole(scorer: Make, task: Task, calls: Path) -> None:
    stopped = [True]
    said = iter(["1", "1+1", "1+1+1"])

    @rlsdk.workflow("stops")
    async def stops(task: Task, chat: Chat) -> Rollout:
        await chat.sample()
        text = chat.finish().text
        return chat.finish(status="aborted" if stopped and text == "1+1" else "finished")

    codec = ChatTokenizer(nano.make_tokenizer(100))
    policy: Any = ScriptedPolicy(codec, lambda _: next(said))
    setting = RolloutContext(codec=codec, client=policy, sampling=Sampling(max_tokens=16), max_length=64)
    seen: list[str] = []
    generator = RolloutGenerator(
        rlsdk.load("workflow", stops), scorer("group_lab/rank"), 0, lambda rollout, *_: seen.append(rollout.text)
    )
    first = asyncio.run(generator.group(task, setting, 2, "a"))
    assert values(first.scores) == [None, None] and seen == [] and not calls.exists()
    stopped.clear()
    second = asyncio.run(generator.group(task, setting, 2, "a", before=first))
    assert [rollout.text for rollout in second.rollouts] == ["1", "1+1+1"]
    assert second.rollouts[0] is first.rollouts[0]
    assert values(second.scores) == [1.0, 0.0]
    assert (calls.read_text(), seen) == ("1,1+1+1\n", ["1", "1+1+1"])


def test_no_step_of_a_trajectory_is_shown_before_its_group_could_be_compared(scorer: Make, task: Task) -> None:
    said = iter(["1", "1+1"])

    @rlsdk.workflow("in_steps")
    class InSteps:
        scored_at_end = True

        async def run(self, task: Task, chat: Chat) -> list[Rollout]:
            await chat.sample()
            status = "aborted" if chat.finish().text == "1+1" else "finished"
            return [chat.finish(trajectory="a", step=i, status=status) for i in range(2)]

    codec = ChatTokenizer(nano.make_tokenizer(100))
    policy: Any = ScriptedPolicy(codec, lambda _: next(said))
    setting = RolloutContext(codec=codec, client=policy, sampling=Sampling(max_tokens=16), max_length=64)
    seen: list[str] = []
    generator = RolloutGenerator(
        rlsdk.load("workflow", InSteps), scorer("group_lab/rank"), 0, lambda rollout, *_: seen.append(rollout.text)
    )
    made = asyncio.run(generator.group(task, setting, 2, "a"))
    assert values(made.scores) == [None] * 4 and seen == []


def test_rewards_of_a_rollout_in_which_nothing_was_sampled_add_up() -> None:
    terms = [RewardTerm(RewardSpec(name), rlsdk.load("reward", name)) for name in ("environment", "exact_match")]
    blank = Rollout(
        Task(id="t", prompt="1", answer="2"), (), [1, 2], [False] * 2, [0.0] * 2, [-1] * 2, rewards=[(0, 1.0)]
    )
    score = asyncio.run(Scorer(terms).score(blank))
    assert score.valid and score.value == 1.0
    assert sum(value for _, value in score.token_rewards or ()) == 1.0


def test_a_workflow_that_asks_what_one_answer_is_worth_is_refused(scorer: Make, task: Task) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run_workflow(
            rlsdk.load("workflow", "best_of"),
            [task],
            ChatTokenizer(nano.make_tokenizer(100)),
            lambda _: "1",
            scorer=scorer("group_lab/rank"),
        )
    assert caught.group_contains(ConfigError, match="rank compares the rollouts of a group, but the workflow scores")


def test_remax_without_a_greedy_answer_to_compare_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = {
        "name": "x",
        "model": {"path": str(tmp_path)},
        "tasks": {"train": {"use": "countdown"}},
        "reward": "group_lab/rank",
        "steps": 1,
    }
    assert check({**config, "algorithm": "rloo"}, plugins=[LAB]).rewards
    with pytest.raises(ConfigError, match="reward: group_lab/rank compares the rollouts of a group, but the algo"):
        check({**config, "algorithm": "remax"}, plugins=[LAB])


def test_the_mark_refuses_other_scopes_and_a_cache() -> None:
    with pytest.raises(PluginError, match=r"batch must be False, True or 'group'; got 'groups'"):
        rlsdk.reward("x", batch="groups")  # type: ignore[arg-type]
    with pytest.raises(PluginError, match="leave cache out"):
        rlsdk.reward("x", batch="group", cache=True)


def test_options_may_choose_whole_groups() -> None:
    plugins = Plugins([LAB])
    for compare, batch in ((False, True), (True, "group")):
        assert batch_of(plugins.resolve(plugins.reference("reward", "group_lab/either", {"compare": compare}))) == batch


def test_the_example_of_the_documentation_ranks(task: Task) -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "reward.md").read_text()
    (code,) = re.findall(r'^```python\n(@rlsdk.reward\("rank".*?)^```', page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"rlsdk": rlsdk, "__name__": "example"}
    exec(code, names)
    said = iter(["1", "1+1+1+1", "1+1"])
    [made] = run_workflow(
        rlsdk.load("workflow", "single_turn"),
        [task],
        ChatTokenizer(nano.make_tokenizer(100)),
        lambda _: next(said),
        scorer=Scorer([RewardTerm(RewardSpec("rank"), rlsdk.load("reward", names["rank"]))]),
        group_size=3,
    )
    assert [score.value for score in made.scores] == [1.0, 0.0, 0.5]


# --- batch=True


def test_rollouts_that_wait_for_a_process_travel_together(scorer: Make, task: Task, calls: Path) -> None:
    running = scorer("group_lab/lengths")

    async def one_after_the_other() -> list[Score]:
        await running.score(answers(task, "warm")[0])
        pending = []
        for text in "abcdef":  # each in a turn of its own, while the one process is busy with the first
            pending.append(asyncio.ensure_future(running.score(answers(task, text)[0])))
            for _ in range(3):
                await asyncio.sleep(0)
        return await asyncio.gather(*pending)

    assert values(asyncio.run(one_after_the_other())) == [1.0] * 6
    found = calls.read_text().splitlines()
    assert ",".join(found) == "warm,a,b,c,d,e,f"
    assert len(found) <= 5  # a call for each made 7


def test_rollouts_that_finish_together_are_one_call_from_the_first_on(scorer: Make, task: Task, calls: Path) -> None:
    running = scorer("group_lab/lengths", workers=2)

    async def together() -> list[Score]:
        return await asyncio.gather(*(running.score(rollout) for rollout in answers(task, *"abcdefgh")))

    assert values(asyncio.run(together())) == [1.0] * 8
    assert calls.read_text() == "a,b,c,d,e,f,g,h\n"


def test_a_list_of_the_wrong_length_is_reported_and_not_retried_one_by_one(scorer: Make, task: Task) -> None:
    running = scorer("group_lab/constant_list")

    async def together() -> list[Score]:
        return await asyncio.gather(*(running.score(rollout) for rollout in answers(task, "a", "b", "c")))

    for score in asyncio.run(together()):
        assert score.reason == "constant_list: it returned 1 score for 3 rollouts; expected one for each"


def test_a_batcher_serves_one_event_loop_after_another(task: Task) -> None:
    gate: list[asyncio.Event] = []

    async def slow(take: Any) -> list[int]:
        if gate:
            await gate[0].wait()
        return [1] * len(take())

    batcher = Batcher(slow)

    async def gives_up() -> None:
        gate.append(asyncio.Event())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await batcher(answers(task, "a")[0])

    async def once() -> int:
        found: int = await batcher(answers(task, "b")[0])
        return found

    asyncio.run(gives_up())
    gate.clear()
    assert asyncio.run(once()) == 1


def test_rollouts_that_wait_when_an_event_loop_ends_are_not_scored_in_the_next(task: Task) -> None:
    begun: list[asyncio.Event] = []
    scored: list[str] = []

    async def score(take: Any) -> list[int]:
        if begun and not begun[0].is_set():
            begun[0].set()
            await asyncio.Event().wait()  # until the loop ends
        rollouts = take()
        scored.extend(rollout.response for rollout in rollouts)
        return [1] * len(rollouts)

    batcher = Batcher(score)

    async def leaves() -> None:
        begun.append(asyncio.Event())
        batcher(answers(task, "a")[0])
        await begun[0].wait()

    async def once() -> int:
        found: int = await batcher(answers(task, "b")[0])
        return found

    asyncio.run(leaves())
    assert asyncio.run(once()) == 1 and scored == ["b"]


def test_calls_that_fail_before_they_take_leave_no_caller_waiting(task: Task) -> None:
    async def fails(take: Any) -> list[int]:
        raise ScoringError("no process")

    async def both() -> list[Any]:
        batcher = Batcher(fails)
        return await asyncio.gather(*map(batcher, answers(task, "a", "b")), return_exceptions=True)

    assert [str(error) for error in asyncio.run(both())] == ["no process"] * 2


# --- what is no score


@pytest.mark.parametrize("where", ["pool", "driver"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("None", "returns: it returned None; expected a float or Score"),
        ("tuple", "returns: it returned (1.0, 2.0); expected a float or Score"),
        ("complex", "returns: it returned 1j; expected a float or Score"),
        ("text", "returns: it returned '1.0'; expected a float or Score"),
        ("pair", "returns: it returned tensor([1., 2.]); expected a float or Score"),
        (
            "position",
            "returns: its token_rewards have position -1; the prompt's first token is 0",
        ),
        ("tokens", 0.3),
        ("tensor", 0.5),
        ("one element", 0.5),
        ("float32", 0.5),
        ("bool", 1.0),
    ],
)
def test_a_reward_that_returns_no_number_is_reported(
    module_scorers: dict[str, Scorer], where: str, text: str, expected: float | str
) -> None:
    (score,) = group(module_scorers[where], answers(Task(id="t", prompt="?"), text))
    assert (score.value if score.valid else score.reason) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [("odd", "it returned _Odd(); expected a float"), ("raises", "_Odd: (its message cannot be shown: RuntimeError)")],
)
@pytest.mark.parametrize("where", ["pool", "driver"])
def test_objects_that_cannot_be_read_or_shown_are_reported(
    module_scorers: dict[str, Scorer], where: str, text: str, words: str
) -> None:
    (score,) = group(module_scorers[where], answers(Task(id="t", prompt="?"), text))
    assert not score.valid and words in score.reason


@pytest.fixture(scope="module")
def module_scorers() -> Iterator[dict[str, Scorer]]:
    plugins = Plugins([LAB])
    reference = plugins.reference("reward", "group_lab/returns")
    reward = plugins.resolve(reference)
    limits = ScoringLimits(timeout=60.0, workers=1)
    made = {
        "pool": Scorer([RewardTerm(RewardSpec("returns"), reward, reference)], limits),
        "driver": Scorer([RewardTerm(RewardSpec("returns"), reward)], limits),
    }
    yield made
    made["pool"].close()


def test_a_call_that_is_killed_while_it_imports_says_so(scorer: Make, task: Task) -> None:
    (late,) = group(scorer("group_lab/imports_late", timeout=1.5), answers(task, "a"))  # long enough to begin importing
    assert late.reason == (
        "imports_late: it took longer than 1.5 s and was killed; this was the first call in its process, which first "
        "imported torch: declare @rlsdk.reward(…, imports=('torch',)) to import them once, before any call"
    )
    (declared,) = group(scorer("group_lab/imports_declared", timeout=0.2), answers(task, "a"))
    assert declared.reason == "imports_declared: it took longer than 0.2 s and was killed"


def test_the_budget_names_each_cause_once() -> None:
    tasks = [Task(id=name, prompt="?") for name in "abcde"]
    scores = [Score.invalid("r: KeyError: 'x' (my.py, line 3)")] * 4 + [Score.invalid("r: hung")]
    groups = [Group(t, [Rollout.from_text(t, "x")], [score]) for t, score in zip(tasks, scores, strict=True)]
    with pytest.raises(ScoringError) as caught:
        check_budget(groups, 0.1, 7)
    assert str(caught.value).endswith(" task 'a' and 3 more: r: KeyError: 'x' (my.py, line 3); task 'e': r: hung")
