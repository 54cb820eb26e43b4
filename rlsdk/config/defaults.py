"""Default components of a run: the only built-in components that the core refers to by name."""

from __future__ import annotations

from rlsdk.components import Use

ALGORITHM = Use("grpo")
ENGINE = Use("vllm")
LEARNER = Use("deepspeed")
OPTIMIZER = Use("adamw")
LR_SCHEDULE = Use("constant")
BUFFER = Use("fifo")
STOP = Use("all")
RENDERER = Use("template")
TOOL_PARSER = Use("hermes")
"""Tool parser for renderers whose tool calls no parser recognises."""
WORKFLOW = Use("single_turn")
"""Also used to evaluate when training on demonstrations, and for the trial of rewards before a run."""
DEMONSTRATION = Use("demonstration")
"""Workflow for training on demonstrations."""
PAIRS = Use("chosen_rejected")
"""Workflow for training on demonstrations with a loss that reads pairs."""
TRACKER = Use("jsonl")
"""Used by every run in addition to the configured trackers: rlsdk itself reads these metrics."""
DIAGNOSES = Use("builtin")
"""In `diagnoses`: all built-in diagnoses that are not listed explicitly."""
REWARD = Use("environment")
"""Reward of a run whose workflow gives the rewards."""
TRANSFER = Use("object_store")
