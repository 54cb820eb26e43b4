"""Each rule finds its problem and is silent on a healthy run, on hand-made traces and on recorded runs."""

from __future__ import annotations

import json
import math
import tarfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlsdk
from rlsdk.contracts import Finding, History
from rlsdk.runlog.alerts import diagnose
from rlsdk.testing.properties.scoring import METRICS

NAMES = rlsdk.names("diagnosis")
Curve = Callable[[int], float | None]


def history(steps: int = 40, **curves: Curve | float) -> History:
    """A run whose metrics are functions of the step, or constants; `__` in a name is a slash."""
    made = {name.replace("__", "/"): curve for name, curve in curves.items()}
    return History.of(
        {"step": step, **{n: c(step) if callable(c) else c for n, c in made.items()}} for step in range(1, steps + 1)
    )


def every(count: int, curve: Curve) -> Curve:
    """A metric of every so many steps, like an evaluation."""
    return lambda step: curve(step) if step % count == 0 else None


TRIGGERS: dict[str, History] = {
    "entropy_collapse": history(actor__entropy=lambda s: 0.9 * 0.9**s, rollouts__entropy=0.5, accuracy__mean=0.4),
    "kl_runaway": history(actor__ref_kl=lambda s: 0.01 * s),
    "clip_share": history(actor__clip_share=lambda s: min(0.01 * s, 0.5)),
    "skipped_updates": history(actor__skipped_updates=lambda s: s % 5 == 0),
    "sampler_gap": history(actor__gap_generation=lambda s: 0.05 * s),
    "format_only": history(reward__format=lambda s: min(1.0, s / 20), accuracy__mean=0.02),
    "held_out_drop": history(
        80, reward__mean=lambda s: s / 100, eval__sampled=every(10, lambda s: 0.5 - abs(s - 30) / 200)
    ),
    "no_score": history(rollouts__invalid=lambda s: s // 10),
    "cut_off": history(rollouts__truncated=lambda s: 0.5 + 0.4 * (s % 2)),
    "dead_groups": history(groups__dead=lambda s: min(0.9, s / 30), accuracy__mean=0.95),
    "length_explosion": history(rollouts__length=lambda s: 100 * 1.05**s, reward__mean=0.3),
    "repeated_phrases": history(rollouts__repetition=lambda s: 0.02 if s < 20 else 0.5),
    "starving_source": history(source__a__share=0.9, source__b__share=lambda s: 0.4 if s < 15 else None),
    "unsolved_source": history(
        **{"source/a/accuracy/mean": every(2, lambda s: 0.6), "source/b/accuracy/mean": every(2, lambda s: 0.01)}
    ),
    "engine_lost": history(engines__alive=lambda s: 2.0 if s < 30 else 1.0),
    "idle_engines": history(time__step=20.0, time__engines_idle=0.8, time__update=3.0, time__logprobs=1.0),
    "learner_bound": history(time__step=20.0, time__engines_idle=0.8, time__update=14.0, time__logprobs=2.0),
}
HEALTHY: dict[str, History] = {
    # the same fall of the entropy, where the tasks are solved; and one that stops
    "entropy_collapse": history(
        actor__entropy=lambda s: 0.9 * 0.9**s, rollouts__entropy=0.5, accuracy__mean=lambda s: min(1.0, s / 25)
    ),
    "kl_runaway": history(actor__ref_kl=0.05, actor__kl_to_old=0.01),
    "clip_share": history(actor__clip_share=0.15),
    "skipped_updates": history(actor__skipped_updates=lambda s: s == 20, critic__skipped_updates=0.0),
    "sampler_gap": history(actor__gap_generation=0.2, actor__kl_to_behaviour=0.3),
    "format_only": history(reward__format=lambda s: min(1.0, s / 20), accuracy__mean=lambda s: s / 60),
    "held_out_drop": history(
        80, reward__mean=lambda s: s / 100, eval__sampled=every(10, lambda s: 0.4 + 0.03 * math.sin(s))
    ),
    "no_score": history(rollouts__invalid=lambda s: s % 5 == 0),
    "cut_off": history(rollouts__truncated=lambda s: 0.25 if s < 30 else 0.2),
    "dead_groups": history(groups__dead=0.5, accuracy__mean=0.6),
    "length_explosion": history(rollouts__length=lambda s: 100 * 1.05**s, reward__mean=lambda s: s / 50),
    "repeated_phrases": history(rollouts__repetition=0.08),
    "starving_source": history(source__a__share=0.9, source__b__share=0.1),
    # a hard source beside another one that is hard, and one that has not been seen for long
    "unsolved_source": history(
        **{
            "source/a/accuracy/mean": 0.2,
            "source/b/accuracy/mean": 0.01,
            "source/c/accuracy/mean": lambda s: 0.9 if s < 25 else None,
        }
    ),
    "engine_lost": history(engines__alive=lambda s: 1.0 if s in (20, 21, 39, 40) else 2.0),
    "idle_engines": history(time__step=20.0, time__engines_idle=0.8, time__update=14.0),
    "learner_bound": history(time__step=20.0, time__engines_idle=0.4, time__update=6.0, time__logprobs=2.0),
}


@pytest.mark.parametrize("name", NAMES)
def test_each_rule_finds_its_fault(name: str) -> None:
    found = rlsdk.load("diagnosis", name)(TRIGGERS[name])
    assert isinstance(found, Finding)
    assert any(character.isdigit() for character in found.message)  # a sentence with the numbers


@pytest.mark.parametrize("name", NAMES)
def test_each_rule_is_silent_on_a_healthy_run(name: str) -> None:
    assert rlsdk.load("diagnosis", name)(HEALTHY[name]) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_found_by_its_own_rule_alone(name: str) -> None:
    found = {alert.name for alert in diagnose(lines(TRIGGERS[name]), rules())}
    assert found == {name}


def lines(trace: History) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for name, series in trace.series.items():
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
            found.setdefault(step, {"step": step})[name] = value
    return [found[step] for step in sorted(found)]


def rules() -> dict[str, Any]:
    return {name: rlsdk.load("diagnosis", name) for name in NAMES}


# --- edges


def test_an_old_value_is_not_found_again_and_again() -> None:
    ended = history(60, actor__clip_share=lambda s: 0.5 if s <= 20 else None, reward__mean=0.5)
    assert rlsdk.load("diagnosis", "clip_share")(ended) is None
    assert rlsdk.load("diagnosis", "clip_share")(ended.until(20)) is not None


def test_entropy_is_estimated_from_sampled_tokens_if_no_part_computes_it() -> None:
    found = rlsdk.load("diagnosis", "entropy_collapse")(history(rollouts__entropy=lambda s: 0.9**s))
    assert "from 0.586 to 0.0248 nats" in found.message  # means of 0.9 … 0.9¹⁰ and of 0.9³¹ … 0.9⁴⁰


def test_imitation_of_demonstrations_makes_a_policy_certain_and_the_learner_busy() -> None:
    imitates = history(actor__entropy=lambda s: 6 * 0.9**s, time__step=20.0, time__update=19.0)
    assert diagnose(lines(imitates), rules()) == []


def test_sampling_ahead_explains_a_kl_to_the_sampler() -> None:
    rule = rlsdk.load("diagnosis", "sampler_gap")
    assert rule(history(actor__kl_to_behaviour=0.3, staleness__max=0.0)).level == "critical"
    assert rule(history(actor__kl_to_behaviour=0.3, staleness__max=1.0)) is None


def test_a_kl_in_the_reward_is_followed_like_one_in_the_loss() -> None:
    found = rlsdk.load("diagnosis", "kl_runaway")(history(**{"shaping/kl_penalty/kl": lambda s: 0.02 * s}))
    assert "KL to the reference model is 0.71 nats per token (shaping/kl_penalty/kl, limit 0.3)" in found.message
    assert found.advice.endswith("raise the coef of the shaping kl_penalty")


def test_skipped_updates_of_the_critic_are_found_beside_an_actor_that_learns() -> None:
    rule = rlsdk.load("diagnosis", "skipped_updates")
    found = rule(history(3, actor__skipped_updates=0.0, critic__skipped_updates=2.0))
    assert found.message.startswith("6 updates of the critic, in 3 of the last 3 steps, were skipped")
    assert "overflow in the returns and the rewards" in found.advice
    ended = history(40, actor__skipped_updates=lambda s: 2.0 * (s < 30))
    assert (rule(ended), rule(ended.until(30))) == (None, rule(ended.until(30)))


def test_large_updates_are_not_a_gap_if_the_canary_sees_none() -> None:
    rule = rlsdk.load("diagnosis", "sampler_gap")
    assert rule(history(actor__kl_to_behaviour=0.3, canary__gap=1e-6)) is None
    assert rule(history(actor__kl_to_behaviour=0.3, canary__gap=lambda s: 0.2 if s == 38 else 1e-6)) is not None


@pytest.mark.parametrize(
    ("accuracy", "cut", "advice"),
    [
        (0.9, 0.0, "the tasks are too easy"),
        (0.0, 0.0, "the tasks are too hard"),
        (0.0, 1.0, "100% of the answers are truncated: raise sampling.max_tokens"),
        (lambda s: 0.4 if s < 20 else 0.0, 1.0, "the model has got worse (its best accuracy was 40%)"),
    ],
)
def test_the_advice_on_dead_groups_is_on_their_cause(accuracy: Any, cut: float, advice: str) -> None:
    found = rlsdk.load("diagnosis", "dead_groups")(
        history(groups__dead=1.0, accuracy__mean=accuracy, rollouts__truncated=cut)
    )
    assert found.advice.startswith(advice)


def test_dead_groups_are_no_warning_once_the_tasks_are_solved() -> None:
    rule = rlsdk.load("diagnosis", "dead_groups")
    levels = [rule(history(groups__dead=0.8, accuracy__mean=accuracy)).level for accuracy in (0.05, 0.6, 0.93)]
    assert levels == ["warning", "warning", "info"]
    assert rule(history(groups__dead=0.8)).level == "warning"  # a run without accuracy


def test_the_advice_on_dead_groups_does_not_name_what_is_already_set() -> None:
    rule = rlsdk.load("diagnosis", "dead_groups")
    once = rule(history(groups__dead=1.0, accuracy__mean=0.9))
    assert "set rollout.dynamic_sampling=true, with a filter such as nonzero_variance, to find the rest" in once.advice
    replaced = rule(history(raw__groups_dead=1.0, groups__dead=0.0, accuracy__mean=0.9))
    assert replaced.advice == "the tasks are too easy: train on harder ones"


def test_a_reward_of_form_and_task_in_one_is_seen_through() -> None:
    rule = rlsdk.load("diagnosis", "format_only")
    both = {"reward__mean": lambda s: min(0.1, s / 200), "accuracy__mean": 0.01}
    assert "from 0.03 to 0.10 while the accuracy stays at 1.0%" in rule(history(**both)).message
    never = rule(history(**both | {"accuracy__mean": 0.0}))
    assert never is None  # a reward that is never 1 may have no right answers to count


def test_truncation_alone_is_a_finding() -> None:
    cut = history(rollouts__length=500.0, rollouts__truncated=lambda s: 0.05 if s < 25 else 0.6, reward__mean=0.5)
    assert (
        "60% of the rollouts are truncated, 5% were before" in rlsdk.load("diagnosis", "length_explosion")(cut).message
    )


def test_length_explosion_without_a_reward_names_none() -> None:
    found = rlsdk.load("diagnosis", "length_explosion")(history(rollouts__length=lambda s: 100 * 1.05**s))
    assert found.message == "rollouts have grown from 241 to 640 tokens"


def test_held_out_drop_says_what_has_fallen() -> None:
    falling = {"eval/sampled_reward": every(5, lambda s: 5 - s / 10)}
    found = rlsdk.load("diagnosis", "held_out_drop")(history(reward__mean=lambda s: s / 10, **falling))
    assert "while held-out reward has fallen from" in found.message


def test_a_source_that_was_always_small_does_not_starve() -> None:
    small = history(source__a__share=0.97, source__b__share=0.03)
    assert rlsdk.load("diagnosis", "starving_source")(small) is None


def test_engines_that_are_no_longer_wanted_are_not_lost() -> None:
    rule, fewer = rlsdk.load("diagnosis", "engine_lost"), {"engines__wanted": lambda s: 4.0 if s < 20 else 2.0}
    assert rule(history(engines__alive=lambda s: 4.0 if s < 20 else 2.0, **fewer)) is None
    found = rule(history(engines__alive=lambda s: 4.0 if s < 20 else 1.0, **fewer))
    assert found.message == "1 of 2 engines have not run for 3 steps"
    assert rule(history(engines__alive=2.0, engines__wanted=lambda s: 2.0 if s < 20 else 3.0)) is None  # no room yet


def test_ahead_of_training_idle_engines_are_somebodys_fault_or_the_learners() -> None:
    waits = {"time__step": 20.0, "time__engines_idle": 0.7, "time__update": 18.0}
    idle, bound = rlsdk.load("diagnosis", "idle_engines"), rlsdk.load("diagnosis", "learner_bound")
    assert idle(history(**waits, time__wait_for_rollouts=0.1)) is None
    assert bound(history(**waits, time__wait_for_rollouts=0.1)) is not None
    assert idle(history(**waits, time__wait_for_rollouts=12.0)) is not None
    assert bound(history(**waits, time__wait_for_rollouts=12.0)) is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(METRICS), st.floats() | st.none(), max_size=8), max_size=40))
