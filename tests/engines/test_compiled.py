"""vLLM with a compiled model on the CPU: new weights must reach what was compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from rlsdk.contracts import Model


@pytest.mark.slow
@pytest.mark.stack
def test_new_weights_reach_a_compiled_model(launched: Any, model: Model, tmp_path: Path) -> None:
    import ray

    ids = np.array([20, 7, 30, 3, 40, 12])
    with launched(tmp_path, {"max_num_seqs": 8, "enforce_eager": False}) as engine:
        assert any((tmp_path / "cache" / "vllm").rglob("*.py")), "nothing was compiled"
        for weights in (tiny.changed(model, 1), tiny.changed(model, 2, seed=2)):
            seen = ray.get(engine.actor.load_weights.remote(weights, ids))
            np.testing.assert_allclose(seen, tiny.reference_logprobs(model, ids, weights), atol=1e-4)
