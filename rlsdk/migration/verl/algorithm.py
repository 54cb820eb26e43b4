"""Advantages, losses and KL of veRL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migration.hydra import from_environment
from rlsdk.migration.rules import Given, KeyOutcome, KeyRule
from rlsdk.migration.shared.choices import KL
from rlsdk.migration.shared.learner import ZOO, kl_penalty, overlong
from rlsdk.migration.values import Choice, flag, number, numbers, text, texts

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON = f"{ACTOR}.megatron.override_transformer_config"
ESTIMATORS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gae": ("ppo", {"use": "gae"}),
    "grpo": ("grpo", {"use": "grpo"}),
    "grpo_vectorized": ("grpo", {"use": "grpo"}),
    "grpo_passk": ("grpo", {"use": "pass_at_k"}),
    "rloo": ("rloo", {"use": "rloo"}),
    "rloo_vectorized": ("rloo", {"use": "rloo"}),
    "reinforce_plus_plus": ("reinforce_plus_plus", {"use": "reinforce_plus_plus"}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {"use": "reinforce_plus_plus_baseline"}),
    "remax": ("remax", {"use": "remax"}),
    "opo": ("opo", {"use": "opo"}),
    "gpg": ("gpg", {"use": "gpg"}),
    "gdpo": ("gdpo", {"use": "gdpo"}),
    "optimal_token_baseline": ("grpo", {"use": "optimal_token_baseline"}),
    "tir_optimal_token_baseline": ("grpo", {"use": "optimal_token_baseline"}),
}
"""Estimator -> the algorithm whose other parts are replaced, and the advantage."""
KL_IN_LOSS = Choice({**KL.known, **{f"{name}+": "k2" for name in KL.known}}, KL.what)
"""Estimators of the KL in the loss; with a plus, veRL shows the value of one, but has the gradient of k2."""
DISTILLATION = "distillation.distillation_loss"
OVERLONG = ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg")
SUM_NORM = "seq-mean-token-sum-norm"
CRITIC_NOTE = "the critic uses the actor's setting"
LOSSES = ("vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "dro", "dppo_tv", "dppo_kl")
DPPO = ("dppo_tv", "dppo_kl")


def estimator(name: str, given: Given) -> Mapping[str, Any] | KeyOutcome:
    if name == "gdpo":
        return gdpo(given)
    algorithm, advantage = ESTIMATORS[name]
    options: dict[str, Any] = {}
    if name == "gae":
        options = {key: given.read(f"algorithm.{key}", number, 1.0) for key in ("gamma", "lam")}
    elif name == "reinforce_plus_plus":
        options = {"gamma": given.read("algorithm.gamma", number, 1.0)}
    elif name in ("grpo", "grpo_vectorized", "grpo_passk"):
        options = {"std_normalize": given.read("algorithm.norm_adv_by_std_in_grpo", flag, True)}
    return {
        "algorithm.use": algorithm,
        "algorithm.advantage": {**advantage, **options},
        "algorithm.critic": name == "gae",
        "algorithm.value_clip": given.read("critic.cliprange_value", number, 0.5) if name == "gae" else None,
        "algorithm.shaping": [*_overlong(given), *_kl_in_reward(given)],
    }


def gdpo(given: Given) -> KeyOutcome:
    """GDPO, which veRL normalises over tokens last; without deviations, or with one part, that is GRPO."""
    parts = reward_parts({}, given)
    if not parts or given.read("custom_reward_function.path", text) is None:
        note = "GDPO needs gdpo_reward_keys, and the function that returns these numbers: custom_reward_function.path"
        return KeyOutcome({"algorithm.use": "grpo"}, note, "missing")
    normalises = given.read("algorithm.norm_adv_by_std_in_grpo", flag, True)
    alone = {"use": "grpo", "std_normalize": normalises}
    advantage = {"use": "gdpo"} if normalises and len(parts) > 1 else alone
    values = {"algorithm.use": "gdpo", "algorithm.advantage": advantage, "algorithm.whiten_advantages": True}
    return KeyOutcome(values)


def reward_parts(reward: Mapping[str, Any], given: Given) -> list[dict[str, Any]]:
    """Return a reward once for each number of its function that GDPO normalises; empty for other estimators."""
    if str(given.get("algorithm.adv_estimator")) != "gdpo":
        return []
    keys = given.read("algorithm.gdpo_reward_keys", texts, [])
    weights = given.read("algorithm.gdpo_reward_weights", numbers, [1.0] * len(keys))
    return [{**reward, "key": key, "weight": weight} for key, weight in zip(keys, weights, strict=False)]


def _overlong(given: Given) -> list[dict[str, Any]]:
    """DAPO's penalty of long answers, whose options have had two places."""
    for where in OVERLONG:
        if given.read(f"{where}.enable", flag, False):
            limit = given.whole("reward_model.reward_kwargs.max_resp_len", 0) or given.whole("data.max_response_length")
            penalty = given.read(f"{where}.penalty_factor", number, 1.0)
            return overlong(limit, given.whole(f"{where}.len"), penalty)
    return []


