"""The inputs of credit assignment, labels and minibatches."""

import asyncio
import json
import sys
import threading
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rlsdk
from rlsdk.algorithms.buffers import fifo
from rlsdk.batch.arithmetic import of_top_entropy
from rlsdk.contracts import TrainBatch
from rlsdk.contracts.rollouts import TaskRecord, TaskStatus
from rlsdk.errors import RunError
from rlsdk.rollout.staleness import StalenessPolicy
from rlsdk.rollout.step_batch import apply_filters, labels, pack
from rlsdk.schedules import Schedule
from rlsdk.trainer.credit import CreditAssigner, credit_inputs, minibatches
from rlsdk.trainer.ledger import ReplayBuffer, final_statuses, newly_trained
from rlsdk.types import Group, Score, Task
from tests.rollout.masked import TASK, rollout


@given(st.lists(st.integers(1, 4), min_size=1, max_size=10), st.integers(1, 5), st.integers(1, 3))
def test_minibatches_cover_every_rollout_once_a_pass(sizes: list[int], count: int, passes: int) -> None:
    packed = pack([Group(TASK, [rollout(1, [True])] * n, [Score(0.0)] * n) for n in sizes])
    assert packed is not None
    parts = minibatches(packed, count, passes, [0, 1])
    assert sorted(np.concatenate(parts).tolist()) == sorted(list(range(sum(sizes))) * passes)
    again = minibatches(packed, count, passes, [0, 1])
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=10), st.integers(1, 5))
def test_whole_groups_stay_in_one_minibatch(sizes: list[int], count: int) -> None:
    packed = pack([Group(TASK, [rollout(1, [True])] * n, [Score(0.0)] * n) for n in sizes])
    assert packed is not None
    parts = minibatches(packed, count, 1, [0, 1], whole_groups=True)
    assert sorted(np.concatenate(parts).tolist()) == list(range(sum(sizes)))
    assert sum(len(np.unique(packed.groups[part])) for part in parts) == len(sizes)
    assert len(parts) == min(count, len(sizes))


def graded(*rewards: float) -> Group:
    """A group of one task with these rewards."""
    task = Task(id=str(rewards), prompt="p")
    return Group(task, [rollout(1, [True, True])] * len(rewards), [Score(r) for r in rewards])


def test_expert_rollouts_come_last_and_get_no_credit() -> None:
    packed = pack([graded(0.0, 1.0), graded(0.5)], [Group(TASK, [rollout(1, [True])], [Score(0.0)])])
    assert packed is not None
    assert (packed.sampled, packed.sampled_tokens, packed.groups.tolist()) == (3, 6, [0, 0, 1, 2])
    assert labels(packed, frozenset({"expert"}))["expert"].tolist() == [False, False, False, True]

    @rlsdk.advantage("batch_mean", needs=("values",))
    def batch_mean(x: rlsdk.CreditInputs) -> torch.Tensor:
        assert len(x.values) == 6
        return x.rewards - x.rewards.mean()

    computed = {"values": np.zeros(7, np.float32)}
    batch = CreditAssigner([], rlsdk.load("advantage", batch_mean)).assign(packed.with_fields(**computed)).arrays
    assert batch.tokens["advantages"].tolist() == [-0.5, -0.5, 0.5, 0.5, 0.0, 0.0, 0.0]
    assert pack([], [Group(TASK, [rollout(1, [True])], [Score(0.0)])]) is None
    # A critic learns what was earned, and of an expert's answer, which earned nothing, what it says itself.
    computed = {"values": np.full(7, 0.25, np.float32)}
    gae = rlsdk.load("advantage", "gae", whiten=False)
    tokens = CreditAssigner([], gae).assign(packed.with_fields(**computed)).arrays.tokens
    assert tokens["returns"].tolist() == [0.0, 0.0, 1.0, 1.0, 0.5, 0.5, 0.25]
    assert tokens["advantages"].tolist() == [-0.25, -0.25, 0.75, 0.75, 0.25, 0.25, 0.0]


