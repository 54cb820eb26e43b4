"""Tasks, rewards and engines of OpenRLHF."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migration.openrlhf.algorithm import after_the_group
from rlsdk.migration.openrlhf.sizes import learner_gpus, token_limits
from rlsdk.migration.rules import NOTES, Given, KeyOutcome
from rlsdk.migration.shared.engines import layout
from rlsdk.migration.shared.tasks import dataset, likely_reward
from rlsdk.migration.values import flag, number, text, texts

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


def finish(given: Given) -> dict[str, Any]:
    prompts, response, length = token_limits(given)
    found: dict[str, Any] = {
        "model.max_length": length,
        "max_prompt_tokens": prompts,
        "sampling.max_tokens": min(response, length),
    }
    reward_model = given.get("reward.model_name_or_path")
    valued = str(given.get("algo.advantage.estimator")) == "gae"
    if valued and reward_model and not given.get("critic.model_name_or_path") and not given.get("reward.remote_url"):
        found["model.critic"] = str(reward_model).split(",")[0]  # where OpenRLHF's critic starts without another
    prompt, label = given.get("data.input_key", "input"), given.get("data.label_key")
    columns = {"prompt": str(prompt), **({"answer": str(label)} if label else {})}
    chat = {"chat": True} if given.read("data.apply_chat_template", flag, False) else {}
    for key, split, to in (("data.prompt_dataset", "data.prompt_split", "tasks.train"),
                           ("eval.dataset", "eval.split", "tasks.eval")):  # fmt: skip
        if given.get(key) is not None:
            names = [each.strip() for name in given.read(key, texts, []) for each in name.split(",") if each.strip()]
            if names:
                found[to] = _data(names, str(given.get(split, "train")), columns, chat, given)
    found |= _reward(given)
    if isinstance(sources := found.get("tasks.train"), list) and "data.prompt_probs" not in given.flat:
        found[NOTES] = (
            *found.get(NOTES, ()),
            f"tasks.train: {len(sources)} sources share each batch equally; OpenRLHF mixes them by size: set their "
            "weights",
        )
    if 0 < (rows := given.whole("data.max_samples", 0)) < 10**8 and given.read("actor.lr_warmup_ratio", number, 0.03):
        note = f"learner.warmup_steps: a share of the steps with {rows} tasks (max_samples)"
        note += "; set less if the data has fewer"
        found[NOTES] = (*found.get(NOTES, ()), note)
    if notes := after_the_group(given):
        found[NOTES] = (*found.get(NOTES, ()), *notes)
    if given.get("vllm.num_engines") is None:
        found |= layout(learner_gpus(given), given.whole("vllm.tensor_parallel_size"))
    return found
