"""The plugin `fsdp2`: a learner based on torch's `fully_shard`, imported on first use.

`pip install plugins/rlsdk-fsdp2`, then `learner: {use: fsdp2/fsdp2, lr: 1.0e-6}`.
"""

from __future__ import annotations

MODULES: dict[str, tuple[str, ...]] = {"learner": ("rlsdk_fsdp2.learner",)}
