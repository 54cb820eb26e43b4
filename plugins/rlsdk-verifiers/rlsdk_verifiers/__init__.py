"""The plugin `verifiers`: environments of verifiers as tasks, workflow and reward; modules are imported by kind.

`pip install plugins/rlsdk-verifiers`, then `tasks: {train: {use: verifiers/tasks, environment: my-env}}`, `workflow:
verifiers/workflow` and `reward: verifiers/rubric`.
"""

from __future__ import annotations

MODULES: dict[str, tuple[str, ...]] = {
    "tasks": ("rlsdk_verifiers.tasks",),
    "workflow": ("rlsdk_verifiers.workflow",),
    "reward": ("rlsdk_verifiers.rubric",),
}
