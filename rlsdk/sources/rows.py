"""Conversion of data rows to tasks."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import attrs

from rlsdk.errors import ValueFault
from rlsdk.messages import IMAGE, content_of
from rlsdk.types import Message, Role, Task

IMAGES = ("images", "image")
"""Columns in which veRL's and TRL's data sets hold the images of placeholders in the prompt."""
ROLES = get_args(Role)


class BadRowError(Exception):
    """A row cannot be converted to a task; the message says why."""


class NoColumnError(BadRowError):
    """A row lacks a column that a field of its task is read from."""


@attrs.frozen(kw_only=True)
class Columns:
    """Names of the columns that tasks are created from; `a.b` is the field b of the column a, `a.0` its first item.

    Attributes:
        prompt: Column of prompts, text or lists of messages; by default, `prompt`.
        answer: Column of answers; by default, `reward_model.ground_truth` as in veRL's files, or `answer`, if present.
        source: Column of the data source's name; by default, `data_source` if present, else the file name without its
            shard number.
        demonstration: Column of expert answers, text or lists of messages; by default, `demonstration` if present.
        id: Column of ids; by default, tasks are named by file and row.
    """

    prompt: str | None = None
    answer: str | None = None
    source: str | None = None
    demonstration: str | None = None
    id: str | None = None


@attrs.frozen(kw_only=True)
class Wording:
    """Format of prompts.

    Attributes:
        chat: Convert text to a user message.
        system: System message at the beginning of every prompt.
        prefill: Beginning of every answer; not trained on.
    """

    chat: bool = False
    system: str | None = None
    prefill: str | None = None

    def put(self, given: str | tuple[Message, ...]) -> str | tuple[Message, ...]:
        """Return a prompt in this format."""
        if isinstance(given, str):
            if not (self.chat or self.system or self.prefill):
                return given
            given = (Message("user", given),)
        if self.system and given[0].role == "system":
            raise BadRowError("the prompt already has a system message; leave out the option `system`")
        if self.prefill and given[-1].role == "assistant":
            raise BadRowError("the prompt already ends with an assistant message; leave out the option `prefill`")
        before = (Message("system", self.system),) if self.system else ()
        after = (Message("assistant", self.prefill),) if self.prefill else ()
        return (*before, *given, *after)


@attrs.frozen(kw_only=True)
class TaskOrder:
    """Order of the tasks in training.

    Attributes:
        shuffle: True if they are shuffled in every epoch.
        sort_by: Column of numbers to sort by, smallest first; largest first with a minus before its name.
    """

    shuffle: bool = True
    sort_by: str | None = None

    @property
    def kept(self) -> bool:
        """True if training keeps the order of the source."""
        return self.sort_by is not None or not self.shuffle

    @property
    def column(self) -> str | None:
        """Name of the column to sort by."""
        return None if self.sort_by is None else self.sort_by.removeprefix("-")

    def key(self, row: Mapping[str, Any]) -> float:
        """Return a row's key, smallest first; 0 if there is no column to sort by."""
        if (column := self.column) is None:
            return 0.0
        try:
            value = _value(row, column)
        except NoColumnError as error:  # `columns`, the remedy for other missing columns, does not name this one
            raise BadRowError(f"sort_by: {error}") from error
        if not isinstance(value, int | float):
            raise BadRowError(f"expected a number in {column}, to sort by, got {reprlib.repr(value)}")
        return value if column == self.sort_by else -value