def test_a_response_keeps_its_length_when_its_first_tokens_are_too_old_to_be_trained_on() -> None:
    long = attrs.evolve(rollout(2, [True] * 8), policy_versions=[-1, -1, 0, 0, 0, 0, 1, 1, 2, 2])
    both = Group(TASK, [long, rollout(2, [True] * 4)], [Score(1.0)] * 2)
    group = StalenessPolicy(token_limit=2).trimmed(both, 2)
    whole, packed = pack([Group(TASK, [long], [Score(1.0)])]), pack([group])
    assert whole is not None and packed is not None
    assert packed.arrays.trained_tokens.tolist() == [4]  # of the other all tokens are old
    x = credit_inputs(packed, frozenset())
    assert (x.lengths.tolist(), x.loss_mask.tolist()) == ([8], [False] * 4 + [True] * 4)
    overlong = rlsdk.load("shaping", "overlong", max_length=10, buffer=4)
    assert overlong(x).tolist() == overlong(credit_inputs(whole, frozenset())).tolist() == [0.5]
    last = packed.with_fields(logprobs=np.zeros(8, np.float32)).for_update().arrays
    assert last.tokens["policy_versions"].tolist() == [0, 0, 0, 0, 1, 1, 2, 2]


def test_shaping_and_advantage_get_the_training_step() -> None:
    @rlsdk.shaping("early")
    def early(x: rlsdk.CreditInputs) -> torch.Tensor:
        return x.rewards + x.train_step

    @rlsdk.advantage("timed")
    def timed(x: rlsdk.CreditInputs) -> torch.Tensor:
        return x.rewards / x.train_steps

    packed = pack([graded(1.0, 2.0)])
    assert packed is not None
    assigner = CreditAssigner([rlsdk.load("shaping", early)], rlsdk.load("advantage", timed))
    batch = assigner.assign(packed, train_step=3, train_steps=10).arrays
    assert batch.tokens["advantages"].tolist() == pytest.approx([0.4, 0.4, 0.5, 0.5])


def test_greedy_rewards_reach_the_advantage_and_a_group_without_one_stays_out() -> None:
    first, second = graded(0.0, 1.0), graded(0.5, 0.75)
    packed = pack([first, second], baselines={second.uid: 0.25})
    assert packed is not None
    batch = CreditAssigner([], rlsdk.load("advantage", "remax")).assign(packed).arrays
    assert [s.value for s in packed.scores] == [0.5, 0.75]
    assert batch.tokens["advantages"].tolist() == [0.25, 0.25, 0.5, 0.5]


@pytest.mark.parametrize(
    ("passing", "expected"),
    [(1.0, [True] * 4 + [False] * 2 + [True, False, False]), (0.5, [True] * 4 + [False] * 2 + [True, True, False])],
)
def test_without_pairs_an_answer_is_right_by_itself_whatever_its_group_is(passing: float, expected: list[bool]) -> None:
    packed = pack([graded(1.0, 1.0, 1.0, 1.0), graded(0.0, 0.0), graded(1.0, 0.5, 0.25)])
    assert packed is not None
    found = labels(packed, frozenset({"preferred"}), passing=passing)
    assert {name: values.tolist() for name, values in found.items()} == {"preferred": expected}


def shown(label: object) -> Group:
    """A demonstration of a task whose metadata hold a label."""
    task = Task(id=f"shown {label}", prompt="p", metadata={"label": label})
    written = attrs.evolve(rollout(1, [True]), task=task, policy_versions=[-1, -1])
    return Group(task, [written], [Score(0.0)])


def test_a_demonstration_is_right_as_its_task_says() -> None:
    marked = Task(id="marked", prompt="p", metadata={"label": True})  # which is about no answer that was sampled
    sampled = Group(marked, [attrs.evolve(rollout(1, [True]), task=marked)] * 2, [Score(1.0), Score(0.0)])
    packed = pack([shown(True), shown(False), sampled], [shown(True)])
    assert packed is not None
    found = labels(packed, frozenset({"preferred"}), rewarded=False)["preferred"]
    assert found.tolist() == [True, False, True, False, True]


