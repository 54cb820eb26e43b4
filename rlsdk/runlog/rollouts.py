"""Rollouts for a person: a prompt as one text, a rollout as JSON."""

from __future__ import annotations

from typing import Any

from rlsdk.types import Message, Rollout, Score, Task


def visible(text: str, keep: str = "") -> str:
    r"""Write out the characters of a text that would act on a terminal as their escapes, such as `\x1b`.

    Args:
        text: Any text, such as a model's.
        keep: Characters that stay as they are, such as line breaks.
    """
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def prompt_text(task: Task) -> str:
    """A prompt as one text."""
    return task.prompt if isinstance(task.prompt, str) else "\n".join(f"{m.role}: {m.content}" for m in task.prompt)


def transcript(rollout: Rollout, score: Score) -> dict[str, Any]:
    """A rollout as JSON values: conversation, score, and every token with its mask."""
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
        "messages": [_message(message) for message in rollout.messages],
        "response": rollout.response,
        "token_ids": rollout.token_ids.tolist(),
        "loss_mask": rollout.loss_mask.tolist(),
        "logprobs": [float(value) for value in rollout.logprobs],
        "policy_versions": rollout.policy_versions.tolist(),
    }


def _message(message: Message) -> dict[str, Any]:
    """A message as JSON; one of the assistant says whether it belongs to the prompt."""
    name = {"name": message.name} if message.name else {}
    author = {"prompt": message.prompt} if message.role == "assistant" else {}
    return {"role": message.role, "content": message.content, **name, **author}
