"""Train from Python: a typed configuration, a custom reward and a custom callback.

    python examples/train_in_python.py              # a minute or two on two cores
    python examples/train_in_python.py steps=40 name=longer

The reward below is part of the run: its source is kept in the run's folder, where `rlsdk eval`, `rlsdk explain` and
`rlsdk train … --resume` find it (docs/howto/python.md).
"""

from __future__ import annotations

import sys
from pathlib import Path

import rlsdk

MODEL = Path(__file__).parent / "models" / "countdown-nano"
SHORT = 14


@rlsdk.reward("brief")
def brief(rollout: rlsdk.Rollout, *, limit: int = SHORT) -> float:
    """Return 1 for an answer of at most `limit` characters, and 0 for a longer one."""
    return float(len(rollout.response) <= limit)


class BestReward(rlsdk.Callback):
    """Add the best mean reward so far to the metrics of each step."""

    def __init__(self) -> None:
        self.best = float("-inf")

    async def after_step(self, trainer: rlsdk.Trainer, metrics: dict[str, float | None]) -> None:
        """Update the best reward after a step."""
        self.best = max(self.best, metrics["reward/mean"] or 0.0)
        metrics["reward/best"] = self.best


countdown = rlsdk.Use(
    "countdown", numbers=3, number_range=[1, 20], target_range=[1, 100], operators="+-", template="compact"
)
config = rlsdk.Config(
    name="in-python",
    model=rlsdk.Config.Model(path=str(MODEL), max_length=32),
    tasks=rlsdk.Config.Tasks(
        train=rlsdk.Use("countdown", countdown.options, size=5000),
        eval=rlsdk.Use("countdown", countdown.options, split="test", size=100),
    ),
    max_prompt_tokens=16,
    reward=["countdown", {"use": brief, "weight": 0.2}],
    algorithm=rlsdk.Use("grpo", kl_coef=0.0),
    sampling=rlsdk.Config.Sampling(max_tokens=14),
    steps=10,
    batch_size=32,
    group_size=8,
    engine="transformers",
    learner=rlsdk.Use("deepspeed", lr=4e-4),
    placement=rlsdk.Config.Placement(engine_threads=1, learner_threads=1),
)

if __name__ == "__main__":
    with rlsdk.Trainer.from_config(config, *sys.argv[1:], callbacks=[BestReward()]) as trainer:
        summary = trainer.train()
    print(f"held-out accuracy: {summary['accuracy_before']} -> {summary['accuracy_after']}")
