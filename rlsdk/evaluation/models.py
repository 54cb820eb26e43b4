"""Evaluate a model or all checkpoints of a run without training: metrics, transcripts, pictures."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rlsdk import preflight
from rlsdk.checkpoints.checkpoint import Checkpoints
from rlsdk.checkpoints.export import export
from rlsdk.checkpoints.mirror import local_copy
from rlsdk.cluster.placement import ray_cluster
from rlsdk.cluster.watched import watched
from rlsdk.components import Use
from rlsdk.config import Plan, check
from rlsdk.contracts import Closes, PlaysEpisodes, Renders
from rlsdk.engines.client import EngineClient
from rlsdk.engines.group import EngineGroup
from rlsdk.engines.starting import engines_alone
from rlsdk.environments.pool import env_worker_pools
from rlsdk.errors import ArgumentError, CheckpointError, ConfigError, DamagedCheckpointError, DataError
from rlsdk.evaluation.evaluation import Answers, evaluate, evaluation_of, evaluator_of, held_out, produced_by
from rlsdk.isolation.reaper import reaped
from rlsdk.isolation.scratch import scratch_folder
from rlsdk.isolation.threads import Threads, run_to_end
from rlsdk.isolation.watching import main_loop
from rlsdk.loops import UserLoop
from rlsdk.plugins import Plugins
from rlsdk.readiness.checks import machine, training_faults
from rlsdk.readiness.explained import component_text
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.rollout.generator import first_error
from rlsdk.runlog.folder import replace_text, replacing
from rlsdk.runlog.serialization import transcript
from rlsdk.scoring.actors import scoring
from rlsdk.scoring.outcome import unscored
from rlsdk.serving.context import context_of
from rlsdk.storage.location import is_url
from rlsdk.types import Group, Rollout, Task

log = logging.getLogger(__name__)
SECONDS = 30.0
"""Time limit in seconds of a whole episode; no model is involved."""
_FRAME_MS = 500


@contextmanager
def model_of(
    checkpoint: str | Path, plugins: Sequence[str | Path] = (), named: Mapping[str, Any] | None = None
) -> Iterator[Path]:
    """Yield the folder of a checkpoint's model in transformers format; it may be deleted after the block.

    Args:
        checkpoint: Folder or URL of a run, whose newest intact checkpoint is taken, or of one of its checkpoints; or
            the folder of a model.
        plugins: Files of plugins that the run was started with.
        named: Configuration given by the user; code that it names may be executed.

    Raises:
        CheckpointError: The path is none of these.
    """
    if is_url(str(checkpoint)):
        at = re.fullmatch(r"(.*?)/checkpoints/step-(\d+)", str(checkpoint).rstrip("/"))
        place = (at[1], int(at[2])) if at else (str(checkpoint), None)
        with local_copy(place[0], step=place[1]) as local, model_of(local, plugins, named) as model:
            yield model
        return
    checkpoint = Path(checkpoint)
    if (checkpoint / "config.json").is_file():
        yield checkpoint
        return
    step = re.fullmatch(r"step-(\d+)", checkpoint.name)
    run = checkpoint.parent.parent if step else checkpoint
    if not (run / "config.yaml").is_file():
        raise CheckpointError(
            f"{checkpoint} is neither a run's folder, nor one of its checkpoints (RUN/checkpoints/step-N), nor a model"
        )
    with scratch_folder("rlsdk-eval-") as scratch:
        folder = scratch / "model"
        export(run, folder, step=int(step[1]) if step else None, plugins=plugins, named=named)
        yield folder


def default_folder(plan: Plan, evaluated: str) -> Path:
    """Return the folder in a run's folder for the evaluation of a model, which may be a checkpoint of another run.

    Args:
        plan: Plan of the run.
        evaluated: Path or URL of the model, or its name.
    """
    path = Path(evaluated).resolve()
    of_run = re.match(r"(.*)/checkpoints/(step-\d+)(/|$)", path.as_posix())
    if of_run is None:
        return plan.folder / "eval" / path.name
    run, step = Path(of_run[1]), of_run[2]
    own = run in (plan.folder.resolve(), Path(plan.location).resolve())
    return plan.folder / "eval" / (step if own else f"{run.name}-{step}")


def at_folder(folder: Path) -> tuple[str, str]:
    """Return the overrides that make a folder a run's folder."""
    return f"out={json.dumps(str(folder.parent))}", f"name={json.dumps(folder.name)}"


def samples_elsewhere(plan: Plan) -> bool:
    """Return True if the engine samples from a model of its own, whatever weights the plan names."""
    return bool(training_faults(plan))


def refuse_checkpoints(plan: Plan, given: str) -> None:
    """Refuse to evaluate a run's checkpoints with an engine that cannot load them.

    Raises:
        ArgumentError: The engine samples from a model of its own.
    """
    if samples_elsewhere(plan):
        raise ArgumentError(
            [
                f"{given}: the engine {component_text(plan.engine)} samples from a model of its own and loads "
                f"no checkpoint; leave out {given}, or use engine=vllm or engine=transformers"
            ]
        )


