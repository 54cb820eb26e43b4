"""Names of the metrics that rlsdk logs; docs/metrics.md explains each, and a test compares the two."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from rlsdk.errors import nearest

METRICS: tuple[str, ...] = (
    "reward/mean",
    "reward/std",
    "reward/min",
    "reward/max",
    "reward/NAME",
    "reward_std/NAME",
    "reward_min/NAME",
    "reward_max/NAME",
    "score/NAME",
    "accuracy/mean",
    "raw/reward",
    "raw/accuracy",
    "groups/trained",
    "groups/dead",
    "raw/groups_dead",
    "advantages/nonzero",
    "source/NAME/share",
    "source/NAME/…",
    "eval/greedy",
    "eval/sampled",
    "eval/pass@N",
    "eval/all@N",
    "eval/maj@N",
    "eval/greedy_reward",
    "eval/sampled_reward",
    "eval/invalid",
    "eval/length",
    "eval/truncated",
    "eval/NAME/…",
    "eval/workflow/NAME",
    "rollouts/tokens",
    "rollouts/tokens_total",
    "rollouts/length",
    "rollouts/length_min",
    "rollouts/length_max",
    "rollouts/length_complete",
    "rollouts/prompt_length",
    "rollouts/prompt_length_max",
    "rollouts/truncated",
    "rollouts/invalid",
    "rollouts/entropy",
    "rollouts/repetition",
    "rollouts/reused",
    "rollouts/tokens_wasted",
    "tasks/dropped",
    "sampler/seen",
    "sampler/pass_rate",
    "sampler/new",
    "sampler/hard",
    "sampler/medium",
    "sampler/easy",
    "sampler/source_weight",
    "sampler/NAME",
    "sampler/NAME/…",
    "workflow/turns",
    "workflow/tokens",
    "workflow/NAME",
    "routing/unknown",
    "actor/loss",
    "actor/policy_loss",
    "actor/entropy",
    "actor/entropy_coef",
    "actor/grad_norm",
    "actor/lr",
    "actor/skipped_updates",
    "actor/ratio",
    "actor/ratio_max",
    "actor/kl_to_old",
    "actor/kl_to_behaviour",
    "actor/ref_kl",
    "reference/age",
    "actor/correction",
    "actor/correction/NAME",
    "actor/expert_loss",
    "actor/router_loss",
    "actor/gap",
    "actor/clip_share",
    "actor/clip_share_low",
    "actor/clip_share_high",
    "actor/NAME",
    "critic/loss",
    "critic/values",
    "critic/returns",
    "critic/explained_variance",
    "critic/clip_fraction",
    "critic/grad_norm",
    "critic/lr",
    "critic/skipped_updates",
    "shaping/kl_penalty/kl",
    "shaping/kl_penalty/coef",
    "shaping/NAME/…",
    "advantage/NAME/…",
    "schedule/NAME",
    "staleness/max",
    "staleness/mean",
    "staleness/share_N",
    "canary/gap",
    "engines/alive",
    "engines/wanted",
    "engines/lost",
    "engines/sampled_again",
    "engine/steps",
    "engine/step_seconds",
    "engine/sequence_seconds",
    "time/step",
    "time/produce",
    "time/logprobs",
    "time/credit",
    "time/update",
    "time/sync",
    "time/NAME_share",
    "time/engine_inside",
    "time/learner_inside",
    "time/outside_share",
    "time/engines_idle",
    "time/wait_for_rollouts",
    "time/overlap",
    "time/tokens_per_second",
    "time/tokens_per_second_per_gpu",
    "time/update_mfu",
    "memory/driver",
    "memory/engine",
    "memory/learner",
    "memory/learner_gpu",
    "memory/learner_gpu_held",
)
"""Names, in the order of docs/metrics.md; NAME stands for a name from a configuration or of a component, N at the end
for a number, and … for the rest of a name."""
_CLOSE = 0.85
"""Similarity from which a name that a pattern allows counts as a misspelt one; "reward/mena" could be a reward."""


def pattern_of(name: str) -> re.Pattern[str]:
    """Return a pattern of the names that an entry of `METRICS` stands for."""
    form = re.escape(name).replace("NAME", r"[\w./-]+").replace("…", ".+")
    return re.compile(re.sub(r"(?<=[_@])N$", r"\\d+", form))


_PATTERNS = [pattern_of(name) for name in METRICS]
NAMED_METRICS = tuple(name for name in METRICS if not re.search(r"NAME|…|[_@]N$", name))
"""Those of `METRICS` that stand for one metric each."""


def unknown_metric(name: str, declared: Iterable[str] = ()) -> str | None:
    """Return the nearest known name of a metric that rlsdk does not log, empty if none is near; None if it logs it.

    Args:
        name: Name of a metric.
        declared: Further names, of metrics that components log.
    """
    known = [*NAMED_METRICS, *declared]
    if name in known:
        return None
    near = nearest(name, known) or ""
    if not any(pattern.fullmatch(name) for pattern in _PATTERNS):
        return near
    close = near and difflib.SequenceMatcher(None, name, near).ratio() >= _CLOSE
    return near if close and abs(len(near) - len(name)) <= 2 else None
