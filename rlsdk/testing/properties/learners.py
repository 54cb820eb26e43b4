"""Properties of a started learner: what it computes, learns, saves and sends, with a small model on one rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlsdk.batch import LossInputs
from rlsdk.contracts import ActorSpec, GivesPrimitives, LossSpec, Model, Roles, TrainBatch, Weights
from rlsdk.errors import described
from rlsdk.marks import policy_loss
from rlsdk.testing.findings import NotApplicable, Violated
from rlsdk.testing.properties.engines import STARTED, check_near, logprobs_of
from rlsdk.testing.subject import Subject, holds

TEMPERATURE = 0.8
LR = 1e-3
SMALL = 24
"""Tokens of a micro-batch, so that the test batch makes several."""
NEAR = 0.02
"""Largest difference of two changes of the weights that should be equal, as a share of the change; rounding makes an
optimiser such as AdamW move a few weights whose gradient is nearly 0 differently."""
UPDATES = ("starts", "sends-all-weights")
RESUMES = (*UPDATES, "learns", "resumes")
Tensors = Mapping[str, np.ndarray]


@policy_loss("check")
def check_loss(x: LossInputs) -> Any:
    """Ratio times advantage."""
    return -x.advantages * (x.logprobs - x.old_logprobs).exp()


@attrs.define(eq=False)
class LearnerTrial:
    """A learner of one rank that trains a small model."""

    learner: Any
    folder: Path
    net: Any = attrs.field(init=False)
    batch: TrainBatch = attrs.field(init=False)
    first: Tensors = attrs.field(init=False)

    def start(self, subject: Subject) -> None:
        """Start the learner with a new model.

        Raises:
            Violated: It does not start.
        """
        from transformers import AutoModelForCausalLM

        from rlsdk.nano import create

        create(self.folder, initializer_range=0.2)
        self.learner = self.started(subject, {})
        self.net = AutoModelForCausalLM.from_pretrained(self.folder).eval()
        self.batch = make_batch(self.net)

    def started(self, subject: Subject, options: Mapping[str, Any]) -> Any:
        """Start a learner with these options beside the given ones.

        Raises:
            Violated: It does not start.
        """
        known = {option.name for option in subject.component.options}
        learner: Any = attrs.evolve(
            subject, given={**({"lr": LR} if "lr" in known else {}), **subject.given, **options}
        ).make()
        spec = LossSpec(
            policy_loss=subject.plugins.reference("policy_loss", check_loss), temperature=TEMPERATURE, train_steps=4
        )
        roles, place = Roles(actor=Model(path=str(self.folder), max_length=128)), ActorSpec(role="learner")
        try:
            learner.start(roles, spec, place, 8)
        except Exception as error:
            raise Violated("raised", "a started learner", described(error)) from error
        return learner

    def settle(self) -> None:
        """Nothing is left over by a property that failed."""

    def tensors(self, subject: Subject) -> Tensors:
        """Return copies of the learner's weights, as float arrays."""
        import torch

        from rlsdk.weights import from_weights

        sent: Weights = subject.call(self.learner.weights, 1)
        return {name: tensor.to(torch.float32).numpy().copy() for name, tensor in from_weights(sent)}

    def update(self, subject: Subject, batch: TrainBatch, *, scale: int = 1) -> dict[str, float]:
        """Take an optimiser step; `scale` multiplies the totals, as if other ranks had as many rollouts."""
        totals = batch.totals
        one = (batch, totals.tokens * scale, totals.rollouts * scale)
        found: dict[str, float] = subject.call(self.learner.update, [one], 0)
        return found

    def save(self, subject: Subject, name: str) -> Path:
        """Write a checkpoint."""
        folder = self.folder.parent / name
        folder.mkdir()
        subject.call(self.learner.save, folder)
        return folder


