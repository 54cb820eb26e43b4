"""Rules for values of a configuration: limits, and values that contradict each other."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from math import ceil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlsdk.config.rollout import ReplaySection, StorageSection
from rlsdk.config.schema import Config, ReferenceSection
from rlsdk.contracts import AlgorithmDefaults
from rlsdk.fields import WHOLE_GROUPS
from rlsdk.plurals import counted
from rlsdk.storage.location import is_url, url_fault

LEAST: dict[str, float] = {
    "batch_size": 1,
    "group_size": 1,
    "minibatches": 1,
    "passes": 1,
    "steps": 1,
    "seed": 0,
    "max_prompt_tokens": 1,
    "max_empty_steps": 1,
    "save_rollouts": 0,
    "sampling.max_tokens": 1,
    "sampling.top_k": 0,
    "rollout.max_staleness": 0,
    "rollout.sync_interval": 1,
    "rollout.oversample": 0,
    "rollout.replay.most_uses": 2,
    "rollout.max_token_staleness": 0,
    "rollout.tail_batch": -1,
    "rollout.pause_timeout": 0,
    "rollout.workers": 0,
    "eval.every": 0,
    "eval.samples": 1,
    "eval.top_k": 0,
    "eval.limit": 1,
    "eval.max_tokens": 1,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "placement.engines": 1,
    "placement.learners": 1,
    "critic.ranks": 0,
    "critic.threads": 0,
    "critic.warmup_steps": 0,
    "reference.ranks": 0,
    "reference.threads": 0,
    "reference.update_every": 0,
    "placement.engine_threads": 0,
    "placement.learner_threads": 0,
    "placement.gpus_per_engine": 1,
    "placement.engine_restarts": 0,
    "placement.partner_timeout": 0,
    "placement.peak_tflops": 0.001,
    "environments.workers": 1,
    "environments.per_worker": 1,
    "environments.threads": 1,
    "eval.environments.workers": 1,
    "eval.environments.per_worker": 1,
    "eval.environments.threads": 1,
    "canary.tokens": 2,
    "canary.tolerance": 0,
    "scoring.workers": 0,
    "scoring.memory": 64,
}
"""Path -> minimum."""
MOST = {"rollout.oversample": 1000}
"""Path -> maximum; `LARGEST` for the other paths of `LEAST`."""
_SECONDS = {
    "scoring.timeout": "",
    "watchdog.warn": "",
    "watchdog.end": "or null for never; ",
    "watchdog.busy": "or null for any time; ",
    "watchdog.learner_busy": "or null for any time; ",
}
"""Path of a time limit -> what its message says of null."""
LARGEST = 2**63 - 1
"""Largest integer that arrays and databases hold."""
LEAST_RESOURCE = 0.0001
"""Minimum amount of a Ray resource that an actor may request."""
LONGEST_NAME = 200
"""Maximum bytes of a run's name: file systems allow 255, and files next to the folder have longer names."""


def limits(config: Config) -> list[str]:
    """Return faults of values that do not depend on the algorithm."""
    return [
        *_name(config.name),
        *_out(config),
        *_resources(config),
        *(
            f"{path}: at least {least}, got {value}"
            for path, least in LEAST.items()
            if (value := value_at(config, path)) is not None and value < least
        ),
        *(
            f"{path}: at most {most}, got {value}"
            for path in LEAST
            if (value := value_at(config, path)) is not None and value > (most := MOST.get(path, LARGEST))
        ),
        *(text for wrong, text in [*_sizes(config), *_rollout(config)] if wrong),
    ]


def cross_checks(
    config: Config, algorithm: AlgorithmDefaults, needs: Iterable[str], *, unrewarded: Sequence[str]
) -> list[str]:
    """Return faults of values in combination with the algorithm.

    Args:
        config: The typed values.
        algorithm: The algorithm, with parts replaced by the configuration.
        needs: Optional inputs that the parts read.
        unrewarded: Parts that read rewards, if the run has no reward.
    """
    rules = [
        *_sampling(config, algorithm, unrewarded),
        (
            algorithm.kl_coef > 0 and algorithm.kl is None,
            f"algorithm.kl: kl_coef is {algorithm.kl_coef}; name an estimator, such as 'k3'",
        ),
        (
            algorithm.norm is not None and algorithm.norm <= 0,
            f"algorithm.norm: a length above 0, or null for sampling.max_tokens; got {algorithm.norm}",
        ),
        (
            config.reference.update_every > 0 and "ref_logprobs" not in needs,
            f"reference.update_every: {config.reference.update_every} given, but nothing reads the reference model; "
            "set algorithm.kl_coef above 0 and algorithm.kl, such as 'k3', or leave update_every out",
        ),
        (
            "values" in needs and not algorithm.critic,
            "algorithm.critic: the advantage reads a critic's values; set it to true",
        ),
        (
            config.minibatches > config.batch_size and not WHOLE_GROUPS.isdisjoint(needs),
            f"minibatches: {config.minibatches} of {counted(config.batch_size, 'group')} leaves some empty, since the "
            f"policy loss or a correction needs whole groups; give at most {config.batch_size}",
        ),
        (
            config.critic.warmup_steps > 0 and not algorithm.critic,
            f"critic.warmup_steps: {config.critic.warmup_steps} given, but the algorithm has no critic; leave it out, "
            "or use an algorithm with a critic, such as ppo",
        ),
    ]
    return [text for wrong, text in rules if wrong]


