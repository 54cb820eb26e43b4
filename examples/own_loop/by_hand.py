"""Train two steps, evaluate, and save a checkpoint, each with its own call."""

import asyncio

import rlsdk

if __name__ == "__main__":
    with rlsdk.Trainer.from_config("config.yaml", "name=by_hand", "steps=20") as trainer:
        for _ in range(2):
            metrics = asyncio.run(trainer.step())
            print(trainer.version, metrics["reward/mean"])
        print(trainer.evaluate().accuracy)
        print(trainer.save())
