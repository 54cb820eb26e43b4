"""Tasks, rewards and engines of Trinity-RFT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migration.reading import flattened
from rlsdk.migration.rules import NOTES, Given, KeyOutcome, KeyRule
from rlsdk.migration.shared.algorithm import overlong
from rlsdk.migration.shared.learner import ZOO
from rlsdk.migration.shared.tasks import dataset, likely_reward
from rlsdk.migration.trinity.algorithm import algorithm_of, kl
from rlsdk.migration.trinity.sizes import EXPERIENCE, answer_length, context_length, learns_offline, placement
from rlsdk.migration.trinity.tasksets import INPUT, TASKSET_KEYS, source_of, training_sources
from rlsdk.migration.values import UnfitError, flag, number, text
from rlsdk.migration.verl import FRAMEWORK as OWN_KEYS_OF_VERL

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


def finish(given: Given) -> dict[str, Any]:
    where = f"{INPUT}.taskset" if f"{INPUT}.taskset.path" in given.flat else f"{INPUT}.tasksets.0"
    found: dict[str, Any] = {
        **placement(given),
        "model.max_length": context_length(given),
        "sampling.max_tokens": answer_length(given),
        "max_prompt_tokens": given.whole("model.max_prompt_tokens", 0)
        or max(1, context_length(given) - answer_length(given)),
    }
    if "qwen3" in str(given.get("model.model_path", "")).lower() and "model.enable_thinking" not in given.flat:
        found[NOTES] = (_THINKING,)
    train = training_sources(given)
    found |= {**train, NOTES: (*found.get(NOTES, ()), *train.get(NOTES, ()))}
    found |= _demonstrations(given)
    held_out = [source for i in range(64) if (source := source_of(given, f"{INPUT}.eval_tasksets.{i}"))]
    names = [given.get(f"{INPUT}.eval_tasksets.{i}.name") for i in range(len(held_out))]
    if held_out:
        labelled = [{**s, "source": str(name)} if name else s for s, name in zip(held_out, names, strict=True)]
        found["tasks.eval"] = labelled[0] if len(labelled) == 1 else labelled
    kind = str(given.get(f"{where}.default_workflow_type") or given.get(f"{INPUT}.default_workflow_type") or "")
    function = str(given.get(f"{where}.default_reward_fn_type") or given.get(f"{INPUT}.default_reward_fn_type") or "")
    workflow, reward = WORKFLOWS.get(kind, (None, {}))
    if workflow:
        found["workflow"] = workflow
    rank = given.read("algorithm.advantage_fn_args.rank_penalty", number, 0.0)
    penalties = [*([{"use": "rank_penalty", "coef": rank}] if rank else []), *_overlong(given, where)]
    if penalties:
        found["algorithm.shaping"] = [*penalties, *kl(given)["algorithm.shaping"]]
    if any(str(given.get(f"algorithm.{key}")) == "sppo" for key in ("algorithm_type", "policy_loss_fn")):
        found[NOTES] = (*found[NOTES], f"algorithm.policy_loss: {ZOO}")
    if chosen := REWARDS.get(function) or reward:
        return {**found, "reward": dict(chosen)}
    guessed = {} if learns_offline(given) else likely_reward(given.get(f"{where}.path"), given.get(f"{where}.name"))
    return {**found, **guessed, NOTES: (*found.get(NOTES, ()), *guessed.get(NOTES, ()))}


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
