"""The plugin `zoo`: new or rarely used policy losses; modules are imported by kind.

`pip install rlsdk-zoo`, then `algorithm: zoo/dppo` or `policy_loss: zoo/dppo`.
"""

from __future__ import annotations

MODULES: dict[str, tuple[str, ...]] = {
    "policy_loss": ("rlsdk_zoo.token", "rlsdk_zoo.sequence", "rlsdk_zoo.experts"),
    "algorithm": ("rlsdk_zoo.named",),
}
