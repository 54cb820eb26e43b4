"""All configuration keys with type, default, unit and description, read from the schema and from components."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

import attrs

from rlsdk.components import Component, Use
from rlsdk.config import defaults
from rlsdk.config.rules import LEAST
from rlsdk.config.schema import COMPONENT_KEYS, LISTS, Config
from rlsdk.config.section import RULE_KEYS, RewardUse, SourceUse
from rlsdk.contracts import RewardSpec
from rlsdk.kinds import COMBINED, PART_LISTS, PARTS, Kind
from rlsdk.limits import Limit
from rlsdk.options import MISSING, Option, options_of, type_name

UNITS: Mapping[str, str] = {
    "model.max_length": "tokens",
    "tasks.train.weight": "share, relative",
    "tasks.eval.weight": "share, relative",
    "max_prompt_tokens": "tokens",
    "environments.workers": "processes",
    "environments.per_worker": "environments",
    "environments.threads": "threads",
    "reward.weight": "factor",
    "reward.gate": "reward",
    "reward.range": "reward",
    "scoring.workers": "processes",
    "scoring.timeout": "seconds",
    "scoring.memory": "MiB",
    "max_invalid": "share of rollouts",
    "max_empty_steps": "steps",
    "sampling.temperature": "factor",
    "sampling.top_p": "share of probability",
    "sampling.top_k": "tokens",
    "sampling.max_tokens": "tokens",
    "rollout.max_staleness": "weight syncs",
    "rollout.sync_interval": "steps",
    "rollout.oversample": "share of a batch",
    "rollout.replay.share": "share of a batch",
    "rollout.replay.most_uses": "times",
    "rollout.max_token_staleness": "weight syncs",
    "rollout.tail_batch": "groups",
    "rollout.pause_timeout": "seconds",
    "steps": "steps",
    "epochs": "passes over the tasks",
    "batch_size": "tasks",
    "group_size": "rollouts",
    "minibatches": "optimiser steps",
    "passes": "passes over the batch",
    "eval.every": "steps",
    "eval.samples": "answers per task",
    "eval.temperature": "factor",
    "eval.top_p": "share of probability",
    "eval.top_k": "tokens",
    "eval.limit": "tasks",
    "eval.max_tokens": "tokens",
    "eval.environments.workers": "processes",
    "eval.environments.per_worker": "environments",
    "eval.environments.threads": "threads",
    "checkpoint.every": "steps",
    "checkpoint.keep": "checkpoints",
    "save_rollouts": "steps",
    "canary.tokens": "tokens",
    "canary.tolerance": "nats",
    "critic.ranks": "processes",
    "critic.threads": "threads",
    "critic.warmup_steps": "steps",
    "critic.resources": "Ray resources",
    "reference.ranks": "processes",
    "reference.threads": "threads",
    "reference.update_every": "steps",
    "reference.mix": "share of the policy",
    "reference.resources": "Ray resources",
    "placement.engines": "actors",
    "placement.learners": "ranks",
    "placement.engine_threads": "threads",
    "placement.learner_threads": "threads",
    "placement.gpus_per_engine": "GPUs",
    "placement.engine_resources": "Ray resources",
    "placement.learner_resources": "Ray resources",
    "placement.engine_restarts": "restarts",
    "rollout.workers": "processes",
    "placement.partner_timeout": "seconds",
    "placement.peak_tflops": "TFLOP/s",
    "profile.steps": "steps",
    "profile.ranks": "ranks",
    "watchdog.warn": "seconds",
    "watchdog.end": "seconds",
    "watchdog.busy": "seconds",
    "watchdog.learner_busy": "seconds",
}
"""Path of a numeric key -> its unit."""
DEFAULTS: Mapping[str, Use] = {
    "algorithm": defaults.ALGORITHM,
    "engine": defaults.ENGINE,
    "learner": defaults.LEARNER,
    "critic.learner": defaults.LEARNER,
    "reference.learner": defaults.LEARNER,
    "workflow": defaults.WORKFLOW,
    "eval.workflow": defaults.WORKFLOW,
    "model.renderer": defaults.RENDERER,
    "rollout.buffer": defaults.BUFFER,
    "rollout.stop": defaults.STOP,
}
"""Path of a single component -> component that options without `use` belong to."""


@attrs.frozen(kw_only=True)
class ConfigKey:
    """One key of a configuration.

    Attributes:
        path: Dotted path, as in overrides.
        type: Annotation of its values.
        default: Default value; `MISSING` for a required key.
        unit: Unit of a number; empty for anything else.
        help: Description.
        kind: Kind of the component, or components, at this key.
        section: Class of the section at this key; its keys are listed separately.
        schedule: True if a schedule is allowed in place of the number.
    """

    path: str
    type: Any
    default: Any = MISSING
    unit: str = ""
    help: str = ""
    kind: Kind | None = None
    section: type | None = None
    schedule: bool = False

    @property
    def required(self) -> bool:
        """True if the configuration must set this key."""
        return self.default is MISSING

    @property
    def type_name(self) -> str:
        """Readable type, with limits."""
        if self.kind:
            return f"{self.kind}, or list of them" if self.path in (*LISTS, *_PART_LISTS) else self.kind
        if self.section:
            return "section or null" if type(None) in get_args(self.type) else "section"
        name = type_name(limited(self.type, LEAST.get(self.path)))
        return f"{name} or schedule" if self.schedule else name


_PART_LISTS = tuple(f"algorithm.{part}" for part in (*PART_LISTS, *COMBINED))
_KINDS: Mapping[str, Kind] = {
    **COMPONENT_KEYS,
    **LISTS,
    **{f"algorithm.{part}": kind for part, kind in {**PARTS, **PART_LISTS}.items()},
}


def limited(kind: Any, least: float | None) -> Any:
    """Add a minimum to the numbers of a type."""
    if least is None:
        return kind
    if get_origin(kind) in (Union, types.UnionType):
        return Union[tuple(limited(arm, least) for arm in get_args(kind))]  # noqa: UP007 - the arms are a list
    return Annotated[kind, Limit(">=", least)] if kind in (int, float) else kind


def settings() -> list[ConfigKey]:
    """Return all keys that do not depend on a run's components, sections before their keys."""
    return list(_of_class(Config, ""))


