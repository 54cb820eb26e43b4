"""Tasks, rewards, batches, steps and engines of Trinity-RFT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migration.reading import flattened
from rlsdk.migration.rows import same
from rlsdk.migration.rules import NOTES, Given, KeyOutcome, KeyRule
from rlsdk.migration.shared.engines import evaluated
from rlsdk.migration.shared.learner import ZOO, minibatches, overlong, share_of_steps
from rlsdk.migration.shared.tasks import dataset, likely_reward, unshuffled
from rlsdk.migration.trinity.algorithm import algorithm_of, kl
from rlsdk.migration.values import UnfitError, flag, number, text, texts
from rlsdk.migration.verl import FRAMEWORK as OWN_KEYS_OF_VERL

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


EXPERIENCE = "buffer.trainer_input.experience_buffer"
RUN_AHEAD = "engines sample this many batches in advance; Trinity's explorer has no limit"
BUFFER = "the run's own scheduler and database pass rollouts from engines to the learner"


def tasks_per_step(given: Given) -> int:
    """Tasks in a batch; a trainer without an explorer of its own gives the rollouts instead."""
    if "buffer.batch_size" not in given.flat and not learns_offline(given):
        return max(1, given.whole("buffer.train_batch_size", 0) // given.whole("algorithm.repeat_times"))
    return given.whole("buffer.batch_size")


def updates_per_step(given: Given) -> int:
    rollouts = tasks_per_step(given) * given.whole("algorithm.repeat_times")
    return minibatches(rollouts, given.whole("buffer.train_batch_size", 0) or rollouts)


def context_length(given: Given) -> int:
    explicit = given.whole("model.max_model_len", 0)
    return explicit or given.whole("model.max_prompt_tokens", 1024) + given.whole("model.max_response_tokens", 1024)


def answer_length(given: Given) -> int:
    keys = (*(f"{where}.rollout_args.max_tokens" for where in TASKSET_KEYS[1:3]), "model.max_response_tokens")
    found = next(
        (size for key in (*keys, "explorer.rollout_model.max_response_tokens") if (size := given.whole(key, 0))), 0
    )
    return found or min(context_length(given) // 2, 1024)


def learns_offline(given: Given) -> bool:
    """True for the algorithms that learn from a data set, which is then the trainer's buffer."""
    return str(given.get("algorithm.algorithm_type")) in ("sft", "dpo")


def held(key: str, sample: str, usual: str = "") -> KeyRule:
    """Return the rule of a key of the trainer's buffer, which holds data only if nothing is sampled."""

    def give(value: Any, given: Given) -> KeyOutcome:
        if not learns_offline(given):
            return KeyOutcome.ignored(BUFFER)
        if usual and value != usual:
            return KeyOutcome.missing(f"rename the column to {usual}")
        return KeyOutcome({})

    return KeyRule(f"{EXPERIENCE}.{key}", "mapped", ("tasks.train",), "", sample, text, give)


def sampled_ahead(to: str) -> Any:
    def give(value: int, given: Given) -> KeyOutcome:
        if learns_offline(given):
            return KeyOutcome.ignored("nothing is sampled")
        return KeyOutcome({to: value})

    return give


def sync_style(value: str, given: Given) -> KeyOutcome:
    """Convert the style of synchronisation, of which all but one let the explorer run ahead."""
    if value == "fixed" or learns_offline(given):
        return KeyOutcome.ignored("explorer and trainer take turns, the default")
    limits = ("algorithm.sample_strategy_args.max_staleness", "synchronizer.sync_offset")
    if any(given.whole(key, 0) > 0 for key in limits):
        return KeyOutcome({}, RUN_AHEAD)
    return KeyOutcome({"rollout.max_staleness": 1}, RUN_AHEAD)


def temperature(value: float, given: Given) -> dict[str, Any]:
    """Set the temperature of rollouts and, unless their tasks have one, of evaluations."""
    evaluates = any(key.startswith(f"{INPUT}.eval_tasksets.") for key in given.flat)
    return {"sampling.temperature": value, **({"eval.temperature": value} if evaluates and value > 0 else {})}


def epochs(value: float, given: Given) -> KeyOutcome:
    if given.whole("buffer.total_steps", 0) or given.whole("trainer.total_steps", 0):
        return KeyOutcome.ignored("total_steps takes precedence")
    return KeyOutcome({"epochs": value})


def warmup_ratio(value: float, given: Given) -> KeyOutcome:
    if given.whole("algorithm.optimizer.lr_warmup_steps", -1) >= 0:
        return KeyOutcome.ignored("lr_warmup_steps takes precedence")
    steps = given.whole("buffer.total_steps", 0) or given.whole("trainer.total_steps", 0)
    return share_of_steps(steps * updates_per_step(given) or None, value)


