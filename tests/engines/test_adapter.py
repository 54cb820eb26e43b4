"""vLLM with an adapter replaced in place has the logprobs of merged weights, also for in-flight requests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import pytest
import tiny
import torch

from rlsdk.contracts import Adapter, Completion, Model, Request, Sampling, TakesAdapter, Weights
from rlsdk.engines import vllm_options
from rlsdk.engines.transformers import Transformers
from rlsdk.engines.vllm import Vllm
from rlsdk.errors import EngineError
from rlsdk.weights import from_weights, to_weights

ADAPTER = Adapter(rank=6, alpha=9.0)
Run = Callable[..., Any]
PROMPTS = [np.array([20 + i, 7, 30, 3, 40 + i, 12][i % 3 :]) for i in range(6)]


@pytest.fixture(autouse=True, scope="module")
def _bodies_travel_by_value() -> None:
    """Functions of this module run in the engine's process, which cannot import it."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    cloudpickle.register_pickle_by_value(tiny)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["whole", "divided"])
def run(launched: Any, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Run]:
    """Calls a function with an engine that expects the adapter, in the engine's process."""
    options = {"max_num_seqs": 8, "tensor_parallel_size": request.param}
    with launched(tmp_path_factory.mktemp("vllm-adapter"), options, ADAPTER) as told:
        yield told.run


def random_adapter(model: Model, version: int, only: str = "proj") -> Weights:
    """Every linear layer whose name holds `only` gets one that changes logprobs by tenths of a nat."""
    generator = torch.Generator().manual_seed(version)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {}
    for name, weight in from_weights(tiny.original(model)):
        if only in name and weight.ndim == 2:
            stem = f"base_model.model.{name.removesuffix('weight')}"
            tensors[f"{stem}lora_A.weight"] = draw(ADAPTER.rank, weight.shape[1]) * weight.shape[1] ** -0.5
            tensors[f"{stem}lora_B.weight"] = 0.1 * draw(weight.shape[0], ADAPTER.rank)
    return attrs.evolve(to_weights(version, tensors), adapter=ADAPTER)


def merged_by_hand(model: Model, adapter: Weights) -> Weights:
    parts = dict(from_weights(adapter))
    whole = {}
    for name, weight in from_weights(tiny.original(model)):
        stem = f"base_model.model.{name.removesuffix('weight')}"
        if f"{stem}lora_A.weight" in parts:
            weight = (
                weight + ADAPTER.alpha / ADAPTER.rank * parts[f"{stem}lora_B.weight"] @ parts[f"{stem}lora_A.weight"]
            )
        whole[name] = weight
    return to_weights(adapter.version, whole)


def requests(count: int, tokens: int) -> list[Request]:
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    return [Request(id=f"r{i}", prompt_ids=PROMPTS[i % 6], sampling=sampling, seed=i) for i in range(count)]


def generate(engine: Any, asked: list[Request]) -> list[Completion]:
    engine.add(asked)
    done = []
    while engine.unfinished:
        done += engine.step()
    return done


def load(engine: Any, weights: Weights) -> None:
    engine.load_weights(weights)


def logprobs(engine: Any, ids: np.ndarray) -> np.ndarray:
    return engine.logprobs(ids)


def of_prompt(completion: Completion) -> np.ndarray:
    return PROMPTS[int(completion.request[1:]) % 6]


@pytest.mark.stack
def test_before_the_first_adapter_it_is_the_base(run: Run, model: Model) -> None:
    """First in this module, because nothing takes an adapter off again."""
    ids = np.arange(20, 60)
    np.testing.assert_allclose(run(logprobs, ids), tiny.reference_logprobs(model, ids), atol=1e-4)
    for completion in run(generate, requests(3, 5)):
        whole = np.concatenate([of_prompt(completion), completion.token_ids])
        expected = tiny.reference_logprobs(model, whole)[len(of_prompt(completion)) - 1 :]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert set(completion.versions) == {0}


