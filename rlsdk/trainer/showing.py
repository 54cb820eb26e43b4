"""Rollouts of each step on the console, for a person who watches a training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

from rlsdk.runlog.rollouts import prompt_text, visible
from rlsdk.runlog.tables import Entry
from rlsdk.trainer.callbacks import Callback, Metrics
from rlsdk.trainer.trainer import Trainer


class ShowSamples(Callback):
    """Print a few rollouts after each step, one line each: prompt, response, reward."""

    def __init__(self, console: Console, count: int) -> None:
        """Choose how many.

        Args:
            console: Console for a person.
            count: Rollouts of each step, from as many groups, spread evenly over the batch.
        """
        self._console, self._count = console, count

    async def after_step(self, trainer: Trainer, metrics: Metrics) -> None:
        """Print rollouts of the groups that ended in this step."""
        entries = [entry for entry in trainer.closed if entry.step == trainer.version and entry.group.rollouts]
        for line in sample_lines(entries, self._count):
            self._console.print(line, no_wrap=True, overflow="ellipsis", crop=True)


def sample_lines(entries: Sequence[Entry], count: int) -> list[Text]:
    """Return a line for the first rollout of each of `count` groups, or of all if there are fewer."""
    lines = []
    for i in np.linspace(0, len(entries), min(count, len(entries)), endpoint=False, dtype=int):
        rollout, score = entries[i].group.rollouts[0], entries[i].group.scores[0]
        line = Text("  ")
        line.append(f"reward {score.value:.3f}  " if score.valid else "not scored  ", style="bold")
        line.append(visible(prompt_text(rollout.task)))
        line.append(" -> ", style="dim")
        line.append(visible(rollout.response))
        lines.append(line)
    return lines
