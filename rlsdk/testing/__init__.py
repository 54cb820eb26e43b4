"""Test tools for plugin authors: a scripted policy, hostile answers, and the conformance suite.

The suite is also available as `rlsdk check PLUGIN` and `pytest --rlsdk-plugin PLUGIN`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsdk.config import check as check_config
    from rlsdk.plugins.loading import find_plugins_again
    from rlsdk.rollout.codec import ChatTokenizer
    from rlsdk.scoring.scorer import RewardTerm, Scorer
    from rlsdk.testing.conformance import check_component, check_plugin
    from rlsdk.testing.findings import PropertyResult, Report
    from rlsdk.testing.samples import HOSTILE
    from rlsdk.testing.scripted import ScriptedPolicy, run_workflow, scripted_chat

_LAZY = {
    "HOSTILE": "rlsdk.testing.samples",
    "ChatTokenizer": "rlsdk.rollout.codec",
    "PropertyResult": "rlsdk.testing.findings",
    "Report": "rlsdk.testing.findings",
    "RewardTerm": "rlsdk.scoring.scorer",
    "Scorer": "rlsdk.scoring.scorer",
    "ScriptedPolicy": "rlsdk.testing.scripted",
    "check_component": "rlsdk.testing.conformance",
    "check_config": "rlsdk.config:check",
    "check_plugin": "rlsdk.testing.conformance",
    "find_plugins_again": "rlsdk.plugins.loading",
    "run_workflow": "rlsdk.testing.scripted",
    "scripted_chat": "rlsdk.testing.scripted",
}
"""Name -> module, or `module:name`; imported on first use: pytest imports this package in every project."""

__all__ = [
    "HOSTILE",
    "ChatTokenizer",
    "PropertyResult",
    "Report",
    "RewardTerm",
    "Scorer",
    "ScriptedPolicy",
    "check_component",
    "check_config",
    "check_plugin",
    "find_plugins_again",
    "run_workflow",
    "scripted_chat",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'rlsdk.testing' has no attribute {name!r}")
    module, _, attribute = _LAZY[name].partition(":")
    return getattr(importlib.import_module(module), attribute or name)