def test_no_rule_raises_whatever_the_metrics_are(drawn: list[dict[str, Any]]) -> None:
    trace = History.of({"step": i, **metrics} for i, metrics in enumerate(drawn))
    for rule in rules().values():
        assert isinstance(rule(trace), Finding | None)


# --- the history


def test_a_history_by_steps_equals_that_of_all_lines() -> None:
    trace = [{"step": i, "a": i / 2, "b": None if i % 2 else math.nan, "c": "text"} for i in range(1, 6)]
    by_steps = History()
    for line in trace:
        by_steps = by_steps.then(line["step"], line)
    whole = History.of(trace)
    assert (whole.step, list(whole.series)) == (5, ["a"])
    for each in (whole, by_steps):
        assert each["a"].values.tolist() == [0.5, 1.0, 1.5, 2.0, 2.5]
    assert whole.until(3)["a"].last(2).mean == 1.25
    assert whole["a"].first(2).median == 0.75
    assert math.isnan(whole["nothing"].mean)
    with pytest.raises(ValueError, match="read-only"):
        whole["a"].values[0] = 1


def test_a_further_step_rarely_copies_the_series() -> None:
    histories = [History()]
    for step in range(1000):
        histories.append(histories[-1].then(step, {"a": float(step)}))
    shared = [np.shares_memory(one["a"].values, other["a"].values) for one, other in pairwise(histories)]
    assert shared.count(False) < 12
    assert all(len(each["a"]) == i for i, each in enumerate(histories))
    np.testing.assert_array_equal(histories[-1]["a"].steps, np.arange(1000))


