"""Names of the fields of a batch in veRL, TRL, slime and OpenRLHF."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

FRAMEWORKS = ("verl", "trl", "slime", "openrlhf")
NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "prompt_ids": {"verl": ("prompts",), "trl": ("prompt_ids",)},
    "prompt_mask": {"trl": ("prompt_mask",)},
    "response_ids": {"verl": ("responses",), "trl": ("completion_ids",)},
    "sequences": {"verl": ("input_ids",), "slime": ("tokens",), "openrlhf": ("sequences",)},
    "attention_mask": {"verl": ("attention_mask",), "openrlhf": ("attention_mask",)},
    "response_lengths": {"slime": ("response_lengths", "response_length")},
    "response_mask": {
        "verl": ("response_mask", "loss_mask"),
        "trl": ("completion_mask",),
        "slime": ("loss_masks", "loss_mask"),
        "openrlhf": ("action_mask",),
    },
    "tool_mask": {"trl": ("tool_mask",)},
    "behaviour_logprobs": {
        "verl": ("rollout_log_probs",),
        "trl": ("sampling_per_token_logps",),
        "slime": ("rollout_log_probs",),
        "openrlhf": ("rollout_log_probs",),
    },
    "old_logprobs": {
        "verl": ("old_log_probs", "old_log_prob"),
        "trl": ("old_per_token_logps",),
        "slime": ("log_probs", "old_log_probs"),
        "openrlhf": ("action_log_probs", "old_action_log_probs"),
    },
    "logprobs": {
        "verl": ("log_probs", "log_prob"),
        "trl": ("per_token_logps",),
        "slime": ("current_log_probs",),
        "openrlhf": ("current_action_log_probs",),
    },
    "ref_logprobs": {
        "verl": ("ref_log_prob", "ref_log_probs"),
        "trl": ("ref_per_token_logps",),
        "slime": ("ref_log_probs",),
        "openrlhf": ("base_action_log_probs",),
    },
    "scores": {
        "verl": ("token_level_scores", "rm_scores", "score"),
        "trl": ("rewards", "reward"),
        "slime": ("raw_reward", "reward"),
        "openrlhf": ("reward",),
    },
    "rewards": {"verl": ("token_level_rewards",), "slime": ("rewards",), "openrlhf": ("rewards",)},
    "values": {"verl": ("values",), "slime": ("values",), "openrlhf": ("values",)},
    "advantages": {
        "verl": ("advantages",),
        "trl": ("advantages", "advantage"),
        "slime": ("advantages",),
        "openrlhf": ("advantages",),
    },
    "ratios": {
        "verl": ("ratio",),
        "trl": ("coef_1", "ratio"),
        "slime": ("ratio",),
        "openrlhf": ("ratio",),
    },
    "losses": {
        "verl": ("pg_losses", "per_token_loss"),
        "trl": ("per_token_loss",),
        "slime": ("pg_loss_per_token", "per_token_loss"),
        "openrlhf": ("per_token_loss",),
    },
    "loss": {
        "verl": ("loss", "pg_loss", "actor/pg_loss"),
        "trl": ("loss",),
        "slime": ("loss", "pg_loss", "train/pg_loss"),
        "openrlhf": ("loss", "policy_loss", "actor_loss"),
    },
    "gradient": {
        "verl": ("grad_log_prob", "log_prob_grad"),
        "trl": ("per_token_logps_grad",),
        "slime": ("log_probs_grad",),
        "openrlhf": ("action_log_probs_grad",),
    },
    "gradient_norm": {
        "verl": ("grad_norm", "actor/grad_norm"),
        "trl": ("grad_norm",),
        "slime": ("grad_norm", "train/grad_norm"),
        "openrlhf": ("grad_norm", "actor_grad_norm"),
    },
    "groups": {"verl": ("uid",), "trl": ("group",), "slime": ("group_index",), "openrlhf": ("group",)},
    "prompts": {"verl": ("input",), "trl": ("prompt",), "slime": ("prompt",), "openrlhf": ("prompts", "prompt")},
    "texts": {"verl": ("output",), "trl": ("completion",), "slime": ("response",), "openrlhf": ("responses",)},
}
"""rlsdk's field -> trainer -> its names, preferred one first."""
IGNORED = frozenset({"step", "mode", "index", "rollout_id", "rank", "num_items_in_batch", "total_lengths", "truncated"})
"""Names of numeric columns that are not rewards."""


@attrs.frozen(eq=False)
class Recognised:
    """The recognised fields of a file.

    Attributes:
        framework: The trainer whose names were found.
        names: rlsdk's field -> the name in the file.
        values: rlsdk's field -> content in the file.
        others: Unknown fields.
    """

    framework: str
    names: Mapping[str, str]
    values: Mapping[str, Any]
    others: Mapping[str, Any]


def recognise(columns: Mapping[str, Any], framework: str | None = None) -> Recognised:
    """Recognise the trainer that wrote a batch by its field names, and map them to rlsdk's names.

    Args:
        columns: Fields of the file.
        framework: The trainer, if known; None for the first one with the most matching names.
    """
    found = {each: _named(columns, each) for each in FRAMEWORKS}
    chosen = framework or max(FRAMEWORKS, key=lambda each: (len(found[each]), _distinct(found, each)))
    names = found[chosen]
    known = set(names.values())
    return Recognised(
        chosen,
        names,
        {field: columns[name] for field, name in names.items()},
        {name: value for name, value in columns.items() if name not in known},
    )


def _named(columns: Mapping[str, Any], framework: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for field, by_framework in NAMES.items():
        name = next((n for n in by_framework.get(framework, ()) if n in columns and n not in found.values()), None)
        if name is not None:
            found[field] = name
    return found


def _distinct(found: Mapping[str, Mapping[str, str]], framework: str) -> int:
    """Count names that no other trainer uses."""
    others = {name for each, names in found.items() if each != framework for name in names.values()}
    return sum(name not in others for name in found[framework].values())
