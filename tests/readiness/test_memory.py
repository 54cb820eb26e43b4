"""The memory of a run, estimated before it starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers.models.llama.modeling_llama import LlamaMLP

sys.path.insert(0, str(Path(__file__).parents[1]))
import architectures

from rlsdk import preflight
from rlsdk.cli import root
from rlsdk.config import check
from rlsdk.contracts import ActorSpec, MemoryUse, Model, Roles, UpdateShape
from rlsdk.conversion import without_weights
from rlsdk.engines.vllm import Vllm
from rlsdk.errors import LearnerError
from rlsdk.learners import activations, estimate
from rlsdk.learners.deepspeed import DeepSpeedLearner
from rlsdk.learners.lora import Lora
from rlsdk.readiness.memory import MemoryEstimate, MemoryRow
from rlsdk.trainer.assembly import examined
from tests.engines.tiny import make_classifier

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


def test_a_7b_model_needs_123_gb_for_a_micro_batch_of_the_defaults(seven_b: Model):
    found = sizes(seven_b)
    assert found["learner weights"] == 2 * PARAMETERS
    assert found["learner gradients"] == 6 * PARAMETERS  # in float32, and those of a micro-batch
    assert found["learner optimiser state"] == 12 * PARAMETERS
    one_pass = found["learner weights"] + found["learner activations"] + found["learner output head"]
    assert one_pass == pytest.approx(123e9, rel=0.02)


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_a_group_that_stays_whole_counts_even_if_it_exceeds_the_budget(rows: Any):
    def activations_of(budget: int, together: int) -> int:
        learner = DeepSpeedLearner(micro_batch_tokens=budget, rows=rows)
        shape = UpdateShape(rollouts=16, prompt=8, response=56, together=together)
        return estimate.micro_batch_memory(learner, Model(path=str(NANO), max_length=64), shape, budget).bytes

    assert activations_of(64, 8) == activations_of(512, 1) == activations_of(512, 8)
    assert activations_of(64, 1) < activations_of(64, 8) / 4


def test_checkpointing_keeps_little_more_than_the_inputs_of_layers(seven_b: Model):
    found = sizes(seven_b, gradient_checkpointing=True)
    inputs = 28 * 8 * 2047 * 3584 * 2
    assert inputs < found["learner activations"] + found["learner output head"] < inputs + 8e9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_memory_of_an_adapter_is_reported_too(dtype: Any):
    model = Model(path=str(NANO), dtype=dtype, max_length=64)
    full = sizes(model, device="cpu")
    adapter = sizes(model, device="cpu", lora=Lora(rank=4, alpha=8.0))
    assert adapter["learner gradients"] < full["learner gradients"] / 4
    assert adapter["learner activations"] > 0


@pytest.mark.parametrize("router_loss_coef", [None, 0.1], ids=["", "balanced"])
@pytest.mark.parametrize("name", architectures.MOE)
def test_the_memory_of_mixtures_of_experts_is_estimated_in_float32(
    name: str, router_loss_coef: float | None, tmp_path: Path
):
    architectures.make(tmp_path, name)
    attention: Any = "eager" if name == "gpt-oss" else "sdpa"
    model = Model(path=str(tmp_path), max_length=64)
    found = sizes(model, device="cpu", attention=attention, router_loss_coef=router_loss_coef)
    assert found["learner activations"] > 0


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 2.0}),
        ("phi3", {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "factor": 2.0}),
    ],
)
def test_rotary_frequencies_that_depend_on_positions_do_not_keep_memory_from_being_estimated(
    name: str, rope: dict[str, Any], tmp_path: Path
):
    architectures.make(tmp_path, name, rope_parameters={"rope_theta": 1e4, **rope}, original_max_position_embeddings=32)
    assert sizes(Model(path=str(tmp_path), max_length=64), device="cpu")["learner activations"] > 0


def test_a_model_without_a_backbone_in_transformers_is_refused_without_an_estimate(tmp_path: Path):
    from transformers import Llama4TextConfig

    from rlsdk.conversion import without_weights

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    Llama4TextConfig(**shape, vocab_size=100, intermediate_size=32, num_local_experts=2).save_pretrained(tmp_path)
    model, refused = Model(path=str(tmp_path)), "no backbone within a Llama4ForCausalLM; train another model"
    with pytest.raises(LearnerError, match=refused):
        sizes(model)
    assert any(refused in fault for fault in DeepSpeedLearner().model_faults(without_weights(model)))


def test_a_reference_model_with_ranks_of_its_own_keeps_no_activations_for_a_backward_pass(seven_b: Model):
    place = ActorSpec(role="learner", device="cuda")
    uses = DeepSpeedLearner().update_memory(Roles(reference=seven_b), place, SHAPE)
    found = {use.role: use.bytes for use in uses}
    assert set(found) == {"reference model", "learner activations", "learner output head", "learner process"}
    # At the peak, one layer's gate, up and their product, beside its input and some tensors of that size.
    tokens, width = 8 * 2047, 2
    products, inputs = 3 * tokens * 18944 * width, tokens * 3584 * width
    assert products + inputs < found["learner activations"] + found["learner output head"] < products + 5 * inputs


def test_the_rows_of_models_apart_are_for_their_own_ranks(seven_b: Model, tmp_path: Path):
    def activations_of(**sections: Any) -> dict[str, int]:
        file = tmp_path / "run.yaml"
        batch = {"batch_size": 1, "group_size": 8, "minibatches": 2, "max_prompt_tokens": 512}
        model = {"path": seven_b.path, "dtype": "bfloat16", "tokenizer": str(NANO), "max_length": 2048}
        algorithm = {"use": "ppo", "kl": "k3", "kl_coef": 0.01}
        start = {"name": "big", "tasks": {"train": "countdown"}, "reward": "countdown", "steps": 2, "model": model}
        file.write_text(json.dumps({**start, **batch, "algorithm": algorithm, "engine": "transformers", **sections}))
        ran = CliRunner().invoke(root, ["explain", str(file), "--gpus", "8", "--gpu-memory", "80", "--json"])
        rows = {row["role"]: row["bytes"] for row in json.loads(ran.stdout)["memory"]}
        return {role: rows.get(f"{role} activations", 0) for role in ("learner", "critic", "reference")}

    one = activations_of(critic={"ranks": 1}, reference={"ranks": 1})
    assert one["critic"] == one["learner"] > 10 * one["reference"]  # of four rollouts, and of eight
    two = activations_of(critic={"ranks": 2}, reference={"ranks": 2})
    assert two["learner"] == one["learner"]
    assert two["critic"] == pytest.approx(one["critic"] / 2, rel=0.1)
    assert two["reference"] == pytest.approx(one["reference"] / 2, rel=0.1)


def test_main_memory_is_that_of_the_node_with_most_processes(tmp_path: Path):
    file = tmp_path / "run.yaml"
    start = {"name": "a", "tasks": {"train": "countdown"}, "reward": "countdown", "steps": 2}
    many = {"model": {"path": str(NANO), "max_length": 512}, "engine": "transformers"}

    def processes(nodes: str, **placement: Any) -> tuple[int, int]:
        file.write_text(json.dumps({**start, **many, "placement": {"device": "cuda", **placement}}))
        ran = CliRunner().invoke(root, ["explain", str(file), "--gpus", nodes, "--json"])
        rows = {row["role"]: row["processes"] for row in json.loads(ran.stdout)["memory"]}
        return rows["engine process"], rows["learner process"]

    assert processes("8x2", engines=4, learners=8) == (4, 8)  # the second node is empty
    assert processes("2x2", engines=2, learners=2, colocate=False) == (2, 2)


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


def test_long_rollouts_need_memory_in_proportion_to_their_length_unless_they_are_packed_with_a_mask():
    model = Model(path=str(NANO))

    def activations_of(tokens: int, **options: Any) -> int:
        learner = DeepSpeedLearner(**options)
        shape = UpdateShape(rollouts=1, prompt=1, response=tokens)
        return estimate.micro_batch_memory(learner, model, shape, tokens).bytes

    assert activations_of(16_384) == pytest.approx(4 * activations_of(4096), rel=0.05)
    for attention in ("flash_attention_2", "sdpa"):
        packed = activations_of(16_384, rows="packed", attention=attention)
        assert packed == pytest.approx(activations_of(16_384), rel=0.05)
    assert activations_of(16_384, rows="packed", compile=True) > activations_of(16_384) + 16_384**2


def test_packed_rollouts_of_a_model_whose_attention_cannot_be_replaced_need_a_mask(tmp_path: Path):
    from transformers import StableLmConfig

    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    StableLmConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, **heads).save_pretrained(
        tmp_path
    )
    model, shape = Model(path=str(tmp_path)), UpdateShape(rollouts=1, prompt=1, response=4096)
    padded, packed = (
        estimate.micro_batch_memory(DeepSpeedLearner(rows=rows), model, shape, 4096).bytes
        for rows in ("padded", "packed")
    )
    assert packed > padded + 4096**2


def test_engines_and_learner_hold_a_shared_gpu_in_turns_but_other_memory_together():
    held = {
        "weights": (10, ""),
        "moments": (30, "learn"),
        "activations": (5, "learn"),
        "engine weights": (8, "generate"),
    }

    def total(where: str = "GPU", *, cache: int = 40, arriving: int = 20) -> int:
        sizes = {**held, "KV cache": (cache, "sample"), "arriving weights": (arriving, "sync")}
        found = MemoryEstimate(
            rows=tuple(
                MemoryRow(role=r, bytes=size, of=60, where=where, turn=turn) for r, (size, turn) in sizes.items()
            )
        )
        assert bool(list(found.shortages())) == (found.total(where) > 60)
        return found.total(where)

    assert total() == 10 + 8 + 40
    assert total(arriving=50) == 10 + 8 + 50  # the peak is at the sync
    assert total(cache=10, arriving=10) == 10 + 30 + 5  # while the learner works
    # On a GPU of its own an engine does not sleep, and keeps its cache during a sync.
    assert total("engine GPU") == total("host") == 10 + 30 + 5 + 8 + 40 + 20
    asleep = {use.role: use for use in on_a_shared_gpu(reference=False)}["sleeping learner"]
    assert asleep.on_host and asleep.bytes == 12 * 343_680
    uses = {use.role: use for use in on_a_shared_gpu(reference=True)}
    assert uses["sleeping learner"].bytes == (12 + 4) * 343_680 and uses["reference model"].turn == "learn"


def test_the_weights_of_a_7b_learner_and_an_engine_by_default_fit_into_80_gb_together(seven_b: Model):
    def on_gpu(uses: Sequence[MemoryUse]) -> int:
        return sum(use.bytes for use in uses if not use.on_host and use.turn != "learn")

    place = ActorSpec(role="engine", device="cuda", colocated=True)
    learner = on_gpu(DeepSpeedLearner().rank_memory(Roles(actor=seven_b), place).uses)
    engine = on_gpu(Vllm().generation_memory(seven_b, without_weights(seven_b), place, 80 * GIB))
    assert learner == 2 * PARAMETERS
    assert learner + engine + 2 * GIB < 80 * GIB  # of which the processes' own contexts take part
    filled = on_gpu(
        Vllm(gpu_memory_utilization=0.85).generation_memory(seven_b, without_weights(seven_b), place, 80 * GIB)
    )
    assert learner + filled > 80 * GIB


@pytest.mark.parametrize(
    ("gpus", "size", "device", "told"),
    [(1, 2**20, "auto", 1), (1, 2**40, "auto", 0), (0, 2**20, "auto", 0), (1, 2**20, "cpu", 0)],
)
def test_a_run_on_gpus_is_told_before_it_starts_that_it_will_not_fit(
    gpus: int, size: int, device: str, told: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(preflight, "gpu_count", lambda: gpus)
    monkeypatch.setattr(preflight, "gpu_capability", list)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=size))
    monkeypatch.setattr("rlsdk.readiness.memory.DRIVER_BYTES", 0)
    config = NANO.parents[1] / "countdown_nano.yaml"
    plan = check(config, [f"placement.device={device}", "placement.engines=1", f"out={tmp_path}"], ())
    _, rehearsed = examined(plan)
    short = [note for note in rehearsed.notes if note.startswith("memory: about ")]
    assert len(short) == told
    assert not told or ("each GPU has 1 MiB" in short[0] and "placement.gpus_per_engine" in short[0])


def on_a_shared_gpu(*, reference: bool) -> Sequence[MemoryUse]:
    place = ActorSpec(role="learner", device="cuda", colocated=True)
    model = Model(path=str(NANO))
    return DeepSpeedLearner().rank_memory(Roles(actor=model, reference=model if reference else None), place).uses


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


def test_a_forward_pass_alone_frees_each_result_with_its_last_use():
    class Chain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1000, 1000))

        def forward(self, rows: Any) -> torch.Tensor:
            for _ in range(5):
                rows = (rows @ self.weight).exp()
            return rows

    def rows() -> Any:
        return torch.zeros(2000, 1000)

    # The rows of the caller, those that a layer reads, its product, and its exponential.
    assert activations.pass_memory(Chain, rows, trains=False).bytes == 8e6 * 4
    assert activations.pass_memory(Chain, rows).bytes > 8e6 * 6  # the exponentials of all five, and a gradient


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
        "turn": "",
    }
    assert rows["object store"]["where"] == "host"
    assert rows["object store"]["bytes"] == 2 * 2 * PARAMETERS
    streamed = CliRunner().invoke(
        root, ["explain", str(file), "--gpus", "1", "--json", "rollout.weight_transfer=cuda_ipc"]
    )
    rows = {row["role"]: row for row in json.loads(streamed.stdout)["memory"]}
    assert "object store" not in rows
    embeddings = 152_064 * 3584 * 2  # more than a bucket of 256 MiB
    assert (rows["arriving weights"]["bytes"], rows["arriving weights"]["where"]) == (2 * embeddings + 2**28, "GPU")
    (said,) = [each["message"] for each in found["warnings"] if each["path"] == "memory"]
    assert "each GPU has 80 GiB; most is for learner activations" in said
    assert "learner.gradient_checkpointing=true, learner.micro_batch_tokens=auto" in said
    assert said.endswith("engine.kv_cache_gib")  # `transformers` cannot divide a model among GPUs
    nothing = CliRunner().invoke(root, ["explain", str(file), "--no-memory", "--json"])
    assert json.loads(nothing.stdout)["memory"] == []


@pytest.mark.parametrize(
    ("settings", "where", "remedies"),
    [
        (
            ["placement.colocate=true"],
            "each GPU",
            {"learner.zero_stage", "placement.gpus_per_engine", "engine.gpu_memory"},
        ),
        (["placement.colocate=false"], "each engine GPU", {"placement.gpus_per_engine", "engine.gpu_memory"}),
        (["placement.colocate=false"], "each learner GPU", {"learner.zero_stage"}),
    ],
)
def test_what_does_not_fit_is_told_what_would_reduce_it_on_that_device(
    seven_b: Model, tmp_path: Path, settings: list[str], where: str, remedies: set[str]
):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"name: big\nmodel: {{path: {seven_b.path}, dtype: bfloat16}}\n"
        "tasks: {train: countdown}\nreward: countdown\nsteps: 2\nengine: vllm\nplacement: {device: cuda}\n"
    )
    ran = CliRunner().invoke(root, ["explain", str(file), "--gpus", "2", "--gpu-memory", "12", "--json", *settings])
    texts = [each["message"] for each in json.loads(ran.stdout)["warnings"] if each["path"] == "memory"]
    (said,) = [text for text in texts if f"and {where} has" in text]
    known = {"learner.zero_stage", "placement.gpus_per_engine", "engine.gpu_memory"}
    assert {each for each in known if each in said} == remedies


@pytest.mark.parametrize("rows", ["padded", "packed", "shared", "tree"])
def test_every_layout_of_rows_has_an_estimate(rows: str):
    found = sizes(Model(path=str(NANO), max_length=32), device="cpu", rows=rows)
    assert found["learner activations"] > 0


def test_a_reward_model_is_named_as_not_estimated(tmp_path: Path):
    make_classifier(tmp_path)
    reward = f"reward={{use: reward_model, path: {tmp_path}}}"
    ran = CliRunner().invoke(root, ["explain", str(NANO.parents[1] / "quickstart.yaml"), reward])
    said = "the reward 'core/reward_model' runs in its own process, which is not estimated"
    assert said in " ".join(ran.stdout.split()), ran.output
    as_json = CliRunner().invoke(root, ["explain", str(NANO.parents[1] / "quickstart.yaml"), reward, "--json"])
    assert json.loads(as_json.stdout)["memory_unknown"] == [said]


def test_a_model_whose_code_needs_the_values_of_tensors_is_explained_without_an_estimate(
    monkeypatch: pytest.MonkeyPatch,
):
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x) if x.sum().item() else x)
    ran = CliRunner().invoke(root, ["explain", str(NANO.parents[1] / "quickstart.yaml"), "--json"])
    assert ran.exit_code == 0, ran.output
    [said] = json.loads(ran.stdout)["memory_unknown"]
    assert said.startswith("memory is not estimated: aten._local_scalar_dense")


@pytest.mark.parametrize("example", ["quickstart", "calculator_nano", "dialogue_nano"])
def test_the_examples_are_explained_with_their_memory(example: str):
    ran = CliRunner().invoke(root, ["explain", str(NANO.parents[1] / f"{example}.yaml")], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    assert "learner activations" in ran.output
