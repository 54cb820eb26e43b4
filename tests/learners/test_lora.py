"""LoRA on the real DeepSpeed engine, compared with peft in float64; merging, reference, checkpoints, exports."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from rlsdk.batch import LossInputs, Totals
from rlsdk.contracts import Adapter, GivesAdapter, LossSpec, Model, Roles, TrainBatch, Weights
from rlsdk.conversion import without_weights
from rlsdk.errors import CheckpointError, LearnerError, OptionError
from rlsdk.learners.deepspeed import DeepSpeedLearner
from rlsdk.learners.lora import Lora, adapter_fault, merged, peft_names, wrap
from rlsdk.learners.model import load_policy
from rlsdk.learners.rows import plan, read_lengths, split
from rlsdk.marks import policy_loss
from rlsdk.plugins import Plugins
from rlsdk.weights import from_weights
from tests.learners.full_gradients import gradients, keep_gradients

Launch = Callable[..., Any]
Make = Callable[..., TrainBatch]
LORA = {"rank": 4, "alpha": 8}
SETTING = {"lora": LORA, "lr": 1e-2, "eps": 1e-3}
TEMPERATURE = 0.8
ENTROPY = 0.05


@policy_loss("ratio")
def ratio(x: LossInputs) -> torch.Tensor:
    """The importance ratio."""
    return -x.advantages * (x.logprobs - x.old_logprobs).exp()


def spec(**changes: Any) -> LossSpec:
    loss = Plugins().reference("policy_loss", ratio)
    return attrs.evolve(LossSpec(policy_loss=loss, temperature=TEMPERATURE, entropy_coef=ENTROPY), **changes)


def everything(batch: TrainBatch) -> list[np.ndarray]:
    return [np.arange(len(batch))]


def adapter_of(group: Any) -> Weights:
    found: Weights = group._call("adapter_weights", 1)[0]
    return found


def peft_model(model: Model, weights: Weights, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """The model under peft itself, its adapter's tensors loaded by the names that the learner gave them."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model.path, dtype=dtype, attn_implementation="eager")
    config = LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], **{"target_modules": "all-linear", **options})
    net = get_peft_model(base, config)
    report = set_peft_model_state_dict(net, {name: tensor.to(dtype) for name, tensor in from_weights(weights)})
    assert not report.unexpected_keys and not [n for n in report.missing_keys if "lora_" in n]
    return net


