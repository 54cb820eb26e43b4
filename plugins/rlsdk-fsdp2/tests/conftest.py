"""Small models, batches of uneven rollouts, and ranks without Ray: processes that run a function of a test together."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import attrs
import cloudpickle
import numpy as np
import pytest

from rlsdk.contracts import ActorSpec, Model, TrainBatch

VOCABULARY = 61


@attrs.frozen
class _Call:
    """Becomes the result of a call where it is unpickled."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __reduce__(self) -> Any:
        return self.function, self.arguments


def _free_port() -> int:
    """Return a port below the ephemeral ones, which another process may get before rank 0 listens."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class RankProcesses:
    """Two processes, each a rank of one learner after another; the first alone is a learner of one rank."""

    def __init__(self) -> None:
        self._pools: list[ProcessPoolExecutor] = []

    def __call__(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run `function(place, *arguments)` on each rank; returns what each gave, by rank."""
        master = f"127.0.0.1:{_free_port()}"
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        context = multiprocessing.get_context("spawn")
        self._pools += [ProcessPoolExecutor(1, mp_context=context) for _ in range(world - len(self._pools))]
        waiting = []
        for rank, pool in enumerate(self._pools[:world]):
            place = ActorSpec(role="learner", rank=rank, world_size=world, master=master, seed=3)
            payload = cloudpickle.dumps(_Call(function, (place, *arguments)))
            waiting.append(pool.submit(cloudpickle.loads, payload))
        done, pending = wait(waiting, timeout=100, return_when=FIRST_EXCEPTION)
        if pending or any(each.exception() for each in done):  # the other rank may wait for one that failed
            self.close()
        for each in done:
            each.result()
        assert not pending, "the ranks wait for each other"
        return [each.result() for each in waiting]

    def close(self) -> None:
        """End the processes."""
        for pool in self._pools:
            for process in list(pool._processes.values()):
                process.kill()
            pool.shutdown(cancel_futures=True)
        self._pools = []


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankProcesses]:
    """Run a function on one or two ranks."""
    found = RankProcesses()
    yield found
    found.close()


def make_model(
    folder: Path, kind: str = "Llama", *, tied: bool = True, dtype: str = "float32", seed: int = 0, **options: int
) -> Model:
    """A model of transformers of two layers, 32 wide."""
    import torch
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        **options,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = getattr(transformers, f"{kind}ForCausalLM")(config)
    net.to(getattr(torch, dtype)).save_pretrained(folder)
    return Model(path=str(folder), dtype=dtype)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model whose head is its input embeddings."""
    return make_model(tmp_path_factory.mktemp("models") / "tied")


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model with a head of its own."""
    return make_model(tmp_path_factory.mktemp("models") / "untied", tied=False, seed=1)


@pytest.fixture(scope="session")
def bfloat(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model in bfloat16."""
    return make_model(tmp_path_factory.mktemp("models") / "bfloat", dtype="bfloat16", seed=2)


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A Mixtral with four experts, two of them active for each token."""
    return make_model(tmp_path_factory.mktemp("models") / "experts", "Mixtral", tied=False, seed=5, num_local_experts=4)


@pytest.fixture(scope="session")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model whose linear layers have biases, which ranks that divide the columns of a layer hold whole."""
    return make_model(tmp_path_factory.mktemp("models") / "biased", seed=6, attention_bias=True, mlp_bias=True)


@pytest.fixture(scope="session")
def normed(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A Qwen3, which normalises queries and keys of each head."""
    return make_model(tmp_path_factory.mktemp("models") / "normed", "Qwen3", tied=False, seed=4, head_dim=8)


@pytest.fixture(scope="session")
def batch() -> TrainBatch:
    """Twenty rollouts of uneven lengths, some with the same prompt, with gaps in what is trained on."""
    rng = np.random.default_rng(0)
    count = 20
    prompts = [rng.integers(0, VOCABULARY, size) for size in (3, 7, 1)]
    own = [prompts[i] for i in rng.integers(0, len(prompts), count)]
    responses = rng.integers(1, 16, count)
    rests = [
        rng.integers(0, VOCABULARY, size + extra)
        for size, extra in zip(responses, rng.integers(0, 3, count), strict=True)
    ]
    t = int(responses.sum())
    mask = rng.random(t) < 0.8
    mask[: responses[0]] = False
    sampled = (-np.abs(rng.normal(size=t)) - 3.0).astype(np.float32)

    def noise(scale: float) -> np.ndarray:
        return (scale * rng.normal(size=t)).astype(np.float32)

    return TrainBatch(
        token_ids=np.concatenate([part for pair in zip(own, rests, strict=True) for part in pair]),
        lengths=np.array([len(p) + len(r) for p, r in zip(own, rests, strict=True)]),
        starts=np.array([len(p) for p in own]),
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
    )
