"""Adapters, mixtures of experts and DeepSpeed settings of TRL."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rlsdk.migration.rules import Given, KeyOutcome
from rlsdk.migration.shared.learner import OFFLOAD_ALL, OFFLOAD_OPTIMIZER
from rlsdk.migration.values import UnfitError, flag, number, texts

DEEPSPEED = "deepspeed_file"
"""Section with the contents of the file that `deepspeed` names."""
_OF_EXPERTS = re.compile(r"-A\d+(\.\d+)?B\b|moe|mixtral|gpt-oss", re.IGNORECASE)
"""Parts of the names of published mixtures of experts."""
ROUTER_LOSS = 0.001
"""TRL's default of `router_aux_loss_coef`."""


def has_experts(given: Given) -> bool | None:
    """Return whether the model is a mixture of experts, by its config.json or its name; None if neither tells."""
    if given.read("model_init_kwargs.output_router_logits", flag, False):
        return True
    keys = ("model_name_or_path", "model", "model.argument_1", "model.pretrained_model_name_or_path")
    name = next((value for key in keys if isinstance(value := given.get(key), str)), "")
    try:
        config = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True if _OF_EXPERTS.search(name) else None
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    return any(part.get(count) for part in (config, config.get("text_config") or {}) for count in counts)


def balance(value: float, given: Given) -> dict[str, Any] | KeyOutcome:
    experts = has_experts(given)
    if experts:
        return {"learner.router_loss_coef": value}
    if experts is False:
        return KeyOutcome.ignored("the model is not a mixture of experts")
    return KeyOutcome.missing(
        "learner.router_loss_coef, if the model is a mixture of experts; TRL ignores it for others"
    )


def peft(value: bool, given: Given) -> dict[str, Any]:
    if not value:
        return {}
    targets = given.read("lora_target_modules", layers)
    usual = (8, 8.0) if given.get("peft_config.class") == "LoraConfig" else (16, 32.0)  # of peft; of TRL's own flags
    rank, alpha = given.whole("lora_r", usual[0]), given.read("lora_alpha", number, usual[1])
    if given.read("use_rslora", flag, False):  # whose scale is alpha / sqrt(rank)
        alpha *= rank**0.5
    named = {"targets": targets} if targets and targets != ["all-linear"] else {}
    return {"learner.lora": {"rank": rank, "alpha": alpha, **named}}


def dropout(value: float, given: Given) -> KeyOutcome:
    adapted = given.read("use_peft", flag, False) or given.get("peft_config.class") == "LoraConfig"
    if value and adapted:
        return KeyOutcome.missing("adapters have no dropout: engine and learner must agree")
    return KeyOutcome.ignored("off, as always in rlsdk" if adapted else "use_peft is off")


def of_adapters(given: Given) -> tuple[str, ...]:
    """Return notes on what TRL's adapters have that is not in the configuration."""
    ours = given.read("use_peft", flag, False)
    notes: tuple[str, ...] = ()
    if ours and "lora_dropout" not in given.flat:
        notes += ("learner.lora: adapters have no dropout; TRL's have 0.05 unless lora_dropout is set",)
    if (ours or given.get("peft_config.class") == "LoraConfig") and "lora_target_modules" not in given.flat:
        notes += (
            "learner.lora: all linear layers are adapted; peft's own choice for many models is q_proj and v_proj: set "
            "targets",
        )
    return notes


def layers(value: Any) -> list[str]:
    """Read names of layers; peft also takes a regular expression."""
    found = texts(value)
    if strange := next((each for each in found if re.search(r"[*()|\\^$+?]", each)), None):
        raise UnfitError(f"{strange!r} is a regular expression; name the layers")
    return found


def offload(value: str, given: Given) -> dict[str, Any]:
    if value != "cpu":
        return {}
    everything = str(given.get(f"{DEEPSPEED}.zero_optimization.offload_param.device")) == "cpu"
    return OFFLOAD_ALL if everything else OFFLOAD_OPTIMIZER
