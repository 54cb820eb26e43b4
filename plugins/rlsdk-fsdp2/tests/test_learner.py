"""The learner on one and two ranks of gloo: gradients, critic, resume, export, adapters, and what bfloat16 keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from rlsdk_fsdp2.learner import FSDP2Learner

import rlsdk
from rlsdk.contracts import Adapter, LossSpec, Model, Roles, TrainBatch, Weights
from rlsdk.errors import CheckpointError
from rlsdk.weights import from_weights

pytestmark = pytest.mark.stack
Ranks = Callable[..., list[Any]]
TEMPERATURE, KL, ENTROPY = 0.8, 0.1, 0.05
LORA = {"rank": 4, "alpha": 8}


@rlsdk.policy_loss("probe", needs=("values",))
def probe(x: rlsdk.LossInputs) -> torch.Tensor:
    """Reads the token, its rollout and the position in the batch's own numbers."""
    gap = x.logprobs - x.old_logprobs
    return -(gap.exp() + 0.3 * x.sequence_mean(gap)) * x.advantages + 0.1 * x.values * x.logprobs


def spec() -> LossSpec:
    plugins = rlsdk.Plugins()
    return LossSpec(
        policy_loss=plugins.reference("policy_loss", probe),
        kl=plugins.reference("kl", "k3"),
        kl_coef=KL,
        entropy_coef=ENTROPY,
        temperature=TEMPERATURE,
        value_clip=0.5,
    )