def placement(given: Given) -> dict[str, Any]:
    nodes, each = given.whole("cluster.node_num", 0), given.whole("cluster.gpu_per_node", 0)
    engines = given.whole("explorer.rollout_model.engine_num")
    tensor = given.whole("explorer.rollout_model.tensor_parallel_size")
    shared = str(given.get("mode", "both")) == "colocate"
    ranks = nodes * each - (0 if shared else engines * tensor)
    return {
        "placement.engines": engines,
        "placement.gpus_per_engine": tensor,
        "placement.learners": max(1, ranks),
        "placement.colocate": shared or nodes * each <= engines * tensor,
    }


def schedule(least: float) -> Any:
    """Set the schedule with its default for the least rate, as a share of the peak."""

    def give(value: str, _: Given) -> dict[str, Any]:
        return {"learner.schedule": value, **({"learner.final_ratio": least} if value != "constant" else {})}

    return give


WORKFLOWS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{name: ("single_turn", {}) for name in ("simple_workflow", "async_simple_workflow")},
    **{name: ("single_turn", {"use": "math", "strict": False})
       for name in ("math_workflow", "async_math_workflow", "math_eval_workflow", "async_math_eval_workflow")},
    **{name: ("single_turn", {"use": "math"}) for name in ("math_boxed_workflow", "async_math_boxed_workflow")},
    "on_policy_distill_workflow": ("single_turn", {}),
    "on_policy_distill_math_workflow": ("single_turn", {"use": "math", "strict": False}),
}  # fmt: skip
"""Workflow -> rlsdk's, and the reward that is part of it."""
REWARDS: Mapping[str, Mapping[str, Any]] = {
    "math_reward": {"use": "math", "strict": False},
    "math_boxed_reward": {"use": "math"},
    "math_dapo_reward": {"use": "math"},
    "countdown_reward": {"use": "countdown"},
    "accuracy_reward": {"use": "exact_match"},
    "format_reward": {"use": "format"},
}
VERL = "trainer.trainer_config"
OF_VERL = "`rlsdk migrate verl` converts this key, without its prefix"
_THINKING = (
    "model.renderer: without model.enable_thinking, Trinity-RFT turns off the thoughts of Qwen3, as does "
    "renderer: {use: template, variables: {enable_thinking: false}}"
)


def if_verl_needs_it(value: Any, given: Given) -> KeyOutcome:
    """Ask veRL's own rule whether one of its keys needs anything."""
    name = given.key.removeprefix(f"{VERL}.")
    rule, section = OWN_KEYS_OF_VERL.row(name), given.section(VERL)
    try:
        inner = Given(dict(flattened(section)), section, OWN_KEYS_OF_VERL.defaults, key=name)
        outcome = rule.settings(value, inner) if rule else None
    except UnfitError:
        outcome = None
    return outcome if outcome and outcome.status == "ignored" else KeyOutcome.missing(OF_VERL)


def _demonstrations(given: Given) -> dict[str, Any]:
    """Data and batch of supervised fine-tuning and DPO; other columns, such as chosen and rejected, are metadata."""
    path = given.read(f"{EXPERIENCE}.path", text)
    if not learns_offline(given) or path is None:
        return {}
    columns = {"prompt": str(given.get(f"{EXPERIENCE}.format.prompt_key", "prompt"))}
    if str(given.get("algorithm.algorithm_type")) == "sft":
        columns["demonstration"] = str(given.get(f"{EXPERIENCE}.format.response_key", "response"))
    source = dataset(path, str(given.get(f"{EXPERIENCE}.split", "train")), columns, chat=True)
    return {
        "tasks.train": source,
        "batch_size": given.whole("buffer.train_batch_size", 0) or given.whole("buffer.batch_size"),
    }


def engine(value: str, given: Given) -> KeyOutcome:
    if value in ("vllm", "vllm_async", "async"):
        return KeyOutcome({"engine.use": "vllm"})
    return KeyOutcome({"engine.use": "vllm"}, f"there is no engine {value!r}; vLLM is used instead", "missing")


def out(value: Any, given: Given) -> KeyOutcome:
    folders = [str(given.get("project", "Trinity-RFT")), str(given.get("group") or "")]
    below = "/".join(folder for folder in folders if folder)
    return KeyOutcome({"out": f"{text(value).rstrip('/')}/{below}"}, "a run's folder is out/name")


def mode(value: Any, given: Given) -> KeyOutcome:
    if value in ("both", "colocate") or (value == "train" and learns_offline(given)):
        return KeyOutcome({})
    return KeyOutcome.missing(f"rlsdk train CONFIG --mode {value}")


def _first_taskset(given: Given) -> str:
    return f"{INPUT}.taskset" if f"{INPUT}.taskset.path" in given.flat else f"{INPUT}.tasksets.0"


def _function(given: Given, kind: str) -> str:
    """Return the default workflow or reward function of the first taskset, or else of all; empty if there is none."""
    return str(given.get(f"{_first_taskset(given)}.{kind}") or given.get(f"{INPUT}.{kind}") or "")


