"""The task stream, the canary, pass@k, placement."""

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.cluster.placement import Layout, threads_of
from rlsdk.config import check
from rlsdk.config.schema import PlacementSection
from rlsdk.contracts import Model
from rlsdk.engines.canary import Canary, allowed_outliers, describe_checksums, tolerance_of
from rlsdk.errors import CanaryError, DataError
from rlsdk.evaluation.evaluation import is_correct, measured, pass_at, scored_trajectories
from rlsdk.rollout.stream import TaskStream
from rlsdk.trainer import assembly
from rlsdk.types import Group, Rollout, Score, Task
from tests.architectures import make

EXAMPLE = Path(__file__).parents[2] / "examples" / "countdown_nano.yaml"


def stream(count: int, *, limit: int = 99, on_long: str = "drop", seed: int = 0) -> TaskStream:
    tasks = [Task(id=i, prompt="x" * (i + 1)) for i in range(count)]
    return TaskStream(tasks, seed, lambda t: len(t.prompt), limit, on_long)


@given(st.integers(1, 20), st.lists(st.integers(1, 7), min_size=1, max_size=8))
def test_each_epoch_holds_every_task_once_and_a_position_is_all_there_is_to_save(count: int, takes: list[int]) -> None:
    whole = stream(count)
    drawn = [whole.draw()[0].id for _ in range(sum(takes))]
    for start in range(0, len(drawn) - count + 1, count):
        assert sorted(drawn[start : start + count], key=int) == [str(i) for i in range(count)]
    resumed = stream(count)
    resumed.position = takes[0]
    rest = [resumed.draw() for _ in range(sum(takes[1:]))]
    assert [task.id for task, _ in rest] == drawn[takes[0] :]
    assert all(resumed.at(position).id == task.id for task, position in rest)


def test_long_prompts_are_dropped_and_counted() -> None:
    s = stream(10, limit=5)
    drawn = {s.draw()[0].id for _ in range(5)}
    assert drawn == {"0", "1", "2", "3", "4"}
    assert s.dropped == s.position - 5


def test_long_prompts_may_be_an_error() -> None:
    with pytest.raises(DataError, match=r"its prompt has \d+ tokens; max_prompt_tokens allows 5"):
        one = stream(10, limit=5, on_long="error")
        for _ in range(10):
            one.draw()


def test_no_task_that_fits_is_an_error_not_a_loop() -> None:
    with pytest.raises(DataError, match="no task fits: max_prompt_tokens allows 0 tokens, but all 3 prompts"):
        stream(3, limit=0).draw()


def engines(*seen: np.ndarray) -> dict[int, np.ndarray]:
    return dict(enumerate(seen))


def test_the_canary_names_version_position_and_gap() -> None:
    canary = Canary(np.arange(4), tolerance=1e-3)
    learner = np.array([-1.0, -2.0, -3.0], np.float32)
    assert canary.check(0, learner, engines(learner + 1e-4), updated=False) == pytest.approx(1e-4, rel=0.1)
    with pytest.raises(
        CanaryError, match=r"version 1: engine 1 .* 1 of 3 fixed tokens, most at position 3: -2\.9\d+ against -3\.0"
    ):
        canary.check(1, learner, engines(learner, learner + np.array([0, 0, 0.02], np.float32)), updated=True)


def test_a_mixture_of_experts_may_differ_in_a_few_tokens_but_not_in_many_and_never_without_a_number() -> None:
    canary = Canary(np.arange(21), tolerance=0.1, outliers=0.1)
    learner, gap = np.linspace(-3, -1, 20, dtype=np.float32), np.zeros(20, np.float32)
    gap[[4, 11]] = 0.5
    assert canary.check(0, learner, engines(learner + gap), updated=False) == pytest.approx(0.5)
    gap[17] = 0.2
    with pytest.raises(CanaryError, match=r"disagree on 3 of 20 fixed tokens, .* positions 5, 12, 18"):
        canary.check(0, learner, engines(learner + gap), updated=False)
    gap[[4, 11, 17]] = np.nan, 0, 0
    with pytest.raises(CanaryError, match="gap inf"):
        canary.check(0, learner, engines(learner + gap), updated=False)


@pytest.mark.parametrize(
    ("name", "dtype", "share"),
    [("qwen3-moe", "bfloat16", 0.1), ("qwen3-moe", "float32", 0.0), ("qwen3", "bfloat16", 0.0)],
)
def test_only_a_mixture_of_experts_of_16_bits_may_differ(tmp_path: Path, name: str, dtype: Any, share: float) -> None:
    make(tmp_path, name)
    assert allowed_outliers(Model(path=str(tmp_path), dtype=dtype)) == share


def test_a_tolerance_of_zero_is_kept_and_an_exact_model_has_no_other() -> None:
    assert tolerance_of(Model(path="m"), 0.0) == 0.0
    assert tolerance_of(Model(path="m"), None) == 1e-3
    assert tolerance_of(Model(path="m", dtype="float16"), None) == 0.05
    assert tolerance_of(Model(path="m", exact=True), 0.1) == 0.0


def test_the_canary_sees_nan() -> None:
    with pytest.raises(CanaryError, match="gap inf"):
        Canary(np.arange(2), 1.0).check(
            0, np.zeros(1, np.float32), engines(np.full(1, np.nan, np.float32)), updated=False
        )


def test_a_sync_without_effect_is_caught_at_the_first_update() -> None:
    canary = Canary(np.arange(3), tolerance=10.0)
    same = np.array([-1.0, -2.0], np.float32)
    canary.check(0, same, engines(same), updated=False)
    with pytest.raises(CanaryError, match="engine 0 did not change with the update"):
        canary.check(1, same, engines(same), updated=True)


