"""A critic and a reference model in their own processes give the same results as in the policy's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from rlsdk.batch import LossInputs
from rlsdk.contracts import ActorSpec, ApartRole, LossSpec, Model, Roles, TrainBatch
from rlsdk.errors import CheckpointError, LearnerError
from rlsdk.learners.apart import DividedLearnerGroup
from rlsdk.learners.group import LearnerGroup
from rlsdk.marks import policy_loss
from rlsdk.plugins import Plugins
from rlsdk.trainer.credit import train_critic

pytestmark = [pytest.mark.stack, pytest.mark.slow]
Make = Callable[..., TrainBatch]
FIELDS = ("logprobs", "entropy", "ref_logprobs", "values")


@policy_loss("toward_reference")
def toward_reference(x: LossInputs) -> torch.Tensor:
    """The policy gradient."""
    return -x.advantages * x.logprobs


LOSS = LossSpec(policy_loss=Plugins().reference("policy_loss", toward_reference), value_clip=0.2)


def launch(folder: Path, roles: Roles, name: str = "learner", world: int = 1, **options: Any) -> DividedLearnerGroup:
    options = {"lr": 1e-2, "micro_batch_tokens": 60, **options}
    return DividedLearnerGroup.launch(
        Plugins().reference("learner", "deepspeed", options),
        roles,
        LOSS,
        ActorSpec(role="learner", world_size=world, cpus=2, seed=3),
        total_updates=20,
        cpus=0.5,
        log_dir=folder,
        name=name,
    )


def divided(folder: Path, model: Model, other: Model, *, world: int = 1) -> DividedLearnerGroup:
    """A policy, its critic and a reference model, each with processes of its own."""
    group = launch(folder, Roles(actor=model))
    held: dict[ApartRole, Roles] = {"critic": Roles(critic=model), "reference": Roles(reference=other)}
    for role, roles in held.items():
        group.apart[role] = launch(folder, roles, role, world if role == "critic" else 1)
    return group


@pytest.fixture(scope="module")
def groups(
    cluster: None, tied: Model, untied: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LearnerGroup, DividedLearnerGroup]]:
    """One group with all models, and one for each of them."""
    folder = tmp_path_factory.mktemp("apart")
    whole = launch(folder / "whole", Roles(actor=tied, critic=tied, reference=untied))
    parts = divided(folder / "parts", tied, untied)
    yield whole, parts
    whole.stop()
    parts.stop()


def halves(batch: TrainBatch) -> list[np.ndarray]:
    return np.array_split(np.arange(len(batch)), 2)


def test_fields_metrics_and_weights_are_those_of_one_group(
    groups: tuple[LearnerGroup, DividedLearnerGroup], make_batch: Make, tmp_path: Path
) -> None:
    batch, found = make_batch(8), []
    for i, group in enumerate(groups):
        fields = group.forward(batch, FIELDS)
        metrics = group.update(batch, halves(batch), 0)
        group.forward_backward(batch, role="critic", step=1)
        metrics |= {f"again/{name}": value for name, value in group.optimizer_step("critic").items()}
        metrics |= {f"warm/{name}": value for name, value in train_critic(group, batch, halves(batch), 1).items()}
        group.save(tmp_path / str(i))
        metrics |= {f"later/{name}": value for name, value in group.update(batch, halves(batch), 1).items()}
        group.load(tmp_path / str(i))
        metrics |= {f"resumed/{name}": value for name, value in group.update(batch, halves(batch), 1).items()}
        later = {name: metrics[f"later/{name}"] for name in ("actor/loss", "critic/loss", "critic/grad_norm")}
        assert later == {name: metrics[f"resumed/{name}"] for name in later}
        found.append((fields, metrics, group.fetch_weights(3), group.values(batch), group.logprobs(batch, "reference")))
    (fields, metrics, weights, values, reference), other = found
    assert set(fields) == set(FIELDS) == set(other[0])
    for name in FIELDS:
        np.testing.assert_array_equal(fields[name], other[0][name])
    assert metrics == other[1]
    assert metrics["critic/grad_norm"] > 0 and metrics["actor/grad_norm"] > 0
    for name, array in weights.tensors.items():
        np.testing.assert_array_equal(array, other[2].tensors[name])
    np.testing.assert_array_equal(values, other[3])
    np.testing.assert_array_equal(reference["logprobs"], other[4]["logprobs"])
    assert set(groups[1].clock()) == set(groups[0].clock())


def test_a_checkpoint_of_one_group_is_refused_by_several(
    groups: tuple[LearnerGroup, DividedLearnerGroup], tied: Model, untied: Model, tmp_path: Path
) -> None:
    groups[0].save(tmp_path / "whole")
    other = divided(tmp_path / "logs", tied, untied)
    try:
        with pytest.raises(CheckpointError, match="roles"):
            other.load(tmp_path / "whole")
    finally:
        other.stop()


def test_what_fails_in_one_group_ends_all_and_is_named(
    cluster: None, tied: Model, untied: Model, make_batch: Make, tmp_path: Path
) -> None:
    group, batch = divided(tmp_path, tied, untied), make_batch(6)
    lacking = attrs.evolve(batch, tokens={k: v for k, v in batch.tokens.items() if k != "returns"})
    with pytest.raises(LearnerError, match=r"critic rank 0 failed in update of step 1.*critic-0\.log"):
        group.update(lacking, halves(batch), 0)
    assert group.ended and all(each.ended for each in group.apart.values())
