"""Routers of mixtures of experts in the learner: float32 logits, and the engine's routed experts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
import architectures

from rlsdk.contracts import ActorSpec, Model, Request, Sampling, TrainBatch
from rlsdk.conversion import without_weights
from rlsdk.engines.transformers import Transformers
from rlsdk.learners.model import PolicyModel, load_policy
from rlsdk.learners.rows import RowStyle, TokenRows, to_rows
from rlsdk.learners.tree import tree_rows, trees
from rlsdk.learners.ulysses import SequenceGroup
from rlsdk.routing import UNKNOWN, Routers, replay_fault, routers_of

EXPERTS = 4


def _batch(lengths: tuple[int, ...] = (12, 9, 7), starts: tuple[int, ...] = (4, 3, 4), seed: int = 0) -> TrainBatch:
    generator = np.random.default_rng(seed)
    ids = generator.integers(3, 100, sum(lengths))
    responses = np.array(lengths) - np.array(starts)
    return TrainBatch(
        token_ids=ids,
        lengths=np.array(lengths),
        starts=np.array(starts),
        responses=responses,
        loss_mask=np.ones(int(responses.sum()), bool),
    )


def _with_same_prompt(batch: TrainBatch) -> TrainBatch:
    """The batch, all of whose prompts begin as the first one's does."""
    ids = batch.token_ids.copy()
    for begin, count in zip(np.cumsum(batch.lengths) - batch.lengths, batch.starts, strict=True):
        ids[begin : begin + count] = ids[:count]
    return attrs.evolve(batch, token_ids=ids)


def _routing(batch: TrainBatch, layers: int = 2, seed: int = 1) -> np.ndarray:
    """A choice of two of the experts for each token and layer, at random; equal tokens of prompts choose equally."""
    generator = np.random.default_rng(seed)
    choices = generator.permuted(np.tile(np.arange(EXPERTS), (1000, layers, 1)), axis=2)[:, :, :2]
    return np.asarray(choices[batch.token_ids], np.int16)


def _policy(folder: Path, name: str, **options: Any) -> PolicyModel:
    architectures.make(folder, name, **options)
    attention: Any = "eager" if name == "gpt-oss" else "sdpa"
    return load_policy(Model(path=str(folder), dtype=options.get("dtype", "float32")), attention, False)


class _Forced(torch.nn.Module):
    """A router of Qwen3-MoE with a given choice of experts: the reference, written from the formula."""

    def __init__(self, router: Any, chosen: Tensor) -> None:
        super().__init__()
        self.weight, self.chosen = router.weight, chosen

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = states.reshape(-1, states.shape[-1]) @ self.weight.T
        scores = logits.exp().gather(1, self.chosen)
        return logits, scores / scores.sum(-1, keepdim=True), self.chosen


