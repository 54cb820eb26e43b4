"""Workflows, chats and scoring with a scripted policy: the outcome of every token and every failure."""

import asyncio

import attrs
import pytest

import rlsdk
from rlsdk import nano
from rlsdk.contracts import Chat, RewardSpec
from rlsdk.errors import DataError, EngineError, ScoringError
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.scoring.outcome import check_budget
from rlsdk.scoring.scorer import RewardTerm, Scorer
from rlsdk.testing import run_workflow
from rlsdk.types import Group, Message, Rollout, Score, Task

TASK = Task(id="a", prompt="3,5,17>9:", answer="9")


@pytest.fixture(scope="module")
def codec() -> ChatTokenizer:
    return ChatTokenizer(nano.make_tokenizer(100))


def scorer(*parts: tuple[float, object]) -> Scorer:
    return Scorer(
        [RewardTerm(RewardSpec(f"p{i}", weight), rlsdk.load("reward", fn)) for i, (weight, fn) in enumerate(parts)]
    )


@rlsdk.reward("one")
def one(rollout: Rollout) -> float:
    return 1.0


def test_single_turn_marks_exactly_what_was_sampled(codec: ChatTokenizer) -> None:
    [group] = run_workflow(
        rlsdk.load("workflow", "single_turn"), [TASK], codec, lambda _: "<answer>17-5-3</answer>", group_size=3
    )
    for rollout in group.rollouts:
        prompt, answer = codec.prompt(TASK)[1], codec.encode("<answer>17-5-3</answer>")
        assert rollout.token_ids.tolist() == [*prompt, *answer, codec.end]
        assert rollout.loss_mask.tolist() == [False] * len(prompt) + [True] * (len(answer) + 1)
        assert rollout.policy_versions.tolist() == [-1] * len(prompt) + [0] * (len(answer) + 1)
        assert rollout.text == "<answer>17-5-3</answer>"
        assert rollout.status == "finished"
        assert not rollout.token_ids.flags.writeable


def test_groups_of_a_run_have_the_same_uids_when_they_are_made_again(codec: ChatTokenizer) -> None:
    tasks = [TASK, TASK]
    first, again = (run_workflow(rlsdk.load("workflow", "single_turn"), tasks, codec, lambda _: "1") for _ in range(2))
    assert [g.uid for g in first] == [g.uid for g in again]
    assert len({g.uid for g in first}) == 2


def test_truncation_is_recorded(codec: ChatTokenizer) -> None:
    [group] = run_workflow(rlsdk.load("workflow", "single_turn"), [TASK], codec, lambda _: "1+2+3+4", max_tokens=3)
    assert group.rollouts[0].status == "truncated"
    assert group.rollouts[0].text == "1+2"


def test_a_prefill_is_not_trained_on_and_is_part_of_the_answer() -> None:
    tokenizer = nano.make_tokenizer(100)
    tokenizer.chat_template = (
        "{% for m in messages %}({{ m.content }}"
        "{% if not (loop.last and m.role == 'assistant') %}){% endif %}{% endfor %}"
        "{% if add_generation_prompt %}({% endif %}"
    )
    codec = ChatTokenizer(tokenizer)
    task = Task(id="c", prompt=[Message("user", "3>9"), Message("assistant", "<think>")])
    [group] = run_workflow(rlsdk.load("workflow", "single_turn"), [task], codec, lambda _: "4</think>")
    rollout = group.rollouts[0]
    assert rollout.text == "<think>4</think>"
    assert codec.decode([rollout.token_ids[~rollout.loss_mask]]) == ["(3>9)(<think>"]
    assert codec.decode([rollout.token_ids[rollout.loss_mask]]) == ["4</think>"]


def test_a_demonstration_is_trained_on_with_the_end_of_text(codec: ChatTokenizer) -> None:
    task = Task(id="d", prompt="3>9:", metadata={"demonstration": "3+6"})
    [group] = run_workflow(rlsdk.load("workflow", "demonstration"), [task], codec, lambda _: "")
    ids = group.rollouts[0].token_ids[group.rollouts[0].loss_mask]
    assert ids.tolist() == [*codec.encode("3+6"), codec.end]


def test_a_task_without_a_demonstration_is_named(codec: ChatTokenizer) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run_workflow(rlsdk.load("workflow", "demonstration"), [TASK], codec, lambda _: "")
    assert caught.group_contains(DataError, match="task 'a' has no demonstration")


def test_later_turns_append_to_what_was_sampled(codec: ChatTokenizer) -> None:
    @rlsdk.workflow("twice")
    async def twice(task: Task, chat: Chat) -> Rollout:
        await chat.sample()
        await chat.sample()
        return chat.finish()

    [group] = run_workflow(
        rlsdk.load("workflow", twice), [TASK], codec, lambda text: "1" if text.endswith(":") else "2"
    )
    rollout = group.rollouts[0]
    assert codec.decode([rollout.token_ids]) == ["3,5,17>9:12"]
    assert [m.content for m in rollout.messages if m.role == "assistant"] == ["1", "2"]


