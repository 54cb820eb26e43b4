"""Advantages, losses and KL of OpenRLHF."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migration.openrlhf.sizes import token_limits
from rlsdk.migration.rules import Given, KeyOutcome
from rlsdk.migration.shared.algorithm import kl_penalty, overlong
from rlsdk.migration.values import UnfitError, choice, flag, number, numbers, two

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