def states(net: Any, batch: TrainBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropy of each response token, from full logits, one rollout at a time."""
    logprobs, entropies, offset = [], [], 0
    for length, start, response in zip(batch.lengths, batch.starts, batch.responses, strict=True):
        ids = torch.from_numpy(batch.token_ids[offset : offset + length])
        log_p = (net(ids[None]).logits[0] / temperature).log_softmax(-1)[start - 1 : start - 1 + response]
        logprobs.append(log_p.gather(1, ids[start : start + response, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
        offset += length
    return torch.cat(logprobs), torch.cat(entropies)


def plain_gradients(net: Any, batch: TrainBatch) -> dict[str, np.ndarray]:
    """Of the adapter, of the whole batch at once, by the names of the learner."""
    logprobs, entropy = states(net, batch, TEMPERATURE)
    mask = torch.from_numpy(batch.loss_mask).double()
    old, advantages = (torch.from_numpy(batch.tokens[name]).double() for name in ("old_logprobs", "advantages"))
    loss = ((-advantages * (logprobs - old).exp() - ENTROPY * entropy) * mask).sum() / mask.sum()
    trained = {n.removeprefix("base_model.model."): p for n, p in net.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 7  # A and B of seven linear layers in two blocks
    return dict(zip(trained, (g.numpy() for g in torch.autograd.grad(loss, trained.values())), strict=True))


def distance(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Norm of the difference, in units of the norm."""
    assert found.keys() == expected.keys()
    apart = sum(float(((found[n] - e) ** 2).sum()) for n, e in expected.items())
    return (apart / sum(float((e**2).sum()) for e in expected.values())) ** 0.5


def check_gradients(group: Any, model: Model, batch: TrainBatch, shares: list[TrainBatch]) -> None:
    """Compare the gradients of all ranks, of which each has its share of the batch, with plain ones."""
    group.update(batch, everything(batch), 0)  # B is zero before, and with it the gradient of A
    weights = adapter_of(group)
    rollouts = torch.from_numpy(np.repeat(np.arange(len(batch)), batch.responses))
    totals = Totals.of(torch.from_numpy(batch.loss_mask), rollouts)
    keep_gradients(group)
    group._call_each("update", [([(share, totals.tokens, totals.rollouts)], 1) for share in shares])
    expected = plain_gradients(peft_model(model, weights), batch)
    assert all(np.abs(g).max() > 0 for g in expected.values())
    for found in gradients(group):
        assert distance(found, expected) < 1e-5


CASES = [(stage, world, 3) for stage in (0, 1, 2, 3) for world in (1, 2)] + [(1, 1, 1), (3, 2, 1)]


@pytest.mark.stack
@pytest.mark.parametrize(("stage", "world", "count"), CASES)
def test_gradients_are_those_of_plain_peft(
    stage: int, world: int, count: int, tied: Model, launch: Launch, make_batch: Make
) -> None:
    batch = make_batch(20)
    shares = [batch.select(index) for index in split(read_lengths(batch), world)]
    tokens = next(size for size in range(600, 0, -1) if max(len(plan(read_lengths(s), size)) for s in shares) == count)
    group = launch(world, Roles(actor=tied), spec(), zero_stage=stage, micro_batch_tokens=tokens, **SETTING)
    check_gradients(group, tied, batch, shares)


@pytest.mark.stack
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_gradients_of_ranks_that_share_rollouts(
    stage: int, rows: str, tied: Model, launch: Launch, make_batch: Make
) -> None:
    batch = make_batch(20)
    shares = [batch.select(index) for index in split(read_lengths(batch), 2)]
    options = {"zero_stage": stage, "rows": rows, "sequence_parallel": 2, "micro_batch_tokens": 64, **SETTING}
    group = launch(2, Roles(actor=tied), spec(), **options)
    check_gradients(group, tied, batch, shares)


@pytest.mark.stack
@pytest.mark.parametrize(("world", "stage", "which"), [(1, 1, "tied"), (2, 3, "untied"), (2, 2, "bfloat")])
def test_weights_and_export_are_what_peft_merges(
    world: int, stage: int, which: str, launch: Launch, make_batch: Make, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model, batch = request.getfixturevalue(which), make_batch(8)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text('{"version": "1.0"}')
    roles = Roles(actor=attrs.evolve(model, tokenizer=str(tmp_path / "source")))
    group = launch(world, roles, spec(), zero_stage=stage, **SETTING)
    base = AutoModelForCausalLM.from_pretrained(model.path).state_dict()
    untouched = dict(from_weights(group.fetch_weights(0)))
    left_out = set() if which == "untied" else {"lm_head.weight"}
    assert untouched.keys() == base.keys() - left_out
    assert all(torch.equal(tensor, base[name]) for name, tensor in untouched.items())  # B is zero

    group.update(batch, everything(batch), 0)
    weights, adapter = group.fetch_weights(1), adapter_of(group)
    assert weights.adapter is None
    assert adapter.adapter == Adapter(rank=4, alpha=8)
    assert set(adapter.dtypes.values()) == {model.dtype}
    expected = peft_model(model, adapter).merge_and_unload().state_dict()
    found = dict(from_weights(weights))
    assert found.keys() == untouched.keys()
    for name, tensor in found.items():
        close = {"atol": 1e-6} if model.dtype == "float32" else {"rtol": 2**-8, "atol": 1e-8}
        torch.testing.assert_close(tensor.double(), expected[name], **{"rtol": 1e-6, **close}, msg=name)
        assert torch.equal(tensor, base[name]) == ("proj" not in name), name

    group.export(tmp_path / "export")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert all(torch.equal(opened.state_dict()[name], tensor) for name, tensor in found.items())
    assert (tmp_path / "export" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    again = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32), tmp_path / "export" / "adapter"
    )
    for name, tensor in again.merge_and_unload().state_dict().items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.stack
@pytest.mark.parametrize(
    ("world", "stage", "together"), [(1, 1, 1), (2, 0, 1), pytest.param(2, 3, 1, marks=pytest.mark.slow), (2, 1, 2)]
)
def test_the_reference_is_the_base(
    world: int, stage: int, together: int, tied: Model, untied: Model, launch: Launch, make_batch: Make
) -> None:
    from transformers import AutoModelForCausalLM

    batch = make_batch(9)
    setting = {"zero_stage": stage, "sequence_parallel": together, "micro_batch_tokens": 64, **SETTING}
    base = AutoModelForCausalLM.from_pretrained(tied.path, dtype=torch.float64)
    with torch.no_grad():
        expected = states(base, batch, TEMPERATURE)[0].numpy()
    group = launch(world, Roles(actor=tied, reference=tied), spec(), **setting)
    for step in range(2):  # the switch leaves training as it was
        group.update(batch, everything(batch), step)
        own = group.logprobs(batch)["logprobs"]
        np.testing.assert_allclose(group.logprobs(batch, "reference")["logprobs"], expected, atol=2e-5)
        np.testing.assert_array_equal(group.logprobs(batch)["logprobs"], own)
        with torch.no_grad():
            adapted = states(peft_model(tied, adapter_of(group)), batch, TEMPERATURE)[0].numpy()
        assert np.abs(adapted - expected).max() > 1e-2 * (step + 1)
        np.testing.assert_allclose(own, adapted, atol=2e-5)
    held = group._wait("models", [a.__ray_call__.remote(lambda a: a._learner._reference) for a in group.actors])
    assert held == [None] * world
    group = launch(world, Roles(actor=tied, reference=untied), spec(), **setting)
    other = AutoModelForCausalLM.from_pretrained(untied.path, dtype=torch.float64)
    with torch.no_grad():
        expected = states(other, batch, TEMPERATURE)[0].numpy()
    np.testing.assert_allclose(group.logprobs(batch, "reference")["logprobs"], expected, atol=2e-5)


@pytest.mark.stack
@pytest.mark.parametrize(
    ("world", "stage", "which"),
    [(1, 0, "tied"), (1, 1, "bfloat"), (2, 2, "tied"), pytest.param(2, 3, "tied", marks=pytest.mark.slow)],
)
def test_a_resumed_run_is_the_one_left_alone(
    world: int, stage: int, which: str, launch: Launch, make_batch: Make, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    batch, model = make_batch(10), request.getfixturevalue(which)
    roles = Roles(actor=model, reference=model, critic=model if stage == 2 else None)
    options = {"zero_stage": stage, "schedule": "cosine", "warmup_steps": 2, "micro_batch_tokens": 80, **SETTING}

    def run(group: Any, steps: range) -> list[dict[str, float]]:
        halves = np.array_split(np.random.default_rng(0).permutation(len(batch)), 2)
        return [group.update(batch, halves, step) for step in steps]

    group = launch(world, roles, spec(value_clip=0.2), **options)
    run(group, range(2))
    group.save(tmp_path / "checkpoint")
    alone, weights = run(group, range(2, 4)), group.fetch_weights(4)
    group = launch(world, roles, spec(value_clip=0.2), **options)
    group.load(tmp_path / "checkpoint")
    assert run(group, range(2, 4)) == alone
    again = group.fetch_weights(4)
    assert all(np.array_equal(array, again.tensors[name]) for name, array in weights.tensors.items())


@pytest.mark.stack
def test_checkpoints_hold_no_base(untied: Model, launch: Launch, make_batch: Make, tmp_path: Path) -> None:
    sizes = {}
    for name, setting in (("whole", {}), ("lora", {"lora": {"rank": 1, "targets": ["q_proj"]}})):
        group = launch(1, Roles(actor=untied), spec(), **setting)
        group.update(make_batch(4), everything(make_batch(4)), 0)
        group.save(tmp_path / name)
        sizes[name] = sum(file.stat().st_size for file in (tmp_path / name).rglob("*.safetensors"))
    assert sizes["lora"] < 0.2 * sizes["whole"]


@pytest.mark.stack
def test_a_checkpoint_of_another_adapter_is_refused(
    tied: Model, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsdk.learners.group.LearnerGroup.stop", lambda self: None)
    launch(1, Roles(actor=tied), spec(), lora={"rank": 4}).save(tmp_path / "checkpoint")
    group = launch(1, Roles(actor=tied), spec(), lora={"rank": 8})
    with pytest.raises(CheckpointError, match=r"lora \{'rank': 4.* there, \{'rank': 8"):
        group.load(tmp_path / "checkpoint")


@pytest.mark.stack
@pytest.mark.parametrize(
    "options",
    [
        {"offload": "optimizer", "zero_stage": 2},
        pytest.param({"offload": "all", "zero_stage": 3}, marks=pytest.mark.slow),
        {"gradient_checkpointing": True},
        {"rows": "packed"},
        {"rows": "shared", "zero_stage": 3},
        {"lora": {**LORA, "targets": ["q_proj", "down_proj"]}},
    ],
    ids=str,
)
def test_it_goes_with_the_other_options(
    options: dict[str, Any], tied: Model, launch: Launch, make_grouped_batch: Make
) -> None:
    batch = make_grouped_batch(10)
    group = launch(2, Roles(actor=tied), spec(), **{"micro_batch_tokens": 60, **SETTING, **options})
    group.update(batch, everything(batch), 0)
    weights = adapter_of(group)
    targets = options.get("lora", {}).get("targets", "all-linear")
    with torch.no_grad():
        expected = states(peft_model(tied, weights, target_modules=targets), batch, TEMPERATURE)[0].numpy()
    np.testing.assert_allclose(group.logprobs(batch)["logprobs"], expected, atol=2e-5)


@pytest.mark.stack
@pytest.mark.parametrize(("world", "stage", "which"), [(1, 1, "tied"), (2, 3, "untied"), (2, 2, "bfloat")])
def test_training_continues_from_an_adapter(
    world: int, stage: int, which: str, launch: Launch, make_batch: Make, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model, batch = request.getfixturevalue(which), make_batch(8)
    (tmp_path / "tokenizer.json").write_text("{}")
    roles = Roles(actor=attrs.evolve(model, tokenizer=str(tmp_path)))
    first = launch(world, roles, spec(), **SETTING, zero_stage=stage)
    base = first.logprobs(batch)["logprobs"]
    first.update(batch, everything(batch), 0)
    left, whole = dict(from_weights(adapter_of(first))), dict(from_weights(first.fetch_weights(1)))
    first.export(tmp_path / "export")
    options = {**SETTING, "lora": {**LORA, "path": str(tmp_path / "export" / "adapter")}, "zero_stage": stage}
    roles = attrs.evolve(roles, reference=roles.actor)
    group = launch(world, roles, spec(), **options)
    found = dict(from_weights(adapter_of(group)))
    assert found.keys() == left.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in left.items())
    assert all(torch.equal(tensor, whole[name]) for name, tensor in from_weights(group.fetch_weights(0)))
    np.testing.assert_allclose(group.logprobs(batch, "reference")["logprobs"], base, atol=1e-5)
    group.update(batch, everything(batch), 0)
    moved = dict(from_weights(adapter_of(group)))
    assert all(not torch.equal(moved[name], tensor) for name, tensor in left.items())


@pytest.fixture(scope="module")
def saved(tied: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of queries and values that peft has written, with random weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("adapters") / "sft"
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(tied.path), config).save_pretrained(folder)
    return folder


SFT = {"rank": 4, "alpha": 8.0, "targets": ("q_proj", "v_proj")}


def test_an_adapter_of_peft_is_read(tied: Model, saved: Path) -> None:
    from safetensors.torch import load_file

    model, lora = load_policy(tied, "sdpa", False).model, Lora(**SFT, path=str(saved))
    wrap(model, lora, seed=0)
    file = load_file(saved / "adapter_model.safetensors")
    assert {
        name: each for name, each in peft_names(model.state_dict()).items() if not torch.equal(each, file[name])
    } == {}
    assert len(file) == 2 * 2 * 2
    assert adapter_fault(without_weights(tied), lora) == ""


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        ({"rank": 8}, {}, r"set learner.lora.rank=4 and learner.lora.alpha=8, as the adapter has them; got rank 8"),
        ({}, {"use_rslora": True}, r"set learner.lora.rank=4 and learner.lora.alpha=16"),
        (
            {"targets": "all-linear"},
            {},
            r"lacks 20 tensors, such as .*; its target_modules are \['.*set learner.lora.targ",
        ),
        (
            {"targets": ("q_proj",)},
            {},
            r"has 4 tensors that fit nowhere: base_model.model.model.layers.0.self_attn.v_pr",
        ),
        ({}, {"use_dora": True}, r"only plain adapters of one rank are trained; it has \{'use_dora': True\}"),
        ({}, {"modules_to_save": ["lm_head"]}, r"it has \{'modules_to_save': \['lm_head'\]\}"),
        ({}, {"peft_type": "IA3"}, r"expected peft_type LORA, got 'IA3'"),
        ({"path": "no/such"}, {}, r"lora.path 'no/such' is not the folder of an adapter with adapter_config.json and"),
    ],
    ids=str,
)
def test_an_adapter_that_does_not_fit_is_refused_before_the_start(
    options: Any, config: Any, message: str, tied: Model, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "sft")
    file = tmp_path / "sft" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    lora = Lora(**{**SFT, "path": str(tmp_path / "sft"), **options})
    assert re.search(message, adapter_fault(without_weights(tied), lora))


def test_the_folder_of_an_export_is_answered_with_that_of_its_adapter(tied: Model, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "export" / "adapter")
    fault = adapter_fault(without_weights(tied), Lora(**SFT, path=str(tmp_path / "export")))
    assert fault.endswith(f"did you mean '{tmp_path / 'export' / 'adapter'}'?")


def test_an_adapter_of_another_model_is_refused(tied: Model, saved: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(saved, tmp_path / "sft")
    file = tmp_path / "sft" / "adapter_model.safetensors"
    save_file({name: tensor[:, :-1].contiguous() for name, tensor in load_file(file).items()}, file)
    fault = adapter_fault(without_weights(tied), Lora(**SFT, path=str(tmp_path / "sft")))
    assert "it was trained on another model" in fault and "(4, 31), this model needs (4, 32)" in fault


@pytest.mark.filterwarnings("error")  # of peft, which warns of what is refused
@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("query",), r"cannot be adapted; its linear layers are: down_proj, gate_proj"),
        (("q_proj", "v_prj"), r"cannot be adapted; .*; no layer is called v_prj$"),
        (("q_proj", "lm_head"), r"its linear layers are: down_proj, gate_proj, k_proj, o_proj, .*; the output head is"),
        (("embed_tokens",), r"model.embed_tokens is a Embedding, and only torch.nn.Linear is adapted"),
    ],
)
def test_targets_that_are_not_linear_are_refused(targets: tuple[str, ...], message: str, tied: Model) -> None:
    with pytest.raises(LearnerError, match=message):
        wrap(load_policy(tied, "sdpa", False).model, Lora(targets=targets), seed=0)
    assert re.search(message, adapter_fault(without_weights(tied), Lora(targets=targets)))  # as a check finds it


