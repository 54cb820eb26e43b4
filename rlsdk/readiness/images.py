"""Checks of a plan whose tasks or environments show images: model, engine and workflow must support them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlsdk.config import Plan
from rlsdk.contracts import PlaysEpisodes, ReadsImages, ShowsImages
from rlsdk.errors import ConfigError, RlsdkError
from rlsdk.types import Task
from rlsdk.vision import Vision, sees


def image_faults(plan: Plan, net: Any | None, tasks: Sequence[Task]) -> Iterator[tuple[str, str]]:
    """Yield reasons why a plan's images are not supported, as (path of the setting, reason).

    Args:
        plan: Checked plan.
        net: The plan's model without its weights; None if it could not be built.
        tasks: Some tasks of each source.
    """
    if plan.config.model.exact and net is not None and sees(net):
        yield "model.exact", f"a {type(net).__name__} reads images, which no exact pass does; leave it out"
    showing = list(_who_shows(plan, tasks))
    if not showing:
        return
    who, _ = showing[0]
    if any(as_text for _, as_text in showing):
        yield "tasks", f"{who} shows images, but the prompt is text, without a chat template; set form: chat"
    try:
        Vision(plan.model).check()
    except ConfigError as error:
        yield from (("model.path", f"{who} shows images: {fault}") for fault in error.faults)
        return
    if not plan.needs_engine or net is None:
        return
    engine = plan.plugins.resolve(plan.engine)
    if not isinstance(engine, ReadsImages):
        yield "engine", f"{who} shows images, which {plan.engine.name!r} does not read; set engine=transformers"
        return
    yield from (("engine", f"{who} shows images: {plan.engine.name!r}: {fault}") for fault in engine.image_faults(net))


def _who_shows(plan: Plan, tasks: Sequence[Task]) -> Iterator[tuple[str, bool]]:
    """Yield the tasks and environments that show images, in words, and True if the conversation begins as text."""
    references = [plan.workflow, *([plan.eval_workflow] if plan.eval_workflow != plan.workflow else [])]
    workflows = [plan.plugins.resolve(each) for each in references]
    for task in tasks:
        as_text = isinstance(task.prompt, str)
        if not isinstance(task.prompt, str) and any(message.images for message in task.prompt):
            yield f"task {task.id!r}", as_text
            continue
        for workflow in workflows:
            if isinstance(workflow, PlaysEpisodes) and (name := _environment_that_shows(plan, workflow, task)):
                yield f"environment {name!r}", as_text


def _environment_that_shows(plan: Plan, workflow: PlaysEpisodes, task: Task) -> str:
    try:
        use, _ = workflow.episode(task)
        reference = plan.plugins.reference("environment", use.name, use.options)
        # Created only if it declares images: some are costly.
        if not hasattr(plan.plugins.component(reference).obj, "shows_images"):
            return ""
        environment = plan.plugins.resolve(reference)
    except RlsdkError:
        return ""  # reported elsewhere
    return use.name if isinstance(environment, ShowsImages) and environment.shows_images else ""
