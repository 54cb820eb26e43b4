"""Question of a what-if: the original plan of a run, and the plan with another reward, algorithm or filters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml

from rlsdk.components import component_of
from rlsdk.config import Plan, check, read
from rlsdk.config.kept import other_plugins, require_trusted
from rlsdk.config.paths import resolve_paths
from rlsdk.config.tree import Tree, leaves, normalise, spelled_out
from rlsdk.errors import ArgumentError, ConfigError
from rlsdk.fields import FORWARD
from rlsdk.runlog.folder import why_no_run
from rlsdk.schedules import EntropyTarget
from rlsdk.scoring.scorer import RewardTerm
from rlsdk.yaml_values import load_value

REPLAYED = ("reward", "algorithm", "scoring", "max_invalid", "plugins", "old_logprobs")
"""Settings or sections whose effect stored rollouts can show."""
_UNUSED = ("trackers", "diagnoses", "mirror")
"""Settings that a what-if does not read, and whose components need not be installed."""
_STORED = ("logprobs", "entropy")
"""Fields computed by models that may be stored."""
_UNREAD_MODEL = "unread/model"
"""A name on the hub, which is never looked up."""
NO_FILTERS = "none"


@attrs.frozen
class Asked:
    """The changes requested by a user.

    Attributes:
        reward: Rewards as in a configuration: names or YAML mappings; if empty, the run's scores are kept.
        algorithm: Algorithm in either form; None for the run's own.
        filters: Filters in either form, or `none` for no filter; if empty, those of the algorithm.
        settings: `key=value` texts, applied last.
        plugins: Files of plugins.
        model: True if the weights of a checkpoint are available.
    """

    reward: tuple[str, ...] = ()
    algorithm: str | None = None
    filters: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    model: bool = False

    def overrides(self) -> list[str]:
        """Return all changes as overrides of a configuration.

        Raises:
            ConfigError: A value is not YAML.
        """
        given: list[tuple[str, str, Any]] = []
        faults: list[str] = []
        for option, texts in (("reward", self.reward), ("algorithm", (self.algorithm,)), ("filter", self.filters)):
            for text in filter(None, texts):
                try:
                    given.append((option, text, load_value(text)))
                except yaml.YAMLError as error:
                    faults.append(f"--{option}: {text!r} is not YAML: {' '.join(str(error).split())}")
        if faults:
            raise ConfigError(faults)
        rewards, filters = ([value for name, _, value in given if name == option] for option in ("reward", "filter"))
        # A single reward is not a list, so that the setting `reward.format_score=0` applies to it.
        found = [f"reward={json.dumps(rewards[0] if len(rewards) == 1 else rewards)}"] if rewards else []
        found += [f"algorithm={json.dumps(value)}" for name, _, value in given if name == "algorithm"]
        if filters:
            found.append(f"algorithm.filters={json.dumps([each for each in filters if each != NO_FILTERS])}")
        return [*found, *self.settings]

    @property
    def scores_again(self) -> bool:
        """True if a reward was named, even if it is the run's own."""
        return bool(self.reward) or any(text.lstrip("+ ").startswith("reward") for text in self.settings)


@attrs.frozen
class WhatIfQuestion:
    """A run as it was, and as it would have been with the changes.

    Attributes:
        before: Plan of the run.
        after: Plan with the changes.
        scores_again: True if the rollouts are scored again.
        changes: Path of a setting -> its values before and after; None if it is not set.
    """

    before: Plan
    after: Plan
    scores_again: bool
    changes: Mapping[str, tuple[Any, Any]]


def question(run: Path, asked: Asked) -> WhatIfQuestion:
    """Check a question about a run.

    Raises:
        ConfigError: Lists all faults: of the options, and of changes that stored rollouts cannot answer.
    """
    file = run / "config.yaml"
    if not file.is_file():
        raise ArgumentError([why_no_run(run, "config.yaml")])
    overrides = asked.overrides()
    kept = _kept(file, asked, overrides)
    before = check(kept, (), asked.plugins)
    changed, faults = read(kept, overrides)
    faults += [
        f"{path}: a what-if uses the stored rollouts, and cannot predict those of another {path}; it can change "
        f"{', '.join(REPLAYED[:-3])} and their options"
        for path in _changes(kept, changed)
        if path.partition(".")[0].partition("[")[0] not in REPLAYED
    ]
    try:
        after = check(kept, overrides, asked.plugins)
    except ConfigError as error:
        raise ConfigError(dict.fromkeys([*faults, *error.faults])) from error
    faults += missing_fields(before, after, model=asked.model)
    if asked.scores_again:
        faults += _unscorable(after)
    if faults:
        raise ConfigError(dict.fromkeys(faults))
    return WhatIfQuestion(before, after, asked.scores_again, _changes(kept, changed))


