"""Calling conventions for rewards of other trainers, as a table of adapters.

An adapter defines the signatures that identify its convention, the arguments that the trainer would pass for given
rollouts, and how the result is read. `rlsdk.rewards.foreign` uses them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import attrs

from rlsdk.rewards import results
from rlsdk.rewards.countdown import last_answer
from rlsdk.rewards.results import Log
from rlsdk.tool_calls import TOOL_STATE
from rlsdk.types import Message, Rollout, Score

Reader = Callable[[Any, int], list[Score]]
"""From (result, number of rollouts) to a score for each."""


@attrs.frozen
class Parameters:
    """Parameters that a callable accepts.

    Attributes:
        names: Names of all named parameters.
        required: Names of the parameters without a default.
        others: True if it takes arbitrary further keywords.
        marks: Names of the classes that it is an instance of.
        text: Human-readable signature.
    """

    names: tuple[str, ...]
    required: frozenset[str]
    others: bool
    marks: frozenset[str]
    text: str

    @classmethod
    def of(cls, call: Callable[..., Any]) -> Parameters:
        """Read a callable's parameters; raises `ValueError` or `TypeError` if it has no signature."""
        signature = inspect.signature(call)
        given = signature.parameters.values()
        named = [p for p in given if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        return cls(
            names=tuple(p.name for p in named),
            required=frozenset(p.name for p in named if p.default is p.empty),
            others=any(p.kind is p.VAR_KEYWORD for p in given),
            marks=frozenset(base.__name__ for base in type(call).__mro__),
            text=f"({', '.join(str(p).partition(':')[0].partition('=')[0].strip() for p in given)})",
        )

    def has(self, *names: str) -> bool:
        """Return True if all these names are parameters."""
        return set(names) <= set(self.names)

    def names_any(self, *names: str) -> bool:
        """Return True if any of these names is a parameter."""
        return not set(names).isdisjoint(self.names)


@attrs.frozen
class PreparedCall:
    """A prepared call: named arguments, positional arguments, and how to read the result."""

    named: Mapping[str, Any]
    read: Reader
    positional: tuple[Any, ...] = ()


@attrs.frozen
class Convention:
    """A trainer's calling convention for rewards.

    Attributes:
        name: Value of `style:` that selects it.
        call: Call as written in the trainer's documentation.
        fits: Returns True for signatures of this convention.
        prepare: Builds a call from rollouts.
        offers: Argument names that the trainer passes.
        batch: Pass many rollouts in one call; otherwise one.
        columns: Also pass columns of the data by name.
        positional: Number of leading arguments passed by position, whatever their names.
    """

    name: str
    call: str
    fits: Callable[[Parameters], bool]
    prepare: Callable[[Sequence[Rollout]], PreparedCall]
    offers: tuple[str, ...]
    batch: bool = False
    columns: bool = False
    positional: int = 0


def _messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.text} for m in messages]


def prompt_of(rollout: Rollout) -> str | list[dict[str, str]]:
    """Return the prompt: text, or a list of messages if the task has messages."""
    prompt = rollout.task.prompt
    return prompt if isinstance(prompt, str) else _messages(prompt)


def completion_of(rollout: Rollout) -> str | list[dict[str, str]]:
    """Return all messages from the policy's first on, in the prompt's form (text or list), including a prefill."""
    if isinstance(rollout.task.prompt, str):
        return rollout.response
    return _messages(_answered(rollout))


def _answered(rollout: Rollout) -> Sequence[Message]:
    """Return all messages from the policy's first on."""
    by_policy = [m.role == "assistant" and not m.prompt for m in rollout.messages]
    return rollout.messages[by_policy.index(True) :] if any(by_policy) else ()


