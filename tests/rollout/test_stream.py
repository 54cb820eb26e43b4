"""Several task sources: their shares of a batch, and their state in a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.errors import DataError, RunError
from rlsdk.plugins import Plugins
from rlsdk.rollout.mixture import Allocator, Source, TaskStreams
from rlsdk.rollout.stream import SampledStream, TaskStream
from rlsdk.types import Group, Rollout, Score, Task


def streams(**weights: float) -> TaskStreams:
    return TaskStreams(
        [
            Source(
                name,
                weight,
                TaskStream([Task(id=f"{name}{i}", prompt="x") for i in range(7)], 0, lambda _: 1, 9, "drop"),
            )
            for name, weight in weights.items()
        ]
    )


def test_a_small_source_is_not_starved() -> None:
    allocator = Allocator([0.05, 0.95])
    given = [allocator.divide(8) for _ in range(20)]
    assert given[0] == [0, 8]  # 0.4 of a task: carried over
    assert given[1] == [1, 7]
    assert sum(small for small, _ in given) == 8  # of 160, a twentieth


WEIGHTS = st.lists(st.floats(0, 10), min_size=1, max_size=6).filter(lambda w: sum(w) > 1e-3)


@given(weights=WEIGHTS, batches=st.lists(st.integers(0, 70), max_size=40))
def test_batches_are_full_and_every_source_stays_near_its_share(weights: list[float], batches: list[int]) -> None:
    allocator, given = Allocator(weights), [0] * len(weights)
    for count in batches:
        parts = allocator.divide(count)
        assert sum(parts) == count
        assert min(parts) >= 0
        given = [a + b for a, b in zip(given, parts, strict=True)]
    for weight, got in zip(weights, given, strict=True):
        assert abs(got - sum(batches) * weight / sum(weights)) < 2
        assert weight or not got


def drawn(tasks: TaskStreams, count: int) -> list[str]:
    """A batch."""
    return [tasks[source].draw()[0].id for source, part in tasks.divide(count).items() for _ in range(part)]


@given(takes=st.lists(st.integers(1, 9), min_size=2, max_size=8), at=st.integers(1, 7))
def test_a_resumed_run_draws_what_one_left_alone_draws(takes: list[int], at: int) -> None:
    whole, first = streams(a=0.2, b=1, c=0.5), streams(a=0.2, b=1, c=0.5)
    batches = [drawn(whole, n) for n in takes]
    for n in takes[:at]:
        drawn(first, n)
    resumed = streams(a=0.2, b=1, c=0.5)
    resumed.restore(first.state())
    assert [drawn(resumed, n) for n in takes[at:]] == batches[at:]


def test_a_source_with_a_changed_number_of_tasks_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    before = streams(a=1, b=1)
    drawn(before, 4)
    state = before.state()
    streams(a=1, b=1).restore(state)
    assert not caplog.records
    state["b"]["size"] = 5
    streams(a=1, b=1).restore(state)
    assert "source b had 5 tasks at the checkpoint and has 7 now: their order differs" in caplog.text
    sampled(Least()).restore({"a": {**state["b"], **sampled(Least(), (1,) * 5).state()["a"]}})
    assert "source a had 5 tasks at the checkpoint and has 7 now: the sampler knows tasks by" in caplog.text


def test_a_sampler_whose_state_json_cannot_hold_is_reported_with_the_entry() -> None:
    sampler = Least()
    sampler.sums = {0: np.float32(0.5)}  # type: ignore[dict-item]
    with pytest.raises(RunError, match=r"Least object .* cannot be saved: \['0'\]: Object of type float32 is not JSON"):
        sampled(sampler).state()
    kept = sampled(Least()).state()
    kept["a"]["sampler"]["state"] = {"zero": 0.5}
    with pytest.raises(RunError, match=r"Least object .* failed: ValueError: invalid literal for int"):
        sampled(Least()).restore(kept)


def test_a_new_source_begins_at_its_start() -> None:
    before = streams(a=1)
    drawn(before, 3)
    after = streams(a=1, b=1)
    after.restore(before.state())
    assert after.state()["a"]["position"] == 3
    assert after.state()["b"] == {"position": 0, "dropped": 0, "carry": 0.0, "size": 7}


class Least:
    """A sampler that draws the index with the smallest sum of rewards, at random among equals."""

    def __init__(self) -> None:
        self.offered: list[list[int]] = []
        self.sums: dict[int, float] = {}
        self.noted: list[int] = []

    def draw(self, available: np.ndarray, random: np.random.Generator) -> int:
        self.offered.append(available.tolist())
        least = min(self.sums.get(index, 0.0) for index in available)
        return int(random.choice([index for index in available if self.sums.get(index, 0.0) == least]))

    def note(self, index: int, group: Group) -> None:
        self.noted.append(index)
        self.sums[index] = self.sums.get(index, 0.0) + group.scores[0].value

    def state(self) -> dict[str, float]:
        return {str(index): value for index, value in self.sums.items()}

    def restore(self, state: dict[str, float]) -> None:
        self.sums = {int(index): value for index, value in state.items()}


def sampled(sampler: Any, lengths: tuple[int, ...] = (1,) * 7, on_long: str = "drop") -> TaskStreams:
    """A source of tasks with prompts of these lengths, of which 9 fits."""
    tasks = [Task(id=str(i), prompt="x" * length) for i, length in enumerate(lengths)]
    return TaskStreams([Source("a", 1.0, SampledStream(sampler, tasks, 0, lambda t: len(t.prompt), 9, on_long))])


def done(task: Task) -> Group:
    return Group(task, [Rollout.from_text(task, "2")], [Score(1.0)])


def batch(tasks: TaskStreams, count: int) -> list[str]:
    """A batch that is drawn at once and whose groups end in another order."""
    tasks.learn()
    drawn = [tasks["a"].draw() for _ in range(count)]
    for task, position in reversed(drawn):
        tasks["a"].note(position, done(task))
    return [task.id for task, _ in drawn]


def test_a_sampler_chooses_among_tasks_that_are_not_in_progress_and_learns_in_the_order_of_draws() -> None:
    sampler = Least()
    tasks = sampled(sampler)
    first, second = batch(tasks, 4), batch(tasks, 3)
    assert sorted(first + second) == list("0123456")
    assert sampler.noted == [int(index) for index in first]  # those of the second batch, before the third
    assert [len(offered) for offered in sampler.offered] == [7, 6, 5, 4, 7, 6, 5]
    everything = [tasks["a"].draw()[0].id for _ in range(8)]  # more than there are: some run twice
    assert set(everything) == set("0123456")


def test_a_task_is_found_again_by_its_position() -> None:
    tasks = sampled(Least())
    for _ in range(20):
        task, position = tasks["a"].draw()
        assert tasks["a"].at(position) is task


def test_long_prompts_are_not_offered_again_and_none_that_fits_is_an_error() -> None:
    sampler = Least()
    tasks = sampled(sampler, (1, 99, 1))
    batch(tasks, 3)
    assert tasks.dropped == 1
    assert all(1 not in offered for offered in sampler.offered[-1:])
    with pytest.raises(
        DataError, match="no task fits: max_prompt_tokens allows 9 tokens, but all 2 prompts are longer"
    ):
        sampled(Least(), (99, 99))["a"].draw()
    with pytest.raises(DataError, match="its prompt has 99 tokens"):
        sampled(Least(), (99,), "error")["a"].draw()


@given(takes=st.lists(st.integers(1, 5), min_size=2, max_size=8), at=st.integers(1, 7))
def test_a_resumed_run_with_a_sampler_draws_what_one_left_alone_draws(takes: list[int], at: int) -> None:
    lengths = (1, 1, 99, 1, 1, 1, 99)
    whole, first, resumed = (sampled(Least(), lengths) for _ in range(3))
    batches = [batch(whole, n) for n in takes]
    for n in takes[:at]:
        batch(first, n)
    resumed.restore(first.state())
    assert [batch(resumed, n) for n in takes[at:]] == batches[at:]
    assert resumed.dropped == whole.dropped


def test_tasks_in_progress_at_a_checkpoint_are_not_offered_after_it() -> None:
    before, sampler = sampled(Least()), Least()
    busy = [before["a"].draw()[0].id for _ in range(3)]
    after = sampled(sampler)
    after.restore(before.state())
    assert after["a"].draw()[0].id not in busy
    assert sampler.offered == [[index for index in range(7) if str(index) not in busy]]


def test_a_task_whose_group_expired_is_not_offered_until_it_has_been_sampled_again() -> None:
    sampler = Least()
    tasks = sampled(sampler)
    (first, at), (second, also_at) = tasks["a"].draw(), tasks["a"].draw()
    tasks["a"].note(at, done(first))
    tasks["a"].repeat(at)  # before the sampler has learned of the group
    tasks["a"].note(also_at, done(second))
    tasks.learn()
    tasks["a"].repeat(also_at)  # after it
    busy, resumed = {int(first.id), int(second.id)}, sampled(Least())
    resumed.restore(tasks.state())
    for each in (tasks, resumed):
        assert {each["a"].draw()[0].id for _ in range(5)} == {str(i) for i in range(7) if i not in busy}
        for task, position in ((first, at), (second, also_at)):
            each["a"].note(position, done(task))
        each.learn()
        assert {int(each["a"].draw()[0].id) for _ in range(2)} == busy
    assert sampler.noted == [int(first.id), int(second.id)] * 2


class Weighing(Least):
    """A sampler whose source weighs as much as the rewards of its groups, and which reports it."""

    weight: Any = 1.0

    def note(self, index: int, group: Group) -> None:
        super().note(index, group)
        self.weight = group.scores[0].value

    def source_weight(self) -> Any:
        return self.weight

    def metrics(self) -> dict[str, float]:
        return {"noted": len(self.noted)}


def weighed(**weights: float) -> TaskStreams:
    tasks = {name: [Task(id=f"{name}{i}", prompt="x") for i in range(7)] for name in weights}
    made = {name: SampledStream(Weighing(), tasks[name], 0, lambda _: 1, 9, "drop") for name in weights}
    return TaskStreams([Source(name, weight, made[name]) for name, weight in weights.items()])


def noted(tasks: TaskStreams, **rewards: float) -> TaskStreams:
    """Let each source draw a task, whose group has this reward."""
    for name, reward in rewards.items():
        task, position = tasks[name].draw()
        tasks[name].note(position, Group(task, [Rollout.from_text(task, "2")], [Score(reward)]))
    tasks.learn()
    return tasks


def test_samplers_change_the_shares_of_their_sources() -> None:
    tasks = weighed(a=1, b=3)
    assert tasks.divide(8) == {"a": 2, "b": 6}
    noted(tasks, a=0.9, b=0.1)
    assert tasks.divide(8) == {"a": 6, "b": 2}  # 0.9 and 0.3
    assert tasks.metrics() == {"sampler/a/noted": 1.0, "sampler/b/noted": 1.0}
    noted(tasks, a=0.0, b=0.1)
    assert tasks.divide(8) == {"a": 0, "b": 8}
    noted(tasks, b=0.0)
    assert tasks.divide(8) == {"a": 2, "b": 6}  # by the weights of the config, since nothing else is left
    assert noted(weighed(a=1), a=1.0).metrics() == {"sampler/noted": 1.0}


@pytest.mark.parametrize("given", [-1.0, float("nan"), float("inf"), True, None, "1"])
def test_a_sampler_that_gives_its_source_no_weight_is_named(given: Any) -> None:
    sampler = Weighing()
    sampler.weight = given
    with pytest.raises(RunError, match=r"rollout.sampler: source_weight\(\) returned .*; expected a finite number"):
        sampled(sampler).divide(4)


@pytest.mark.parametrize("given", [7, -1, 0.0, True, None])
def test_a_sampler_that_draws_no_available_task_is_named(given: Any) -> None:
    sampler = Least()
    sampler.draw = lambda available, random: given  # type: ignore[method-assign]
    with pytest.raises(RunError, match=r"rollout.sampler drew .*; expected one of the 7 indices that it was given"):
        sampled(sampler)["a"].draw()


@pytest.mark.parametrize("method", ["draw", "note"])
@pytest.mark.parametrize("fault", ["raise ValueError('odd')", "sys.exit(3)"])
def test_a_sampler_that_raises_or_exits_is_named(tmp_path: Path, method: str, fault: str) -> None:
    bodies = {"draw": "return int(available[0])", "note": "pass", method: fault}
    (tmp_path / "lab.py").write_text(
        "import sys\nimport rlsdk\n@rlsdk.sampler('odd')\nclass Odd:\n"
        f"    def draw(self, available, random): {bodies['draw']}\n"
        f"    def note(self, index, group): {bodies['note']}\n"
    )
    plugins = Plugins([tmp_path / "lab.py"])
    tasks = sampled(plugins.resolve(plugins.reference("sampler", "lab/odd")))
    with pytest.raises(
        RunError, match=r"sampler 'odd' failed: (ValueError: odd|SystemExit: 3) \(.*lab.py, line [56]\)"
    ):
        batch(tasks, 1)
        tasks.learn()