def plain_gradients(net: Any, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """Gradients of the whole batch in float64, with nothing of the learner's: full logits, one rollout at a time."""
    logprobs, entropies, offset = [], [], 0
    for length, start, response in zip(batch.lengths, batch.starts, batch.responses, strict=True):
        ids = torch.from_numpy(batch.token_ids[offset : offset + length])
        log_p = (net(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)[start - 1 : start - 1 + response]
        logprobs.append(log_p.gather(1, ids[start : start + response, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
        offset += length
    fields = {k: torch.from_numpy(v).double() for k, v in batch.tokens.items() if k != "returns"}
    mask = torch.from_numpy(batch.loss_mask)
    segments = torch.from_numpy(np.repeat(np.arange(len(batch)), batch.responses))
    x = rlsdk.LossInputs(torch.cat(logprobs), loss_mask=mask, segments=segments, **fields)
    ratio = x.ref_logprobs - x.logprobs
    per_token = probe(x) + KL * (ratio.exp() - 1 - ratio) - ENTROPY * torch.cat(entropies)
    loss = (per_token * mask).sum() / mask.sum()
    names, parameters = zip(*((n, p) for n, p in net.named_parameters() if p.requires_grad), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Norm of the difference, in units of the norm."""
    assert found.keys() == expected.keys()
    apart = sum(float((found[n] - e).square().sum()) for n, e in expected.items())
    return float((apart / sum(float(e.square().sum()) for e in expected.values())) ** 0.5)


def shares(batch: TrainBatch, world: int, how: str) -> list[TrainBatch]:
    if how == "even":
        return [batch.select(np.arange(rank, len(batch), world)) for rank in range(world)]
    idle = np.array([] if how == "no rollouts" else [0], np.int64)  # the first is not trained on
    return [batch.select(np.setdiff1d(np.arange(len(batch)), idle)), batch.select(idle)]


def started(place: Any, roles: Roles, options: dict[str, Any]) -> FSDP2Learner:
    torch.set_num_threads(1)
    found: FSDP2Learner = rlsdk.load("learner", FSDP2Learner, **options)
    found.start(roles, spec(), place, 10)
    return found


def step_along_the_gradient(place: Any, roles: Roles, options: dict[str, Any], parts: Any, totals: Any) -> Any:
    """Weights before and after a step of 30 gradients: with so great an eps, AdamW divides by nothing else."""
    learner = started(place, roles, {**options, "lr": 3e7, "eps": 1e6, "grad_clip": 0.0})
    if "lora" in options:  # B is zero at first, and with it the gradient of A
        learner.set_learning_rate(1e4)
        learner.update([(parts[place.rank], *totals)], 0)
        learner.set_learning_rate(3e7)
        learner._actor.optimizer.state.clear()
    give = learner.adapter_weights if "lora" in options else learner.weights
    before = give(0)
    metrics = learner.update([(parts[place.rank], *totals)], 0)
    after = give(1)
    learner.stop()
    return before, after, metrics


def totals_of(batch: TrainBatch) -> tuple[int, int]:
    return batch.totals.tokens, batch.totals.rollouts


def gradient_of(before: Weights, after: Weights) -> dict[str, torch.Tensor]:
    start = {name: tensor.double() for name, tensor in from_weights(before)}
    return {name: (start[name] - tensor.double()) / 30 for name, tensor in from_weights(after)}


CASES: list[tuple[int, str, str, dict[str, Any]]] = [
    (1, "tied", "even", {}),
    (1, "untied", "even", {"micro_batch_tokens": 60}),
    (2, "tied", "even", {"micro_batch_tokens": 60, "gradient_checkpointing": True}),
    (2, "untied", "even", {"micro_batch_tokens": 60, "reshard_after_forward": False}),
    (2, "tied", "no rollouts", {"micro_batch_tokens": 100}),
    (2, "untied", "nothing trained", {"micro_batch_tokens": 100}),
    (2, "untied", "even", {"micro_batch_tokens": 100, "rows": "packed"}),
    (2, "tied", "even", {"micro_batch_tokens": 100, "rows": "shared"}),
    (2, "tied", "even", {"micro_batch_tokens": 100, "rows": "tree"}),
    (2, "tied", "even", {"micro_batch_tokens": 60, "tensor_parallel": 2, "gradient_checkpointing": True}),
    (2, "untied", "no rollouts", {"micro_batch_tokens": 100, "tensor_parallel": 2}),
    (2, "biased", "even", {"micro_batch_tokens": 60, "tensor_parallel": 2}),
    (2, "tied", "even", {"micro_batch_tokens": 30, "context_parallel": 2, "gradient_checkpointing": True}),
    (2, "untied", "no rollouts", {"micro_batch_tokens": 50, "context_parallel": 2}),
    (2, "normed", "even", {"micro_batch_tokens": 30, "context_parallel": 2, "rows": "packed"}),
    (2, "untied", "even", {"micro_batch_tokens": 50, "context_parallel": 2, "rows": "tree"}),
    (2, "untied", "even", {"micro_batch_tokens": 60, "offload": "all"}),
]


@pytest.mark.parametrize(("world", "which", "how", "options"), CASES)
def test_gradients_are_those_of_the_whole_batch_in_float64(
    world: int,
    which: str,
    how: str,
    options: dict[str, Any],
    ranks: Ranks,
    batch: TrainBatch,
    request: pytest.FixtureRequest,
) -> None:
    from transformers import AutoModelForCausalLM

    model = request.getfixturevalue(which)
    parts = shares(batch, world, how)
    results = ranks(world, step_along_the_gradient, Roles(actor=model), options, parts, totals_of(batch))
    net = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float64, attn_implementation="eager")
    expected = plain_gradients(net, batch)
    before, after, metrics = results[0]
    assert distance(gradient_of(before, after), expected) < 1e-5
    norm = sum(float(e.square().sum()) for e in expected.values()) ** 0.5
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert all(other[0] is None and other[2] == metrics for other in results[1:])


def run_steps(learner: FSDP2Learner, part: TrainBatch, totals: Any, steps: range) -> list[dict[str, float]]:
    """Training steps of two optimiser steps each."""
    halves = np.array_split(np.random.default_rng(0).permutation(len(part)), 2)
    half = (totals[0] / 2, max(1, totals[1] // 2))
    return [learner.update([(part.select(index), *half) for index in halves], step) for step in steps]


def at_checkpoint(
    place: Any, roles: Roles, options: dict[str, Any], part: TrainBatch, totals: Any, folder: Path, load: bool
) -> FSDP2Learner:
    """A learner that has written a checkpoint after two steps and a change of its learning rate, or has read it."""
    learner = started(place, roles, options)
    if load:
        learner.load(folder)
    else:
        run_steps(learner, part, totals, range(2))
        learner.set_learning_rate(2 * options["lr"])
        learner.save(folder)
    return learner


def fall_asleep(learner: FSDP2Learner, part: TrainBatch) -> None:
    """Sleep as on a shared GPU: moments and reference leave, everything that is read meanwhile stays the same."""

    def size(tensors: Any) -> int:
        return sum(each.numel() * each.element_size() for each in tensors)

    def read() -> list[np.ndarray]:
        weights = learner.weights(2)
        arrays = [] if weights is None else list(weights.tensors.values())
        return [*arrays, learner.canary(np.arange(8)), learner.logprobs(part)["logprobs"]]

    moments = size(moment for trained in learner._trained.values() for moment in trained.update_tensors())
    reference = 0 if learner._reference is None else size(learner.frozen_tensors(learner._reference))
    assert moments and (reference or learner.lora)
    awake, of_reference = read(), learner.logprobs(part, "reference")["logprobs"]
    learner.sleep()
    held = learner._offloaded
    assert held is not None and moments + 0.6 * reference < held.nbytes + 1 <= moments + reference + 1
    for before, after in zip(awake, read(), strict=True):
        np.testing.assert_array_equal(after, before)
    assert learner._offloaded is held
    np.testing.assert_array_equal(learner.logprobs(part, "reference")["logprobs"], of_reference)
    assert learner._offloaded is None
    learner.sleep()


def leave_or_resume(
    place: Any, roles: Roles, options: dict[str, Any], parts: Any, totals: Any, folder: Path, resume: bool
) -> Any:
    """Metrics, weights and logprobs of two steps after a checkpoint: of the run that wrote it, or of a resumed one."""
    learner = at_checkpoint(place, roles, options, parts[place.rank], totals, folder, resume)
    if resume:
        fall_asleep(learner, parts[place.rank])
    metrics = run_steps(learner, parts[place.rank], totals, range(2, 4))
    found = metrics, learner.weights(4), learner.logprobs(parts[place.rank])["logprobs"]
    learner.stop()
    return found


@pytest.mark.parametrize(
    ("world", "which", "more"),
    [
        (1, "tied", {}),
        (2, "untied", {}),
        pytest.param(2, "bfloat", {}, marks=pytest.mark.slow),
        (2, "tied", {"lora": LORA}),
        pytest.param(2, "bfloat", {"lora": LORA, "tensor_parallel": 2}, marks=pytest.mark.slow),
        pytest.param(2, "bfloat", {"lora": LORA}, marks=pytest.mark.slow),
        pytest.param(2, "untied", {"tensor_parallel": 2}, marks=pytest.mark.slow),
        pytest.param(2, "bfloat", {"tensor_parallel": 2}, marks=pytest.mark.slow),
        (2, "bfloat", {"context_parallel": 2}),
        (2, "tied", {"optimizer": rlsdk.Use("sgd", momentum=0.9)}),
        pytest.param(2, "bfloat", {"offload": "all", "tensor_parallel": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_one_left_alone(
    world: int,
    which: str,
    more: dict[str, Any],
    ranks: Ranks,
    batch: TrainBatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    model = request.getfixturevalue(which)
    roles = Roles(actor=model, critic=model, reference=model)
    options = {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 2, "micro_batch_tokens": 80, **more}
    parts = shares(batch, world, "even")
    arguments = (world, leave_or_resume, roles, options, parts, totals_of(batch), tmp_path)
    for alone, again in zip(ranks(*arguments, False), ranks(*arguments, True), strict=True):
        assert again[0] == alone[0]
        np.testing.assert_array_equal(again[2], alone[2])
        if alone[1] is not None:
            assert all(np.array_equal(array, again[1].tensors[n]) for n, array in alone[1].tensors.items())
    suffixes = {file.suffix for file in tmp_path.rglob("*") if file.is_file()}
    assert suffixes == {".safetensors", ".json"}  # nothing that is executed when it is read


def train_critic_first(
    place: Any, roles: Roles, options: dict[str, Any], parts: Any, totals: Any, folder: Path, resume: bool
) -> Any:
    """Metrics and weights of two steps of the critic alone, and of one of both; a checkpoint is between the two."""
    learner, part = started(place, roles, options), parts[place.rank]
    before, found = learner.weights(0), []
    for step in range(2):
        if step == 0 and resume:
            learner.load(folder)
            continue
        learner.forward_backward(part, rlsdk.Totals(*totals), role="critic", step=step)
        found.append(learner.optimizer_step("critic"))
        if step == 0:
            learner.save(folder)
    same = learner.weights(1)
    found.append(learner.update([(part, *totals)], 2))
    after = learner.weights(2)
    learner.stop()
    return found, before, same, after


@pytest.mark.parametrize(("world", "which", "more"), [(1, "tied", {}), (2, "bfloat", {}), (2, "tied", {"lora": LORA})])
def test_a_critic_is_trained_before_the_actor_and_resumed(
    world: int,
    which: str,
    more: dict[str, Any],
    ranks: Ranks,
    batch: TrainBatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    model = request.getfixturevalue(which)
    options = {"lr": 1e-2, "schedule": "linear", "micro_batch_tokens": 80, **more}
    arguments = (Roles(actor=model, critic=model), options, shares(batch, world, "even"), totals_of(batch), tmp_path)
    alone, again = (ranks(world, train_critic_first, *arguments, resume)[0] for resume in (False, True))
    first, second, third = alone[0]
    assert {name.partition("/")[0] for name in first} == {name.partition("/")[0] for name in second} == {"critic"}
    assert first["critic/lr"] > second["critic/lr"] > third["critic/lr"] < third["actor/lr"] * 10
    assert third["actor/lr"] == 1e-2  # the actor's first step
    assert again[0] == alone[0][1:]
    for name, array in alone[1].tensors.items():
        assert np.array_equal(alone[2].tensors[name], array) and np.array_equal(again[2].tensors[name], array)
        assert np.array_equal(again[3].tensors[name], alone[3].tensors[name])


def whole_state(learner: FSDP2Learner) -> dict[str, torch.Tensor]:
    """Weights and moments of all models, gathered from all ranks."""
    found = {}
    for role, trained in learner._trained.items():
        for name, tensor in trained._tensors(frozen=True, states=trained._states()).items():
            found[f"{role}.{name}"] = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
    return found


def save_or_load(
    place: Any, roles: Roles, options: dict[str, Any], parts: Any, totals: Any, folder: Path, load: bool
) -> Any:
    """State at a checkpoint, as it was written or read, and metrics of two steps after it."""
    learner = at_checkpoint(place, roles, options, parts[place.rank], totals, folder, load)
    state = whole_state(learner)
    metrics = [learner.update([(parts[place.rank], *totals)], step) for step in range(2, 4)]
    learner.stop()
    return state, metrics


@pytest.mark.parametrize(
    ("before", "after", "which", "options"),
    [
        ((2, {}), (1, {}), "untied", {}),
        ((1, {}), (2, {}), "bfloat", {}),
        ((2, {}), (1, {}), "tied", {"lora": LORA}),
        ((2, {"tensor_parallel": 2}), (1, {}), "normed", {}),
        ((2, {}), (1, {}), "tied", {"optimizer": rlsdk.Use("sgd", momentum=0.9)}),
        pytest.param((1, {}), (2, {"tensor_parallel": 2}), "normed", {"lora": LORA}, marks=pytest.mark.slow),
        pytest.param((2, {"tensor_parallel": 2}), (2, {"context_parallel": 2}), "bfloat", {}, marks=pytest.mark.slow),
        pytest.param((4, {"tensor_parallel": 2}), (2, {}), "normed", {}, marks=pytest.mark.slow),
        pytest.param((2, {}), (4, {"tensor_parallel": 2}), "normed", {}, marks=pytest.mark.slow),
        pytest.param((1, {}), (4, {}), "untied", {}, marks=pytest.mark.slow),
    ],
)
def test_a_run_is_resumed_with_other_ranks(
    before: tuple[int, dict[str, Any]],
    after: tuple[int, dict[str, Any]],
    which: str,
    options: dict[str, Any],
    ranks: Ranks,
    batch: TrainBatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Weights and optimiser state are the same to the bit; what follows differs by the order of sums."""
    model = request.getfixturevalue(which)
    roles, found = Roles(actor=model, critic=model), []
    for load, (world, more) in enumerate((before, after)):
        own = {"lr": 1e-3, "micro_batch_tokens": 80, **options, **more}
        if "optimizer" not in own:
            own["eps"] = 1e-3
        parts = shares(batch, world, "even")
        results = ranks(world, save_or_load, roles, own, parts, totals_of(batch), tmp_path, bool(load))
        for other in results[1:]:
            assert all(torch.equal(tensor, other[0][name]) for name, tensor in results[0][0].items())
        found.append(results[0])
    (written, alone), (read, resumed) = found
    assert read.keys() == written.keys()
    moments = [name for name in written if ".exp_avg" in name or ".momentum_buffer" in name]
    assert len(moments) > 20 * (1 if "optimizer" in options else 2) and all(
        torch.equal(tensor, read[name]) for name, tensor in written.items()
    )
    # Of 16 bits, and the greatest ratio of one token is among the metrics.
    tolerance = {"rel": 1e-1, "abs": 2e-2} if which == "bfloat" else {"rel": 1e-4, "abs": 1e-5}
    for one, two in zip(alone, resumed, strict=True):
        assert two == pytest.approx(one, **tolerance)


def follow_the_policy(
    place: Any, roles: Roles, options: dict[str, Any], parts: Any, totals: Any, folder: Path, resume: bool
) -> Any:
    """Weights of the reference model at a checkpoint, and logprobs of both models there and after another step."""
    learner = started(place, roles, {"lr": 1e-2, "micro_batch_tokens": 80, **options})
    part = parts[place.rank]

    def step(number: int) -> list[np.ndarray]:
        learner.update([(part, *totals)], number)
        learner.move_reference()
        return [learner.logprobs(part, role)["logprobs"] for role in ("actor", "reference")]

    if resume:
        learner.load(folder)
    else:
        step(0)
        learner.sleep()
        learner.save(folder)
    learner.sleep()
    held = learner._moving.masters.items()
    whole = {name: (each.full_tensor() if hasattr(each, "full_tensor") else each).clone() for name, each in held}
    found = [learner.logprobs(part, role)["logprobs"] for role in ("actor", "reference")]
    found += step(1)
    learner.stop()
    return whole, found


@pytest.mark.parametrize(
    ("world", "which", "mix", "more"),
    [
        (1, "tied", 1.0, {}),
        (2, "bfloat", 1.0, {}),
        (2, "untied", 0.3, {}),
        (2, "bfloat", 0.3, {"offload": "all"}),
        pytest.param(2, "bfloat", 0.3, {"tensor_parallel": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_reference_model_follows_the_policy_and_is_resumed(
    world: int,
    which: str,
    mix: float,
    more: dict[str, Any],
    ranks: Ranks,
    batch: TrainBatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    model = request.getfixturevalue(which)
    roles, parts = Roles(actor=model, reference=model, reference_mix=mix), shares(batch, world, "even")
    arguments = (world, follow_the_policy, roles, more, parts, totals_of(batch), tmp_path)
    alone, again = ranks(*arguments, False), ranks(*arguments, True)
    for (whole, found), (restored, resumed) in zip(alone, again, strict=True):
        assert all(torch.equal(tensor, restored[name]) for name, tensor in whole.items())
        assert all(np.array_equal(one, two) for one, two in zip(found, resumed, strict=True))
        for actor, reference in (found[:2], found[2:]):
            assert np.array_equal(actor, reference) == (mix == 1)
    if world == 2 and which == "untied":  # checkpoints have whole tensors
        (whole, _), *_ = ranks(1, follow_the_policy, roles, more, [batch], totals_of(batch), tmp_path, True)
        assert all(torch.equal(tensor, whole[name]) for name, tensor in alone[0][0].items())


def load_elsewhere(place: Any, roles: Roles, options: dict[str, Any], folder: Path, write: bool) -> str:
    learner = started(place, roles, options)
    try:
        learner.save(folder) if write else learner.load(folder)
    except CheckpointError as error:
        return str(error)
    finally:
        learner.stop()
    return ""


def test_a_checkpoint_that_does_not_fit_or_was_changed_is_refused(
    ranks: Ranks, tied: Model, untied: Model, tmp_path: Path
) -> None:
    ranks(2, load_elsewhere, Roles(actor=tied), {}, tmp_path, True)
    for fault in ranks(2, load_elsewhere, Roles(actor=tied), {"lora": LORA}, tmp_path, False):
        assert "lora None there, {'rank': 4" in fault
    for fault in ranks(2, load_elsewhere, Roles(actor=untied), {}, tmp_path, False):
        assert fault.startswith("the checkpoint's actor") and "lm_head" in fault
    shard = next(tmp_path.rglob("shard-*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    for fault in ranks(2, load_elsewhere, Roles(actor=tied), {}, tmp_path, False):
        assert "damaged and was not opened" in fault and shard.name in fault


def train_and_export(place: Any, roles: Roles, options: dict[str, Any], parts: Any, totals: Any, folder: Path) -> Any:
    learner = started(place, roles, {"lr": 1e-2, **options})
    untouched = learner.weights(0)
    learner.update([(parts[place.rank], *totals)], 0)
    weights = learner.weights(7)
    adapter = learner.adapter_weights(7) if "lora" in options else None
    learner.export(folder)
    learner.stop()
    return untouched, weights, adapter


@pytest.mark.parametrize(
    ("world", "which", "options"),
    [
        (1, "tied", {}),
        (2, "tied", {}),
        (2, "untied", {}),
        (2, "bfloat", {}),
        (2, "normed", {"tensor_parallel": 2}),
        (2, "bfloat", {"tensor_parallel": 2}),
        (2, "tied", {"context_parallel": 2}),
        (2, "untied", {"offload": "all"}),
    ],
)
def test_weights_and_export_are_the_model(
    world: int,
    which: str,
    options: dict[str, Any],
    ranks: Ranks,
    batch: TrainBatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = request.getfixturevalue(which)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text('{"version": "1.0"}')
    roles = Roles(actor=attrs.evolve(model, tokenizer=str(tmp_path / "source")))
    parts = shares(batch, world, "even")
    results = ranks(world, train_and_export, roles, options, parts, totals_of(batch), tmp_path / "export")
    assert all(weights is None for _, weights, _ in results[1:])
    untouched, weights, _ = results[0]
    base = AutoModelForCausalLM.from_pretrained(model.path).state_dict()
    assert untouched.tensors.keys() == base.keys() - ({"lm_head.weight"} if which in ("tied", "bfloat") else set())
    assert all(torch.equal(tensor, base[name]) for name, tensor in from_weights(untouched))
    assert weights.version == 7 and set(weights.dtypes.values()) == {model.dtype}
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert opened.dtype == getattr(torch, model.dtype)
    assert AutoConfig.from_pretrained(tmp_path / "export").dtype == getattr(torch, model.dtype)
    for name, tensor in from_weights(weights):
        assert torch.equal(opened.state_dict()[name], tensor), name
        assert not torch.equal(base[name], tensor), name
    assert (tmp_path / "export" / "tokenizer.json").read_text() == '{"version": "1.0"}'


def peft_model(model: Model, adapter: Weights) -> Any:
    """The model under peft itself, in float64, with the adapter that the learner gave."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float64, attn_implementation="eager")
    config = LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules="all-linear")
    net = get_peft_model(base, config)
    set_peft_model_state_dict(net, {name: tensor.double() for name, tensor in from_weights(adapter)})
    return net


@pytest.mark.parametrize(
    ("world", "more"), [(1, {}), (2, {}), (2, {"context_parallel": 2}), (2, {"tensor_parallel": 2})]
)
def test_gradients_of_an_adapter_are_those_of_plain_peft(
    world: int, more: dict[str, Any], ranks: Ranks, tied: Model, batch: TrainBatch
) -> None:
    options = {"micro_batch_tokens": 80, "lora": LORA, **more}
    parts = shares(batch, world, "even")
    before, after, _ = ranks(world, step_along_the_gradient, Roles(actor=tied), options, parts, totals_of(batch))[0]
    expected = plain_gradients(peft_model(tied, before), batch)
    expected = {name.replace(".default.", "."): gradient for name, gradient in expected.items()}
    assert len(expected) == 2 * 2 * 7  # A and B of seven linear layers in two blocks
    assert all(gradient.abs().max() > 0 for gradient in expected.values())
    assert distance(gradient_of(before, after), expected) < 1e-5


@pytest.mark.parametrize(("which", "size"), [("tied", 1), ("bfloat", 1), ("tied", 2)])
def test_an_adapter_is_merged_as_peft_merges_it(
    which: str, size: int, ranks: Ranks, batch: TrainBatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = request.getfixturevalue(which)
    parts = shares(batch, 2, "even")
    options = {"lora": LORA, "tensor_parallel": size}
    results = ranks(2, train_and_export, Roles(actor=model), options, parts, totals_of(batch), tmp_path)
    _, weights, adapter = results[0]
    assert adapter.adapter == Adapter(rank=4, alpha=8) and set(adapter.dtypes.values()) == {model.dtype}
    expected = peft_model(model, adapter).merge_and_unload().state_dict()
    for name, tensor in from_weights(weights):
        close = {"rtol": 1e-6, "atol": 1e-6} if which == "tied" else {"rtol": 2**-8, "atol": 1e-8}
        torch.testing.assert_close(tensor.double(), expected[name], **close, msg=name)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(opened[name], tensor) for name, tensor in from_weights(weights))
    base = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    again = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    torch.testing.assert_close(again["model.norm.weight"].double(), expected["model.norm.weight"])


def read_and_learn(place: Any, roles: Roles, options: dict[str, Any], parts: Any, totals: Any) -> Any:
    """Fields before and after steps, and the metrics of these."""
    learner = started(place, roles, {"lr": 1e-2, "critic_lr": 2e-2, **options})
    part = parts[place.rank]
    fields = ("logprobs", "entropy", "probs_squared_sum")
    found = [{role: learner.logprobs(part, role, fields) for role in ("actor", "reference")}]
    found.append({"values": learner.values(part), "canary": learner.canary(np.arange(12) * 5 % 61)})
    losses = []
    for step in range(8):
        part = part.with_tokens(values=learner.values(part))
        losses.append(learner.update([(part, *totals)], step)["critic/loss"])
    found.append({"losses": losses, "reference": learner.logprobs(part, "reference")["logprobs"]})
    learner.stop()
    return found


def plain_states(net: Any, batch: TrainBatch, temperature: float) -> dict[str, np.ndarray]:
    columns: dict[str, list[torch.Tensor]] = {"logprobs": [], "entropy": [], "probs_squared_sum": []}
    offset = 0
    for length, start, response in zip(batch.lengths, batch.starts, batch.responses, strict=True):
        ids = torch.from_numpy(batch.token_ids[offset : offset + length])
        with torch.no_grad():
            log_p = (net(ids[None]).logits[0] / temperature).log_softmax(-1)[start - 1 : start - 1 + response]
        columns["logprobs"].append(log_p.gather(1, ids[start : start + response, None])[:, 0])
        columns["entropy"].append(-(log_p.exp() * log_p).sum(-1))
        columns["probs_squared_sum"].append(log_p.exp().square().sum(-1))
        offset += length
    return {name: torch.cat(column).numpy() for name, column in columns.items()}


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, {}),
        (2, {}),
        (2, {"lora": LORA}),
        pytest.param(2, {"lora": LORA, "tensor_parallel": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"tensor_parallel": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"context_parallel": 2}, marks=pytest.mark.slow),
    ],
)
def test_logprobs_are_those_of_transformers_and_the_critic_learns_returns(
    world: int, options: dict[str, Any], ranks: Ranks, tied: Model, untied: Model, batch: TrainBatch
) -> None:
    from transformers import AutoModelForCausalLM

    other = tied if "lora" in options else untied  # with an adapter, the base is the reference
    roles = Roles(actor=tied, reference=other, critic=tied)
    parts = shares(batch, world, "even")
    results = ranks(world, read_and_learn, roles, {"micro_batch_tokens": 64, **options}, parts, totals_of(batch))
    for part, (fields, rest, late) in zip(parts, results, strict=True):
        for role, model in (("actor", tied), ("reference", other)):
            net = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float64)
            for name, expected in plain_states(net, part, TEMPERATURE).items():
                assert fields[role][name].dtype == np.float32
                np.testing.assert_allclose(fields[role][name], expected, atol=2e-5, err_msg=f"{role} {name}")
        assert not rest["values"].any()  # the head starts at zero
        np.testing.assert_allclose(late["reference"], fields["reference"]["logprobs"], atol=2e-6)
        assert late["losses"][-1] < 0.7 * late["losses"][0]
    canary = TrainBatch(
        token_ids=np.arange(12) * 5 % 61,
        lengths=np.array([12]),
        starts=np.array([1]),
        responses=np.array([11]),
        loss_mask=np.ones(11, bool),
    )
    net = AutoModelForCausalLM.from_pretrained(tied.path, dtype=torch.float64)
    for _, rest, _ in results:
        np.testing.assert_allclose(rest["canary"], plain_states(net, canary, 1.0)["logprobs"], atol=2e-5)


def learn_with(place: Any, roles: Roles, options: dict[str, Any], parts: Any, totals: Any) -> Any:
    learner = started(place, roles, options)
    found = []
    for step in range(2):
        learner.forward_backward(parts[place.rank], rlsdk.Totals(*totals), step=step)
        found.append(learner.optimizer_step())
    weights = learner.weights(1)
    learner.stop()
    return found, weights


def test_the_gradient_is_clipped_by_its_norm_over_all_ranks(ranks: Ranks, tied: Model, batch: TrainBatch) -> None:
    options = {"lr": 1e-2, "eps": 1e-2, "grad_clip": 0.1}
    found = []
    for world in (1, 2):
        parts = shares(batch, world, "even")
        found.append(ranks(world, learn_with, Roles(actor=tied), options, parts, totals_of(batch))[0])
    assert found[0][0][0]["actor/grad_norm"] > 0.2
    assert found[1][0] == [pytest.approx(metrics, rel=1e-4, abs=1e-6) for metrics in found[0][0]]
    for name, array in found[0][1].tensors.items():
        np.testing.assert_allclose(found[1][1].tensors[name], array, atol=2e-5, err_msg=name)


def step_with_decay(place: Any, roles: Roles, options: dict[str, Any], parts: Any, totals: Any) -> Any:
    """Weights before and after a step, of the first rank."""
    learner = started(place, roles, {"lr": 0.02, **options})
    before = learner.weights(0)
    learner.update([(parts[place.rank], *totals)], 0)
    after = learner.weights(1)
    learner.stop()
    return [dict(from_weights(each)) for each in (before, after)] if place.rank == 0 else None


def test_weight_decay_leaves_out_norms_and_biases_if_it_is_set_so(
    ranks: Ranks, biased: Model, batch: TrainBatch
) -> None:
    def step(**options: Any) -> Any:
        return ranks(2, step_with_decay, Roles(actor=biased), options, shares(batch, 2, "even"), totals_of(batch))[0]

    before, plain = step()
    _, everywhere = step(weight_decay=5.0)
    _, matrices = step(weight_decay=5.0, weight_decay_on="matrices")
    assert any("bias" in name for name in before)
    for name, tensor in before.items():
        torch.testing.assert_close(everywhere[name], plain[name] - 0.1 * tensor, rtol=1e-5, atol=1e-5, msg=name)
        decayed = tensor.ndim > 1
        torch.testing.assert_close(matrices[name], everywhere[name] if decayed else plain[name], msg=name)


def test_sgd_steps_along_the_gradient_of_all_ranks(ranks: Ranks, tied: Model, batch: TrainBatch) -> None:
    """Unlike AdamW's, a step of SGD has the length of the clipped gradient, times the learning rate."""

    def step(**options: Any) -> Any:
        given = {"optimizer": rlsdk.Use("sgd"), **options}
        return ranks(2, step_with_decay, Roles(actor=tied), given, shares(batch, 2, "even"), totals_of(batch))[0]

    before, whole = step(lr=0.5, grad_clip=1.0)
    _, clipped = step(lr=0.5, grad_clip=0.1)
    squares = sum(float((whole[name] - tensor).double().square().sum()) for name, tensor in before.items())
    assert squares**0.5 == pytest.approx(0.5, rel=1e-3)
    for name, tensor in before.items():
        torch.testing.assert_close(clipped[name] - tensor, (whole[name] - tensor) / 10, rtol=1e-3, atol=1e-6, msg=name)


def test_a_gradient_that_is_not_finite_changes_nothing(ranks: Ranks, tied: Model, batch: TrainBatch) -> None:
    parts = shares(batch, 2, "even")
    advantages = parts[1].tokens["advantages"].copy()
    advantages[np.flatnonzero(parts[1].loss_mask)[0]] = np.inf
    parts = [parts[0], parts[1].with_tokens(advantages=advantages)]
    for (metrics, weights), rank in zip(
        ranks(2, learn_with, Roles(actor=tied), {"lr": 1e-2}, parts, totals_of(batch)), range(2), strict=True
    ):
        assert [m["actor/skipped_updates"] for m in metrics] == [1, 1]
        if rank == 0:
            from transformers import AutoModelForCausalLM

            base = AutoModelForCausalLM.from_pretrained(tied.path).state_dict()
            assert all(torch.equal(tensor, base[name]) for name, tensor in from_weights(weights))


def test_bfloat16_keeps_steps_smaller_than_its_digits(ranks: Ranks, bfloat: Model, batch: TrainBatch) -> None:
    """A hundred steps of 1e-5 move weights that one step, rounded to bfloat16, would not."""
    results = ranks(1, many_small_steps, Roles(actor=bfloat), [batch], totals_of(batch))
    moved = {name: float((a.float() - b.float()).abs().max()) for name, (b, a) in results[0].items()}
    assert moved["model.norm.weight"] == 0.0 or moved["model.norm.weight"] > 1e-3
    assert moved["model.layers.0.self_attn.q_proj.weight"] > 5e-4


def many_small_steps(place: Any, roles: Roles, parts: Any, totals: Any) -> Any:
    learner = started(place, roles, {"lr": 1e-5})
    before = dict(from_weights(learner.weights(0)))
    for step in range(60):
        learner.update([(parts[place.rank], *totals)], step)
    after = dict(from_weights(learner.weights(1)))
    learner.stop()
    return {name: (before[name], tensor) for name, tensor in after.items()}


def test_norms_of_heads_are_trained_by_the_gradients_of_all_ranks(
    ranks: Ranks, normed: Model, batch: TrainBatch
) -> None:
    """A Qwen3 normalises each head: of these weights, a rank has the gradient of its own heads alone."""
    from transformers import AutoModelForCausalLM

    parts = shares(batch, 2, "even")
    options = {"micro_batch_tokens": 100, "tensor_parallel": 2}
    before, after, metrics = ranks(2, step_along_the_gradient, Roles(actor=normed), options, parts, totals_of(batch))[0]
    net = AutoModelForCausalLM.from_pretrained(normed.path, dtype=torch.float64, attn_implementation="eager")
    expected = plain_gradients(net, batch)
    found = gradient_of(before, after)
    assert distance(found, expected) < 1e-5
    name = "model.layers.0.self_attn.q_norm.weight"
    assert distance({name: found[name]}, {name: expected[name]}) < 1e-5
    norm = sum(float(e.square().sum()) for e in expected.values()) ** 0.5
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_experts_are_trained_although_a_rank_may_need_few_of_them(
    ranks: Ranks, experts: Model, batch: TrainBatch, tmp_path: Path
) -> None:
    """The second rank reads a single rollout in one of its micro-batches, and a made-up row in all others."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    parts = [batch.select(np.arange(1, len(batch))), batch.select(np.arange(1))]
    options = {"micro_batch_tokens": 60}
    before, after, _ = ranks(2, step_along_the_gradient, Roles(actor=experts), options, parts, totals_of(batch))[0]
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    net = AutoModelForCausalLM.from_pretrained(experts.path, dtype=torch.float64, **plain)
    net.save_pretrained(tmp_path, state_dict=plain_gradients(net, batch))  # by the names of the checkpoint
    assert distance(gradient_of(before, after), load_file(tmp_path / "model.safetensors")) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"tensor_parallel": 2}, {"context_parallel": 2, "tensor_parallel": 2}])
def test_four_ranks_with_two_way_tensor_and_data_or_context_parallelism(
    more: dict[str, int], ranks: Ranks, normed: Model, batch: TrainBatch, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    parts = shares(batch, 4, "even")
    options = {"micro_batch_tokens": 100, **more}
    before, after, _ = ranks(4, step_along_the_gradient, Roles(actor=normed), options, parts, totals_of(batch))[0]
    net = AutoModelForCausalLM.from_pretrained(normed.path, dtype=torch.float64, attn_implementation="eager")
    assert distance(gradient_of(before, after), plain_gradients(net, batch)) < 1e-5
    roles = Roles(actor=normed, critic=normed, reference=normed)
    arguments = (4, leave_or_resume, roles, {**options, "lr": 1e-2}, parts, totals_of(batch), tmp_path)
    for alone, again in zip(ranks(*arguments, False), ranks(*arguments, True), strict=True):
        assert again[0] == alone[0]
