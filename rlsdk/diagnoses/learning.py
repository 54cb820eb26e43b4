"""Diagnoses of the update: entropy, KL, clipping, skipped updates, engine against learner, learning the wrong thing."""

from __future__ import annotations

import rlsdk
from rlsdk.contracts import Finding, History
from rlsdk.limits import Count
from rlsdk.plurals import counted

EVALUATIONS = ("eval/sampled", "eval/greedy", "eval/sampled_reward")
"""Held-out metrics, least noisy first."""


@rlsdk.diagnosis("entropy_collapse")
def entropy_collapse(
    history: History, *, window: Count = 10, share: float = 0.2, solved: float = 0.9
) -> Finding | None:
    """The policy has stopped exploring: entropy is a fraction of its initial value, and tasks remain unsolved.

    Reads `actor/entropy`, or `rollouts/entropy` if the algorithm does not compute the former. Most of a run's entropy
    loss happens early, and reward rises at its expense until both plateau (arXiv:2505.22617); DAPO raises the upper
    clip for this reason (arXiv:2503.14476, section 3.1). A model that solves nearly every task may be confident, and
    one that imitates demonstrations is meant to be: such runs have neither `rollouts/entropy` nor `time/engines_idle`.

    Args:
        history: Metrics so far.
        window: Number of steps to average over.
        share: Fraction of the initial entropy below which it counts as collapsed; the default is from experience.
        solved: Accuracy above which low entropy is fine.
    """
    entropy = history.first_of("actor/entropy", "rollouts/entropy")
    samples = len(history.first_of("rollouts/entropy", "time/engines_idle"))
    if not samples or not history.current(entropy, 2 * window):
        return None
    before, now = entropy.first(window).mean, entropy.last(window).mean
    if now >= share * before or history["accuracy/mean"].last(window).mean >= solved:
        return None
    return Finding(
        f"entropy has fallen from {before:.3g} to {now:.3g} nats per token: the policy hardly explores any more",
        "raise the upper clip (algorithm.policy_loss.clip_high=0.28), add algorithm.entropy_coef, lower learner.lr, "
        "or go back to an earlier checkpoint; sampling.temperature=1 preserves the remaining exploration",
        "critical",
        entropy.name,
    )


@rlsdk.diagnosis("kl_runaway")
def kl_runaway(
    history: History, *, window: Count = 10, least: Count = 3, reference: float = 0.3, update: float = 0.1
) -> Finding | None:
    """The policy drifts too far: from the reference model, or within the updates on a single batch.

    Reads `actor/ref_kl` (or `shaping/kl_penalty/kl`, if the KL is in the reward) and `actor/kl_to_old`, in nats per
    token. Spinning Up stops a PPO update early at 0.015, and its authors call values above 0.02 a warning; five times
    that is no longer a trust region. With a KL penalty, runs stay within a tenth of a nat per token of the reference
    model.

    Args:
        history: Metrics so far.
        window: Number of steps to average over.
        least: Minimum number of values; low, because a policy that drifts is soon lost.
        reference: Threshold for the KL to the reference model, in nats per token.
        update: Threshold for the KL of the updates on one batch, in nats per token.
    """
    for name, limit, what in (
        ("actor/kl_to_old", update, "the updates on one batch move the policy by"),
        ("actor/ref_kl", reference, "the policy's KL to the reference model is"),
        ("shaping/kl_penalty/kl", reference, "the policy's KL to the reference model is"),
    ):
        kl = history[name]
        if history.current(kl, least) and (now := kl.last(window).mean) >= limit:
            return Finding(
                f"{what} {now:.3g} nats per token ({name}, limit {limit:g})",
                "lower learner.lr or the number of updates per batch (minibatches, passes); for the reference KL, "
                f"raise {'the coef of the shaping kl_penalty' if 'kl_penalty' in name else 'algorithm.kl_coef'}",
                "critical",
                kl.name,
            )
    return None


