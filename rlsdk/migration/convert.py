"""Recognise another trainer's configuration, and convert it to one of rlsdk, with a report on every key."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import PurePath
from typing import Any

import attrs

from rlsdk.errors import ConfigError
from rlsdk.migration.hydra import from_environment
from rlsdk.migration.python_options import Unread
from rlsdk.migration.reading import ForeignConfig, given, read
from rlsdk.migration.rules import NOTES, Framework, Given, KeyRule, Status
from rlsdk.migration.shared.tasks import UNREAD
from rlsdk.migration.values import UnfitError
from rlsdk.options import did_you_mean

FRAMEWORKS = ("verl", "roll", "trinity", "xtuner", "trl", "openrlhf")
_ORDER = (
    *("name", "seed", "out", "log_level", "model", "tasks", "max_prompt_tokens", "long_prompts", "workflow"),
    *("environments", "reward", "scoring", "algorithm", "sampling", "rollout", "steps", "epochs", "batch_size"),
    *("group_size", "minibatches", "passes", "old_logprobs", "engine", "learner", "placement", "eval", "checkpoint"),
    *("trackers", "save_rollouts"),
)
"""Order of sections in the written file; others follow."""
_SECRET = re.compile(r"(api_?key|token|password|secret|\bkey)$", re.IGNORECASE)
_ONLY_VLLM = frozenset({"gpu_memory_utilization", "tensor_parallel_size", "enforce_eager", "args"})
_OTHER_UNITS = ("tokenizer", "token_len", "tokens", "num_token")


@attrs.frozen
class KeyReport:
    """Report on one key of the other configuration.

    Attributes:
        key: Dotted path in the other trainer's configuration.
        value: Its value; `***` for a secret.
        status: How it was converted.
        to: Resulting settings, as `path=value`.
        note: Explanation: the change of meaning, the advice, or the reason why nothing is needed.
    """

    key: str
    value: Any
    status: Status
    to: tuple[str, ...] = ()
    note: str = ""


@attrs.frozen
class Migration:
    """A converted configuration.

    Attributes:
        framework: Trainer that it was written for.
        config: The configuration for rlsdk.
        entries: Reports on the keys that were given.
        defaults: Reports on keys that were not given, whose defaults are set because rlsdk's differ.
        notes: Parts that could not be read, and further remarks.
    """

    framework: Framework
    config: Mapping[str, Any]
    entries: tuple[KeyReport, ...]
    defaults: tuple[KeyReport, ...]
    notes: tuple[str, ...]


@cache
def framework(name: str) -> Framework:
    """Return the table of another trainer.

    Raises:
        ConfigError: There is no table of this name.
    """
    if name not in FRAMEWORKS:
        hint = did_you_mean(name, FRAMEWORKS, ", ") or ";"
        raise ConfigError([f"unknown trainer {name!r}{hint} there are: {', '.join(FRAMEWORKS)}"])
    found: Framework = importlib.import_module(f"rlsdk.migration.{name}").FRAMEWORK
    return found


def migrate(name: str, arguments: Sequence[str], environ: Mapping[str, str]) -> Migration:
    """Read and convert a configuration.

    Args:
        name: Trainer that it was written for, one of `FRAMEWORKS`.
        arguments: A file and overrides, or a command.
        environ: Environment variables from which a command takes numbers and flags.

    Raises:
        ConfigError: It cannot be read.
    """
    table = framework(name)
    return convert(table, read(table, arguments, environ))


def convert(table: Framework, source: ForeignConfig) -> Migration:
    """Convert a configuration that was read; every key is reported."""
    values = given(source, table)
    order = {row.key: position for position, row in enumerate(table.rows)}
    config: dict[str, Any] = {}
    reports: dict[str, KeyReport] = {}
    keys = {**dict.fromkeys(values.flat, True), **{key: False for key in values.defaults if key not in values.flat}}
    rows = {key: table.row(key) for key in keys}
    for key in sorted(keys, key=lambda each: order.get(rows[each].key, len(order)) if rows[each] else len(order)):  # type: ignore[union-attr]
        value = values.flat[key] if keys[key] else values.defaults[key]
        if rows[key] is None and (value in (None, {}, []) or key.partition(".")[0] in source.variables):
            note = "empty: not set" if value in (None, {}, []) else "the keys that refer to it are converted"
            reports[key] = KeyReport(key, _shown(key, value), "ignored", (), note)
        else:
            reports[key] = _entry(table, key, value, rows[key], values, config)
    finished, notes = _finished(table, values)
    notes += _one_ratio_per_rollout(config)
    for path, value in finished.items():
        put(config, path, value)
    _append(config)
    _name_sources(config)
    notes += (*_options_that_exclude_each_other(config), *_files_that_no_source_reads(config))
    dropped = _without_options_of_vllm(config)
    reports = {key: _used(_left(entry, dropped), rows[key], config) for key, entry in reports.items()}
    return Migration(
        table,
        _ordered(config),
        tuple(attrs.evolve(reports[key], key=values.written.get(key, key)) for key in values.flat),
        tuple(entry for key, entry in reports.items() if not keys[key] and (entry.to or entry.status == "missing")),
        tuple(dict.fromkeys([*source.notes, *notes])),
    )


def _finished(table: Framework, values: Given) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the settings that a trainer makes from many keys together, and notes."""
    found: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    try:
        for make in table.finish:
            more = dict(make(values))
            notes += more.pop(NOTES, ())
            found |= more
    except UnfitError as error:  # the report on a key says the same
        return {}, (str(error),)
    return found, notes


