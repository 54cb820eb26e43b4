"""Optimisers of the zoo: two steps by hand, the weights that Muon orthogonalises, the conformance suite."""

from __future__ import annotations

import pytest
import torch
from rlsdk_zoo.optimizers import Lion, muon

import rlsdk
from rlsdk.testing import check_component


def group(names: list[str], weights: list[torch.Tensor], *, lr: float, decay: float = 0.0) -> dict[str, object]:
    parameters = [torch.nn.Parameter(weight) for weight in weights]
    return {"params": parameters, "param_names": names, "lr": lr, "weight_decay": decay}


@pytest.mark.parametrize("component", [Lion, muon])
def test_it_conforms(component):
    faults = [str(finding.fault) for finding in check_component(component) if finding.fault is not None]
    assert faults == []


def test_two_steps_of_lion_are_those_computed_by_hand():
    given = group(["w"], [torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)], lr=0.1, decay=0.5)
    (weight,) = given["params"]
    made = rlsdk.load("optimizer", Lion)([given])
    for gradient in ([2.0, -1.0, 0.0], [-0.1, 0.3, 0.0]):
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        made.step()
    # Step 1: signs of 0.1 g = [1, -1, 0]; w = 0.95 w - 0.1 signs = [0.85, -1.8, 0.475]; m = 0.01 g = [0.02, -0.01, 0].
    # Step 2: 0.9 m + 0.1 g = [0.008, 0.021, 0], signs [1, 1, 0]; w = 0.95 w - 0.1 signs.
    expected = torch.tensor([0.7075, -1.81, 0.45125], dtype=torch.float64)
    torch.testing.assert_close(weight.detach(), expected)
    # m = 0.99 m + 0.01 g
    average = torch.tensor([0.0188, -0.0069, 0.0], dtype=torch.float64)
    torch.testing.assert_close(made.state[weight]["exp_avg"], average)


def test_muon_steps_along_an_orthogonal_matrix_in_layers_and_as_adamw_elsewhere():
    generator = torch.Generator().manual_seed(0)
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.0.norm.weight"]
    weights = [torch.randn(shape, generator=generator) for shape in ((12, 6), (12, 6), (6,))]
    given = group(names, [weight.clone() for weight in weights], lr=0.1)
    made = rlsdk.load("optimizer", muon, momentum=0.0, nesterov=False)([given])
    gradients = [torch.randn(weight.shape, generator=generator) for weight in weights]
    for parameter, gradient in zip(given["params"], gradients, strict=True):
        parameter.grad = gradient
    made.step()
    moved = [weight - p.detach() for weight, p in zip(weights, given["params"], strict=True)]
    # AdamW's first step is the learning rate along the sign of the gradient.
    for i in (0, 2):
        torch.testing.assert_close(moved[i], 0.1 * gradients[i].sign(), rtol=1e-4, atol=1e-5)
    left, values, right = torch.linalg.svd(moved[1] / (0.1 * 0.2 * 12**0.5), full_matrices=False)
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3
    polar = torch.linalg.svd(gradients[1], full_matrices=False)
    torch.testing.assert_close(left @ right, polar.U @ polar.Vh, rtol=0.1, atol=0.1)