def compared_with_nothing(rewards: Iterable[str], needs: Iterable[str]) -> list[str]:
    """Return faults of rewards that compare the rollouts of a group, if the baseline is one greedy answer's reward.

    Args:
        rewards: Names of such rewards.
        needs: Optional inputs that the parts read.
    """
    if "baseline_rewards" not in needs:
        return []
    return [
        f"reward: {name} compares the rollouts of a group, but the algorithm's baseline is the reward of one greedy "
        "answer, which cannot be compared with anything; use another advantage, such as rloo"
        for name in rewards
    ]


def _name(name: str) -> list[str]:
    """Check the name of a run, which becomes a folder below `out` and must not lead to another folder."""
    if name in ("", ".", "..") or re.search(r"[/\\\x00-\x1f\x7f]", name) or len(os.fsencode(name)) > LONGEST_NAME:
        return [
            f"name: {name!r} cannot name a folder; expected 1 to {LONGEST_NAME} characters without '/', such as "
            "'countdown-grpo' (the folder of all runs is `out`)"
        ]
    return []


def _out(config: Config) -> list[str]:
    if is_url(config.out):
        fault = url_fault(config.out)
        return [f"out: {fault}"] if fault else []
    if config.mirror is not None:
        return [f"mirror: given, but out={config.out!r} is a local folder, which needs no mirror; leave it out"]
    return []


def _resources(config: Config) -> list[str]:
    """Check the amounts of Ray resources; Ray would refuse them only when the first actor starts."""
    faults = []
    for path in (
        "placement.engine_resources",
        "placement.learner_resources",
        "critic.resources",
        "reference.resources",
    ):
        for name, amount in value_at(config, path).items():
            if name in ("CPU", "GPU", "memory", "object_store_memory"):
                text = "Ray's own resource; name one that `ray start --resources` gave to nodes"
                faults.append(f"{path}.{name}: {text}")
            elif amount < LEAST_RESOURCE:
                faults.append(f"{path}.{name}: at least {LEAST_RESOURCE}, got {amount}")
    return faults


def value_at(config: Config, path: str, below_null: Any = None) -> Any:
    """Return the value at a dotted path; `below_null` if a section of it is null."""
    value: Any = config
    for key in path.split("."):
        if value is None:
            return below_null
        value = getattr(value, key)
    return value


def _sizes(config: Config) -> list[tuple[bool, str]]:
    rollouts = config.batch_size * config.group_size
    path, share = config.model.path, config.max_invalid
    # Only the hub can tell whether a hub id exists.
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not Path(path).exists() and not path.startswith(".")
    both = (
        f"steps={config.steps} and epochs={config.epochs} are given"
        if config.steps is not None
        else "neither steps nor epochs is given"
    )
    return [
        *(
            (
                role.learner is not None and not role.ranks,
                f"{name}.learner: it runs the {name} in dedicated processes, but {name}.ranks=0 requests none; give "
                f"{name}.ranks",
            )
            for name, role in (("critic", config.critic), ("reference", config.reference))
        ),
        *_moves(config.reference),
        ("" in config.sampling.stop, "sampling.stop: an empty string would end every answer before its first token"),
        ((config.steps is None) == (config.epochs is None), f"steps: {both}; give one of them"),
        *(
            (not 0 < section.top_p <= 1, f"{name}.top_p: above 0 and at most 1, got {section.top_p}")
            for name, section in (("sampling", config.sampling), ("eval", config.eval))
        ),
        (
            config.eval.temperature <= 0,
            f"eval.temperature: above 0, got {config.eval.temperature}: the sampled answers have it; a greedy one is "
            "taken in addition (eval.greedy)",
        ),
        (config.epochs is not None and config.epochs <= 0, f"epochs: above 0, got {config.epochs}"),
        (
            config.minibatches > rollouts,
            f"minibatches: {config.minibatches} of {counted(rollouts, 'rollout')} leaves some empty; "
            f"give at most {rollouts}",
        ),
        (not config.tasks.train, "tasks.train: expected at least one source of tasks, got none"),
        (
            any(each.weight < 0 for each in config.tasks.train)
            or (bool(config.tasks.train) and not any(each.weight for each in config.tasks.train)),
            f"tasks.train: expected weights of at least 0, not all 0; got {[e.weight for e in config.tasks.train]}",
        ),
        *(
            (
                (seconds := value_at(config, path)) is not None and seconds <= 0,
                f"{path}: seconds above 0, {more}got {seconds}",
            )
            for path, more in _SECONDS.items()
        ),
        *_profile(config),
        (not 0 <= share <= 1, f"max_invalid: a share between 0 and 1, got {share}"),
        *((True, f"model.path: {text}") for text in ([] if is_hub_id else _no_model(path))),
    ]


