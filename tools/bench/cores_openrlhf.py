"""OpenRLHF's core functions (`openrlhf.models.loss`, `openrlhf.models.utils`), on padded planes `[n, L]`.

`openrlhf.models` imports its actor and thus flash-attn, which does not support CPUs. So the two files are imported
unchanged from the installed package, without running the package's `__init__`. Its advantages are part of methods that
need Ray and vLLM, so they are not compared.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from cores_server import Function, serve


def load() -> tuple[Any, Any]:
    """Import `openrlhf.models.loss` and `.utils`; return both."""
    found = importlib.util.find_spec("openrlhf")
    assert found is not None and found.origin is not None
    package = types.ModuleType("openrlhf.models")
    package.__path__ = [str(Path(found.origin).parent / "models")]
    sys.modules["openrlhf.models"] = package
    return importlib.import_module("openrlhf.models.loss"), importlib.import_module("openrlhf.models.utils")


LOSS, UTILS = load()


def functions(data: Mapping[str, Any]) -> dict[str, Function]:
    """Return the functions, by their names in `cores.CASES`."""
    mask = data["mask"].float()
    policy_loss = LOSS.PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.2, dual_clip=3.0, token_level_loss=True)

    def loss() -> Any:
        logprobs = data["logprobs"].clone().requires_grad_()
        value = policy_loss(logprobs, data["old_logprobs"], data["advantages"], mask)[0]
        value.backward()
        return torch.cat([value.detach().reshape(1), (logprobs.grad * mask).reshape(-1)])

    return {
        "ppo loss": loss,
        "kl k3": lambda: UTILS.compute_approx_kl(data["logprobs"], data["ref_logprobs"], kl_estimator="k3") * mask,
    }


if __name__ == "__main__":
    serve(functions)
