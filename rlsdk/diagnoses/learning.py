"""Diagnoses of the update: entropy, KL, clipping, the gap to the sampler, and learning the wrong thing."""

from __future__ import annotations

import rlsdk
from rlsdk.contracts import Finding, History
from rlsdk.limits import Count

EVALUATIONS = ("eval/sampled", "eval/greedy", "eval/sampled_reward")
"""Held-out metrics, the steadiest first."""


@rlsdk.diagnosis("entropy_collapse")
def entropy_collapse(
    history: History, *, window: Count = 10, share: float = 0.2, solved: float = 0.9
) -> Finding | None:
    """The policy has stopped exploring: its entropy is a fraction of what it began with, and the tasks are not solved.

    Reads `actor/entropy`, or `rollouts/entropy` where no part of the algorithm needs it. Most of the entropy that a
    run loses is lost early, and reward rises at its expense until both stand still (arXiv:2505.22617); DAPO raises
    its upper clip for this (arXiv:2503.14476, section 3.1). A model that answers nearly every task right may be sure.

    Args:
        history: Metrics so far.
        window: Steps that are averaged.
        share: Share of the first steps' entropy below which it has collapsed; four fifths lost, by experience.
        solved: Accuracy from which low entropy is fine.
    """
    entropy = history.first_of("actor/entropy", "rollouts/entropy")
    if not history.current(entropy, 2 * window):
        return None
    before, now = entropy.first(window).mean, entropy.last(window).mean
    if now >= share * before or history["accuracy/mean"].last(window).mean >= solved:
        return None
    return Finding(
        f"the entropy has fallen from {before:.3g} to {now:.3g} nats a token: the policy hardly tries anything else",
        "raise the upper clip (algorithm.policy_loss.clip_high=0.28), add algorithm.entropy_coef, lower learner.lr, "
        "or go back to an earlier checkpoint; sampling.temperature=1 keeps what exploration there is",
        "critical",
        entropy.name,
    )


@rlsdk.diagnosis("kl_runaway")
def kl_runaway(
    history: History, *, window: Count = 10, least: Count = 3, reference: float = 0.3, update: float = 0.1
) -> Finding | None:
    """The policy runs away: from the reference model, or from itself within the updates of a single batch.

    Reads `actor/ref_kl` and `actor/kl_to_old`, in nats per token. PPO is stopped early at 0.015 in Spinning Up, and
    its authors call more than 0.02 a warning; five times as much is not a trust region any more. From a reference, runs
    with a penalty stay below a tenth of a nat a token.

    Args:
        history: Metrics so far.
        window: Steps that are averaged.
        least: Values from which it is looked at: a policy that runs away is soon lost.
        reference: KL to the reference, nats a token, from which it is a runaway.
        update: KL of the updates on one batch, nats a token, likewise.
    """
    for name, limit, what in (
        ("actor/kl_to_old", update, "the updates on one batch move the policy by"),
        ("actor/ref_kl", reference, "the policy is away from the reference model by"),
    ):
        kl = history[name]
        if history.current(kl, least) and (now := kl.last(window).mean) >= limit:
            return Finding(
                f"{what} {now:.3g} nats a token ({name}, limit {limit:g})",
                "lower learner.lr or the number of updates a batch (minibatches, passes); against a reference, raise "
                "algorithm.kl_coef",
                "critical",
                kl.name,
            )
    return None


@rlsdk.diagnosis("clip_share")
def clip_share(history: History, *, window: Count = 10, high: float = 0.3) -> Finding | None:
    """The clip takes the gradient of many tokens away: the updates on a batch go further than its data carry.

    Reads `actor/clip_share`. PPO on language models clips a percent or a few, GSPO up to 15 (arXiv:2507.18071,
    figure 2), since it clips whole rollouts.

    Args:
        history: Metrics so far.
        window: Steps that are averaged.
        high: Share of the trained tokens, or rollouts, from which it is a finding.
    """
    clipped = history["actor/clip_share"]
    if not history.current(clipped, window) or (now := clipped.last(window).mean) < high:
        return None
    return Finding(
        f"the clip takes the gradient of {now:.0%} of what is trained away (limit {high:.0%})",
        "lower learner.lr, or make fewer updates a batch (minibatches, passes); if staleness/max is above 0, lower "
        "rollout.max_staleness",
        metric=clipped.name,
    )


