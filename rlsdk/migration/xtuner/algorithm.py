"""Advantages, losses and KL of XTuner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migration.rules import Given, KeyOutcome
from rlsdk.migration.shared.choices import KL
from rlsdk.migration.values import UnfitError, number, two
from rlsdk.migration.xtuner.sizes import LOSS

ADVANTAGES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "GRPOAdvantageConfig": ("grpo", {"use": "grpo", "std_normalize": True}),
    "DrGRPOAdvantageConfig": ("dr_grpo", {"use": "grpo", "std_normalize": False}),
    "RLOOAdvantageConfig": ("rloo", {"use": "rloo"}),
    "OPOAdvantageConfig": ("opo", {"use": "opo"}),
    "PassKAdvantageConfig": ("grpo", {"use": "pass_at_k"}),
}


def advantage(name: str, given: Given) -> KeyOutcome:
    algorithm, advantage = ADVANTAGES[name]
    note = "XTuner deviates from the paper; rlsdk follows the paper" if name == "DrGRPOAdvantageConfig" else ""
    values = {"algorithm.use": algorithm, "algorithm.advantage": dict(advantage), "algorithm.shaping": []}
    return KeyOutcome(values, note)


def loss(kind: str, given: Given) -> dict[str, Any]:
    cap = given.read(f"{LOSS}.policy_loss_cfg.clip_ratio_c", number, 3.0)
    bounds = {
        f"clip_{end}": given.read(f"{LOSS}.policy_loss_cfg.cliprange_{end}", number, 0.2) for end in ("low", "high")
    }
    return {"algorithm.policy_loss": {"use": "ppo", **bounds, "dual_clip": cap}, "algorithm.aggregate": "token-mean"}


def kl(value: bool, given: Given) -> dict[str, Any]:
    if not value:
        return {"algorithm.kl_coef": 0.0}
    estimator = given.read(f"{LOSS}.kl_loss_type", KL, "low_var")
    return {"algorithm.kl_coef": given.read(f"{LOSS}.kl_loss_coef", number, 0.001), "algorithm.kl": estimator}


def importance(value: Any, given: Given) -> KeyOutcome:
    """Convert the weights of the mismatch; XTuner gives the upper bound first."""
    where = f"{LOSS}.rollout_is.rollout_is"
    mode = str(given.get(f"{where}_mode", "truncate"))
    level = str(given.get(f"{where}_level", "token"))
    cap = max(two(value))
    low, high = sorted(given.read(f"{where}_mask_threshold", two, two(value)))
    if mode == "truncate" and level in ("token", "sequence"):
        return KeyOutcome({"algorithm.correction": {"use": "tis", "cap": cap, "level": level}})
    masks = mode == "mask" or (mode == "both" and high <= cap)
    if masks and level in ("token", "sequence"):
        found = {"use": "mis", "low": low, "high": high, "level": level}
        return KeyOutcome({"algorithm.correction": found})
    if masks and level == "geometric":
        found = {"use": "geometric", "low": low, "high": high}
        return KeyOutcome({"algorithm.correction": found}, "the mask of answers; those kept weigh 1")
    if mode == "both" and level in ("token", "sequence"):
        both = [{"use": "tis", "cap": cap, "level": level}, {"use": f"{level}_mask", "low": low, "high": high}]
        return KeyOutcome({"algorithm.correction": both})
    raise UnfitError("no correction is this weight with this mask; see rlsdk plugins correction")
