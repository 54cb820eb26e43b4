"""Default components of a run: the only built-in ones that the core knows by name."""

from __future__ import annotations

from rlsdk.components import Use

ALGORITHM = Use("grpo")
ENGINE = Use("vllm")
LEARNER = Use("deepspeed")
BUFFER = Use("fifo")
STOP = Use("all")
RENDERER = Use("template")
TOOL_PARSER = Use("hermes")
"""Parser for renderers whose tool calls no parser recognises."""
WORKFLOW = Use("single_turn")
"""Also used by evaluations during a training on demonstrations, and by the trial of rewards before a run."""
DEMONSTRATION = Use("demonstration")
"""Workflow of a training on demonstrations."""
PAIRS = Use("chosen_rejected")
"""Workflow of a training on demonstrations whose loss reads pairs."""
TRACKER = Use("jsonl")
"""Used by every run, besides the trackers that its configuration names: rlsdk itself reads the metrics it writes."""
DIAGNOSES = Use("builtin")
"""In `diagnoses`: all built-in diagnoses that the list does not name itself."""
REWARD = Use("environment")
"""Reward of a run whose workflow gives rewards itself."""
TRANSFER = Use("object_store")