def test_a_workflow_that_raises_is_a_failed_rollout_never_a_zero(codec: ChatTokenizer) -> None:
    @rlsdk.workflow("breaks")
    async def breaks(task: Task, chat: Chat) -> Rollout:
        await chat.sample()
        raise RuntimeError("tool is down")

    [group] = run_workflow(rlsdk.load("workflow", breaks), [TASK], codec, lambda _: "1", scorer=scorer((1.0, one)))
    assert group.rollouts[0].status == "failed"
    assert not group.scores[0].valid
    assert "RuntimeError: tool is down" in group.scores[0].reason


def test_a_plain_function_as_workflow_is_refused_with_advice_to_use_async(codec: ChatTokenizer) -> None:
    @rlsdk.workflow("plain")
    def plain(task: Task, chat: Chat) -> Rollout:
        return chat.finish()

    [group] = run_workflow(rlsdk.load("workflow", plain), [TASK], codec, lambda _: "1", scorer=scorer((1.0, one)))
    assert "workflow failed: TypeError: it is a plain function; write async def" in group.scores[0].reason


@pytest.mark.parametrize("returned", [None, [], "2", 7, [None]], ids=repr)
def test_a_workflow_that_returns_no_rollout_fails_and_the_run_continues(codec: ChatTokenizer, returned: object) -> None:
    @rlsdk.workflow("forgets")
    async def forgets(task: Task, chat: Chat) -> object:
        await chat.sample()
        return returned if task.id == "forgotten" else chat.finish()

    tasks = [attrs.evolve(TASK, id="forgotten"), TASK]
    broken, whole = run_workflow(
        rlsdk.load("workflow", forgets), tasks, codec, lambda _: "1", scorer=scorer((1.0, one))
    )
    assert broken.rollouts[0].status == "failed" and not broken.scores[0].valid
    assert f"workflow failed: it returned {returned!r}; expected a Rollout" in broken.scores[0].reason
    assert whole.scores[0].valid


def test_a_workflow_that_returns_a_rollout_twice_fails(codec: ChatTokenizer) -> None:
    @rlsdk.workflow("doubles")
    async def doubles(task: Task, chat: Chat) -> list[Rollout]:
        await chat.sample()
        return [chat.finish()] * 2

    [group] = run_workflow(rlsdk.load("workflow", doubles), [TASK], codec, lambda _: "1", scorer=scorer((1.0, one)))
    assert [rollout.status for rollout in group.rollouts] == ["failed"]
    assert "workflow failed: it returned the same Rollout twice" in group.scores[0].reason


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_workflow_that_returns_a_token_id_outside_of_the_vocabulary_fails(codec: ChatTokenizer, token: int) -> None:
    @rlsdk.workflow("beyond")
    async def beyond(task: Task, chat: Chat) -> Rollout:
        await chat.sample()
        found = chat.finish()
        return attrs.evolve(found, token_ids=[*found.token_ids[:-1], token])

    [group] = run_workflow(rlsdk.load("workflow", beyond), [TASK], codec, lambda _: "1", scorer=scorer((1.0, one)))
    said = f"workflow failed: it returned a Rollout with the token id {token}; the model has 0 to {codec.size - 1}"
    assert group.scores[0].reason == said


def test_an_invalid_message_or_reward_fails_only_its_rollout(codec: ChatTokenizer) -> None:
    @rlsdk.workflow("odd")
    async def odd(task: Task, chat: Chat) -> Rollout:
        await chat.sample()
        chat.reward(float("nan") if task.id == "nan" else 0.5)
        if task.id == "bytes":
            chat.say(b"x")  # type: ignore[arg-type]
        return chat.finish()

    tasks = [attrs.evolve(TASK, id=name) for name in ("nan", "bytes", "right")]
    found = run_workflow(rlsdk.load("workflow", odd), tasks, codec, lambda _: "1")
    scores = [group.scores[0] for group in found]
    assert [score.valid for score in scores] == [False, False, True] and scores[2].value == 0.5
    assert "must be finite" in scores[0].reason and "workflow failed: ValueFault: a message" in scores[1].reason