def test_a_demonstration_without_a_label_is_right_by_its_reward_or_an_error() -> None:
    packed = pack([shown(1)])
    assert packed is not None
    assert labels(packed, frozenset({"preferred"}))["preferred"].tolist() == [False]
    with pytest.raises(rlsdk.RlsdkError, match=r"task 'shown 1': .*expected `label`, true or false.*got 1: map a col"):
        labels(packed, frozenset({"preferred"}), rewarded=False)


def test_pairs_are_groups_of_a_better_and_a_worse_rollout() -> None:
    needs = frozenset({"pairs", "preferred"})
    packed = pack([graded(1.0, 0.0), graded(0.2, 0.4)])
    assert packed is not None
    found = labels(packed, needs)
    assert found["pairs"].tolist() == [0, 0, 1, 1]
    assert found["preferred"].tolist() == [True, False, False, True]
    for wrong in (graded(0.0, 0.5, 1.0), graded(1.0), graded(0.5, 0.5)):
        packed = pack([graded(1.0, 0.0), wrong])
        assert packed is not None
        with pytest.raises(
            rlsdk.RlsdkError, match=r"learns from pairs .* has \d rollouts?.*add the filter 'best_worst'"
        ):
            labels(packed, needs)


def test_a_loss_that_reads_groups_gets_them_whatever_their_rewards_and_sizes() -> None:
    packed = pack([graded(1.0, 1.0, 1.0), graded(0.5)], [shown(True)])
    assert packed is not None
    found = labels(packed, frozenset({"groups"}))
    assert {name: values.tolist() for name, values in found.items()} == {"groups": [0, 0, 0, 1, 2]}


def test_rewards_that_differ_only_in_the_last_digit_are_a_pair() -> None:
    packed = pack([graded(0.3, 0.1 + 0.2)])  # 0.1 + 0.2 is 0.30000000000000004, and so is the mean of both
    assert packed is not None
    assert labels(packed, frozenset({"pairs", "preferred"}))["preferred"].tolist() == [False, True]


def test_an_advantage_sees_only_what_it_declared() -> None:
    packed = pack([Group(TASK, [rollout(1, [True])] * 2, [Score(0.0), Score(1.0)])])
    assert packed is not None

    @rlsdk.advantage("peeks")
    def peeks(x: rlsdk.CreditInputs) -> torch.Tensor:
        return x.values

    @rlsdk.advantage("declares", needs=("values",))
    def declares(x: rlsdk.CreditInputs) -> torch.Tensor:
        return x.values

    values = {"values": np.array([0.25, 0.75], np.float32)}
    with pytest.raises(
        AttributeError, match=r"^advantage 'peeks': .*values was not computed.*needs=\('values',\).*py, line \d+\)$"
    ):
        CreditAssigner([], rlsdk.load("advantage", peeks)).assign(packed.with_fields(**values))
    batch = CreditAssigner([], rlsdk.load("advantage", declares)).assign(packed.with_fields(**values)).arrays
    assert batch.tokens["advantages"].tolist() == [0.25, 0.75]


def test_token_rewards_reach_the_advantage_at_their_tokens() -> None:
    seen: list[torch.Tensor] = []

    @rlsdk.advantage("looks", needs=("token_rewards",))
    def looks(x: rlsdk.CreditInputs) -> torch.Tensor:
        seen.append(x.token_rewards)
        return x.rewards

    scores = [Score(3.0, token_rewards=((1, 1.0), (3, 2.0))), Score(5.0)]
    packed = pack([Group(TASK, [rollout(1, [True, True, True])] * 2, scores)])
    assert packed is not None
    CreditAssigner([], rlsdk.load("advantage", looks)).assign(packed)
    assert seen[0].tolist() == [1.0, 0.0, 2.0, 0.0, 0.0, 5.0]


