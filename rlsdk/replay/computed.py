"""Compute credit, losses and gradient of a dumped batch with rlsdk's training code."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from rlsdk.batch import LossInputs, Totals
from rlsdk.config import Plan, check
from rlsdk.config.defaults import ALGORITHM, REWARD
from rlsdk.errors import ConfigError, DataError
from rlsdk.fields import FORWARD
from rlsdk.learners.metrics import MetricAccumulator
from rlsdk.learners.objective import Objective, UpdateContext
from rlsdk.marks import tasks
from rlsdk.replay.dump import Dump, first_trained
from rlsdk.rollout.step_batch import StepBatch, labels, pack
from rlsdk.trainer.credit import CreditAssigner
from rlsdk.types import Group, Rollout, Score, Task
from rlsdk.whatif.question import credit_faults

if TYPE_CHECKING:
    from rlsdk.whatif.gradients import Gradients


@tasks("replayed")
def replayed() -> list[Task]:
    """Placeholder for the tasks of a batch that was sampled elsewhere."""
    return []


def replay_plan(
    algorithm: str | Mapping[str, Any] | None, settings: Sequence[str], plugins: Sequence[str], *, width: int = 256
) -> Plan:
    """Check the algorithm for a batch.

    Args:
        algorithm: Name, or a mapping as in a configuration; None for the default algorithm.
        settings: `algorithm.KEY=VALUE` texts.
        plugins: Files of plugins.
        width: Maximum tokens of a response, for lengths that the algorithm leaves to the run.

    Raises:
        ConfigError: Lists all faults.
    """
    foreign = [text for text in settings if not text.lstrip("+ ").startswith("algorithm")]
    if foreign:
        raise ConfigError(
            [
                f"{text}: a replay reads only the algorithm; give algorithm.KEY=VALUE, such as algorithm.kl_coef=0"
                for text in foreign
            ]
        )
    config = {
        "name": "replay",
        "model": {"path": "dumped/batch", "max_length": width + 1024},
        "sampling": {"max_tokens": max(width, 1)},
        "tasks": {"train": replayed},
        "reward": REWARD.name,
        "algorithm": algorithm or ALGORITHM.name,
        "steps": 1,
    }
    return check(config, settings, plugins)


@attrs.frozen(kw_only=True, eq=False)
class ComputedBatch:
    """A batch computed by rlsdk; `t` response tokens, from the first sampled to the last of each rollout.

    Attributes:
        batch: Packed rollouts.
        order: int64 `[n]`, position of each rollout in the file.
        offsets: Position of each rollout's first sampled token in its response.
        mask: bool `[t]`, True where the policy sampled the token.
        segments: int64 `[t]`, rollout of each token.
        advantages: float64 `[t]`.
        recorded: Field -> the trainer's values, float64 `[t]`.
        ratios: float64 `[t]`; None without logprobs.
        losses: float64 `[t]`, per token, with the trainer's advantages if recorded; None without logprobs.
        kl: float64 `[t]`, KL to the reference model in the objective, without its coefficient; None without reference
            logprobs or coefficient.
        loss: The loss in rlsdk's normalisation, from rlsdk's own advantages, with the KL term.
        given_loss: The same with the trainer's advantages.
        gradient: float64 `[t]`, of `loss` with respect to the logprobs.
        given_gradient: float64 `[t]`, of `given_loss`.
    """

    batch: StepBatch
    order: np.ndarray
    offsets: tuple[int, ...]
    mask: np.ndarray
    segments: np.ndarray
    advantages: np.ndarray
    recorded: Mapping[str, np.ndarray]
    ratios: np.ndarray | None = None
    losses: np.ndarray | None = None
    kl: np.ndarray | None = None
    loss: float | None = None
    given_loss: float | None = None
    gradient: np.ndarray | None = None
    given_gradient: np.ndarray | None = None

    def place(self, token: int) -> tuple[int, int]:
        """Return a token's rollout in the file and its position in the response."""
        rollout = int(self.segments[token])
        begin = int(np.searchsorted(self.segments, rollout))
        return int(self.order[rollout]), self.offsets[rollout] + token - begin