def _kl_in_reward(given: Given) -> list[dict[str, Any]]:
    """KL in the reward; before veRL had `use_kl_in_reward`, a coefficient without `use_kl_loss` meant this."""
    explicit = given.flat.get("algorithm.use_kl_in_reward")
    older = "algorithm.kl_ctrl.kl_coef" in given.flat and not given.read(f"{ACTOR}.use_kl_loss", flag, False)
    wanted = older if explicit is None else given.read("algorithm.use_kl_in_reward", flag, False)
    coefficient = given.read("algorithm.kl_ctrl.kl_coef", number, 0.001)
    if not wanted:
        return []
    adaptive = str(given.get("algorithm.kl_ctrl.type")) == "adaptive"
    target = given.read("algorithm.kl_ctrl.target_kl", number, 0.1) if adaptive else None
    horizon = given.whole("algorithm.kl_ctrl.horizon", 10000)
    return kl_penalty(coefficient, given.read("algorithm.kl_penalty", KL, "k1"), target, horizon)


def aggregation(name: str, given: Given) -> KeyOutcome:
    note = "veRL adds up the sequences of a micro-batch; rlsdk takes their mean" if name == SUM_NORM else ""
    return KeyOutcome({"algorithm.aggregate": name}, note)


def kl_loss(wanted: bool, given: Given) -> dict[str, Any]:
    if not wanted:
        return {"algorithm.kl_coef": 0.0}
    return {
        "algorithm.kl_coef": given.read(f"{ACTOR}.kl_loss_coef", number, 0.001),
        "algorithm.kl": given.read(f"{ACTOR}.kl_loss_type", KL_IN_LOSS, "low_var"),
    }


def reference(value: str, given: Given) -> KeyOutcome:
    if not given.read(f"{ACTOR}.use_kl_loss", flag, False) and not _kl_in_reward(given):
        return KeyOutcome.ignored("there is neither KL in the loss nor in the reward")
    return KeyOutcome({"model.reference": value})


def router_loss(value: float, given: Given) -> KeyOutcome:
    """Weight of the load-balancing loss of a learner with Megatron."""
    kind = str(given.get(f"{MEGATRON}.moe_router_load_balancing_type", "aux_loss")).strip("\\\"'")
    if kind == "none":
        return KeyOutcome({"learner.router_loss_coef": 0.0})
    note = "over all rollouts of an optimiser step"
    if kind != "aux_loss":
        return KeyOutcome.missing(f"the only load-balancing loss is learner.router_loss_coef, {note}")
    return KeyOutcome({"learner.router_loss_coef": value}, note)


def as_actor(name: str, of_actor: str, sample: Any) -> KeyRule:
    """Return the rule of a setting that rlsdk's critic shares with the actor."""

    def give(value: Any, given: Given) -> KeyOutcome:
        if str(given.get("algorithm.adv_estimator")) != "gae":
            return KeyOutcome.ignored("the algorithm has no critic")
        if str(value) == str(given.get(of_actor, value)):
            return KeyOutcome.ignored(CRITIC_NOTE)
        return KeyOutcome.missing(f"cannot differ: {CRITIC_NOTE}, {of_actor}")

    return KeyRule(f"critic.{name}", "ignored", (), CRITIC_NOTE, sample, give=give)