def _lengths(given: Given) -> dict[str, Any]:
    context, answer = context_length(given), answer_length(given)
    found: dict[str, Any] = {
        "model.max_length": context,
        "sampling.max_tokens": answer,
        "max_prompt_tokens": given.whole("model.max_prompt_tokens", 0) or max(1, context - answer),
    }
    thinks = "qwen3" in str(given.get("model.model_path", "")).lower() and "model.enable_thinking" not in given.flat
    return {**found, NOTES: (_THINKING,)} if thinks else found


def _held_out(given: Given) -> dict[str, Any]:
    sources = [source for i in range(64) if (source := source_of(given, f"{INPUT}.eval_tasksets.{i}"))]
    names = [given.get(f"{INPUT}.eval_tasksets.{i}.name") for i in range(len(sources))]
    labelled = [{**s, "source": str(name)} if name else s for s, name in zip(sources, names, strict=True)]
    return {"tasks.eval": labelled[0] if len(labelled) == 1 else labelled} if labelled else {}


def _workflow(given: Given) -> dict[str, Any]:
    chosen, _ = WORKFLOWS.get(_function(given, "default_workflow_type"), (None, {}))
    return {"workflow": chosen} if chosen else {}


def _penalties(given: Given) -> dict[str, Any]:
    rank = given.read("algorithm.advantage_fn_args.rank_penalty", number, 0.0)
    found = [*([{"use": "rank_penalty", "coef": rank}] if rank else []), *_overlong(given, _first_taskset(given))]
    shaping = {"algorithm.shaping": [*found, *kl(given)["algorithm.shaping"]]} if found else {}
    sppo = any(str(given.get(f"algorithm.{key}")) == "sppo" for key in ("algorithm_type", "policy_loss_fn"))
    return {**shaping, NOTES: (f"algorithm.policy_loss: {ZOO}",) if sppo else ()}


def _reward(given: Given) -> dict[str, Any]:
    _, of_workflow = WORKFLOWS.get(_function(given, "default_workflow_type"), (None, {}))
    if chosen := REWARDS.get(_function(given, "default_reward_fn_type")) or of_workflow:
        return {"reward": dict(chosen)}
    where = _first_taskset(given)
    return {} if learns_offline(given) else likely_reward(given.get(f"{where}.path"), given.get(f"{where}.name"))


FINISH = (
    *(placement, _lengths, training_sources, _demonstrations),
    *(_held_out, _workflow, _penalties, _reward),
)


def workflow(value: str, given: Given) -> KeyOutcome:
    if value in WORKFLOWS:
        return KeyOutcome({}, "the reward is a separate component: reward")
    note = "workflow: tools, environment or agent, or your own (howto/workflow.md), and its reward"
    return KeyOutcome.missing(note)


def reward(value: str, given: Given) -> KeyOutcome:
    if value in REWARDS:
        return KeyOutcome({})
    return KeyOutcome.missing(f"reward: {{use: foreign, path: 'FILE.py:CLASS', style: trinity}} runs {value} unchanged")


def single_turn(given: Given) -> bool:
    kinds = filter(None, (given.get(f"{where}.default_workflow_type") for where in TASKSET_KEYS))
    found = [str(kind) in WORKFLOWS for kind in kinds]
    return bool(found) and all(found)


def eval_workflow(value: str, given: Given) -> KeyOutcome:
    if value in WORKFLOWS and single_turn(given):
        return KeyOutcome.ignored("evaluations use the training's workflow and reward")
    if value in WORKFLOWS:
        return KeyOutcome({"eval.workflow": WORKFLOWS[value][0]}, "its reward is the training's")
    return KeyOutcome.missing("eval.workflow; its reward is the training's")


def _overlong(given: Given, where: str) -> list[dict[str, Any]]:
    """DAPO's penalty of long answers, which is part of Trinity's reward."""
    arguments = f"{where}.reward_fn_args"
    if not given.read(f"{arguments}.enable_overlong_penalty", flag, False):
        return []
    limit = given.whole(f"{arguments}.max_response_length", answer_length(given))
    penalty = given.read(f"{arguments}.penalty_factor", number, 1.0)
    return overlong(limit, given.whole(f"{arguments}.cache_length"), penalty)


def of_verl(key: str, to: str, read: Any, sample: Any, over: str = "") -> KeyRule:
    """Return the rule of a setting of veRL, which a setting of Trinity's own may replace."""

    def give(value: Any, given: Given) -> KeyOutcome:
        if over and given.flat.get(over) is not None:
            return KeyOutcome.ignored(f"{over} takes precedence")
        if key.startswith("critic.") and not algorithm_of(given).get("algorithm.critic"):
            return KeyOutcome.ignored("the algorithm has no critic")
        return KeyOutcome({to: value})

    return KeyRule(f"{VERL}.{key}", "mapped", (to,), "", sample, read, give)


def verl_file(value: str, given: Given) -> KeyOutcome:
    if given.section(VERL):
        return KeyOutcome.ignored(f"its settings are converted, as {VERL}")
    return KeyOutcome.missing(f"put the settings of this file under {VERL}, and convert again")
