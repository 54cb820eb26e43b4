"""Predictions for a config: as configured, synchronous, and with only engines or only the learner."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs

from rlsdk.config import Plan
from rlsdk.contracts import LimitsConcurrency, StreamsWeights
from rlsdk.contracts.generation import DTYPE_BYTES
from rlsdk.errors import ArgumentError, ConfigError, ValueFault
from rlsdk.options import did_you_mean
from rlsdk.simulation.rates import HARDWARE, Lengths, ModelSize, Rates, Work, derived
from rlsdk.simulation.training import Setup, SimulationResult, engines_alone, learner_alone, simulate, synchronous

MOST_ROLLOUTS = 8_000
"""Maximum rollouts of one simulation; for larger runs, a slice of this size is simulated."""
MEDIAN = 8
"""Default median of lengths: `sampling.max_tokens` divided by this."""
DRIVER_SECONDS, LEDGER_SECONDS = 1.5e-4, 3e-5
"""Core seconds that a one-turn rollout costs its process, and the driver if a rollout worker makes it."""


@attrs.frozen(kw_only=True)
class Prediction:
    """Prediction for a number of engines and ranks.

    Attributes:
        setup: Simulated setup.
        gpus: GPUs of engines and learner together; None if they were not counted.
        share: Share of the engines and of the batch that was simulated.
        configured: Outcome of the config.
        synchronous: Outcome with every batch sampled by the weights of the previous step.
        engines_alone: Seconds of the engines for a batch when nothing else takes time: G.
        learner_alone: Seconds of the learner and of syncs, when rollouts are always available: T.
    """

    setup: Setup
    gpus: int | None
    share: float
    configured: SimulationResult
    synchronous: SimulationResult
    engines_alone: float
    learner_alone: float

    @property
    def of_bound(self) -> float:
        """Throughput as a share of the limit set by the slower of engines and learner: `max(G, T)` / step time."""
        return max(self.engines_alone, self.learner_alone) / self.configured.step

    def as_json(self) -> dict[str, Any]:
        """Return the prediction as plain values."""
        setup = self.setup
        return {
            "gpus": self.gpus,
            "engines": setup.engines,
            "learners": setup.learners,
            "batch_size": setup.batch,
            "share": self.share,
            "configured": attrs.asdict(self.configured),
            "synchronous": attrs.asdict(self.synchronous),
            "engines_alone": self.engines_alone,
            "learner_alone": self.learner_alone,
            "of_bound": self.of_bound,
        }


def predict(
    setup: Setup,
    gpus: int | None = None,
    *,
    most: int | None = MOST_ROLLOUTS,
    progress: Callable[[str, int], None] = lambda name, done: None,
) -> Prediction:
    """Simulate a setup and its baselines for comparison.

    Args:
        setup: Setup as configured.
        gpus: GPUs of engines and learner together.
        most: Maximum rollouts of one simulation; of a larger setup, a slice of the engines and of the batch is
            simulated. None simulates everything.
        progress: Called before each step with the name of the simulation and the number of steps done.
    """
    part = setup if most is None else sliced(setup, most)

    def outcome(name: str, of: Setup) -> SimulationResult:
        found = simulate(of, partial(progress, name))
        return attrs.evolve(found, tokens_per_second=found.tokens_per_second * setup.batch / part.batch)

    configured = outcome("as configured", part)
    return Prediction(
        setup=setup,
        gpus=gpus,
        share=part.engines / setup.engines,
        configured=configured,
        synchronous=outcome("synchronous", synchronous(part)) if part.rollout.runs_ahead else configured,
        engines_alone=outcome("engines alone", engines_alone(part)).step,
        learner_alone=outcome("learner alone", learner_alone(part)).step,
    )


def sliced(setup: Setup, most: int) -> Setup:
    """Return a share of the engines with their share of the batch; the learner takes as long as for the whole.

    Engines work independently, so that a slice of them is representative. Only the longest answer of a batch differs:
    among fewer answers it is shorter, unless it reaches the limit, as with long-tailed lengths.

    The slice has at most `most` rollouts over all steps, but at least one engine and one task.
    """
    rollouts = setup.batch * setup.group * setup.steps
    engines = max(1, round(setup.engines * min(1.0, most / rollouts)))
    batch = max(1, round(setup.batch * engines / setup.engines))
    if engines == setup.engines or setup.rollout.replay.fresh(batch) < 1:
        return setup
    # Learner and driver process the whole batch.
    shared = ("token_seconds", "driver_seconds", "ledger_seconds")
    rates = attrs.evolve(setup.rates, **{name: getattr(setup.rates, name) * setup.batch / batch for name in shared})
    return attrs.evolve(setup, rates=rates, engines=engines, batch=batch, all_engines=setup.engines)


def setup_of(plan: Plan, rates: Rates, lengths: Lengths, *, engines: int, learners: int, steps: int) -> Setup:
    """Return the setup of a config at these rates.

    Raises:
        ConfigError: The config generates nothing, or no batch would ever be complete.
    """
    config = plan.config
    if not plan.needs_engine:
        raise ConfigError(["algorithm: it trains on demonstrations; there are no rollouts to simulate"])
    try:
        return Setup(
            rates=rates,
            lengths=lengths,
            engines=engines,
            learners=learners,
            batch=config.batch_size,
            group=config.group_size,
            steps=steps,
            rollout=config.rollout,
            policy=partial(plan.plugins.resolve, plan.buffer),
            stop=partial(plan.plugins.resolve, plan.stop),
            sources={source.name: source.weight for source in plan.tasks_train},
            seed=config.seed,
        )
    except ValueFault as error:
        raise ConfigError([str(error)]) from error


def resized(setup: Setup, batch: int) -> Setup:
    """Return the setup with a different number of tasks per step.

    Raises:
        ConfigError: Replay would leave no new task in a step.
    """
    try:
        return attrs.evolve(setup, batch=batch)
    except ValueFault as error:
        raise ConfigError([str(error)]) from error


def divided(gpus: int, share: float, each: int, *, colocated: bool = False) -> tuple[int, int]:
    """Split GPUs between engines and learner ranks; both get all of them if they take turns.

    Args:
        gpus: Number of GPUs.
        share: Share of them for the learner.
        each: GPUs per engine.
        colocated: True if engines and learner share the GPUs.

    Raises:
        ValueFault: There are too few for one of each.
    """
    if colocated:
        if gpus < each:
            raise ValueFault(f"--gpus {gpus}: an engine needs {each}")
        return gpus // each, gpus
    learners = min(max(1, round(gpus * share)), gpus - each)
    if learners < 1:
        raise ValueFault(f"--gpus {gpus}: an engine needs {each} and the learner at least 1; give {each + 1} or more")
    return (gpus - learners) // each, learners


def takes_turns(plan: Plan) -> bool:
    """Return True if engines and learner share their GPUs, one waiting for the other."""
    return plan.config.placement.colocate and not plan.config.rollout.runs_ahead


@attrs.frozen(kw_only=True)
class Assumptions:
    """Default rates and lengths, before anything was measured or given; `origins` says where each comes from."""

    rates: Rates
    lengths: Lengths
    origins: Mapping[str, str]


def assumptions(plan: Plan, net: Any, hardware: str) -> Assumptions:
    """Derive rates from the model's size, the config, and the data sheet of some hardware.

    Args:
        plan: Checked config.
        net: The policy without weights; None if unknown, in which case rates do not depend on the model.
        hardware: Name in `HARDWARE`.
    """
    config, limit = plan.config, plan.config.sampling.max_tokens
    lengths = Lengths(median=max(1.0, limit / MEDIAN), limit=limit)
    origins = dict.fromkeys((field.name for field in attrs.fields(Rates)), "assumed")
    rates = Rates(
        driver_seconds=DRIVER_SECONDS,
        ledger_seconds=LEDGER_SECONDS,
        prompt_tokens=config.max_prompt_tokens // 2,
        weights_bytes=0.0,
    )
    origins |= dict.fromkeys(("driver_seconds", "ledger_seconds"), "docs/benchmarks.md")
    origins |= {"prompt_tokens": "half of max_prompt_tokens", "median": f"sampling.max_tokens / {MEDIAN}"}
    engine = plan.plugins.resolve(plan.engine)
    if isinstance(engine, LimitsConcurrency):
        rates, origins["slots"] = attrs.evolve(rates, slots=engine.max_num_seqs), "the engine"
    if net is not None:
        size = ModelSize.of(net, DTYPE_BYTES[config.model.dtype])
        found = derived(HARDWARE[hardware], size, _work(plan, lengths, rates.prompt_tokens, on_cpu=hardware == "cpu"))
        relayed = isinstance(plan.plugins.resolve(plan.weight_transfer), StreamsWeights)
        rates = attrs.evolve(rates, **found, relayed=relayed)
        origins |= dict.fromkeys(found, f"{size.parameters:,.0f} parameters on the data sheet of {hardware}")
        origins |= {"weights_bytes": "the model", "relayed": "rollout.weight_transfer"}
    return Assumptions(rates=rates, lengths=lengths, origins=origins)


def _work(plan: Plan, lengths: Lengths, prompt: int, *, on_cpu: bool) -> Work:
    config, place = plan.config, plan.config.placement
    learner = plan.plugins.resolve(plan.learner)
    return Work(
        gpus_per_engine=max(1, place.engine_threads) if on_cpu else place.gpus_per_engine,
        trained=2 if plan.algorithm.critic else 1,
        forward=(config.old_logprobs == "learner") + plan.needs_reference + plan.algorithm.critic,
        passes=config.passes,
        updates=config.updates,
        recomputes=bool(getattr(learner, "gradient_checkpointing", False)),
        state_bytes=getattr(learner, "state_bytes", 8.0),
        context=prompt + lengths.median / 2,
        colocated=takes_turns(plan) and not on_cpu,
    )


def changed(rates: Rates, lengths: Lengths, given: Mapping[str, float]) -> tuple[Rates, Lengths]:
    """Return rates and lengths with some replaced, by name; a `median` or a `sigma` makes lengths log-normal.

    Raises:
        ConfigError: A name is unknown, or its value is out of range.
    """
    of_rates = {field.name for field in attrs.fields(Rates)}
    of_lengths = {"median", "sigma"}
    names = sorted(of_rates | of_lengths)
    if unknown := sorted(set(given) - set(names)):
        listed = f"unknown; the names are {', '.join(names)}"
        raise ConfigError([f"--rate {name}: {listed}{did_you_mean(name, names)}" for name in unknown])
    whole = {name for name in ("slots", "prompt_tokens") if name in given}
    new_rates: dict[str, Any] = {
        n: int(v) if n in whole and math.isfinite(v) else v for n, v in given.items() if n in of_rates
    }
    new_lengths: dict[str, Any] = {n: v for n, v in given.items() if n in of_lengths}
    try:
        if new_lengths:
            lengths = attrs.evolve(lengths, seen=(), **new_lengths)
        return attrs.evolve(rates, **new_rates), lengths
    except ValueFault as error:
        raise ArgumentError([f"--rate {error}"]) from error