def _one_ratio_per_rollout(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Set the aggregation that losses with one ratio per rollout require; return a note if it was changed."""
    loss, aggregate = _at(config, "algorithm.policy_loss.use"), _at(config, "algorithm.aggregate")
    loss = "dpo" if _at(config, "algorithm.use") == "dpo" else loss
    if loss not in ("gspo", "geo_mean", "dpo") or aggregate in (None, "seq-mean-token-mean"):
        return ()
    config["algorithm"]["aggregate"] = "seq-mean-token-mean"
    return (f"algorithm.aggregate: {loss} is defined for seq-mean-token-mean, instead of {aggregate}",)


def _options_that_exclude_each_other(config: dict[str, Any]) -> tuple[str, ...]:
    """Change options that cannot be combined; return notes on them."""
    notes: list[str] = []
    corrections = _at(config, "algorithm.correction")
    replays = isinstance(corrections, list) and any(each["use"] == "routing_replay" for each in corrections)
    if replays and config.get("old_logprobs") == "rollout":
        notes.append("old_logprobs: routing_replay needs those of the learner")
        config["old_logprobs"] = "learner"
    learner = config.get("learner")
    if not isinstance(learner, dict):
        return tuple(notes)
    split = learner.get("sequence_parallel", 1) != 1
    if split and learner.get("attention", "sdpa") != "sdpa":
        notes.append(f"learner.attention: sequence_parallel needs sdpa, instead of {learner['attention']}")
        learner["attention"] = "sdpa"
    if learner.get("optimizer"):
        for name in ("betas", "eps"):  # AdamW's, which are written out even if they are the other trainer's defaults
            learner.pop(name, None)
    if learner.get("compile") and (split or learner.get("lora")):
        notes.append("learner.compile: cannot be combined with sequence_parallel or lora, and is left out")
        del learner["compile"]
    return tuple(notes)


def _name_sources(config: Mapping[str, Any]) -> None:
    """Give sources of one kind names of their own, those of their files or data sets."""
    for key in ("train", "eval"):
        sources = _at(config, f"tasks.{key}")
        uses = Counter(each["use"] for each in sources if "source" not in each) if isinstance(sources, list) else {}
        for index, source in enumerate(sources if isinstance(sources, list) else []):
            if "source" not in source and uses[source["use"]] > 1:
                path = source.get("name") or source.get("path")
                stem = PurePath(str(path[0] if isinstance(path, list) else path)).stem
                taken = [each.get("source") for each in sources]
                source["source"] = f"{stem}_{index}" if stem in taken else stem


def _files_that_no_source_reads(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note on each kind of data file that must be converted first."""

    def listed(value: Any) -> list[Any]:
        return value if isinstance(value, list) else [value]

    sources = [source for key in ("train", "eval") for source in listed(_at(config, f"tasks.{key}"))]
    paths = [path for source in sources if isinstance(source, Mapping) for path in listed(source.get("path"))]
    endings = dict.fromkeys(from_environment(str(path), {}).rpartition(".")[2].lower() for path in paths)
    return tuple(
        f"tasks: no source reads {ending}: save the data, dataset.to_json('train.jsonl'), and name that file"
        for ending in endings
        if ending in UNREAD
    )


def _without_options_of_vllm(config: dict[str, Any]) -> frozenset[str]:
    """Remove the options that another engine lacks; return their paths."""
    engine = config.get("engine")
    if not isinstance(engine, dict) or engine.get("use", "vllm") == "vllm":
        return frozenset()
    found = [name for name in engine if name in _ONLY_VLLM]
    for name in found:
        del engine[name]
    return frozenset(f"engine.{name}" for name in found)


def _left(entry: KeyReport, dropped: frozenset[str]) -> KeyReport:
    """Report a key whose settings were dropped."""
    left = tuple(setting for setting in entry.to if ".".join(setting.partition("=")[0].split(".")[:2]) not in dropped)
    if left == entry.to:
        return entry
    if left:
        return attrs.evolve(entry, to=left)
    return attrs.evolve(entry, to=(), status="ignored", note="the engine transformers has no such option")


def _ordered(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sort the sections, and put the names of components before their options."""
    done: dict[int, Any] = {}  # a mapping used twice stays one object, which YAML writes once

    def named_first(value: Any) -> Any:
        if isinstance(value, list):
            return [named_first(each) for each in value]
        if not isinstance(value, Mapping):
            return value
        if id(value) not in done:
            first = {"use": value["use"]} if "use" in value else {}
            done[id(value)] = first | {key: named_first(below) for key, below in value.items()}
        return done[id(value)]

    order = sorted(config, key=lambda key: _ORDER.index(key) if key in _ORDER else len(_ORDER))
    return {key: named_first(config[key]) for key in order}


def _shown(key: str, value: Any) -> Any:
    """Return the value for the report; secrets are not repeated."""
    return "***" if _SECRET.search(key) and not key.endswith(_OTHER_UNITS) and value else value


def _entry(
    table: Framework, key: str, value: Any, row: KeyRule | None, values: Given, config: dict[str, Any]
) -> KeyReport:
    shown = _shown(key, value)
    if isinstance(value, Unread) and row is not None and row.status == "ignored":
        return KeyReport(key, "?", "ignored", (), row.note)
    if isinstance(value, Unread):
        advice = f"set {' and '.join(row.to) if row and row.to else 'it by hand'}"
        note = f"{value}; {row.note if row and row.status == 'missing' else advice}"
        if row is not None and key in values.defaults:
            note += f"; {table.title}'s default is taken: {values.defaults[key]}"
            for path, setting in row.settings(values.defaults[key], values).values.items():
                put(config, path, setting)
        return KeyReport(key, "?", "missing", (), note)
    if row is None:
        hint = did_you_mean(key, [each.key for each in table.rows if "*" not in each.key])
        return KeyReport(key, shown, "missing", (), f"unknown key of {table.title}: look it up{hint}")
    if (value in (None, {}) and key not in values.defaults) or (value == [] and row.status == "missing"):
        return KeyReport(key, value, "ignored", (), "empty: not set")
    value = values.defaults[key] if value in (None, {}) else value
    try:
        outcome = row.settings(value, attrs.evolve(values, key=key))
    except UnfitError as error:
        wanted = f" ({' and '.join(row.to)})" if row.to else ""
        return KeyReport(key, shown, "missing", (), f"{error}{wanted}")
    for path, setting in outcome.values.items():
        put(config, path, setting)
    settings = tuple(f"{path.removesuffix('[]')}={_brief(setting)}" for path, setting in outcome.values.items())
    return KeyReport(key, shown, outcome.status, settings, outcome.note)


def _used(entry: KeyReport, row: KeyRule | None, config: Mapping[str, Any]) -> KeyReport:
    """Report the settings that a value led to together with others; without any, it has no effect."""
    if row is None or not row.to or entry.to or entry.status not in ("mapped", "changed"):
        return entry
    found = {path: _at(config, path) for path in row.to}
    set_paths = tuple(path for path, value in found.items() if value is False or value not in (None, [], {}, 0))
    if set_paths:
        return attrs.evolve(entry, to=set_paths)
    return attrs.evolve(entry, status="ignored", note="no effect given the other settings")


def _at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def put(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set a value under a dotted path; one that ends with `[]` is appended to, once all values are set."""
    *sections, last = path.split(".")
    node = tree
    for section in sections:
        below = node.get(section)
        node[section] = below if isinstance(below, dict) else {} if below is None else {"use": below}
        node = node[section]
    if path.endswith("[]"):
        node.setdefault(last, []).append(value)
    elif isinstance(node.get(last), dict) and not isinstance(value, dict) and last != "params":
        node[last] = {"use": value, **{k: v for k, v in node[last].items() if k != "use"}}
    else:
        node[last] = value


def _append(tree: dict[str, Any]) -> None:
    """Append the values of paths that end with `[]`; a single value becomes the first of the list."""
    for key in [each for each in tree if str(each).endswith("[]")]:
        added, before = tree.pop(key), tree.get(key.removesuffix("[]"))
        first = before if isinstance(before, list) else [] if before is None else [before]
        tree[key.removesuffix("[]")] = [*first, *added]
    for value in tree.values():
        if isinstance(value, dict):
            _append(value)


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_brief(below)}" for key, below in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_brief, value)) + "]"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"