@attrs.frozen(kw_only=True)
class RowReader:
    """Converts rows to tasks; veRL's columns are recognised in each row."""

    columns: Columns
    wording: Wording
    order: TaskOrder = TaskOrder()

    def needed(self, present: Sequence[str]) -> list[str]:
        """Return the present columns that a task's fields and its place are read from; the others are metadata."""
        mapped = [name for name in (*attrs.astuple(self.columns), self.order.column) if name]
        known = {"prompt", "answer", "reward_model", "data_source", "demonstration", "extra_info"}
        return [name for name in present if name in known or any(name in {m, m.split(".")[0]} for m in mapped)]

    def task(self, row: Mapping[str, Any], name: str, source: str) -> Task:
        """Create a task; its id and its source are the given ones if no column gives them."""
        c, present = self.columns, {name: name for name in row}
        verl = "reward_model.ground_truth" if isinstance(row.get("reward_model"), Mapping) else None
        places = {
            "prompt": c.prompt or "prompt",
            "answer": c.answer or verl or present.get("answer"),
            "source": c.source or present.get("data_source"),
            "demonstration": c.demonstration or present.get("demonstration"),
            "id": c.id,
        }
        extra = row.get("extra_info")
        is_text = isinstance(extra, Mapping) and extra.get("text_prompt") is True  # see `rlsdk.sources.tables`
        found = {field: _value(row, place) for field, place in places.items() if place}
        metadata = {key: value for key, value in row.items() if key not in places.values()}
        prompt = _prompt(found["prompt"], str(places["prompt"]), is_text)
        column = next((name for name in IMAGES if name in row), None)
        texts = [prompt] if isinstance(prompt, str) else [message.content for message in prompt]
        if column and any(isinstance(text, str) and IMAGE in text for text in texts):
            raise BadRowError(
                f"{places['prompt']} has the placeholder <image>, but the column {column!r} is not read: images are "
                "parts of a message's content (docs/howto/vision.md)"
            )
        if "demonstration" in found:
            metadata["demonstration"] = _demonstration(found["demonstration"], str(places["demonstration"]))
        return Task(
            id=str(found["id"]) if "id" in found else name,
            prompt=self.wording.put(prompt),
            answer=found.get("answer"),
            metadata=metadata,
            source=_text(found["source"], places["source"]) if "source" in found else source,
        )


def _value(row: Mapping[str, Any], place: str) -> Any:
    value: Any = row
    if place in row:
        value = row[place]
    else:
        for part in place.split("."):
            if isinstance(value, list | tuple) and part.isdigit() and int(part) < len(value):
                value = value[int(part)]
                continue
            if not isinstance(value, Mapping) or part not in value:
                raise NoColumnError(f"there is no column {place!r}; there are: {', '.join(map(str, row)) or 'none'}")
            value = value[part]
    if value is None or (isinstance(value, float) and math.isnan(value)):  # pandas represents missing values as NaN
        raise BadRowError(f"{place} is empty")
    return value


def _text(value: Any, place: str | None) -> str:
    if not isinstance(value, str):
        raise BadRowError(f"expected text in {place}, got {reprlib.repr(value)}")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise BadRowError(f"the text in {place} is not valid Unicode: it holds half of a surrogate pair")
    return value


def _demonstration(value: Any, place: str) -> str | tuple[Message, ...]:
    if not isinstance(value, list | tuple):
        return _text(value, place)
    return tuple(_message(message, f"{place}[{index}]") for index, message in enumerate(value))


def _prompt(value: Any, place: str, as_text: bool) -> str | tuple[Message, ...]:
    if isinstance(value, str) and value.strip():
        if value.lstrip().startswith("[{") and _holds_messages(value):
            raise BadRowError(f"{place} is text that holds a list of messages as JSON; write the list itself")
        return _text(value, place)
    if not isinstance(value, list | tuple) or not value:
        raise BadRowError(f"expected text or a list of messages in {place}, got {reprlib.repr(value)}")
    messages = tuple(_message(message, f"{place}[{index}]") for index, message in enumerate(value))
    return messages[0].text if as_text and len(messages) == 1 else messages


def _holds_messages(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return all(isinstance(each, dict) and {"role", "content"} <= set(each) for each in found)


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, Mapping) or not {"role", "content"} <= set(value):
        raise BadRowError(f"expected a message with role and content in {place}, got {reprlib.repr(value)}")
    if value["role"] not in ROLES:
        raise BadRowError(f"expected one of {', '.join(ROLES)} as {place}.role, got {reprlib.repr(value['role'])}")
    content = "" if value["content"] is None and value.get("tool_calls") else value["content"]
    if not isinstance(content, list | tuple):
        content = _text(content, f"{place}.content")
    try:
        parts = content_of(content)
    except ValueFault as error:
        raise BadRowError(f"{place}.content: {error}") from error
    try:
        return Message.from_json({**value, "content": parts})
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise BadRowError(f"{place}.tool_calls: expected a list of calls in OpenAI's format: {error}") from error
