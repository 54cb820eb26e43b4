"""Rewards of TRL: functions of a script, those that TRL ships, and reward models."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlsdk.contracts.tasks import STATISTICS
from rlsdk.migration.python_values import KIND
from rlsdk.migration.rules import NOTES, Given, KeyOutcome
from rlsdk.migration.shared.tasks import likely_reward
from rlsdk.migration.trl.trainers import own_shaping
from rlsdk.migration.values import numbers, texts

REWARDS: Mapping[str, Mapping[str, Any]] = {
    "accuracy_reward": {"use": "math"},
    "reasoning_accuracy_reward": {"use": "math"},
    "think_format_reward": {"use": "format", "pattern": r"(?s)^<think>(?!.*<think>)(.*?)</think>.*$"},
}
"""Reward functions that TRL ships -> what is nearest here."""
PUNISHMENT = "get_soft_overlong_punishment"
"""Function of TRL that makes a reward from limits, which is a shaping here."""
COSINE = "get_cosine_scaled_reward"
"""Function of TRL that makes a reward of math answers that depends on their length: `math` with a shaping here."""
REPETITION = "get_repetition_penalty_reward"
"""Function of TRL that makes a penalty on repetitions, which is a reward here, too."""


def rewards_of(given: Given, name: Any) -> dict[str, Any]:
    """Return the rewards, and the shapings that some of them become.

    Args:
        given: Values of the configuration.
        name: Name of the data set, from which a reward is guessed if there is none.
    """
    weights, functions = given.read("reward_weights", numbers, []), given.read("reward_funcs", called, [])
    aligned: list[float | None] = list(weights) if len(weights) == len(functions) else [None] * len(functions)
    found: dict[str, Any] = {}
    rewards: list[dict[str, Any]] = []
    for function, weight in zip(functions, aligned, strict=True):
        weighted = {} if weight is None or len(functions) == 1 else {"weight": weight}
        if _shipped(function) == PUNISHMENT:
            punished = _punished(_overlong(function, weight), given)
            penalty = _penalty(punished) if normalises_parts(given) else None
            rewards += [{**penalty, **weighted}] if penalty else []
            found |= {} if penalty else punished
        elif _shipped(function) == COSINE:
            if len(functions) == 1:
                rewards.append(dict(REWARDS["accuracy_reward"]))
                found["algorithm.shaping"] = [_cosine(function)]
        elif (reward := _reward_of(function)) is not None:
            rewards.append({**reward, **weighted})
    if path := given.get("reward_model_name_or_path"):
        model = {"use": "reward_model", "path": str(path)}
        rewards = [model, *(each for each in rewards if each != model)]  # a script may load it as a reward function
    if "algorithm.shaping" in found:
        found["algorithm.shaping"] += own_shaping(given)
    if len(rewards) > 1:
        rewards = _among_others(rewards)
    if not functions and not rewards and "reward_funcs" not in given.flat:
        return likely_reward(name)
    return found | ({"reward": rewards[0] if len(rewards) == 1 else rewards} if rewards else {})


def _among_others(rewards: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give functions of a script their names in metrics; where one returns None, the others count."""
    functions = [reward["path"].rpartition(":")[2] if reward["use"] == "foreign" else "" for reward in rewards]
    taken = Counter([*functions, *(reward["use"] for reward in rewards), *STATISTICS])
    named = [{"metric": name} if taken[name] == 1 else {} for name in functions]
    return [
        {**reward, "none": "zero", **name} if reward["use"] == "foreign" else {**reward}
        for reward, name in zip(rewards, named, strict=True)
    ]


def normalises_parts(given: Given) -> bool:
    """True if several rewards are normalised before they are added; with a single one, nothing is added."""
    chosen = str(given.get("multi_objective_aggregation")) == "normalize_then_sum"
    return chosen and len(given.read("reward_funcs", called, [])) > 1


def called(value: Any) -> list[Any]:
    """Read the names of functions; one that is made by a call is a mapping with the arguments of the call."""
    if isinstance(value, Mapping) and KIND in value:
        return [value]
    if not isinstance(value, list | tuple):
        return texts(value)
    return [each if isinstance(each, Mapping) and KIND in each else texts([each])[0] for each in value if each != ""]


def _shipped(function: Any) -> str:
    """Return the bare name of a function that TRL ships, any other as it is."""
    name = str(function[KIND]) if isinstance(function, Mapping) else str(function)
    return name.rpartition(":")[2] if re.match(r"trl[.:]", name) else name


