"""Open environments of verifiers by id and configuration, and check them for unsupported features."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from rlsdk.errors import DataError, ValueFault
from rlsdk.types import Message, Task

PLAIN_HARNESSES = ("null", "bash")
"""Harnesses that are plain conversations if there is no container; `bash` is verifiers' default."""
SCORED = "verifiers/reward"
"""Metric with the score of a rollout that was scored during its episode."""


def open_environment(environment: str, config: Mapping[str, Any]) -> Any:
    """Open an environment; the result is cached, since all episodes share it.

    Args:
        environment: Id of its taskset, which is the name of the installed package.
        config: Configuration that verifiers reads as `[env]`, without the taskset's id.

    Raises:
        ValueFault: The environment is not installed, or its configuration is wrong.
    """
    return _opened(environment, json.dumps(config, sort_keys=True))


@lru_cache(maxsize=32)
def _opened(environment: str, config: str) -> Any:
    import verifiers.v1 as vf

    given = json.loads(config)
    try:
        block = {**given, "taskset": {**given.get("taskset", {}), "id": environment}}
        return vf.load_environment(vf.resolve_env_config(block))
    except Exception as error:  # importing and configuring foreign packages may raise anything
        raise ValueFault(f"{environment}: {described(error)}") from error


def described(error: Exception) -> str:
    """Describe an error of verifiers in one line; one of validation, which pydantic spreads over many, by its keys."""
    import pydantic

    if not isinstance(error, pydantic.ValidationError):
        return f"{type(error).__name__}: {error}"
    faults = [(".".join(map(str, each["loc"])), each["msg"], each["input"]) for each in error.errors()]
    return "; ".join(f"{where}: {said}, got {given!r:.80}" for where, said, given in faults)


def of(task: Task) -> tuple[Any, Any]:
    """Return the environment of a task, and the task in verifiers' form.

    Raises:
        DataError: The task did not come from `verifiers/tasks`, or the environment cannot be opened here.
    """
    held = task.metadata
    if not {"environment", "config", "data"} <= set(held):
        there = ", ".join(held) or "nothing"
        raise DataError(
            f"task {task.id!r} did not come from verifiers/tasks: its metadata lacks environment, config or data; it "
            f"has: {there}"
        )
    try:
        env = open_environment(held["environment"], held["config"])
        made = type(env.taskset).task_type()
        return env, made(made.data_type().model_validate(held["data"]), env.taskset.config.task)
    except (ValueFault, ValueError) as error:
        raise DataError(f"task {task.id!r}: {error}") from error


def is_played(env: Any, task: Any) -> bool:
    """Return True if an episode is more than one answer: the environment has its own `run`, or the task has hooks."""
    import verifiers.v1 as vf

    own_hooks = type(task).setup is not vf.Task.setup or type(task).finalize is not vf.Task.finalize
    return type(env) is not vf.SingleAgentEnv or own_hooks


def seats(env: Any) -> dict[str, Any]:
    """Return the agents that an environment declares, by name."""
    from verifiers.v1.configs.agent import agent_config_fields

    return dict(agent_config_fields(env.config))


def missing(env: Any, task: Any) -> list[str]:
    """List the requirements of an environment that rlsdk does not support, one phrase each."""
    import verifiers.v1 as vf
    from verifiers.v1.configs.env import default_agent_harness

    agents = seats(env)
    pinned = {spec.harness.id for spec in agents.values() if spec.harness is not None}
    harnesses = pinned or {default_agent_harness(env.config.taskset.id).id}
    own = {name for name in ("start", "stop") if getattr(type(env), name) is not getattr(vf.Env, name)}
    rules = [
        (len(agents) == 1, f"several agents ({', '.join(agents)}); a workflow has one policy"),
        (harnesses <= set(PLAIN_HARNESSES), f"the harness {', '.join(sorted(harnesses))}, a separate program"),
        (not own, "resources that all episodes share (start, stop)"),
        (not (env.taskset.toolsets(env.taskset.config) or task.toolsets(task.config)), "tool servers (toolsets)"),
        (not type(task).NEEDS_CONTAINER and task.data.image is None, "a container"),
        (not task.config.judges, "judges, which call another model"),
    ]
    return [text for kept, text in rules if not kept] + list(_runtime_needs(task))


def _runtime_needs(task: Any) -> Iterator[str]:
    import verifiers.v1 as vf
    from verifiers.v1.session import hook_boundary
    from verifiers.v1.trace import Trace
    from verifiers.v1.utils.decorators import discover_decorated

    hooks = [name for name in ("setup", "finalize") if getattr(type(task), name) is not getattr(vf.Task, name)]
    called = [*(getattr(task, name) for name in hooks), *task.hooks("reward"), *task.hooks("metric")]
    boxed = [function.__name__ for function in called if _needs_runtime(function)]
    if boxed:
        yield f"a runtime, for {', '.join(boxed)}"
    early = [stop.__name__ for stop in task.hooks("stop") if hook_boundary(stop, allow_trace=True) is not Trace]
    if early or discover_decorated(task, "intercept"):
        yield f"access to single requests and responses ({', '.join(early) or 'intercept'})"


def _needs_runtime(function: Callable[..., Any]) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is parameter.empty


def prompt_of(data: Any) -> tuple[Message, ...]:
    """Return the initial messages of a task.

    Raises:
        ValueFault: There are none, or one contains more than text.
    """
    system = (Message("system", data.system_prompt),) if data.system_prompt else ()
    if data.prompt is None:
        raise ValueFault("it has no prompt; expected a task with a prompt, which begins the conversation")
    if isinstance(data.prompt, str):
        return (*system, Message("user", data.prompt))
    return (*system, *(Message(message.role, text_of(message)) for message in data.prompt))


def text_of(message: Any) -> str:
    """Return the text of a message of verifiers.

    Raises:
        ValueFault: The message contains more than text.
    """
    content = message.content or ""
    if isinstance(content, str):
        return content
    if any(part.type != "text" for part in content):
        raise ValueFault(f"a message of the {message.role} contains more than text, which rlsdk does not support")
    return "\n".join(part.text for part in content)
