"""What an update minimises, from a `LossSpec`: per-token losses of components; the core masks, weighs and sums."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from rlsdk.batch import LossInputs, Totals, aggregate
from rlsdk.components import component_of
from rlsdk.contracts import LossSpec, TrainBatch
from rlsdk.errors import LearnerError
from rlsdk.learners.head import EntropyMode
from rlsdk.learners.metrics import Tally, add_component_metrics
from rlsdk.plugins import Plugins, Reference

_TOKEN_FIELDS = ("behaviour_logprobs", "ref_logprobs", "values")
_ROLLOUT_FIELDS = ("pairs", "preferred", "expert")
_OPTIONAL = (*_TOKEN_FIELDS[1:], *_ROLLOUT_FIELDS, "entropy")


@attrs.frozen(kw_only=True, eq=False)
class Moment:
    """Which update a micro-batch belongs to.

    Attributes:
        update: Which optimiser step of this batch, from 0.
        updates: How many there are.
        totals: Denominators of the optimiser batch, over all ranks.
        seed: Of random choices: equal on all ranks and micro-batches of one optimiser step.
        whole: Detached inputs of the optimiser batch, for losses that need it.
        offset: Where the micro-batch's tokens begin in `whole`.
    """

    update: int
    updates: int
    totals: Totals
    seed: int
    whole: LossInputs | None = None
    offset: int = 0


class Objective:
    """The actor's objective.

    Attributes:
        spec: As given.
        whole_batch: Whether the policy loss reads `x.whole`.
        entropy: What the model must compute of the entropy for an update.
    """

    def __init__(self, spec: LossSpec) -> None:
        plugins = Plugins()
        self.spec = spec
        self._loss = plugins.resolve(spec.policy_loss)
        self._correction = plugins.resolve(spec.correction) if spec.correction else None
        self._kl = plugins.resolve(spec.kl) if spec.kl else None
        if spec.kl_coef and self._kl is None:
            raise LearnerError(f"kl_coef is {spec.kl_coef}, but no kl estimator is named; name one, such as kl: k3")
        component = component_of(self._loss)
        self.whole_batch = component is not None and component.whole_batch
        differentiated = spec.entropy_coef != 0 or "entropy" in self._needs(self._loss)
        self.entropy: EntropyMode = "gradient" if differentiated else "value"

    def inputs(self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor | None, moment: Moment) -> LossInputs:
        """All that any component may read; each gets what it declared.

        Args:
            batch: The rollouts of a micro-batch.
            logprobs: float `[t]`, of the policy that learns.
            entropy: float `[t]` or None.
            moment: Which update it is.
        """
        device = logprobs.device
        fields: dict[str, Any] = {n: _float(batch.tokens[n], device) for n in _TOKEN_FIELDS if n in batch.tokens}
        labels = {n: batch.rollouts[n] for n in _ROLLOUT_FIELDS if n in batch.rollouts}
        fields |= {n: torch.from_numpy(np.array(v)).to(device) for n, v in labels.items()}
        if entropy is not None:
            fields["entropy"] = entropy
        if "pairs" in fields:
            fields["pairs"] = torch.unique(fields["pairs"], return_inverse=True)[1]
        old = batch.tokens.get("old_logprobs", batch.tokens.get("behaviour_logprobs"))
        advantages = batch.tokens.get("advantages")
        segments = np.repeat(np.arange(len(batch)), batch.responses)
        return LossInputs(
            logprobs,
            logprobs.detach() if old is None else _float(old, device),
            # A loss that reads advantages nobody computed must not pass for one with nothing to learn.
            torch.full_like(logprobs.detach(), torch.nan) if advantages is None else _float(advantages, device),
            torch.from_numpy(np.array(batch.loss_mask)).to(device),
            torch.from_numpy(segments).to(device),
            step=moment.update,
            of_steps=moment.updates,
            offset=moment.offset,
            whole=moment.whole,
            generator=torch.Generator().manual_seed(moment.seed),
            rows=len(batch),
            **fields,
        )

    def __call__(self, x: LossInputs, totals: Totals, tally: Tally) -> Tensor:
        """The scalar that this micro-batch adds to the objective of the optimiser batch; metrics go to `tally`.

        `Σ policy_loss · correction + kl_coef · Σ kl - entropy_coef · Σ entropy`, each sum divided as `totals` says.
        """
        spec, mask = self.spec, x.loss_mask
        per_token = self._run(self._loss, x, tally, "actor/")
        if self._correction is not None:
            weights = self._run(self._correction, x, tally, "actor/").detach()
            tally.add_tokens("actor/correction", weights, mask)
            per_token = per_token * weights
        policy = self._aggregate(per_token, x, totals)
        loss = policy
        tally.add("actor/policy_loss", policy.item(), 0.0)
        if self._kl is not None and hasattr(x, "ref_logprobs"):
            kl = self._kl(x.logprobs, x.ref_logprobs)
            tally.add_tokens("actor/ref_kl", kl, mask)
            if spec.kl_coef:
                loss = loss + spec.kl_coef * self._aggregate(kl, x, totals)
        if spec.entropy_coef:
            loss = loss - spec.entropy_coef * self._aggregate(x.entropy, x, totals)
        tally.add("actor/loss", loss.item(), 0.0)
        _observe(x, tally)
        return loss

    def _aggregate(self, per_token: Tensor, x: LossInputs, totals: Totals) -> Tensor:
        mode: Any = self.spec.aggregate
        return aggregate(per_token, x.loss_mask, x.segments, mode, norm=self.spec.norm, totals=totals)

    def _run(self, bound: Any, x: LossInputs, tally: Tally, prefix: str) -> Tensor:
        needs = self._needs(bound)
        hidden = {name: None for name in _OPTIONAL if name not in needs and hasattr(x, name)}
        found = bound(x.replace(**hidden) if hidden else x)
        values: Tensor
        values, metrics = found if isinstance(found, tuple) else (found, {})
        if values.shape != x.logprobs.shape:
            component = component_of(bound)
            raise LearnerError(
                f"{component.kind if component else 'component'} {component.name if component else bound!r} gave shape "
                f"{tuple(values.shape)}; expected {tuple(x.logprobs.shape)}, one value per token (the core sums)"
            )
        add_component_metrics(tally, prefix, metrics, x.loss_mask)
        return values

    @staticmethod
    def _needs(bound: Any) -> tuple[str, ...]:
        component = component_of(bound)
        return component.needs if component else ()


def value_loss(values: Tensor, old: Tensor | None, returns: Tensor, clip: float | None) -> Tensor:
    """Per token, half the squared error, or the greater of that and the clipped value's (PPO, arXiv:1707.06347).

    Args:
        values: float `[t]`, carries the gradient.
        old: float `[t]`, the critic's values before the update; None where `clip` is.
        returns: float `[t]`.
        clip: How far a value may move from the old one.
    """
    errors = (values - returns) ** 2
    if clip is not None and old is not None:
        clipped = old + (values - old).clamp(-clip, clip)
        errors = torch.maximum(errors, (clipped - returns) ** 2)
    return 0.5 * errors


def critic_loss(batch: TrainBatch, values: Tensor, clip: float | None, totals: Totals, tally: Tally) -> Tensor:
    """What a micro-batch adds to the critic's loss: the token mean of `value_loss`.

    Raises:
        LearnerError: The batch holds no returns, or no old values to clip around.
    """
    needed = ("returns",) if clip is None else ("returns", "values")
    if missing := [name for name in needed if name not in batch.tokens]:
        raise LearnerError(f"the critic learns from {' and '.join(missing)}; the batch holds {sorted(batch.tokens)}")
    mask = torch.from_numpy(np.array(batch.loss_mask)).to(values.device)
    segments = torch.from_numpy(np.repeat(np.arange(len(batch)), batch.responses)).to(values.device)
    returns = _float(batch.tokens["returns"], values.device)
    old = _float(batch.tokens["values"], values.device) if "values" in batch.tokens else None
    loss = aggregate(value_loss(values, old, returns, clip), mask, segments, "token-mean", totals=totals)
    tally.add("critic/loss", loss.item(), 0.0)
    tally.add_tokens("critic/values", values, mask)
    tally.add_tokens("critic/returns", returns, mask)
    if clip is not None and old is not None:
        tally.add_tokens("critic/clip_fraction", (values.detach() - old).abs() > clip, mask)
    return loss


def _observe(x: LossInputs, tally: Tally) -> None:
    """What one wants to see of every update, whatever the loss."""
    with torch.no_grad():
        difference = x.logprobs - x.old_logprobs
        ratio = difference.exp()
        tally.add_tokens("actor/ratio", ratio, x.loss_mask)
        tally.add_tokens("actor/ratio_max", ratio, x.loss_mask)
        # k3 of http://joschu.net/blog/kl-approx.html: unbiased and never negative
        tally.add_tokens("actor/kl_to_old", ratio - 1 - difference, x.loss_mask)
        gap = x.logprobs - x.behaviour_logprobs
        tally.add_tokens("actor/kl_to_behaviour", gap.exp() - 1 - gap, x.loss_mask)
        if hasattr(x, "entropy"):
            tally.add_tokens("actor/entropy", x.entropy, x.loss_mask)


def _float(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32)).to(device)


def needs_reference(spec: LossSpec, plugins: Plugins | None = None) -> bool:
    """Whether an update reads `ref_logprobs`."""
    plugins = plugins or Plugins()

    def reads(reference: Reference | None) -> bool:
        component = component_of(plugins.resolve(reference)) if reference else None
        return component is not None and "ref_logprobs" in component.needs

    return bool(spec.kl_coef) or reads(spec.policy_loss) or reads(spec.correction)