def _reward_of(function: Any) -> dict[str, Any] | None:
    """Return the reward that a function, or a call that makes one, is here; None if nothing tells which."""
    if isinstance(function, Mapping) and function[KIND] == "from_pretrained":
        path = _arguments(function, "pretrained_model_name_or_path").get("pretrained_model_name_or_path")
        return {"use": "reward_model", "path": path} if isinstance(path, str) else None
    if _shipped(function) != REPETITION:
        return _reward(_shipped(function))
    given = _arguments(function, "ngram_size", "max_penalty")
    options = {"ngram": given.get("ngram_size"), "penalty": given.get("max_penalty")}
    penalty = options["penalty"]
    if isinstance(penalty, int | float):
        options["penalty"] = -penalty
    known = {name: value for name, value in options.items() if value is not None}
    return {"use": "repetition_penalty", "unit": "tokens", **known}


def _reward(function: str) -> dict[str, Any] | None:
    """Return the reward that a function of a script is here; None if nothing tells which."""
    if function in REWARDS:
        return dict(REWARDS[function])
    if "/" in function and ".py:" not in function:
        return {"use": "reward_model", "path": function}
    if not re.search("[.:]", function):
        return None
    module, _, attribute = function.rpartition(":" if ":" in function else ".")
    return {"use": "foreign", "path": f"{module}:{attribute}", "style": "trl"}


def _arguments(function: Any, *names: str) -> dict[str, Any]:
    """Return the arguments of a call by their names, in the order in which the function takes them."""
    given = function if isinstance(function, Mapping) else {}
    found = {name: given.get(name, given.get(f"argument_{i}")) for i, name in enumerate(names, 1)}
    return {name: value for name, value in found.items() if value is not None}


def _cosine(function: Any) -> dict[str, Any]:
    """Return the shaping that TRL's cosine reward is here, on rewards of 0 and 1."""
    here = {
        "max_len": "max_length",
        "min_value_wrong": "wrong_short",
        "max_value_wrong": "wrong_long",
        "min_value_correct": "right_long",
        "max_value_correct": "right_short",
    }
    return {"use": "cosine_length", **{here[name]: value for name, value in _arguments(function, *here).items()}}


def _overlong(function: Any, weight: float | None) -> dict[str, Any]:
    """Return the shaping that TRL's punishment of long answers is here; both are DAPO's, equation 13."""
    arguments = function if isinstance(function, Mapping) else {"argument_1": 1280, "argument_2": 256}  # of `trl grpo`
    limit = arguments.get("max_completion_len", arguments.get("argument_1"))
    buffer = arguments.get("soft_punish_cache", arguments.get("argument_2"))
    given = {"max_length": limit, "buffer": buffer, "penalty": weight}
    return {"use": "overlong", **{name: value for name, value in given.items() if value is not None}}


def _punished(penalty: Mapping[str, Any], given: Given) -> dict[str, Any]:
    """Return the setting of a penalty, or a note on one that begins above the longest answer."""
    limit, buffer = penalty.get("max_length"), penalty.get("buffer")
    longest = given.whole("max_completion_length", 512)
    if isinstance(limit, int) and isinstance(buffer, int) and limit - buffer >= longest:
        note = f"{PUNISHMENT} begins above {limit - buffer} tokens, and no answer has more than {longest}: left out"
        return {NOTES: (f"reward: {note}",)}
    return {"algorithm.shaping": [penalty]}


def _penalty(punished: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the reward that the punishment is, for rewards that are normalised one by one; None if it is left out."""
    (shaping,) = punished.get("algorithm.shaping", [{}])
    limit, buffer = shaping.get("max_length"), shaping.get("buffer")
    if not isinstance(limit, int) or not isinstance(buffer, int):
        return None
    return {"use": "length_penalty", "free": limit - buffer, "limit": limit}


def convert_functions(value: Any, given: Given) -> KeyOutcome:
    """Report the reward functions, which `rewards_of` converts."""
    functions = [_shipped(each) for each in called(value)]
    made = (PUNISHMENT, COSINE, REPETITION)
    unknown = [each for each in called(value) if _shipped(each) not in made and _reward_of(each) is None]
    if lost := [_shipped(each) for each in unknown]:
        return KeyOutcome.missing(f"reward: {{use: foreign, path: 'FILE.py:{lost[0]}', style: trl}}")
    if COSINE in functions and len(functions) > 1:
        note = f"FILE.py with reward = {COSINE}(…), and reward: {{use: foreign, path: 'FILE.py:reward', style: trl}}"
        return KeyOutcome.missing(note)
    note = "built-in rewards, or the function unchanged (howto/foreign_reward.md)"
    if PUNISHMENT in functions:
        note += f"; {PUNISHMENT} becomes " + ("length_penalty" if normalises_parts(given) else "a shaping")
    if COSINE in functions:
        note += f"; {COSINE} becomes math with the shaping cosine_length"
    return KeyOutcome({}, note)


def convert_aggregation(value: str, given: Given) -> KeyOutcome:
    """Report how several rewards are added."""
    if value == "sum_then_normalize":
        return KeyOutcome.ignored("the parts of a reward are summed, then normalised")
    if not normalises_parts(given):
        return KeyOutcome({}, "a single reward is normalised as usual")
    return KeyOutcome({}, "advantage gdpo; where a function returns None, its part counts as 0")