def _text_of(prompt: str | list[dict[str, str]]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def _token_ids(rollout: Rollout) -> list[int]:
    start, end = rollout.span
    return [int(token) for token in rollout.token_ids[start:end]]


def _column(rollout: Rollout, name: str) -> Any:
    """Return a column of the data, or the task's field that was read from a column of that name."""
    task = rollout.task
    fields = {"answer": task.answer, "ground_truth": task.answer, "solution": task.answer, "data_source": task.source}
    return task.metadata.get(name, fields.get(name))


def _trl(rollouts: Sequence[Rollout]) -> PreparedCall:
    log = Log(len(rollouts))
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.task.metadata)
    if any(rollout.task.answer is not None for rollout in rollouts):
        names |= dict.fromkeys(("answer", "ground_truth", "solution"))
    named: dict[str, Any] = {
        **{name: [_column(rollout, name) for rollout in rollouts] for name in [*names, "data_source"]},
        "prompts": [prompt_of(rollout) for rollout in rollouts],
        "completions": [completion_of(rollout) for rollout in rollouts],
        "log_extra": log.extra,
        "log_metric": log.metric,
    }
    if all(rollout.loss_mask.any() for rollout in rollouts):  # rollouts scored offline have no tokens
        named["completion_ids"] = [_token_ids(rollout) for rollout in rollouts]
    states = [rollout.task.metadata.get(TOOL_STATE, {}) for rollout in rollouts]
    if all(len(state) == 1 for state in states):
        named["environments"] = [ToolState(*item) for state in states for item in state.items()]
    return PreparedCall(named, partial(results.per_rollout, log=log))


class ToolState:
    """Stand-in for the object of a tool class that functions of TRL get in `environments`: its public attributes."""

    def __init__(self, name: str, attributes: Mapping[str, Any]) -> None:
        """Copy the attributes that an object of this tool class had at the end of the rollout."""
        self.__dict__.update(deepcopy(dict(attributes)))
        self.__dict__["_class_name"] = name

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(key for key in self.__dict__ if key != "_class_name") or "none"
        raise AttributeError(
            f"the rollout keeps only the public attributes of {self.__dict__.get('_class_name')} that JSON can express "
            f"({known}), not {name!r}; set such an attribute, or compute the reward in a method get_reward"
        )


def _extra_info(rollout: Rollout) -> dict[str, Any]:
    """Return the column `extra_info`, or all metadata without one, and what veRL adds to it."""
    extra = rollout.task.metadata.get("extra_info")
    found = dict(extra) if isinstance(extra, Mapping) else dict(rollout.task.metadata)
    return {**found, "num_turns": _turns(rollout), "rollout_reward_scores": {}}


def _turns(rollout: Rollout) -> int:
    """Count turns as veRL's agent loop does: the prompt, each answer, and all tool results between two answers."""
    by_policy = [message.role == "assistant" for message in _answered(rollout)]
    return 1 + sum(own or before for own, before in zip(by_policy, [True, *by_policy], strict=False))


def _verl(rollouts: Sequence[Rollout]) -> PreparedCall:
    (rollout,) = rollouts
    named = {
        "data_source": rollout.task.source,
        "solution_str": rollout.response,
        "ground_truth": rollout.task.answer,
        "extra_info": _extra_info(rollout),
    }
    return PreparedCall(named, results.one(results.scored))


def _verl_batch(rollouts: Sequence[Rollout]) -> PreparedCall:
    named = {
        "data_sources": [rollout.task.source for rollout in rollouts],
        "solution_strs": [rollout.response for rollout in rollouts],
        "ground_truths": [rollout.task.answer for rollout in rollouts],
        "extra_infos": [_extra_info(rollout) for rollout in rollouts],
    }
    return PreparedCall(named, results.per_rollout)


def _openrlhf(rollouts: Sequence[Rollout]) -> PreparedCall:
    (rollout,) = rollouts
    prompt = _text_of(prompt_of(rollout))
    by_position = ([prompt + _continuation(rollout)], [prompt], [rollout.task.answer])
    return PreparedCall({}, results.openrlhf, by_position)


def _continuation(rollout: Rollout) -> str:
    """Return the response without its prefill, which is already in the prompt's text."""
    prompt = rollout.task.prompt
    if isinstance(prompt, str):
        return rollout.response
    prefill = prompt[-1].text if prompt and prompt[-1].role == "assistant" else ""
    begun = bool(prefill) and rollout.response.startswith(prefill)
    return rollout.response[len(prefill) :] if begun else "\n" + rollout.response


def _verifiers(rollouts: Sequence[Rollout]) -> PreparedCall:
    (rollout,) = rollouts
    task = rollout.task
    info = task.metadata.get("info")
    common = {
        "prompt": prompt_of(rollout),
        "completion": completion_of(rollout),
        "answer": "" if task.answer is None else task.answer,
        "task": task.source or "default",
        "info": dict(info) if isinstance(info, Mapping) else dict(task.metadata),
    }
    state = {**common, "turn": len(rollout.answers), "timing": {}}
    return PreparedCall({**common, "state": state, "parser": Parser()}, results.one(results.number))


