"""Tools and environments of TRL: functions, and classes of which each rollout has an object."""

from __future__ import annotations

from typing import Any

from rlsdk.migration.rules import NOTES, Given, KeyOutcome
from rlsdk.migration.values import UnfitError, texts

MOST_TURNS = 64
"""Answers of a rollout with tools where TRL sets no limit."""
_SIZE = 10_000
"""Tasks where an environment makes its own."""


def callables(value: Any) -> list[str]:
    """Read the paths of functions, as in `tools.py:add`."""
    found = texts(value)
    if unknown := next((each for each in found if ":" not in each), None):
        raise UnfitError(f"{unknown!r} is not the path of a function: give FILE.py:NAME")
    return found


def convert_tools(value: Any, _: Given) -> KeyOutcome:
    """Report the functions that `workflow_of` converts."""
    try:
        callables(value)
    except UnfitError:
        return KeyOutcome.missing("workflow: {use: tools, tools: ['FILE.py:function']}")
    return KeyOutcome({}, "the workflow tools; results count towards model.max_length, not max_tokens")


def convert_factory(_: Any, given: Given) -> KeyOutcome:
    """Report the class of environments that `workflow_of` converts."""
    if tool_class(given) is None:
        return KeyOutcome.missing("name the class that it makes: workflow: {use: tools, tools: ['FILE.py:CLASS']}")
    return KeyOutcome({}, "a tool class; its public methods are the tools, except close (howto/tools.md)")


def tool_class(given: Given) -> str | None:
    """Return the path of the class that makes environments; None for a function, a call or several classes."""
    value = given.get("environment_factory")
    named = isinstance(value, str) and value.rpartition(":")[1:]
    return str(value) if named and named[0] and named[1][:1].isupper() else None


def workflow_of(given: Given) -> dict[str, Any]:
    """Return the workflow of tools and environments, the environments' own tasks and reward, and notes on them.

    Args:
        given: Values of the configuration.
    """
    made = tool_class(given)
    tools = [*given.read("tools", callables, []), *([made] if made else [])]
    if not tools:
        return {}
    rounds = given.whole("max_tool_calling_iterations", 0)
    found: dict[str, Any] = {
        "workflow": {"use": "tools", "tools": tools, "max_turns": rounds + 1 if rounds else MOST_TURNS}
    }
    if made is None:
        return found
    notes = ["workflow: a method that takes longer than call_timeout, 10 s, fails its rollout; TRL waits"]
    if "reward_funcs" in given.flat:
        notes.append(
            "reward: if the class has get_reward, which TRL adds to the reward functions, add {use: environment}"
        )
    else:
        found["reward"] = {"use": "environment"}
    if not any(key.split(".")[0] in ("train_dataset", "dataset_name", "datasets") for key in given.flat):
        found["tasks.train"] = {"use": "seeds", "size": _SIZE}
        notes.append(
            "tasks.train: reset gets a seed; draw its state from that, so that the rollouts of a group start alike"
        )
    return {**found, NOTES: tuple(notes)}