@rlsdk.diagnosis("sampler_gap")
def sampler_gap(
    history: History, *, window: Count = 5, nats: float = 1.0, kl: float = 0.05, agreement: float = 0.01
) -> Finding | None:
    """Engine and learner disagree about whole generations, so that training is off its own policy.

    Reads `actor/gap_generation`, the mean over rollouts of how far the two logprobs of a whole rollout are apart; where
    the learner does not recompute logprobs (`old_logprobs: rollout`), `actor/kl_to_behaviour` while no rollout is stale
    and `canary/gap` does not say that they agree. The canary compares a few fixed tokens; a gap that grows with the
    length shows only here. A nat means that one of the two holds the rollout for e times as likely; runs have collapsed
    from such gaps (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025).

    Args:
        history: Metrics so far.
        window: Steps that are averaged.
        nats: Gap of a whole generation from which it is a finding.
        kl: KL to the sampler, nats a token, from which it is a finding.
        agreement: Gap of the canary's tokens, in nats, below which that KL is not one.
    """
    gap = history["actor/gap_generation"]
    if history.current(gap, window):
        now, limit, what = gap.last(window).mean, nats, "nats a generation"
    else:
        gap = history["actor/kl_to_behaviour"]
        stale = history["staleness/max"].last(window)
        if not history.current(gap, window) or (len(stale) and stale.values.max() > 0):
            return None
        # These logprobs are compared while the batch is trained on: where engine and learner agree after each sync,
        # what is measured is how far the updates go.
        canary = history["canary/gap"]
        if len(canary) and canary.last(window).values.max() < agreement:
            return None
        now, limit, what = gap.last(window).mean, kl, "nats a token (KL)"
    if now < limit:
        return None
    return Finding(
        f"engine and learner are {now:.3g} {what} apart on what was sampled (limit {limit:g})",
        "set model.head_dtype=float32, train in the engine's dtype, or correct for it (algorithm.correction=tis); "
        "`rlsdk check model PATH --trace` finds the operation that differs",
        "critical",
        gap.name,
    )


@rlsdk.diagnosis("format_only")
def format_only(
    history: History, *, window: Count = 10, term: str = "format", learned: float = 0.9, rise: float = 0.05
) -> Finding | None:
    """The form of the answer is learned and the task is not: the reward goes up, the accuracy does not.

    Reads the terms `reward/…` whose name holds `term`, and `accuracy/mean`; without such a term, `reward/mean` in runs
    in which some answers are right.

    Args:
        history: Metrics so far.
        window: Steps that are averaged.
        term: Text in the names of the reward's terms for the form.
        learned: Mean of such a term, relative to its greatest value so far, from which it counts as learned.
        rise: Rise of the reward since the first steps from which it counts as learned.
    """
    accuracy = history["accuracy/mean"]
    if not history.current(accuracy, 2 * window):
        return None
    solved, gained = accuracy.last(window).mean, accuracy.last(window).mean - accuracy.first(window).mean
    if gained > 0.02 or solved > 0.5:
        return None
    forms = {name: series for name, series in history.between("reward/").items() if term in name}
    told = {
        f"reward/{name}": f"{series.first(window).mean:.2f} to {series.last(window).mean:.2f}"
        for name, series in forms.items()
        if len(series) >= 2 * window
        and series.last(window).mean - series.first(window).mean >= rise
        and series.last(window).mean >= learned * series.values.max()
    }
    if not forms and accuracy.values.max() > 0:
        reward = history["reward/mean"]
        before, now = reward.first(window).mean, reward.last(window).mean
        told = {"reward/mean": f"{before:.2f} to {now:.2f}"} if now - before >= rise else {}
    if not told:
        return None
    metric, change = next(iter(told.items()))
    return Finding(
        f"{metric} has gone from {change} while the accuracy stays at {solved:.1%}: the form is learned, the task is "
        "not",
        "lower the weight of the form once it is learned (or make it a gate: `gate: 1` beside `use:`), and give tasks "
        "of which the model solves some",
        metric=metric,
    )


@rlsdk.diagnosis("held_out_drop")
def held_out_drop(history: History, *, window: Count = 5, evaluations: Count = 2, drop: float = 0.05) -> Finding | None:
    """The reward rises and the held-out accuracy falls: the model fits the training tasks, or the reward's gaps.

    Reads `reward/mean` and the first of `eval/sampled`, `eval/greedy`, `eval/sampled_reward` that the run has. Reward
    that rises against the goal is over-optimisation (arXiv:2210.10760).

    Args:
        history: Metrics so far.
        window: Steps over which the reward is averaged.
        evaluations: Evaluations in a row that must be worse than the best one.
        drop: How much worse; the chance error of 400 tasks is up to 0.025.
    """
    held_out, reward = history.first_of(*EVALUATIONS), history["reward/mean"]
    if not history.current(held_out, evaluations + 1) or len(reward) < 2 * window:
        return None
    best = int(held_out.values[:-evaluations].argmax())
    latest = held_out.last(evaluations)
    then, now = reward.until(int(held_out.steps[best])), reward.last(window).mean
    earlier = (then if len(then) >= window else reward.first(window)).last(window).mean
    if latest.values.max() > held_out.values[best] - drop or now <= earlier:
        return None
    return Finding(
        f"the reward has risen from {earlier:.3g} to {now:.3g} since step {held_out.steps[best]}, while the held-out "
        f"accuracy has fallen from {held_out.values[best]:.3g} to {latest.mean:.3g}",
        "read rollouts of the highest reward for what the reward does not see (`rlsdk rollouts RUN --order-by "
        "'reward desc'`), then mend the reward; otherwise take more tasks, or stop at the better checkpoint",
        "critical",
        held_out.name,
    )
