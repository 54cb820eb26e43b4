"""Conversions of OpenRLHF's settings that take more than a row of its table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migration.rules import NOTES, Given, KeyOutcome
from rlsdk.migration.shared.engines import layout
from rlsdk.migration.shared.learner import critic_warmup, kl_penalty, minibatches, overlong, share_of_steps
from rlsdk.migration.shared.tasks import dataset, likely_reward
from rlsdk.migration.values import UnfitError, choice, flag, number, numbers, text, texts, two

FROM_ZERO = "OpenRLHF counts steps from 0: its actor is frozen for one step more than it says"


def learner_gpus(given: Given) -> int:
    return given.whole("actor.num_nodes") * given.whole("actor.num_gpus_per_node", 8)


def token_limits(given: Given) -> tuple[int, int, int]:
    """Maximum tokens of a prompt, of a response, and of both; versions up to 0.9 had limits for each part."""
    total = given.whole("data.max_len", 2048)
    response = given.whole("rollout.max_new_tokens", 0)
    if "data.prompt_max_len" in given.flat or ("data.max_len" not in given.flat and response >= total):
        prompt = given.whole("data.prompt_max_len", 1024)
        return prompt, response or 1024, prompt + (response or 1024)
    return max(1, total - (response or 1)), response or max(1, total - 1), total


def updates_per_step(given: Given) -> int:
    rollouts = given.whole("rollout.batch_size", 1024) * given.whole("rollout.n_samples_per_prompt")
    return minibatches(rollouts, given.whole("train.batch_size", 128))


def micro_batch(value: int, given: Given) -> KeyOutcome:
    if given.read("train.dynamic_batch_enable", flag, False):
        return KeyOutcome.ignored("train.max_tokens_per_gpu takes precedence")
    return KeyOutcome(
        {"learner.micro_batch_tokens": value * token_limits(given)[2]},
        "rlsdk counts tokens, padding included: sequences × data.max_len",
    )


def micro_batch_tokens(value: int, given: Given) -> KeyOutcome:
    if not given.read("train.dynamic_batch_enable", flag, False):
        return KeyOutcome.ignored("train.dynamic_batch_enable is off")
    return KeyOutcome({"learner.micro_batch_tokens": value}, "includes padding, which OpenRLHF does not count")


def mini_batch(value: int, given: Given) -> KeyOutcome:
    return KeyOutcome(
        {"minibatches": updates_per_step(given)},
        "rlsdk counts optimiser steps per batch, OpenRLHF the rollouts in each",
    )


def warmup(value: float, given: Given) -> KeyOutcome:
    if value == 0:
        return share_of_steps(None, 0.0)
    samples = given.whole("data.max_samples", 0)
    batch = given.whole("rollout.batch_size", 1024)
    known = 0 < samples < 10**8
    steps = samples // batch * given.whole("train.num_episodes") * updates_per_step(given) if known else None
    return share_of_steps(steps, value)


def freezing(value: int, given: Given) -> KeyOutcome | Mapping[str, Any]:
    """OpenRLHF has counted from 0 since 0.9.1, and from 1 before; its flag has had a new name since 0.10.2."""
    older = "critic.freezing_steps" in given.written
    more, note = (0, "OpenRLHF 0.9.1 to 0.10.1 froze the actor for one step more: add 1") if older else (1, FROM_ZERO)
    return critic_warmup("algo.advantage.estimator", "gae", more, note)(value, given)


def most_rows(value: int, given: Given) -> KeyOutcome:
    if value >= 10**8:
        return KeyOutcome.ignored("all of the data")
    return KeyOutcome.missing(
        f"if the data has more rows: split 'train[:{value}]' of the source hub, or a shorter file"
    )


def generated_at_once(value: int, given: Given) -> KeyOutcome:
    batch = given.whole("rollout.batch_size", 1024)
    if value == batch:
        return KeyOutcome.ignored("as many as a batch")
    if value < batch:
        return KeyOutcome.missing(f"OpenRLHF then trains on {value} tasks at a time: set batch_size")
    return KeyOutcome({"rollout.oversample": value / batch - 1}, "the share above a batch")


ESTIMATORS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gae": ("ppo", {"use": "gae"}),
    "reinforce": ("reinforce_plus_plus", {"use": "reinforce_plus_plus"}),
    "reinforce_baseline": ("reinforce_plus_plus_baseline", {"use": "reinforce_plus_plus_baseline"}),
    "rloo": ("rloo", {"use": "rloo"}),
    "group_norm": ("grpo", {"use": "grpo", "std_normalize": True}),
    "dr_grpo": ("dr_grpo", {"use": "grpo", "std_normalize": False}),
}
"""Estimator -> the algorithm whose other parts are replaced, and the advantage."""
KL = {"k1": "k1", "k2": "k2", "k3": "k3"}
CORRECTIONS = ("tis", "icepop", "seq-mask-tis")


def estimator(name: str, given: Given) -> dict[str, Any]:
    algorithm, advantage = ESTIMATORS[name]
    options = dict(advantage)
    if name in ("gae", "reinforce"):
        options["gamma"] = given.read("algo.advantage.gamma", number, 1.0)
    if name == "gae":
        options["lam"] = given.read("algo.advantage.lambd", number, 1.0)
    if name == "reinforce_baseline" and given.read("algo.advantage.no_std_norm", flag, False):
        options = {"use": "grpo", "std_normalize": False}
    return {
        "algorithm.use": algorithm,
        "algorithm.advantage": options,
        "algorithm.critic": name == "gae",
        "algorithm.value_clip": given.read("critic.value_clip", number, 0.5) if name == "gae" else None,
        "algorithm.aggregate": "token-mean",
        **_kl(given),
        "algorithm.shaping": _shaping(given),
    }


def _kl(given: Given) -> dict[str, Any]:
    coefficient = given.read("algo.kl.init_coef", number, 0.01)
    if not given.read("algo.kl.use_loss", flag, False) or coefficient == 0:
        return {"algorithm.kl_coef": 0.0}
    return {"algorithm.kl_coef": coefficient, "algorithm.kl": str(given.get("algo.kl.estimator", "k1"))}


def _shaping(given: Given) -> list[dict[str, Any]]:
    bounds = given.read("reward.clip_range", two, [-10.0, 10.0])
    found: list[dict[str, Any]] = []
    if given.read("reward.normalize_enable", flag, False):
        found.append({"use": "reward_norm", "by": "batch", "method": "mean_std"})
    if buffer := given.whole("reward.overlong_buffer_len", 0):
        penalty = given.read("reward.overlong_penalty_factor", number, 1.0)
        _, response, total = token_limits(given)
        limit = response if "rollout.max_new_tokens" in given.flat or "data.prompt_max_len" in given.flat else total
        found += overlong(limit, buffer, penalty)
    found.append({"use": "reward_clip", "low": bounds[0], "high": bounds[1]})
    if given.read("algo.kl.use_loss", flag, False):
        return found
    coefficient, target = given.read("algo.kl.init_coef", number, 0.01), given.read("algo.kl.target", number)
    estimator = str(given.get("algo.kl.estimator", "k1"))
    return [*found, *kl_penalty(coefficient, estimator, target, given.whole("algo.kl.horizon", 10000))]


def after_the_group(given: Given) -> tuple[str, ...]:
    """Return a note on what OpenRLHF applies to rewards after it has compared those of a group, and rlsdk before."""
    name = str(given.get("algo.advantage.estimator"))
    parts = ["reward_clip"] if "reward.clip_range" in given.flat else []
    parts += ["kl_penalty"] if any(part["use"] == "kl_penalty" for part in _shaping(given)) else []
    if name in ("gae", "reinforce") or not parts:
        return ()
    return (
        f"algorithm.shaping: {' and '.join(parts)} apply before rewards are compared within their group; with {name}, "
        "OpenRLHF applies them to the result of this comparison",
    )


def loss(name: str, given: Given) -> dict[str, Any]:
    both = given.read("actor.eps_clip", number, 0.2)
    low, high = given.read("actor.eps_clip_low_high", two, [both, both])
    cap = given.read("actor.dual_clip", number)
    return {"algorithm.policy_loss": {"use": name, "clip_low": low, "clip_high": high, "dual_clip": cap}}


def correction(value: bool, given: Given) -> KeyOutcome:
    if not value:
        return KeyOutcome.ignored("off")
    if str(given.get("actor.policy_loss_type")) == "gspo":
        return KeyOutcome({"old_logprobs": "rollout"}, "the ratio of gspo is then that to the engine's policy")
    low, high = given.read("algo.advantage.is_correction_threshold", bounds, [0.5, 5.0])
    found, note = {
        "tis": ({"use": "tis", "cap": high}, "weights have no minimum" if low else ""),
        "icepop": ({"use": "icepop", "low": low, "high": high}, ""),
        "seq-mask-tis": (
            [{"use": "tis", "cap": high}, {"use": "geometric", "low": low, "high": high}],
            "the weights of tokens are truncated at the upper bound, unlike OpenRLHF's",
        ),
    }[given.read("algo.advantage.is_correction_type", choice(CORRECTIONS, "the correction"), "tis")]
    return KeyOutcome({"algorithm.correction": found}, note)


def bounds(value: Any) -> list[float]:
    """Read a minimum and a maximum; versions up to 0.8 had only the maximum."""
    found = [number(value)] if isinstance(value, int | float) else numbers(value)
    if len(found) not in (1, 2):
        raise UnfitError(f"expected one or two numbers, got {value!r}")
    return found if len(found) == 2 else [0.0, *found]


def no_std(value: bool, given: Given) -> KeyOutcome:
    name = str(given.get("algo.advantage.estimator"))
    if not value or name in ("group_norm", "dr_grpo", "rloo"):
        return KeyOutcome.ignored(f"no effect on {name}" if value else "off")
    if name == "reinforce_baseline":
        return KeyOutcome({}, "without the second subtraction, of the batch's mean")
    return KeyOutcome.missing("advantages are also divided by the standard deviation: write an advantage")


def filters(value: bool, given: Given) -> KeyOutcome:
    if not value:
        return KeyOutcome.ignored("off")
    low, high = given.read("algo.dynamic_filtering_range", two, [0.0, 1.0])
    values = {
        "algorithm.filters": [{"use": "pass_rate", "low": low, "high": high}],
        "rollout.dynamic_sampling": True,
    }
    return KeyOutcome(values, "uses the share of rollouts that pass; OpenRLHF uses the mean reward")


_PROJECT = "openrlhf_train_ppo"
"""OpenRLHF's default project of wandb."""