class Parser:
    """Stand-in for the default parser that verifiers passes to functions with a parameter `parser`."""

    def parse(self, text: str) -> str:
        """Return the text unchanged."""
        return text

    def parse_answer(self, completion: str | Sequence[Mapping[str, str]]) -> str | None:
        """Return the last assistant message; None if there is none."""
        if isinstance(completion, str):
            return self.parse(completion)
        answers = [message["content"] for message in completion if message["role"] == "assistant"]
        return self.parse(answers[-1]) if answers else None


def _reasoning_gym(rollouts: Sequence[Rollout]) -> PreparedCall:
    (rollout,) = rollouts
    task = rollout.task
    metadata = task.metadata.get("metadata")
    entry = {
        "question": _text_of(prompt_of(rollout)),
        "answer": task.answer,
        "metadata": dict(metadata) if isinstance(metadata, Mapping) else dict(task.metadata),
    }
    return PreparedCall({}, results.one(results.number), (last_answer(rollout.response), entry))


def _trinity(rollouts: Sequence[Rollout]) -> PreparedCall:
    (rollout,) = rollouts
    named: dict[str, Any] = {
        "response": rollout.response,
        "prompt": _text_of(prompt_of(rollout)),
        "truth": rollout.task.answer,
    }
    if rollout.loss_mask.any():
        named["response_token"] = _token_ids(rollout)
    return PreparedCall(named, results.one(results.summed))


def _xtuner(rollouts: Sequence[Rollout]) -> PreparedCall:
    (rollout,) = rollouts
    named = {"response": rollout.response, "label": rollout.task.answer, "extra_info": {}}
    return PreparedCall(named, results.one(results.scored))


def _is_trl(p: Parameters) -> bool:
    elsewhere = ("prompt", "completion", "queries", "states", "infos", "tasks")
    return p.names_any("completions", "completion_ids", "environments") and not p.names_any(*elsewhere)


CONVENTIONS: dict[str, Convention] = {
    convention.name: convention
    for convention in (
        Convention(
            "trl",
            "f(prompts, completions, completion_ids, environments, COLUMN, …, log_extra, log_metric, **kwargs) -> list",
            _is_trl,
            _trl,
            ("prompts", "completions", "completion_ids", "environments", "log_extra", "log_metric"),
            batch=True,
            columns=True,
        ),
        Convention(
            "verl",
            "compute_score(data_source, solution_str, ground_truth, extra_info) -> number or {'score': …}",
            lambda p: p.has("solution_str"),
            _verl,
            ("data_source", "solution_str", "ground_truth", "extra_info"),
        ),
        Convention(
            "verl_batch",
            "compute_score(data_sources, solution_strs, ground_truths, extra_infos) -> list",
            lambda p: p.has("solution_strs"),
            _verl_batch,
            ("data_sources", "solution_strs", "ground_truths", "extra_infos"),
            batch=True,
        ),
        Convention(
            "openrlhf",
            "reward_func(queries, prompts, labels) -> {'rewards', 'scores', 'extra_logs'}",
            lambda p: p.has("queries", "labels"),
            _openrlhf,
            ("queries", "prompts", "labels"),
            positional=3,
        ),
        Convention(
            "verifiers",
            "f(any of prompt, completion, answer, state, task, info, parser) -> number",
            lambda p: p.names_any("completion", "state", "parser") and not p.has("entry"),
            _verifiers,
            ("prompt", "completion", "answer", "state", "task", "info", "parser"),
        ),
        Convention(
            "reasoning_gym",
            "score_answer(answer, entry) -> number",
            lambda p: p.has("answer", "entry"),
            _reasoning_gym,
            ("answer", "entry"),
            positional=2,
        ),
        Convention(
            "trinity",
            "RewardFn.__call__(response, prompt, truth) -> {name: number}, their sum",
            lambda p: "RewardFn" in p.marks or p.has("response", "truth"),
            _trinity,
            ("response", "prompt", "truth", "response_token"),
        ),
        Convention(
            "xtuner",
            "compute_reward(response, label, extra_info) -> number or {'score': …}",
            lambda p: p.has("response", "label"),
            _xtuner,
            ("response", "label", "extra_info"),
        ),
    )
}
"""Name -> convention."""