@pytest.mark.parametrize("kind", ["shaping", "advantage"])
def test_a_component_that_changes_its_inputs_is_named(kind: str) -> None:
    def forgets(x: rlsdk.CreditInputs) -> torch.Tensor:
        x.loss_mask[0] = False  # would take the token out of the update
        return x.rewards

    part = rlsdk.load(kind, getattr(rlsdk, kind)("forgets")(forgets))
    advantage = part if kind == "advantage" else rlsdk.load("advantage", "grpo")
    packed = pack([Group(TASK, [rollout(1, [True, True, True])] * 2, [Score(3.0), Score(5.0)])])
    assert packed is not None
    with pytest.raises(
        RunError, match=rf"^{kind} 'forgets' changed x.loss_mask in place, .*test_batch.py, line \d+\)$"
    ):
        CreditAssigner([part] if kind == "shaping" else [], advantage).assign(packed)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline", "reinforce_plus_plus"])
def test_the_greatest_rewards_keep_their_contrast(name: str) -> None:
    """In float32 the squares of so many would add up to infinity, and every advantage would be zero."""
    values = [1e18, -1e18] * 400
    packed = pack([Group(TASK, [rollout(1, [True])] * len(values), [Score(v) for v in values])])
    assert packed is not None
    batch = CreditAssigner([], rlsdk.load("advantage", name), whiten=True).assign(packed).arrays
    np.testing.assert_allclose(batch.tokens["advantages"], np.sign(values), rtol=2e-3)


async def assigned_while_the_loop_runs(assigner: CreditAssigner, entered: Any, release: Any) -> TrainBatch:
    """Assign credit with a component that waits until this event loop, which must not stand still, releases it."""
    packed = pack([graded(1.0, 0.0)])
    assert packed is not None
    task = asyncio.ensure_future(assigner.assign_aside(packed, train_step=3, train_steps=10))
    while not entered.is_set():  # noqa: ASYNC110 - set in a thread
        await asyncio.sleep(0)
    release.set()
    return (await task).arrays


@pytest.mark.parametrize("kind", ["shaping", "advantage"])
def test_a_component_that_blocks_does_not_hold_up_the_event_loop(kind: str) -> None:
    entered, release = threading.Event(), threading.Event()

    def blocks(x: rlsdk.CreditInputs) -> torch.Tensor:
        """Blocks."""
        entered.set()
        assert release.wait(10)
        return x.rewards * x.train_step

    part = rlsdk.load(kind, getattr(rlsdk, kind)("blocks")(blocks))
    plain = rlsdk.load("advantage", "rloo")
    assigner = CreditAssigner([part], plain) if kind == "shaping" else CreditAssigner([], part)
    batch = asyncio.run(assigned_while_the_loop_runs(assigner, entered, release))
    assert batch.tokens["advantages"].tolist() == ([3, 3, -3, -3] if kind == "shaping" else [3, 3, 0, 0])


def test_an_async_component_is_awaited_on_the_running_loop() -> None:
    loops = []

    async def run() -> TrainBatch:
        entered, release = asyncio.Event(), asyncio.Event()

        @rlsdk.shaping("asks")
        async def asks(x: rlsdk.CreditInputs) -> torch.Tensor:
            """Waits for the loop."""
            loops.append(asyncio.get_running_loop() is here)
            entered.set()
            await release.wait()
            return x.rewards + 1

        @rlsdk.advantage("echo")
        @attrs.define
        class Echo:
            """Async, as a class."""

            async def __call__(self, x: rlsdk.CreditInputs) -> torch.Tensor:
                loops.append(asyncio.get_running_loop() is here)
                return x.rewards

        here = asyncio.get_running_loop()
        assigner = CreditAssigner([rlsdk.load("shaping", asks)], rlsdk.load("advantage", Echo))
        return await assigned_while_the_loop_runs(assigner, entered, release)

    assert asyncio.run(run()).tokens["advantages"].tolist() == [2, 2, 1, 1]
    assert loops == [True, True]


