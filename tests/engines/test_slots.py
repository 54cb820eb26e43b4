"""The engine `transformers` with models whose layers keep a state per continuation instead of keys and values."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
import architectures

from rlsdk.contracts import ActorSpec, Model, Request, Sampling
from rlsdk.engines.transformers import Transformers
from rlsdk.errors import EngineError

MODELS = {
    "qwen3.5": {},
    "nemotron-h": {"layers_block_type": ["mamba", "mlp", "attention", "moe"], "num_hidden_layers": 4},
}
"""Architecture -> options: the second has blocks that keep nothing."""


@pytest.fixture(params=MODELS)
def model(request: Any, tmp_path: Path) -> Model:
    architectures.make(tmp_path, request.param, **MODELS[request.param])
    return Model(path=str(tmp_path), max_length=64)


def _started(model: Model, **options: Any) -> Transformers:
    engine = Transformers(**options)
    engine.start(model, ActorSpec(role="engine"))
    return engine


def _requests() -> list[Request]:
    """Prompts and answers of many lengths: prompts are padded, and rows end and are filled again."""
    ids = np.random.default_rng(1).integers(3, 100, 40)
    lengths = [(1, 9), (2, 30), (17, 4), (5, 12), (3, 20), (9, 2), (30, 25)]
    return [
        Request(
            id=f"r{i}",
            prompt_ids=ids[i : i + prompt],
            sampling=Sampling(max_tokens=tokens, ignore_eos=True),
            n=1 + i % 2,
            seed=i,
        )
        for i, (prompt, tokens) in enumerate(lengths)
    ]


def _finish(engine: Transformers, *, reload_after: int | None = None) -> dict[tuple[str, int], Any]:
    from safetensors.torch import load_file

    from rlsdk.weights import to_weights

    engine.add(_requests())
    done, steps = {}, 0
    while engine.unfinished:
        if steps == reload_after:
            engine.load_weights(to_weights(1, load_file(f"{engine._model.path}/model.safetensors")))
        done.update({(each.request, each.index): each for each in engine.step()})
        steps += 1
    return done


@pytest.mark.parametrize("options", [{"max_num_seqs": 3}, {"max_num_batched_tokens": 16}, {}], ids=str)
def test_logprobs_are_those_of_a_whole_pass_in_rows_of_any_history(model: Model, options: dict[str, int]) -> None:
    engine = _started(model, **options)
    prompts = {request.id: request.prompt_ids for request in _requests()}
    for (name, _), completion in _finish(engine).items():
        whole = engine.logprobs(np.concatenate([prompts[name], completion.token_ids]))
        np.testing.assert_allclose(completion.logprobs, whole[len(prompts[name]) - 1 :], atol=1e-4)


def test_states_are_recomputed_after_new_weights(model: Model) -> None:
    """The same weights under a new version: the rows that run continue as they would have."""
    alone, reloaded = (_finish(_started(model), reload_after=after) for after in (None, 7))
    assert {key: each.token_ids.tolist() for key, each in alone.items()} == {
        key: each.token_ids.tolist() for key, each in reloaded.items()
    }
    assert {version for each in reloaded.values() for version in each.versions.tolist()} == {0, 1}


def test_memory_for_states_limits_how_many_run(model: Model) -> None:
    engine = _started(model)
    loaded = engine._loaded
    assert loaded.row_bytes > 0
    engine.kv_cache_gib = 2 * (64 * loaded.token_bytes + loaded.row_bytes) / 2**30
    engine.add(_requests())
    most = 0
    while engine.unfinished:
        engine.step()
        most = max(most, len(engine._rows.running))
    assert 2 <= most <= 4


def test_compiled_states_are_refused(model: Model) -> None:
    with pytest.raises(EngineError, match=r"whose states cannot be compiled; set engine\.compile=false"):
        _started(model, compile=True)


def test_layers_of_another_kind_are_refused() -> None:
    from transformers import BloomConfig, FalconH1Config, MiniMaxConfig

    from rlsdk.engines.memory import check_layers

    with pytest.raises(EngineError, match=r"'falcon_h1' has layers of type hybrid; .* use engine=vllm"):
        check_layers(FalconH1Config(num_hidden_layers=2), compiled=False)
    for config in (BloomConfig(), MiniMaxConfig()):
        with pytest.raises(EngineError, match=r"needs a cache or a mask of its own, .* use engine=vllm"):
            check_layers(config, compiled=False)


def test_the_cache_of_layers_of_several_sizes_is_counted_layer_by_layer() -> None:
    from transformers import Gemma4TextConfig

    from rlsdk.engines.memory import token_bytes

    types = ["sliding_attention", "full_attention"]
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "global_head_dim": 64}
    assert token_bytes(Gemma4TextConfig(num_hidden_layers=2, layer_types=types, **sizes), 4) == 2 * (32 + 64) * 4
