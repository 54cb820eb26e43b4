"""A reference model that follows the policy: its moves, its precision, and its part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from rlsdk.batch import LossInputs
from rlsdk.contracts import LossSpec, Model, MovesReference, Roles, TrainBatch
from rlsdk.errors import CheckpointError, LearnerError
from rlsdk.learners.deepspeed import DeepSpeedLearner
from rlsdk.learners.lora import Lora
from rlsdk.learners.reference import MovingReference
from rlsdk.marks import policy_loss
from rlsdk.plugins import Plugins
from rlsdk.weights import from_weights

Launch = Callable[..., Any]
Make = Callable[..., TrainBatch]


@policy_loss("plain_gradient")
def plain_gradient(x: LossInputs) -> torch.Tensor:
    """The policy gradient."""
    return -x.advantages * x.logprobs


LOSS = LossSpec(policy_loss=Plugins().reference("policy_loss", plain_gradient))


def moving(value: float, mix: float, dtype: torch.dtype = torch.float32) -> MovingReference:
    return MovingReference({"w": torch.full((2,), value, dtype=dtype)}, mix, sharded=False)


def test_a_move_is_a_weighted_mean_of_policy_and_reference() -> None:
    reference, policy = moving(1.0, 0.25), torch.full((2,), 3.0)
    for expected in (1.5, 1.875):  # 0.25 · 3 + 0.75 · 1, and again
        reference.move([("w", policy)])
        assert reference.weights["w"].tolist() == [expected] * 2
    assert policy.tolist() == [3.0] * 2


def test_with_a_mix_of_one_the_reference_becomes_the_policy() -> None:
    reference = moving(1.0, 1.0, torch.bfloat16)
    reference.move([("w", torch.full((2,), 0.3))])
    assert torch.equal(reference.weights["w"], torch.full((2,), 0.3).bfloat16())
    assert not list(reference.copies())


def test_moves_that_16_bits_would_swallow_add_up() -> None:
    reference, policy = moving(1.0, 0.01, torch.bfloat16), torch.full((2,), 1.1)
    step = 0.01 * (1.1 - 1.0)
    assert torch.tensor(1.0 + step).bfloat16() == 1.0
    for _ in range(50):
        reference.move([("w", policy)])
    expected = 1.1 - 0.1 * 0.99**50
    assert float(reference.masters["w"][0]) == pytest.approx(expected, rel=1e-5)
    assert torch.equal(reference.weights["w"], reference.masters["w"].bfloat16())
    assert [tensor.dtype for tensor in reference.copies()] == [torch.float32]


def test_a_moved_reference_is_restored_exactly_or_refused(tmp_path: Path) -> None:
    written, read = moving(1.0, 0.3, torch.bfloat16), moving(1.0, 0.3, torch.bfloat16)
    written.move([("w", torch.full((2,), 1.1))])
    written.save(tmp_path, 0)
    read.load(tmp_path, 0)
    assert torch.equal(read.masters["w"], written.masters["w"]) and torch.equal(read.weights["w"], written.weights["w"])
    other = MovingReference({"v": torch.ones(2)}, 0.3, sharded=False)
    with pytest.raises(CheckpointError, match=r"reference model in .* does not fit this one: KeyError: 'v'"):
        other.load(tmp_path, 0)


def test_an_adapter_without_a_second_model_cannot_be_followed() -> None:
    assert isinstance(DeepSpeedLearner(), MovesReference) and not DeepSpeedLearner().reference_faults()
    (fault,) = DeepSpeedLearner(lora=Lora()).reference_faults()
    assert fault.startswith("lora trains an adapter beside a frozen base, which is the reference model")


def test_memory_counts_the_float32_weights_of_a_16_bit_reference(bfloat: Model) -> None:
    from rlsdk.contracts import ActorSpec

    def size(mix: float | None) -> int:
        roles = Roles(actor=bfloat, reference=bfloat, reference_mix=mix)
        uses = DeepSpeedLearner().rank_memory(roles, ActorSpec(role="learner")).uses
        return next(use.bytes for use in uses if use.role == "reference model")

    assert size(0.5) == 3 * size(1.0) == 3 * size(None)


def states(group: Any, batch: TrainBatch) -> list[np.ndarray]:
    return [group.logprobs(batch, role)["logprobs"] for role in ("actor", "reference")]


def expected_states(model: Model, weights: dict[str, torch.Tensor], batch: TrainBatch) -> np.ndarray:
    """Logprobs of each response token under these weights, one rollout at a time."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float64)
    net.load_state_dict({name: tensor.double() for name, tensor in weights.items()}, strict=False)
    found, offset = [], 0
    for length, start, response in zip(batch.lengths, batch.starts, batch.responses, strict=True):
        ids = torch.from_numpy(batch.token_ids[offset : offset + length])
        with torch.no_grad():
            log_p = net(ids[None]).logits[0].log_softmax(-1)[start - 1 : start - 1 + response]
        found.append(log_p.gather(1, ids[start : start + response, None])[:, 0])
        offset += length
    return torch.cat(found).numpy()


