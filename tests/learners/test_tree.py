"""Trees of tokens: shared beginnings of rollouts are computed once, and results are unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.contracts import Model, TrainBatch
from rlsdk.errors import LearnerError
from rlsdk.learners.model import PolicyModel, load_critic, load_policy
from rlsdk.learners.rows import read_lengths, to_rows
from rlsdk.learners.tree import TokenTree, plan_trees, tree_rows, trees
from rlsdk.messages import Image

Make = Callable[..., TrainBatch]
texts = st.lists(st.integers(0, 2), min_size=0, max_size=7).map(lambda ids: np.array(ids, np.int64))


def make(sequences: list[list[int]], starts: list[int], **rollouts: Any) -> TrainBatch:
    """Rollouts whose responses end with their last tokens."""
    lengths = np.array([len(each) for each in sequences])
    responses = lengths - np.array(starts)
    return TrainBatch(
        token_ids=np.concatenate([np.array(each, np.int64) for each in sequences]),
        lengths=lengths,
        starts=np.array(starts),
        responses=responses,
        loss_mask=np.ones(int(responses.sum()), bool),
        rollouts=rollouts,
    )


@st.composite
def batches(draw: st.DrawFn) -> TrainBatch:
    """Rollouts that branch off from each other: each continues from some position of an earlier one."""
    sequences = [[*draw(st.lists(st.integers(0, 60), min_size=1, max_size=5)), 7]]
    for _ in range(draw(st.integers(0, 6))):
        stem = sequences[draw(st.integers(0, len(sequences) - 1))]
        kept = draw(st.integers(0, len(stem)))
        sequences.append([*stem[:kept], *draw(st.lists(st.integers(0, 60), min_size=2, max_size=8))])
    return make(sequences, [draw(st.integers(1, len(each) - 1)) for each in sequences])


class TestTokenTree:
    def test_by_hand(self) -> None:
        #  1 ── 2 ─┬─ 3         9
        #          └─ 4 ── 5
        tree = TokenTree.of([np.array(ids, np.int64) for ids in ([1, 2, 4, 5], [9], [1, 2, 3], [1, 2])])
        assert [path.tolist() for path in tree.paths] == [[0, 1, 3, 4], [5], [0, 1, 2], [0, 1]]
        assert tree.depths.tolist() == [0, 1, 2, 2, 3, 0]
        assert tree.ends.tolist() == [5, 5, 3, 5, 5, 6]

    @given(st.lists(texts, min_size=1, max_size=12))
    def test_one_node_for_each_distinct_beginning(self, sequences: list[np.ndarray]) -> None:
        tree = TokenTree.of(sequences)
        assert len(tree) == len({tuple(each[:k]) for each in sequences for k in range(1, len(each) + 1)})
        nodes: dict[int, tuple[int, ...]] = {}
        for sequence, path in zip(sequences, tree.paths, strict=True):
            assert len(path) == len(sequence)
            for depth, node in enumerate(path.tolist()):
                assert nodes.setdefault(node, tuple(sequence[: depth + 1])) == tuple(sequence[: depth + 1])
                assert tree.depths[node] == depth
                ancestors = [j for j in range(len(tree)) if j <= node < tree.ends[j]]
                assert ancestors == path[: depth + 1].tolist()


class TestTrees:
    @settings(deadline=None)
    @given(batches(), st.integers(1, 60))
    def test_micro_batches_hold_each_rollout_once_within_the_budget(self, batch: TrainBatch, budget: int) -> None:
        labels, sizes = trees(batch, budget, 32)
        reads = read_lengths(batch)
        for tree, size in enumerate(sizes):
            members = np.flatnonzero(labels == tree)
            assert size <= budget or len(members) == 1
            sequences = [batch.token_ids[batch.lengths[:i].sum() :][: reads[i]] for i in members]
            assert size == len(TokenTree.of(sequences))
        planned = plan_trees(batch, budget, 32)
        parts = [part for part, _ in planned]
        assert all(np.array_equal(of, labels[part]) for part, of in planned)
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(batch)))
        for part in parts:
            inside = np.unique(labels[part])
            assert len(inside) == 1 or sizes[inside].max() * len(inside) <= budget
            assert all(np.isin(np.flatnonzero(labels == tree), part).all() for tree in inside)

    def test_a_long_prompt_is_shared_and_a_short_one_only_while_rows_are_short(self) -> None:
        rng = np.random.default_rng(0)

        def grown(prompt: int, response: int, count: int) -> TrainBatch:
            stem = rng.integers(0, 99, prompt).tolist()
            return make([[*stem, *rng.integers(0, 99, response).tolist()] for _ in range(count)], [prompt] * count)

        assert len(trees(grown(2000, 500, 16), 100_000, 1024)[1]) == 1
        # Four tokens in common save less than the attention between long responses costs.
        assert len(trees(grown(4, 1000, 4), 100_000, 1024)[1]) == 4
        assert 1 < len(trees(grown(8, 12, 512), 100_000, 1024)[1]) < 20

    def test_a_rank_without_pairs_has_no_trees(self) -> None:
        batch = make([[1, 2, 3], [1, 2, 4]], [1, 1], pairs=np.array([0, 0]))
        assert plan_trees(batch.select(np.empty(0, np.int64)), 100, 8) == []

    def test_a_pair_is_never_divided(self) -> None:
        batch = make([[1, 2, 3], [4, 5, 6], [1, 2, 7], [4, 8, 9]], [1, 1, 1, 1], pairs=np.array([5, 3, 3, 5]))
        labels, sizes = trees(batch, 1, 32)
        assert labels.tolist() == [1, 0, 0, 1]
        assert sizes.tolist() == [4, 4]
        assert sorted(sorted(part.tolist()) for part, _ in plan_trees(batch, 1, 32)) == [[0, 3], [1, 2]]


class TestTreeRows:
    def test_by_hand(self) -> None:
        batch = make([[1, 2, 3, 4], [9, 8], [1, 2, 5]], [2, 1, 1])
        rows = tree_rows(batch, np.array([0, 1, 0]))
        assert rows.position_ids is not None and rows.ends is not None
        assert rows.input_ids.tolist() == [[1, 2, 3], [9, 0, 0]]  # no last token of a response is read
        assert rows.position_ids.tolist() == [[0, 1, 2], [0, 0, 0]]
        assert rows.ends.tolist() == [[3, 3, 3], [1, 2, 3]]
        assert rows.targets.tolist() == [3, 4, 8, 2, 5]
        assert rows.states.tolist() == [1, 2, 3, 0, 1]

    def test_images_are_refused(self) -> None:
        batch = make([[1, 2]], [1])
        seen = attrs.evolve(batch, images=((Image(np.zeros((2, 2, 3), np.uint8)),),))
        with pytest.raises(LearnerError, match=r"set learner\.rows=padded"):
            tree_rows(seen, np.zeros(1, np.int64))

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_loss_and_gradient_are_those_of_independent_rows_in_float64(self, attention: Any, tmp_path: Path) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        # Norms and attention of a Llama pass through float32, whatever the model's dtype is.
        config = GPT2Config(vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2)
        GPT2LMHeadModel(config).save_pretrained(tmp_path)
        policy = load_policy(Model(path=str(tmp_path)), attention, False).double()

        @settings(max_examples=25, deadline=None)
        @given(batches(), st.integers(4, 80))
        def agree(batch: TrainBatch, budget: int) -> None:
            weights = torch.from_numpy(np.random.default_rng(0).normal(size=int(batch.responses.sum())))
            whole, gradient = _loss(policy, to_rows(batch, "padded"), weights)
            found, found_gradient = _loss(policy, tree_rows(batch, trees(batch, budget, 32)[0]), weights)
            assert found == pytest.approx(whole, rel=1e-10, abs=1e-10)
            for ours, plain in zip(found_gradient, gradient, strict=True):
                torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)

        agree()

    def test_values_of_a_critic_agree_and_checkpoints_of_activations_change_nothing(
        self, untied: Model, make_grouped_batch: Make
    ) -> None:
        batch = make_grouped_batch(9, seed=2)
        critic = load_critic(untied, "sdpa", True, "small")
        values = critic(tree_rows(batch, trees(batch, 200, 32)[0]))
        torch.testing.assert_close(values, critic(to_rows(batch, "padded")), atol=2e-6, rtol=1e-5)


def _loss(policy: PolicyModel, rows: Any, weights: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    states = policy.model.base_model
    head = policy.model.get_output_embeddings()
    from rlsdk.learners.model import _at_responses, _outputs

    found = _at_responses([output.last_hidden_state for output in _outputs(states, rows)], rows)
    logprobs = (found @ head.weight.T).log_softmax(-1).gather(1, rows.targets[:, None])[:, 0]
    loss = (weights * logprobs).sum()
    return float(loss.detach()), list(torch.autograd.grad(loss, list(policy.parameters())))