def test_an_update_that_16_bits_do_not_show_proves_nothing_and_the_next_one_that_shows_must_reach_the_engines() -> None:
    canary = Canary(np.arange(3), tolerance=0.15, rounds=True)
    start = np.array([-1.0, -2.0], np.float32)
    canary.check(0, start, engines(start), updated=False)
    canary.check(1, start, engines(start), updated=True)
    with pytest.raises(CanaryError, match=r"version 2: .* engine 0 did not change .* learner's by up to 0.001"):
        canary.check(2, start + np.float32(1e-3), engines(start), updated=True)


def test_a_later_sync_without_effect_is_caught_where_the_learner_moved() -> None:
    """An adapter that an engine keeps under its old id would stay below the tolerance for many small steps."""
    canary = Canary(np.arange(3), tolerance=1e-3)
    start, shift = np.array([-1.0, -2.0], np.float32), np.float32(5e-4)
    canary.check(0, start, engines(start, start), updated=False)
    canary.check(1, start + shift, engines(start + shift, start + shift), updated=True)
    canary.check(
        2, start + 1.01 * shift, engines(start + shift, start + shift), updated=True
    )  # too little to show everywhere
    with pytest.raises(CanaryError, match=r"version 3: .* engine 1 did not change .* learner's by up to 0.0005"):
        canary.check(3, start + 2 * shift, engines(start + 2 * shift, start + shift), updated=True)


def test_a_late_engine_is_compared_with_the_learners_latest_logprobs() -> None:
    canary = Canary(np.arange(3), tolerance=1e-3)
    before, now = np.array([-1.0, -2.0], np.float32), np.array([-1.5, -2.5], np.float32)
    canary.check(0, before, engines(before, before), updated=False)
    canary.check(1, now, {1: now}, updated=True)  # engine 0 is away: only the other must have changed
    assert canary.join(0, now) == 0
    with pytest.raises(CanaryError, match="version 1: engine 0 and the learner disagree on 2 of 2"):
        canary.join(0, before)
    with pytest.raises(CanaryError, match=r"version 2: .* engine 0 did not change"):
        canary.check(2, now + 0.0005, engines(now, now + 0.0005), updated=True)
    canary.check(3, before, {}, updated=True)  # none is there
    assert canary.join(1, before) == 0


def test_checksums_name_the_tensors_that_differ() -> None:
    text = describe_checksums({"a": "1", "b": "2"}, {"a": "1", "b": "3"})
    assert "1 equal, 1 different" in text and "b: sent 2, received 3" in text


@pytest.mark.parametrize(
    ("k", "n", "correct", "expected"), [(1, 4, 1, 0.25), (2, 4, 1, 0.5), (4, 4, 1, 1.0), (2, 4, 0, 0.0), (2, 4, 3, 1.0)]
)
def test_pass_at_k(k: int, n: int, correct: int, expected: float) -> None:
    assert pass_at(k, n, correct) == pytest.approx(expected)


def test_scores_of_a_trajectory_stand_together_by_step() -> None:
    task = Task(id="t", prompt="?")
    labels = [("a", 0), ("a", 1), ("", 0), ("b", 1), ("b", 0), ("", 0)]
    rollouts = [attrs.evolve(Rollout.from_text(task, ""), trajectory=label, step=step) for label, step in labels]
    scores = [Score(float(i)) for i in range(len(labels))]
    group = Group(task, rollouts, scores)
    assert [[s.value for s in each] for each in scored_trajectories([group])] == [[0.0, 1.0], [2.0], [4.0, 3.0], [5.0]]
    failed = attrs.evolve(group, scores=[Score.invalid("ill"), *scores[1:]])
    assert [[s.value for s in each] for each in scored_trajectories([failed])] == [[2.0], [4.0, 3.0], [5.0]]


def test_correct_is_what_the_reward_says_or_a_full_reward() -> None:
    assert is_correct(Score(0.1, metrics={"correct": 1}))
    assert not is_correct(Score(1.0, metrics={"correct": 0}))
    assert is_correct(Score(1.0)) and not is_correct(Score(0.9)) and not is_correct(Score.invalid("x"))


def test_what_workflows_measure_is_averaged_over_those_that_measured_it() -> None:
    found = [{"turns": 1.0, "right": 1.0}, {"turns": 3.0}, {"turns": 2.0, "right": 0.0}]
    task = Task("a", "?")
    rollouts = [Rollout(task, (), (), (), (), (), metrics=metrics) for metrics in found]
    assert measured([Group(task, rollouts, [Score(0.0)] * 3)]) == {"workflow/right": 0.5, "workflow/turns": 2.0}
    assert measured([]) == {}


def test_threads_are_divided() -> None:
    assert threads_of(PlacementSection(engines=2), cores=2) == (1, 2)
    assert threads_of(PlacementSection(engines=3, learner_threads=5), cores=2) == (1, 5)


@pytest.mark.parametrize(("device", "python"), [("cpu", {"engine": "fork"}), ("cuda", {})])
def test_only_processes_on_the_cpu_are_forked_from_a_template(
    device: Any, python: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray may find a GPU where no file shows one beforehand, as on WSL."""
    found: list[Any] = []

    def stop(plan: Any, layout: Layout, adapter: Any) -> None:
        found.append(layout.python)
        raise InterruptedError

    monkeypatch.setattr(assembly, "layout", lambda *_: Layout(device, 1, 1))
    monkeypatch.setattr(assembly, "start_engines", stop)
    plan: Any = check(EXAMPLE, ["steps=1"])
    nobody: Any = None
    with pytest.raises(InterruptedError), assembly.started(plan, 1, [], nobody, python={"engine": "fork"}):
        pass
    assert found == [python]
