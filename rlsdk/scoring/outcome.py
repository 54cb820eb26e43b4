"""Convert results of rewards to scores, combine several, and limit the share of rollouts without one."""

from __future__ import annotations

import dis
import inspect
import math
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from types import CodeType
from typing import Any

from rlsdk.components import component_of
from rlsdk.contracts import RewardSpec, batch_of
from rlsdk.errors import DataError, ScoringError, ValueFault, described
from rlsdk.plurals import counted
from rlsdk.types import REWARD_LIMIT, Group, Rollout, Score, is_reward

_SEED = re.compile(r"(environment '[^']*') \(seed -?\d+\)")
_CAUSES = 3
"""Maximum reasons listed in a message."""
_ROUNDING = 1e-4
"""Difference of a score's value from the sum of its token rewards, as a share of these, that counts as rounding."""
Scored = tuple[RewardSpec, Score | None]
"""A part and its score; None if a gate excluded it from scoring."""


def as_score(result: Any) -> Score:
    """Convert a reward's result to a score, invalid if it is not a number or its token rewards have another sum.

    Args:
        result: A `Score` or a number, including NumPy scalars and tensors of one element.
    """
    if isinstance(result, Score):
        if negative := [position for position, _ in result.token_rewards or () if position < 0]:
            return Score.invalid(f"its token_rewards have position {negative[0]}; the prompt's first token is 0")
        given = [value for _, value in result.token_rewards or ()]
        off = abs(math.fsum(given) - result.value)
        if not result.valid or result.token_rewards is None or off <= _ROUNDING * math.fsum(map(abs, given)):
            return result
        return Score.invalid(f"its token_rewards add up to {math.fsum(given):g}; expected its value, {result.value:g}")
    try:
        return Score(_number(result))
    except ValueFault as error:
        return Score.invalid(str(error))
    except Exception:  # noqa: BLE001 - a tensor of several elements, or whatever an object's `__float__` raises
        return Score.invalid(f"it returned {reprlib.repr(result)}; expected a float or Score")


def as_scores(result: Any, count: int) -> list[Score]:
    """Convert the result of a reward that takes lists to scores; if it has not `count` elements, all are invalid."""
    listed = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(listed, Collection) or isinstance(listed, str | bytes | Mapping | Set):
        wrong = f"it returned {reprlib.repr(result)}; expected a list of {count} scores"
    elif len(listed) != count:
        wrong = f"it returned {counted(len(listed), 'score')} for {counted(count, 'rollout')}; expected one for each"
    else:
        return [as_score(each) for each in listed]
    return [Score.invalid(wrong)] * count


def scores_of(reward: Callable[..., Any], rollouts: Sequence[Rollout]) -> list[Score]:
    """Call a sync reward by its convention; scores of calls that raise are invalid, with the reason.

    Raises:
        DataError: A task cannot be scored.
    """
    batch = batch_of(reward)
    if batch or len(rollouts) == 1:
        try:
            return as_scores(reward(rollouts), len(rollouts)) if batch else [as_score(reward(rollouts[0]))]
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's code: what it raises is the score's reason
            if batch == "group" or len(rollouts) == 1:
                return [Score.invalid(described(error))] * len(rollouts)
    return [score for rollout in rollouts for score in scores_of(reward, [rollout])]


def _number(result: Any) -> float:
    if isinstance(result, str | bytes):
        raise TypeError
    return float(result.item() if hasattr(result, "item") else result)


def imported_within(reward: Any) -> list[str]:
    """Return the packages beyond the standard library that a reward imports when it is called.

    Packages declared in `imports` of its mark are excluded: a pool imports them beforehand.
    """
    component = component_of(reward)
    if component is None:
        return []
    call = component.obj.__call__ if inspect.isclass(component.obj) else component.obj
    code = getattr(inspect.unwrap(call), "__code__", None)
    found = {name.partition(".")[0] for name in _imports(code)} if code else set()
    return sorted(found - {name.partition(".")[0] for name in component.imports} - sys.stdlib_module_names)


