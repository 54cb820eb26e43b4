"""Asynchronous compared with synchronous training, on two cores with long-tailed lengths.

In step, each phase has both cores: two engines, then two ranks of the learner, of one thread each. Ahead, one engine
and one rank have a core each, all the time. Ratios of throughputs, never times; the machine must have nothing else to
do.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from rlsdk.config.rollout import RolloutSection
from rlsdk.simulation.measure import measure
from rlsdk.simulation.rates import Rates
from rlsdk.simulation.training import Setup, simulate, synchronous
from tests.benchmarks.conftest import Steps, Work

ROUNDS = 2
"""Runs of each, in turn: a machine that grows slower meanwhile does so for all."""
LONG = {"tasks": 16, "group": 16, "max_tokens": 256, "steps": 24}
APART = {"placement.engines": 1, "placement.learners": 1}
ROLLOUT = {"max_staleness": 1, "sync_interval": 4}
SLOTS = 512
"""Sequences that run at once where more than a batch is on its way: a decode step costs about the same for all."""
AHEAD = {
    **APART,
    **{f"rollout.{name}": value for name, value in ROLLOUT.items()},
    "placement.colocate": "false",
    "engine": f"{{use: vllm, max_num_seqs: {SLOTS}}}",
}
LEAST = 1.1
LEAST_OF_BOUND = 0.9
"""Ahead, engine and learner overlap: a step should take little longer than the slower of them takes alone."""
BENCHMARK = "Running ahead"


def speed(steps: Steps) -> float:
    """Trained tokens in a second."""
    return sum(m["rollouts/tokens"] for m in steps.metrics) / sum(steps.seconds)


def predicted(alone: Path, model: Path) -> dict[str, float]:
    """Predictions of `rlsdk simulate` for asynchronous runs, from rates of a run with a separate core for each half."""
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    measured = measure(alone, Rates(weights_bytes=float(weights), slots=SLOTS))
    setup = Setup(
        rates=measured.rates,
        lengths=measured.lengths,
        engines=1,
        learners=1,
        batch=LONG["tasks"],
        group=LONG["group"],
        steps=LONG["steps"],
        rollout=RolloutSection(**ROLLOUT),
    )
    found = simulate(setup)
    return {
        "sync": round(simulate(synchronous(setup)).step, 3),
        "async": round(found.step, 3),
        "tokens_per_second": round(found.tokens_per_second),
        "staleness": round(found.staleness, 3),
    }


def test_running_ahead_is_a_tenth_faster_on_a_long_tail(
    model: Path,
    prompts: Path,
    train: Callable[..., Steps],
    show: Callable[..., None],
    check: Callable[..., None],
    tmp_path: Path,
) -> None:
    work = Work(model=model, prompts=prompts, **LONG)
    rounds = [(train(work), train(work, **AHEAD), train(work, **APART)) for _ in range(ROUNDS)]
    in_step, ahead, alone = (Steps.join(runs) for runs in zip(*rounds, strict=True))
    # With one engine and one rank that take turns, each has its core to itself and nobody beside it.
    generating = statistics.fmean(m["time/produce"] for m in alone.metrics)
    learning = statistics.fmean(m["time/step"] - m["time/produce"] for m in alone.metrics)
    seconds = {name: statistics.fmean(steps.seconds) for name, steps in (("sync", in_step), ("async", ahead))}
    ratio = speed(ahead) / speed(in_step)
    of_bound = max(generating, learning) / seconds["async"]
    show(
        ahead.seconds,
        G=round(generating, 3),
        T=round(learning, 3),
        **{name: round(value, 3) for name, value in seconds.items()},
        tokens_per_second={"sync": round(speed(in_step)), "async": round(speed(ahead)), "alone": round(speed(alone))},
        ratio=round(ratio, 3),
        of_bound=round(of_bound, 3),
        overlap=round(statistics.fmean(m.get("time/overlap", 0.0) for m in ahead.metrics), 3),
        staleness=round(statistics.fmean(m.get("staleness/mean", 0.0) for m in ahead.metrics), 3),
        predicted=predicted(tmp_path / "run-2" / "run", model),
        mean_length={"sync": round(in_step.length, 1), "async": round(ahead.length, 1)},
    )
    assert in_step.length / ahead.length < 1.1  # nothing is gained by leaving the longest out
    case = "256 completions of at most 256"
    check("tokens a second, ahead over in step", ratio, case=case, at_least=LEAST)
    check("seconds of the slower half alone, over those of a step ahead", of_bound, case=case, at_least=LEAST_OF_BOUND)
