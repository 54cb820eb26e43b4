"""Trees of tokens compared with one row per rollout: time of forward and backward passes, as a ratio in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlsdk.contracts import Model, TrainBatch
from rlsdk.learners.model import PolicyModel, load_policy
from rlsdk.learners.rows import TokenRows, to_rows
from rlsdk.learners.tree import plan_trees, tree_rows, trees

BENCHMARK = "Trees of tokens"
BUDGET = 16384
"""Tokens of a micro-batch, the default of the learner."""
WIDTH = 256


def branches(prompt: int, response: int, count: int) -> list[tuple[np.ndarray, int]]:
    """Rollouts of one prompt, and where their responses begin."""
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 500, prompt)
    return [(np.concatenate([stem, rng.integers(0, 500, response)]), prompt) for _ in range(count)]


def turns(prompt: int, turn: int, count: int, groups: int) -> list[tuple[np.ndarray, int]]:
    """Conversations whose every turn is a rollout of its own, with all before it as the prompt."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(groups):
        talk = rng.integers(0, 500, prompt)
        for _ in range(count):
            longer = np.concatenate([talk, rng.integers(0, 500, turn)])
            found.append((longer, len(talk)))
            talk = longer
    return found


def batch_of(rollouts: list[tuple[np.ndarray, int]]) -> TrainBatch:
    """Pack rollouts."""
    lengths = np.array([len(ids) for ids, _ in rollouts])
    starts = np.array([start for _, start in rollouts])
    responses = lengths - starts
    return TrainBatch(
        token_ids=np.concatenate([ids for ids, _ in rollouts]).astype(np.int64),
        lengths=lengths,
        starts=starts,
        responses=responses,
        loss_mask=np.ones(int(responses.sum()), bool),
    )


def seconds(policy: PolicyModel, rows: list[TokenRows]) -> float:
    """Time of one forward and backward pass over micro-batches."""
    policy.zero_grad()
    began = time.perf_counter()
    for each in rows:
        policy(each)[0].sum().backward()
    return time.perf_counter() - began


CASES = {
    "16 branches, prompt 1024, response 64": (branches(1024, 64, 16), 3.0),
    "8 turns of 64 tokens, prompt 256, 4 conversations": (turns(256, 64, 8, 4), 2.0),
    "8 rollouts, prompt 256, response 256": (branches(256, 256, 8), 0.75),
}


@pytest.mark.parametrize("case", CASES)
def test_trees_are_faster_than_rows_of_their_own(
    case: str, tmp_path: Path, show: Callable[..., None], check: Callable[..., None]
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    rollouts, least = CASES[case]
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=WIDTH,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    policy, batch = load_policy(Model(path=str(tmp_path)), "sdpa", False), batch_of(rollouts)
    sizes = trees(batch, BUDGET, WIDTH)[1]
    as_trees = [tree_rows(batch.select(part), labels) for part, labels in plan_trees(batch, BUDGET, WIDTH)]
    alone = [to_rows(batch, "padded")]
    times: dict[str, list[float]] = {"rows": [], "trees": []}
    for _ in range(4):
        times["rows"].append(seconds(policy, alone))
        times["trees"].append(seconds(policy, as_trees))
    slow, fast = (statistics.median(found[1:]) for found in times.values())
    ratio = round(slow / fast, 2)
    show(times["trees"][1:], case=case, tokens=int(batch.lengths.sum()), tokens_of_trees=int(sizes.sum()), ratio=ratio)
    check("times as fast as a row for each rollout", slow / fast, at_least=least)
