"""Diagnoses of rollouts and their engines: missing scores, groups without signal, lengths, repetition, waiting."""

from __future__ import annotations

import math

import rlsdk
from rlsdk.contracts import Finding, History, Series
from rlsdk.limits import Count

LEARNER = ("time/logprobs", "time/credit", "time/update", "time/sync")
"""Phases in which engines are idle unless rollouts run ahead."""


@rlsdk.diagnosis("no_score")
def no_score(history: History, *, window: Count = 5, rollouts: float = 1.0) -> Finding | None:
    """The workflow or the reward fails for some rollouts: they have no score, and the model learns nothing from them.

    Reads `rollouts/invalid`. A reward that raises for one kind of answer hides that kind from training, as does an
    agent or environment that fails on it; `max_invalid` ends a run only if many rollouts of a step have no score.

    Args:
        history: Metrics so far.
        window: Number of steps to average over.
        rollouts: Threshold for the number of such rollouts per step.
    """
    invalid = history["rollouts/invalid"]
    if not history.current(invalid, window) or (now := invalid.last(window).mean) < rollouts:
        return None
    return Finding(
        f"{now:.3g} rollouts per step have no score because workflow or reward failed (limit {rollouts:g})",
        "read the reason stored with each (`rlsdk rollouts RUN --where 'not valid'`) and fix workflow or reward",
        metric=invalid.name,
    )


@rlsdk.diagnosis("cut_off")
def cut_off(history: History, *, window: Count = 5, share: float = 0.3) -> Finding | None:
    """Many answers have hit the token limit from the start: a truncated answer cannot be right.

    Reads `rollouts/truncated`. If the share has doubled, answers have grown: see `length_explosion`.

    Args:
        history: Metrics so far.
        window: Number of steps to average over.
        share: Threshold for the share of truncated rollouts.
    """
    cut = history["rollouts/truncated"]
    if not history.current(cut, 2 * window):
        return None
    before, now = cut.first(window).mean, cut.last(window).mean
    if now < share or now >= 2 * before:
        return None
    return Finding(
        f"{now:.0%} of the answers hit the token limit, and {before:.0%} did at the start (limit {share:.0%})",
        "raise sampling.max_tokens, or reward shorter answers (the shaping `overlong`)",
        metric=cut.name,
    )


@rlsdk.diagnosis("dead_groups")
def dead_groups(history: History, *, window: Count = 10, share: float = 0.7, solved: float = 0.9) -> Finding | None:
    """Most groups carry no learning signal, since all their rollouts have the same reward.

    Reads `raw/groups_dead` (all sampled groups, with `rollout.dynamic_sampling`) or `groups/dead`. In DAPO's runs,
    solved groups alone exceed one half (arXiv:2503.14476, figure 3b), which is why DAPO samples more. Once nearly every
    task is solved, such groups are expected and only cost time, so the finding is `info`.

    Args:
        history: Metrics so far.
        window: Number of steps to average over.
        share: Threshold for the share of such groups.
        solved: Accuracy from which the finding is `info` instead of a warning.
    """
    dead = history.first_of("raw/groups_dead", "groups/dead")
    if not history.current(dead, window) or (now := dead.last(window).mean) < share:
        return None
    message = f"in {now:.0%} of the groups, all rollouts have the same reward (limit {share:.0%})"
    advice = _advice_on_dead_groups(history, window, replaced=dead.name.startswith("raw/"))
    is_solved = history["accuracy/mean"].last(window).mean >= solved
    return Finding(message, advice, "info" if is_solved else "warning", dead.name)


def _advice_on_dead_groups(history: History, window: int, *, replaced: bool) -> str:
    accuracy, cut = history["accuracy/mean"], history["rollouts/truncated"].last(window).mean
    if accuracy.last(window).mean > 0.5:
        others = "set rollout.dynamic_sampling=true, with a filter such as nonzero_variance, to find the rest"
        return "the tasks are too easy: train on harder ones" + ("" if replaced else f", or {others}")
    if len(accuracy) and (best := accuracy.values.max()) >= 0.1 and accuracy.last(3).mean < best / 4:
        return (
            f"the model has got worse (its best accuracy was {best:.0%}): lower learner.lr, and restart from an "
            "earlier checkpoint"
        )
    if cut > 0.5:
        return f"{cut:.0%} of the answers are truncated: raise sampling.max_tokens"
    return "the tasks are too hard: start with easier ones, raise group_size, or reward partial solutions"


