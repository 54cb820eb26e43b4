"""verl's core functions (`verl.trainer.ppo.core_algos`), on padded planes `[n, L]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from cores_server import Function, serve
from omegaconf import OmegaConf
from verl.trainer.ppo import core_algos


def functions(data: Mapping[str, Any]) -> dict[str, Function]:
    """Return the functions, by their names in `cores.CASES`."""
    mask, groups = data["mask"].float(), data["groups"].numpy()
    rewards, config = data["token_rewards"], data["config"]
    actor = OmegaConf.create({"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0})
    OmegaConf.update(actor, "global_batch_info", {})

    def loss() -> Any:
        logprobs = data["logprobs"].clone().requires_grad_()
        value, _ = core_algos.compute_policy_loss_vanilla(
            data["old_logprobs"], logprobs, data["advantages"], mask, "token-mean", actor
        )
        value.backward()
        return torch.cat([value.detach().reshape(1), (logprobs.grad * mask).reshape(-1)])

    return {
        # It overwrites the summed rewards, but not the rewards themselves.
        "grpo": lambda: core_algos.compute_grpo_outcome_advantage(rewards, mask, groups)[0],
        "grpo (vectorised)": lambda: core_algos.compute_grpo_vectorized_outcome_advantage(rewards, mask, groups)[0],
        "rloo": lambda: core_algos.compute_rloo_outcome_advantage(rewards, mask, groups)[0],
        "gae": lambda: (
            core_algos.compute_gae_advantage_return(rewards, data["values"], mask, config["gamma"], config["lam"])[0]
            * mask
        ),
        "ppo loss": loss,
        "kl k3": lambda: core_algos.kl_penalty(data["logprobs"], data["ref_logprobs"], "low_var_kl") * mask,
    }


if __name__ == "__main__":
    serve(functions)
