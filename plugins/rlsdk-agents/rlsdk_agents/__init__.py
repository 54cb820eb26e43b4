"""The plugin `agents`: train unmodified agents of the OpenAI Agents SDK; imported by kind.

`pip install plugins/rlsdk-agents`, then `workflow: {use: agents/workflow, agent: "my_agent.py:assistant"}`.
"""

from __future__ import annotations

MODULES: dict[str, tuple[str, ...]] = {"workflow": ("rlsdk_agents.workflow",)}