def test_two_continuations_of_a_history_are_independent() -> None:
    begin = History().then(1, {"a": 1.0})
    one, other = begin.then(2, {"a": 2.0}), begin.then(3, {"a": 3.0})
    assert one.then(4, {"a": 4.0})["a"].values.tolist() == [1.0, 2.0, 4.0]
    assert (begin["a"].values.tolist(), other["a"].values.tolist()) == ([1.0], [1.0, 3.0])
    assert (one["a"].steps.tolist(), other["a"].steps.tolist()) == ([1, 2], [1, 3])


def test_names_between_a_beginning_and_an_end() -> None:
    trace = history(2, source__a__share=0.5, **{"source/b/c/share": 0.5, "source/a/reward": 1.0, "source//share": 1.0})
    assert sorted(trace.between("source/", "/share")) == ["a", "b/c"]


# --- runs that took place: metrics.jsonl as they were written


FOUND = {
    "entropy_collapse": ("longer_ways", 41),
    "kl_runaway": ("too_fast", 3),
    "clip_share": ("narrow", 10),
    "skipped_updates": ("undefined", 3),
    "sampler_gap": ("too_fast", 5),
    "format_only": ("reverse_text", 27),
    "held_out_drop": ("long", 16),
    "no_score": ("careless_reward", 5),
    "cut_off": ("cut_off", 10),
    "dead_groups": ("collapsed", 10),
    "length_explosion": ("long", 25),
    "repeated_phrases": ("collapsed", 7),
    "starving_source": ("starving", 23),
    "unsolved_source": ("wrong_answers", 10),
    "engine_lost": ("lost", 30),
    "idle_engines": ("longer_ways", 10),
    "learner_bound": ("learner_bound", 10),
}
"""Rule -> a recorded run, and the step after which the rule found its fault. What the runs were:

* collapsed: examples/quickstart.yaml with learner.lr=6e-3, passes=4, batch_size=8 and group_size=8; it ended with
  nothing.
* careless_reward, cut_off, wrong_answers: planted by tools/bad_runs.py.
* longer_ways, reverse_text: the second stages of two recipes.
* The others: examples/quickstart.yaml with engine=transformers, batch_size=8, group_size=8, and a planted fault.
  too_fast: lr 2e-3 and 6 passes; long: mostly paid by length, up to 64 tokens; starving: a filter that drops one source
  from step 14 on; learner_bound: lr 6e-4 and 10 passes; narrow: a clip range of 0.0005 and 12 passes; lost: the second
  of two engines was killed in step 27.
* undefined: examples/quickstart.yaml with batch_size=8 and a policy loss with `sqrt(3.5 - advantage)`, which is
  undefined for the only right answer of a group of 16.
"""
READ = {
    "entropy_collapse": "actor/entropy",
    "kl_runaway": "actor/kl_to_old",
    "clip_share": "actor/clip_share",
    "skipped_updates": "actor/skipped_updates",
    "sampler_gap": "actor/kl_to_behaviour",
    "format_only": "accuracy/mean",
    "held_out_drop": "eval/sampled",
    "no_score": "rollouts/invalid",
    "cut_off": "rollouts/truncated",
    "dead_groups": "groups/dead",
    "length_explosion": "rollouts/length",
    "repeated_phrases": "rollouts/repetition",
    "starving_source": "source/sums/share",
    "unsolved_source": "source/sums/accuracy/mean",
    "engine_lost": "engines/alive",
    "idle_engines": "time/engines_idle",
    "learner_bound": "time/update",
}
"""Rule -> a metric that it cannot do without."""


