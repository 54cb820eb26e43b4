"""Stop the optimiser steps of a batch as soon as the policy has moved too far from the one that sampled it."""

import asyncio

import rlsdk


class KlStopping(rlsdk.Trainer):
    max_kl = 0.02

    async def optimise(self, batch, minibatches):
        for i, rollouts in enumerate(minibatches):
            where = {"step": self.version, "update": i, "updates": len(minibatches)}
            await asyncio.to_thread(self.learner.forward_backward, batch.arrays.select(rollouts), **where)
            metrics = await asyncio.to_thread(self.learner.optimizer_step)
            if metrics.get("actor/kl_to_old", 0.0) > self.max_kl:
                break
        return {**metrics, "actor/updates": i + 1.0}
