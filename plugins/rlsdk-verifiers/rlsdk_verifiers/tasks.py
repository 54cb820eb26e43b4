"""Tasks of an installed environment."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Literal

import rlsdk
from rlsdk.errors import DataError, OptionError, ValueFault
from rlsdk.kit import TaskList
from rlsdk.types import Task
from rlsdk_verifiers import environments

TEST_SHARE = 10
"""With `split`, one in this many tasks is a test task."""
_WHERE = "tasks 'verifiers/tasks'"


@rlsdk.tasks("tasks")
def tasks(
    *,
    environment: str,
    config: Mapping[str, Any] = {},
    select: Mapping[str, Any] = {},
    split: Literal["train", "test"] | None = None,
    chat: bool = True,
) -> TaskList:
    """Tasks of an installed environment of verifiers.

    Args:
        environment: Id of the environment, which is the name of its package: `my-env`, or `owner/my-env`.
        config: Settings that verifiers reads as the block `[env]`: `{taskset: {split: train}, agent: {max_turns: 4}}`.
        select: Selection and order of tasks, in verifiers' form: `{include: {idx: ["0:900"]}, shuffle: true, limit:
            500}`. An infinite taskset must be limited here.
        split: `test` for one task in ten, by a hash of its content, `train` for the others; null for all tasks. If
            the environment has its own splits, choose one in `config`.
        chat: Use messages as prompts; if false, a prompt of one message is text, for models without a chat template.

    Returns:
        Tasks with metadata for `verifiers/workflow` and `verifiers/rubric`.

    Raises:
        OptionError: The environment is not installed, its configuration is wrong, or rlsdk does not support it.
        DataError: A task contains more than text.
    """
    import pydantic

    try:
        env = environments.open_environment(environment, config)
    except ValueFault as error:
        wrong = "config" if isinstance(error.__cause__, pydantic.ValidationError) else "environment"
        raise OptionError(_WHERE, [(wrong, str(error))]) from error
    found = _selected(env, select)
    if not found:
        raise OptionError(_WHERE, [("select", f"selects no task of {environment}")])
    needs = environments.missing(env, found[0])
    if needs:
        raise OptionError(_WHERE, [("environment", f"{environment} needs {need}") for need in needs])
    made = [_task(environment, config, task, chat) for task in found if split is None or _is_of(task, split)]
    if not made:
        raise OptionError(_WHERE, [("split", f"none of {len(found)} tasks of {environment} is for {split}")])
    return TaskList(made.__getitem__, len(made))


def _selected(env: Any, select: Mapping[str, Any]) -> list[Any]:
    import verifiers.v1 as vf

    try:
        chosen = env.taskset.select(vf.SelectConfig.model_validate(dict(select)))
        if not chosen.bounded:
            raise ValueError("the environment has infinitely many tasks; limit them: {limit: 1000}")
        return list(itertools.chain(chosen))
    except Exception as error:  # reading foreign data may raise anything
        raise OptionError(_WHERE, [("select", environments.described(error))]) from error


def _is_of(task: Any, split: str) -> bool:
    return (int(task.hash[:15], 16) % TEST_SHARE == 0) == (split == "test")


def _task(environment: str, config: Mapping[str, Any], task: Any, chat: bool) -> Task:
    data = task.data
    try:
        prompt = environments.prompt_of(data)
    except ValueFault as error:
        raise DataError(f"task {data.idx} of {environment}: {error}") from error
    plain = data.model_dump(mode="json", exclude_defaults=True)
    return Task(
        id=f"{environment}/{data.idx if data.id is None else data.id}",
        prompt=prompt if chat or len(prompt) > 1 else prompt[0].text,
        answer=plain.get("answer"),
        metadata={"environment": environment, "config": dict(config), "data": plain},
        source=environment,
    )
