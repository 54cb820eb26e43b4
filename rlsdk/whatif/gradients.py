"""Gradients of two objectives on the same rollouts with a checkpoint's weights, in one process on the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from rlsdk.batch import LossInputs
from rlsdk.checkpoints.checkpoint import EXPORT, Checkpoints
from rlsdk.config import Plan
from rlsdk.contracts import Model, TrainBatch
from rlsdk.errors import CheckpointError, LearnerError, first_line
from rlsdk.evaluation.models import model_of
from rlsdk.learners.metrics import MetricAccumulator
from rlsdk.learners.micro_batches import MicroBatch, MicroBatchRunner
from rlsdk.learners.model import PolicyModel, load_policy
from rlsdk.learners.objective import Objective, UpdateContext
from rlsdk.learners.ranks import Ranks
from rlsdk.learners.trained import PhaseTimer
from rlsdk.rollout.step_batch import StepBatch, labels
from rlsdk.whatif.question import WhatIfQuestion

BUDGET = 8192
"""Maximum tokens of a micro-batch."""
_FIELDS = ("logprobs", "entropy", "probs_squared_sum")
NEWEST = "newest"


@contextmanager
def checkpoint_model(run: Path, which: str) -> Iterator[Path]:
    """Yield the folder of the model for the gradients.

    Args:
        run: Folder of the run.
        which: `newest`, the step of a checkpoint, or a model's folder.

    Raises:
        CheckpointError: There is no such checkpoint, or it has no exported model.
    """
    if which != NEWEST and not re.fullmatch(r"\d+", which):
        if not (Path(which) / "config.json").is_file():
            raise CheckpointError(f"--checkpoint: {which} is neither the step of a checkpoint nor a model folder")
        yield Path(which)
        return
    checkpoints = Checkpoints(run, keep=1)
    steps = checkpoints.steps()
    if not steps or (which != NEWEST and int(which) not in steps):
        listed = f"; available: {', '.join(map(str, steps))}" if steps else ""
        raise CheckpointError(f"--checkpoint: {run} has no complete checkpoint of step {which}{listed}")
    step = steps[-1] if which == NEWEST else int(which)
    folder = checkpoints.path(step)
    if not (folder / EXPORT).is_dir():
        raise CheckpointError(
            f"--checkpoint: {folder} holds no exported model (checkpoint.export writes one with the last checkpoint or "
            f"every one); write it by `rlsdk export {run} DIR --step {step}`, then give --checkpoint DIR"
        )
    with model_of(folder) as model:
        yield model


@attrs.frozen(eq=False)
class _Sums:
    """Products of two gradients, and the gradients themselves, summed over steps."""

    before: list[Tensor]
    after: list[Tensor]


class Gradients:
    """The objectives of both plans on one policy."""

    def __init__(self, asked: WhatIfQuestion, model: Path) -> None:
        """Load the weights.

        Raises:
            LearnerError: The model cannot be loaded as a policy.
        """
        self._plans = (asked.before, asked.after)
        self._model = attrs.evolve(asked.before.model, path=str(model), dtype="float32")
        self._policy = load_policy(self._model, "sdpa", False)
        width = self._policy.model.config.get_text_config().hidden_size
        self._runner = MicroBatchRunner(Ranks(0, 1, "cpu"), PhaseTimer(), "padded", BUDGET, width)
        self._parameters = [p for p in self._policy.parameters() if p.requires_grad]
        self._objectives = tuple(Objective(plan.loss) for plan in self._plans)
        self._references: dict[str, PolicyModel] = {}
        self._sums: _Sums | None = None

    def forward(self, batch: StepBatch, plan: Plan, fields: Sequence[str]) -> dict[str, np.ndarray]:
        """Compute fields of a batch without a gradient, `[t]` each."""
        own = [name for name in fields if name in _FIELDS]
        found = self._fields(self._policy, batch.arrays, own, plan) if own else {}
        if "ref_logprobs" in fields:
            reference = self._reference(plan.reference)
            found["ref_logprobs"] = self._fields(reference, batch.arrays, ["logprobs"], plan)["logprobs"]
        return found

    def compare(self, before: StepBatch | None, after: StepBatch | None, step: int) -> dict[str, float | None]:
        """Return the cosine of the gradients on the rollouts that each plan trains in a step, and their norms."""
        gradients = [
            self._gradient(plan, objective, batch, step)
            for plan, objective, batch in zip(self._plans, self._objectives, (before, after), strict=True)
        ]
        if self._sums is None:
            self._sums = _Sums(*([part.clone() for part in each] for each in gradients))
        else:
            for total, each in zip((self._sums.before, self._sums.after), gradients, strict=True):
                for part, more in zip(total, each, strict=True):
                    part.add_(more)
        return cosine(*gradients)

    def whole(self) -> dict[str, float | None]:
        """Return the cosine of the two gradients summed over all steps, and their norms."""
        return {} if self._sums is None else cosine(self._sums.before, self._sums.after)

    def _fields(
        self, policy: PolicyModel, batch: TrainBatch, names: Sequence[str], plan: Plan
    ) -> dict[str, np.ndarray]:
        temperature = plan.loss.temperature
        mode: Any = "value" if "entropy" in names else "none"

        def run(rows: Any) -> Mapping[str, Tensor]:
            results = policy(rows, temperature, mode, "probs_squared_sum" in names)
            return {name: value for name, value in zip(_FIELDS, results, strict=True) if name in names}

        return self._runner.forward(run, batch, names)

    def _reference(self, model: Model) -> PolicyModel:
        if model.path not in self._references:
            try:
                loaded = load_policy(attrs.evolve(model, dtype="float32"), "sdpa", False)
            except OSError as error:
                raise LearnerError(
                    f"the reference model {model.path} cannot be loaded: {first_line(error)}; "
                    "set model.reference=DIR, or remove the KL term (algorithm.kl_coef=0)"
                ) from error
            self._references[model.path] = loaded.requires_grad_(False)
        return self._references[model.path]

    def _gradient(self, plan: Plan, objective: Objective, batch: StepBatch | None, step: int) -> list[Tensor]:
        """Return the gradient of an objective on a whole step, as for one optimiser step without clipping."""
        if batch is None:
            return [torch.zeros_like(p) for p in self._parameters]
        right = labels(batch, plan.needs, passing=plan.algorithm.passing, rewarded=bool(plan.rewards))
        arrays = batch.for_update(**right).arrays
        parts, totals, accumulator = self._runner.plan(arrays), arrays.totals, MetricAccumulator()
        seed = int(np.random.SeedSequence([plan.config.seed, step, 0]).generate_state(1)[0])
        context = UpdateContext(update=0, updates=1, train_step=step, updates_done=step, totals=totals, seed=seed)
        if objective.whole_batch:
            context = attrs.evolve(context, whole=self._whole_inputs(objective, arrays, parts, context))
        self._policy.zero_grad(set_to_none=True)
        for part, rows in self._runner.micro_batches(arrays, parts, len(parts)):
            assert part is not None
            logprobs, entropy, _ = self._policy(rows, objective.spec.temperature, objective.entropy)
            objective(objective.inputs(part, logprobs, entropy, context), totals, accumulator).backward()  # type: ignore[no-untyped-call]
            context = attrs.evolve(context, offset=context.offset + len(logprobs))
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self._parameters]

    def _whole_inputs(
        self, objective: Objective, batch: TrainBatch, parts: Sequence[MicroBatch], context: UpdateContext
    ) -> LossInputs:
        """Return the whole batch's inputs, in micro-batch order, for losses that read them."""
        ordered = batch.select(np.concatenate([part.rollouts for part in parts]))
        found = self._fields(self._policy, ordered, ["logprobs", "entropy"], self._plans[0])
        logprobs, entropy = (torch.from_numpy(found[name]) for name in ("logprobs", "entropy"))
        return objective.inputs(ordered, logprobs, entropy, context)


def cosine(before: Sequence[Tensor], after: Sequence[Tensor]) -> dict[str, float | None]:
    """Return the cosine of two gradients, and their norms as `before` and `after`; no cosine if one is zero."""
    products = [
        sum(float((a.double() * b.double()).sum()) for a, b in zip(x, y, strict=True))
        for x, y in ((before, before), (after, after), (before, after))
    ]
    norms = products[0] ** 0.5, products[1] ** 0.5
    both = norms[0] * norms[1]
    return {"cosine": products[2] / both if both else None, "before": norms[0], "after": norms[1]}
