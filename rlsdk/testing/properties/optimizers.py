"""Properties of optimisers: their steps on a quadratic, their groups, and their state."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.learners.options import created
from rlsdk.learners.statefile import read_state, write_state
from rlsdk.testing.findings import NotApplicable, Violated
from rlsdk.testing.subject import Subject, holds

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

LR = 1e-2
STEPS = 20
SHAPES = {
    "model.embed_tokens.weight": (16, 6),
    "model.layers.0.mlp.up_proj.weight": (8, 6),
    "model.layers.0.mlp.down_proj.weight": (6, 8),
    "model.layers.0.input_layernorm.weight": (6,),
    "lm_head.weight": (16, 6),
}
"""Names and shapes of the parameters, as in a transformers model."""
NEEDS = ("creates-an-optimizer",)


class _OptimizerRun:
    """An optimiser and the weights that it changes; the weights with one dimension have no weight decay."""

    def __init__(self, subject: Subject, weights: dict[str, Tensor], *, decay: float = 0.0) -> None:
        import torch

        self.subject = subject
        self.parameters = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
        names = [[n for n, w in weights.items() if w.dim() > 1], [n for n, w in weights.items() if w.dim() == 1]]
        groups = [
            {"params": [self.parameters[n] for n in part], "param_names": part, "lr": LR, "weight_decay": decay * many}
            for part, many in zip(names, (True, False), strict=True)
            if part
        ]
        factory = subject.make()
        self.optimizer: Optimizer = subject.call(lambda: created(factory, groups))

    def step(self, gradients: dict[str, Tensor]) -> None:
        """Take a step along gradients; parameters that these lack have none."""
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name].clone() if name in gradients else None
        self.subject.call(self.optimizer.step)

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the weights."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}


def _random(seed: int) -> dict[str, Tensor]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _distance(weights: dict[str, Tensor], goal: dict[str, Tensor]) -> float:
    return sum(float((weights[name] - goal[name]).square().sum()) for name in goal)


@holds(
    "creates-an-optimizer",
    "optimizer",
    remedy="return a torch.optim.Optimizer of all parameters in `groups`, which are groups as torch takes them",
)
def creates_an_optimizer(subject: Subject, _: Any) -> None:
    """It returns a `torch.optim.Optimizer` of the parameters in the groups that it is given."""
    _OptimizerRun(subject, _random(0))


@holds(
    "descends",
    "optimizer",
    remedy="subtract the step from the weights, in place: p.add_(direction, alpha=-group['lr'])",
    after=NEEDS,
)
def descends(subject: Subject, _: Any) -> None:
    """Its steps reduce a quadratic, and keep shape, dtype and finiteness of the weights."""
    run, goal = _OptimizerRun(subject, _random(0)), _random(1)
    first = before = run.weights()
    for _step in range(STEPS):
        run.step({name: weight - goal[name] for name, weight in before.items()})
        before = run.weights()
    for name, weight in before.items():
        if weight.shape != first[name].shape or weight.dtype != first[name].dtype:
            raise Violated(
                "form", f"{list(first[name].shape)} of {first[name].dtype}", f"{list(weight.shape)} of {weight.dtype}"
            )
        if not bool(weight.isfinite().all()):
            raise Violated("value", "finite weights", f"{name} is not finite after {STEPS} steps")
    start, end = _distance(first, goal), _distance(before, goal)
    if not end < start:
        raise Violated("value", f"less than {start:.4g} after {STEPS} steps with lr={LR}", f"{end:.4g}")


@holds(
    "obeys-its-groups",
    "optimizer",
    remedy="read group['lr'] and group['weight_decay'] in each step: the learner changes lr from step to step",
    after=NEEDS,
)
def obeys_its_groups(subject: Subject, _: Any) -> None:
    """A learning rate of 0, set before a step, changes no weight; weight decay shrinks the weights of its group."""
    run, gradients = _OptimizerRun(subject, _random(0), decay=0.5), _random(1)
    run.step(gradients)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    before = run.weights()
    run.step(gradients)
    for name, weight in run.weights().items():
        if not bool((weight == before[name]).all()):
            raise Violated(
                "value",
                f"{name} unchanged by a step with lr=0",
                f"a change of {float((weight - before[name]).abs().max()):.2g}",
            )
    sizes = []
    for decay in (0.0, 0.5):
        run = _OptimizerRun(subject, _random(0), decay=decay)
        for _step in range(STEPS):
            run.step(gradients)
        sizes.append({name: float(weight.square().sum()) for name, weight in run.weights().items()})
    for name, shape in SHAPES.items():
        if len(shape) > 1 and not sizes[1][name] < sizes[0][name]:
            raise Violated(
                "value",
                f"smaller weights {name} with weight_decay 0.5 than with 0",
                f"{sizes[1][name]:.6g} ≥ {sizes[0][name]:.6g}",
            )
        if len(shape) == 1 and sizes[1][name] != sizes[0][name]:
            raise Violated(
                "value",
                f"{name}, whose group has no weight decay, as without",
                f"{sizes[1][name]:.6g} ≠ {sizes[0][name]:.6g}",
            )


@holds(
    "skips-missing-gradients",
    "optimizer",
    remedy="skip parameters whose grad is None, also for weight decay",
    after=NEEDS,
)
def skips_missing_gradients(subject: Subject, _: Any) -> None:
    """It leaves parameters without a gradient as they are, before and after they had one."""
    run, gradients = _OptimizerRun(subject, _random(0), decay=0.5), _random(1)
    for missing in SHAPES:
        before = run.weights()[missing]
        run.step({name: gradient for name, gradient in gradients.items() if name != missing})
        if not bool((run.weights()[missing] == before).all()):
            raise Violated("value", f"{missing}, which has no gradient, unchanged", "another value")


@holds(
    "finite-on-zero-gradients",
    "optimizer",
    remedy="add a small number to denominators, or clamp them",
    after=NEEDS,
)
def finite_on_zero_gradients(subject: Subject, _: Any) -> None:
    """Gradients of zero, at first and later, leave the weights finite."""
    run, gradients = _OptimizerRun(subject, _random(0)), _random(1)
    zeros = {name: gradient * 0 for name, gradient in gradients.items()}
    for given in (zeros, zeros, gradients, zeros, zeros):
        run.step(given)
    for name, weight in run.weights().items():
        if not bool(weight.isfinite().all()):
            raise Violated("value", "finite weights", f"{name} is not finite")


@holds(
    "resumes",
    "optimizer",
    remedy="keep all that steps depend on in self.state and self.param_groups, as tensors, numbers, text, lists and "
    "mappings, which state_dict() returns and load_state_dict() restores",
    after=NEEDS,
)
def resumes(subject: Subject, _: Any) -> None:
    """With its `state_dict` from a checkpoint it continues bit by bit as it would have done."""
    if importlib.util.find_spec("safetensors") is None:
        raise NotApplicable("checkpoints need safetensors: pip install 'rlsdk[train]'")
    run = _OptimizerRun(subject, _random(0), decay=0.1)
    for seed in (1, 2, 3):
        run.step(_random(seed))
    resumed = _OptimizerRun(subject, run.weights(), decay=0.1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "optimizer.safetensors"
        subject.call(lambda: write_state(file, {"state": run.optimizer.state_dict()}))
        subject.call(resumed.optimizer.load_state_dict, read_state(file)["state"])
    for seed in (4, 5):
        for each in (run, resumed):
            each.step(_random(seed))
    for name, weight in run.weights().items():
        if not bool((resumed.weights()[name] == weight).all()):
            raise Violated("value", f"the weights {name} of an optimiser that was not stopped", "others")


@holds(
    "element-wise",
    "optimizer",
    remedy="mark it with whole_tensors=True, if a step needs whole matrices, rows or norms; otherwise let the step of "
    "each element depend only on its own weight, gradient and state",
    after=NEEDS,
    only=lambda component: not component.whole_tensors,
)
def element_wise(subject: Subject, _: Any) -> None:
    """Unless it is marked with `whole_tensors`, it takes the same steps on flattened and split tensors."""
    import torch

    run, flat = _OptimizerRun(subject, _random(0)), _OptimizerRun(subject, _pieces(_random(0)))
    for seed in (1, 2, 3):
        run.step(_random(seed))
        flat.step(_pieces(_random(seed)))
    pieces = flat.weights()
    for name, piece in _pieces(run.weights()).items():
        if not torch.allclose(piece, pieces[name], rtol=1e-4, atol=1e-6):
            most = float((piece - pieces[name]).abs().max())
            raise Violated(
                "value",
                f"the same weights {name} from flat pieces as from whole tensors",
                f"a difference of {most:.2g}",
            )


def _pieces(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Flatten tensors, and split each into two pieces of different sizes."""

    def split(tensor: Tensor) -> Sequence[Tensor]:
        flat = tensor.flatten()
        return flat[: len(flat) // 3], flat[len(flat) // 3 :]

    return {f"{name}.{i}": piece for name, tensor in tensors.items() for i, piece in enumerate(split(tensor))}
