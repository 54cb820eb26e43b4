"""Test tools for plugin authors: a scripted policy in place of a model, and the conformance suite.

The suite is also the command `rlsdk check PLUGIN`, and `pytest --rlsdk-plugin PLUGIN`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsdk.testing.conformance import check_component, check_plugin
    from rlsdk.testing.findings import Finding, Report
    from rlsdk.testing.scripted import ScriptedPolicy, run_workflow

_LAZY = {
    "Finding": "rlsdk.testing.findings",
    "Report": "rlsdk.testing.findings",
    "ScriptedPolicy": "rlsdk.testing.scripted",
    "check_component": "rlsdk.testing.conformance",
    "check_plugin": "rlsdk.testing.conformance",
    "run_workflow": "rlsdk.testing.scripted",
}
"""Imported on first use: pytest imports this package in every project, for its plugin alone."""

__all__ = ["Finding", "Report", "ScriptedPolicy", "check_component", "check_plugin", "run_workflow"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'rlsdk.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
