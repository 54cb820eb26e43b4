"""Distribution of rollouts: none lost, budgets kept, groups whole, ranks balanced, one order for every split."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from rlsdk.contracts import TrainBatch
from rlsdk.learners.rows import canonical, plan, split

LENGTHS = st.lists(st.integers(1, 40), max_size=40).map(lambda x: np.array(x, np.int64))


@st.composite
def grouped(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    sizes = draw(st.one_of(st.lists(st.just(2), max_size=12), st.lists(st.integers(1, 5), max_size=8)))
    labels = np.repeat(np.arange(len(sizes)) * 7, np.array(sizes, np.int64))
    order = np.array(draw(st.permutations(range(len(labels)))), np.int64)
    lengths = draw(st.lists(st.integers(1, 40), min_size=len(labels), max_size=len(labels)))
    return np.array(lengths, np.int64), labels[order]


@given(LENGTHS, st.integers(1, 5))
def test_split_loses_nothing_and_balances(lengths: np.ndarray, world: int) -> None:
    shares = split(lengths, world)
    assert len(shares) == world
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(lengths)))
    for share in shares:
        assert abs(lengths[share].sum() - lengths.sum() / world) <= (lengths.max() if len(lengths) else 0)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 200), st.booleans())
def test_all_cuts_laid_end_to_end_are_one_order(lengths: np.ndarray, world: int, budget: int, packed: bool) -> None:
    whole = canonical(lengths)
    pieces = [share[part] for share in split(lengths, world) for part in plan(lengths[share], budget, packed=packed)]
    assert np.concatenate([np.zeros(0, np.int64), *pieces]).tolist() == whole.tolist()


@given(LENGTHS, st.integers(1, 200), st.booleans())
def test_a_micro_batch_keeps_the_budget(lengths: np.ndarray, budget: int, packed: bool) -> None:
    for part in plan(lengths, budget, packed=packed):
        cost = lengths[part].sum() if packed else lengths[part].max() * len(part)
        assert len(part) == 1 or cost <= budget


@given(grouped(), st.integers(1, 4), st.integers(1, 200), st.booleans())
def test_groups_stay_whole(case: tuple[np.ndarray, np.ndarray], world: int, budget: int, packed: bool) -> None:
    lengths, groups = case
    seen: list[int] = []
    for share in split(lengths, world, groups):
        for part in plan(lengths[share], budget, packed=packed, groups=groups[share]):
            labels, counts = np.unique(groups[share][part], return_counts=True)
            assert counts.tolist() == [int((groups == label).sum()) for label in labels]
            cost = lengths[share][part].sum() if packed else lengths[share][part].max() * len(part)
            assert len(labels) == 1 or cost <= budget
            seen += share[part].tolist()
    assert seen == canonical(lengths, groups).tolist()


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=8), st.data())
def test_select_is_the_rollouts_one_by_one(shapes: list[tuple[int, int, int]], data: st.DataObject) -> None:
    starts, responses, rest = (np.array(column, np.int64) for column in zip(*shapes, strict=True))
    lengths = starts + responses + rest
    total, t = int(lengths.sum()), int(responses.sum())
    batch = TrainBatch(
        token_ids=np.arange(total),
        lengths=lengths,
        starts=starts,
        responses=responses,
        loss_mask=np.arange(t) % 3 != 0,
        tokens={"advantages": np.arange(t, dtype=np.float32)},
        rollouts={"expert": np.arange(len(shapes)) % 2 == 0},
    )
    index = np.array(data.draw(st.lists(st.integers(0, len(shapes) - 1))), np.int64)
    found = batch.select(index)
    tokens, responded = (
        np.split(batch.token_ids, np.cumsum(lengths)[:-1]),
        np.split(np.arange(t), np.cumsum(responses)[:-1]),
    )
    nothing = [np.zeros(0, np.int64)]
    assert found.token_ids.tolist() == np.concatenate([*nothing, *(tokens[i] for i in index)]).tolist()
    positions = np.concatenate([*nothing, *(responded[i] for i in index)])
    assert batch.response_positions(index).tolist() == positions.tolist()
    assert found.tokens["advantages"].tolist() == positions.tolist()
    assert found.loss_mask.tolist() == batch.loss_mask[positions].tolist()
    assert found.rollouts["expert"].tolist() == (index % 2 == 0).tolist()
    joined = TrainBatch.concatenate([batch.select(index[:1]), batch.select(index[1:])])
    assert joined.token_ids.tolist() == found.token_ids.tolist()
    assert joined.tokens["advantages"].tolist() == found.tokens["advantages"].tolist()
