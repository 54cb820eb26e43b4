"""Advantages, losses and KL of Trinity-RFT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migration.rows import part
from rlsdk.migration.rules import Given, KeyOutcome, KeyRule
from rlsdk.migration.shared.learner import ZOO, kl_penalty
from rlsdk.migration.values import Choice, flag, number, whole

ALGORITHMS: Mapping[str, tuple[str, str, str]] = {
    "ppo": ("ppo", "ppo", "ppo"),
    "grpo": ("grpo", "grpo", "ppo"),
    "grpo_verl": ("grpo", "grpo", "ppo"),
    "dapo": ("dapo", "grpo", "ppo"),
    "gspo": ("gspo", "grpo", "gspo"),
    "cispo": ("cispo", "grpo", "cispo"),
    "sapo": ("sapo", "grpo", "sapo"),
    "reinforceplusplus": ("reinforce_plus_plus", "reinforceplusplus", "ppo"),
    "rloo": ("rloo", "rloo", "ppo"),
    "opmd": ("opmd", "opmd", "opmd"),
    "asymre": ("opmd", "asymre", "opmd"),
    "topr": ("topr", "reinforce", "topr"),
    "rec": ("grpo", "rec", "rec"),
    "sppo": ("opmd", "opmd", "sppo"),
    "multi_step_grpo": ("grpo", "step_wise_grpo", "ppo"),
    "gigpo": ("gigpo", "gigpo", "ppo"),
    "sft": ("sft", "", "sft"),
    "dpo": ("dpo", "", "dpo"),
    "mix": ("mix", "grpo", "mix"),
    "mix_chord": ("mix", "grpo", "mix_chord"),
    "on_policy_distill": ("opd", "on_policy_distill", "ppo"),
}
"""Algorithm -> rlsdk's, and Trinity's own default advantage and loss for it."""
WITHOUT_KL = ("asymre", "dapo", "on_policy_distill", "rec", "sppo")
"""Algorithms that have no KL unless it is given."""
ADVANTAGES: Mapping[str, Mapping[str, Any]] = {
    "ppo": {"use": "gae"},
    "grpo": {"use": "grpo"},
    "step_wise_grpo": {"use": "step_grpo"},
    "gigpo": {"use": "gigpo"},
    "rloo": {"use": "rloo"},
    "remax": {"use": "remax"},
    "reinforceplusplus": {"use": "reinforce_plus_plus"},
    "reinforce": {"use": "segment_returns"},
    "opmd": {"use": "opmd"},
    "asymre": {"use": "asymre"},
    "rec": {"use": "rec"},
    "on_policy_distill": {"use": "on_policy_distill"},
}
LOSSES: Mapping[str, Mapping[str, Any]] = {
    **{name: {"use": name} for name in ("ppo", "gspo", "cispo", "sapo", "topr", "opmd")},
    "importance_sampling": {"use": "tis"},
    "mix": {"use": "mix"},
    "mix_chord": {"use": "mix"},
    "rec": {"use": "reinforce"},
    "sppo": {"use": "zoo/sppo"},
}
OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(("clip_range", "clip_range_low"), "clip_low"),
    "clip_range_high": "clip_high",
    "clip_ratio_c": "dual_clip",
    "std_cal_level": "std_over",
    "opmd_baseline": "baseline",
    "baseline_shift": "shift",
    "kl_coef": "coef",
    **dict.fromkeys(("mu_peak", "mu_valley", "mu_decay_steps"), "mu"),
    "enable_step_norm": "divide_by_steps",
    "fnorm": "std_normalize",
}
"""Argument of an advantage or a loss -> the option, if it has another name."""
KL = Choice(
    {**dict.fromkeys(("k1", "k2", "k3"), ""), "low_var_kl": "", "abs": "", "corrected_k3": "", "none": ""}, "KL"
)
KL_HERE = {
    "k1": "k1",
    "k2": "k2",
    "k3": "k3",
    "low_var_kl": "low_var",
    "abs": "abs",
    "corrected_k3": "k3",
    "none": None,
}
OPERATORS = "data_processor.experience_pipeline.operators"


def algorithm(name: str, given: Given) -> dict[str, Any]:
    use, credit, objective = ALGORITHMS[name]
    # Trinity trains a critic with its PPO whatever the advantage; only GAE reads it.
    critic = given.flat.get("algorithm.advantage_fn", credit) == "ppo"
    values: dict[str, Any] = {"algorithm.use": use, "algorithm.critic": critic}
    if credit and "algorithm.advantage_fn" not in given.flat:
        values |= advantage(credit, given)
    if objective and name not in ("sft", "dpo") and "algorithm.policy_loss_fn" not in given.flat:
        values |= loss(objective, given)
    if name not in ("sft", "dpo"):
        values |= kl(given)
    if name == "on_policy_distill":
        values["algorithm.clip_advantages"] = None
    filters = _filters(given)
    if filters or name == "dapo":  # whose filters are operators in Trinity, and defaults in rlsdk
        values["algorithm.filters"] = filters
    if name == "dapo":
        values["rollout.dynamic_sampling"] = False
    if name == "dpo":
        options = {
            key: given.read(f"algorithm.policy_loss_fn_args.{key}", number) for key in ("beta", "label_smoothing")
        }
        values["algorithm.policy_loss"] = {"use": "dpo", **{k: v for k, v in options.items() if v is not None}}
        values["algorithm.rollouts"] = "demonstrations"
    return values


def _filters(given: Given) -> list[Any]:
    """Return the filters of groups, which are arguments of the advantage and operators on experiences."""
    found: list[Any] = []
    if (least := given.read("algorithm.advantage_fn_args.std_threshold", number)) is not None:
        found.append({"use": "min_std", "threshold": least})
    for index in range(64):
        name = given.get(f"{OPERATORS}.{index}.name")
        least = given.read(f"{OPERATORS}.{index}.args.threshold", number, 0.0)
        size = max(2, given.whole("algorithm.repeat_times"))
        made = {
            "reward_std_filter": {"use": "min_std", "threshold": least * (size / (size - 1)) ** 0.5},  # of n to n - 1
            "dapo_dynamic_sampling": "nonzero_variance",
            "mask_response_truncated": "truncated",
        }.get(str(name))
        found += [made] if made else []
    return found


def operator(value: str, given: Given) -> KeyOutcome:
    if value == "invalid_reward_filter":
        return KeyOutcome.ignored("rollouts without a score are dropped automatically")
    if value == "dapo_dynamic_sampling":
        return KeyOutcome({"rollout.dynamic_sampling": True}, "keeps groups whose rewards differ")
    notes = {"reward_std_filter": "drops groups", "mask_response_truncated": "drops truncated rollouts"}
    if value not in notes:
        return KeyOutcome.missing("algorithm.filters and algorithm.shaping, see rlsdk plugins")
    return KeyOutcome({}, notes[value])


def _arguments(given: Given, key: str) -> Mapping[str, Any]:
    return given.section(f"algorithm.{key}")


def advantage(name: str, given: Given) -> dict[str, Any]:
    arguments = _arguments(given, "advantage_fn_args")
    options: dict[str, Any] = {}
    if name == "ppo":
        options = {to: number(arguments.get(key, 1.0)) for to, key in (("gamma", "gamma"), ("lam", "lam"))}
    elif name == "opmd" and arguments.get("opmd_baseline") == "logavgexp":
        options = {"baseline": "logavgexp", "tau": number(arguments.get("tau", 1.0))}
    elif name == "grpo" and arguments.get("std_cal_level") == "batch":
        options = {"std_over": "batch"}
    elif name == "rec":
        options = {"std_normalize": flag(arguments.get("std_normalize") or False), "drop": arguments.get("drop")}
    elif name == "asymre":
        options = {"shift": number(arguments.get("baseline_shift", -0.1))}
    elif name == "step_wise_grpo":
        options = {"divide_by_steps": flag(arguments.get("enable_step_norm", False))}
    elif name == "gigpo":
        options = {key: number(arguments.get(key, 1.0)) for key in ("omega", "gamma")}
        options["std_normalize"] = str(arguments.get("fnorm")) == "std"
    elif name == "reinforceplusplus":
        options = {"gamma": number(arguments.get("gamma", 1.0))}
    elif name == "on_policy_distill":
        options = {"coef": number(arguments.get("kl_coef", 1.0))}
    return {"algorithm.advantage": {**ADVANTAGES[name], **options}}


def loss(name: str, given: Given) -> dict[str, Any]:
    arguments = _arguments(given, "policy_loss_fn_args")
    options: dict[str, Any] = {}
    if name in ("ppo", "gspo", "cispo", "mix", "mix_chord"):
        fallback = {"gspo": (3e-4, 4e-4), "cispo": (1.0, 0.28)}.get(name, (0.2, 0.2))
        both = arguments.get("clip_range")
        ends = (("clip_low", "clip_range_low"), ("clip_high", "clip_range_high"))
        for (to, key), usual in zip(ends, fallback, strict=True):
            value = arguments.get(key, both)
            options[to] = usual if value is None else number(value)
        if name != "cispo":
            options["dual_clip"] = None if name == "gspo" else number(arguments.get("clip_ratio_c", 3.0))
        if name == "mix":
            options["mu"] = number(arguments.get("mu", 0.1))
        elif name == "mix_chord":
            options["mu"] = _chord(arguments)
    elif name == "sapo":
        options = {"tau_pos": number(arguments.get("tau_pos", 1.0)), "tau_neg": number(arguments.get("tau_neg", 1.05))}
    elif name == "rec" and _clipped_rec(arguments):
        bounds = {f"clip_{end}": number(arguments.get(f"epsilon_{end}", 0.2)) for end in ("low", "high")}
        return {"algorithm.policy_loss": {"use": "ppo", **bounds, "dual_clip": None}}
    elif name == "opmd":
        options = {"tau": number(arguments.get("tau", 1.0))}
    elif name == "importance_sampling":
        options = {"cap": 1e6}
    elif name == "sppo":
        options = {"clip": number(arguments.get("epsilon", 0.3))}
    return {"algorithm.policy_loss": {**LOSSES[name], **options}}


def _clipped_rec(arguments: Mapping[str, Any]) -> bool:
    """True if the loss `rec` has PPO's gradient: ratios as weights, and none beyond its bounds."""
    return (arguments.get("clip_mode"), arguments.get("weight")) == ("one-side", "importance_sampling")