def vllm_engines(value: int, given: Given) -> dict[str, Any]:
    tensor = given.whole("vllm.tensor_parallel_size")
    return {
        **layout(learner_gpus(given), tensor),
        "placement.engines": max(1, value),
        "placement.gpus_per_engine": tensor,
        # With train.async_enable, engines have GPUs of their own whatever is colocated.
        "placement.colocate": given.read("train.colocate_all", flag, False)
        and not given.read("train.async_enable", flag, False),
        "engine.use": "vllm" if value else "transformers",
    }


def agent(value: Any, given: Given) -> KeyOutcome:
    return KeyOutcome.missing("write a workflow (howto/workflow.md), or workflow: {use: agent, agent: 'FILE.py:solve'}")


def lora(value: int, given: Given) -> dict[str, Any]:
    if not value:
        return {}
    targets = given.read("ds.lora.target_modules", texts, ["all-linear"])
    named = {} if targets == ["all-linear"] else {"targets": targets}
    return {"learner.lora": {"rank": value, "alpha": given.read("ds.lora.alpha", number, 16.0), **named}}


def _reward(given: Given) -> dict[str, Any]:
    remote = given.get("reward.remote_url")
    if isinstance(remote, str) and remote.endswith(".py"):
        return {"reward": {"use": "foreign", "path": f"{remote}:reward_func", "style": "openrlhf"}}
    if given.get("reward.model_name_or_path") is not None:
        return {"reward": {"use": "reward_model", "path": str(given.get("reward.model_name_or_path"))}}
    if remote is not None:
        return {NOTES: (f"reward: {remote} is a server: write a reward that calls it (howto/reward.md)",)}
    return likely_reward(given.get("data.prompt_dataset"))