def make_batch(net: Any, seed: int = 0) -> TrainBatch:
    """Return rollouts of uneven lengths, with gaps in the trained tokens, sampled by nobody but with true logprobs."""
    from rlsdk.contracts import Sampling

    rng, count = np.random.default_rng(seed), 8
    starts, responses = rng.integers(2, 7, count), rng.integers(3, 11, count)
    ids = [rng.integers(3, net.config.vocab_size, p + r) for p, r in zip(starts, responses, strict=True)]
    how = Sampling(temperature=TEMPERATURE)
    true = [logprobs_of(net, each, how)[p - 1 :] for each, p in zip(ids, starts, strict=True)]
    t = int(responses.sum())
    advantages = np.repeat(rng.normal(size=count), responses).astype(np.float32)
    mask = rng.random(t) < 0.8
    mask[:2] = (True, False)
    old = np.concatenate(true)
    tokens = {"old_logprobs": old, "behaviour_logprobs": old.copy(), "advantages": advantages}
    return TrainBatch(
        token_ids=np.concatenate(ids),
        lengths=starts + responses,
        starts=starts,
        responses=responses,
        loss_mask=mask,
        tokens=tokens,
    )


def gap(found: Tensors, wanted: Tensors, before: Tensors) -> float:
    """Return the norm of the difference of two weights, as a share of the norm of their change."""
    apart = sum(float(np.square(found[n] - wanted[n]).sum()) for n in wanted)
    change = sum(float(np.square(wanted[n] - before[n]).sum()) for n in wanted)
    return math.sqrt(apart / change) if change else math.inf


def check_same_weights(found: Tensors, wanted: Tensors, why: str) -> None:
    """Compare weights bit by bit.

    Raises:
        Violated: They differ; the message names the tensor that differs most.
    """
    gaps = {n: float(np.abs(found[n] - wanted[n]).max()) for n in wanted}
    worst = max(gaps, key=lambda n: gaps[n])
    if gaps[worst] > 0:
        raise Violated("value", f"the same weights {why}", f"{worst} differs by up to {gaps[worst]:.2g}")


@holds(
    "starts",
    "learner",
    remedy="let `start` load the model folder of roles.actor, in float32 on the CPU; a learner that needs a GPU cannot "
    "be tried here",
    starts=True,
)
def starts(subject: Subject, trial: LearnerTrial) -> None:
    """It starts on the CPU, as the only rank, with a small Llama, two layers of width 128, and no other roles."""
    trial.start(subject)


@holds(
    "computes-logprobs",
    "learner",
    remedy="return for each response token its logprob given all tokens before it, with the logits divided by "
    "loss.temperature; `canary` at temperature 1",
    after=STARTED,
    starts=True,
)
def computes_logprobs(subject: Subject, trial: LearnerTrial) -> None:
    """`logprobs` and `canary` give what transformers gives for the same weights, one number per response token."""
    found = subject.call(lambda: trial.learner.logprobs(trial.batch))
    if not isinstance(found, Mapping) or set(found) != {"logprobs"}:
        raise Violated("form", "{'logprobs': array} from logprobs(batch)", repr(found)[:200])
    check_near(found["logprobs"], trial.batch.tokens["old_logprobs"], f"logprobs at temperature {TEMPERATURE}")
    ids = trial.batch.token_ids[:20]
    check_near(subject.call(trial.learner.canary, ids), logprobs_of(trial.net, ids), "canary")


@holds(
    "sends-all-weights",
    "learner",
    remedy="return every tensor of the actor, named as in its checkpoint, with the version given",
    after=STARTED,
    starts=True,
)
def sends_all_weights(subject: Subject, trial: LearnerTrial) -> None:
    """`weights(version)` has all tensors of the model's checkpoint, by name and shape, and at first their values."""
    from safetensors.numpy import load_file

    sent = subject.call(trial.learner.weights, 5)
    if not isinstance(sent, Weights) or sent.version != 5:
        told = f"version {sent.version}" if isinstance(sent, Weights) else f"a {type(sent).__name__}"
        raise Violated("form", "Weights of version 5 on rank 0, from weights(5)", told)
    wanted, found = load_file(trial.folder / "model.safetensors"), trial.tensors(subject)
    if missing := sorted(wanted.keys() - found.keys()):
        raise Violated("value", f"the {len(wanted)} tensors of the checkpoint", f"none of {', '.join(missing)}")
    if wrong := [n for n in wanted if found[n].shape != wanted[n].shape]:
        shapes = f"{wrong[0]} {list(found[wrong[0]].shape)}"
        raise Violated("value", f"{wrong[0]} {list(wanted[wrong[0]].shape)}", shapes)
    if strangers := sorted(found.keys() - wanted.keys() - {"lm_head.weight"}):
        raise Violated("value", "only tensors of the checkpoint", f"also {', '.join(strangers)}")
    check_same_weights(found, wanted, "as in the model's folder, before any update")
    trial.first = found


