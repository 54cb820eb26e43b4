"""Let a teacher score every sampled token, and add its logprob lead over the policy to the advantages."""

import asyncio

import attrs

import rlsdk


class Taught(rlsdk.Trainer):
    teacher = None  # a function: packed arrays of n rollouts -> the teacher's logprobs of their response tokens, [t]
    weight = 0.1

    async def assign_credit(self, batch):
        batch = await super().assign_credit(batch)
        lead = await asyncio.to_thread(self.teacher, batch.arrays) - batch.fields["logprobs"]
        advantages = batch.arrays.tokens["advantages"] + self.weight * lead * batch.arrays.loss_mask
        return attrs.evolve(batch, arrays=batch.arrays.with_tokens(advantages=advantages))