def _profile(config: Config) -> list[tuple[bool, str]]:
    section, last, ranks = config.profile, config.steps, config.placement.learners
    beyond = [step for step in section.steps if step < 1 or (last is not None and step > last)]
    unknown = [rank for rank in section.ranks if not 0 <= rank < ranks]
    bounds = "at least 1" if last is None else f"from 1 to steps={last}"
    return [
        (bool(beyond), f"profile.steps: expected steps {bounds}; got {beyond}"),
        (
            bool(unknown) and ranks > 0,
            f"profile.ranks: placement.learners={ranks} has the ranks 0 to {ranks - 1}; got {unknown}",
        ),
        (not section.ranks, "profile.ranks: expected at least one rank, such as 0; got none"),
    ]


def _moves(section: ReferenceSection) -> list[tuple[bool, str]]:
    every, mix = section.update_every, section.mix
    return [
        (not 0 < mix <= 1, f"reference.mix: above 0 and at most 1, got {mix:g}"),
        (
            not every and mix != ReferenceSection().mix,
            f"reference.mix: {mix:g} given, but with reference.update_every=0 the reference model never moves; set "
            "reference.update_every, or leave mix out",
        ),
        (
            every > 0 and section.ranks > 0,
            f"reference.update_every: {every} given, but with reference.ranks={section.ranks} the reference model has "
            "processes that the policy's weights are not sent to; set one of them to 0",
        ),
    ]


def _no_model(path: str) -> list[str]:
    """Return why a path is not the folder of a model; for the folder of an adapter, with the model to give instead."""
    folder = Path(os.path.expanduser(path))
    whole, adapter = (folder / "config.json").is_file(), folder / "adapter_config.json"
    if not adapter.is_file():
        text = (
            f"there is no folder {path!r} with a config.json, neither in the working folder ({Path.cwd().name}/) nor "
            "next to the configuration (and it is not a hub id, ORG/NAME)"
        )
        return [] if whole else [_exported(path, folder) or text]
    if whole and (any(folder.glob("model*.safetensors")) or any(folder.glob("pytorch_model*.bin"))):
        text = f"{path!r} holds a model and an adapter ({adapter.name}), which transformers would load together"
        return [f"{text}; move the adapter to another folder"]
    try:
        base = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    remedy = (
        f"give its base model{f', {base},' if base else ''} to train an adapter (learner.lora and lora.path), "
        "or merge them: PeftModel.from_pretrained(…).merge_and_unload().save_pretrained(…)"
    )
    if (folder.parent / "config.json").is_file():  # as in the export of a run
        remedy = f"give the folder above it, {os.path.dirname(path.rstrip('/')) or '.'!r}, which holds the merged model"
    return [f"{path!r} holds only an adapter ({adapter.name}); {remedy}"]


def _exported(path: str, folder: Path) -> str:
    """Return where the model of a run or a checkpoint is; empty if the folder is neither."""
    found = [*folder.glob("checkpoints/step-*/export/config.json"), *folder.glob("export/config.json")]
    if found:
        newest = max(found, key=lambda file: file.stat().st_mtime).parent
        return f"{path!r} holds no config.json, but an exported model: give {str(newest)!r}"
    if (folder / "checkpoints").is_dir():
        return f"{path!r} is the folder of a run; write its model by `rlsdk export {path} DIR`, then give DIR"
    return ""