def test_memory_follows_its_component_in_a_chain_that_has_changed(caplog: pytest.LogCaptureFixture) -> None:
    def chain(*names: str) -> CreditAssigner:
        options = {"kl_penalty": {"target": 0.1}, "reward_norm": {"method": "running"}}
        shaping = [rlsdk.load("shaping", name, **options.get(name, {})) for name in names]
        return CreditAssigner(shaping, rlsdk.load("advantage", "grpo"))

    before, after = chain("kl_penalty", "reward_norm"), chain("overlong", "reward_norm", "kl_penalty")
    before._shaping[0].value, before._shaping[1].count = 0.5, 7
    state = json.loads(json.dumps(before.state()))
    after.restore(state)
    assert (after._shaping[1].count, after._shaping[2].value) == (7, 0.5)
    assert not caplog.records
    chain("kl_penalty").restore({"0": {"value": 0.25}})  # as earlier versions wrote it
    chain("reward_norm").restore(chain("kl_penalty").state())
    assert "shaping 'reward_norm' is not in the checkpoint; it starts without state" in caplog.text


def test_a_state_that_json_or_a_component_cannot_use_names_the_component():
    @rlsdk.advantage("keeps")
    class Keeps:
        """Keeps a tensor."""

        def __call__(self, x):
            return x.rewards

        def state(self):
            return {"mean": torch.zeros(2)}

        def restore(self, state):
            self.mean = state["mean"]

    with pytest.raises(RunError, match=r"advantage 'keeps' failed: KeyError: 'mean'"):  # as of an earlier version
        CreditAssigner([], rlsdk.load("advantage", Keeps)).restore({"0 advantage 'keeps'": {}})
    with pytest.raises(RunError, match=r"the state\(\) of advantage 'keeps' cannot be saved: .*Tensor.*plain JSON"):
        CreditAssigner([], rlsdk.load("advantage", Keeps)).state()


@rlsdk.shaping("counting")
class Counting:
    """Counts its calls, and reports them."""

    calls: Any = 0

    def __call__(self, x: rlsdk.CreditInputs) -> torch.Tensor:
        self.calls += 1
        return x.rewards

    def metrics(self) -> dict[str, Any]:
        return {"calls": self.calls, "of_no_call": None}


def test_shapings_and_advantages_report_metrics_under_their_names() -> None:
    parts = [rlsdk.load("shaping", Counting), rlsdk.load("shaping", "overlong")]
    assigner = CreditAssigner(parts, rlsdk.load("advantage", "grpo"))
    assert assigner.metrics() == {"shaping/counting/calls": 0.0}
    parts[0].calls = np.int64(3)
    assert assigner.metrics() == {"shaping/counting/calls": 3.0}
    parts[0].calls = "many"
    with pytest.raises(RunError, match=r"shaping 'counting'.*'many'"):
        assigner.metrics()


def test_an_error_of_an_advantage_names_it_and_its_line() -> None:
    @rlsdk.advantage("fails")
    async def fails(x: rlsdk.CreditInputs) -> torch.Tensor:
        """Fails."""
        raise ArithmeticError("no such number")

    packed = pack([graded(1.0, 0.0)])
    assert packed is not None
    assigner = CreditAssigner([], rlsdk.load("advantage", fails))
    said = r"advantage 'fails' failed: ArithmeticError: no such number \(.*test_batch\.py, line \d+\)"
    with pytest.raises(RunError, match=said):
        asyncio.run(assigner.assign_aside(packed))
    with pytest.raises(RunError, match=said):
        assigner.assign(packed)


def test_an_advantage_that_calls_exit_fails_the_run_with_its_name() -> None:
    @rlsdk.advantage("leaves")
    def leaves(x: rlsdk.CreditInputs) -> torch.Tensor:
        """Ends the process."""
        sys.exit(0)

    packed = pack([graded(1.0, 0.0)])
    assert packed is not None
    with pytest.raises(RunError, match=r"advantage 'leaves' failed: SystemExit: 0"):
        asyncio.run(CreditAssigner([], rlsdk.load("advantage", leaves)).assign_aside(packed))


def test_an_error_of_a_filter_names_it() -> None:
    @rlsdk.filter("odd")
    def odd(group: Group) -> bool:
        """Fails."""
        raise KeyError("no such field")

    with pytest.raises(RunError, match="filter 'odd' failed: KeyError: 'no such field'"):
        apply_filters([graded(1.0, 0.0)], [rlsdk.load("filter", odd)])


