"""The context shared by all rollouts of a plan: tokenizer, engines, sampling, environments, agent recorder."""

from __future__ import annotations

from typing import Any

from rlsdk.config import Plan
from rlsdk.contracts import Sampling
from rlsdk.engines.pretrained import vocabulary_size
from rlsdk.environments.local import EnvBackend, LocalEnvBackend
from rlsdk.loops import UserLoop
from rlsdk.rollout.chat import RolloutContext
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.serving.recording import Recorder


def context_of(
    plan: Plan,
    codec: ChatTokenizer,
    client: Any,
    environments: EnvBackend | None = None,
    user_loop: UserLoop | None = None,
) -> RolloutContext:
    """Return the tokenizer, client, sampling, length and environments of a plan's rollouts.

    Args:
        plan: The plan.
        codec: Tokenizer of the plan's model.
        client: Client of the engines, or a substitute; None if nothing is sampled.
        environments: Environment backend; by default, threads of this process.
        user_loop: Event loop for users' workflows; by default, the running one.
    """
    s = plan.config.sampling
    stops, ids = codec.split_stops(s.stop)
    sampling = Sampling(
        temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, max_tokens=s.max_tokens, stop=stops, stop_token_ids=ids
    )
    return RolloutContext(
        codec=codec,
        client=client,
        sampling=sampling,
        max_length=plan.config.model.max_length,
        environments=environments or LocalEnvBackend(plan.plugins),
        user_loop=user_loop,
        recorder=Recorder,
        vocabulary=vocabulary_size(plan.model),
    )
