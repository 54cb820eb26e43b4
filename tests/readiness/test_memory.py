"""The memory of a run, told before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from rlsdk.cli import root
from rlsdk.contracts import ActorSpec, Model, Roles, UpdateShape
from rlsdk.learners import activations, estimate
from rlsdk.learners.deepspeed import DeepSpeedLearner

NANO = Path(__file__).resolve().parents[2] / "examples" / "models" / "countdown-nano"
GIB = 2**30
SEVEN_B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
PARAMETERS = 7_615_616_512
SHAPE = UpdateShape(rollouts=64, prompt=512, response=1536)


@pytest.fixture(scope="module")
def seven_b(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("7b")
    (folder / "config.json").write_text(json.dumps(SEVEN_B))
    return Model(path=str(folder), dtype="bfloat16", max_length=2048)


def sizes(model: Model, ranks: int = 1, device: Any = "cuda", **options: Any) -> dict[str, int]:
    place = ActorSpec(role="learner", world_size=ranks, device=device)
    uses = DeepSpeedLearner(**options).update_memory(Roles(actor=model), place, SHAPE)
    return {use.role: use.bytes for use in uses}


def test_a_7b_model_needs_130_gb_for_a_micro_batch_of_the_defaults(seven_b: Model):
    found = sizes(seven_b)
    assert found["learner weights"] == 2 * PARAMETERS
    assert found["learner gradients"] == 6 * PARAMETERS  # in float32, and those of a micro-batch
    assert found["learner optimiser state"] == 12 * PARAMETERS
    one_pass = found["learner weights"] + found["learner activations"] + found["learner output head"]
    assert one_pass == pytest.approx(130e9, rel=0.02)


def test_checkpointing_keeps_little_more_than_the_inputs_of_layers(seven_b: Model):
    found = sizes(seven_b, gradient_checkpointing=True)
    inputs = 28 * 8 * 2047 * 3584 * 2
    assert inputs < found["learner activations"] + found["learner output head"] < inputs + 8e9


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimiser"), [(0, 4, 4, 8), (1, 4, 4, 3), (2, 4, 1, 3), (3, None, 1, 3)]
)
def test_what_zero_divides_among_four_ranks(stage: int, weights: int | None, gradients: int, optimiser: int):
    nano, count = Model(path=str(NANO)), 343_680
    place = ActorSpec(role="learner", world_size=4)
    uses = DeepSpeedLearner(zero_stage=stage).rank_memory(Roles(actor=nano), place).uses
    found = {use.role: use.bytes for use in uses}
    if weights is not None:
        assert found["learner weights"] == weights * count
    assert found["learner gradients"] == gradients * count
    assert found["learner optimiser state"] == optimiser * count


def test_many_layers_are_extrapolated_from_few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    config = json.loads((NANO / "config.json").read_text()) | {"num_hidden_layers": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, learner = Model(path=str(tmp_path)), DeepSpeedLearner()
    few = estimate.micro_batch_memory(learner, model, SHAPE, 4096)
    monkeypatch.setattr(activations, "FEW_LAYERS", 100)
    assert estimate.micro_batch_memory(learner, model, SHAPE, 4096) == few


def test_memory_is_counted_as_a_hand_would():
    class Square(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1000, 1000))

        def forward(self, rows: Any) -> torch.Tensor:
            return (rows @ self.weight).exp()

    def rows() -> Any:
        return torch.zeros(2000, 1000)

    # Forwards the input, the product and its exponential. Backwards, beside the input and the exponential, the gradient
    # of the product and then that of the weight; that of the exponential is one number, expanded.
    assert activations.pass_memory(Square, rows).bytes == pytest.approx(4e6 * (2 + 2 + 2 + 1), rel=0.3)


def test_auto_takes_what_half_of_the_free_memory_allows():
    nano, place = Model(path=str(NANO), max_length=128), ActorSpec(role="learner")
    roles, learner = Roles(actor=nano), DeepSpeedLearner(micro_batch_tokens="auto")
    chosen = [estimate.auto_tokens(learner, roles, place, free) for free in (64 * GIB, 2 * GIB, GIB)]
    assert chosen[0] == estimate.AUTO_MOST
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[-1] < chosen[0]
    shape = UpdateShape(rollouts=chosen[1] // 128, prompt=1, response=127)
    held = learner.rank_memory(roles, place).on_device
    needed = held + estimate.micro_batch_memory(learner, nano, shape, chosen[1]).bytes
    assert needed <= estimate.AUTO_SHARE * 2 * GIB


def test_explain_tells_what_does_not_fit_and_what_to_lower(seven_b: Model, tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"name: big\nmodel: {{path: {seven_b.path}, dtype: bfloat16, tokenizer: {NANO}}}\n"
        "tasks: {train: countdown}\nreward: countdown\nsteps: 2\nengine: transformers\n"
    )
    ran = CliRunner().invoke(root, ["explain", str(file), "--gpus", "1", "--gpu-memory", "80", "--json"])
    found = json.loads(ran.stdout)
    rows = {row["role"]: row for row in found["memory"]}
    assert rows["learner weights"] == {
        "role": "learner weights",
        "bytes": 2 * PARAMETERS,
        "of": 80 * GIB,
        "where": "GPU",
        "processes": 1,
    }
    assert rows["object store"]["where"] == "host"
    (said,) = [each["message"] for each in found["warnings"] if each["path"] == "memory"]
    assert "each GPU has 80 GiB; most is for learner activations" in said
    assert "learner.gradient_checkpointing=true, learner.micro_batch_tokens=auto" in said
    nothing = CliRunner().invoke(root, ["explain", str(file), "--no-memory", "--json"])
    assert json.loads(nothing.stdout)["memory"] == []
