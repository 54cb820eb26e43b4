"""Play an episode of an environment with the policy in training."""

from __future__ import annotations

from typing import Any

import rlsdk
from rlsdk.contracts import Chat
from rlsdk.types import Rollout, Task
from rlsdk_verifiers import environments
from rlsdk_verifiers.play import Seat
from rlsdk_verifiers.rubric import score_of


@rlsdk.workflow("workflow")
async def workflow(task: Task, chat: Chat) -> Rollout:
    """Run an episode: the environment's own `run`, or one answer if it has none.

    It starts no server, client or program of verifiers, because the environment's agent is the policy itself. An
    episode of several turns is scored at its end, as in verifiers; `verifiers/rubric` returns that score.
    """
    env, theirs = environments.of(task)
    if not environments.is_played(env, theirs):
        await chat.sample()
        return chat.finish()
    trace = await _episode(env, theirs, chat)
    scored = score_of(trace)
    if not scored.valid:
        raise ValueError(scored.reason)
    turns = {"verifiers/turns": float(trace.num_turns)}
    return chat.finish(metrics={environments.SCORED: scored.value, **turns, **scored.metrics})


async def _episode(env: Any, task: Any, chat: Chat) -> Any:
    """Play an episode and return its trace; raise its error, if any."""
    import verifiers.v1 as vf

    ((name, config),) = environments.seats(env).items()
    seat = Seat(name, config, chat, environments.prompt_of(task.data))
    agents = vf.Agents(env.config, lambda *_: seat)
    await env.setup(agents)
    await env.run(task, agents)
    if seat.run_ is None:
        raise ValueError(f"{type(env).__name__}.run() did not run its agent")
    seat.run_.raise_failure()
    trace = await seat.run_.close()
    seat.run_.raise_failure()
    episode = vf.Episode(task=trace.task, traces=[trace], ok=trace.ok)
    await env.finalize(task, episode)
    return trace
