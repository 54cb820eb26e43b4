"""Corrections of veRL for the mismatch between engine and learner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migration.rows import changed, missing, only_with, part, same, table, under, unless
from rlsdk.migration.rules import Given, KeyOutcome
from rlsdk.migration.shared.learner import ZOO
from rlsdk.migration.values import Choice, UnfitError, choice, flag, listed, number, text
from rlsdk.migration.verl.algorithm import ACTOR, DPPO, policy_loss

CORRECTION = "algorithm.rollout_correction"
REJECTIONS: Mapping[str, tuple[str, str]] = {
    "token_k1": ("token_mask", "k1"),
    "seq_sum_k1": ("sequence_mask", "k1"),
    "seq_mean_k1": ("geometric", "k1"),
    **{f"token_k{i}": ("token", f"k{i}") for i in (2, 3)},
    **{f"seq_{level}_k{i}": (level, f"k{i}") for level in ("sum", "mean", "max") for i in (2, 3)},
    "token": ("token_mask", ""),
    "sequence": ("sequence_mask", ""),
    "geometric": ("geometric", ""),
}
"""`rollout_rs` -> the correction, or the level of divergence_mask, and the estimator.

The older names have bounds on the ratio.
"""


def _correction(level: str, given: Given) -> KeyOutcome:
    if str(given.get(f"{ACTOR}.policy_loss.loss_mode")) in DPPO:
        return KeyOutcome.ignored("the loss zoo/dppo takes the ratio to the sampler itself")
    if (taken := _ratio_taken(given)) is not None:
        return KeyOutcome.ignored(f"with {taken}, the ratio of the loss is that to the engine's policy")
    *low, high = given.read(f"{CORRECTION}.rollout_is_threshold", _bounds, [2.0])
    found = {"use": "mis", "low": low[0], "high": high} if low else {"use": "tis", "cap": high}
    both = _masked(level, given) or _one_or_several([{**found, "level": level}, *_rejections(given)])
    return KeyOutcome({"algorithm.correction": both})


def _ratio_taken(given: Given) -> str | None:
    """Return the setting with which the loss takes the ratio to the engine's policy itself; None if there is none."""
    if given.read(f"{CORRECTION}.bypass_mode", flag, False):
        return "bypass_mode"
    rollout = sampled_first(given.read("async_training.use_rollout_log_probs", flag, False), given).values
    return "use_rollout_log_probs" if rollout else None


def _rejections(given: Given) -> list[dict[str, Any]]:
    """Return the corrections that veRL's rejections are, whose bounds of k1 are on the inverse ratio."""
    options = list(dict.fromkeys(each.lower() for each in given.read(f"{CORRECTION}.rollout_rs", _listed, [])))
    bounds = given.read(f"{CORRECTION}.rollout_rs_threshold", _thresholds, [])
    bounds = bounds * len(options) if len(bounds) == 1 else bounds
    if len(bounds) != len(options) or not REJECTIONS.keys() >= set(options):
        return []
    return [_rejection(*REJECTIONS[option], each) for option, each in zip(options, bounds, strict=True)]


def _rejection(level: str, estimator: str, bounds: list[float]) -> dict[str, Any]:
    if estimator in ("k2", "k3"):
        return {"use": "divergence_mask", "estimator": estimator, "level": level, "threshold": bounds[-1]}
    low = bounds[0] if len(bounds) == 2 else 1 / bounds[0]
    low, high = (1 / bounds[-1], 1 / low) if estimator == "k1" else (low, bounds[-1])
    return {"use": level, "low": float(f"{low:.6g}"), "high": float(f"{high:.6g}")}


def _masked(level: str, given: Given) -> dict[str, Any] | None:
    """Return the correction that masks and weighs at this level, if veRL does both with bounds below the cap."""
    found, cap = _rejections(given), given.read(f"{CORRECTION}.rollout_is_threshold", _bounds, [2.0])
    if len(found) != 1 or len(cap) != 1 or found[0]["use"] != f"{level}_mask" or found[0]["high"] > cap[0]:
        return None
    return {**found[0], "use": "mis", "level": level}


def _rejected(options: list[str], given: Given) -> KeyOutcome:
    """Rejection sampling, alone or after the weights of `rollout_is`."""
    for option in options:
        Choice(REJECTIONS, "the rejection")(option)
    found, note = _rejections(given), "rejected tokens still count in the denominators"
    if not found:
        return KeyOutcome.missing("set rollout_rs_threshold: one for all of rollout_rs, or one for each")
    if given.read(f"{CORRECTION}.bypass_mode", flag, False):  # veRL then compares the policy in each optimiser step
        policy = _one_or_several([_of_policy(**each) for each in found])
        return KeyOutcome({"algorithm.correction": policy}, f"{note}; zoo/rejection is {ZOO}")
    if (taken := _ratio_taken(given)) is not None:
        return KeyOutcome.missing(f"with {taken}, a correction would see a ratio of 1: set old_logprobs=learner")
    weighed = given.get(f"{CORRECTION}.rollout_is") and str(given.get(f"{ACTOR}.policy_loss.loss_mode")) not in DPPO
    return KeyOutcome({} if weighed else {"algorithm.correction": _one_or_several(found)}, note)


