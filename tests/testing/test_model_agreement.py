"""`rlsdk check model` with weights: engine and learner agree, and differences are traced to their origin."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from rlsdk.cli import root
from rlsdk.contracts import Model
from rlsdk.testing import model_agreement
from rlsdk.testing.model_agreement import (
    Operation,
    agreement,
    first_difference,
    open_policy,
    pick,
    sample_tokens,
    started,
    trace,
    traced,
)
from rlsdk.testing.model_subject import open_subject
from tests.architectures import make


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    make(folder, "qwen3")
    return folder


def after(folder: Path, change: Callable[[Any], object]) -> list[Operation]:
    """Trace a model whose learner was changed."""
    model = Model(path=str(folder), max_length=64, exact=True)
    with started("transformers", model) as engine:
        policy = open_policy(model)
        change(policy.model)
        return trace(engine, policy, sample_tokens(open_subject(str(folder))), 64)


def perturb(net: Any) -> None:
    with torch.no_grad():
        net.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3


def narrow(net: Any) -> None:
    norm = net.model.layers[1].post_attention_layernorm
    norm.register_forward_hook(lambda module, args, output: output.bfloat16().float())


def turn(net: Any) -> None:
    net.model.rotary_emb.inv_freq *= 0.9


def scale(net: Any) -> None:
    net.model.layers[0].self_attn.scaling *= 1.01


PLANTED = {
    "a perturbed weight": (perturb, "model.layers.1.mlp.up_proj"),
    "one norm in bfloat16": (narrow, "model.layers.1.post_attention_layernorm"),
    "a wrong rope theta": (turn, "model.rotary_emb"),
    "attention with another scale": (scale, "input of model.layers.0.self_attn.o_proj"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_difference_is_named_first(model: Path, planted: str) -> None:
    change, expected = PLANTED[planted]
    operations = after(model, change)
    first = first_difference(operations)
    assert first is not None
    assert first.name == expected
    assert first.difference > 0
    assert operations[-1].differs
    assert first in pick(operations)


def test_a_model_without_a_difference_says_so(model: Path) -> None:
    operations = after(model, lambda net: None)
    assert first_difference(operations) is None
    assert len(operations) > 30
    assert operations[-1].name == "logprobs"


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", "float32"), ("gemma3", "bfloat16"), ("mixtral", "float32")])
def test_other_architectures_and_dtypes_have_no_difference(tmp_path: Path, name: str, dtype: str) -> None:
    make(tmp_path, name, dtype=dtype)
    subject = open_subject(str(tmp_path))
    assert first_difference(traced(subject, str(tmp_path))) is None
    assert agreement(subject, str(tmp_path)).ok is True


def test_models_that_cannot_be_compared_are_reported(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = open_subject(str(model))
    assert agreement(subject, str(tmp_path)).ok == "n/a"
    assert "unknown engine 'sglang'" in agreement(subject, str(model), engine="sglang").reason
    opened = model_agreement.open_policy

    def changed(of: Model) -> Any:
        policy = opened(of)
        with torch.no_grad():
            policy.model.model.norm.weight *= 2
        return policy

    monkeypatch.setattr(model_agreement, "open_policy", changed)
    found = agreement(subject, str(model))
    assert found.ok is False
    assert "nats at token" in found.reason


def _without_half(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def _with_config(**settings: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **settings}))

    return change


def _with_tokens_beyond(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(folder)
    net.resize_token_embeddings(2)
    net.save_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_without_half, "is not a complete safetensors file"),
        (_with_config(model_type="future"), "has model type `future` but Transformers does not recognize"),
        (_with_config(quantization_config={"quant_method": "fp8"}), "has a quantization_config, and a learner trains"),
        (
            _with_config(model_type="mine", auto_map={"AutoConfig": "configuration_mine.MineConfig"}),
            "give --trust-remote-code if you trust it",
        ),
        (_with_tokens_beyond, "a text has the token 2, '<unk>', but the model has embeddings of 2 tokens"),
    ],
)
def test_models_that_cannot_be_opened_are_reported(
    model: Path, tmp_path: Path, change: Callable[[Path], None], reason: str
) -> None:
    change(folder := shutil.copytree(model, tmp_path / "model"))
    found = agreement(open_subject(str(folder)), str(folder))
    assert found.ok is False
    assert reason in found.reason


def test_the_command_traces_and_compares(model: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(root, ["check", "model", *arguments])

    done = run(str(model), "--trace")
    assert done.exit_code == 0, done.output
    assert "engine and learner give the same numbers in all" in done.output
    told = json.loads(run(str(model), "--trace", "--json").stdout)
    assert told["ok"] is True
    assert {"name", "difference", "dtype", "shape"} == set(told["operations"][0])
    properties = json.loads(run(str(model), "--json").stdout)["properties"]
    assert {"name": "logprobs", "ok": True, "reason": ""} in properties
    without = run(str(tmp_path), "--trace")
    assert without.exit_code == 2
    assert "--trace follows the modules" in run(str(model), "--trace", "--engine", "vllm").output


def test_engine_and_renderer_may_be_in_a_file(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("""
import rlsdk
from rlsdk.engines.transformers import Transformers
from rlsdk.renderers.template import TemplateRenderer

@rlsdk.engine("shifted")
class Shifted(Transformers):
    "An engine with other logprobs than the learner."
    def logprobs(self, tokens):
        return super().logprobs(tokens) - 1

@rlsdk.renderer("same")
class Same(TemplateRenderer):
    "The template's renderer."
""")
    command = ["check", "model", str(model), "--engine", "mine/shifted", "--renderer", "mine/same"]
    ran = CliRunner().invoke(root, [*command, "--plugin", str(file), "--json"])
    found = {each["name"]: each["reason"] for each in json.loads(ran.stdout)["properties"]}
    assert "engine 'mine/shifted' and the learner differ by 1" in found["logprobs"]
