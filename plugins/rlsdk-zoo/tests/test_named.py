"""The zoo's algorithms: their parts exist, take their options, and compute on one batch; all is documented."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import rlsdk_zoo
import torch

import rlsdk
from rlsdk.batch import aggregate
from rlsdk.kit import Component, component_of

NAMES = ["dppo", "kimi", "mix_chord", "rec", "sppo", "vespo"]


def marked(kind: str) -> dict[str, Component]:
    """Components marked in the modules of a kind, without an installation."""
    found = {}
    for name in rlsdk_zoo.MODULES[kind]:
        module = importlib.import_module(name)
        marks = (component_of(value) for value in vars(module).values())
        found |= {m.name: m for m in marks if m is not None and m.obj.__module__ == name}
    return found


LOSSES, ALGORITHMS = marked("policy_loss"), marked("algorithm")
OTHERS = {**marked("advantage"), **marked("correction"), **marked("optimizer")}


def test_each_name_is_a_loss_and_an_algorithm():
    assert sorted(LOSSES) == NAMES
    # The two others use the core's losses, with a schedule and with another advantage.
    assert sorted(ALGORITHMS) == sorted(["chord_mu", "maxrl", *NAMES])


def test_chord_mu_hands_over_from_the_expert_to_the_policy():
    """Worked by hand: one token of the policy with ratio 1 and advantage 2, one of the expert with probability 1/2."""
    use = rlsdk.load("algorithm", ALGORITHMS["chord_mu"].obj).policy_loss
    loss = rlsdk.load("policy_loss", use.name, **use.options)
    logprobs, trained, segments = torch.tensor([-1.0, math.log(0.5)]), torch.ones(2).bool(), torch.arange(2)
    x = rlsdk.LossInputs(
        logprobs, logprobs, torch.tensor([2.0, 0.0]), trained, segments, expert=torch.tensor([False, True])
    )
    found = {}
    for step in (0, 50, 100, 200, 300):
        values = loss(x.replace(train_step=step, train_steps=400))[0]
        found[step] = float(aggregate(values, trained, segments, "token-mean"))
    weights = {0: 0.9, 50: 0.775520, 100: 0.475, 200: 0.05, 300: 0.05}  # 0.05 + 0.85 · (1 + cos(π · step / 200)) / 2
    assert found == pytest.approx({step: -2 * (1 - mu) + 0.693147 * mu for step, mu in weights.items()}, abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_every_algorithm(make_loss, name):
    algorithm = rlsdk.load("algorithm", ALGORITHMS[name].obj)
    assert isinstance(algorithm, rlsdk.Algorithm)
    assert algorithm.policy_loss.name == f"zoo/{name}"
    given, declared = algorithm.policy_loss.options, {o.name: o.default for o in LOSSES[name].options}
    assert given.keys() <= declared.keys()
    assert {option for option, value in given.items() if value != declared[option]} <= {"threshold"}
    rewards, groups = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.5, 0.0, 1.0, 0.0]), torch.arange(8) // 4
    x = make_loss(4)
    lengths = torch.bincount(x.segments)
    credit = rlsdk.CreditInputs(rewards, groups, lengths, x.loss_mask)
    advantages = rlsdk.load("advantage", algorithm.advantage.name, **algorithm.advantage.options)(credit)
    logprobs = x.logprobs.clone().requires_grad_()
    y = x.replace(logprobs=logprobs, advantages=credit.per_token(advantages))
    result = LOSSES[name].bind(given)(y)
    loss = result[0] if isinstance(result, tuple) else result
    aggregate(loss, y.loss_mask, y.segments, algorithm.aggregate, norm=algorithm.norm or 16.0).backward()
    assert logprobs.grad.isfinite().all()
    assert logprobs.grad.count_nonzero() > 0
    assert logprobs.grad[~x.loss_mask].count_nonzero() == 0


@pytest.mark.parametrize(
    "component", [*LOSSES.values(), *OTHERS.values(), *ALGORITHMS.values()], ids=lambda c: f"{c.kind}-{c.name}"
)
def test_every_component_is_documented(component):
    assert component.summary.endswith(".")
    assert "\nPaper: " in component.help or "\nSource: " in component.help  # some were never published as a paper
    assert "\nWhen to use: " in component.help
    if component.kind != "algorithm":
        assert "\nFormula: " in component.help
        assert [o.name for o in component.options if not o.help] == []


def test_algorithms_do_not_load_torch():
    folders = [str(Path(module.__file__).parents[1]) for module in (rlsdk_zoo, rlsdk)]
    code = "import sys, rlsdk_zoo.named; assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)
