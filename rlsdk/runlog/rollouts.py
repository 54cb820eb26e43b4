"""Human-readable rollouts: a prompt as one text, a rollout as JSON."""

from __future__ import annotations

from typing import Any

from rlsdk.types import Rollout, Score, Task


def prompt_text(task: Task) -> str:
    """Return a prompt as one text, with a line for each message of a chat."""
    return task.prompt if isinstance(task.prompt, str) else "\n".join(f"{m.role}: {m.text}" for m in task.prompt)


def transcript(rollout: Rollout, score: Score) -> dict[str, Any]:
    """Convert a rollout to JSON values: conversation, score, and every token with its mask, logprob and version."""
    return {
        "task": rollout.task.id,
        "source": rollout.task.source,
        "trajectory": rollout.trajectory,
        "step": rollout.step,
        "status": rollout.status,
        "reward": score.value if score.valid else None,
        "valid": score.valid,
        "reason": score.reason,
        "metrics": {**rollout.metrics, **score.metrics},
        "rewards": [list(pair) for pair in rollout.rewards],
        "messages": [
            m.as_json() | ({"prompt": m.prompt} if m.role == "assistant" else {})  # true if it belongs to the prompt
            for m in rollout.messages
        ],
        "response": rollout.response,
        "token_ids": rollout.token_ids.tolist(),
        "loss_mask": rollout.loss_mask.tolist(),
        "logprobs": [float(value) for value in rollout.logprobs],
        "policy_versions": rollout.policy_versions.tolist(),
    }