@pytest.mark.stack
def test_logprobs_are_those_of_merged_weights(run: Run, model: Model) -> None:
    ids = np.arange(20, 100)
    base = tiny.reference_logprobs(model, ids)
    for version, only in ((1, "proj"), (2, "proj"), (3, "self_attn.v_proj"), (4, "layers.1.mlp.up_proj")):
        adapter = random_adapter(model, version, only)
        run(load, adapter)
        expected = tiny.reference_logprobs(model, ids, merged_by_hand(model, adapter))
        assert np.abs(expected - base).max() > 0.01
        np.testing.assert_allclose(run(logprobs, ids), expected, atol=1e-4)


@pytest.mark.stack
def test_requests_in_flight_go_on_under_the_new_adapter(run: Run, model: Model) -> None:
    """Each token's logprob comes from the adapter of its version, given all previous tokens."""
    adapters = {version: random_adapter(model, version) for version in (5, 6, 7)}
    whole = {version: merged_by_hand(model, adapter) for version, adapter in adapters.items()}
    run(load, adapters[5])
    done = run(_interrupted, requests(12, 24), [adapters[6], adapters[7]])  # some of them wait: 8 run at once
    assert len(done) == 12
    assert {version for c in done for version in c.versions} == {5, 6, 7}
    assert any(len(set(c.versions)) == 3 for c in done)
    for completion in done:
        prompt = of_prompt(completion)
        tokens = np.concatenate([prompt, completion.token_ids])
        by_version = {v: tiny.reference_logprobs(model, tokens, w)[len(prompt) - 1 :] for v, w in whole.items()}
        expected = [by_version[version][i] for i, version in enumerate(completion.versions)]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    run(load, adapters[5])
    again = run(_interrupted, requests(12, 24), [adapters[6], adapters[7]])
    assert [c.token_ids.tolist() for c in again] == [c.token_ids.tolist() for c in done]  # no cache of before is read


def _interrupted(engine: Any, asked: list[Request], adapters: list[Weights]) -> list[Completion]:
    engine.add(asked)
    done = []
    for adapter in adapters:
        for _ in range(7):
            done += engine.step()
        engine.load_weights(adapter)
    while engine.unfinished:
        done += engine.step()
    return done


@pytest.mark.stack
def test_what_does_not_fit_is_refused(run: Run, model: Model) -> None:
    with pytest.raises(
        EngineError, match=r"version 8 are those of a whole model; this engine was started for Adapter\(rank=6"
    ):
        run(load, tiny.original(model, 8))
    with pytest.raises(EngineError, match=r"of Adapter\(rank=4.* this engine was started for Adapter\(rank=6"):
        run(load, attrs.evolve(random_adapter(model, 8), adapter=Adapter(rank=4, alpha=9.0)))
    strange = to_weights(8, {"base_model.model.model.layers.0.other.lora_A.weight": torch.zeros(6, 128)})
    with pytest.raises(Exception, match=r"expected target modules in .* but received"):
        run(load, attrs.evolve(strange, adapter=ADAPTER))


@pytest.mark.stack
def test_an_engine_that_expects_no_adapter_refuses_one(subject: Any, model: Model) -> None:
    with pytest.raises(EngineError, match=r"version 1"):
        subject.run(load, random_adapter(model, 1))


def test_which_engines_take_adapters() -> None:
    assert isinstance(Vllm(), TakesAdapter)
    assert not isinstance(Transformers(), TakesAdapter)


def test_room_for_an_adapter() -> None:
    assert [vllm_options.adapter_arguments(Adapter(rank=r, alpha=1))["max_lora_rank"] for r in (1, 2, 16, 17, 512)] == (
        [1, 8, 16, 32, 512]
    )
    with pytest.raises(EngineError, match=r"rank 513: vLLM supports ranks up to 512; .*learner.lora.sync: merged"):
        Vllm().expect_adapter(Adapter(rank=513, alpha=1))


@pytest.mark.stack
def test_the_rooms_are_those_of_this_vllm(run: Run) -> None:
    assert run(lambda engine: _rooms()) == vllm_options._RANKS


def _rooms() -> tuple[int, ...]:
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    return get_args(MaxLoRARanks)