def compute(dump: Dump, plan: Plan, gradients: Gradients | None = None) -> ComputedBatch:
    """Compute a dumped batch; logprobs that the file lacks are those of a checkpoint's weights, `gradients`.

    Raises:
        ConfigError: The algorithm reads a field that the file lacks.
        DataError: No rollout can be trained.
    """
    groups, order = _groups(dump)
    batch = pack(groups)
    if batch is None:
        raise DataError("no rollout of the file has a reward and a sampled token")
    positions = np.array([order[id(rollout)] for rollout in batch.rollouts], np.int64)
    recorded = {name: _packed(rows, dump, positions) for name, rows in dump.tokens.items()}
    batch = batch.with_fields(**_fields(batch, plan, recorded, gradients))
    _check_fields(batch, plan)
    credited = asyncio.run(CreditAssigner.of(plan).assign_aside(batch, train_step=0, train_steps=1))
    found = ComputedBatch(
        batch=credited,
        order=positions,
        offsets=tuple(first_trained(dump.masks[i]) for i in positions),
        mask=np.array(batch.arrays.loss_mask),
        segments=np.repeat(np.arange(len(batch.arrays)), batch.arrays.responses),
        advantages=credited.arrays.tokens["advantages"].astype(np.float64) if dump.scored else recorded["advantages"],
        recorded=recorded,
    )
    return _with_losses(found, plan) if "logprobs" in batch.fields else found


def _groups(dump: Dump) -> tuple[list[Group], dict[int, int]]:
    """Return the groups of a batch, and the position of each rollout in the file by its `id`."""
    members: dict[str, list[int]] = {}
    for i, label in enumerate(dump.groups):
        members.setdefault(label, []).append(i)
    groups: list[Group] = []
    order: dict[int, int] = {}
    for number, index in enumerate(members.values()):
        task = Task(str(number), "", source=dump.framework)
        rollouts = [_rollout(dump, i, task) for i in index]
        order |= {id(rollout): i for rollout, i in zip(rollouts, index, strict=True)}
        scores = [Score(v) if np.isfinite(v) else Score.invalid("no number") for v in dump.scores[index]]
        groups.append(Group(task, rollouts, scores, uid=str(number)))
    return groups, order


def _rollout(dump: Dump, i: int, task: Task) -> Rollout:
    start = first_trained(dump.masks[i])
    mask, prompt = dump.masks[i][start:], dump.prompts[i]
    prompt = prompt if len(prompt) else np.zeros(1, np.int64)  # the first sampled token needs a predecessor
    behaviour = next(
        (
            dump.tokens[n][i][start : len(dump.masks[i])]
            for n in ("behaviour_logprobs", "old_logprobs", "logprobs")
            if n in dump.tokens
        ),
        np.zeros(len(mask)),
    )
    return Rollout(
        task,
        (),
        np.concatenate([prompt, dump.responses[i][start:]]),
        np.concatenate([np.zeros(len(prompt), bool), mask]),
        np.concatenate([np.zeros(len(prompt)), np.where(mask, behaviour, 0)]),
        np.concatenate([np.full(len(prompt), -1), np.where(mask, 0, -1)]),
    )


def _packed(rows: Sequence[np.ndarray], dump: Dump, order: np.ndarray) -> np.ndarray:
    """Return a field of the file, `[t]`, in packed order."""
    parts = []
    for i in order:
        where = np.flatnonzero(dump.masks[i])
        parts.append(rows[i][where[0] : where[-1] + 1])
    packed: np.ndarray = np.concatenate(parts).astype(np.float64)
    return packed


