"""The plugin `zoo`: new or rarely used parts of algorithms, and optimisers; modules are imported by kind.

`pip install plugins/rlsdk-zoo`, then `algorithm: zoo/dppo` or `policy_loss: zoo/dppo`.
"""

from __future__ import annotations

MODULES: dict[str, tuple[str, ...]] = {
    "advantage": ("rlsdk_zoo.advantages",),
    "policy_loss": ("rlsdk_zoo.token", "rlsdk_zoo.sequence", "rlsdk_zoo.experts"),
    "correction": ("rlsdk_zoo.corrections",),
    "algorithm": ("rlsdk_zoo.named",),
    "optimizer": ("rlsdk_zoo.optimizers",),
}