def _kept(file: Path, asked: Asked, overrides: Sequence[str]) -> Tree:
    """Read the run's configuration, unless it names code that is not on the command line."""
    tree, _ = read(file)
    tree = normalise({key: value for key, value in tree.items() if key not in _UNUSED})
    named, _ = read({}, overrides)
    advice = "the run's configuration names code that would be executed; read it, then pass its files with --plugin"
    require_trusted(file, tree, asked.plugins, named, advice)
    tree["plugins"] = other_plugins(tree, asked.plugins)
    rewards = tree.get("reward") or []
    if len(rewards) == 1:  # so that `reward.format_score=0` applies to the only one
        tree["reward"] = rewards[0]
    tree = resolve_paths(tree, file)
    if not asked.model:  # nothing reads it, so it may have been deleted, or not moved along with the run
        tree["model"] = {**tree["model"], "path": _UNREAD_MODEL}
    return tree


def _changes(before: Tree, after: Tree) -> dict[str, tuple[Any, Any]]:
    old, new = dict(leaves(spelled_out(before))), dict(leaves(spelled_out(after)))
    paths = sorted(old.keys() | new.keys())
    return {path: (old.get(path), new.get(path)) for path in paths if old.get(path) != new.get(path)}


def missing_fields(before: Plan, after: Plan, *, model: bool) -> list[str]:
    """Report parts of the changed plan that read data that is not stored.

    With a checkpoint's weights (`model`), the objectives of both plans are computed, too.
    """
    if after.algorithm.rollouts == "demonstrations":
        return ["algorithm: it learns from demonstrations, which rewards and filters of stored rollouts do not affect"]
    faults = credit_faults(after, model=model)
    if model:
        for which, plan in (("the run's own", before), ("the other", after)):
            if plan.algorithm.critic and "values" in plan.needs:
                faults.append(
                    f"--checkpoint: {which} objective reads the values of a critic, which exports do not contain"
                )
            if plan.needs_reference and plan.config.reference.update_every:
                faults.append(
                    f"--checkpoint: {which} objective reads a reference model that followed the policy "
                    "(reference.update_every), which exports do not contain"
                )
            if isinstance(plan.loss.entropy_coef, EntropyTarget):
                faults.append(
                    f"--checkpoint: {which} objective has an entropy bonus whose weight depends on all optimiser steps "
                    "so far (algorithm.entropy_coef.target); give a number as algorithm.entropy_coef"
                )
    return faults


def credit_faults(plan: Plan, *, model: bool) -> list[str]:
    """Report shapings or advantages of a plan that read data that is not stored."""
    parts = [(f"algorithm.shaping[{i}]", each) for i, each in enumerate(plan.shaping)]
    faults = []
    for path, reference in [*parts, ("algorithm.advantage", plan.advantage)]:
        component = plan.plugins.component(reference)
        instead = "another algorithm.advantage" if path == "algorithm.advantage" else "algorithm.shaping=[]"
        for name in component.needs:
            why = _why_missing(name, model, instead)
            if why:
                faults.append(f"{path}: {component.name!r} reads {name}, {why}")
    return faults


def _why_missing(name: str, model: bool, instead: str) -> str:
    """Return why a field is not available, and what to give instead; empty if it is."""
    if name == "baseline_rewards":
        return "the rewards of greedy answers, which a run does not store; use an advantage without them, such as rloo"
    if name == "values":
        return "the values of a critic, which a run does not store; use an advantage without a critic, such as grpo"
    if name in FORWARD and name not in _STORED and not model:
        return f"which a run does not store; use --checkpoint to compute it on the CPU, or give {instead}"
    return ""


def _unscorable(plan: Plan) -> list[str]:
    faults = []
    for i, each in enumerate(plan.rewards):
        path = "reward" if len(plan.rewards) == 1 else f"reward[{i}]"
        reward = plan.plugins.resolve(each.reference)
        if RewardTerm(each.rule, reward, each.reference).where == "actor":
            mark = component_of(reward)
            name = mark.name if mark else each.rule.name
            faults.append(f"{path}: {name!r} holds a model in a Ray actor, and a what-if does not start Ray; remove it")
    return faults if plan.rewards else ["reward: expected at least one reward"]
