"""Tasksets of Trinity-RFT: sources of tasks, their order, and evaluations."""

from __future__ import annotations

from typing import Any

from rlsdk.migration.rows import same
from rlsdk.migration.rules import NOTES, Given, KeyOutcome, KeyRule
from rlsdk.migration.shared.engines import evaluated
from rlsdk.migration.shared.tasks import dataset, unshuffled
from rlsdk.migration.values import number, text, texts

INPUT = "buffer.explorer_input"
TASKSETS = (f"{INPUT}.taskset", f"{INPUT}.tasksets.*")
TASKSET_KEYS = (INPUT, f"{INPUT}.taskset", *(f"{INPUT}.tasksets.{index}" for index in range(64)))
NO_SELECTOR = (
    "the data can be kept in order, shuffled or sorted once; for another order, write a sampler (howto/tasks.md)"
)
_BY_DIFFICULTY = (
    "difficulty_based becomes by_pass_rate, which averages the pass rates of a task's own groups and predicts none "
    "from features"
)


def source_of(given: Given, where: str) -> dict[str, Any] | None:
    """A taskset as a source of tasks."""
    path = given.read(f"{where}.path", text)
    if path is None:
        return None
    columns = {
        name: str(given.get(f"{where}.format.{key}", usual))
        for name, key, usual in (("prompt", "prompt_key", "prompt"), ("answer", "response_key", "response"))
    }
    more: dict[str, Any] = {"chat": True}
    if given.get(f"{where}.subset_name"):
        more["config"] = str(given.get(f"{where}.subset_name"))
    for key, to in (("system_prompt", "system"), ("reply_prefix", "prefill")):
        if (words := given.get(f"{where}.format.{key}") or given.get(f"{INPUT}.{key}")) is not None:
            more[to] = str(words)
    found = dataset(path, str(given.get(f"{where}.split", "train")), columns, **more)
    if found["use"] != "hub":
        found.pop("config", None)
    return found


def training_sources(given: Given) -> dict[str, Any]:
    """Return the sources of training tasks, and a note on the shares of several."""
    places = [place for place in TASKSET_KEYS[1:] if f"{place}.path" in given.flat]
    if f"{INPUT}.taskset" in places:
        places = [f"{INPUT}.taskset"]
    sources = [(place, source) for place in places if (source := source_of(given, place))]
    ordered = [(place, _ordered(source, given, place)) for place, source in sources]
    if len(ordered) < 2:
        return {"tasks.train": ordered[0][1]} if ordered else {}
    named = [
        {**source, "source": str(given.get(f"{place}.name") or f"taskset_{i}")}
        for i, (place, source) in enumerate(ordered)
    ]
    notes = ["tasks.train: Trinity draws from tasksets in proportion to their sizes; here, give each a `weight`"]
    keys = ("default_workflow_type", "default_reward_fn_type")
    if any(len({given.get(f"{place}.{key}") for place in places}) > 1 for key in keys):
        notes.append(f"workflow: tasksets differ in theirs or in their reward; those of {places[0]} are converted")
    return {"tasks.train": named, NOTES: tuple(notes)}


def _ordered(source: dict[str, Any], given: Given, where: str) -> dict[str, Any]:
    """Return a source in the order of Trinity's selector, by default that of the data."""
    kind, sort_by = _order(given, where)
    if kind == "offline_easy2hard" and sort_by:
        return dict(unshuffled(source, sort_by=sort_by))
    return dict(unshuffled(source)) if kind == "sequential" else source


def _order(given: Given, where: str) -> tuple[str, str | None]:
    """Return the selector of a taskset, and the option `sort_by` for one that begins with easy tasks."""
    kind = "sequential"
    keys: list[str] = []
    for selector in (f"{where}.task_selector", f"{where}.data_selector"):
        kind = str(given.get(f"{selector}.selector_type", kind))
        keys = given.read(f"{selector}.feature_keys", texts, keys)
    return kind, f"-{keys[0]}" if len(keys) == 1 else None


def selector(value: Any, given: Given) -> KeyOutcome:
    kind, sort_by = _order(given, given.key.rsplit(".", 2)[0])
    if kind in ("sequential", "shuffle", "random"):
        return KeyOutcome({})
    if kind == "offline_easy2hard":
        if sort_by:
            return KeyOutcome({}, "tasks with equal values keep the order of the data")
        return KeyOutcome.missing("tasks.train.sort_by takes one column: write a column that orders the tasks")
    if kind == "difficulty_based":
        target = given.read(f"{given.key.rpartition('.')[0]}.kwargs.target_reward", number, 1.0)
        return KeyOutcome({"rollout.sampler": {"use": "by_pass_rate", "target": target}}, _BY_DIFFICULTY)
    return KeyOutcome.missing(NO_SELECTOR)


def features(value: Any, given: Given) -> KeyOutcome:
    kind, _ = _order(given, given.key.rsplit(".", 2)[0])
    return KeyOutcome.ignored(_BY_DIFFICULTY) if kind == "difficulty_based" else KeyOutcome({})


def most_samples(value: int, given: Given) -> dict[str, Any]:
    """Convert the rollouts of an evaluation task to the most of all tasksets."""
    every = [
        given.whole(f"{INPUT}.eval_tasksets.{i}.{key}") for i in range(64) for key in ("repeat_times", "rollout_args.n")
    ]
    return {"eval.samples": max(value, *every)}


def evaluation_sampling(name: str, sample: float) -> tuple[KeyRule, ...]:
    """Return the rule of a sampling parameter of evaluations, which must be the same for all held-out tasks."""
    where = f"{INPUT}.eval_tasksets"

    def all_of(of: str, given: Given) -> list[float]:
        fallback = given.read(f"model.{of}", number, {"temperature": 1.0, "top_p": 1.0, "top_k": -1.0}[of])
        tasksets = sorted({key.removeprefix(where).split(".")[1] for key in given.flat if key.startswith(f"{where}.")})
        return [given.read(f"{where}.{i}.rollout_args.{of}", number, fallback) for i in tasksets]

    def give(value: float, given: Given) -> KeyOutcome:
        every = all_of(name, given)
        if len(set(every)) > 1:
            found = ", ".join(f"{each:g}" for each in every)
            return KeyOutcome.missing(f"eval.{name} is one for all held-out tasks, and they have {found}")
        return evaluated(name, value, max(all_of("temperature", given)))

    return same(f"{where}.*.rollout_args.{name}", f"eval.{name}", number, sample, give)