@rlsdk.diagnosis("length_explosion")
def length_explosion(
    history: History, *, window: Count = 5, growth: float = 1.5, truncated: float = 0.3
) -> Finding | None:
    """Answers get longer without getting better, or are truncated.

    Reads `rollouts/length`, `rollouts/truncated` and `reward/mean`, and compares the last steps with the window four
    windows earlier. Longer answers with a higher reward are what reasoning looks like; averaging the loss over the
    tokens of each rollout makes wrong answers long for no gain (Dr. GRPO, arXiv:2503.20783, section 3.1).

    Args:
        history: Metrics so far.
        window: Number of steps to average over.
        growth: Threshold for the growth factor of the length, if the reward has not risen.
        truncated: Threshold for the share of truncated rollouts, if it has doubled.
    """
    length, cut, reward = (history[n] for n in ("rollouts/length", "rollouts/truncated", "reward/mean"))
    if not history.current(length, 5 * window):
        return None
    before, now = _before(length, window), length.last(window).mean
    was_cut, is_cut = _before(cut, window), cut.last(window).mean
    earned, earns = _before(reward, window), reward.last(window).mean
    if is_cut >= truncated and is_cut >= 2 * was_cut:
        what = f"{is_cut:.0%} of the rollouts are truncated, {was_cut:.0%} were before; they have {now:.0f} tokens"
        metric = cut.name
    elif now >= growth * before and not earns > earned + 0.01:
        what = f"rollouts have grown from {before:.0f} to {now:.0f} tokens"
        if math.isfinite(earned + earns):  # a run may have no reward
            what += f", and the reward from {earned:.3g} to {earns:.3g}"
        metric = length.name
    else:
        return None
    return Finding(
        what,
        "read some long rollouts (`rlsdk rollouts RUN --order-by 'tokens desc'`); average over all tokens "
        "(algorithm.aggregate=token-mean), add the shaping `overlong`, or raise sampling.max_tokens",
        metric=metric,
    )


@rlsdk.diagnosis("repeated_phrases")
def repeated_phrases(history: History, *, window: Count = 5, share: float = 0.3) -> Finding | None:
    """Rollouts repeat themselves: the model loops.

    Reads `rollouts/repetition`, the mean share of a rollout's eight-token phrases that occurred earlier in it. A few
    percent are normal in mathematics, where terms recur.

    Args:
        history: Metrics so far.
        window: Number of steps to average over.
        share: Threshold for the share of repeated phrases, if it has doubled since the first steps.
    """
    repeated = history["rollouts/repetition"]
    if not history.current(repeated, window):
        return None
    before, now = repeated.first(window).mean, repeated.last(window).mean
    if now < share or (len(repeated) >= 2 * window and now < 2 * before):
        return None
    return Finding(
        f"{now:.0%} of the eight-token phrases in rollouts are repetitions (limit {share:.0%})",
        "read some (`rlsdk rollouts RUN --order-by 'tokens desc'`); lower learner.lr or go back to a checkpoint, end "
        "rollouts earlier (sampling.stop), or add a penalty to the reward",
        metric=repeated.name,
    )


@rlsdk.diagnosis("starving_source")
def starving_source(history: History, *, window: Count = 10, share: float = 0.05) -> Finding | None:
    """A task source has almost dropped out of training: it is not sampled, or its groups are filtered or expire.

    Reads `source/NAME/share`, the share of each source in a step's trained groups.

    Args:
        history: Metrics so far.
        window: Number of steps to average over.
        share: Share of the trained groups below which a source starves, if it is below a quarter of its largest
            share over as many steps.
    """
    for name, series in history.between("source/", "/share").items():
        found = dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
        steps = range(int(series.steps[0]), history.step + 1)
        counts = [found.get(step, 0.0) for step in steps]
        if not history.enough(Series(steps, counts, series.name), 2 * window):
            continue
        now = sum(counts[-window:]) / window
        best = max(sum(counts[i : i + window]) / window for i in range(len(counts) - window))
        if now < share and now < best / 4:
            return Finding(
                f"source {name!r} provided {now:.1%} of the trained groups in the last {window} steps, down from at "
                f"most {best:.1%}",
                "look at what happens to its groups (`rlsdk rollouts RUN --where \"source = '" + name + "'\"`): all "
                "right or all wrong ones are filtered, slow ones expire; change its tasks, its weight, "
                "rollout.sampler or rollout.max_staleness",
                metric=series.name,
            )
    return None


@rlsdk.diagnosis("unsolved_source")
def unsolved_source(
    history: History, *, window: Count = 10, unsolved: float = 0.05, solved: float = 0.25
) -> Finding | None:
    """A task source is never solved while another one is: its expected answers or its reward may be broken.

    Reads `source/NAME/accuracy/mean`.

    Args:
        history: Metrics so far.
        window: Number of steps with answers for the source to average over.
        unsolved: Accuracy below which a source counts as never solved.
        solved: Accuracy that another source must have.
    """
    accuracy = {
        name: series.last(window).mean
        for name, series in history.between("source/", "/accuracy/mean").items()
        if history.enough(series, window) and series.steps[-1] > history.step - window
    }
    best = max(accuracy, key=lambda name: accuracy[name], default="")
    worst = min(accuracy, key=lambda name: accuracy[name], default="")
    if worst == best or accuracy[worst] >= unsolved or accuracy[best] < solved:
        return None
    return Finding(
        f"{accuracy[worst]:.0%} of the answers for source {worst!r} are right, and {accuracy[best]:.0%} for {best!r}",
        f"compare some (`rlsdk rollouts RUN --where \"source = '{worst}'\"`) with the expected answers of its tasks: "
        "if right answers count as wrong, its data or its reward is broken; otherwise its tasks are too hard",
        metric=f"source/{worst}/accuracy/mean",
    )