def learn(group: Any, batch: TrainBatch, step: int) -> None:
    group.update(batch, np.array_split(np.arange(len(batch)), 2), step)


SETUPS = [(1, 0, "tied"), (1, 1, "bfloat"), (2, 1, "untied"), (2, 2, "bfloat"), (2, 3, "tied"), (2, 3, "bfloat")]


@pytest.mark.stack
@pytest.mark.parametrize(("world", "stage", "which"), SETUPS)
def test_after_a_hard_reset_the_reference_is_the_policy(
    world: int, stage: int, which: str, launch: Launch, make_batch: Make, request: pytest.FixtureRequest
) -> None:
    model, batch = request.getfixturevalue(which), make_batch(9)
    roles = Roles(actor=model, reference=model, reference_mix=1.0)
    group = launch(world, roles, LOSS, zero_stage=stage, lr=1e-2, micro_batch_tokens=64)
    for step in range(2):
        before = states(group, batch)[1]
        learn(group, batch, step)
        actor, reference = states(group, batch)
        assert np.array_equal(reference, before) and np.abs(actor - reference).max() > 0.05
        group.move_reference()
        actor, reference = states(group, batch)
        np.testing.assert_array_equal(reference, actor)


@pytest.mark.stack
@pytest.mark.parametrize(("world", "stage"), [(1, 1), (2, 2), (2, 3)])
def test_a_reference_moves_by_its_share_of_the_policys_weights(
    world: int, stage: int, tied: Model, launch: Launch, make_batch: Make
) -> None:
    batch = make_batch(9)
    roles = Roles(actor=tied, reference=tied, reference_mix=0.3)
    group = launch(world, roles, LOSS, zero_stage=stage, lr=1e-2, micro_batch_tokens=64)
    reference = dict(from_weights(group.fetch_weights(0)))
    for step in range(3):
        learn(group, batch, step)
        group.move_reference()
        policy = dict(from_weights(group.fetch_weights(step + 1)))
        reference = {name: 0.3 * policy[name] + 0.7 * tensor for name, tensor in reference.items()}
    found = states(group, batch)[1]
    np.testing.assert_allclose(found, expected_states(tied, reference, batch), atol=2e-5)


@pytest.mark.stack
@pytest.mark.parametrize(("world", "stage", "which"), [(1, 0, "tied"), (2, 2, "bfloat"), (2, 3, "bfloat")])
def test_a_resumed_run_is_the_one_left_alone(
    world: int, stage: int, which: str, launch: Launch, make_batch: Make, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model, batch = request.getfixturevalue(which), make_batch(9)
    roles = Roles(actor=model, reference=model, reference_mix=0.3)

    def start() -> Any:
        return launch(world, roles, LOSS, zero_stage=stage, lr=1e-2, micro_batch_tokens=64)

    def rest(group: Any) -> list[np.ndarray]:
        found = states(group, batch)
        learn(group, batch, 1)
        group.move_reference()
        return [*found, *states(group, batch)]

    group = start()
    untouched = states(group, batch)[1]
    learn(group, batch, 0)
    group.move_reference()
    group.sleep()
    group.save(tmp_path)
    alone = rest(group)
    assert np.abs(alone[1] - untouched).max() > 1e-3
    group = start()
    group.load(tmp_path)
    group.sleep()
    for found, expected in zip(rest(group), alone, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.stack
@pytest.mark.usefixtures("forgiving")
def test_a_reference_that_moved_is_not_replaced_by_the_initial_one(
    tied: Model, launch: Launch, make_batch: Make, tmp_path: Path
) -> None:
    follows = Roles(actor=tied, reference=tied, reference_mix=1.0)
    group = launch(1, follows, LOSS)
    group.save(tmp_path / "moves")
    stays = attrs.evolve(follows, reference_mix=None)
    group = launch(1, stays, LOSS)
    with pytest.raises(LearnerError, match=r"the reference model does not move; set reference\.update_every"):
        group.move_reference()
    group.save(tmp_path / "stays")
    assert not (tmp_path / "stays" / "reference").exists()
    with pytest.raises(CheckpointError, match="holds a reference model that followed the policy"):
        group.load(tmp_path / "moves")
    launch(1, follows, LOSS).load(tmp_path / "stays")  # of a run that had not moved it yet
    launch(1, Roles(actor=tied), LOSS).load(tmp_path / "moves")  # as an export does
