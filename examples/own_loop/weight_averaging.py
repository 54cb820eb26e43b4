"""Keep an exponential average of the policy's weights, and write it next to the checkpoints."""

import asyncio

import rlsdk
from rlsdk.weights import from_weights


class Averaging(rlsdk.Callback):
    def __init__(self, decay=0.99):
        self.decay, self.average = decay, {}

    async def after_step(self, trainer, metrics):
        weights = await asyncio.to_thread(trainer.learner.fetch_weights, trainer.version)
        for name, tensor in from_weights(weights):
            kept = self.average.setdefault(name, tensor.float().clone())
            kept.lerp_(tensor.float(), 1 - self.decay)

    async def on_end(self, trainer, *, failed):
        import torch

        torch.save(self.average, trainer.plan.folder / "averaged.pt")
