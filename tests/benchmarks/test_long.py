"""Rollouts of up to 32,768 tokens: memory and time of an update.

The learner is the real one, each length in a process of its own: its greatest memory so far can be read, and never
falls. What it uses before, for Python, torch and the model, is read after an update of short rollouts.

A model this small has tensors of less than 32 MiB, which glibc keeps when they are freed, as gaps between others: its
process grows to twice what its tensors need. The ranks give back blocks from 1 MiB on, as those of larger models do.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np
import pytest

from rlsdk import nano
from rlsdk.contracts import ActorSpec, LossSpec, Model, Roles, TrainBatch
from rlsdk.learners.group import LearnerGroup
from rlsdk.plugins import Plugins

BENCHMARK = "Long rollouts"
pytestmark = pytest.mark.usefixtures("cluster")
LENGTHS = (4096, 8192, 16_384, 32_768)
SHORT = 512
PYTHON = shlex.join(["env", f"MALLOC_MMAP_THRESHOLD_={2**20}", sys.executable])


@attrs.frozen
class Cost:
    """Cost of an update.

    Attributes:
        memory: Bytes of a rank, beyond those of an update of short rollouts.
        seconds: Of the update.
    """

    memory: float
    seconds: float


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The nano model, with positions for the longest rollout."""
    folder = tmp_path_factory.mktemp("nano")
    nano.create(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": max(LENGTHS)}))
    return Model(path=str(folder), max_length=max(LENGTHS))


def batch_of(count: int, tokens: int) -> TrainBatch:
    """Rollouts of one length, whose prompts have eight tokens."""
    rng = np.random.default_rng(0)
    responses = count * (tokens - 8)
    logprobs = -np.abs(rng.normal(size=responses)).astype(np.float32)
    return TrainBatch(
        token_ids=rng.integers(0, 100, count * tokens),
        lengths=np.full(count, tokens),
        starts=np.full(count, 8),
        responses=np.full(count, tokens - 8),
        loss_mask=np.ones(responses, bool),
        tokens={
            "old_logprobs": logprobs,
            "behaviour_logprobs": logprobs,
            "advantages": rng.normal(size=responses).astype(np.float32),
        },
    )


def cost(model: Model, tokens: int, folder: Path, *, rollouts: int = 1, ranks: int = 1) -> Cost:
    """Update the model on rollouts of so many tokens; several ranks share the tokens of each."""
    plugins = Plugins()
    options = {"sequence_parallel": ranks, "micro_batch_tokens": tokens // ranks}
    reference = plugins.reference("learner", "deepspeed", options)
    loss = LossSpec(policy_loss=plugins.reference("policy_loss", "ppo"))
    place = ActorSpec(role="learner", world_size=ranks, cpus=2, threads=1, seed=0)
    roles, all_of_them = Roles(actor=model), [np.arange(rollouts)]
    group = LearnerGroup.launch(reference, roles, loss, place, total_updates=4, cpus=0.5, python=PYTHON, log_dir=folder)
    try:
        group.update(batch_of(rollouts, SHORT), all_of_them, 0)
        before, began = group.clock()["host_bytes"], time.perf_counter()
        group.update(batch_of(rollouts, tokens), all_of_them, 1)
        return Cost(group.clock()["host_bytes"] - before, time.perf_counter() - began)
    finally:
        group.stop()


def test_memory_grows_no_faster_than_the_length(
    long_model: Model, tmp_path: Path, show: Callable[..., None], check: Callable[..., None]
) -> None:
    costs = {tokens: cost(long_model, tokens, tmp_path / str(tokens)) for tokens in LENGTHS}
    show(
        [found.seconds for found in costs.values()],
        took={tokens: round(found.seconds, 2) for tokens, found in costs.items()},
        megabytes={tokens: round(found.memory / 2**20) for tokens, found in costs.items()},
    )
    first, last = costs[LENGTHS[1]], costs[LENGTHS[-1]]
    growth = LENGTHS[-1] / LENGTHS[1]
    check(
        "growth of the memory over that of the tokens",
        last.memory / first.memory / growth,
        case="one rank",
        at_most=1.1,
    )


def test_two_ranks_that_share_rollouts_need_half_the_memory_each(
    long_model: Model, tmp_path: Path, show: Callable[..., None], check: Callable[..., None]
) -> None:
    tokens = LENGTHS[2]
    one, two = (cost(long_model, tokens, tmp_path / str(n), rollouts=2, ranks=n) for n in (1, 2))
    show(
        [two.seconds],
        megabytes={"one rank": round(one.memory / 2**20), "each of two": round(two.memory / 2**20)},
        took={"one rank": round(one.seconds, 2), "two": round(two.seconds, 2)},
    )
    case = f"2 × {tokens:,} tokens"
    check("memory of each of two ranks over that of one", two.memory / one.memory, case=case, at_most=0.55)
