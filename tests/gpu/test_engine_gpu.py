"""Engines on one CUDA device: sampling agrees with a plain forward pass, weights land, sleep and wake keep requests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
import tiny

from rlsdk.contracts import ActorSpec, Completion, Model, Request, Sampling
from rlsdk.engines.vllm import Vllm
from rlsdk.plugins import load

pytestmark = pytest.mark.gpu
PLACE = ActorSpec(role="engine", device="cuda")
PROMPTS = [np.array([20 + i, 7, 30, 3, 40 + i][i % 3 :]) for i in range(6)]
LONG = Sampling(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny.make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def engine(request: pytest.FixtureRequest, model: Model) -> Iterator[Any]:
    options: dict[str, Any] = {}
    if request.param == "vllm":
        pytest.importorskip("vllm")
        options = {"gpu_memory_utilization": 0.3, "enforce_eager": True}
    found = load("engine", request.param, **options)
    os.environ.update(found.environment(PLACE))
    found.start(model, PLACE)
    yield found
    found.stop()


def finish(engine: Any) -> list[Completion]:
    done = []
    while engine.unfinished:
        done += engine.step()
    return done


def requests(n: int = 4) -> list[Request]:
    return [Request(id=f"r{i}", prompt_ids=p, sampling=LONG, n=n, seed=i) for i, p in enumerate(PROMPTS)]


def gap(model: Model, completion: Completion, weights: Any = None, start: int = 0) -> float:
    prompt = PROMPTS[int(completion.request[1:])]
    whole = np.concatenate([prompt, completion.token_ids])
    found = tiny.reference_logprobs(model, whole, weights)[len(prompt) - 1 :]
    return float(np.abs(found - completion.logprobs)[start:].max())


def test_logprobs(engine: Any, model: Model) -> None:
    engine.load_weights(tiny.original(model))
    engine.add(requests())
    done = finish(engine)
    assert len(done) == 24
    assert max(gap(model, c) for c in done) < 5e-3  # float32 matrix products may run as TF32


def test_weights_land_in_flight(engine: Any, model: Model) -> None:
    new = tiny.changed(model, 4)
    engine.load_weights(tiny.original(model))
    engine.add(requests())
    for _ in range(5):
        engine.step()
    engine.load_weights(new)
    for completion in finish(engine):
        change = int((completion.versions == 0).sum())
        assert 0 < change < 12
        assert gap(model, completion, new, change) < 5e-3


def free_bytes() -> int:
    import torch

    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def test_sleep_and_wake_keep_requests(engine: Any, model: Model) -> None:
    engine.load_weights(tiny.original(model))
    engine.add(requests())
    engine.step()
    engine.sleep()
    engine.wake_weights()
    engine.load_weights(tiny.original(model))
    without_cache = free_bytes()
    engine.wake()
    if isinstance(engine, Vllm):  # the other one's cache grows with its requests
        assert without_cache > free_bytes() + 2**30
    assert max(gap(model, c) for c in finish(engine)) < 5e-3
    ids = np.concatenate(PROMPTS)
    np.testing.assert_allclose(engine.logprobs(ids), tiny.reference_logprobs(model, ids), atol=5e-3)
