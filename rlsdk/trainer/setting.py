"""What a plan says of sampling, as the rollout layer takes it."""

from __future__ import annotations

from typing import Any

from rlsdk.config import Plan
from rlsdk.contracts import Sampling
from rlsdk.rollout.chat import Setting
from rlsdk.rollout.codec import Codec
from rlsdk.rollout.worlds.local import LocalWorlds, Worlds


def setting_of(plan: Plan, codec: Codec, client: Any, worlds: Worlds | None = None) -> Setting:
    """Codec, engines, sampling, length and environments of a plan's rollouts.

    Args:
        plan: The plan.
        codec: Of its model.
        client: The engines, or what stands for them; None where nothing is sampled.
        worlds: Where environments run; left out, in threads of this process.
    """
    s = plan.config.sampling
    stops, ids = codec.split_stops(s.stop)
    sampling = Sampling(
        temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, max_tokens=s.max_tokens, stop=stops, stop_token_ids=ids
    )
    return Setting(
        codec=codec,
        client=client,
        sampling=sampling,
        max_length=plan.config.model.max_length,
        worlds=worlds or LocalWorlds(plan.plugins),
    )