def rec_option(value: Any, given: Given) -> KeyOutcome:
    arguments = _arguments(given, "policy_loss_fn_args")
    if value == "none" or (_clipped_rec(arguments) and value in ("one-side", "importance_sampling")):
        return KeyOutcome.ignored("as in the policy loss that is taken")
    return KeyOutcome.missing("reinforce is taken, or ppo for one-side with importance_sampling: write a policy loss")


def sequence_masking(value: bool, given: Given) -> KeyOutcome:
    if not value:
        return KeyOutcome.ignored("off")
    threshold = given.read("algorithm.policy_loss_fn_args.delta_sequence_masking", number, 0.1)
    return KeyOutcome({"algorithm.correction": {"use": "zoo/off_policy_mask", "threshold": threshold}}, ZOO)


def _chord(arguments: Mapping[str, Any]) -> float | dict[str, Any]:
    """CHORD's μ, which falls from a peak; a schedule has no warm-up."""
    peak, valley = (number(arguments.get(f"mu_{end}", 0.1)) for end in ("peak", "valley"))
    over = whole(arguments.get("mu_warmup_steps", 0)) + whole(arguments.get("mu_decay_steps", 0))
    return {"from": peak, "to": valley, "over": over, "shape": "cosine"} if over and peak != valley else valley