SOUND = {
    "starving_source": "two_sources",
    "unsolved_source": "two_sources",
    "engine_lost": "two_sources",
    "no_score": "paid_for_form",
    "skipped_updates": "quickstart",
}
"""Rule -> a recorded run in which it finds nothing. The other rules find nothing in `learned`, the first 60 steps of
examples/quickstart.yaml; two_sources is like wrong_answers, without its fault, for 24 steps."""


def recorded(name: str) -> list[dict[str, Any]]:
    here = Path(__file__).parent
    path, archive = here / "traces" / f"{name}.jsonl", here.parent / "viewer" / "bad_runs" / f"{name}.tar.xz"
    if path.is_file():
        text = path.read_text()
    else:
        with tarfile.open(archive) as kept, kept.extractfile(f"{name}/metrics.jsonl") as file:
            text = file.read().decode()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("name", FOUND)
def test_each_rule_finds_its_fault_in_a_run_that_took_place(name: str) -> None:
    trace, step = FOUND[name]
    found = diagnose(recorded(trace), {name: rlsdk.load("diagnosis", name)})
    assert found[0].step == step


@pytest.mark.parametrize("name", FOUND)
def test_each_rule_is_silent_on_a_healthy_run_that_took_place(name: str) -> None:
    healthy = recorded(SOUND.get(name, "learned"))
    assert any(line.get(READ[name]) is not None for line in healthy)
    assert diagnose(healthy, {name: rlsdk.load("diagnosis", name)}) == []


def test_a_run_that_collapsed_is_found_out() -> None:
    found = {alert.name: alert.step for alert in diagnose(recorded("collapsed"), rules())}
    assert found["repeated_phrases"] == 7
    assert found["dead_groups"] == 10


def test_nothing_is_found_in_a_run_that_learned() -> None:
    """examples/quickstart.yaml with steps=12, batch_size=8 and group_size=4."""
    assert diagnose(recorded("quickstart"), rules()) == []