@rlsdk.diagnosis("clip_share")
def clip_share(history: History, *, window: Count = 10, high: float = 0.3) -> Finding | None:
    """Clipping removes the gradient of many tokens: the updates on a batch go further than its data support.

    Reads `actor/clip_share`. PPO on language models clips a few percent; GSPO up to 15 (arXiv:2507.18071, figure 2),
    since it clips whole rollouts.

    Args:
        history: Metrics so far.
        window: Number of steps to average over.
        high: Threshold for the share of trained tokens (or rollouts) that are clipped.
    """
    clipped = history["actor/clip_share"]
    if not history.current(clipped, window) or (now := clipped.last(window).mean) < high:
        return None
    return Finding(
        f"clipping removes the gradient of {now:.0%} of the trained data (limit {high:.0%})",
        "lower learner.lr, or make fewer updates per batch (minibatches, passes); if staleness/max is above 0, lower "
        "rollout.max_staleness",
        metric=clipped.name,
    )


@rlsdk.diagnosis("skipped_updates")
def skipped_updates(history: History, *, window: Count = 10, updates: Count = 2) -> Finding | None:
    """Updates are skipped because their loss or gradient is not finite: their rollouts teach nothing.

    Reads `actor/skipped_updates` and `critic/skipped_updates`. A single overflow may be bad luck; a division by zero or
    a logarithm of 0 comes back with every batch that has such a rollout. The run ends only if more than
    `learner.skip_limit` updates in a row are skipped.

    Args:
        history: Metrics so far.
        window: Number of steps to look at.
        updates: Threshold for the number of updates skipped in these steps.
    """
    for role, parts in (
        ("actor", "policy loss, the advantages and the rewards"),
        ("critic", "returns and the rewards"),
    ):
        skipped = history[f"{role}/skipped_updates"]
        recent = skipped.last(window)
        if not history.current(skipped) or (count := recent.values.sum()) < updates:
            continue
        steps = int((recent.values > 0).sum())
        return Finding(
            f"{count:.0f} updates of the {role}, in {steps} of the last {counted(len(recent), 'step')}, were skipped: "
            f"their loss or gradient was not finite (limit {updates})",
            f"look for a division by zero, a logarithm of 0 or an overflow in the {parts} (`rlsdk check FILE` tries "
            "your own on edge cases); if they are built in, lower learner.lr",
            metric=skipped.name,
        )
    return None


@rlsdk.diagnosis("sampler_gap")
def sampler_gap(
    history: History, *, window: Count = 5, nats: float = 1.0, kl: float = 0.05, agreement: float = 0.01
) -> Finding | None:
    """Engine and learner disagree on the logprobs of whole generations, which makes the training off-policy.

    Reads `actor/gap_generation`, the difference between the two logprobs of a whole rollout, averaged over rollouts.
    If the learner does not recompute logprobs (`old_logprobs: rollout`), reads `actor/kl_to_behaviour` instead, as long
    as no rollout is stale and `canary/gap` does not show agreement. The canary compares a few fixed tokens; a gap that
    grows with the length shows only here. At one nat, one of the two considers the rollout e times as likely; runs have
    collapsed from such gaps (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
    2025).

    Args:
        history: Metrics so far.
        window: Number of steps to average over.
        nats: Threshold for the gap of a whole generation.
        kl: Threshold for the KL to the sampler, in nats per token.
        agreement: Canary gap, in nats, below which that KL is not reported.
    """
    gap = history["actor/gap_generation"]
    if history.current(gap, window):
        now, limit, what = gap.last(window).mean, nats, "nats per generation"
    else:
        gap = history["actor/kl_to_behaviour"]
        stale = history["staleness/max"].last(window)
        if not history.current(gap, window) or (len(stale) and stale.values.max() > 0):
            return None
        # These logprobs are compared while training on the batch: if engine and learner agree after each sync, the
        # metric measures how far the updates go.
        canary = history["canary/gap"]
        if len(canary) and canary.last(window).values.max() < agreement:
            return None
        now, limit, what = gap.last(window).mean, kl, "nats per token (KL)"
    if now < limit:
        return None
    return Finding(
        f"engine and learner logprobs differ by {now:.3g} {what} on sampled tokens (limit {limit:g})",
        "set model.head_dtype=float32, train in the engine's dtype, or correct for it (algorithm.correction=tis); "
        "`rlsdk check model PATH --trace` finds the operation that differs",
        "critical",
        gap.name,
    )