def test_a_filter_that_forgets_to_return_is_named_and_a_bool_of_numpy_is_one() -> None:
    @rlsdk.filter("forgets")
    def forgets(group: Group) -> bool | None:
        """Forgets groups without a right answer."""
        if group.scores[0].value > 0.5:
            return True

    assert len(apply_filters([graded(1.0, 0.0)], [forgets])) == 1
    with pytest.raises(
        RunError,
        match=r"filter 'forgets' returned None; expected True, False or a Group; see .*forgets .*test_batch.py, ",
    ):
        apply_filters([graded(0.0, 0.0)], [forgets])
    spread = lambda group: np.std([score.value for score in group.scores]) > 0  # noqa: E731
    assert [len(apply_filters([graded(*values)], [spread])) for values in ((1.0, 0.0), (1.0, 1.0))] == [1, 0]


def test_advantages_beyond_float32_are_refused() -> None:
    @rlsdk.advantage("huge")
    def huge(x: rlsdk.CreditInputs) -> torch.Tensor:
        """Huge."""
        return x.rewards.double() * 1e300

    packed = pack([graded(1.0, 0.0)])
    assert packed is not None
    with pytest.raises(RunError, match="returned 1 values that are not finite in float32"):
        CreditAssigner([], rlsdk.load("advantage", huge)).assign(packed)


def test_a_wrong_shape_names_the_component() -> None:
    packed = pack([Group(TASK, [rollout(1, [True, True])] * 2, [Score(0.0)] * 2)])
    assert packed is not None

    @rlsdk.advantage("crooked")
    def crooked(x: rlsdk.CreditInputs) -> torch.Tensor:
        return torch.zeros(7)

    with pytest.raises(
        rlsdk.RlsdkError,
        match=r"advantage 'crooked' returned \[7\]; expected a tensor \[2\].*\[4\].*; see .*crooked.*test_batch.py",
    ):
        CreditAssigner([], rlsdk.load("advantage", crooked)).assign(packed)


def test_whole_numbers_of_a_plugin_count_as_the_numbers_that_they_are() -> None:
    packed = pack([graded(1.0, 0.0, 1.0, 0.0)])
    assert packed is not None

    @rlsdk.shaping("right")
    def right(x: rlsdk.CreditInputs) -> torch.Tensor:
        return (x.rewards > 0.5).long()

    for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        advantage = rlsdk.load("advantage", name)
        plain = CreditAssigner([], advantage).assign(packed).arrays.tokens["advantages"]
        shaped = CreditAssigner([rlsdk.load("shaping", right)], advantage).assign(packed).arrays.tokens["advantages"]
        assert plain.any() and shaped.tolist() == plain.tolist()

    @rlsdk.advantage("right")
    def judged(x: rlsdk.CreditInputs) -> torch.Tensor:
        return (x.rewards > 0.5).long()

    found = CreditAssigner([], rlsdk.load("advantage", judged), whiten=True).assign(packed).arrays.tokens["advantages"]
    # Mean 1/2 and, of 8 tokens, variance 8 · (1/2)² / 7.
    expected = np.repeat([1, -1, 1, -1], 2) * 0.5 / (2 / 7) ** 0.5
    assert len(found) == 8 and np.allclose(found, expected, atol=1e-6)


def test_a_groups_uid_survives_filters_that_build_a_new_group_by_hand() -> None:
    group = graded(1.0, 0.5, 0.0)
    by_hand = lambda g: Group(g.task, g.rollouts[:2], g.scores[:2])  # noqa: E731
    evolved = lambda g: attrs.evolve(g, task=attrs.evolve(g.task), rollouts=g.rollouts[1:], scores=g.scores[1:])  # noqa: E731
    chain = [rlsdk.load("filter", "nonzero_variance"), by_hand, evolved, rlsdk.load("filter", "top_k", k=1)]
    (left,) = apply_filters([group], chain)
    assert (len(left), left.uid) == (1, group.uid)


