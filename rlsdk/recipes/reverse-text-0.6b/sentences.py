"""How much of a sentence was written backwards."""

from __future__ import annotations

import re

import rlsdk


@rlsdk.reward("similarity", cache=True)
def similarity(rollout: rlsdk.Rollout) -> float:
    """Longest common subsequence of the answer and the reversed prompt, over the greater length."""
    prompt = rollout.task.prompt
    asked = prompt if isinstance(prompt, str) else str(prompt[-1].content)
    answers = re.findall(r"<reversed_text>(.*?)</reversed_text>", rollout.response, re.DOTALL)
    wanted, given = asked[::-1], answers[-1].strip() if answers else ""
    longest = max(len(wanted), len(given))
    return common(wanted, given[: 4 * len(wanted)]) / longest if longest else 0.0


def common(first: str, second: str) -> int:
    """Length of the longest common subsequence of two texts."""
    above = [0] * (len(second) + 1)
    for letter in first:
        row = [0]
        for i, other in enumerate(second):
            row.append(above[i] + 1 if letter == other else max(above[i + 1], row[i]))
        above = row
    return above[-1]
