"""Take a second update on every batch, over its minibatches in the reverse order."""

import rlsdk


class TwoUpdates(rlsdk.Trainer):
    async def update(self, batch, minibatches):
        metrics = await super().update(batch, minibatches)
        second = await super().update(batch, minibatches[::-1])
        return {**metrics, "second/grad_norm": second["actor/grad_norm"]}


if __name__ == "__main__":
    with TwoUpdates.from_config("config.yaml", "name=two_updates") as trainer:
        trainer.train()