def _data(
    names: list[str], split: str, columns: Mapping[str, str], chat: Mapping[str, Any], given: Given
) -> dict[str, Any] | list[dict[str, Any]]:
    """Return a source of all files, or one for each data set of the hub or each probability."""
    weights = given.read("data.prompt_probs", lambda value: [number(each) for each in text(value).split(",")], [])
    if len(weights) == len(names) > 1:
        return [{**dataset(each, split, columns, **chat), "weight": w} for each, w in zip(names, weights, strict=True)]
    if len(names) > 1 and any(dataset(each, split, columns)["use"] == "hub" for each in names):
        return [dataset(each, split, columns, **chat) for each in names]
    return dataset(names, split, columns, **chat)


def wandb(given: Given) -> dict[str, Any]:
    entity = given.read("logger.wandb.org", text)
    project = {"use": "wandb", "project": str(given.get("logger.wandb.project", _PROJECT))}
    return {**project, **({"entity": entity} if entity else {})}


def _lengths(given: Given) -> dict[str, Any]:
    prompts, response, length = token_limits(given)
    return {
        "model.max_length": length,
        "max_prompt_tokens": prompts,
        "sampling.max_tokens": min(response, length),
    }


def _critic(given: Given) -> dict[str, Any]:
    """Where OpenRLHF's critic starts without a model of its own: from the reward model."""
    reward_model = given.get("reward.model_name_or_path")
    valued = str(given.get("algo.advantage.estimator")) == "gae"
    if not (valued and reward_model) or given.get("critic.model_name_or_path") or given.get("reward.remote_url"):
        return {}
    return {"model.critic": str(reward_model).split(",")[0]}


