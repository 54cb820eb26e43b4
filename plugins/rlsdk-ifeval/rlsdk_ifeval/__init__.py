"""The plugin `ifeval`: a reward for verifiable instructions, as in IFEval; its module is imported by kind.

`pip install plugins/rlsdk-ifeval`, then `reward: ifeval/followed` with tasks that have `instruction_id_list` and
`kwargs`.
"""

from __future__ import annotations

MODULES: dict[str, tuple[str, ...]] = {"reward": ("rlsdk_ifeval.followed",)}
