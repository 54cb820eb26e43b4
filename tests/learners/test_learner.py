"""The learner on real DeepSpeed and Ray: what it computes, learns, saves and exports, and how it fails."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from rlsdk.batch import LossInputs
from rlsdk.contracts import LossSpec, Model, Roles, TrainBatch, Weights
from rlsdk.errors import CheckpointError, LearnerError
from rlsdk.marks import lr_schedule, policy_loss
from rlsdk.plugins import Plugins
from tests.learners.full_gradients import check_steps_are_torchs, gradients, keep_gradients

pytestmark = pytest.mark.stack
Launch = Callable[..., Any]
Make = Callable[..., TrainBatch]
LR = {"lr": 1e-2}


@policy_loss("simple")
def simple(x: LossInputs) -> torch.Tensor:
    """The policy gradient."""
    return -x.advantages * x.logprobs


@policy_loss("chosen", whole_batch=True)
def chosen(x: LossInputs) -> torch.Tensor:
    """Of the tokens of the whole batch, a random half, and those more likely than the batch's mean."""
    lot = torch.randperm(len(x.whole.logprobs), generator=x.generator) < len(x.whole.logprobs) / 2
    assert torch.equal(x.whole.advantages[x.offset : x.offset + len(x.advantages)], x.advantages)
    kept = lot[x.offset : x.offset + len(x.logprobs)] | (x.logprobs.detach() > x.whole.logprobs.mean())
    return torch.where(kept, -x.advantages * x.logprobs, 0)


@policy_loss("constant")
def constant(x: LossInputs) -> torch.Tensor:
    """The policy gradient, plus a constant that is undefined where an advantage is infinite."""
    finite = torch.where(x.advantages.isfinite(), x.advantages, 0.0)
    return -finite * x.logprobs + x.advantages.detach() * 0


@policy_loss("breaks")
def breaks(x: LossInputs) -> torch.Tensor:
    """Fails where the batch says so."""
    if bool((x.advantages == 100).any()):
        raise ArithmeticError("no such number")
    return -x.advantages * x.logprobs


