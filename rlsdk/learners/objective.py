"""The training objective of a `LossSpec`: mask, weight and sum the per-token losses of its components."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from rlsdk.batch import LossInputs, Totals, aggregate
from rlsdk.batch.arithmetic import bounded
from rlsdk.components import component_of, needs_of, see_definition, warn_of_changes
from rlsdk.contracts import LossSpec, TrainBatch
from rlsdk.errors import LearnerError, MissingFieldError, RlsdkError, described
from rlsdk.fields import UPDATE_FIELDS, WHOLE_GROUPS, names
from rlsdk.head import EntropyMode
from rlsdk.isolation.process_settings import settings_kept
from rlsdk.learners.metrics import Gather, Memory, MetricAccumulator, add_component_metrics
from rlsdk.learners.router import ExpertTotals
from rlsdk.plugins import ComponentRef, Plugins
from rlsdk.schedules import EntropyTarget, at

log = logging.getLogger(__name__)
_TOKEN_FIELDS = ("behaviour_logprobs", *UPDATE_FIELDS)
_ROLLOUT_FIELDS = names("loss", axis="rollout")
_OPTIONAL = names("loss", access="on request")
_OWN_METRICS = frozenset(
    {"loss", "policy_loss", "correction", "ref_kl", "router_loss", "entropy", "ratio", "ratio_max", "kl_to_old"}
    | {"kl_to_behaviour", "grad_norm", "lr", "skipped_updates", "gap", "gap_generation", "entropy_coef"}
)
"""Actor metrics `actor/NAME` that belong to the core; components must not report them."""


@attrs.frozen(kw_only=True, eq=False)
class UpdateContext:
    """The optimiser step that a micro-batch belongs to, with its totals and seed.

    Attributes:
        update: Index of the optimiser step within this batch, from 0.
        updates: Number of optimiser steps for this batch.
        train_step: Number of completed training steps.
        updates_done: Number of optimiser steps completed since training began.
        experts: Use of experts by the rollouts of this step, for the load-balancing loss; None if there is none, or if
            they are one micro-batch.
        totals: Denominators of the optimiser batch, over all ranks.
        seed: Seed of random choices, equal on all ranks and micro-batches of one optimiser step.
        whole: Detached inputs of the optimiser batch, for losses that need them.
        offset: Position in `whole` where the micro-batch's tokens begin.
    """

    update: int
    updates: int
    totals: Totals
    seed: int
    whole: LossInputs | None = None
    offset: int = 0
    train_step: int = 0
    updates_done: int = 0
    experts: ExpertTotals | None = None


class Objective:
    """The actor's objective.

    Attributes:
        spec: Specification of the loss.
        whole_batch: True if the policy loss reads `x.whole`.
        entropy: Entropy mode that an update needs from the model.
    """

    def __init__(self, spec: LossSpec) -> None:
        plugins = Plugins()
        self.spec = spec
        self._loss = plugins.resolve(spec.policy_loss)
        self._names = {"policy_loss": spec.policy_loss.name, "entropy_coef": "target"}
        self._corrections: dict[str, Any] = {}
        for name, reference in (spec.correction.singles if spec.correction else {}).items():
            key = f"correction/{name}" if spec.correction and spec.correction.parts else "correction"
            self._corrections[key], self._names[key] = plugins.resolve(reference), reference.name
        self._kl = plugins.resolve(spec.kl) if spec.kl else None
        if spec.kl_coef and self._kl is None:
            raise LearnerError(f"kl_coef is {spec.kl_coef}, but no kl estimator is named; name one, such as kl: k3")
        parts = {"policy_loss": self._loss, **self._corrections}
        self._memories = {kind: memory for kind, part in parts.items() if (memory := Memory.of(part)) is not None}
        if isinstance(spec.entropy_coef, EntropyTarget):
            self._memories["entropy_coef"] = Memory(AdaptiveEntropyCoef(spec.entropy_coef))
        component = component_of(self._loss)
        self.whole_batch = component is not None and component.whole_batch
        components = [component_of(part) for part in parts.values()]
        self._declared = {field.name for part in components if part is not None for field in part.fields}
        differentiated = spec.entropy_coef != 0 or "entropy" in needs_of(self._loss)
        self.entropy: EntropyMode = "gradient" if differentiated else "value"

    def inputs(self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor | None, context: UpdateContext) -> LossInputs:
        """Build all inputs that components may read; each component gets those that it declared.

        Args:
            batch: Rollouts of a micro-batch.
            logprobs: Logprobs of the policy in training, float `[t]`.
            entropy: Entropy, float `[t]`, or None.
            context: Context of the update.
        """
        device = logprobs.device
        fields: dict[str, Any] = {n: _float(batch.tokens[n], device) for n in _TOKEN_FIELDS if n in batch.tokens}
        labels = {n: batch.rollouts[n] for n in _ROLLOUT_FIELDS if n in batch.rollouts}
        fields |= {n: torch.from_numpy(np.array(v)).to(device) for n, v in labels.items()}
        if entropy is not None:
            fields["entropy"] = entropy
        for name in WHOLE_GROUPS:
            if name in fields:
                fields[name] = torch.unique(fields[name], return_inverse=True)[1]
        old = batch.tokens.get("old_logprobs", batch.tokens.get("behaviour_logprobs"))
        advantages = batch.tokens.get("advantages")
        segments = np.repeat(np.arange(len(batch)), batch.responses)
        extra = {n: _float(batch.tokens[n], device) for n in self._declared if n in batch.tokens}
        return LossInputs(
            logprobs,
            logprobs.detach() if old is None else _float(old, device),
            # Missing advantages must raise an error rather than look like a loss of zero.
            torch.full_like(logprobs.detach(), torch.nan) if advantages is None else _float(advantages, device),
            torch.from_numpy(np.array(batch.loss_mask)).to(device),
            torch.from_numpy(segments).to(device),
            step=context.update,
            of_steps=context.updates,
            train_step=context.train_step,
            train_steps=self.spec.train_steps,
            update=context.updates_done,
            offset=context.offset,
            aggregate=self.spec.aggregate,
            whole=context.whole,
            generator=torch.Generator().manual_seed(context.seed),
            rows=len(batch),
            **fields,
        ).with_extra(**extra)

    def __call__(self, x: LossInputs, totals: Totals, accumulator: MetricAccumulator) -> Tensor:
        """Compute this micro-batch's contribution to the objective of the optimiser step, and accumulate metrics.

        `Σ policy_loss · correction + kl_coef · Σ kl - entropy_coef · Σ entropy`, each sum divided according to
        `totals`.
        """
        spec, mask = self.spec, x.loss_mask
        kl_coef = at(spec.kl_coef, x.train_step)
        if isinstance(spec.entropy_coef, EntropyTarget):
            entropy_coef = self._memories["entropy_coef"].call(x)[0]
            accumulator.add_tokens("actor/entropy_coef", torch.full_like(x.entropy.detach(), entropy_coef), mask)
        else:
            entropy_coef = at(spec.entropy_coef, x.train_step)
        policy = self._aggregate(self._differentiable(self.policy_losses(x, accumulator), x), x, totals)
        loss = policy
        accumulator.add("actor/policy_loss", policy.item(), 0.0)
        kl = self.reference_kl(x)
        if kl is not None:
            accumulator.add_tokens("actor/ref_kl", kl, mask)
            if kl_coef:
                loss = loss + kl_coef * self._aggregate(kl, x, totals)
        if entropy_coef:
            loss = loss - entropy_coef * self._aggregate(x.entropy, x, totals)
        accumulator.add("actor/loss", loss.item(), 0.0)
        _observe(x, accumulator)
        return loss

    def _differentiable(self, losses: Tensor, x: LossInputs) -> Tensor:
        """Return the losses with a gradient, which is zero if they are all zero, as when a loss selects no token.

        Raises:
            LearnerError: They are not zero, but do not depend on the policy.
        """
        if losses.requires_grad or not x.logprobs.requires_grad:
            return losses
        if bool(losses[x.loss_mask].ne(0).any()):
            raise LearnerError(
                f"policy_loss {self._names['policy_loss']!r} returned values without a gradient, which train nothing; "
                "compute them from x.logprobs, without detach(), item(), no_grad() or integers"
                f"{see_definition(self._loss)}"
            )
        return losses + 0.0 * torch.where(x.loss_mask, x.logprobs, 0)

    def policy_losses(self, x: LossInputs, accumulator: MetricAccumulator) -> Tensor:
        """Compute each token's policy loss weighted by the corrections, float `[t]`, and accumulate metrics."""
        per_token, reported = self._run("policy_loss", self._loss, x, accumulator, _OWN_METRICS)
        factors: list[Tensor] = []
        for key, correction in self._corrections.items():
            returned = self._run(key, correction, x, accumulator, _OWN_METRICS | reported)[0].detach()
            weights = torch.where(x.loss_mask, returned, 0)
            if bool((weights < 0).any()):
                raise LearnerError(
                    f"correction {self._names[key]!r} returned the weight {float(weights.min()):g}; expected 0 or "
                    "more: a negative weight trains its token in the opposite direction"
                )
            if key != "correction":  # one of several
                accumulator.add_tokens(f"actor/{key}", weights, x.loss_mask)
            factors.append(weights)
        if not factors:
            return per_token
        product = math.prod(factors[1:], start=factors[0])
        accumulator.add_tokens("actor/correction", product, x.loss_mask)
        return per_token * product

    def reference_kl(self, x: LossInputs) -> Tensor | None:
        """Compute each token's KL to the reference model, float `[t]`; None without estimator or reference logprobs."""
        if self._kl is None or not hasattr(x, "ref_logprobs"):
            return None
        # An untrained token may have an infinite estimate, whose gradient times zero is NaN.
        logprobs, reference = (torch.where(x.loss_mask, each, 0) for each in (x.logprobs, x.ref_logprobs))
        estimator = at(self._kl, x.train_step)
        with _named("kl", estimator) as name:
            return _per_token(name, estimator(logprobs, reference), x)

    def _aggregate(self, per_token: Tensor, x: LossInputs, totals: Totals) -> Tensor:
        mode: Any = self.spec.aggregate
        norm = at(self.spec.norm, x.train_step)
        return aggregate(per_token, x.loss_mask, x.segments, mode, norm=norm, totals=totals)

    def _run(
        self, key: str, bound: Any, x: LossInputs, accumulator: MetricAccumulator, taken: frozenset[str]
    ) -> tuple[Tensor, frozenset[str]]:
        """Return a component's values `[t]` and metric names.

        A duplicate name gets the key as a prefix, as does every name of one of several corrections.
        """
        needs = needs_of(bound)
        hidden = {name: None for name in (*_OPTIONAL, *x.extra) if name not in needs and hasattr(x, name)}
        call = self._memories[key].call if key in self._memories else bound
        kind, *several = key.split("/", 1)
        with _named(kind, bound) as name:
            edits = x.edits
            result = call(x.replace(**hidden) if hidden else x)
            if changed := [field for field, count in x.edits.items() if count != edits[field]]:
                raise LearnerError(
                    f"{name} changed x.{changed[0]} in place, but the rest of the objective reads it too: avoid "
                    f"methods that end in '_', += and x.{changed[0]}[…] = … on it, or change a copy, "
                    f"x.{changed[0]}.clone()"
                )
            returned, metrics = result if isinstance(result, tuple) else (result, {})
            values = _per_token(name, returned, x)
            named = {f"{key}/{n}" if several or n in taken else n: value for n, value in metrics.items()}
            add_component_metrics(accumulator, "actor/", named, x.loss_mask)
        return values, frozenset(metrics)

    def forget(self) -> None:
        """Drop the recorded calls of an optimiser step that restarts."""
        for memory in self._memories.values():
            memory.forget()

    def advance(self, gather: Gather, *, taken: bool = True) -> None:
        """Advance the state of stateful components after an optimiser step; see `Memory.advance`."""
        for memory in self._memories.values():
            memory.advance(gather, taken=taken)

    def state(self) -> dict[str, Any]:
        """Return the components' state as plain JSON: kind -> component name and state."""
        return {key: {"name": self._names[key], "state": each.state()} for key, each in self._memories.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore from `state()`; a component whose name has changed starts without state."""
        for key, memory in self._memories.items():
            if key in state and state[key]["name"] == self._names[key]:
                memory.restore(state[key]["state"])
            else:
                kind = key.partition("/")[0]
                log.warning("the checkpoint holds no state of %s %s: it starts without one", kind, self._names[key])


class AdaptiveEntropyCoef:
    """Weight of the entropy bonus for an `EntropyTarget`, whose calls are spread as `Memory` describes.

    Attributes:
        rule: The target, and how the weight follows it.
        coef: Weight whenever the entropy is at most the target.
        low: True if the entropy was at most the target in the last optimiser step; False before the first.
    """

    def __init__(self, rule: EntropyTarget) -> None:
        self.rule, self.coef, self.low = rule, rule.initial, False

    def __call__(self, x: LossInputs) -> tuple[float, dict[str, Tensor]]:
        """Return the weight in this optimiser step, and the metric that `advance` reads."""
        return self.coef if self.low else 0.0, {"entropy": x.entropy}

    def advance(self, metrics: Mapping[str, float]) -> None:
        """Change the weight by one step; a step without trained tokens has no entropy, and changes nothing."""
        if "entropy" in metrics:
            rule, self.low = self.rule, metrics["entropy"] <= self.rule.target
            moved = self.coef + (rule.delta if self.low else -rule.delta)
            self.coef = min(max(moved, rule.min), rule.max)

    def state(self) -> dict[str, Any]:
        """Return the state as plain JSON."""
        return {"coef": self.coef, "low": self.low}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state()`."""
        self.coef, self.low = float(state["coef"]), bool(state["low"])


@contextmanager
def _named(kind: str, part: Any) -> Iterator[str]:
    """Add the component's name and code line to an error that it raises; yields the name."""
    component = component_of(part)
    name = f"{kind} {component.name!r}" if component else f"{kind} {part!r}"
    try:
        with settings_kept() as changes:
            yield name
    except MissingFieldError as error:
        raise error.read_by(name) from error
    except (RlsdkError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:  # `sys.exit` in it would end the rank without a word
        raise LearnerError(f"{name} failed: {described(error)}") from error
    warn_of_changes(part, changes)


def _per_token(name: str, values: Any, x: LossInputs) -> Tensor:
    expected = tuple(x.logprobs.shape)
    if isinstance(values, Tensor) and tuple(values.shape) == expected:
        return values
    got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
    raise LearnerError(f"{name} returned {got}; expected {expected}, one value per token (the core sums)")


def value_loss(values: Tensor, old: Tensor | None, returns: Tensor, clip: float | None) -> Tensor:
    """Return half the squared error per token, or the maximum of it and the clipped one (PPO, arXiv:1707.06347).

    Args:
        values: float `[t]`, carries the gradient.
        old: float `[t]`, the critic's values before the update; may be None if `clip` is None.
        returns: float `[t]`.
        clip: Maximum change of a value from the old one.
    """
    errors = (values - returns) ** 2
    if clip is not None and old is not None:
        clipped = old + (values - old).clamp(-clip, clip)
        errors = torch.maximum(errors, (clipped - returns) ** 2)
    return 0.5 * errors


def critic_loss(
    batch: TrainBatch, values: Tensor, clip: float | None, totals: Totals, accumulator: MetricAccumulator
) -> Tensor:
    """Compute a micro-batch's contribution to the critic's loss, the token mean of `value_loss`.

    Raises:
        LearnerError: The batch has no returns, or no old values to clip around.
    """
    needed = ("returns",) if clip is None else ("returns", "values")
    if missing := [name for name in needed if name not in batch.tokens]:
        raise LearnerError(f"the critic needs {' and '.join(missing)}; the batch has {sorted(batch.tokens)}")
    mask = torch.from_numpy(np.array(batch.loss_mask)).to(values.device)
    segments = torch.from_numpy(np.repeat(np.arange(len(batch)), batch.responses)).to(values.device)
    returns = _float(batch.tokens["returns"], values.device)
    old = _float(batch.tokens["values"], values.device) if "values" in batch.tokens else None
    loss = aggregate(value_loss(values, old, returns, clip), mask, segments, "token-mean", totals=totals)
    accumulator.add("critic/loss", loss.item(), 0.0)
    accumulator.add_tokens("critic/values", values, mask)
    accumulator.add_tokens("critic/returns", returns, mask)
    if clip is not None and old is not None:
        accumulator.add_tokens("critic/clip_fraction", (values.detach() - old).abs() > clip, mask)
    return loss


def _observe(x: LossInputs, accumulator: MetricAccumulator) -> None:
    """Record the metrics common to all losses."""
    with torch.no_grad():
        # In float64 and clamped as in losses, so that one impossible token leaves the mean finite
        others = (x.old_logprobs, x.behaviour_logprobs)
        to_old, to_behaviour = (bounded(x.logprobs.double() - other.double()) for other in others)
        ratio = to_old.exp()
        # No policy sampled an expert's tokens, so their old logprobs are not those of a distribution to compare with
        sampled = x.loss_mask & ~x.expert[x.segments] if hasattr(x, "expert") else x.loss_mask
        accumulator.add_tokens("actor/ratio", ratio, sampled)
        accumulator.add_tokens("actor/ratio_max", ratio, sampled)
        # k3 of http://joschu.net/blog/kl-approx.html: unbiased and never negative, and with `expm1` exact near 0, too
        accumulator.add_tokens("actor/kl_to_old", to_old.expm1() - to_old, sampled)
        accumulator.add_tokens("actor/kl_to_behaviour", to_behaviour.expm1() - to_behaviour, sampled)
        if hasattr(x, "entropy"):
            accumulator.add_tokens("actor/entropy", x.entropy, x.loss_mask)


def _float(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32)).to(device)


def needs_reference(spec: LossSpec, plugins: Plugins | None = None) -> bool:
    """Return True if an update reads `ref_logprobs`."""
    plugins = plugins or Plugins()

    def reads(reference: ComponentRef | None) -> bool:
        component = component_of(plugins.resolve(reference)) if reference else None
        return component is not None and "ref_logprobs" in component.needs

    return bool(spec.kl_coef) or reads(spec.policy_loss) or reads(spec.correction)