@holds(
    "learns",
    "learner",
    remedy="minimise the policy loss of the tokens in `loss_mask`, with logprobs at loss.temperature, and return "
    "metrics as a dict of numbers",
    after=UPDATES,
    starts=True,
)
def learns(subject: Subject, trial: LearnerTrial) -> None:
    """An update moves the weights against the gradient of the loss, and returns metrics."""
    untouched = trial.save(subject, "untouched")
    metrics = trial.update(subject, trial.batch)
    if not isinstance(metrics, Mapping) or any(not isinstance(v, int | float) for v in metrics.values()):
        raise Violated("form", "a dict of numbers from update", repr(metrics)[:200])
    after, gradient = trial.tensors(subject), _gradient(trial)
    agreeing = total = moved = 0.0
    for name, slope in gradient.items():
        step = after[name] - trial.first[name]
        total += float(np.abs(slope).sum())
        agreeing += float(np.abs(slope)[step * slope < 0].sum())
        moved = max(moved, float(np.abs(step).max()))
    if not moved:
        raise Violated("value", "other weights after an update", "the same")
    if agreeing < 0.75 * total:
        share = f"{agreeing / total:.0%} of the gradient, by size"
        raise Violated("value", "weights that move against the gradient of the loss", f"they do for {share}")
    ids = trial.batch.token_ids[:20]
    wanted = logprobs_of(_with_weights(trial, after), ids)
    check_near(subject.call(trial.learner.canary, ids), wanted, "canary with the weights sent after an update")
    subject.call(trial.learner.load, untouched)


def _gradient(trial: LearnerTrial) -> dict[str, np.ndarray]:
    """Return the gradient of the test batch's loss, computed with transformers, one rollout at a time."""
    import torch

    batch, offset, at = trial.batch, 0, 0
    losses: list[Any] = []
    for length, start, count in zip(batch.lengths, batch.starts, batch.responses, strict=True):
        ids = torch.from_numpy(batch.token_ids[offset : offset + length])
        log_p = (trial.net(ids[None]).logits[0, start - 1 : -1] / TEMPERATURE).log_softmax(-1)
        own = slice(at, at + count)
        ratio = log_p.gather(1, ids[start:, None])[:, 0] - torch.from_numpy(batch.tokens["old_logprobs"][own])
        values = -torch.from_numpy(batch.tokens["advantages"][own]) * ratio.exp()
        losses.append(values[torch.from_numpy(batch.loss_mask[own])])
        offset, at = offset + length, at + count
    loss = torch.cat(losses).mean()
    named = dict(trial.net.named_parameters())
    return {n: g.numpy() for n, g in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True)}


def _with_weights(trial: LearnerTrial, tensors: Tensors) -> Any:
    import copy

    import torch

    net = copy.deepcopy(trial.net)
    net.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, strict=False)
    net.tie_weights()
    return net


@holds(
    "resumes",
    "learner",
    remedy="write in `save` all that later steps depend on (float32 weights, the optimiser's moments and step count, "
    "the schedule's position), and restore it in `load`",
    after=(*UPDATES, "learns"),
    starts=True,
)
def resumes(subject: Subject, trial: LearnerTrial) -> None:
    """After `load` of what `save` wrote, weights are the same bit by bit, and so are those after the next update."""
    check_same_weights(trial.tensors(subject), trial.first, "after load as at the save before the first update")
    trial.update(subject, trial.batch)
    saved, folder = trial.tensors(subject), trial.save(subject, "after-one")
    trial.update(subject, trial.batch)
    wanted = trial.tensors(subject)
    subject.call(trial.learner.load, folder)
    check_same_weights(trial.tensors(subject), saved, "after load as at the save after one update")
    trial.update(subject, trial.batch)
    check_same_weights(trial.tensors(subject), wanted, "after load and an update as after that update without a stop")


