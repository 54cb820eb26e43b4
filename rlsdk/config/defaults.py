"""Built-in components of a run whose configuration names no others: the only ones that the core knows by name."""

from __future__ import annotations

from rlsdk.components import Use

ALGORITHM = Use("grpo")
ENGINE = Use("vllm")
LEARNER = Use("deepspeed")
BUFFER = Use("fifo")
STOP = Use("all")
WORKFLOW = Use("single_turn")
"""Also of evaluations during a training on demonstrations, and of the rehearsal of rewards."""
DEMONSTRATION = Use("demonstration")
"""Workflow of a training on demonstrations."""
TRACKER = Use("jsonl")
"""Of every run, beside the trackers that its configuration names: it writes the metrics that rlsdk reads itself."""
REWARD = Use("environment")
"""Reward of a run whose workflow gives rewards itself."""