def _reference(folder: Path, ids: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, dict[str, Tensor]]:
    """Logprobs of a sequence `[k - 1]` under a plain model with forced experts, and gradients of their sum."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    for layer, block in enumerate(model.model.layers):
        block.mlp.gate = _Forced(block.mlp.gate, torch.from_numpy(chosen[:-1, layer].astype(np.int64)))
    tokens = torch.from_numpy(ids)
    logprobs = model(tokens[None, :-1], use_cache=False).logits[0].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    logprobs.sum().backward()
    return logprobs.detach().numpy(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_replayed_experts_give_the_logprobs_and_gradients_of_a_model_that_is_told_its_choice(tmp_path: Path) -> None:
    policy = _policy(tmp_path, "qwen3-moe", norm_topk_prob=True)
    batch = _batch((12,), (1,))
    routing = _routing(batch)
    own = policy(to_rows(batch, "padded"))[0].detach().numpy()
    found = policy(to_rows(attrs.evolve(batch, context={"routed_experts": routing}), "padded"))[0]
    expected, gradients = _reference(tmp_path, batch.token_ids, routing)
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-5)
    assert np.abs(own - expected).max() > 0.01  # else an own choice would pass
    found.sum().backward()
    trained = {n: p.grad for n, p in policy.model.named_parameters() if p.grad is not None}
    router = "model.layers.1.mlp.gate.weight"
    assert gradients[router].abs().sum() > 0  # the router learns through the experts that it did not choose
    for name in (router, "model.layers.0.mlp.gate.weight", "model.layers.0.self_attn.q_proj.weight"):
        torch.testing.assert_close(trained[name], gradients[name], atol=1e-4, rtol=1e-3)


def _laid_out(batch: TrainBatch, style: RowStyle) -> TokenRows:
    return tree_rows(batch, trees(batch, 1000, 32)[0]) if style == "tree" else to_rows(batch, style)


@pytest.mark.parametrize("style", ["packed", "shared", "tree"])
@pytest.mark.parametrize("name", architectures.MOE)
def test_rows_of_every_style_replay_the_same_experts(name: str, style: RowStyle, tmp_path: Path) -> None:
    if name == "gpt-oss":
        pytest.skip("its layers are refused with these rows")
    policy = _policy(tmp_path, name)
    batch = _with_same_prompt(_batch((12, 9, 7), (4, 4, 4)))
    batch = attrs.evolve(batch, context={"routed_experts": _routing(batch)})
    with torch.no_grad():
        padded = policy(to_rows(batch, "padded"))[0]
        torch.testing.assert_close(policy(_laid_out(batch, style))[0], padded, atol=1e-5, rtol=1e-5)
        own = policy(_laid_out(attrs.evolve(batch, context={}), style))[0]
    assert (own - padded).abs().max() > 1e-3


def test_parts_of_a_batch_keep_their_experts(tmp_path: Path) -> None:
    policy = _policy(tmp_path, "mixtral")
    batch = _batch()
    batch = attrs.evolve(batch, context={"routed_experts": _routing(batch)})
    order = np.array([2, 0, 1])
    with torch.no_grad():
        whole = policy(to_rows(batch, "padded"))[0].numpy()
        parts = TrainBatch.concatenate([batch.select(order[:1]), batch.select(order[1:])])
        found = policy(to_rows(parts, "padded"))[0].numpy()
    np.testing.assert_allclose(found, whole[batch.response_positions(order)], atol=1e-5)


@pytest.mark.parametrize("name", architectures.MOE)
def test_tokens_without_known_experts_choose_their_own(name: str, tmp_path: Path) -> None:
    policy = _policy(tmp_path, name)
    batch = _batch()
    nothing = np.full((len(batch.token_ids), 2, 2), UNKNOWN, np.int16)
    with torch.no_grad():
        own = policy(to_rows(batch, "padded"))[0]
        unknown = policy(to_rows(attrs.evolve(batch, context={"routed_experts": nothing}), "padded"))[0]
        torch.testing.assert_close(unknown, own, atol=0, rtol=0)
        first = nothing.copy()
        first[: batch.lengths[0]] = _routing(batch)[: batch.lengths[0]]
        some = policy(to_rows(attrs.evolve(batch, context={"routed_experts": first}), "padded"))[0]
    count = batch.responses[0]
    assert (some[:count] - own[:count]).abs().max() > 1e-3
    torch.testing.assert_close(some[count:], own[count:], atol=1e-5, rtol=1e-5)


def test_activations_computed_again_in_the_backward_pass_use_the_replayed_experts(tmp_path: Path) -> None:
    architectures.make(tmp_path, "qwen3-moe")
    batch = _batch()
    rows = to_rows(attrs.evolve(batch, context={"routed_experts": _routing(batch)}), "padded")
    gradients = []
    for checkpointing in (False, True):
        policy = load_policy(Model(path=str(tmp_path)), "sdpa", checkpointing)
        policy(rows)[0].sum().backward()
        gradients.append([p.grad.clone() for p in policy.parameters() if p.grad is not None])
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", architectures.MOE)
def test_router_logits_are_computed_in_float32(name: str, tmp_path: Path) -> None:
    policy = _policy(tmp_path, name, dtype="bfloat16")
    seen: list[Tensor] = []
    for router in routers_of(policy.model).values():
        router.register_forward_hook(lambda module, args, output: seen.append((module, args[0], output[0])))
    with torch.no_grad():
        policy(to_rows(_batch(), "padded"))
    assert seen
    for router, states, logits in seen:
        assert states.dtype == torch.bfloat16
        assert logits.dtype == torch.float32
        bias = getattr(router, "bias", None)
        exact = states.reshape(-1, states.shape[-1]).double() @ router.weight.double().T
        exact = exact if bias is None else exact + bias.double()
        torch.testing.assert_close(logits.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name", [*architectures.MOE[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in architectures.MOE[2:])]
)
def test_a_bfloat16_engine_and_the_learner_agree_better_with_its_experts(name: str, tmp_path: Path) -> None:
    """A bfloat16 engine and a float32 learner: logprobs of sampled tokens, without and with the engine's choices."""
    architectures.make(tmp_path, name, num_hidden_layers=4)
    engine = Transformers()
    engine.return_routing()
    engine.start(Model(path=str(tmp_path), dtype="bfloat16", max_length=128), ActorSpec(role="engine"))
    prompt = np.random.default_rng(0).integers(3, 100, 8)
    engine.add([Request(id="a", prompt_ids=prompt, sampling=Sampling(max_tokens=60, ignore_eos=True), n=16, seed=0)])
    done = []
    while engine.unfinished:
        done += engine.step()
    engine.stop()
    lengths = np.array([len(prompt) + len(each.token_ids) for each in done])
    batch = TrainBatch(
        token_ids=np.concatenate([np.concatenate([prompt, each.token_ids]) for each in done]),
        lengths=lengths,
        starts=np.full(len(done), len(prompt)),
        responses=lengths - len(prompt),
        loss_mask=np.ones(int((lengths - len(prompt)).sum()), bool),
    )
    last = np.full((1, *done[0].routed_experts.shape[1:]), UNKNOWN, np.int16)
    routing = np.concatenate([part for each in done for part in (each.routed_experts, last)])
    attention: Any = "eager" if name == "gpt-oss" else "sdpa"
    policy = load_policy(Model(path=str(tmp_path)), attention, False)
    behaviour = np.concatenate([each.logprobs for each in done])
    with torch.no_grad():
        own = policy(to_rows(batch, "padded"))[0].numpy()
        replayed = policy(to_rows(attrs.evolve(batch, context={"routed_experts": routing}), "padded"))[0].numpy()
    without, with_ = (np.abs(values - behaviour) for values in (own, replayed))
    assert with_.max() < 0.8 * without.max()
    assert with_.mean() < without.mean()


