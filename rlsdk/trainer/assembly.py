"""What the two halves of a run are made of."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np

from rlsdk.config import Plan
from rlsdk.config.rules import fresh_groups
from rlsdk.learners.group import LearnerGroup
from rlsdk.plugins import load
from rlsdk.rollout.client import EngineClient
from rlsdk.rollout.codec import Codec
from rlsdk.rollout.gate import Gate
from rlsdk.rollout.producer import Producer
from rlsdk.rollout.seeds import derive
from rlsdk.rollout.stream import Source, TaskStream, TaskStreams, opened
from rlsdk.scoring.scorer import Scorer
from rlsdk.trainer.canary import TOLERANCE, Canary
from rlsdk.trainer.checkpoint import Checkpoints
from rlsdk.trainer.cluster import Layout
from rlsdk.trainer.credit import CreditAssigner
from rlsdk.trainer.evaluation import evaluator_of, held_out
from rlsdk.trainer.explorer import Explorer, Instruments
from rlsdk.trainer.far import FarExplorer
from rlsdk.trainer.loop import Parts
from rlsdk.trainer.setting import setting_of
from rlsdk.trainer.worlds import Fleets
from rlsdk.types import Task

log = logging.getLogger(__name__)


def train_tasks(plan: Plan) -> list[Sequence[Task]]:
    """The tasks of each source that a plan trains on."""
    return [opened(source, plan.plugins) for source in plan.tasks_train]


def steps_of(plan: Plan, tasks: Sequence[Sequence[Task]] | None = None) -> int:
    """How many steps a run has.

    Args:
        plan: The plan.
        tasks: Of its sources; left out, they are opened if their number matters.
    """
    if plan.config.steps is not None:
        return plan.config.steps
    count = sum(map(len, train_tasks(plan) if tasks is None else tasks))
    return ceil((plan.config.epochs or 0) * count / fresh_groups(plan.config))


def updates_of(plan: Plan, steps: int) -> int:
    """Optimiser steps of a run of so many steps."""
    return steps * plan.config.minibatches * plan.config.passes


def explorer_of(
    plan: Plan,
    engines: Sequence[Any],
    layout: Layout,
    tasks: Sequence[Sequence[Task]],
    scorer: Scorer | None,
    worlds: Fleets,
) -> Explorer:
    """The half that makes rollouts.

    Args:
        plan: The plan.
        engines: Handles of engine actors that are ready.
        layout: What each actor gets.
        tasks: Of each source to train on.
        scorer: Scores rollouts; None where there is no reward.
        worlds: Hosts environments.
    """
    config, resolve = plan.config, plan.plugins.resolve
    codec = Codec.open(plan.model)
    client = EngineClient(engines, codec.decode) if engines else None
    ends = () if codec.end is None else (codec.end,)
    partial = config.production.partial_rollouts
    gate = None if client is None else Gate(client, codec.decode, partial=partial, ends=ends)
    s = config.sampling
    if s.top_p < 1 or s.top_k:
        log.warning(
            "top_p=%s, top_k=%s: the learner cannot reproduce the distribution that was sampled from", s.top_p, s.top_k
        )
    seed = config.seed if s.seeds == "request" else None
    hook = plan.plugins.hook.rlsdk_rollout_done
    observer = (
        (lambda rollout, score, step: hook(rollout=rollout, score=score, step=step)) if hook.get_hookimpls() else None
    )
    demonstrator = Producer(load("workflow", "demonstration"), None, None)
    return Explorer(
        Instruments(
            plan=plan,
            engines=engines,
            layout=layout,
            client=client,
            setting=setting_of(plan, codec, gate, worlds.train),
            eval_worlds=worlds.eval,
            producer=Producer(resolve(plan.workflow), scorer, seed, observer),
            demonstrator=demonstrator if plan.algorithm.rollouts == "mixed" else None,
            evaluator=evaluator_of(plan, scorer),
            streams=_streams(plan, tasks, codec),
            eval_tasks=held_out(plan),
            filters=[resolve(f) for f in plan.filters],
            policy=resolve(plan.buffer),
            canary=Canary(
                _canary_tokens(codec, tasks[0], min(config.canary.tokens, config.model.max_length - 1)),
                config.canary.tolerance or TOLERANCE[config.model.dtype],
            ),
        )
    )


def parts_of(plan: Plan, learner: LearnerGroup, explorer: Explorer | FarExplorer, checkpoints: Checkpoints) -> Parts:
    """The half that trains.

    Args:
        plan: The plan.
        learner: Started.
        explorer: The other half.
        checkpoints: Of the run.
    """
    resolve = plan.plugins.resolve
    return Parts(
        plan=plan,
        learner=learner,
        explorer=explorer,
        filters=[resolve(f) for f in plan.filters],
        policy=resolve(plan.buffer),
        credit=CreditAssigner(
            [resolve(r) for r in plan.shaping],
            resolve(plan.advantage),
            whiten=plan.algorithm.whiten_advantages,
            clip=plan.algorithm.clip_advantages,
        ),
        checkpoints=checkpoints,
    )


def _streams(plan: Plan, tasks: Sequence[Sequence[Task]], codec: Codec) -> TaskStreams:
    config = plan.config
    streams = []
    for i, (source, some) in enumerate(zip(plan.tasks_train, tasks, strict=True)):
        seed = derive(config.seed, source.name) if i else config.seed  # sources of one size differ in their order
        stream = TaskStream(
            some, seed, lambda t: len(codec.prompt(t)[1]), config.max_prompt_tokens, config.long_prompts
        )
        streams.append(Source(source.name, source.weight, stream))
    return TaskStreams(streams)


def _canary_tokens(codec: Codec, tasks: Sequence[Task], count: int) -> np.ndarray:
    ids = [codec.prompt(tasks[i])[1] for i in range(min(len(tasks), count))]
    # Tasks of environments may have an empty prompt: any other text serves as well.
    found: np.ndarray = np.concatenate([*ids, codec.encode("+".join(map(str, range(max(count, 2)))))])
    return found[: max(count, 2)]