@policy_loss("listwise", needs=("groups",), aggregates=("seq-mean-token-mean",))
def listwise(x: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Cross-entropy of the softmax of logprobs and of advantages over a whole group; one that was split would show."""
    gains, wanted = x.rollout_sum(x.logprobs), x.rollout_sum(x.advantages)
    losses = torch.zeros_like(gains)
    for group in x.groups.unique():
        inside = x.groups == group
        target = wanted[inside].softmax(0)
        losses[inside] = -(target * gains[inside].log_softmax(0)).sum()
    return losses[x.segments], {"group_size": torch.bincount(x.groups).float()}


@policy_loss("pairs", needs=("pairs", "preferred"))
def pairwise(x: LossInputs) -> torch.Tensor:
    """Preferred up, the other down; a pair that was split would show."""
    assert torch.bincount(x.pairs).tolist() == [2] * (x.rollouts // 2)
    return torch.where(x.preferred[x.segments], -x.logprobs, x.logprobs)


def spec(loss: Any = simple, **changes: Any) -> LossSpec:
    return attrs.evolve(LossSpec(policy_loss=Plugins().reference("policy_loss", loss)), **changes)


def everything(batch: TrainBatch) -> list[np.ndarray]:
    return [np.arange(len(batch))]


def halves(batch: TrainBatch) -> list[np.ndarray]:
    return np.array_split(np.random.default_rng(0).permutation(len(batch)), 2)


def plain_states(model: Model, batch: TrainBatch, temperature: float) -> dict[str, np.ndarray]:
    """Logprobs, entropy and squares of each response token, from full logits in float64, one rollout at a time."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float64)
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


def same(left: Weights, right: Weights) -> bool:
    return all(np.array_equal(array, right.tensors[name]) for name, array in left.tensors.items())


STYLES = [(1, 1, "padded"), (1, 1, "packed"), (1, 1, "shared"), (1, 1, "tree"), (2, 3, "padded")]


@pytest.mark.parametrize(("world", "stage", "rows"), STYLES)
def test_logprobs_are_those_of_transformers(
    world: int, stage: int, rows: str, tied: Model, untied: Model, launch: Launch, make_batch: Make
) -> None:
    batch = make_batch(11)
    roles = Roles(actor=tied, reference=untied)
    group = launch(world, roles, spec(temperature=0.7), zero_stage=stage, micro_batch_tokens=64, rows=rows)
    for role, model in (("actor", tied), ("reference", untied)):
        expected = plain_states(model, batch, 0.7)
        found = group.logprobs(batch, role, list(expected))
        for name, values in expected.items():
            assert found[name].dtype == np.float32
            np.testing.assert_allclose(found[name], values, atol=2e-5, err_msg=name)
    assert list(group.logprobs(batch, "actor", ["entropy"])) == ["entropy"]


def test_a_token_that_is_all_but_impossible_has_a_logprob_of_minus_1000(
    tied: Model, launch: Launch, make_batch: Make
) -> None:
    """Sums over a rollout, rewards that charge a KL and reported losses stay numbers."""
    group = launch(1, Roles(actor=tied, reference=tied), spec(temperature=1e-30))
    for role in ("actor", "reference"):
        assert group.logprobs(make_batch(4), role)["logprobs"].min() == -1000


def test_the_canary_is_at_temperature_one(tied: Model, launch: Launch) -> None:
    ids = np.arange(12) * 5 % 61
    one = np.ones(1, np.int64)
    batch = TrainBatch(token_ids=ids, lengths=12 * one, starts=one, responses=11 * one, loss_mask=np.ones(11, bool))
    group = launch(1, Roles(actor=tied), spec(temperature=0.5))
    np.testing.assert_allclose(group.canary(ids), plain_states(tied, batch, 1.0)["logprobs"], atol=2e-5)


@pytest.mark.parametrize("loss", [simple, chosen])
def test_a_split_changes_neither_metrics_nor_weights(loss: Any, tied: Model, launch: Launch, make_batch: Make) -> None:
    batch = make_batch(16)
    results = []
    for world, stage, tokens in ((1, 1, 10_000), (1, 0, 60), (2, 2, 60), (2, 3, 25)):
        options = {"zero_stage": stage, "micro_batch_tokens": tokens, "eps": 1e-2, **LR}
        group = launch(world, Roles(actor=tied), spec(loss, entropy_coef=0.01), **options)
        metrics = group.update(batch, halves(batch), 4)
        results.append((metrics, group.fetch_weights(1)))
    first_metrics, first = results[0]
    assert first_metrics["actor/grad_norm"] > 0
    for metrics, weights in results[1:]:
        assert metrics == pytest.approx(first_metrics, rel=1e-4, abs=1e-6)
        for name, array in first.tensors.items():
            np.testing.assert_allclose(weights.tensors[name], array, atol=2e-5, err_msg=name)


def test_bfloat16_sums_micro_batches_in_float32(bfloat: Model, launch: Launch, make_batch: Make) -> None:
    batch = make_batch(16)
    found = []
    for world, stage, tokens in ((1, 1, 10_000), (1, 0, 30), (2, 1, 30), (2, 2, 30), (2, 3, 30)):
        group = launch(world, Roles(actor=bfloat), spec(), zero_stage=stage, micro_batch_tokens=tokens, **LR)
        keep_gradients(group)
        before = group.fetch_weights(0)
        group.update(batch, everything(batch), 0)
        found.append(np.concatenate([g.ravel() for g in gradients(group)[0].values()]))
        after = group.fetch_weights(1)
        assert after.dtypes["model.embed_tokens.weight"] == "bfloat16"
        assert not same(before, after)
    for other in found[1:]:
        assert np.linalg.norm(other - found[0]) / np.linalg.norm(found[0]) < 1e-2


def test_pairs_are_never_split(tied: Model, launch: Launch, make_batch: Make) -> None:
    pairs = np.random.default_rng(5).permutation(np.repeat(np.arange(8), 2))
    preferred = np.zeros(16, bool)
    preferred[np.unique(pairs, return_index=True)[1]] = True
    batch = make_batch(16, pairs=pairs, preferred=preferred)
    group = launch(2, Roles(actor=tied), spec(pairwise), micro_batch_tokens=30, **LR)
    losses = [group.update(batch, everything(batch), step)["actor/loss"] for step in range(3)]
    assert losses[2] < losses[0]


@pytest.mark.parametrize(("world", "rows"), [(1, "padded"), (1, "packed"), (1, "shared"), (1, "tree"), (2, "padded")])
def test_whole_groups_give_the_gradient_of_the_undivided_batch(
    world: int, rows: str, tied: Model, launch: Launch, make_batch: Make
) -> None:
    from transformers import AutoModelForCausalLM

    batch = make_batch(16, groups=np.random.default_rng(5).permutation(np.repeat(np.arange(5), (5, 3, 1, 4, 3))))
    loss = spec(listwise, aggregate="seq-mean-token-mean")
    group = launch(world, Roles(actor=tied), loss, micro_batch_tokens=30, rows=rows, **{**LR, "grad_clip": 0.0})
    keep_gradients(group)
    metrics = group.update(batch, everything(batch), 0)

    net = AutoModelForCausalLM.from_pretrained(tied.path, dtype=torch.float64)
    ends = np.cumsum(batch.lengths)
    columns = []
    for end, length, start, response in zip(ends, batch.lengths, batch.starts, batch.responses, strict=True):
        ids = torch.from_numpy(batch.token_ids[end - length : end])
        log_p = net(ids[None]).logits[0].log_softmax(-1)[start - 1 : start - 1 + response]
        columns.append(log_p.gather(1, ids[start : start + response, None])[:, 0])
    mask, owners = torch.from_numpy(batch.loss_mask), np.repeat(np.arange(16), batch.responses)
    advantages = torch.from_numpy(batch.tokens["advantages"]).double()
    logprobs = torch.cat(columns)
    gains, wanted = (
        torch.stack([values[mask & torch.from_numpy(owners == i)].sum() for i in range(16)])
        for values in (logprobs, advantages)
    )
    trained = batch.trained_tokens > 0
    total = torch.zeros((), dtype=torch.float64)
    for label in range(5):
        inside = batch.rollouts["groups"] == label
        each = -(wanted[inside].softmax(0) * gains[inside].log_softmax(0)).sum()
        total = total + each * int(trained[inside].sum())  # once per trained rollout, as the aggregation counts it
    expected = total / int(trained.sum())
    expected.backward()

    assert metrics["actor/policy_loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert metrics["actor/group_size"] == pytest.approx(16 / 5)
    found = gradients(group)[0]
    for name, parameter in net.named_parameters():
        np.testing.assert_allclose(found[name], parameter.grad.numpy(), rtol=1e-3, atol=2e-5, err_msg=name)


def test_the_critic_learns_returns(tied: Model, launch: Launch, make_batch: Make) -> None:
    batch = make_batch(12)
    roles = Roles(actor=tied, critic=tied)
    group = launch(2, roles, spec(value_clip=10.0), zero_stage=2, lr=0.0, critic_lr=2e-2, micro_batch_tokens=60)
    assert not group.values(batch).any()  # the head starts at zero
    losses = []
    for step in range(12):
        batch = batch.with_tokens(values=group.values(batch))
        losses.append(group.update(batch, everything(batch), step)["critic/loss"])
    mask, returns = batch.loss_mask, batch.tokens["returns"]
    assert losses[0] == pytest.approx(0.5 * float((returns[mask] ** 2).mean()), rel=1e-5)
    assert losses[-1] < 0.5 * losses[0]
    found = 0.5 * float(((group.values(batch) - returns)[mask] ** 2).mean())
    assert found < losses[0]


def freed(self: Any) -> tuple[int, int]:
    """Bytes that a sleeping learner has freed, without the reference's, and the number of parameters it trains."""
    learner = self._learner
    count = sum(getattr(p, "ds_numel", p.numel()) for t in learner._trained.values() for p in t.module.parameters())
    reference = [getattr(p, "ds_tensor", p) for p in learner._reference.parameters()]
    own = [p.numel() * p.element_size() for p in reference if p.untyped_storage().resizable()]  # not a mapped file
    return learner._offloaded.nbytes - sum(own), count


@pytest.mark.parametrize(
    ("world", "stage", "dtype"), [(1, 0, "float"), (1, 1, "bfloat"), (2, 2, "float"), (2, 3, "float")]
)
def test_a_resumed_run_is_the_one_left_alone(
    world: int, stage: int, dtype: str, tied: Model, bfloat: Model, launch: Launch, make_batch: Make, tmp_path: Path
) -> None:
    import ray
    from safetensors.torch import load_file

    batch, model = make_batch(10), tied if dtype == "float" else bfloat
    roles, loss = Roles(actor=model, critic=model if stage != 1 else None, reference=model), spec(value_clip=0.2)
    options = {"zero_stage": stage, "schedule": "cosine", "warmup_steps": 2, "micro_batch_tokens": 80, **LR}

    def run(group: Any, steps: range) -> list[dict[str, float]]:
        return [group.update(batch, halves(batch), step) for step in steps]

    group = launch(world, roles, loss, **options)
    run(group, range(2))
    start = time.perf_counter()
    group.save(tmp_path / "checkpoint")
    assert time.perf_counter() - start < 20  # some 0.1 s on an idle machine
    alone, weights = run(group, range(2, 4)), group.fetch_weights(4)
    group = launch(world, roles, loss, **options)
    group.load(tmp_path / "checkpoint")
    loaded, seen = group.fetch_weights(2), group.canary(np.arange(8))
    reference = group.logprobs(batch, "reference")["logprobs"]
    group.save(tmp_path / "awake")

    group.sleep()
    group.sleep()
    # Two moments and, with ZeRO, the weights in float32; gradients, where they stay allocated.
    each = {0: 8, 1: 16, 2: 12, 3: 16}[stage]
    for found, count in ray.get([actor.__ray_call__.remote(freed) for actor in group.actors]):
        assert found == pytest.approx(each * count / world, rel=0.1)
    assert same(loaded, group.fetch_weights(2)) and np.array_equal(seen, group.canary(np.arange(8)))
    group.save(tmp_path / "asleep")
    awake, asleep = (
        {f.relative_to(tmp_path / name): load_file(f) for f in (tmp_path / name).rglob("*.safetensors")}
        for name in ("awake", "asleep")
    )
    assert awake and awake.keys() == asleep.keys()
    assert all(torch.equal(t, asleep[file][name]) for file in awake for name, t in awake[file].items())
    np.testing.assert_array_equal(group.logprobs(batch, "reference")["logprobs"], reference)
    group.sleep()

    assert run(group, range(2, 4)) == alone
    assert same(weights, group.fetch_weights(4))


@lr_schedule("restarts")
def restarts(step: int, steps: int, *, cycles: int = 2) -> float:
    """From 1 to 0 in each cycle."""
    return 1 - step * cycles / steps % 1


@pytest.mark.parametrize("world", [1, 2])
def test_a_schedule_of_a_plugin_continues_after_a_resume(
    world: int, tied: Model, launch: Launch, make_batch: Make, tmp_path: Path
) -> None:
    batch, options = make_batch(10), {"schedule": {"use": restarts, "cycles": 4}, "warmup_steps": 2, **LR}

    def rates(group: Any, steps: range) -> list[float]:
        return [group.update(batch, everything(batch), step)["actor/lr"] for step in steps]

    group = launch(world, Roles(actor=tied), spec(), **options)
    first = rates(group, range(5))
    group.save(tmp_path / "checkpoint")
    group = launch(world, Roles(actor=tied), spec(), **options)
    group.load(tmp_path / "checkpoint")
    rest = rates(group, range(5, 8))
    assert first + rest == pytest.approx([each * 1e-2 for each in (0.5, 1, 1, 0.5, 1, 0.5, 1, 0.5)])


def save_pickled(self: Any, folder: Path) -> None:
    """Save a learner's state as rlsdk 0.1 did: by DeepSpeed, in pickles."""
    from rlsdk.learners import checkpoint

    learner = self._learner
    for role, trained in learner._trained.items():
        state = {"updates": trained.updates, "skipped": trained.skipped}
        if role == "actor":
            state["memory"] = learner._updates.objective.state()
        trained.engine.save_checkpoint(str(folder), tag=role, client_state=state, save_latest=False)
    learner._ranks.gather(None)
    checkpoint.write_manifest(folder, learner._ranks.rank, learner._ranks.world, learner._facts)
    learner._ranks.gather(None)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "executed")


@pytest.mark.usefixtures("forgiving")
@pytest.mark.parametrize(
    ("world", "stage", "dtype"), [(1, 0, "float"), (1, 1, "bfloat"), (2, 2, "float"), (2, 3, "float")]
)
def test_pickles_of_an_earlier_version_are_read_and_never_executed(
    world: int, stage: int, dtype: str, tied: Model, bfloat: Model, launch: Launch, make_batch: Make, tmp_path: Path
) -> None:
    """Pickles give the same results as safetensors; one that would run code is refused, although its hash matches."""
    import ray

    from rlsdk.learners.checkpoint import write_manifest

    batch, model = make_batch(10), tied if dtype == "float" else bfloat
    roles, options = Roles(actor=model, critic=model if stage == 2 else None), {"zero_stage": stage, **LR}
    old, new, trace = tmp_path / "old", tmp_path / "new", tmp_path / "trace"
    group = launch(world, roles, spec(value_clip=0.2), **options)
    group.update(batch, halves(batch), 0)
    group.save(new)
    ray.get([actor.__ray_call__.remote(save_pickled, old) for actor in group.actors])
    found = []
    for folder in (old, new):
        group = launch(world, roles, spec(value_clip=0.2), **options)
        group.load(folder)
        found.append((group.update(batch, halves(batch), 1), group.fetch_weights(2)))
    assert found[0][0] == found[1][0] and same(found[0][1], found[1][1])
    assert not list(new.rglob("*.pt")) and not list(new.rglob("*.py"))

    facts = json.loads((old / "manifest-0.json").read_text())["facts"]
    for folder in (old, new):
        for file in [f for f in folder.rglob("*") if f.suffix in (".pt", ".safetensors")]:
            content = file.read_bytes()
            torch.save(Bomb(trace), file)
            for rank in range(world):
                write_manifest(folder, rank, world, facts)
            with pytest.raises(CheckpointError, match=re.escape(file.name)):
                group.load(folder)
            file.write_bytes(content)
    assert not trace.exists()


@pytest.mark.usefixtures("forgiving")
def test_a_changed_shard_is_not_opened(tied: Model, launch: Launch, make_batch: Make, tmp_path: Path) -> None:
    batch, folder = make_batch(6), tmp_path / "checkpoint"
    group = launch(1, Roles(actor=tied), spec(), **LR)
    group.update(batch, everything(batch), 0)
    group.save(folder)
    shard = folder / "actor" / "optimizer-0.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    group = launch(1, Roles(actor=tied), spec(), **LR)
    with pytest.raises(
        CheckpointError, match=r"damaged and was not opened.*changed since they were written: actor/.*optim"
    ):
        group.load(folder)


@pytest.mark.usefixtures("forgiving")
def test_a_checkpoint_of_another_set_up_is_refused(tied: Model, launch: Launch, tmp_path: Path) -> None:
    group = launch(1, Roles(actor=tied), spec(), zero_stage=1)
    group.save(tmp_path / "checkpoint")
    group = launch(1, Roles(actor=tied), spec(), zero_stage=2)
    with pytest.raises(CheckpointError, match="zero_stage 1 there, 2 here"):
        group.load(tmp_path / "checkpoint")


@pytest.mark.usefixtures("forgiving")
@pytest.mark.parametrize(
    ("world", "stage", "which"), [(1, 0, "tied"), (1, 1, "bfloat"), (2, 2, "untied"), (2, 3, "untied")]
)
def test_weight_decay_on_matrices_is_torchs_adamw_with_two_groups_also_when_resumed(
    world: int,
    stage: int,
    which: str,
    launch: Launch,
    make_batch: Make,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    model, batch, checkpoint = request.getfixturevalue(which), make_batch(10), tmp_path / "checkpoint"
    options = {"zero_stage": stage, "lr": 0.02, "grad_clip": 0.0, "weight_decay": 5.0, "weight_decay_on": "matrices"}
    start = partial(launch, world, Roles(actor=model), spec(), **options)
    adamw = partial(torch.optim.AdamW, lr=0.02, betas=(0.9, 0.95), eps=1e-8)
    check_steps_are_torchs(start, model, batch, everything(batch), adamw, decay=5.0, steps=2, checkpoint=checkpoint)
    others = {**options, "weight_decay_on": "all"}
    with pytest.raises(CheckpointError, match="weight_decay_on 'matrices' there, 'all' here"):
        launch(world, Roles(actor=model), spec(), **others).load(checkpoint)


@pytest.mark.parametrize(
    ("world", "stage", "which"), [(1, 1, "tied"), (2, 3, "tied"), (2, 3, "untied"), (1, 1, "bfloat")]
)
def test_weights_and_export_are_the_model(
    world: int, stage: int, which: str, launch: Launch, make_batch: Make, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    from transformers import AutoModelForCausalLM

    from rlsdk.conversion import read_header
    from rlsdk.weights import checksums, from_weights

    model, batch = request.getfixturevalue(which), make_batch(8)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text('{"version": "1.0"}')
    roles = Roles(actor=attrs.evolve(model, tokenizer=str(tmp_path / "source")))
    group = launch(world, roles, spec(), zero_stage=stage, **LR)
    group.update(batch, everything(batch), 0)
    weights = group.fetch_weights(7)
    group.export(tmp_path / "export")
    assert weights.version == 7
    assert group.checksums() == checksums(weights)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    expected = opened.state_dict()
    assert opened.dtype == getattr(torch, model.dtype)
    sent = {name: tuple(array.shape) for name, array in weights.tensors.items()}
    assert sent == read_header(str(tmp_path / "export"))
    for name, tensor in from_weights(weights):
        assert torch.equal(tensor, expected[name]), name
    assert ("lm_head.weight" in weights.tensors) == (which == "untied")
    assert (tmp_path / "export" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert list((tmp_path / "export").glob("*.safetensors"))


def test_the_schedule_is_by_optimiser_steps(tied: Model, launch: Launch, make_batch: Make) -> None:
    batch = make_batch(6)
    options = {"schedule": "linear", "warmup_steps": 2, "final_ratio": 0.5, "lr": 1e-3}
    group = launch(1, Roles(actor=tied), spec(), total=6, **options)
    rates = [group.update(batch, everything(batch), step)["actor/lr"] for step in range(7)]
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3, 0.875e-3, 0.75e-3, 0.625e-3, 0.5e-3])


def test_the_schedule_of_a_policy_spans_the_steps_after_the_warm_up_of_its_critic(
    tied: Model, launch: Launch, make_batch: Make
) -> None:
    batch = make_batch(6)
    loss = attrs.evolve(spec(), train_steps=4, critic_warmup=2)
    options = {"schedule": "wsd", "decay_steps": 2, "final_ratio": 0.5, "lr": 1e-3, "critic_lr": 1e-3}
    group = launch(1, Roles(actor=tied, critic=tied), loss, total=4, **options)
    rates = []
    for step in range(2):
        group.forward_backward(batch, role="critic", step=step)
        rates.append(group.optimizer_step("critic")["critic/lr"])
    every = [group.update(batch, everything(batch), step) for step in (2, 3)]
    assert [*rates, *(each["critic/lr"] for each in every)] == pytest.approx([1e-3, 1e-3, 1e-3, 0.75e-3])
    assert [each["actor/lr"] for each in every] == pytest.approx([1e-3, 0.75e-3])


def test_demonstrations_need_no_advantages(tied: Model, launch: Launch, make_batch: Make) -> None:
    batch = attrs.evolve(make_batch(6), tokens={})
    group = launch(1, Roles(actor=tied), spec("sft"), **LR)
    losses = [group.update(batch, everything(batch), step)["actor/loss"] for step in range(4)]
    assert losses[-1] < losses[0]


def poisoned(batch: TrainBatch, name: str = "advantages") -> TrainBatch:
    """One trained token, of one rollout, whose value is infinite."""
    values = batch.tokens[name].copy()
    values[np.flatnonzero(batch.loss_mask)[-1]] = np.inf
    return batch.with_tokens(**{name: values})


SKIPS = [
    (1, "tied", {"zero_stage": 0}),
    (1, "tied", {"zero_stage": 1}),
    (2, "tied", {"zero_stage": 2}),
    (2, "tied", {"zero_stage": 3}),
    (1, "bfloat", {"zero_stage": 1}),
    (1, "tied", {"zero_stage": 3, "offload": "all"}),
]


@pytest.mark.parametrize(("world", "which", "options"), SKIPS)
def test_an_update_whose_gradient_is_not_finite_leaves_no_trace(
    world: int, which: str, options: Any, launch: Launch, make_batch: Make, request: pytest.FixtureRequest
) -> None:
    """Weights, moments and schedule after good, bad, good are those after good, good, whichever rank it was."""
    first, second, roles = make_batch(6), make_batch(6, seed=1), Roles(actor=request.getfixturevalue(which))
    options = {**options, "schedule": "linear", "warmup_steps": 1, **LR}
    calm = launch(world, roles, spec(), **options)
    expected = [calm.update(batch, everything(batch), step) for step, batch in enumerate((first, second))]
    weights = calm.fetch_weights(2)
    group = launch(world, roles, spec(), **options)
    assert group.update(first, everything(first), 0) == expected[0]
    assert group.update(poisoned(first), everything(first), 1) == {"actor/skipped_updates": 1.0}
    assert group.update(second, everything(second), 2) == expected[1]
    assert same(group.fetch_weights(2), weights)


@pytest.mark.parametrize(("world", "stage"), [(1, 1), (2, 2)])
def test_an_update_whose_loss_is_undefined_is_skipped_though_its_gradient_is_finite(
    world: int, stage: int, tied: Model, launch: Launch, make_batch: Make
) -> None:
    batch = make_batch(6)
    group = launch(world, Roles(actor=tied), spec(constant), zero_stage=stage, micro_batch_tokens=24, **LR)
    before = group.fetch_weights(0)
    assert group.update(poisoned(batch), everything(batch), 0) == {"actor/skipped_updates": 1.0}
    assert same(group.fetch_weights(1), before)
    assert group.update(batch, everything(batch), 1)["actor/grad_norm"] > 0


def test_good_updates_of_a_batch_are_applied_and_bad_ones_counted(
    tied: Model, launch: Launch, make_batch: Make
) -> None:
    batch = poisoned(make_batch(8))
    bad = int(np.flatnonzero(batch.loss_mask)[-1])
    owner = int(np.searchsorted(np.cumsum(batch.responses), bad, side="right"))
    others = np.setdiff1d(np.arange(8), [owner])
    group = launch(1, Roles(actor=tied), spec(), **LR)
    metrics = group.update(batch, [others, np.array([owner]), others], 0)
    assert metrics["actor/skipped_updates"] == 1.0
    assert all(np.isfinite(value) for value in metrics.values())


def test_a_critic_skips_alone(tied: Model, launch: Launch, make_batch: Make) -> None:
    batch = poisoned(make_batch(6), "returns")
    group = launch(1, Roles(actor=tied, critic=tied), spec(), **LR)
    metrics = group.update(batch, everything(batch), 0)
    assert (metrics["actor/skipped_updates"], metrics["critic/skipped_updates"]) == (0.0, 1.0)
    assert metrics["actor/grad_norm"] > 0 and "critic/loss" not in metrics


def test_too_many_skipped_updates_in_a_row_end_the_run(
    tied: Model, launch: Launch, make_batch: Make, tmp_path: Path
) -> None:
    import ray

    batch, options = make_batch(6), {"skip_limit": 2, **LR}
    bad = poisoned(batch)
    group = launch(1, Roles(actor=tied), spec(), **options)
    for part in (bad, bad, batch, bad, bad):  # one that is done begins the count anew
        group.update(part, everything(part), 0)
    group.save(tmp_path)
    group = launch(1, Roles(actor=tied), spec(), **options)
    group.load(tmp_path)
    told = (
        r"the actor's gradient was not finite in 3 updates in a row \(optimiser step 2\); learner.skip_limit allows 2"
    )
    with pytest.raises(LearnerError, match=told):
        ray.get(group.actors[0].call.remote("update", [(bad, 10, 5)], 0))


def test_a_loss_without_computed_advantages_ends_the_run(tied: Model, launch: Launch, make_batch: Make) -> None:
    import ray

    batch = attrs.evolve(make_batch(6), tokens={})
    group = launch(1, Roles(actor=tied), spec(simple), skip_limit=0, **LR)
    with pytest.raises(LearnerError, match="not finite in 1 updates in a row"):
        ray.get(group.actors[0].call.remote("update", [(batch, 10, 5)], 0))


@pytest.mark.slow
def test_a_failing_loss_is_named_and_no_rank_hangs(tied: Model, launch: Launch, make_batch: Make) -> None:
    batch = make_batch(8)
    advantages = batch.tokens["advantages"].copy()
    advantages[batch.response_positions(np.array([int(np.argmin(batch.starts + batch.responses))]))] = 100
    group = launch(2, Roles(actor=tied), spec(breaks), fresh=True, **LR)
    with pytest.raises(
        LearnerError,
        match=r"rank 1 failed in update of step 6: policy_loss 'breaks' failed: ArithmeticError: no such number",
    ):
        group.update(batch.with_tokens(advantages=advantages), everything(batch), 5)


@pytest.mark.slow
def test_a_dead_rank_is_named_and_no_call_hangs(tied: Model, launch: Launch, make_batch: Make) -> None:
    import ray

    batch = make_batch(8)
    group = launch(2, Roles(actor=tied), spec(), fresh=True, **LR)
    pids = [ray.get(actor.__ray_call__.remote(lambda self: os.getpid())) for actor in group.actors]
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(LearnerError, match=r"learner rank 1 failed in update of step 3: its process died"):
        group.update(batch, everything(batch), 2)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pids[0]}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pids[0]}").exists()


