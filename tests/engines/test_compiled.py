"""vLLM with a compiled model on the CPU: new weights must reach what was compiled."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import tiny

from rlsdk.contracts import Model, Place


@pytest.mark.slow
@pytest.mark.stack
def test_new_weights_reach_a_compiled_model(model: Model, cluster: None, tmp_path: Path) -> None:
    import ray

    from rlsdk.engines.actor import launch
    from rlsdk.plugins import Plugins

    reference = Plugins().reference("engine", "vllm", {"max_num_seqs": 8, "enforce_eager": False})
    cache = tmp_path / "cache"
    place = Place(role="engine", cache=str(cache), threads=1, cpus=os.cpu_count() or 1)
    actor = launch(reference, place, log_path=tmp_path / "engine.log")
    try:
        ray.get(actor.start.remote(model, place))
        ids = np.array([20, 7, 30, 3, 40, 12])
        assert any((cache / "vllm").rglob("*.py")), "nothing was compiled"
        for weights in (tiny.changed(model, 1), tiny.changed(model, 2, seed=2)):
            seen = ray.get(actor.load_weights.remote(weights, ids))
            np.testing.assert_allclose(seen, tiny.reference_logprobs(model, ids, weights), atol=1e-4)
    finally:
        ray.get(actor.stop.remote())
        ray.kill(actor)
