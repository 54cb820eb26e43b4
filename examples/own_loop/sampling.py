"""Show what the policy answers before and after a few steps."""

import asyncio

from transformers import AutoTokenizer

import rlsdk


def answers(trainer, tokenizer, prompt, **options):
    found = trainer.sample([tokenizer.encode(prompt)], **options)[0]
    return [tokenizer.decode(each.token_ids) for each in found]


if __name__ == "__main__":
    with rlsdk.Trainer.from_config("config.yaml", "name=sampling", "steps=20") as trainer:
        tokenizer = AutoTokenizer.from_pretrained(trainer.plan.config.model.path)
        print(answers(trainer, tokenizer, "3,5,17>9:", count=4))
        for _ in range(3):
            asyncio.run(trainer.step())
        print(answers(trainer, tokenizer, "3,5,17>9:", count=4))