def _rollout(config: Config) -> list[tuple[bool, str]]:
    section = config.rollout
    token, group = section.max_token_staleness, section.max_staleness
    share = section.replay.share
    ahead = "set rollout.max_staleness to 1 or more"
    return [
        (
            section.in_flight and not section.partial_rollouts,
            "rollout.partial_rollouts: false restarts answers when weights change, but with in_flight=true they are "
            "not interrupted; also set rollout.in_flight=false",
        ),
        (
            section.tail_batch != 0 and not section.runs_ahead,
            f"rollout.tail_batch: {section.tail_batch} given, but no group expires in synchronous training; "
            f"{ahead}, or leave it out",
        ),
        (
            token is not None and not section.runs_ahead,
            f"rollout.max_token_staleness: {token} given, but no token is stale in synchronous training; {ahead}, or "
            "leave it out",
        ),
        (
            token is not None and section.runs_ahead and token > group >= 0,
            f"rollout.max_token_staleness: {token} is above max_staleness={group}: the group expires before its "
            f"tokens do; at most {group}",
        ),
        (
            not share and section.replay.most_uses != ReplaySection().most_uses,
            f"rollout.replay.most_uses: {section.replay.most_uses} given, but with share=0 no group is trained again; "
            "set rollout.replay.share above 0, or leave it out",
        ),
        (not 0 <= share < 1, f"rollout.replay.share: at least 0 and below 1, got {share}"),
        (
            share > 0 and not section.max_staleness and section.sync_interval == 1,
            "rollout.replay.share: a group that was trained is too old for the next step with "
            "rollout.max_staleness=0; give at least 1",
        ),
        (
            share > 0 and token == 0 and section.max_staleness > 0 and section.sync_interval == 1,
            "rollout.replay.share: the tokens of a group that was trained are too old for the next step with "
            "rollout.max_token_staleness=0; give at least 1",
        ),
        (
            0 < share < 1 and fresh_groups(config) < 1,
            f"rollout.replay.share: {share} of batch_size={config.batch_size} leaves no new group; reduce it",
        ),
        *((True, f"rollout.storage.{text}") for text in url_faults(section.storage)),
    ]


def fresh_groups(config: Config) -> int:
    """Return the number of groups in a batch that are trained for the first time."""
    return config.rollout.replay.fresh(config.batch_size)


def steps_of_epochs(config: Config, tasks: int) -> int:
    """Return the number of steps of a run whose length is given in epochs, for this number of tasks."""
    # Rounded, since 1.1 · 100 / 10 is a little above 11 in floating point.
    return ceil(round((config.epochs or 0) * tasks / fresh_groups(config), 9))


def longest_prompt(config: Config) -> tuple[int, str]:
    """Return the maximum length of a trained prompt, in tokens, and the setting that limits it."""
    room = config.model.max_length - 1  # an answer has at least one token
    if config.max_prompt_tokens <= room:
        return config.max_prompt_tokens, "max_prompt_tokens"
    return room, "model.max_length"


def url_faults(section: StorageSection) -> list[str]:
    """Return faults of the storage section. Messages never repeat the URL, which may hold a password."""
    if section.url is None:
        return ["password_env: a password without a url"] if section.password_env else []
    try:
        parts = urlsplit(section.url)
        password, host = parts.password or "password" in parts.query, parts.hostname or parts.query
    except ValueError as error:
        return [f"url: {error}"]
    faults = []
    if parts.scheme != "postgresql+psycopg" or not (host or parts.path.strip("/")):
        faults.append(f"url: expected a URL such as postgresql+psycopg://me@host/name; got {parts.scheme!r}")
    if password:
        faults.append("url: contains a password; set password_env to an environment variable instead")
    if section.password_env and not os.environ.get(section.password_env):
        faults.append(f"password_env: the environment variable {section.password_env!r} is not set, or is empty")
    return faults


def _sampling(config: Config, algorithm: AlgorithmDefaults, unrewarded: Sequence[str]) -> list[tuple[bool, str]]:
    sampled = algorithm.rollouts != "demonstrations"
    section, length = config.sampling, config.model.max_length
    return [
        (
            config.rollout.runs_ahead and not sampled,
            "rollout: nothing is sampled by an algorithm that trains on demonstrations; leave it out",
        ),
        (
            sampled and bool(unrewarded),
            "reward: none given; name one, such as 'countdown', or a workflow that gives rewards itself; they are read "
            f"by {' and '.join(unrewarded)}",
        ),
        (
            sampled and section.temperature <= 0,
            f"sampling.temperature: must be above 0 to learn from samples, got {section.temperature}",
        ),
        (
            sampled and (0 < section.top_p < 1 or section.top_k > 0),
            f"sampling.{'top_p' if section.top_p < 1 else 'top_k'}: top_p={section.top_p:g}, top_k={section.top_k} "
            "sample from part of the vocabulary, which the learner cannot reproduce: it would train on the "
            "probabilities of another distribution. Leave both out while training (top_p: 1, top_k: 0); lower the "
            "temperature, which the learner shares, for likelier tokens",
        ),
        (
            sampled and section.max_tokens + 1 > length,
            f"model.max_length: {length} tokens cannot hold a prompt and sampling.max_tokens={section.max_tokens}",
        ),
        (
            config.eval.max_tokens is not None and config.eval.max_tokens + 1 > length,
            f"model.max_length: {length} tokens cannot hold a prompt and eval.max_tokens={config.eval.max_tokens}",
        ),
    ]
