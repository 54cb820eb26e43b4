"""The plugin `reasoning_gym`: tasks and scorers of reasoning-gym; modules are imported by kind.

`pip install plugins/rlsdk-reasoning-gym`, then `tasks: {train: {use: reasoning_gym/tasks, datasets: chain_sum}}` and
`reward: reasoning_gym/score`.
"""

from __future__ import annotations

MODULES: dict[str, tuple[str, ...]] = {
    "tasks": ("rlsdk_reasoning_gym.tasks",),
    "reward": ("rlsdk_reasoning_gym.score",),
}