def test_the_driver_adds_little(tied: Model, launch: Launch, make_batch: Make) -> None:
    """Sharing out 1,024 rollouts is array arithmetic: no loop over rollouts."""
    group = launch(2, Roles(actor=tied), spec())
    batch = make_batch(1024)
    sent: list[Any] = []

    def call(self: Any, method: str, arguments: Any, *rest: Any) -> list[dict[str, float]]:
        sent.append(arguments)
        return [{}]

    best = 1.0
    with pytest.MonkeyPatch.context() as patch:  # undone whatever happens: the group is that of all tests
        patch.setattr(type(group), "_call_each", call)
        for _ in range(5):
            start = time.perf_counter()
            group.update(batch, halves(batch), 0)
            best = min(best, time.perf_counter() - start)
    assert best < 0.02
    assert sum(len(share) for share, _, _ in sent[0][0][0]) + sum(len(share) for share, _, _ in sent[0][1][0]) == 1024


def test_a_profile_shows_the_calls_of_the_ranks_that_it_names(
    tied: Model, launch: Launch, make_batch: Make, tmp_path: Path
) -> None:
    batch, file = make_batch(6), tmp_path / "rank-1.json.gz"
    group = launch(2, Roles(actor=tied), spec(), **LR)
    group.start_profile([1], details=True)
    group.update(batch, everything(batch), 0)
    group.stop_profile({1: file})
    group.update(batch, everything(batch), 1)  # not recorded
    with gzip.open(file, "rt") as text:
        names = [event.get("name") for event in json.load(text)["traceEvents"]]
    assert names.count("learner.update") == 1
    assert {"aten::mm", "autograd::engine::evaluate_function: MulBackward0"} <= set(names)
    assert [each.name for each in tmp_path.iterdir()] == [file.name]
