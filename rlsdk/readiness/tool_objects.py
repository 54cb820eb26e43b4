"""Checks of workflows whose tools are methods of objects, and of rewards that read these objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlsdk.config import Plan
from rlsdk.contracts import KeepsToolObjects, ReadsToolObjects
from rlsdk.errors import DataError
from rlsdk.types import Task


def unstartable(workflow: Any, tasks: Sequence[Task]) -> str:
    """Return why the objects of a workflow cannot start with one of the tasks; empty if they can, or it has none.

    Args:
        workflow: Resolved workflow.
        tasks: Tasks to try.
    """
    if isinstance(workflow, KeepsToolObjects):
        try:
            for task in tasks:
                workflow.check_task(task)
        except DataError as error:
            return str(error)
    return ""


def unread_objects(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield a fault if the reward reads the object of a tool class, but a workflow has none or several.

    Args:
        plan: Checked plan.
    """
    rewards = [plan.plugins.resolve(each.reference) for each in plan.rewards]
    if not any(isinstance(reward, ReadsToolObjects) and reward.reads_tool_objects for reward in rewards):
        return
    used = {"workflow": plan.workflow} if plan.sampled else {}
    if plan.tasks_eval and plan.eval_workflow not in used.values():
        used["eval.workflow"] = plan.eval_workflow
    for path, reference in used.items():
        workflow = plan.plugins.resolve(reference)
        classes = workflow.tool_classes if isinstance(workflow, KeepsToolObjects) else ()
        if len(classes) != 1:
            yield (
                path,
                f"the reward reads the object of a tool class, of which {reference.name!r} has "
                f"{', '.join(classes) or 'none'}: name one class, {{use: tools, tools: ['FILE.py:CLASS']}}",
            )
