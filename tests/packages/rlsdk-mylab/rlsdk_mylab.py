"""A lab's plugin as its authors would write it: a reward, an advantage, a policy loss, and a hook that observes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import rlsdk

if TYPE_CHECKING:
    from torch import Tensor

_folder: list[Path] = []


@rlsdk.reward("exact")
def exact(rollout: rlsdk.Rollout, *, scale: float = 1.0) -> rlsdk.Score:
    """The share of the answer's characters that are digits.

    Args:
        scale: Factor.
    """
    text = rollout.text
    share = sum(c.isdigit() for c in text) / max(len(text), 1)
    return rlsdk.Score(scale * share, metrics={"digits": share})


@rlsdk.advantage("median")
def median(x: rlsdk.CreditInputs, *, scale: float = 1.0) -> Tensor:
    """The reward over the group's median.

    Args:
        scale: Factor.
    """
    middle = {int(g): x.rewards[x.groups == g].median() for g in x.groups.unique()}
    centre = x.rewards.new_tensor([middle[int(g)] for g in x.groups])
    return scale * (x.rewards - centre)


@rlsdk.policy_loss("soft_clip")
def soft_clip(x: rlsdk.LossInputs, *, temperature: float = 0.3) -> tuple[Tensor, dict[str, Tensor]]:
    """A ratio that bends where PPO cuts.

    Args:
        temperature: How soon it bends.
    """
    ratio = (x.logprobs - x.old_logprobs).exp()
    bent = 1 + temperature * ((ratio - 1) / temperature).tanh()
    return -x.advantages * bent, {"bent": (ratio - bent).abs().detach()}


@rlsdk.hookimpl
def rlsdk_run_start(folder: Path) -> None:
    """Remember where the run is."""
    _folder[:] = [folder]


@rlsdk.hookimpl
def rlsdk_step_end(step: int, metrics: dict[str, float]) -> None:
    """Note each step in a file of our own."""
    with (_folder[0] / "mylab.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "reward": metrics["reward/mean"]}) + "\n")