def kl(given: Given) -> dict[str, Any]:
    """KL in loss and reward; Trinity's default is k2 in the loss, with a coefficient of .001."""
    usual = "none" if str(given.get("algorithm.algorithm_type", "ppo")) in WITHOUT_KL else "k2"
    name = str(given.get("algorithm.kl_loss_fn", usual))
    coefficient = number(_arguments(given, "kl_loss_fn_args").get("kl_coef", 0.001))
    found: dict[str, Any] = {"algorithm.kl_coef": 0.0}
    if name != "none" and name in KL_HERE and coefficient:
        found = {"algorithm.kl_coef": coefficient, "algorithm.kl": KL_HERE[name]}
    penalty = KL_HERE.get(str(given.get("algorithm.kl_penalty_fn", "none")))
    arguments = _arguments(given, "kl_penalty_fn_args")
    follows: dict[str, Any] = {}
    if flag(arguments.get("adaptive") or False):
        follows = {
            "target": number(arguments.get("target_kl", 0.1)),
            "horizon": whole(arguments.get("horizon", 10000)),
        }
    return {**found, "algorithm.shaping": kl_penalty(number(arguments.get("kl_coef", 0.001)), penalty, **follows)}


def argument(kind: str, name: str, sample: Any) -> tuple[KeyRule, ...]:
    """Return the rule of an argument that `advantage` or `loss` reads if its function has it."""
    where, to = {"advantage": ("advantage_fn_args", "advantage"), "loss": ("policy_loss_fn_args", "policy_loss")}[kind]
    note = f"an option of the {kind}"
    return part(f"algorithm.{where}.{name}", f"algorithm.{to}.{OPTIONS.get(name, name)}", lambda v: v, sample, note)


def distills(given: Given) -> bool:
    return str(given.get("algorithm.algorithm_type")) == "on_policy_distill"


def algorithm_of(given: Given) -> dict[str, Any]:
    name = str(given.get("algorithm.algorithm_type"))
    return algorithm(name, given) if name in ALGORITHMS else {}