def _before(series: Series, window: int) -> float:
    """Mean of the window that ended three windows before the last one began."""
    return Series(series.steps[-5 * window : -4 * window], series.values[-5 * window : -4 * window]).mean


@rlsdk.diagnosis("idle_engines")
def idle_engines(
    history: History, *, window: Count = 10, share: float = 0.5, least_seconds: float = 1.0
) -> Finding | None:
    """Engines are idle for half of a step, and the learner is not the reason.

    Reads `time/engines_idle` minus the learner's share of the step: the rest is waiting for rewards, environments,
    tools, or the last long answer.

    Args:
        history: Metrics so far.
        window: Number of steps to average over.
        share: Threshold for the idle share of the step, not counting the learner's.
        least_seconds: Minimum step time; shorter steps are ignored, since a call alone costs milliseconds.
    """
    idle = history["time/engines_idle"]
    if not history.current(idle, window) or _seconds(history, window) < least_seconds:
        return None
    now = idle.last(window).mean
    ahead = len(history["time/wait_for_rollouts"]) > 0
    if ahead and _waiting(history, window) <= 0.05:
        return None  # the learner does not wait: `learner_bound`
    left = now if ahead else now - _learning(history, window)
    if left < share:
        return None
    return Finding(
        f"engines are idle for {now:.0%} of a step, {left:.0%} for reasons other than the learner",
        "run more rollouts at once (batch_size, the engine's max_num_seqs), more environments.workers or "
        "scoring.workers; use rollout.oversample with a stop rule against the last long answers, or "
        "rollout.max_staleness=1 to run ahead",
        "info",
        idle.name,
    )


@rlsdk.diagnosis("learner_bound")
def learner_bound(
    history: History, *, window: Count = 10, share: float = 0.7, least_seconds: float = 1.0
) -> Finding | None:
    """The learner is the bottleneck: more engines would not make the run faster.

    Reads the learner's phases in `time/…`, and `time/engines_idle`, which runs without sampling lack; if rollouts run
    ahead, `time/wait_for_rollouts` as well.

    Args:
        history: Metrics so far.
        window: Number of steps to average over.
        share: Threshold for the learner's share of the step.
        least_seconds: Minimum step time; shorter steps are ignored.
    """
    update = history["time/update"]
    if not history.current(update, window) or _seconds(history, window) < least_seconds:
        return None
    if not len(history["time/engines_idle"]):
        return None
    now = _learning(history, window)
    if now < share or (len(history["time/wait_for_rollouts"]) and _waiting(history, window) > 0.05):
        return None
    return Finding(
        f"the learner takes {now:.0%} of a step (limit {share:.0%})",
        "give it more devices (placement.learners) and engines fewer, raise learner.micro_batch_tokens, avoid "
        "recomputation (old_logprobs=rollout, kl_coef=0), or make fewer updates per batch",
        "info",
        update.name,
    )


@rlsdk.diagnosis("engine_lost")
def engine_lost(history: History, *, window: Count = 3) -> Finding | None:
    """An engine has died and has not been restarted: the others do its work.

    Reads `engines/alive`, and `engines/wanted`, which `rlsdk engines` changes. A dead engine is restarted unless it
    dies too often.

    Args:
        history: Metrics so far.
        window: Number of steps it must be missing: a restart takes a while.
    """
    alive = history["engines/alive"]
    if not history.current(alive, window + 1):
        return None
    wanted = history["engines/wanted"].last(1)
    most, now = min([alive.values.max(), *wanted.values]), alive.last(window).values.max()
    if now >= most:
        return None
    return Finding(
        f"{most - now:.0f} of {most:.0f} engines have not run for {window} steps",
        "see its log in the run's folder (logs/) for the cause; if it ran out of memory, reduce what each engine uses",
        metric=alive.name,
    )


def _seconds(history: History, window: int) -> float:
    return history["time/step"].last(window).mean


def _learning(history: History, window: int) -> float:
    """Share of the step in which the learner works."""
    spent = [history[name].last(window).mean for name in LEARNER if len(history[name])]
    return sum(spent) / _seconds(history, window)


def _waiting(history: History, window: int) -> float:
    """Share of the step in which the learner waits for rollouts that run ahead."""
    return history["time/wait_for_rollouts"].last(window).mean / _seconds(history, window)
