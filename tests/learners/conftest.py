"""Small models, batches of uneven rollouts, and learners on one and two ranks, shared by a session's tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from rlsdk.contracts import Model, TrainBatch

VOCABULARY = 61


def make_model(folder: Path, *, tied: bool, dtype: str = "float32", seed: int = 0) -> Model:
    """A Llama of two layers, 32 wide."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return Model(path=str(folder), dtype=dtype)  # type: ignore[arg-type]


def _make_batch(count: int, seed: int = 0, **rollouts: np.ndarray) -> TrainBatch:
    """Rollouts of uneven lengths, with gaps in the trained tokens, and one without trained tokens."""
    rng = np.random.default_rng(seed)
    starts, responses = rng.integers(1, 8, count), rng.integers(1, 16, count)
    lengths = starts + responses + rng.integers(0, 3, count)  # observations behind the last sampled token
    total, t = int(lengths.sum()), int(responses.sum())
    mask = rng.random(t) < 0.8
    mask[: responses[0]] = False

    def noise(scale: float) -> np.ndarray:
        return (scale * rng.normal(size=t)).astype(np.float32)

    sampled = -np.abs(noise(1.0)) - 3.0
    return TrainBatch(
        token_ids=rng.integers(0, VOCABULARY, total),
        lengths=lengths,
        starts=starts,
        responses=responses,
        loss_mask=mask,
        tokens={
            "old_logprobs": sampled,
            "behaviour_logprobs": sampled + noise(0.1),
            "ref_logprobs": sampled + noise(0.3),
            "advantages": noise(1.0),
            "values": noise(1.0),
            "returns": noise(1.0),
        },
        rollouts=rollouts,
    )


def _make_grouped_batch(count: int, seed: int = 0) -> TrainBatch:
    """The same with prompts that rollouts have in common, of uneven lengths, and a response of one token."""
    batch = _make_batch(count, seed)
    rng = np.random.default_rng(seed + 1000)
    prompts = [rng.integers(0, VOCABULARY, size) for size in (3, 7, 1)]
    own = [prompts[i] for i in rng.integers(0, len(prompts), count)]
    ends = np.cumsum(batch.lengths)
    rests = [batch.token_ids[e - n + s : e] for e, n, s in zip(ends, batch.lengths, batch.starts, strict=True)]
    starts = np.array([len(p) for p in own])
    return attrs.evolve(
        batch,
        token_ids=np.concatenate([part for pair in zip(own, rests, strict=True) for part in pair]),
        lengths=batch.lengths - batch.starts + starts,
        starts=starts,
    )


@pytest.fixture(scope="session")
def make_grouped_batch() -> Callable[..., TrainBatch]:
    """Makes batches in which several rollouts have one prompt: `make_grouped_batch(count, seed=0)`."""
    return _make_grouped_batch


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., TrainBatch]:
    """Makes batches: `make_batch(count, seed=0, **per_rollout_fields)`."""
    return _make_batch


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model whose head is its input embeddings."""
    return make_model(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model with a head of its own."""
    return make_model(tmp_path_factory.mktemp("models") / "untied", tied=False, seed=1)


@pytest.fixture(scope="session")
def bfloat(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A tied model in bfloat16."""
    return make_model(tmp_path_factory.mktemp("models") / "bfloat", tied=True, dtype="bfloat16", seed=2)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Ray, started once."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # or any other program of the machine starves the ranks
    import ray

    started = not ray.is_initialized()
    if started:
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="warning")
    yield
    if started:
        ray.shutdown()


@pytest.fixture(scope="session")
def python() -> Iterator[str]:
    """Command by which Ray starts ranks as in a training: forked from a process that has their imports."""
    from rlsdk.cluster.template import template
    from rlsdk.config import check

    quickstart = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
    with template(check(quickstart)) as commands:
        yield commands.get("learner", "")


@pytest.fixture(scope="session")
def launch(cluster: None, python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Return a learner on this many ranks, restarted with these options; all tests share the processes."""
    from rlsdk.contracts import ActorSpec, Roles
    from rlsdk.learners.group import LearnerGroup
    from rlsdk.plugins import Plugins

    groups: dict[int, LearnerGroup] = {}
    folder = tmp_path_factory.mktemp("learners")
    plugins = Plugins()

    def start(
        world: int, roles: Roles, loss: Any, *, total: int = 10, fresh: bool = False, **options: Any
    ) -> LearnerGroup:
        reference = plugins.reference("learner", "deepspeed", options)
        if world in groups and not groups[world].ended and not fresh:
            groups[world].start(reference, roles, loss, total)
            return groups[world]
        place = ActorSpec(role="learner", world_size=world, cpus=2, seed=3)
        logs = folder / f"{world}-{time.time_ns()}"
        command = "" if options.get("compile") else python  # whether torch compiles is set before it is imported
        group = LearnerGroup.launch(
            reference, roles, loss, place, total_updates=total, cpus=0.5, log_dir=logs, python=command
        )
        if not fresh:
            groups[world] = group
        return group

    yield start
    for group in groups.values():
        group.stop()


@pytest.fixture
def forgiving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks outlive a failure that leaves them whole."""
    monkeypatch.setattr("rlsdk.learners.group.LearnerGroup.stop", lambda self: None)