@holds(
    "micro-batches",
    "learner",
    remedy="sum the token losses of all micro-batches and divide once by the given totals (rlsdk.batch.aggregate with "
    "`totals`), never by the tokens of a micro-batch",
    after=RESUMES,
    starts=True,
)
def micro_batches(subject: Subject, trial: LearnerTrial) -> None:
    """The update does not depend on how rollouts are ordered or split into micro-batches."""
    _reset(subject, trial)
    trial.update(subject, trial.batch)
    wanted = trial.tensors(subject)
    _reset(subject, trial)
    trial.update(subject, trial.batch.select(np.arange(len(trial.batch))[::-1]))
    _compare(trial, trial.tensors(subject), wanted, "with the rollouts in reverse order")
    learner = trial.learner
    if isinstance(learner, GivesPrimitives):
        _reset(subject, trial)
        parts = [trial.batch.select(np.arange(3)), trial.batch.select(np.arange(3, len(trial.batch)))]
        for part, last in zip(parts, (False, True), strict=True):
            subject.call(lambda: learner.forward_backward(part, trial.batch.totals, last=last))  # noqa: B023
        subject.call(learner.optimizer_step)
        _compare(trial, trial.tensors(subject), wanted, "by forward_backward of 3 rollouts, then of the other 5")
    option = next((o for o in subject.component.options if o.name == "micro_batch_tokens"), None)
    if option is None or option.name in subject.given:
        return
    subject.call(learner.stop)
    try:
        trial.learner = trial.started(subject, {option.name: SMALL})
    except Violated as error:
        raise NotApplicable(f"it cannot be started twice in one process: {error.got}") from error
    trial.update(subject, trial.batch)
    _compare(trial, trial.tensors(subject), wanted, f"with {option.name}={SMALL}")


def _reset(subject: Subject, trial: LearnerTrial) -> None:
    subject.call(trial.learner.load, trial.folder.parent / "untouched")


def _compare(trial: LearnerTrial, found: Tensors, wanted: Tensors, how: str) -> None:
    if (share := gap(found, wanted, trial.first)) > NEAR:
        raise Violated("value", f"the same change of the weights {how}", f"one that differs by {share:.0%}")


@holds(
    "divides-by-the-totals",
    "learner",
    remedy="divide by the trained tokens and rollouts that `update` gets with each share, which count all ranks, not "
    "by those of the share",
    after=RESUMES,
    starts=True,
)
def divides_by_the_totals(subject: Subject, trial: LearnerTrial) -> None:
    """Totals a thousand times as large in the second step, as if other ranks had the rest, make its gradient small."""
    ends = []
    other = make_batch(trial.net, seed=1)
    for scale in (1, 1000):
        _reset(subject, trial)
        trial.update(subject, trial.batch)
        trial.update(subject, other, scale=scale)
        ends.append(trial.tensors(subject))
    if gap(ends[1], ends[0], trial.first) < 1e-3:
        raise Violated("value", "other weights with totals a thousand times as large", "the same")


@holds(
    "trains-masked-tokens-only",
    "learner",
    remedy="multiply each token's loss by loss_mask before it is summed",
    after=RESUMES,
    starts=True,
)
def trains_masked_tokens_only(subject: Subject, trial: LearnerTrial) -> None:
    """Advantages and logprobs of tokens outside `loss_mask` have no effect."""
    batch = trial.batch
    noise = np.where(batch.loss_mask, 0, 3).astype(np.float32)
    changed = batch.with_tokens(
        advantages=batch.tokens["advantages"] + noise, old_logprobs=batch.tokens["old_logprobs"] - noise
    )
    ends = []
    for each in (batch, changed):
        _reset(subject, trial)
        trial.update(subject, each)
        ends.append(trial.tensors(subject))
    _compare(trial, ends[1], ends[0], "whatever the advantages of tokens outside loss_mask")


@holds(
    "exports",
    "learner",
    remedy="write config and weights as `save_pretrained` does",
    after=UPDATES,
    starts=True,
)
def exports(subject: Subject, trial: LearnerTrial) -> None:
    """`export` writes a folder that transformers loads, with the weights that `weights` returns."""
    from transformers import AutoModelForCausalLM

    folder = trial.folder.parent / "exported"
    subject.call(trial.learner.export, folder)
    wanted = trial.tensors(subject)
    try:
        net = AutoModelForCausalLM.from_pretrained(folder)
    except Exception as error:  # transformers raises anything for files that it cannot use
        raise Violated("form", "a folder that transformers loads", described(error)) from error
    found = {n: t.float().numpy() for n, t in net.state_dict().items() if n in wanted}
    check_same_weights({n: wanted[n] for n in found}, found, "in the exported folder as weights() returns")
