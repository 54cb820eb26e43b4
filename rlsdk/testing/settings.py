"""Settings of `rlsdk check`: options of a plugin's components, and tasks for its rewards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from rlsdk.errors import ValueFault
from rlsdk.types import Task


def read_options(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Parse options by component from texts such as `jsonl.path=tasks.jsonl`; values are YAML.

    Raises:
        ValueFault: A text does not have this form.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        target, equals, value = text.partition("=")
        component, dot, key = target.rpartition(".")
        if not (equals and dot and component and key):
            raise ValueFault(f"option {text!r}: expected COMPONENT.OPTION=VALUE, such as top_k.k=4")
        found.setdefault(component.rpartition("/")[2], {})[key] = _yaml(value, text)
    return found


def read_tasks(texts: Iterable[str]) -> tuple[Task, ...]:
    """Parse tasks from texts such as `{"prompt": "1 + 1?", "answer": "2"}`.

    Raises:
        ValueFault: A text does not describe a task.
    """
    return tuple(_task(text, i) for i, text in enumerate(texts))


def _task(text: str, index: int) -> Task:
    held = _yaml(text, text)
    fields = ("prompt", "answer", "metadata", "source", "id")
    if not isinstance(held, dict) or "prompt" not in held or not set(held) <= set(fields):
        raise ValueFault(f"task {text!r}: expected a mapping with a prompt and, as needed: {fields[1:]}")
    return Task(**{"id": f"given/{index}", **held})


def _yaml(value: str, text: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueFault(f"{text!r} is not YAML: {error}") from error