def _fields(
    batch: StepBatch, plan: Plan, recorded: Mapping[str, np.ndarray], gradients: Gradients | None
) -> dict[str, np.ndarray]:
    """Return the fields read by credit and losses: the trainer's or, if not recorded, those of a checkpoint."""
    old = next((recorded[n] for n in ("old_logprobs", "behaviour_logprobs", "logprobs") if n in recorded), None)
    found = {} if old is None else {"logprobs": old}
    found |= {n: recorded[n] for n in ("ref_logprobs", "values") if n in recorded}
    if gradients is not None and "logprobs" not in found:
        found |= gradients.forward(batch, plan, ["logprobs"])
    return {name: values.astype(np.float32) for name, values in found.items()}


def _check_fields(batch: StepBatch, plan: Plan) -> None:
    """Reject an algorithm whose credit or losses read a field that the file lacks."""
    faults = credit_faults(plan, model=False)
    lacking = [fault for fault in faults if not any(f"reads {name}," in fault for name in batch.fields)]
    lacking = [fault.partition(", which")[0].partition(", the")[0] for fault in lacking]
    correction = plan.loss.correction
    corrections = [("correction", each) for each in correction.singles.values()] if correction else []
    for path, reference in (("policy_loss", plan.loss.policy_loss), *corrections):
        if "logprobs" in batch.fields:
            component = plan.plugins.component(reference)
            missing = [name for name in component.needs if name in FORWARD and name not in batch.fields]
            lacking += [f"algorithm.{path}: {component.name!r} reads {name}" for name in missing]
    if plan.algorithm.top_entropy_quantile is not None:
        raise ConfigError(["algorithm.top_entropy_quantile: no dump contains entropies; leave it out (null)"])
    needs = plan.plugins.component(plan.advantage).needs
    if "reward_parts" in needs and not any(name.startswith("reward/") for s in batch.scores for name in s.metrics):
        lacking.append(f"algorithm.advantage: {plan.advantage.name!r} reads reward_parts")
    if lacking:
        advice = "add it to the file, or choose another algorithm"
        raise ConfigError([f"{fault}; {advice}" for fault in lacking])


def _with_losses(found: ComputedBatch, plan: Plan) -> ComputedBatch:
    """Add ratios, losses and gradients."""
    # No dump contains entropies, and an entropy bonus has no gradient with respect to the logprobs.
    objective, recorded = Objective(attrs.evolve(plan.loss, entropy_coef=0.0)), found.recorded
    algorithm = plan.algorithm
    right = labels(found.batch, plan.needs, passing=algorithm.passing)
    arrays = found.batch.for_update(**right).arrays
    context = UpdateContext(
        update=0, updates=1, totals=Totals.of(torch.from_numpy(found.mask), torch.from_numpy(found.segments)), seed=0
    )
    old = found.batch.fields["logprobs"].astype(np.float64)
    current = torch.from_numpy(recorded.get("logprobs", old).astype(np.float32))

    def run(advantages: np.ndarray) -> tuple[LossInputs, torch.Tensor, np.ndarray]:
        logprobs = current.clone().requires_grad_()
        x = objective.inputs(arrays.with_tokens(advantages=advantages.astype(np.float32)), logprobs, None, context)
        loss = objective(x, context.totals, MetricAccumulator())
        (gradient,) = torch.autograd.grad(loss, logprobs, allow_unused=True)
        return x, loss, np.zeros(len(current)) if gradient is None else gradient.double().numpy()

    _, loss, gradient = run(found.advantages)
    x, given_loss, given_gradient = run(recorded.get("advantages", found.advantages))
    with torch.no_grad():
        losses = objective.policy_losses(x, MetricAccumulator())
        kl = objective.reference_kl(x)
    return attrs.evolve(
        found,
        ratios=np.where(found.mask, np.exp(current.double().numpy() - old), 1.0),
        losses=losses.double().numpy(),
        kl=None if kl is None else kl.double().numpy(),
        loss=float(loss.detach()),
        given_loss=float(given_loss.detach()),
        gradient=gradient,
        given_gradient=given_gradient,
    )
