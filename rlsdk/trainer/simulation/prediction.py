"""What a config would do on so many engines and ranks: as it is, synchronously, and each half alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from rlsdk.config import Plan
from rlsdk.errors import ConfigError, ValueFault
from rlsdk.trainer.simulation.rates import Lengths, Rates
from rlsdk.trainer.simulation.training import (
    Outcome,
    Setup,
    engines_alone,
    learner_alone,
    simulate,
    synchronous,
)

MEDIAN = 8
"""Left out, the median of lengths is this part of `sampling.max_tokens`."""


@attrs.frozen(kw_only=True)
class Prediction:
    """Of one size.

    Attributes:
        setup: What was simulated.
        gpus: Of engines and learner together; None where they were not counted.
        configured: The config as it is.
        synchronous: The same with every batch made by the weights of the step before.
        engines_alone: Seconds in which the engines make a batch when nobody else takes time: G.
        learner_alone: Seconds of the learner and of syncs, when rollouts are always there: T.
    """

    setup: Setup
    gpus: int | None
    configured: Outcome
    synchronous: Outcome
    engines_alone: float
    learner_alone: float

    @property
    def of_bound(self) -> float:
        """Batches in a second, as a share of what the slower half alone can do: `max(G, T)` over the step."""
        return max(self.engines_alone, self.learner_alone) / self.configured.step

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        setup = self.setup
        return {
            "gpus": self.gpus,
            "engines": setup.engines,
            "learners": setup.learners,
            "batch_size": setup.batch,
            "configured": attrs.asdict(self.configured),
            "synchronous": attrs.asdict(self.synchronous),
            "engines_alone": self.engines_alone,
            "learner_alone": self.learner_alone,
            "of_bound": self.of_bound,
        }


def predict(setup: Setup, gpus: int | None = None) -> Prediction:
    """Simulate a setup and what it is compared with.

    Args:
        setup: As configured.
        gpus: Of engines and learner together.
    """
    configured = simulate(setup)
    return Prediction(
        setup=setup,
        gpus=gpus,
        configured=configured,
        synchronous=simulate(synchronous(setup)) if setup.production.runs_ahead else configured,
        engines_alone=simulate(engines_alone(setup)).step,
        learner_alone=simulate(learner_alone(setup)).step,
    )


def setup_of(plan: Plan, rates: Rates, lengths: Lengths, *, engines: int, learners: int, steps: int) -> Setup:
    """What a config asks for, at these rates.

    Args:
        plan: The config.
        rates: Of the parts.
        lengths: Of responses.
        engines: How many.
        learners: Ranks of the learner.
        steps: How many are simulated.

    Raises:
        ConfigError: The config generates nothing.
    """
    config = plan.config
    if not plan.needs_engine:
        raise ConfigError(["algorithm: it trains on demonstrations; there are no rollouts to simulate"])
    return Setup(
        rates=rates,
        lengths=lengths,
        engines=engines,
        learners=learners,
        batch=config.batch_size,
        group=config.group_size,
        steps=steps,
        production=config.production,
        policy=partial(plan.plugins.resolve, plan.buffer),
        stop=partial(plan.plugins.resolve, plan.stop),
        sources={source.name: source.weight for source in plan.tasks_train},
        seed=config.seed,
    )


def resized(setup: Setup, batch: int) -> Setup:
    """The same with so many tasks in a step.

    Raises:
        ConfigError: Replay would leave no new one among them.
    """
    try:
        return attrs.evolve(setup, batch=batch)
    except ValueFault as error:
        raise ConfigError([str(error)]) from error


def divided(gpus: int, share: float, each: int) -> tuple[int, int]:
    """Engines and ranks of the learner on so many GPUs.

    Args:
        gpus: In all.
        share: Of them for the learner.
        each: GPUs of an engine.

    Raises:
        ValueFault: They are too few for one of each.
    """
    learners = min(max(1, round(gpus * share)), gpus - each)
    if learners < 1:
        raise ValueFault(f"--gpus {gpus}: an engine takes {each} and the learner at least 1; give {each + 1} or more")
    return (gpus - learners) // each, learners


def defaults_of(plan: Plan) -> tuple[Rates, Lengths]:
    """Rates and lengths where nothing was measured: the size of the weights, slots and limits are the config's."""
    config, own = plan.config, Rates()
    slots = getattr(plan.plugins.resolve(plan.engine), "max_num_seqs", own.slots)
    weights = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    rates = attrs.evolve(own, slots=slots, weights_bytes=float(weights or own.weights_bytes))
    limit = config.sampling.max_tokens
    return rates, Lengths(median=max(1.0, limit / MEDIAN), limit=limit)


def changed(rates: Rates, lengths: Lengths, given: Mapping[str, float]) -> tuple[Rates, Lengths]:
    """Rates and lengths with some of them replaced, by name.

    Args:
        rates: Before.
        lengths: Before; a `median` or a `sigma` makes them log-normal.
        given: By name.

    Raises:
        ConfigError: There is no such rate, or its value makes no sense.
    """
    of_rates = {field.name for field in attrs.fields(Rates)}
    of_lengths = {"median", "sigma"}
    unknown = sorted(set(given) - of_rates - of_lengths)
    if unknown:
        raise ConfigError([f"--rate {name}: there are {', '.join(sorted(of_rates | of_lengths))}" for name in unknown])
    whole = {name for name in ("slots", "prompt_tokens") if name in given}
    new_rates: dict[str, Any] = {n: int(v) if n in whole else v for n, v in given.items() if n in of_rates}
    new_lengths: dict[str, Any] = {n: v for n, v in given.items() if n in of_lengths}
    try:
        if new_lengths:
            lengths = attrs.evolve(lengths, seen=(), **new_lengths)
        return attrs.evolve(rates, **new_rates), lengths
    except ValueFault as error:
        raise ConfigError([f"--rate {error}"]) from error
