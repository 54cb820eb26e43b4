"""Score how many of a task's verifiable instructions an answer follows."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

import rlsdk
from rlsdk.errors import DataError
from rlsdk.kit import nearest
from rlsdk.types import Rollout, Score, Task


@rlsdk.reward("followed", cache=True, imports=("if_verifiable",))
def followed(rollout: Rollout, *, mode: Literal["strict", "loose"] = "strict", partial: bool = True) -> Score:
    """Score an answer with the share of the task's instructions that it follows (IFEval, arXiv:2311.07911).

    Instructions are those of IFEval's 25 kinds, such as `punctuation:no_comma`; programs check them, no judge does.
    What the policy writes up to `</think>` is not part of its answer. An empty answer follows no instruction.

    Args:
        rollout: Rollout of a task with the columns of `google/IFEval`: `instruction_id_list`, the names of the
            instructions, and `kwargs`, the arguments of each, as a list or as JSON.
        mode: `strict` checks the answer; `loose` accepts it if it follows an instruction without its first line, its
            last line, both, or without asterisks.
        partial: Score the share; if false, the score is 1 if all instructions are followed, else 0.

    Returns:
        A score with the metrics `instructions`, the share that was followed, and `all`, 0 or 1.

    Raises:
        DataError: The task names no instructions, one that does not exist, or wrong arguments; or NLTK's data, which
            some instructions need, is not installed.
    """
    from if_verifiable.common import evaluate_instructions

    names, arguments = _instructions(rollout.task)
    try:
        results, _ = evaluate_instructions(rollout.response, names, arguments, "", _checkers())
    except LookupError as error:
        if "nltk" not in str(error).lower():
            raise
        raise DataError(
            f"task {rollout.task.id!r}: {', '.join(names)} need data of NLTK; install it on each machine with "
            "python -m nltk.downloader punkt punkt_tab"
        ) from error
    passed = [each.strict_pass if mode == "strict" else each.loose_pass for each in results] or [False] * len(names)
    share, complete = sum(passed) / len(names), float(all(passed))
    missed = [name for name, followed in zip(names, passed, strict=True) if not followed]
    return Score(
        share if partial else complete,
        metrics={"instructions": share, "all": complete},
        reason=f"not followed: {', '.join(missed)}" if missed else "",
    )


@cache
def _checkers() -> Mapping[str, Any]:
    """Return the class that checks each instruction, by its name."""
    import langdetect
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT

    langdetect.DetectorFactory.seed = 0  # it draws random numbers, and would judge the same answer differently
    found: Mapping[str, Any] = INSTRUCTION_DICT
    return found


def _instructions(task: Task) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names and arguments of a task's instructions; the library would skip or invent what is missing."""
    names, arguments = (_column(task, name) for name in ("instruction_id_list", "kwargs"))
    if not names or len(names) != len(arguments):
        raise DataError(
            f"task {task.id!r}: {len(names)} instruction_id_list and {len(arguments)} kwargs; each instruction needs "
            "its arguments, {} if it takes none"
        )
    filled = []
    for name, given in zip(names, arguments, strict=True):
        checker = _checkers().get(name)
        if checker is None:
            near = nearest(str(name), _checkers())
            guess = f"did you mean {near!r}?" if near else f"known are: {', '.join(_checkers())}"
            raise DataError(f"task {task.id!r}: unknown instruction {name!r}; {guess}")
        # Rows of a parquet file have the arguments of all instructions; those of others are null.
        values = {key: v for key, v in given.items() if v is not None} if isinstance(given, Mapping) else {}
        if fault := _fault(checker, name, values):
            raise DataError(f"task {task.id!r}: {name} {fault}")
        filled.append(values)
    return list(names), filled


def _fault(checker: Any, name: str, given: Mapping[str, Any]) -> str:
    """Return why an instruction cannot be checked with the given arguments; empty if it can.

    The library replaces arguments that it does not accept by random ones: what it keeps must be what was given.
    """
    wanted = [each for each in inspect.signature(checker.build_description).parameters if each != "self"]
    if set(given) != set(wanted):
        return f"takes the arguments: {', '.join(wanted) or 'none'}; kwargs has: {', '.join(given) or 'none'}"
    instruction = checker(name)
    try:
        instruction.build_description(**given)
        kept = instruction.get_instruction_args() or {}
    except Exception as error:  # noqa: BLE001 - whatever the library raises says what is wrong with an argument
        return f"does not accept its arguments {dict(given)}: {error}"
    for key, value in given.items():
        if _spelling(kept[key]) != _spelling(value):
            return f"does not accept {key}={value!r}"
    return ""


def _spelling(value: Any) -> Any:
    """Return an argument without what the library changes: order, capitals, surrounding spaces."""
    if isinstance(value, str):
        return value.strip().lower()
    return sorted(set(map(_spelling, value))) if isinstance(value, Sequence) else value


def _column(task: Task, name: str) -> Sequence[Any]:
    """Return a column of a task as a list; files of other trainers may hold it as JSON."""
    value = task.metadata.get(name)
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        value = None
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise DataError(
            f"task {task.id!r}: ifeval/followed needs the metadata {name}, a list or a list as JSON; it has: "
            f"{', '.join(task.metadata) or 'nothing'}"
        )
    return value
