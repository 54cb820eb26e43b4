"""Take one optimiser step for every two batches, with the loss of one batch of twice the size."""

import asyncio

import rlsdk


class Accumulating(rlsdk.Trainer):
    held = None  # the batch that waits for the next one

    async def optimise(self, batch, minibatches):
        if self.held is None:
            self.held = batch.arrays
            return {}
        first, second, self.held = self.held, batch.arrays, None
        totals, step = first.totals + second.totals, self.version
        await asyncio.to_thread(self.learner.forward_backward, first, totals, step=step, last=False)
        await asyncio.to_thread(self.learner.forward_backward, second, totals, step=step)
        return await asyncio.to_thread(self.learner.optimizer_step)


if __name__ == "__main__":
    with Accumulating.from_config("config.yaml", "name=accumulating", "checkpoint.every=10") as trainer:
        trainer.train()
