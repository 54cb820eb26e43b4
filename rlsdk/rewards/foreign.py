"""Run rewards written for other trainers, unmodified."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import attrs

import rlsdk
from rlsdk.contracts.tasks import failed_together
from rlsdk.errors import DataError, OptionError, ValueFault, described
from rlsdk.plugins.discovery import find
from rlsdk.plugins.fingerprints import Fingerprint, of_text
from rlsdk.rewards.conventions import CONVENTIONS, Convention, Parameters, PreparedCall
from rlsdk.types import Rollout, Score

Style = Literal["auto", "trl", "verl", "verl_batch", "openrlhf", "verifiers", "reasoning_gym", "trinity", "xtuner"]


@rlsdk.reward("foreign", batch=True)
@attrs.frozen(kw_only=True)
class Foreign:
    """A reward of TRL, veRL, OpenRLHF, verifiers, reasoning-gym, Trinity-RFT or XTuner, unmodified.

    The convention is recognised from the signature before a run starts. Exceptions, NaN and lists of the wrong length
    give invalid scores, never zeros; so does None, unless `none` is `zero`. Functions may be async; classes are
    instantiated. A function that takes many rollouts at once (TRL, veRL's batches) may compare them: it is called once
    with all rollouts of a task.

    Attributes:
        path: `my_file.py:function` or `package.module:function`; a class or `object.method` may replace the function.
        style: Calling convention of the function; `auto` recognises it.
        arguments: Additional arguments of each call (veRL's `reward_kwargs`, XTuner's `extra_info`) or, for a class, of
            its constructor (Trinity's `reward_fn_args`).
        batch: Rollouts per call, if the convention takes many: `group`, all of one task, or `any`, those waiting
            together, for functions that score each rollout independently.
        none: Meaning of None: an invalid score, or zero, which adds nothing to a sum of rewards (as in TRL).
        key: Name of the number that is the score, if the function returns a mapping with several; null for the one of
            the convention, such as `score`.
    """

    path: str
    style: Style = "auto"
    arguments: Mapping[str, Any] = attrs.field(factory=dict)
    batch: Literal["group", "any"] = "group"
    none: Literal["invalid", "zero"] = "invalid"
    key: str | None = None
    _call: Callable[..., Any] = attrs.field(init=False, eq=False, repr=False)
    _extra: Mapping[str, Any] = attrs.field(init=False, eq=False, repr=False)
    _parameters: Parameters = attrs.field(init=False, eq=False, repr=False)
    _convention: Convention = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        try:
            found = find(self.path)
        except ValueFault as error:
            raise _fault("path", str(error)) from error
        call, extra = _instance(found, self.arguments)
        try:
            parameters = Parameters.of(call)
        except (TypeError, ValueError) as error:
            raise _fault("path", f"the parameters of {self.path} cannot be read: {error}") from error
        convention = _recognise(parameters, self.path) if self.style == "auto" else CONVENTIONS[self.style]
        _check(parameters, convention, extra, self.path)
        for name, value in (("call", call), ("extra", extra), ("parameters", parameters), ("convention", convention)):
            object.__setattr__(self, f"_{name}", value)

    @property
    def convention(self) -> str:
        """Name of the convention that was given or recognised."""
        return self._convention.name

    @property
    def whole_groups(self) -> bool:
        """True if each call needs all rollouts of one task."""
        return self._convention.batch and self.batch == "group"

    @property
    def reads_tool_objects(self) -> bool:
        """True if the function requires TRL's `environments`."""
        return "environments" in self._parameters.required

    @property
    def marks(self) -> dict[str, Fingerprint]:
        """Hash of the file that holds the function; resuming a run with a different file is refused."""
        call = self._call if inspect.isroutine(self._call) else type(self._call)
        try:
            file = inspect.getsourcefile(inspect.unwrap(call))
            text = Path(file or "").read_text(encoding="utf-8")
        except (OSError, TypeError):  # built in, or defined in an interactive interpreter
            return {}
        return {f"foreign {self.path}": of_text(text)}

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score] | Awaitable[list[Score]]:
        """Score rollouts.

        Returns:
            One score per rollout; awaitable if the function is async.

        Raises:
            DataError: The function requires a column that a task lacks.
        """
        size = len(rollouts) if self._convention.batch else 1
        chunks = [rollouts[start : start + size] for start in range(0, len(rollouts), max(size, 1))]
        begun = [self._begin(chunk) for chunk in chunks]
        if any(inspect.isawaitable(result) for _, _, result in begun):
            return self._awaited(begun)
        return [score for each in begun for score in self._scores(*each)]

    def _begin(self, chunk: Sequence[Rollout]) -> tuple[PreparedCall, int, Any]:
        """Call the function; return the call, the number of rollouts, and its result or exception."""
        chunk = [_for_one_call(rollout) for rollout in chunk]
        prepared = self._convention.prepare(chunk)
        named = self._chosen(prepared, chunk)
        try:
            result = self._call(*prepared.positional, **named)
            if self._convention.batch and isinstance(result, Iterator):  # such as a generator, whose code runs here
                result = list(islice(result, len(chunk) + 1))
        except Exception as error:  # noqa: BLE001 - the user's code: what it raises is the score's reason
            result = error
        return prepared, len(chunk), result

    def _chosen(self, prepared: PreparedCall, chunk: Sequence[Rollout]) -> dict[str, Any]:
        """Select the arguments that the function takes."""
        offered = {**prepared.named, **self._extra}
        filled = set(self._parameters.names[: len(prepared.positional)])
        missing = sorted(self._parameters.required - filled - set(offered))
        if "environments" in missing:
            raise DataError(f"task {chunk[0].task.id!r}: {self.path} asks for environments, but {_NO_OBJECTS}")
        if "completion_ids" in missing:
            raise DataError(
                f"task {chunk[0].task.id!r}: {self.path} asks for completion_ids, but a response read from a file is "
                "text without token ids; give that parameter a default, or try the function in a run"
            )
        if missing:
            task = chunk[0].task
            columns = ", ".join(map(str, task.metadata)) or "none"
            raise DataError(
                f"task {task.id!r}: {self.path} asks for {', '.join(missing)}, which the task does not have; its "
                f"columns: {columns}. A column that `columns` maps is passed under the name of the field, such as "
                "`answer`, not under its own"
            )
        if self._parameters.others:
            return {name: value for name, value in offered.items() if name not in filled}
        return {name: offered[name] for name in self._parameters.names if name in offered and name not in filled}

    async def _awaited(self, begun: Sequence[tuple[PreparedCall, int, Any]]) -> list[Score]:
        settled = await asyncio.gather(*(_settled(result) for _, _, result in begun))
        pairs = zip(begun, settled, strict=True)
        return [score for (prepared, count, _), result in pairs for score in self._scores(prepared, count, result)]

    def _scores(self, prepared: PreparedCall, count: int, result: Any) -> list[Score]:
        if isinstance(result, DataError):
            raise result
        if isinstance(result, Exception):
            if count > 1 and not self.whole_groups:
                raise result  # the rollouts are then scored one by one
            return failed_together(described(result) + _form_of_answers(prepared, result), count)
        if self.key is None and self.none == "invalid":
            return prepared.read(result, count)
        listed = isinstance(result, list | tuple)
        values = list(result) if listed else [result]
        if self.key is not None:
            values = [_picked(each, self.key) for each in values]
        faults = {i: str(value) for i, value in enumerate(values) if isinstance(value, ValueFault)}
        if faults and not listed:
            return [Score.invalid(faults[0])] * count
        values = [
            0.0 if i in faults or (value is None and self.none == "zero") else value for i, value in enumerate(values)
        ]
        scores = prepared.read(values if listed else values[0], count)
        return [Score.invalid(faults[i]) if i in faults else score for i, score in enumerate(scores)]


def _picked(result: Any, key: str) -> Any:
    """Return the value under a key of a mapping, or a fault if there is none."""
    if isinstance(result, Mapping) and key in result:
        return result[key]
    given = (
        f"a mapping with {', '.join(map(str, result)) or 'nothing'}" if isinstance(result, Mapping) else repr(result)
    )
    return ValueFault(f"it returned {given:.200}; expected a mapping with {key!r}")


def _form_of_answers(prepared: PreparedCall, error: Exception) -> str:
    """Return advice if a function seems to have expected messages and got text, or the reverse; else nothing."""
    given = prepared.named.get("completion", next(iter(prepared.named.get("completions", ())), None))
    if isinstance(given, str) and re.match(r"string indices|'str' object has no attribute '(get|items)'", str(error)):
        return (
            "; it was given text, since the task's prompt is text: if it reads messages, as in "
            "completion[0]['content'], the tasks must have lists of messages as prompts"
        )
    if isinstance(given, list) and re.search(r"'list' object has no attribute|got '?list\b|not '?list\b", str(error)):
        return (
            "; it was given lists of messages, since the task's prompt is one: read completion[-1]['content'], or give "
            "the tasks prompts that are text"
        )
    return ""


async def _settled(result: Any) -> Any:
    """Await a result if it is awaitable; return it, or the exception that it raises."""
    try:
        return await result if inspect.isawaitable(result) else result
    except Exception as error:  # noqa: BLE001 - as above
        return error


_NO_OBJECTS = "the workflow has no tool class, or several: name one, workflow: {use: tools, tools: ['FILE.py:CLASS']}"


def _fault(option: str, text: str) -> OptionError:
    return OptionError("reward 'foreign'", [(option, text)])


_OF_BATCHES = {
    "compute_rewards": "a reward worker of ROLL",
    "run_single": "a reward manager of veRL",
    "judge_payload": "a judger of XTuner",
}
"""Method of a class that scores batches -> what the class is."""


def _instance(found: Any, arguments: Mapping[str, Any]) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """Return the callable, and the arguments that remain for each call."""
    if inspect.isclass(found):
        named = next((text for method, text in _OF_BATCHES.items() if hasattr(found, method)), None)
        if named is None and inspect.isfunction(found.__call__):
            arguments_of_call = inspect.signature(found.__call__).parameters
            named = _OF_BATCHES["run_single"] if {"data", "return_dict"} <= set(arguments_of_call) else None
        if named is not None:
            raise _fault(
                "path",
                f"names {named}, which scores that trainer's own batches; name the function that it calls for each "
                "response, or move that computation into one, such as compute_score(solution_str, ground_truth)",
            )
        try:
            found = found(**arguments)
        except Exception as error:  # the user's code
            raise _fault("arguments", f"{type(error).__name__}: {error}") from error
        arguments = {}
    if not callable(found) and callable(getattr(found, "score_answer", None)):  # a dataset of reasoning-gym
        found = found.score_answer
    if not callable(found):
        raise _fault(
            "path", f"names an object of type {type(found).__name__}; expected a function, a class or a callable object"
        )
    return found, arguments


def _for_one_call(rollout: Rollout) -> Rollout:
    """Return a rollout with a copy of its task's data, since a foreign function may modify it."""
    task = rollout.task
    own = attrs.evolve(task, answer=deepcopy(task.answer), metadata=deepcopy(dict(task.metadata)))
    return attrs.evolve(rollout, task=own)


def _recognise(parameters: Parameters, path: str) -> Convention:
    fitting = [convention for convention in CONVENTIONS.values() if convention.fits(parameters)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = " and ".join(c.name for c in fitting)
        raise _fault("style", f"{path} takes {parameters.text}, which is the signature of {names}; write one of them")
    known = "".join(f"\n      {c.name}: {c.call}" for c in CONVENTIONS.values())
    raise _fault(
        "style", f"{path} takes {parameters.text}, which is the signature of none of these; write one of them:{known}"
    )


def _check(parameters: Parameters, convention: Convention, extra: Mapping[str, Any], path: str) -> None:
    """Refuse options that the function can never be called with."""
    refused = sorted(set(extra) - set(parameters.names)) if not parameters.others else []
    if refused:
        raise _fault("arguments", f"{path} takes {parameters.text}; it has no {', '.join(refused)}")
    ours = set(parameters.names[: convention.positional]) | set(convention.offers) | set(extra)
    unknown = sorted(parameters.required - ours)
    if "trainer_state" in unknown:
        raise _fault("path", f"{path} asks for trainer_state, which only TRL's trainer has")
    if unknown and not convention.columns:
        raise _fault(
            "arguments",
            f"{path} asks for {', '.join(unknown)}, which {convention.name} does not pass ({convention.call}); give "
            "it here, or another style",
        )
    if len(parameters.names) < convention.positional:
        raise _fault("path", f"{path} takes {parameters.text}; {convention.name} calls {convention.call}")
