"""A model on held-out tasks, without a training: figures, transcripts, and pictures of episodes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlsdk import preflight
from rlsdk.components import Use
from rlsdk.config import Plan
from rlsdk.errors import CheckpointError, ConfigError, DataError
from rlsdk.rollout.client import EngineClient
from rlsdk.rollout.codec import Codec
from rlsdk.rollout.producer import first_error
from rlsdk.runlog.rollouts import transcript
from rlsdk.trainer.cluster import layout, ray_cluster, start_engines, started_engines
from rlsdk.trainer.engines import Engines
from rlsdk.trainer.evaluation import Answers, evaluate, evaluator_of, figures, held_out
from rlsdk.trainer.export import export
from rlsdk.trainer.reaper import reaped
from rlsdk.trainer.replay import draw
from rlsdk.trainer.rewarding import scoring
from rlsdk.trainer.setting import setting_of
from rlsdk.trainer.worlds import world_workers
from rlsdk.types import Group, Rollout, Task
from rlsdk.workflows.environment import environment_of, seed_of


@contextmanager
def model_of(checkpoint: Path, plugins: Sequence[str | Path] = ()) -> Iterator[Path]:
    """The folder of a checkpoint's model, as transformers opens it; it may be gone behind the block.

    Args:
        checkpoint: A run's folder (its newest checkpoint counts), that of one of its checkpoints, or a model's.
        plugins: Files of plugins that the run was started with.

    Raises:
        CheckpointError: It is none of these.
    """
    if (checkpoint / "config.json").is_file():
        yield checkpoint
        return
    step = re.fullmatch(r"step-(\d+)", checkpoint.name)
    run = checkpoint.parent.parent if step else checkpoint
    if not (run / "config.yaml").is_file():
        raise CheckpointError(
            f"{checkpoint} is neither a run's folder, nor one of its checkpoints (RUN/checkpoints/step-N), nor a model"
        )
    with TemporaryDirectory(prefix="rlsdk-model-") as scratch:
        folder = Path(scratch) / "model"
        export(run, folder, step=int(step[1]) if step else None, plugins=plugins)
        yield folder


def examine(plan: Plan, *, pictures: int = 8, seen: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Evaluate a plan's model on its held-out tasks, and save what it did in the plan's folder.

    Args:
        plan: The plan; its learner is not started.
        pictures: Episodes of each environment to draw, greedy ones.
        seen: Told how many rollouts of how many there are, as they finish.

    Returns:
        What `evaluation.json` holds: `accuracy`, `metrics` (those of each source, too), `tasks` of each source,
        `invalid` rollouts by reason, `seconds`, and the paths of `transcripts.jsonl` and of the pictures.

    Raises:
        ConfigError: The plan has no held-out tasks.
        RlsdkError: An engine, a task or a reward failed.
    """
    if not plan.tasks_eval:
        raise ConfigError(["tasks.eval: none given; name what to evaluate on"])
    if plan.config.placement.device != "cpu":
        preflight.require(preflight.gpu_capability())
    (plan.folder / "logs").mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    tasks = held_out(plan)
    with reaped(), ray_cluster(plan) as gpus:
        engines = started_engines(plan, start_engines(plan, layout(plan.config.placement, os.cpu_count() or 1, gpus)))
        ready = time.perf_counter()
        try:
            answers = asyncio.run(_answers(plan, engines, tasks, seen))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
    seconds = {"start": ready - start, "evaluation": time.perf_counter() - ready}
    drawn = asyncio.run(_pictures(plan, answers.greedy, pictures))
    return _saved(plan, answers, seconds, drawn)


async def _answers(
    plan: Plan, engines: Sequence[Any], tasks: Sequence[Task], seen: Callable[[int, int], None] | None
) -> Answers:
    codec, section = Codec.open(plan.model), plan.config.eval
    done, total = 0, len(tasks) * (1 + section.samples)

    def observe(*_: Any) -> None:
        nonlocal done
        done += 1
        if seen is not None:
            seen(min(done, total), total)

    async def reseed() -> None:
        await Engines(engines, shared=False).reseed(plan.config.seed, 0)

    logs = plan.folder / "logs"
    with scoring(plan, log_to=logs / "scoring.log") as scorer, world_workers(plan) as worlds:
        setting = setting_of(plan, codec, EngineClient(engines, codec.decode), worlds.eval or worlds.train)
        return await evaluate(evaluator_of(plan, scorer, observe), tasks, setting, section, reseed=reseed)


async def _pictures(plan: Plan, groups: Sequence[Group], most: int) -> list[Path]:
    """Of the first episodes of each source that were played in an environment."""
    drawn: Counter[str] = Counter()
    found = []
    for group in groups:
        source, rollout = group.task.source, group.rollouts[0]
        environment = _environment(plan, group.task)
        if environment is None or drawn[source] >= most or rollout.status == "failed":
            continue
        drawn[source] += 1
        path = await draw(rollout, environment, seed_of(group.task), plan.plugins, _picture(plan, rollout))
        found += [path] if path else []
    return found


def _environment(plan: Plan, task: Task) -> Use | None:
    """The environment in which a task is played, if it is."""
    if plan.workflow.name != "core/environment":
        return None
    given = plan.workflow.options.get("environment")
    try:
        return environment_of(task if given is None else Task(id="", prompt="", metadata={"environment": given}))
    except DataError:
        return None


def _picture(plan: Plan, rollout: Rollout) -> Path:
    name = re.sub(r"[^\w.-]+", "-", f"{rollout.task.source}-{rollout.task.id}")
    return plan.folder / "pictures" / name[-100:]


def _saved(plan: Plan, answers: Answers, seconds: dict[str, float], drawn: Sequence[Path]) -> dict[str, Any]:
    found = figures(answers, plan.config.eval.samples)
    transcripts = plan.folder / "transcripts.jsonl"
    kinds = (("greedy", answers.greedy), ("sampled", answers.sampled))
    scores = [score for _, groups in kinds for group in groups for score in group.scores]
    with transcripts.open("w", encoding="utf-8") as out:
        for kind, groups in kinds:
            for group in groups:
                for rollout, score in zip(group.rollouts, group.scores, strict=True):
                    row = {"kind": kind, **transcript(rollout, score)}
                    out.write(json.dumps(row, ensure_ascii=False) + "\n")
    invalid = Counter(score.reason for score in scores if not score.valid)
    summary = {
        "model": plan.config.model.path,
        "tasks": dict(Counter(group.task.source for group in answers.greedy)),
        "accuracy": found.accuracy,
        "metrics": found.metrics,
        "invalid": {"rollouts": invalid.total(), "reasons": dict(invalid.most_common(5))},
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "transcripts": str(transcripts),
        "pictures": [str(path) for path in drawn],
    }
    (plan.folder / "evaluation.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary
