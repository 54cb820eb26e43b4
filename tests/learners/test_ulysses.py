"""Ranks that share the tokens of each rollout give the same numbers as others, on two real processes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlsdk
from rlsdk.contracts import ActorSpec, Model, Roles, TrainBatch
from rlsdk.errors import LearnerError, OptionError
from rlsdk.learners.rows import plan, read_lengths
from rlsdk.learners.tree import trees
from rlsdk.learners.ulysses import sequence_faults
from rlsdk.plugins import Plugins
from tests.learners.test_gradients import COUNT, distance, learn, make_spec, plain_gradients, shared_out

FIELDS = ("logprobs", "entropy", "probs_squared_sum")


def make_llama(folder: Path, **changes: Any) -> Model:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "initializer_range": 0.2, **changes})).save_pretrained(folder)
    return Model(path=str(folder))


def make_qwen(folder: Path, **changes: Any) -> Model:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    Qwen2ForCausalLM(Qwen2Config(**{**sizes, **heads, "initializer_range": 0.2, **changes})).save_pretrained(folder)
    return Model(path=str(folder))


def budget(shares: list[TrainBatch], count: int, ranks: int = 2) -> int:
    """Tokens of a rank's part of a micro-batch that make `count` of them on the rank that has most."""
    for tokens in range(600, 0, -1):
        if max(len(plan(read_lengths(share), tokens * ranks)) for share in shares) == count:
            return tokens
    raise AssertionError(f"no budget gives {count} micro-batches")


@pytest.mark.stack
class TestOnTwoRanks:
    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    @pytest.mark.parametrize(("count", "how"), [(1, "balanced"), (3, "balanced"), (2, "no rollouts")])
    def test_gradients_are_those_of_the_whole(
        self,
        stage: int,
        count: int,
        how: str,
        untied: Model,
        launch: Callable[..., Any],
        make_batch: Callable[..., TrainBatch],
    ) -> None:
        batch, spec = make_batch(COUNT), make_spec()
        shares = shared_out(batch, 2, how)
        options = {"zero_stage": stage, "lr": 0.0, "micro_batch_tokens": budget(shares, count)}
        group = launch(2, Roles(actor=untied), spec, sequence_parallel=2, **options)
        assert distance(learn(group, shares, batch), plain_gradients(untied, batch, spec)) < 1e-5

    @pytest.mark.parametrize("stage", [1, 3])
    def test_gradients_with_checkpointing(
        self, stage: int, tied: Model, launch: Callable[..., Any], make_batch: Callable[..., TrainBatch]
    ) -> None:
        batch, spec = make_batch(COUNT, seed=3), make_spec()
        shares = shared_out(batch, 2, "balanced")
        options = {"zero_stage": stage, "lr": 0.0, "micro_batch_tokens": budget(shares, 2)}
        group = launch(2, Roles(actor=tied), spec, sequence_parallel=2, gradient_checkpointing=True, **options)
        assert distance(learn(group, shares, batch), plain_gradients(tied, batch, spec)) < 1e-5

    def test_gradients_of_packed_rollouts(
        self, untied: Model, launch: Callable[..., Any], make_batch: Callable[..., TrainBatch]
    ) -> None:
        """Rollouts of a row begin in the middle of the ranks' slices, and see nothing of each other."""
        batch, spec = make_batch(COUNT, seed=11), make_spec()
        shares = shared_out(batch, 2, "balanced")
        options = {"rows": "packed", "lr": 0.0, "micro_batch_tokens": 30}
        group = launch(2, Roles(actor=untied), spec, sequence_parallel=2, gradient_checkpointing=True, **options)
        assert distance(learn(group, shares, batch), plain_gradients(untied, batch, spec)) < 1e-5

    @pytest.mark.parametrize(("stage", "how"), [(1, "balanced"), (3, "no rollouts")])
    def test_gradients_of_trees(
        self,
        stage: int,
        how: str,
        untied: Model,
        launch: Callable[..., Any],
        make_grouped_batch: Callable[..., TrainBatch],
    ) -> None:
        """Several trees of uneven size in a micro-batch, whose branches lie in the slices of both ranks."""
        batch, spec = make_grouped_batch(COUNT, seed=12), make_spec()
        shares = shared_out(batch, 2, how)
        _, sizes = trees(shares[0], 60, 32)
        assert sizes.sum() < read_lengths(shares[0]).sum()
        options = {"rows": "tree", "lr": 0.0, "micro_batch_tokens": 30, "gradient_checkpointing": stage == 3}
        group = launch(2, Roles(actor=untied), spec, sequence_parallel=2, zero_stage=stage, **options)
        assert distance(learn(group, shares, batch), plain_gradients(untied, batch, spec)) < 1e-5

    @pytest.mark.parametrize("key_heads", [1, 4])
    def test_gradients_of_other_heads(
        self, key_heads: int, launch: Callable[..., Any], make_batch: Callable[..., TrainBatch], tmp_path: Path
    ) -> None:
        """One head of keys, which both ranks need, and as many as heads."""
        model = make_llama(tmp_path, num_key_value_heads=key_heads)
        batch, spec = make_batch(COUNT, seed=4), make_spec()
        shares = shared_out(batch, 2, "balanced")
        group = launch(2, Roles(actor=model), spec, sequence_parallel=2, lr=0.0)
        assert distance(learn(group, shares, batch), plain_gradients(model, batch, spec)) < 1e-5

    def test_gradients_of_a_model_with_layer_types(
        self, launch: Callable[..., Any], make_batch: Callable[..., TrainBatch], tmp_path: Path
    ) -> None:
        model = make_qwen(tmp_path)
        batch, spec = make_batch(COUNT, seed=5), make_spec()
        shares = shared_out(batch, 2, "balanced")
        group = launch(2, Roles(actor=model), spec, sequence_parallel=2, lr=0.0, zero_stage=3)
        assert distance(learn(group, shares, batch), plain_gradients(model, batch, spec)) < 1e-5

    @pytest.mark.parametrize("stage", [1, 3])
    def test_passes_without_a_graph_give_what_unsplit_ones_do(
        self,
        stage: int,
        tied: Model,
        untied: Model,
        launch: Callable[..., Any],
        make_batch: Callable[..., TrainBatch],
    ) -> None:
        batch, roles = make_batch(COUNT, seed=6), Roles(actor=tied, critic=tied, reference=untied)
        critic = {"value_init": "small", "zero_stage": stage, "micro_batch_tokens": 40}

        def read(**options: Any) -> dict[str, np.ndarray]:
            group = launch(2, roles, make_spec(), **critic, **options)
            found = {f"actor/{k}": v for k, v in group.logprobs(batch, "actor", FIELDS).items()}
            found["reference"] = group.logprobs(batch, "reference")["logprobs"]
            found |= {"values": group.values(batch), "canary": group.canary(np.arange(11) * 5)}
            return found

        split, whole = read(sequence_parallel=2), read()
        for name, values in whole.items():
            assert np.abs(values).max() > 0
            np.testing.assert_allclose(split[name], values, atol=2e-5, err_msg=name)

    @pytest.mark.parametrize(
        "stage", [pytest.param(0, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
    )
    def test_a_training_ends_where_the_unsplit_one_does(
        self, stage: int, untied: Model, launch: Callable[..., Any], make_batch: Callable[..., TrainBatch]
    ) -> None:
        """Three steps of two optimiser steps each, of actor and critic, with a loss that reads the whole batch."""
        batches = [make_batch(COUNT, seed=seed) for seed in (7, 8, 9)]
        loss = Plugins().reference("policy_loss", "clip_cov")
        spec = make_spec(policy_loss=loss)
        options = {"lr": 3e-3, "micro_batch_tokens": 30, "zero_stage": stage}

        def train(**more: Any) -> tuple[list[dict[str, float]], np.ndarray, Any]:
            group = launch(2, Roles(actor=untied, critic=untied), spec, **options, **more)
            halves = [np.arange(COUNT // 2), np.arange(COUNT // 2, COUNT)]
            metrics = [group.update(batch, halves, step) for step, batch in enumerate(batches)]
            return metrics, group.logprobs(batches[0])["logprobs"], group.checksums()

        (split, after, sums), (whole, expected, others) = train(sequence_parallel=2), train()
        assert sums.keys() == others.keys()
        np.testing.assert_allclose(after, expected, atol=2e-4)
        for mine, theirs in zip(split, whole, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)

    def test_what_is_saved_and_exported_is_as_without(
        self, tied: Model, launch: Callable[..., Any], make_batch: Callable[..., TrainBatch], tmp_path: Path
    ) -> None:
        """A checkpoint continues without a split, and the exported model does not require this run's attention."""
        batch = make_batch(COUNT, seed=10)
        group = launch(2, Roles(actor=tied), make_spec(), sequence_parallel=2, lr=1e-3, zero_stage=2)
        group.update(batch, [np.arange(COUNT)], 0)
        expected = group.logprobs(batch)["logprobs"]
        group.save(tmp_path / "saved")
        group.export(tmp_path / "exported")
        assert "ulysses" not in (tmp_path / "exported" / "config.json").read_text(encoding="utf-8")
        group = launch(2, Roles(actor=tied), make_spec(), lr=1e-3, zero_stage=2)
        group.load(tmp_path / "saved")
        np.testing.assert_allclose(group.logprobs(batch)["logprobs"], expected, atol=2e-5)

    def test_a_model_that_cannot_be_split_is_refused_at_the_start(
        self, launch: Callable[..., Any], tmp_path: Path
    ) -> None:
        model = make_llama(tmp_path, num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
        with pytest.raises(LearnerError, match=r"3 attention heads and 3 key-value heads: .* must divide"):
            launch(2, Roles(actor=model), make_spec(), sequence_parallel=2)


@pytest.mark.stack
@pytest.mark.slow
@pytest.mark.long
def test_two_groups_of_two(untied: Model, launch: Callable[..., Any], make_batch: Callable[..., TrainBatch]) -> None:
    """Sequence parallelism and data parallelism at once: four ranks, one without rollouts."""
    batch, spec = make_batch(COUNT), make_spec()
    shares = [
        batch.select(index) for index in (np.arange(9), np.arange(9, 12), np.array([], np.int64), np.arange(12, 20))
    ]
    options = {"zero_stage": 3, "lr": 0.0, "micro_batch_tokens": budget(shares, 3)}
    group = launch(4, Roles(actor=untied), spec, sequence_parallel=2, fresh=True, **options)
    try:
        assert distance(learn(group, shares, batch), plain_gradients(untied, batch, spec)) < 1e-5
    finally:
        group.stop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": "shared"}, "needs rows: padded, packed or tree, .* got rows: shared"),
        ({"attention": "eager"}, "attention: sdpa .* got rows: padded and attention: eager"),
        ({"attention": "flash_attention_2"}, "attention: sdpa"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        rlsdk.load("learner", "deepspeed", sequence_parallel=2, **options)


def test_ranks_that_cannot_be_grouped_are_refused_before_they_start() -> None:
    learner = rlsdk.load("learner", "deepspeed", sequence_parallel=2)
    with pytest.raises(LearnerError, match="needs that number of learner ranks or a multiple; got 3; change"):
        learner.environment(ActorSpec(role="learner", world_size=3))
    with pytest.raises(OptionError, match="sequence_parallel: expected int >= 1, got 0"):
        rlsdk.load("learner", "deepspeed", sequence_parallel=0)


def test_models_that_cannot_be_split() -> None:
    from transformers import AutoModelForCausalLM, BloomConfig, MistralConfig, Qwen2Config

    small = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}

    def faults(config: Any, size: int = 2, **options: Any) -> str:
        return "; ".join(sequence_faults(AutoModelForCausalLM.from_config(config), size, **options))

    assert not faults(Qwen2Config(**small, **heads))
    assert not faults(Qwen2Config(**small, **heads), 4)  # each of two heads of keys is read by two ranks
    assert not faults(MistralConfig(**small, **heads, sliding_window=None))
    assert not faults(Qwen2Config(**small, **heads), divided=2)
    assert "4 attention heads and 2 key-value heads, already divided by 2" in faults(
        Qwen2Config(**small, **heads), 4, option="context_parallel", divided=2
    )
    for window in (
        Qwen2Config(**small, **heads, use_sliding_window=True, sliding_window=4, max_window_layers=1),
        MistralConfig(**small, **heads, sliding_window=4),
    ):
        assert re.search("layers of type sliding_attention .* set learner.sequence_parallel=1", faults(window))
    assert "must divide the former" in faults(Qwen2Config(**small, num_attention_heads=4, num_key_value_heads=4), 3)
    odd = Qwen2Config(**{**small, "hidden_size": 12}, num_attention_heads=6, num_key_value_heads=3)
    assert "divide the latter or be a multiple of it; got 2" in faults(odd)
    assert "BloomForCausalLM cannot be replaced" in faults(BloomConfig(vocab_size=8, hidden_size=8, n_layer=1))
