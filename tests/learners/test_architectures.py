"""For tiny random models, the learner sends the checkpoint's tensors, and the engine `transformers` loads them.

One process: `load_policy`, a step of AdamW, and the exporter of the learner, without Ray and DeepSpeed's engine.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
import architectures

from rlsdk.contracts import ActorSpec, Model, Request, Sampling, TrainBatch, Weights
from rlsdk.conversion import read_header, trained_shapes
from rlsdk.engines.transformers import Transformers
from rlsdk.errors import EngineError, LearnerError
from rlsdk.learners.export import WeightExporter
from rlsdk.learners.lora import Lora, wrap
from rlsdk.learners.model import PolicyModel, load_policy
from rlsdk.learners.model_faults import policy_faults
from rlsdk.learners.ranks import Ranks
from rlsdk.learners.rows import to_rows
from rlsdk.learners.tree import tree_rows
from rlsdk.learners.zero import full_tensors
from rlsdk.weights import from_weights

RECURRENT = ("qwen3.5", "nemotron-h")
"""Architectures with layers that keep a state for each rollout: rows are not packed."""
IDS = np.random.default_rng(0).integers(3, 100, 40)


def _policy(model: Model) -> PolicyModel:
    return load_policy(model, "eager" if "gpt-oss" in model.path else "sdpa", False)


def _rows(count: int = 1, prompt: int = 1) -> TrainBatch:
    return TrainBatch(
        token_ids=np.tile(IDS, count),
        lengths=np.full(count, len(IDS)),
        starts=np.full(count, prompt),
        responses=np.full(count, len(IDS) - prompt),
        loss_mask=np.ones(count * (len(IDS) - prompt), bool),
    )


def _step(policy: PolicyModel) -> np.ndarray:
    """Take an optimiser step that changes all weights, and return the logprobs under the new ones."""
    rows = to_rows(_rows(), "padded")
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    policy(rows)[0].sum().backward()
    optimizer.step()
    with torch.no_grad():
        return np.asarray(policy(rows)[0].float())


def _exporter(policy: PolicyModel, model: Model, lora: Lora | None = None) -> WeightExporter:
    return WeightExporter(policy.model, model, Ranks(0, 1, "cpu"), lora, partial(full_tensors, policy.model))


def _header(weights: Weights) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in weights.tensors.items()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_the_learner_sends_names_and_shapes_of_the_checkpoint(name: str, tied: bool, tmp_path: Path) -> None:
    architectures.make(tmp_path / name, name, tied=tied)
    model = Model(path=str(tmp_path / name))
    held = read_header(model.path)
    assert trained_shapes(model) == held
    assert _header(_exporter(_policy(model), model).weights(1)) == held


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_the_engine_has_the_learners_logprobs_after_a_step(name: str, dtype: str, tmp_path: Path) -> None:
    architectures.make(tmp_path / name, name, dtype=dtype)
    model = Model(path=str(tmp_path / name), dtype=dtype, max_length=256)
    policy = _policy(model)
    engine = Transformers()
    engine.start(model, ActorSpec(role="engine"))
    before = engine.logprobs(IDS)
    expected = _step(policy)
    weights = _exporter(policy, model).weights(1)
    engine.load_weights(weights)
    atol = 1e-4 if dtype == "float32" else 0.2
    assert np.abs(expected - before).max() > 3 * atol  # else a load of nothing would pass
    np.testing.assert_allclose(engine.logprobs(IDS), expected, atol=atol)
    policy_state, engine_state = policy.model.state_dict(), engine.net.state_dict()
    assert all(torch.equal(policy_state[key], engine_state[key]) for key in policy_state)
    engine.stop()


@pytest.mark.parametrize("name", [*architectures.MOE, "gpt-neox", "gemma3", *RECURRENT])
def test_an_export_opens_in_transformers_with_the_trained_weights(name: str, tmp_path: Path) -> None:
    architectures.make(tmp_path / name, name)
    model = Model(path=str(tmp_path / name))
    policy = _policy(model)
    _step(policy)
    exporter = _exporter(policy, model)
    exporter.export(tmp_path / "export")
    weights = exporter.weights(1)
    assert read_header(str(tmp_path / "export")) == read_header(model.path) == _header(weights)
    assert len({file.stat().st_mode for file in (tmp_path / "export").iterdir()}) == 1
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    trained = policy.model.state_dict()
    assert opened.keys() == trained.keys()
    assert all(torch.equal(opened[key], trained[key]) for key in trained)


@pytest.mark.parametrize(
    ("name", "targets"), [("qwen3-moe", ("q_proj", "v_proj")), ("mixtral", ("o_proj",)), ("gpt-neox", "all-linear")]
)
def test_a_merged_adapter_has_the_names_of_the_checkpoint(name: str, targets: Any, tmp_path: Path) -> None:
    architectures.make(tmp_path / name, name)
    model = Model(path=str(tmp_path / name), max_length=256)
    policy, lora = _policy(model), Lora(rank=2, targets=targets, sync="merged")
    wrap(policy.model, lora, seed=0)
    expected = _step(policy)
    weights = _exporter(policy, model, lora).weights(1)
    assert _header(weights) == read_header(model.path)
    engine = Transformers()
    engine.start(model, ActorSpec(role="engine"))
    engine.load_weights(weights)
    np.testing.assert_allclose(engine.logprobs(IDS), expected, atol=1e-4)
    engine.stop()


@pytest.mark.parametrize(
    ("kind", "noise"),
    [
        ("GPT2Config", {"resid_pdrop": 0.3, "attn_pdrop": 0.3, "embd_pdrop": 0.3, "n_head": 2}),
        ("OPTConfig", {"dropout": 0.3, "layerdrop": 0.5, "ffn_dim": 32}),
        ("MixtralConfig", {"router_jitter_noise": 0.3, "num_key_value_heads": 2, "intermediate_size": 32}),
        ("PhimoeConfig", {"router_jitter_noise": 0.3, "input_jitter_noise": 0.3, "num_key_value_heads": 1}),
    ],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_models_add_at_random_in_training_is_left_out(
    kind: str, noise: dict[str, Any], checkpointing: bool, tmp_path: Path
) -> None:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 100}
    config = getattr(transformers, kind)(**sizes, **noise, max_position_embeddings=64)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy, rows = load_policy(Model(path=str(tmp_path)), "eager", checkpointing), to_rows(_rows(2), "padded")
    assert policy.model.training  # as gradient checkpointing needs
    found = [policy(rows)[0] for _ in range(2)]
    policy.eval()
    for each in found:
        torch.testing.assert_close(each, policy(rows)[0])


def test_an_adapter_of_fused_experts_is_refused(tmp_path: Path) -> None:
    architectures.make(tmp_path / "moe", "qwen3-moe")
    policy = _policy(Model(path=str(tmp_path / "moe")))
    with pytest.raises(LearnerError, match=r"mlp.experts is a Qwen3MoeExperts.*one fused tensor.*k_proj, o_proj"):
        wrap(policy.model, Lora(), seed=0)


def test_a_missing_expert_is_named_as_the_checkpoint_names_it(tmp_path: Path) -> None:
    architectures.make(tmp_path / "moe", "qwen3-moe")
    model = Model(path=str(tmp_path / "moe"))
    weights = _exporter(_policy(model), model).weights(3)
    gone = "model.layers.1.mlp.experts.2.up_proj.weight"
    short = Weights(3, {n: t for n, t in weights.tensors.items() if n != gone}, weights.dtypes)
    engine = Transformers()
    engine.start(model, ActorSpec(role="engine"))
    with pytest.raises(EngineError, match=rf"version 3 .* 1 of 45 tensors are missing: {gone}"):
        engine.load_weights(short)
    assert torch.equal(engine.net.state_dict()["lm_head.weight"], dict(from_weights(weights))["lm_head.weight"])
    engine.stop()


@pytest.mark.parametrize("name", [name for name in architectures.ARCHITECTURES if name not in RECURRENT])
def test_packed_rollouts_do_not_see_each_other_or_are_refused(name: str, tmp_path: Path) -> None:
    architectures.make(tmp_path / name, name)
    policy = _policy(Model(path=str(tmp_path / name)))
    if faults := policy_faults(policy.model, "eager" if name == "gpt-oss" else "sdpa", "packed"):
        assert name == "gpt-oss"
        assert "does not separate packed rollouts in a GptOssForCausalLM" in faults[0]
        return
    with torch.no_grad():
        found, expected = (policy(to_rows(_rows(2), style))[0] for style in ("packed", "padded"))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_rows_with_common_prefixes_have_the_logprobs_of_whole_rollouts_or_are_refused(
    name: str, tmp_path: Path
) -> None:
    """Rollouts several times as long as the windows of those models that have one."""
    architectures.make(tmp_path / name, name)
    policy, batch = _policy(Model(path=str(tmp_path / name))), _rows(2, prompt=8)
    attention = "eager" if name == "gpt-oss" else "sdpa"
    faults = [policy_faults(policy.model, attention, style) for style in ("shared", "tree")]
    if any(faults):
        assert name in (*RECURRENT, "gpt-oss", "gemma3", "mistral")
        assert all("needs full attention in every layer" in each[0] for each in faults)
        return
    with torch.no_grad():
        expected, shared = (policy(to_rows(batch, style))[0] for style in ("padded", "shared"))
        tree = policy(tree_rows(batch, np.zeros(2, np.int64)))[0]
    for found in (shared, tree):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_attention_by_the_distance_of_columns_is_refused_for_rows_with_common_prefixes() -> None:
    from transformers import BloomConfig, FalconConfig, MptConfig

    from rlsdk.learners.model_faults import check_layers

    for config in (BloomConfig(), MptConfig(), FalconConfig(alibi=True)):
        with pytest.raises(LearnerError, match=r"\(ALiBi\), which rows: tree changes; set learner.rows=padded"):
            check_layers(config, "tree")
    check_layers(FalconConfig(), "tree")


@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_tokens_are_sampled_with_the_logprobs_that_a_whole_pass_gives_them(name: str, tmp_path: Path) -> None:
    """Answers several times as long as the windows of those models that have one."""
    architectures.make(tmp_path / name, name)
    engine = Transformers()
    engine.start(Model(path=str(tmp_path / name), max_length=128), ActorSpec(role="engine"))
    engine.add([Request(id="a", prompt_ids=IDS[:8], sampling=Sampling(max_tokens=60, ignore_eos=True), n=3, seed=0)])
    done = []
    while engine.unfinished:
        done += engine.step()
    for each in done:
        whole = engine.logprobs(np.concatenate([IDS[:8], each.token_ids]))
        np.testing.assert_allclose(each.logprobs, whole[7:], atol=1e-4)
    engine.stop()
