"""Advantages per token, from the rewards that follow it.

All of them step over tokens that were not sampled (tool results, observations), without discounting the gap; a reward
counts at the sampled token where it stands. Advantages of tokens that were not sampled are zero.
"""

from __future__ import annotations

from rlsdk.algorithms.packed import Sampled, sums_to_go
from rlsdk.algorithms.packed import whiten as whitened
from rlsdk.batch import Credit, CreditInputs
from rlsdk.components import advantage


@advantage("gae", needs=("values",))
def gae(x: CreditInputs, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True) -> Credit:
    """Generalised advantage estimation with a critic: PPO's, for rewards along the way and for long episodes.

    Paper: GAE, arXiv:1506.02438, eq. 16; defaults as in TinyZero and verl.
    Formula: `A_t = Σ_k (γλ)^k · (r_{t+k} + γ V_{t+k+1} - V_{t+k})`, computed as `G_t - V_t` with
    `G_t = r_t + γ(1-λ) V_{t+1} + γλ G_{t+1}`. The critic's returns are `A + V = G`, before whitening.

    Args:
        x: The batch.
        gamma: Discount per sampled token.
        lam: 1 trusts the rewards alone, 0 the critic's next value.
        whiten: Mean 0 and variance 1 over the sampled tokens of the batch.
    """
    sampled = Sampled.of(x)
    values = sampled.take(x.values)
    targets = sampled.rewards(x).to(values.dtype) + gamma * (1 - lam) * sampled.next(values)
    returns = sums_to_go(targets, sampled.counts, gamma * lam)
    advantages = returns - values
    return Credit(sampled.put(whitened(advantages) if whiten else advantages), sampled.put(returns))
