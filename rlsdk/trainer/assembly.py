"""Create and start the parts of a run from its plan."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import attrs
import numpy as np

from rlsdk.cluster.actors import kill
from rlsdk.cluster.placement import Layout, layout, no_room
from rlsdk.config import Plan
from rlsdk.config.rules import longest_prompt, steps_of_epochs
from rlsdk.contracts.rollouts import Rollouts
from rlsdk.engines.canary import Canary, allowed_outliers, tolerance_of
from rlsdk.engines.client import EngineRoutes
from rlsdk.engines.group import EngineGroup, RestartPolicy
from rlsdk.engines.starting import exchanged_adapter, restart_engine, start_engines, started_engines
from rlsdk.errors import ConfigError
from rlsdk.isolation.watching import stage
from rlsdk.learners.apart import DividedLearnerGroup, start_learner
from rlsdk.opening.rehearsal import Rehearsal, rehearse
from rlsdk.readiness.checks import examine
from rlsdk.readiness.memory import gpu_shortages
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.rollout.mixture import Source, TaskStreams
from rlsdk.rollout.stream import SampledStream, TaskStream, opened
from rlsdk.runlog.observers import Observers
from rlsdk.seeds import derive
from rlsdk.serving.context import context_of
from rlsdk.trainer.explorer import Explorer
from rlsdk.trainer.interactive import ThreadedRollouts, run_async
from rlsdk.types import Rollout, Score, Task
from rlsdk.workers.local import LocalMaker
from rlsdk.workers.starting import group_maker

log = logging.getLogger(__name__)


def train_tasks(plan: Plan) -> list[Sequence[Task]]:
    """Open the tasks of each source that a plan trains on."""
    return [opened(source, plan.plugins) for source in plan.tasks_train]


def steps_of(plan: Plan, tasks: Sequence[Sequence[Task]] | None = None) -> int:
    """Return the number of steps of a run; its tasks are opened if their number matters and they are not given."""
    if plan.config.steps is not None:
        return plan.config.steps
    count = sum(map(len, train_tasks(plan) if tasks is None else tasks))
    return steps_of_epochs(plan.config, count)


def examined(plan: Plan, *, trains: bool = True) -> tuple[Sequence[Sequence[Task]], Rehearsal]:
    """Check everything that can be checked before the start; return the tasks and the rehearsal's notes.

    Raises:
        RlsdkError: A check failed; nothing was started.
    """
    exchanged_adapter(plan)  # an adapter that the engine cannot serve is an error before anything starts
    ready = examine(plan, trains=trains).require()
    short = gpu_shortages(plan, ready.built) if trains else []
    rehearsed = run_async(rehearse(plan, ready.tasks))
    return ready.tasks, attrs.evolve(rehearsed, notes=(*map(str, ready.notes), *short, *rehearsed.notes))


@contextmanager
def started(
    plan: Plan,
    gpus: int,
    tasks: Sequence[Sequence[Task]],
    observers: Observers,
    *,
    python: Mapping[str, str] | None = None,
    by_hand: bool = False,
) -> Iterator[tuple[Rollouts, DividedLearnerGroup, int]]:
    """Context manager: start engines, learner, scorer and environments in this program; give the number of steps, too.

    Args:
        plan: Plan of the run.
        gpus: Number of GPUs in the Ray cluster.
        tasks: Tasks of each training source.
        observers: Observers of every rollout.
        python: Command that starts the processes of each role in place of Python; see `template`.
        by_hand: True if several event loops call the rollouts, one after the other.
    """
    steps, adapter = steps_of(plan, tasks), exchanged_adapter(plan)
    found = layout(plan, os.cpu_count() or 1, gpus)
    if found.device == "cpu":  # Processes of a template have the settings of CPUs.
        found = attrs.evolve(found, python=python or {})
    with ExitStack() as stack:
        place, logs = plan.config.placement, plan.folder / "logs"
        wanted = f"engines: {place.engines if plan.needs_engine else 0}, learner ranks: {place.learners}"
        log.info("waiting for the model to load (%s; they write to %s)", wanted, logs)
        with stage("the start"):  # engines and learner start in parallel
            starting = start_engines(plan, found, adapter) if plan.needs_engine else []
            if found.device == "cuda" and place.colocate:
                # While vLLM measures how much memory it has left, nothing else may allocate memory on its GPU.
                ready = started_engines(plan, starting)
                # The learner needs that memory while it loads its models; the first weight sync wakes the engines.
                started_engines(plan, [(engine, engine.sleep.remote()) for engine in ready])
            learner = start_learner(plan, found, adapter, steps)
            engines = started_engines(plan, starting)
        for engine in engines:
            stack.callback(kill, engine)
        stack.callback(learner.stop)
        explorer = stack.enter_context(explorer_on(plan, engines, found, tasks, observers))
        if not by_hand:
            stack.callback(explorer.engines.close)
            yield explorer, learner, steps
            return
        rollouts = ThreadedRollouts(explorer)
        stack.callback(lambda: run_async(rollouts.close()))
        yield rollouts, learner, steps


@contextmanager
def explorer_on(
    plan: Plan, engines: Sequence[Any], found: Layout, tasks: Sequence[Sequence[Task]], observers: Observers
) -> Iterator[Explorer]:
    """Context manager: create the explorer of a plan, with rollout workers, scorer and environments."""
    config, codec, hook = plan.config, ChatTokenizer.of(plan), "rlsdk_rollout_done"

    def observer(rollout: Rollout, score: Score, step: int) -> None:
        observers.tell(hook, rollout=rollout, score=score, step=step)

    with group_maker(plan, codec, engines, observer if observers.observes(hook) else None) as maker:
        routes = maker.client if isinstance(maker, LocalMaker) else maker
        yield Explorer(
            plan,
            engines=_engines(plan, engines, found, routes if engines else None),
            maker=maker,
            sampling=context_of(plan, codec, None).sampling,
            streams=_streams(plan, tasks, codec),
            canary=Canary(
                _canary_tokens(codec, tasks[0], min(config.canary.tokens, config.model.max_length - 1)),
                tolerance_of(plan.model, config.canary.tolerance),
                outliers=allowed_outliers(plan.model),
                rounds=config.model.dtype != "float32",
            ),
            client=maker.client if isinstance(maker, LocalMaker) else None,
        )


def _engines(plan: Plan, actors: Sequence[Any], layout: Layout, routes: EngineRoutes | None) -> EngineGroup:
    """Create the engine group, with the policy for replacing dead engines."""
    # On a shared GPU, engines sleep while the learner works; on the CPU an idle engine costs nothing.
    shared = layout.device == "cuda" and plan.config.placement.colocate
    if shared and plan.config.rollout.runs_ahead:
        fault = "rollout: rollouts cannot run ahead of a learner on their own device; set placement.colocate=false"
        raise ConfigError([fault])
    if routes is None:
        return EngineGroup(actors, shared=shared)
    start = partial(restart_engine, plan, layout, exchanged_adapter(plan))
    most, missing = plan.config.placement.engine_restarts, partial(no_room, plan, layout)
    logs = plan.folder.resolve() / "logs"
    restarts = RestartPolicy(client=routes, start=start, most=most, logs=logs, missing=missing)
    return EngineGroup(actors, shared=shared, restarts=restarts)


def _streams(plan: Plan, tasks: Sequence[Sequence[Task]], codec: ChatTokenizer) -> TaskStreams:
    config = plan.config
    streams = []
    limit, setting = longest_prompt(config)
    for i, (source, some) in enumerate(zip(plan.tasks_train, tasks, strict=True)):
        seed = derive(config.seed, source.name) if i else config.seed  # sources of equal size get different orders
        given: tuple[Any, ...] = (some, seed, lambda t: len(codec.prompt(t)[1]), limit, config.long_prompts)
        sampler = plan.sampler and plan.plugins.resolve(plan.sampler)
        stream = SampledStream(sampler, *given, setting=setting) if sampler else TaskStream(*given, setting=setting)
        streams.append(Source(source.name, source.weight, stream))
    return TaskStreams(streams)


def _canary_tokens(codec: ChatTokenizer, tasks: Sequence[Task], count: int) -> np.ndarray:
    ids = [codec.prompt(tasks[i])[1] for i in range(min(len(tasks), count))]
    # Environment tasks may have an empty prompt; any other text works as well.
    found: np.ndarray = np.concatenate([*ids, codec.encode("+".join(map(str, range(max(count, 2)))))])
    return found[: max(count, 2)]