def _of_policy(use: str, **options: Any) -> dict[str, Any]:
    """Return the correction that compares the policy being trained, in place of one that compares the old policy."""
    if use == "divergence_mask":
        compared = {"measure": options["estimator"], "level": options["level"], "high": options["threshold"]}
    else:
        level = {"token_mask": "token", "sequence_mask": "sum", "geometric": "mean"}[use]
        compared = {"measure": "ratio", "level": level, **options}
    return {"use": "zoo/rejection", **compared}


def _one_or_several(found: list[dict[str, Any]]) -> Any:
    return found if len(found) > 1 else found[0]


def _older_correction(wanted: bool, given: Given) -> KeyOutcome:
    """The correction of veRL 0.6.0, whose threshold turns it on, too."""
    high = given.read("algorithm.rollout_is_threshold", number)
    if not wanted or high is None:
        return KeyOutcome.ignored("off")
    level = str(given.get("algorithm.rollout_is_level", "token"))
    masks = str(given.get("algorithm.rollout_is_mode", "truncate")) == "mask"
    bounds = {
        "low": given.read("algorithm.rollout_is_threshold_lower", number, 1 / high if high else 0.0),
        "high": high,
    }
    found = {
        ("token", False): {"use": "tis", "cap": high, "level": "token"},
        ("sequence", False): {"use": "tis", "cap": high, "level": "sequence"},
        ("token", True): {"use": "mis", **bounds, "level": "token"},
        ("sequence", True): {"use": "mis", **bounds, "level": "sequence"},
        ("geometric", True): {"use": "geometric", **bounds},
    }.get((level, masks))
    if found is None:
        raise UnfitError(f"no correction has level {level} without a mask")
    return KeyOutcome({"algorithm.correction": found})


def _bypass(wanted: bool, given: Given) -> KeyOutcome:
    """The engine's logprobs in place of old ones; veRL then replaces the loss by PPO's or REINFORCE's."""
    if not wanted:
        return KeyOutcome.ignored("off")
    values: dict[str, Any] = {"old_logprobs": "rollout"}
    level = str(given.get(f"{CORRECTION}.rollout_is"))
    if str(given.get(f"{CORRECTION}.loss_type")) != "reinforce":
        return KeyOutcome({**values, **policy_loss("vanilla", given).values}, "veRL takes PPO's loss with it")
    if level == "token":
        cap = given.read(f"{CORRECTION}.rollout_is_threshold", _bounds, [2.0])[-1]
        return KeyOutcome({**values, "algorithm.policy_loss": {"use": "tis", "cap": cap}})
    values["algorithm.policy_loss"] = {"use": "reinforce"}
    if level == "sequence":
        return KeyOutcome(values, "no loss weighs REINFORCE by whole answers: rollout_is: token, or topr", "missing")
    return KeyOutcome(values)


def sampled_first(value: bool, given: Given) -> KeyOutcome:
    """Convert the switch of the asynchronous trainer that takes the engine's logprobs as old ones."""
    if not value or given.read("async_training.compute_prox_log_prob", flag, False):
        return KeyOutcome.ignored("old logprobs are computed by the learner, the default")
    return KeyOutcome({"old_logprobs": "rollout"})


def _bounds(value: Any) -> list[float]:
    """Read a bound, or two in the form `low_high`."""
    found = [number(each) for each in str(value).split("_")]
    if len(found) > 2 or min(found) <= 0:
        raise UnfitError(f"expected a number above 0, or two as in '0.5_2.0', got {value!r}")
    return found


def _listed(value: Any) -> list[str]:
    """Read names separated by commas, or numbers, of which one may stand alone."""
    return listed(value if isinstance(value, list | tuple) else str(value))


def _thresholds(value: Any) -> list[list[float]]:
    return [_bounds(each) for each in _listed(value)]


ROWS = table(
    under(CORRECTION,
        same("rollout_is", "algorithm.correction", choice(("token", "sequence"), "rollout_is"), "token", _correction),
        part("rollout_is_threshold", "algorithm.correction algorithm.policy_loss.cap", _bounds, 2.0),
        changed("rollout_rs", "algorithm.correction", _listed, "token_k1", "a correction", _rejected),
        part("rollout_rs_threshold", "algorithm.correction", _thresholds, "0.5_2.0"),
        changed("bypass_mode", "old_logprobs algorithm.policy_loss", flag, True,
            "the engine's logprobs replace the old ones", _bypass),
        part("loss_type", "algorithm.policy_loss", text, "ppo_clip"),
        unless("rollout_is_batch_normalize", (False,), "weights are not normalised; see correction: tis", True)),
    same("algorithm.rollout_is", "algorithm.correction", flag, True, _older_correction),
    part("algorithm.rollout_is_threshold", "algorithm.correction", number, 2.0),
    part("algorithm.rollout_is_threshold_lower", "algorithm.correction", number, 0.5),
    part("algorithm.rollout_is_level", "algorithm.correction", text, "token"),
    part("algorithm.rollout_is_mode", "algorithm.correction", text, "mask"),
    only_with("algorithm.rollout_is", "algorithm.rollout_is_veto_threshold",
        "a single outlier does not mask an answer; see correction: geometric", 1e-4),
    same(f"{ACTOR}.tis_imp_ratio_cap", "algorithm.correction", number, 2.0,
        lambda v, given: {"algorithm.correction": {"use": "tis", "cap": v}} if v > 0 else {}),
    missing("algorithm.rollout_correction.**", "see rlsdk plugins correction"),
)  # fmt: skip