def test_a_cancellation_that_a_workflow_leaks_fails_its_rollout_alone(codec: ChatTokenizer) -> None:
    @rlsdk.workflow("leaks")
    async def leaks(task: Task, chat: Chat) -> Rollout:
        await chat.sample()
        if task.id == "leaking":
            raise asyncio.CancelledError
        return chat.finish()

    tasks = [attrs.evolve(TASK, id="leaking"), TASK]
    broken, whole = run_workflow(rlsdk.load("workflow", leaks), tasks, codec, lambda _: "1", scorer=scorer((1.0, one)))
    assert broken.rollouts[0].status == "failed" and not broken.scores[0].valid
    assert "workflow failed: its code raised CancelledError" in broken.scores[0].reason
    assert whole.scores[0].valid


def test_sampling_without_an_engine_is_an_error_that_says_why(codec: ChatTokenizer) -> None:
    from rlsdk.contracts import Sampling
    from rlsdk.rollout.chat import RolloutContext
    from rlsdk.rollout.generator import RolloutGenerator

    context = RolloutContext(codec=codec, client=None, sampling=Sampling(), max_length=64)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(RolloutGenerator(rlsdk.load("workflow", "single_turn"), None, 0).produce([TASK], context, 1, "k"))
    assert caught.group_contains(EngineError, match="the workflow samples the policy")


def test_parts_are_weighted_logged_and_a_failing_one_invalidates() -> None:
    @rlsdk.reward("half")
    async def half(rollout: Rollout) -> Score:
        return Score(0.5, metrics={"correct": 1})

    @rlsdk.reward("fails")
    def fails(rollout: Rollout) -> float:
        raise ValueError("no such file")

    @rlsdk.reward("nan")
    def nan(rollout: Rollout) -> float:
        return float("nan")

    rollout = Rollout.from_text(TASK, "x")
    score = asyncio.run(scorer((2.0, one), (0.1, half)).score(rollout))
    assert score.value == pytest.approx(2.05)
    assert score.metrics["reward/p0"] == 1.0 and score.metrics["reward/p1"] == 0.5 and score.metrics["correct"] == 1
    for bad, words in ((fails, "no such file"), (nan, "finite")):
        broken = asyncio.run(scorer((1.0, one), (1.0, bad)).score(rollout))
        assert not broken.valid and words in broken.reason and "p1" in broken.reason


def test_a_batch_reward_gets_what_finishes_together(codec: ChatTokenizer) -> None:
    sizes: list[int] = []

    @rlsdk.reward("many", batch=True)
    def many(rollouts: list[Rollout]) -> list[float]:
        sizes.append(len(rollouts))
        return [float(i) for i in range(len(rollouts))]

    groups = run_workflow(
        rlsdk.load("workflow", "single_turn"),
        [TASK, TASK],
        codec,
        lambda _: "1",
        scorer=scorer((1.0, many)),
        group_size=4,
    )
    assert sum(sizes) == 8 and len(sizes) < 8
    assert all(s.valid for g in groups for s in g.scores)


def test_a_batch_reward_of_the_wrong_length_is_a_failure(codec: ChatTokenizer) -> None:
    @rlsdk.reward("short", batch=True)
    def short(rollouts: list[Rollout]) -> list[float]:
        return [0.0]

    [group] = run_workflow(
        rlsdk.load("workflow", "single_turn"), [TASK], codec, lambda _: "1", scorer=scorer((1.0, short)), group_size=4
    )
    assert all("returned 1 score for 4 rollouts" in s.reason for s in group.scores)


def test_the_budget_of_invalid_scores_names_step_task_and_cause() -> None:
    scores = [Score(1.0)] * 8 + [Score.invalid("p0: hung")] * 2
    group = Group(TASK, [Rollout.from_text(TASK, "x")] * 10, scores)
    assert check_budget([group], 0.2, 7) == 2
    with pytest.raises(ScoringError, match=r"step 7: 2 of 10 .* max_invalid=0.1 allows. task 'a': p0: hung"):
        check_budget([group], 0.1, 7)


@rlsdk.reward("paid_for", runs="driver", reads_given=True)
def paid_for(rollout: Rollout) -> float:
    """The reward that the workflow gave."""
    return rollout.rewards[0][1]


@pytest.mark.parametrize("name", ["one", "environment", "paid_for"])
def test_an_uncounted_workflow_reward_is_reported_once(
    codec: ChatTokenizer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    @rlsdk.workflow("paid")
    async def paid(task: Task, chat: Chat) -> Rollout:
        await chat.sample()
        chat.reward(0.25)
        return chat.finish()

    chosen = {"one": one, "environment": "environment", "paid_for": paid_for}[name]
    scorer = Scorer([RewardTerm(RewardSpec(name), rlsdk.load("reward", chosen))])
    groups = run_workflow(rlsdk.load("workflow", paid), [TASK, TASK], codec, lambda _: "1", scorer=scorer)
    assert [group.scores[0].value for group in groups] == [1.0 if name == "one" else 0.25] * 2
    warned = caplog.text.count("the workflow gave a reward, which only the reward 'environment' uses")
    assert warned == (name == "one")