@pytest.mark.filterwarnings("error")
def test_a_model_without_linear_layers_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9))
    with pytest.raises(LearnerError, match=r"attn.c_attn is a Conv1D, and only torch.nn.Linear is adapted"):
        wrap(model, Lora(), seed=0)


def test_every_rank_draws_the_same_and_nobody_elses_numbers_change(tied: Model) -> None:
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(0)
        model = load_policy(tied, "sdpa", False).model
        wrap(model, Lora(rank=2), seed)
        drawn.append(torch.cat([p.ravel() for n, p in model.named_parameters() if "lora_A" in n]))
        assert {n.split(".")[-3] for n, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
        own = torch.rand(1)
        torch.manual_seed(0)
        assert torch.equal(own, torch.rand(1))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 0}, r"lora\.rank: expected int >= 1, got 0"),
        ({"alpha": -1.0}, r"lora\.alpha: expected float > 0, got -1.0"),
        ({"targets": "all-liner"}, r"lora\.targets: expected 'all-linear' \| list of str, got 'all-liner'"),
        ({"targets": []}, r"lora\.targets.* is empty; give all-linear, or names"),
        ({"ranks": 8}, r"lora\.ranks: unknown key 'ranks', did you mean 'rank'"),
        ({"sync": "full"}, r"lora\.sync: expected 'adapter' \| 'merged', got 'full'"),
        ("yes", r"lora: expected a mapping such as \{rank: …, alpha: …, targets: …\} or null, got 'yes'"),
    ],
    ids=str,
)
def test_options_are_checked(given: Any, message: str) -> None:
    plugins = Plugins()
    with pytest.raises(OptionError, match=message):
        plugins.resolve(plugins.reference("learner", "deepspeed", {"lora": given}))