def evaluate_model(
    plan: Plan,
    *,
    model: str | None = None,
    pictures: int = 8,
    seen: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Evaluate a plan's model on its held-out tasks, and save the results in the plan's folder.

    Args:
        plan: Checked plan; its learner is not started.
        model: Name of the model in the results, if the plan's is a temporary copy of it; an engine that samples from
            a model of its own is named instead.
        pictures: Maximum number of episodes to draw, per source; greedy ones, if there are any.
        seen: Called after each rollout with the numbers of finished and of all rollouts.

    Returns:
        Content of `evaluation.json`: `accuracy`, `metrics` (also per source), `tasks` of each source, `invalid`
        rollouts by reason, `seconds`, and the paths of `transcripts.jsonl` and of the pictures.

    Raises:
        ConfigError: The plan has no held-out tasks.
        RlsdkError: An engine, a task or a reward failed, or a process was silent for too long.
    """
    if not plan.tasks_eval:
        raise ConfigError(["tasks.eval: expected at least one source of held-out tasks to evaluate on; none is given"])
    preflight.require(map(str, machine(plan, trains=False)))
    (plan.folder / "logs").mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    tasks = held_out(plan)
    with watched(plan.config.watchdog, "the evaluation"), reaped(), ray_cluster(plan) as gpus:
        engines = engines_alone(plan, gpus)
        ready = time.perf_counter()
        try:
            answers = asyncio.run(_answers(plan, engines, tasks, seen))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
    seconds = {"start": ready - start, "evaluation": time.perf_counter() - ready}
    drawn = asyncio.run(_pictures(plan, answers.greedy or answers.sampled, pictures))
    if samples_elsewhere(plan):
        model = component_text(plan.engine)
    return _saved(plan, model or plan.config.model.path, answers, seconds, drawn)


async def _answers(
    plan: Plan, engines: Sequence[Any], tasks: Sequence[Task], seen: Callable[[int, int], None] | None
) -> Answers:
    codec, section = ChatTokenizer.of(plan), plan.config.eval
    done, total = 0, len(tasks) * (section.greedy + section.samples)

    def observe(*_: Any) -> None:
        nonlocal done
        done += 1
        if seen is not None:
            seen(min(done, total), total)

    async def reseed() -> None:
        await EngineGroup(engines, shared=False).reseed(plan.config.seed, 0)

    logs = plan.folder / "logs"
    with (
        main_loop(),
        UserLoop() as user_loop,
        scoring(plan, log_to=logs / "scoring.log", user_loop=user_loop) as scorer,
        env_worker_pools(plan) as environments,
    ):
        client = EngineClient(engines, codec.decode)
        context = context_of(plan, codec, client, environments.eval or environments.train, user_loop)
        produce = produced_by(evaluator_of(plan, scorer, observe), context)
        return await evaluate(produce, tasks, context.sampling, section, reseed=reseed)


async def _pictures(plan: Plan, groups: Sequence[Group], most: int) -> list[Path]:
    """Draw the first episodes of each source that were played in an environment."""
    workflow = plan.plugins.resolve(plan.eval_workflow)
    if not isinstance(workflow, PlaysEpisodes):
        return []
    drawn: Counter[str] = Counter()
    found = []
    for group in groups:
        source, rollout = group.task.source, group.rollouts[0]
        if drawn[source] >= most or rollout.status == "failed":
            continue
        try:
            environment, seed = workflow.episode(group.task)
        except DataError:
            continue
        drawn[source] += 1
        name = re.sub(r"[^\w.-]+", "-", f"{source}-{rollout.task.id}")[-100:]
        path = await draw(rollout, environment, seed, plan.plugins, plan.folder / "pictures" / name)
        found += [path] if path else []
    return found


def _saved(
    plan: Plan, model: str, answers: Answers, seconds: dict[str, float], drawn: Sequence[Path]
) -> dict[str, Any]:
    found = evaluation_of(answers, plan.config.eval.samples, scored=bool(plan.rewards))
    transcripts = plan.folder / "transcripts.jsonl"
    kinds = (("greedy", answers.greedy), ("sampled", answers.sampled))
    with replacing(transcripts) as partial, partial.open("w", encoding="utf-8") as out:
        for kind, groups in kinds:
            for group in groups:
                for rollout, score in zip(group.rollouts, group.scores, strict=True):
                    row = {"kind": kind, **transcript(rollout, score)}
                    out.write(json.dumps(row, ensure_ascii=False) + "\n")
    answers.check_scores(plan.config.max_invalid, f"evaluation; see {transcripts}")
    invalid = Counter(reason for _, groups in kinds for group in groups for reason in unscored(group))
    summary = {
        "model": model,
        "tasks": dict(Counter(group.task.source for group in answers.sampled)),
        "accuracy": found.accuracy,
        "metrics": found.metrics,
        "invalid": {"rollouts": invalid.total(), "reasons": dict(invalid.most_common(5))},
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "transcripts": str(transcripts),
        "pictures": [str(path) for path in drawn],
    }
    replace_text(plan.folder / "evaluation.json", json.dumps(summary, indent=2) + "\n")
    return summary


def bench(
    config: str | Path | Mapping[str, Any],
    *overrides: str,
    plugins: Sequence[str | Path] = (),
    began: Callable[[int], None] = lambda step: None,
) -> list[dict[str, Any]]:
    """Evaluate the model that a run started from, as step 0, and each of its intact checkpoints.

    Args:
        config: Configuration of the run, as for `train`.
        *overrides: `key=value` texts.
        plugins: Files of plugins.
        began: Called with the step when its evaluation begins.

    Returns:
        Content of `bench.json` in the run's folder: for each step, its number and the result of `evaluate_model`.

    Raises:
        CheckpointError: The run has no checkpoint, or all are damaged.
        ArgumentError: The engine cannot load checkpoints.
        ConfigError: The configuration is invalid, or has no held-out tasks.
        RlsdkError: An engine, a task or a reward failed.
    """
    plan = check(config, overrides, plugins)
    refuse_checkpoints(plan, "--mode bench")
    checkpoints = Checkpoints(plan.folder, plan.config.checkpoint.keep)
    if not checkpoints.steps():
        raise CheckpointError(
            f"{plan.folder / 'checkpoints'} holds no checkpoint; train first, or name the run's folder"
        )
    found = []
    for step in [0, *_intact_steps(checkpoints)]:
        began(step)
        folder = plan.folder / "bench" / f"step-{step}"
        shutil.rmtree(folder, ignore_errors=True)
        source = checkpoints.path(step) if step else Path(plan.config.model.path)
        with model_of(source, plugins, plan.tree) as model:
            own = check(config, (*overrides, *at_folder(folder), f"model.path={json.dumps(str(model))}"), plugins)
            found.append({**evaluate_model(own, model=str(source), pictures=0), "step": step})
    replace_text(plan.folder / "bench.json", json.dumps(found, indent=2) + "\n")
    return found


def _intact_steps(checkpoints: Checkpoints) -> list[int]:
    """Return the steps of the intact checkpoints; log a warning for each damaged one."""
    found = []
    for step in checkpoints.steps():
        try:
            checkpoints.verify(step, "model")
        except DamagedCheckpointError as error:
            log.warning("%s; skipped", error)
        else:
            found.append(step)
    if not found:
        checkpoints.newest_whole("model")  # raises an error that describes each fault
    return found


async def draw(rollout: Rollout, environment: Use, seed: int, plugins: Plugins, path: Path) -> Path | None:
    """Replay a rollout's answers and save what the environment renders.

    Args:
        rollout: Rollout whose answers are the actions.
        environment: Environment component with its options.
        seed: Seed of the episode.
        plugins: Plugins that provide the environment.
        path: Target without a suffix: `.gif` for pictures, `.txt` for text.

    Returns:
        Path of the file; None if the environment renders nothing.
    """
    answers = [message.text for message in rollout.answers]
    made = plugins.resolve(plugins.reference("environment", environment.name, environment.options))
    if not isinstance(made, Renders):
        return None
    frames = [f for f in await Threads(1).call(_play, made, seed, answers, seconds=SECONDS) if f is not None]
    return save(frames, path) if frames else None


def _play(environment: Any, seed: int, answers: Sequence[str]) -> list[np.ndarray | str | None]:
    try:
        _done(environment.reset(seed))
        frames = [_frame(environment)]
        for answer in answers:
            step = _done(environment.step(answer))
            frames.append(_frame(environment))
            if step.terminated or step.truncated:
                break
        return frames
    finally:
        if isinstance(environment, Closes):
            _done(environment.close())


def _done(result: Any) -> Any:
    """Return the result of a call that may be async."""
    return run_to_end(result) if inspect.isawaitable(result) else result


def _frame(environment: Any) -> np.ndarray | str | None:
    """Render a picture if the environment can, else text."""
    modes = "mode" in inspect.signature(environment.render).parameters
    shown = environment.render(mode="rgb_array") if modes else environment.render()
    return shown if isinstance(shown, np.ndarray | str) else None


def save(frames: Sequence[np.ndarray | str], path: Path) -> Path:
    """Save frames: pictures, uint8 `[height, width, 3]`, as an animation, texts one below another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(frames[0], str):
        text = path.with_name(f"{path.name}.txt")
        replace_text(text, "\n\n".join(str(frame) for frame in frames) + "\n")
        return text
    from PIL import Image

    pictures = [Image.fromarray(np.asarray(frame, dtype=np.uint8)) for frame in frames]
    gif = path.with_name(f"{path.name}.gif")
    with replacing(gif) as partial:
        pictures[0].save(partial, "GIF", save_all=True, append_images=pictures[1:], duration=_FRAME_MS, loop=0)
    return gif