def test_filters_see_valid_rollouts_and_may_take_parts() -> None:
    group = Group(TASK, [rollout(1, [True])] * 3, [Score(1.0), Score.invalid("x"), Score(0.0)])
    best = apply_filters([group], [lambda g: Group(g.task, g.rollouts[:1], g.scores[:1])])
    assert [len(g) for g in best] == [1]
    assert apply_filters([group], [lambda g: len(g) == 3]) == []
    assert [len(g) for g in apply_filters([group], [])] == [2]


def test_filters_do_not_see_rollouts_without_a_token_to_train_on() -> None:
    """All of its tokens are too old, or nothing was sampled: `pack` leaves it out."""
    empty, full = rollout(1, [False, False]), rollout(1, [True, True])
    chain = {name: [rlsdk.load("filter", name)] for name in ("nonzero_variance", "best_worst")}
    equal = Group(TASK, [full, full, empty], [Score(1.0), Score(1.0), Score(0.0)])
    assert apply_filters([equal], chain["nonzero_variance"]) == []  # advantages of 1, 1 would be 0, 0
    differ = Group(TASK, [full, full, empty], [Score(1.0), Score(0.5), Score(0.0)])
    (pair,) = apply_filters([differ], chain["best_worst"])
    assert [score.value for score in pair.scores] == [1.0, 0.5]
    packed = pack([pair])
    assert packed is not None
    assert labels(packed, frozenset({"pairs", "preferred"}))["preferred"].tolist() == [True, False]
    none = Group(TASK, [empty, empty], [Score(1.0), Score(0.0)])
    assert len(apply_filters([none], chain["nonzero_variance"])) == 1  # the step says that nothing was sampled


def test_filters_see_all_rollouts_of_a_trajectory_that_has_a_token_to_train_on() -> None:
    steps = [attrs.evolve(rollout(1, mask), trajectory="a", step=i) for i, mask in enumerate([[True], [False]])]
    group = Group(TASK, steps, [Score(0.0), Score(1.0)])
    assert [len(each) for each in apply_filters([group], [rlsdk.load("filter", "pass_rate", high=2)])] == [2]


def test_each_group_of_a_batch_ends_as_what_became_of_it() -> None:
    def record(number: int, mask: list[bool], *, valid: bool = True) -> TaskRecord:
        task = Task(id=f"t{number}", prompt="p")
        made = attrs.evolve(rollout(1, mask), task=task)
        score = Score(1.0) if valid else Score.invalid("hung")
        return TaskRecord(number, "a", task, group=Group(task, [made, made], [score, Score.invalid("hung")]))

    records = [record(0, [False]), record(1, [True], valid=False), record(2, [True]), record(3, [True])]
    left_out = records[3].group
    packed = pack([attrs.evolve(t.group) for t in records if t.group is not None and t.group is not left_out])
    assert final_statuses(records, packed) == [
        TaskStatus.FILTERED,
        TaskStatus.FAILED,
        TaskStatus.TRAINED,
        TaskStatus.FILTERED,
    ]
    assert final_statuses(records[:2], None) == [TaskStatus.FILTERED, TaskStatus.FAILED]


def test_groups_with_a_changed_task_are_trained_replayed_and_keep_their_baseline() -> None:
    def record(number: int) -> TaskRecord:
        task = Task(id="same", prompt="p")
        made = [attrs.evolve(rollout(1, [True]), task=attrs.evolve(task, metadata={"tries": i})) for i in range(2)]
        return TaskRecord(number, "a", task, group=Group(task, made, [Score(1.0), Score(0.0)]))

    records = [record(0), record(1)]
    groups = [t.group for t in records if t.group is not None]
    baselines = {groups[0].uid: 0.25, groups[1].uid: 0.75}
    packed = pack(apply_filters(groups, []), baselines=baselines)
    assert packed is not None
    assert packed.uids == tuple(g.uid for g in groups for _ in range(2))
    assert packed.without_experts().uids == packed.uids
    assert packed.baselines is not None and packed.baselines.tolist() == [0.25, 0.25, 0.75, 0.75]
    statuses = final_statuses(records, packed)
    assert statuses == [TaskStatus.TRAINED, TaskStatus.TRAINED]
    used = newly_trained(records, statuses, 1, {0: 0.25, 1: 0.75})
    again = ReplayBuffer(fifo, count=2, most_uses=2, young=lambda group, _: group)
    again.add(used)
    assert [u.group.uid for u in again.draw(1)] == [g.uid for g in groups]