def distills(given: Given) -> bool:
    """True if veRL trains on the log-ratio of one teacher alone, by a policy gradient, as rlsdk's opd does."""
    kind = from_environment(str(given.get(f"{DISTILLATION}.loss_mode", "k3")), {})
    alone = not given.read(f"{DISTILLATION}.use_task_rewards", flag, True)
    gradient = given.read(f"{DISTILLATION}.use_policy_gradient", flag, False)
    one = len(given.section("distillation.teacher_models")) == 1
    return bool(given.read("distillation.enabled", flag, False) and kind in ("k1", "kl") and alone and gradient and one)


def teacher(value: str, given: Given) -> KeyOutcome:
    if distills(given):
        return KeyOutcome({"model.reference": value})
    return distilled(value, given)


def distilled(_: Any, given: Given) -> KeyOutcome:
    if distills(given):
        return KeyOutcome.ignored("algorithm: opd; the teacher runs with the learner")
    if not given.read("distillation.enabled", flag, False):
        return KeyOutcome.ignored("distillation.enabled is off")
    return KeyOutcome.missing(
        "algorithm: opd, whose teacher is model.reference, is veRL's loss_mode k1 with use_policy_gradient and no task "
        "rewards"
    )


def distillation(given: Given) -> dict[str, Any]:
    ends = {f"clip_{end}": given.read(f"{DISTILLATION}.clip_ratio_{end}", number, 0.2) for end in ("low", "high")}
    return {
        "algorithm.use": "opd",
        "algorithm.advantage": {"use": "on_policy_distill", "coef": 1.0},
        "algorithm.clip_advantages": given.read(f"{DISTILLATION}.loss_max_clamp", number),
        "algorithm.policy_loss": {"use": "ppo", **ends, "dual_clip": 3.0},
        "algorithm.critic": False,
    }


def policy_loss(name: str, given: Given) -> KeyOutcome:
    """Convert a policy loss with its options."""
    both = given.read(f"{ACTOR}.clip_ratio", number, 0.2)
    bounds = {
        "clip_low": given.read(f"{ACTOR}.clip_ratio_low", number, both),
        "clip_high": given.read(f"{ACTOR}.clip_ratio_high", number, both),
    }
    cap = {"dual_clip": given.read(f"{ACTOR}.clip_ratio_c", number, 3.0)}
    loss = f"{ACTOR}.policy_loss"
    options: dict[str, dict[str, Any]] = {
        "vanilla": {"use": "ppo", **bounds, **cap},
        "gspo": {"use": "gspo", **bounds, "dual_clip": None},
        "cispo": {"use": "cispo", **bounds},
        "geo_mean": {"use": "geo_mean", **bounds, "dual_clip": None},
        "gpg": {"use": "gpg"},
        "sapo": {
            "use": "sapo",
            "tau_pos": given.read(f"{ACTOR}.tau_pos", number, 1.0),
            "tau_neg": given.read(f"{ACTOR}.tau_neg", number, 1.05),
        },
        "clip_cov": {
            "use": "clip_cov",
            **bounds,
            "ratio": given.read(f"{loss}.clip_cov_ratio", number, 0.0002),
            "cov_low": given.read(f"{loss}.clip_cov_lb", number, 1.0),
            "cov_high": given.read(f"{loss}.clip_cov_ub", number, 5.0),
        },
        "kl_cov": {
            "use": "kl_cov",
            "ratio": given.read(f"{loss}.kl_cov_ratio", number, 0.0002),
            "kl_coef": given.read(f"{loss}.ppo_kl_coef", number, 0.1),
        },
        "dro": {"use": "zoo/kimi", "tau": given.read(f"{loss}.dro_beta", number, 0.1), "level": "token"},
        **{each: {"use": "zoo/dppo", "divergence": each[5:], "threshold": bounds["clip_high"]} for each in DPPO},
    }
    note = "veRL always uses seq-mean-token-mean for it: set algorithm.aggregate" if name in ("gspo", "sapo") else ""
    note = ZOO if name == "dro" else note
    if name in DPPO:
        note = f"{ZOO}; as in the paper, relative to the sampler, with one threshold (clip_ratio_high) and no cap"
    return KeyOutcome({"algorithm.policy_loss": options[name]}, note)