def test_what_engines_may_be_sent() -> None:
    assert isinstance(DeepSpeedLearner(), GivesAdapter)
    assert DeepSpeedLearner().adapter is None
    assert DeepSpeedLearner(lora=Lora(rank=8)).adapter == Adapter(rank=8, alpha=32.0)
    assert DeepSpeedLearner(lora=Lora(sync="merged")).adapter is None
    assert DeepSpeedLearner(lora=Lora()).requires == ("peft",)
    assert DeepSpeedLearner().requires == ()
    assert DeepSpeedLearner(attention="flash_attention_2", rows="packed").requires == ("flash-attn",)


def test_merging_by_hand_leaves_the_base_alone() -> None:
    weight, bias = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(2)
    tensors = {
        "a.q.base_layer.weight": weight,
        "a.q.base_layer.bias": bias,
        "a.q.lora_A.default.weight": torch.tensor([[1.0, -1.0]]),
        "a.q.lora_B.default.weight": torch.tensor([[2.0], [0.5]]),
        "norm.weight": bias,
    }
    found = merged(tensors, Lora(rank=1, alpha=3.0))
    assert list(found) == ["a.q.weight", "a.q.bias", "norm.weight"]
    assert found["a.q.weight"].tolist() == [[7.0, -4.0], [4.5, 2.5]]
    assert weight.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert found["a.q.bias"] is bias
