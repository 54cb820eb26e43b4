"""The plugin `gridworlds`: grid puzzles that models play as text; modules are imported by kind.

`pip install plugins/rlsdk-gridworlds`, then `gridworlds/frozen_lake` or `gridworlds/sokoban`.
"""

from __future__ import annotations

MODULES: dict[str, tuple[str, ...]] = {
    "environment": ("rlsdk_gridworlds.frozen_lake", "rlsdk_gridworlds.sokoban"),
    "tasks": ("rlsdk_gridworlds.levels",),
}