def _imports(code: CodeType) -> Iterator[str]:
    yield from (str(i.argval) for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME" and i.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _imports(constant)


def combine(parts: Sequence[Scored], *, last_token: int | None = None) -> Score:
    """Combine the scores of a rollout: the weighted sum of the summands, times the factors.

    A sum without summands is 1, so that factors alone form a product. The metrics are `reward/NAME`, the value of each
    part before range and weight, and the parts' own; a metric that several parts report becomes `NAME/METRIC` for each.

    Args:
        parts: Scored parts, in order.
        last_token: Position of the last sampled token; required if some parts reward single tokens and others the whole
            rollout, whose values are placed there.

    Returns:
        The score, with the answer of the first part that has one; invalid if any part is, with the names and reasons of
        invalid parts.

    Raises:
        ValueFault: There are no parts, or `last_token` is needed and missing.
    """
    if not parts:
        raise ValueFault("there is no score to combine; expected at least one")
    failed = [_because(rule.name, score) for rule, score in parts if score is not None and not score.valid]
    if failed:
        return Score.invalid("; ".join(failed))
    summands = [(rule, score) for rule, score in parts if not rule.multiply]
    factor = math.prod(_value(rule, score) for rule, score in parts if rule.multiply)
    total = sum(rule.weight * _value(rule, score) for rule, score in summands) if summands else 1.0
    value = factor * total
    if not is_reward(value):
        return Score.invalid(f"the parts combine to {value:g}, beyond ±{REWARD_LIMIT:g}")
    low = [(rule.name, score) for rule, score in parts if score is not None and score.reason]
    return Score(
        value,
        metrics=_metrics(parts),
        reason="; ".join(score.reason if len(parts) == 1 else _because(name, score) for name, score in low),
        token_rewards=_token_rewards(summands, factor, last_token),
        answer=next((score.answer for _, score in parts if score is not None and score.answer), ""),
    )


def rewards_tokens(parts: Sequence[Scored]) -> bool:
    """Return True if any part rewards single tokens."""
    return any(score is not None and score.token_rewards is not None for _, score in parts)


def _value(rule: RewardSpec, score: Score | None) -> float:
    return 0.0 if score is None else rule.mapped(score.value)


def _because(name: str, score: Score) -> str:
    return score.reason if score.reason.startswith(f"{name}:") else f"{name}: {score.reason or 'no reason given'}"


def _metrics(parts: Sequence[Scored]) -> dict[str, float]:
    reported = Counter(metric for _, score in parts if score is not None for metric in score.metrics)
    reported.update(f"reward/{rule.name}" for rule, _ in parts)
    metrics: dict[str, float] = {}
    for rule, score in parts:
        metrics[f"reward/{rule.name}"] = 0.0 if score is None else score.value
        for metric, value in (score.metrics if score is not None else {}).items():
            metrics[metric if reported[metric] == 1 else f"{rule.name}/{metric}"] = value
    return metrics


def _token_rewards(
    summands: Sequence[Scored], factor: float, last_token: int | None
) -> tuple[tuple[int, float], ...] | None:
    """Return the sum of all parts' token rewards by position; None if no part has any."""
    if not rewards_tokens(summands):
        return None
    total: dict[int, float] = {}
    for rule, score in summands:
        pairs = score.token_rewards if score is not None and rule.range is None else None
        if pairs is None:
            if last_token is None:
                raise ValueFault(
                    f"{rule.name!r} rewards the whole rollout, another part single tokens: last_token is needed"
                )
            pairs = ((last_token, _value(rule, score)),)
        for position, value in pairs:
            total[position] = total.get(position, 0.0) + factor * rule.weight * value
    return tuple(sorted(total.items()))


def unscored(group: Group) -> list[str]:
    """Return why trajectories of a group could not be scored: one reason per invalid score.

    The reasons name neither the group's task nor the seed of its environment, so that those of several groups can be
    counted together.
    """
    scores = ([group.scores[i] for i in trajectory] for trajectory in group.trajectories)
    reasons = (next((score.reason for score in each if not score.valid), None) for each in scores)
    found = [reason.replace(f"task {group.task.id!r}: ", "") for reason in reasons if reason is not None]
    return [_SEED.sub(r"\1", reason) for reason in found]


def check_budget(groups: Sequence[Group], limit: float, when: int | str) -> int:
    """Return the number of unscored trajectories, unless their share exceeds `limit`.

    Raises:
        ScoringError: The share exceeds `limit`; the message names the step or evaluation, tasks and causes.
    """
    invalid = [(group.task, reason) for group in groups for reason in unscored(group)]
    count = sum(len(group.trajectories) for group in groups)
    if len(invalid) <= limit * count:
        return len(invalid)
    tasks: dict[str, list[str]] = {}
    for task, reason in invalid:
        tasks.setdefault(reason, []).append(repr(task.id))
    # Each reason once, with the first task where it occurred; the most frequent reasons first.
    causes = []
    for reason, ids in sorted(tasks.items(), key=lambda each: -len(each[1]))[:_CAUSES]:
        more = len(set(ids)) - 1
        causes.append(f"task {ids[0]}{f' and {more} more' if more else ''}: {reason}")
    share = f"{len(invalid)} of {count} trajectories could not be scored"
    at = f"step {when}" if isinstance(when, int) else when
    raise ScoringError(f"{at}: {share}, more than max_invalid={limit:g} allows. {'; '.join(causes)}")
