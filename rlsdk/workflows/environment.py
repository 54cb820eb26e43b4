"""Episodes in an environment: observations are messages to the policy, and its answers are actions."""

from __future__ import annotations

import hashlib

import attrs

import rlsdk
from rlsdk.components import Use
from rlsdk.contracts import Chat, EnvHandle
from rlsdk.errors import DataError, OptionError
from rlsdk.limits import Count, Positive
from rlsdk.options import CONVERTER
from rlsdk.plugins import faults_of
from rlsdk.types import Rollout, Status, Task
from rlsdk.workflows.limits import limited

NAME = "workflow 'environment'"


@rlsdk.workflow("environment", rewards=True)
@attrs.frozen(kw_only=True)
class EnvironmentWorkflow:
    """Plays an episode in any environment: observations are messages to the policy, and its answers are actions.

    The first observation follows the task's prompt, unless it equals the prompt. The seed is `seed` in the task's
    metadata, or derived from the task's id, so that all rollouts of a group start in the same state. Each reward is
    placed on the last token of its answer. If a call of the environment takes too long, it is abandoned and its rollout
    fails; others continue.

    Attributes:
        environment: The environment with its options; by default, `environment` in each task's metadata.
        max_turns: Number of actions after which the rollout is truncated.
        max_tokens: Maximum tokens of an answer; by default, the run's setting.
        step_timeout: Time limit of one call of the environment, in seconds.
        timeout: Seconds from the first observation until the rollout is truncated; by default, no limit.
    """

    environment: Use | None = None
    max_turns: Count = 20
    max_tokens: Count | None = None
    step_timeout: Positive = 30.0
    timeout: Positive | None = None

    def __attrs_post_init__(self) -> None:
        if self.environment is not None:
            faults = faults_of("environment", self.environment, "environment")
            if faults:
                raise OptionError(NAME, faults)

    async def run(self, task: Task, chat: Chat) -> Rollout:
        """Play one episode."""
        env = chat.world(*self.episode(task), step_timeout=self.step_timeout)
        metrics: dict[str, float] = {}
        status: Status = "truncated"
        try:
            first = (await env.reset()).content  # waiting for a free worker does not count as episode time
            last = task.prompt if isinstance(task.prompt, str) else task.prompt[-1].content if task.prompt else ""
            if first != last:
                chat.say(first)
            async with limited(self.timeout):
                status = await self._play(env, chat, metrics)
        finally:
            env.close()
        return chat.finish(status=status, metrics=metrics)

    def episode(self, task: Task) -> tuple[Use, int]:
        """Return the environment of a task's episodes, and their seed.

        Raises:
            DataError: The task names no environment and the workflow has none, or its seed is not an integer.
        """
        return self.environment or environment_of(task), seed_of(task)

    async def _play(self, env: EnvHandle, chat: Chat, metrics: dict[str, float]) -> Status:
        for _ in range(self.max_turns):
            answer = await chat.sample(max_tokens=self.max_tokens)
            if chat.status == "aborted":
                return "aborted"
            step = await env.step(answer.text)
            chat.reward(step.reward)
            metrics.update(step.metrics)
            if step.observation.content:
                chat.say(step.observation.content)
            if step.terminated or step.truncated:
                return "finished" if step.terminated else "truncated"
        return "truncated"


def environment_of(task: Task) -> Use:
    """Return the environment that a task names.

    Raises:
        DataError: The task names no environment.
    """
    given = task.metadata.get("environment")
    if given is None:
        raise DataError(
            f"task {task.id!r} names no environment in its metadata, and {NAME} has none: set workflow.environment, "
            "or take a source whose tasks name one, such as `environments`"
        )
    try:
        return CONVERTER.structure(given, Use)
    except ValueError as error:
        raise DataError(f"task {task.id!r}: metadata 'environment' {error}") from error


def seed_of(task: Task) -> int:
    """Return the seed of an episode.

    Raises:
        DataError: The task's seed is not an integer.
    """
    given = task.metadata.get("seed")
    if given is None:
        return int.from_bytes(hashlib.blake2b(task.id.encode(), digest_size=4).digest(), "big") >> 1
    if type(given) is not int:
        raise DataError(f"task {task.id!r}: metadata 'seed' is {given!r}; expected a whole number")
    return given
