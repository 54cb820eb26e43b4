"""A policy with scripted answers, to run workflows and rewards without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlsdk.contracts import Completion, Finish, RewardSpec, Sampled, Sampling
from rlsdk.engines.client import Answer, GenerateRequest
from rlsdk.marks import reward
from rlsdk.rollout.chat import Prompt, RolloutContext, TokenChat
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.rollout.generator import RolloutGenerator
from rlsdk.scoring.scorer import RewardTerm, Scorer
from rlsdk.serving.recording import Recorder
from rlsdk.types import Group, Rollout, Task

LOGPROB = -0.5
"""Logprob of every scripted token, in nats."""


class ScriptedPolicy:
    """Stand-in for the engines that answers with the result of `script` for the text so far."""

    def __init__(self, codec: ChatTokenizer, script: Callable[[str], str], version: int = 0) -> None:
        """Set the script.

        Args:
            codec: Chat tokenizer of the model whose tokens are used.
            script: Function from the text so far to the answer; an exception counts as an engine failure.
            version: Weight version recorded for the tokens.
        """
        self._codec, self._script, self._version = codec, script, version
        self.prompts: list[np.ndarray] = []

    def sample(self, request: GenerateRequest) -> asyncio.Future[Answer]:
        """Answer immediately; truncate answers at `max_tokens`. A watch sees the tokens one by one."""
        self.prompts.append(request.prompt)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        ids = self._codec.encode(self._script(self._codec.decode([request.prompt])[0]))
        end = self._codec.end
        ids = ids if end is None else np.append(ids, end)
        finish: Finish = "stop"
        if len(ids) > request.sampling.max_tokens:
            ids, finish = ids[: request.sampling.max_tokens], "length"
        count = len(ids)
        done = Completion(
            request=request.group,
            index=0,
            token_ids=ids,
            logprobs=np.full(count, LOGPROB, np.float32),
            versions=np.full(count, self._version, np.int64),
            finish=finish,
        )
        if request.watch is not None:
            for i in range(count):
                arrays = {name: getattr(done, name)[i : i + 1] for name in ("token_ids", "logprobs", "versions")}
                request.watch(Sampled(request=request.group, index=0, start=i, **arrays))
        future.set_result(Answer(done, self._codec.decode([ids])[0], engine=0))
        return future


def scripted_chat(
    task: Task, codec: ChatTokenizer, script: Callable[[str], str], *, max_tokens: int = 64, max_length: int = 512
) -> TokenChat:
    """Open a chat about a task with a script, as passed to a workflow.

    Args:
        task: The task.
        codec: Chat tokenizer of the model whose tokens are used.
        script: Function from the text so far to the answer.
        max_tokens: Maximum number of tokens per response.
        max_length: Maximum number of tokens of the whole conversation.
    """
    context = _context(codec, script, max_tokens, max_length)
    return TokenChat(Prompt(task, *codec.prompt(task)), context, "test", 0)


def run_workflow(
    workflow: Any,
    tasks: Sequence[Task],
    codec: ChatTokenizer,
    script: Callable[[str], str],
    *,
    scorer: Scorer | None = None,
    group_size: int = 1,
    max_tokens: int = 64,
    max_length: int = 512,
) -> list[Group]:
    """Run a workflow on tasks against a script, as training does.

    Args:
        workflow: Workflow ready to run (from `rlsdk.load("workflow", …)`).
        tasks: Tasks to solve.
        codec: Chat tokenizer of the model whose tokens are used.
        script: Function from the text so far to the answer.
        scorer: Scorer of the rollouts, also for `chat.score()`; by default, a score is the sum of the rewards that the
            workflow gave, 0 if it gave none.
        group_size: Number of rollouts per task.
        max_tokens: Maximum number of tokens per response.
        max_length: Maximum number of tokens of a whole conversation.
    """
    context = _context(codec, script, max_tokens, max_length)
    scorer = scorer or Scorer([RewardTerm(RewardSpec("given"), _given)])
    return asyncio.run(RolloutGenerator(workflow, scorer, seed=0).produce(tasks, context, group_size, "test"))


@reward("given", reads_given=True)
def _given(rollout: Rollout) -> float:
    return sum(value for _, value in rollout.rewards)


def _context(codec: ChatTokenizer, script: Callable[[str], str], max_tokens: int, max_length: int) -> RolloutContext:
    policy: Any = ScriptedPolicy(codec, script)
    sampling = Sampling(max_tokens=max_tokens)
    return RolloutContext(
        codec=codec,
        client=policy,
        sampling=sampling,
        max_length=max_length,
        recorder=Recorder,
        vocabulary=codec.size,
    )
