"""rlsdk's functions on the same data, packed along one token axis; results are padded for the comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from cores_server import Function, serve

import rlsdk
from rlsdk.batch import Credit, CreditInputs, LossInputs, aggregate


def functions(data: Mapping[str, Any]) -> dict[str, Function]:
    """Return the functions, by their names in `cores.CASES`; data is packed before, as once per step in a trainer."""
    mask, lengths, config = data["mask"], data["mask"].sum(1), data["config"]
    every = torch.ones(int(lengths.sum()), dtype=torch.bool)
    credit = CreditInputs(data["rewards"], data["groups"], lengths, every, values=data["values"][mask])
    loss_inputs = LossInputs.from_padded(data["logprobs"], data["old_logprobs"], data["advantages"], mask)
    ref = data["ref_logprobs"][mask]
    grpo, rloo, gae = (rlsdk.load("advantage", name) for name in ("grpo", "rloo", "gae"))
    ppo, k3 = rlsdk.load("policy_loss", "ppo"), rlsdk.load("kl", "low_var")

    def along(found: Any) -> torch.Tensor:
        found = found.advantages if isinstance(found, Credit) else found
        return credit.per_token(found) if len(found) == len(credit.rewards) else found

    def loss() -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = loss_inputs.logprobs.clone().requires_grad_()
        x = loss_inputs.replace(logprobs=logprobs)
        value = aggregate(ppo(x, dual_clip=3.0)[0], x.loss_mask, x.segments, "token-mean")
        value.backward()
        return value.detach(), logprobs.grad

    return {
        # Expanded to tokens, like the peers' results.
        "grpo": lambda: along(grpo(credit)),
        "grpo (vectorised)": lambda: along(grpo(credit)),
        "rloo": lambda: along(rloo(credit)),
        "gae": lambda: along(gae(credit, gamma=config["gamma"], lam=config["lam"])),
        "ppo loss": loss,
        "kl k3": lambda: k3(loss_inputs.logprobs, ref),
    }


def padded(found: Any, mask: torch.Tensor) -> torch.Tensor:
    """Return the result as a plane `[n, L]`, zero where nothing was sampled; if it has a loss, both in one axis."""
    values = found[1] if isinstance(found, tuple) else found
    plane = torch.zeros(mask.shape, dtype=values.dtype)
    plane[mask] = values
    return torch.cat([found[0].reshape(1), plane.reshape(-1)]) if isinstance(found, tuple) else plane


if __name__ == "__main__":
    serve(functions, padded)