def of_component(component: Component, path: str) -> list[ConfigKey]:
    """Return the options of a component as keys below its path."""
    return [_of_option(option, f"{path}.{option.name}") for option in component.options]


def _of_class(cls: type, prefix: str) -> Iterator[ConfigKey]:
    for option in options_of(cls):
        path = f"{prefix}{option.name}"
        setting = _of_option(option, path)
        yield setting
        if setting.section:
            yield from _of_class(setting.section, f"{path}.")
        for extra in extra_keys(setting.type):
            yield _of_option(extra, f"{path}.{extra.name}")


def _of_option(option: Option, path: str) -> ConfigKey:
    return ConfigKey(
        path=path,
        type=option.type,
        default=option.default,
        unit=UNITS.get(path, ""),
        help=option.help,
        kind=_KINDS.get(path),
        section=section_of(option.type),
        schedule=option.schedule,
    )


def section_of(kind: Any) -> type | None:
    """Return the section class that a type is, or is a union with null of; None for other types."""
    arms = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    found = [arm for arm in arms if isinstance(arm, type) and attrs.has(arm) and not issubclass(arm, Use)]
    return found[0] if len(found) == 1 else None


def extra_keys(kind: Any) -> Sequence[Option]:
    """Return the keys allowed next to the options of each component in a list of this type."""
    if kind == tuple[SourceUse, ...]:
        return [option for option in options_of(SourceUse) if option.name != "use"]
    if kind == tuple[RewardUse, ...]:
        return [option for option in options_of(RewardSpec) if option.name in RULE_KEYS]
    return ()