@rlsdk.diagnosis("format_only")
def format_only(
    history: History, *, window: Count = 10, term: str = "format", learned: float = 0.9, rise: float = 0.05
) -> Finding | None:
    """The model learns the answer format but not the task: reward rises, accuracy does not.

    Reads the terms `reward/…` whose name contains `term`, and `accuracy/mean`; without such a term, `reward/mean` in
    runs with some right answers.

    Args:
        history: Metrics so far.
        window: Number of steps to average over.
        term: Text contained in the names of reward terms for the format.
        learned: Mean of such a term, relative to its maximum so far, at which it counts as learned.
        rise: Rise of the reward since the first steps at which it counts as learned.
    """
    accuracy = history["accuracy/mean"]
    if not history.current(accuracy, 2 * window):
        return None
    solved, gained = accuracy.last(window).mean, accuracy.last(window).mean - accuracy.first(window).mean
    if gained > 0.02 or solved > 0.5:
        return None
    forms = {name: series for name, series in history.between("reward/").items() if term in name}
    evidence = {
        f"reward/{name}": f"{series.first(window).mean:.2f} to {series.last(window).mean:.2f}"
        for name, series in forms.items()
        if history.enough(series, 2 * window)
        and series.last(window).mean - series.first(window).mean >= rise
        and series.last(window).mean >= learned * series.values.max()
    }
    if not forms and accuracy.values.max() > 0:
        reward = history["reward/mean"]
        before, now = reward.first(window).mean, reward.last(window).mean
        evidence = {"reward/mean": f"{before:.2f} to {now:.2f}"} if now - before >= rise else {}
    if not evidence:
        return None
    metric, change = next(iter(evidence.items()))
    return Finding(
        f"{metric} has gone from {change} while the accuracy stays at {solved:.1%}: the model learns the format, not "
        "the task",
        "lower the weight of the format reward once it is learned (or make it a gate: `gate: 1` next to `use:`), and "
        "add tasks that the model sometimes solves",
        metric=metric,
    )


@rlsdk.diagnosis("held_out_drop")
def held_out_drop(history: History, *, window: Count = 5, evaluations: Count = 2, drop: float = 0.05) -> Finding | None:
    """Reward rises while held-out accuracy falls: the model overfits the training tasks or exploits the reward.

    Reads `reward/mean` and the first of `eval/sampled`, `eval/greedy`, `eval/sampled_reward` that the run has. This
    is reward over-optimisation (arXiv:2210.10760).

    Args:
        history: Metrics so far.
        window: Number of steps to average the reward over.
        evaluations: Number of consecutive evaluations that must be worse than the best one.
        drop: Minimum drop; the standard error with 400 tasks is up to 0.025.
    """
    held_out, reward = history.first_of(*EVALUATIONS), history["reward/mean"]
    if not history.current(held_out, evaluations + 1) or not history.enough(reward, 2 * window):
        return None
    best = int(held_out.values[:-evaluations].argmax())
    latest = held_out.last(evaluations)
    then, now = reward.until(int(held_out.steps[best])), reward.last(window).mean
    earlier = (then if len(then) >= window else reward.first(window)).last(window).mean
    if latest.values.max() > held_out.values[best] - drop or now <= earlier:
        return None
    measure = "reward" if held_out.name.endswith("_reward") else "accuracy"
    return Finding(
        f"reward has risen from {earlier:.3g} to {now:.3g} since step {held_out.steps[best]}, while held-out {measure} "
        f"has fallen from {held_out.values[best]:.3g} to {latest.mean:.3g}",
        "look for reward hacking in the rollouts with the highest reward (`rlsdk rollouts RUN --order-by "
        "'reward desc'`) and fix the reward; otherwise use more tasks, or stop at the better checkpoint",
        "critical",
        held_out.name,
    )
