"""A policy that says what a script says: workflows and rewards run on it without an engine, as in a training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlsdk.contracts import Completion, Finish, Sampling
from rlsdk.rollout.chat import Setting
from rlsdk.rollout.client import Answer
from rlsdk.rollout.codec import Codec
from rlsdk.rollout.producer import Producer
from rlsdk.scoring.scorer import Scorer
from rlsdk.types import Group, Task

LOGPROB = -0.5
"""Of every scripted token, in nats."""


class ScriptedPolicy:
    """Stands where the engines stand; answers with what `script` returns for the text of the prompt so far."""

    def __init__(self, codec: Codec, script: Callable[[str], str], version: int = 0) -> None:
        """Make one.

        Args:
            codec: Of the model whose tokens are used.
            script: The text so far -> the answer; raising is the engine's failure.
            version: Of the weights that the tokens are credited to.
        """
        self._codec, self._script, self._version = codec, script, version
        self.prompts: list[np.ndarray] = []

    def sample(
        self,
        group: str,
        prompt: np.ndarray,
        sampling: Sampling,
        *,
        seed: int | None = None,
        affinity: int | None = None,
    ) -> asyncio.Future[Answer]:
        """Answer at once; an answer over `max_tokens` is cut and says so."""
        self.prompts.append(prompt)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        ids = self._codec.encode(self._script(self._codec.decode([prompt])[0]))
        end = self._codec.end
        ids = ids if end is None else np.append(ids, end)
        finish: Finish = "stop"
        if len(ids) > sampling.max_tokens:
            ids, finish = ids[: sampling.max_tokens], "length"
        count = len(ids)
        done = Completion(
            request=group,
            index=0,
            token_ids=ids,
            logprobs=np.full(count, LOGPROB, np.float32),
            versions=np.full(count, self._version, np.int64),
            finish=finish,
        )
        future.set_result(Answer(done, self._codec.decode([ids])[0], engine=0))
        return future


def run_workflow(
    workflow: Any,
    tasks: Sequence[Task],
    codec: Codec,
    script: Callable[[str], str],
    *,
    scorer: Scorer | None = None,
    group_size: int = 1,
    max_tokens: int = 64,
    max_length: int = 512,
) -> list[Group]:
    """Run tasks against a script, as a training would.

    Args:
        workflow: Ready to run (from `rlsdk.load("workflow", …)`).
        tasks: What to solve.
        codec: Of the model whose tokens are used.
        script: The text so far -> the answer.
        scorer: Scores the rollouts; left out, every score is 0.
        group_size: Rollouts per task.
        max_tokens: Of one response.
        max_length: Of a whole conversation, in tokens.
    """
    policy: Any = ScriptedPolicy(codec, script)
    setting = Setting(codec=codec, client=policy, sampling=Sampling(max_tokens=max_tokens), max_length=max_length)
    return asyncio.run(Producer(workflow, scorer, seed=0).produce(tasks, setting, group_size, "test"))