def _tasks(given: Given) -> dict[str, Any]:
    prompt, label = given.get("data.input_key", "input"), given.get("data.label_key")
    columns = {"prompt": str(prompt), **({"answer": str(label)} if label else {})}
    chat = {"chat": True} if given.read("data.apply_chat_template", flag, False) else {}
    found: dict[str, Any] = {}
    for key, split, to in (("data.prompt_dataset", "data.prompt_split", "tasks.train"),
                           ("eval.dataset", "eval.split", "tasks.eval")):  # fmt: skip
        names = [each.strip() for name in given.read(key, texts, []) for each in name.split(",") if each.strip()]
        if names:
            found[to] = _data(names, str(given.get(split, "train")), columns, chat, given)
    return found


def _remarks(given: Given) -> dict[str, Any]:
    notes: tuple[str, ...] = ()
    if isinstance(sources := _tasks(given).get("tasks.train"), list) and "data.prompt_probs" not in given.flat:
        shared = f"{len(sources)} sources share each batch equally; OpenRLHF mixes them by size: set their weights"
        notes += (f"tasks.train: {shared}",)
    if 0 < (rows := given.whole("data.max_samples", 0)) < 10**8 and given.read("actor.lr_warmup_ratio", number, 0.03):
        share = f"a share of the steps with {rows} tasks (max_samples); set less if the data has fewer"
        notes += (f"learner.warmup_steps: {share}",)
    return {NOTES: notes + after_the_group(given)}


def _gpus(given: Given) -> dict[str, Any]:
    if given.get("vllm.num_engines") is not None:  # whose own row sets them
        return {}
    return layout(learner_gpus(given), given.whole("vllm.tensor_parallel_size"))


FINISH = (_lengths, _critic, _tasks, _reward, _remarks, _gpus)
