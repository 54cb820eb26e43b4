"""Compiled models on the CPU give the same numbers, also with new weights, from one graph for all batches."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from rlsdk.contracts import Completion, Model, Request, Sampling

pytestmark = [pytest.mark.slow, pytest.mark.stack]

PROMPT = np.array([20, 7, 30, 3, 40, 12])


def test_new_weights_reach_a_compiled_model_of_vllm(launched: Any, model: Model, tmp_path: Path) -> None:
    import ray

    with launched(tmp_path, {"max_num_seqs": 8, "enforce_eager": False}) as engine:
        programs = engine.run(lambda _: os.environ["VLLM_CACHE_ROOT"])
        assert any(Path(programs).rglob("*.py")), "nothing was compiled"
        for weights in (tiny.changed(model, 1), tiny.changed(model, 2, seed=2)):
            seen = ray.get(engine.actor.load_weights.remote(weights, PROMPT))
            np.testing.assert_allclose(seen, tiny.reference_logprobs(model, PROMPT, weights), atol=1e-4)


def generate(engine: Any, shapes: list[tuple[int, int, int]]) -> list[Completion]:
    """For each `(requests, continuations, tokens)` in turn, prompts of one to six tokens."""
    done: list[Completion] = []
    for turn, (count, n, tokens) in enumerate(shapes):
        engine.add(
            [
                Request(
                    id=f"{turn}-{i}",
                    prompt_ids=PROMPT[i % 6 :],
                    sampling=Sampling(max_tokens=tokens - i % 3, ignore_eos=i % 2 == 0),
                    n=n,
                    seed=i,
                )
                for i in range(count)
            ]
        )
        while engine.unfinished:
            done += engine.step()
    return done


def graphs(engine: Any) -> int:
    """Compiled in the engine's process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("kv_heads", [pytest.param(4, marks=pytest.mark.long), 2])
def test_transformers_decodes_any_batch_with_one_graph(launched: Any, tmp_path: Path, kv_heads: int) -> None:
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    model = tiny.make_model(tmp_path, kv_heads=kv_heads)
    options = {"max_num_seqs": 40, "compile": True}
    # One row; as many rows as a head has numbers; more than there is room for; rows that end early, and longer ones.
    shapes = [(1, 1, 5), (4, 8, 12), (60, 1, 20), (6, 3, 90)]
    with launched(tmp_path, options, name="transformers", model=model) as engine:
        for weights in (None, tiny.changed(model, 1)):
            if weights is not None:
                ray.get(engine.actor.load_weights.remote(weights))
            done = engine.run(generate, shapes)
            assert len(done) == sum(count * n for count, n, _ in shapes)
            for completion in done[:: len(done) // 30]:
                prompt = PROMPT[int(completion.request.partition("-")[2]) % 6 :]
                whole = np.concatenate([prompt, completion.token_ids])
                expected = tiny.reference_logprobs(model, whole, weights)[len(prompt) - 1 :]
                np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
            assert engine.run(graphs) == 1
        programs = engine.run(lambda _: os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert any(Path(programs).rglob("*.so")), "nothing was compiled"