def test_gdpo_weighs_the_parts_of_the_reward_as_the_run_does() -> None:
    """In the group, `a` is relative ±0.70711 and `b` the opposite; with weight 0.5, a half of it is left."""
    parts = [{"reward/a": 1.0, "reward/b": 0.0}, {"reward/a": 0.0, "reward/b": 1.0}]
    scores = [Score(p["reward/a"] + 0.5 * p["reward/b"], metrics=p) for p in parts]
    left_out = Score.invalid("no answer")
    packed = pack([Group(TASK, [rollout(1, [True, True])] * 3, [*scores, left_out])])
    assert packed is not None
    gdpo = rlsdk.load("advantage", "gdpo")
    for weights, sign in (({"a": 1.0, "b": 0.5}, 1), ({"a": 0.5, "b": 1.0}, -1), ({"a": 1.0, "b": 1.0}, 0)):
        found = CreditAssigner([], gdpo, reward_weights=weights).assign(packed).arrays.tokens["advantages"]
        assert np.allclose(found, np.repeat([sign, -sign], 2) * 0.5**0.5, atol=1e-4)


@pytest.mark.parametrize(
    ("share", "kept"),
    [
        (0.0, [3]),  # only the highest
        (0.2, [3, 4]),  # of 6 sampled tokens, the threshold is at place 4 of 0 to 5
        (0.5, [1, 3, 4]),  # at place 2.5: between 0.3 and 0.5
        (0.9, [1, 3, 4, 5, 6]),  # at place 0.5
        (1.0, [0, 1, 3, 4, 5, 6]),
    ],
)
def test_tokens_of_low_entropy_lose_their_advantage(share: float, kept: list[int]) -> None:
    """Entropies 0.1, 0.5, -, 2.0, 1.0, 0.2, 0.3 over both rollouts; one token was not sampled."""
    rollouts = [rollout(1, [True, True, False, True]), rollout(1, [True, True, True])]
    packed = pack([Group(TASK, rollouts, [Score(1.0), Score(0.0)])])
    assert packed is not None
    entropy = np.array([0.1, 0.5, 9.0, 2.0, 1.0, 0.2, 0.3], np.float32)
    packed = packed.with_fields(entropy=entropy)
    grpo = rlsdk.load("advantage", "grpo", std_normalize=False)
    plain = CreditAssigner([], grpo, whiten=True, clip=0.9).assign(packed).arrays.tokens["advantages"]
    found = CreditAssigner([], grpo, whiten=True, clip=0.9, top_entropy=share).assign(packed).arrays
    expected = [value if place in kept else 0.0 for place, value in enumerate(plain.tolist())]
    assert found.tokens["advantages"].tolist() == expected
    assert found.loss_mask.tolist() == packed.arrays.loss_mask.tolist()  # denominators stay


def test_equal_entropies_are_all_kept_and_no_sampled_token_is_no_error() -> None:
    mask = torch.tensor([True, True, True, False])
    assert of_top_entropy(torch.full((4,), 0.7), mask, 0.2).tolist() == mask.tolist()
    none = torch.zeros(4, dtype=torch.bool)
    assert of_top_entropy(torch.rand(4), none, 0.2).tolist() == none.tolist()


def test_the_share_of_tokens_may_change_during_training() -> None:
    packed = pack([graded(1.0, 0.0)])
    assert packed is not None
    packed = packed.with_fields(entropy=np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    share = Schedule(1.0, 0.0, 2)
    assigner = CreditAssigner([], rlsdk.load("advantage", "grpo"), top_entropy=share)
    counts = [np.count_nonzero(assigner.assign(packed, train_step=i).arrays.tokens["advantages"]) for i in range(4)]
    assert counts == [4, 2, 1, 1]
