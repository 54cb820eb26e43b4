"""Lower the learning rate when the reward has not risen for some steps."""

import asyncio

import rlsdk


class LowerOnPlateau(rlsdk.Callback):
    def __init__(self, patience=10, factor=0.5):
        self.patience, self.factor = patience, factor
        self.best, self.waited = float("-inf"), 0

    async def after_step(self, trainer, metrics):
        rose = metrics["reward/mean"] > self.best
        self.best, self.waited = max(self.best, metrics["reward/mean"]), 0 if rose else self.waited + 1
        if self.waited >= self.patience and "actor/lr" in metrics:
            self.waited = 0
            await asyncio.to_thread(trainer.learner.set_learning_rate, self.factor * metrics["actor/lr"])


if __name__ == "__main__":
    with rlsdk.Trainer.from_config("config.yaml", callbacks=[LowerOnPlateau()]) as trainer:
        trainer.train()
