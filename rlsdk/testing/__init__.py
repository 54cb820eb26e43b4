"""What an author of plugins tests with: a scripted policy in place of a model."""

from rlsdk.testing.scripted import ScriptedPolicy, run_workflow

__all__ = ["ScriptedPolicy", "run_workflow"]