def test_a_model_without_routers_is_not_changed_and_cannot_be_replayed(tmp_path: Path) -> None:
    model = architectures.make(tmp_path / "dense", "llama")
    assert len(Routers(model)) == 0
    assert "LlamaForCausalLM has no expert routers" in replay_fault(model)


@pytest.mark.parametrize("name", architectures.MOE)
def test_replay_is_checked_on_a_model_without_weights(name: str, tmp_path: Path) -> None:
    architectures.make(tmp_path, name, dtype="bfloat16")
    assert replay_fault(without_weights(Model(path=str(tmp_path)))) == ""


def test_routers_that_choose_by_other_means_than_topk_are_named(tmp_path: Path) -> None:
    model = architectures.make(tmp_path, "qwen3-moe")
    for router in routers_of(model).values():
        router.forward = lambda states: (states, states, states)
    assert "Qwen3MoeTopKRouter, layer 0) do not choose experts by topk" in replay_fault(model.to("meta"))


def test_ranks_that_share_rollouts_get_the_experts_of_their_own_columns() -> None:
    batch = _batch()
    rows = to_rows(attrs.evolve(batch, context={"routed_experts": _routing(batch)}), "padded")
    count, width = rows.input_ids.shape  # an odd width: the last rank's columns end with padding
    assert width % 2
    own = [SequenceGroup(rank, 2, None)._slice(rows)[0] for rank in (0, 1)]
    found = torch.cat([part.routing.view(count, -1, 2, 2) for part in own], dim=1)
    assert torch.equal(found[:, :width], rows.routing.view(count, width, 2, 2))
    assert (found[:, width:] == UNKNOWN).all()
