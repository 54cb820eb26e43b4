"""Create traces of verifiers, the form in which tasks and environments read a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rlsdk.types import Message, Rollout


def new(task: Any, agent: Any, name: str) -> Any:
    """Create an empty trace of a task."""
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    kept = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    info = vf.AgentInfo(config=agent, name=name)
    return vf.Trace(task=kept, state=state_cls(type(task))(), agent=info)


def add(trace: Any, messages: Iterable[Any], *, sampled: bool = False) -> None:
    """Append messages of verifiers to the only conversation of a trace."""
    import verifiers.v1 as vf

    for message in messages:
        parent = len(trace.nodes) - 1 if trace.nodes else None
        trace.nodes.append(vf.MessageNode(parent=parent, message=message, sampled=sampled))


def add_answer(trace: Any, text: str, *, truncated: bool, prompt_tokens: int, tokens: int) -> None:
    """Append the policy's answer, with the record that a model server would have made of the call."""
    import verifiers.v1 as vf

    add(trace, [vf.AssistantMessage(content=text)], sampled=True)
    usage = vf.Usage(prompt_tokens=prompt_tokens, completion_tokens=tokens)
    reason = "length" if truncated else "stop"
    trace.calls.append(vf.ModelCall(node=len(trace.nodes) - 1, finish_reason=reason, usage=usage))


def theirs(messages: Sequence[Message]) -> list[Any]:
    """Convert messages to verifiers' form."""
    from verifiers.v1.dialects import parse_message

    return [parse_message({"role": message.role, "content": message.text}) for message in messages]


def of(rollout: Rollout, task: Any, agent: Any, name: str) -> Any:
    """Create the trace of a rollout of one prompt and one answer.

    Args:
        rollout: The conversation; the policy wrote everything after the prompt.
        task: A task of verifiers.
        agent: Configuration of the agent.
        name: Name of the agent.
    """
    trace = new(task, agent, name)
    *before, answer = rollout.messages
    add(trace, theirs(before))
    sampled = int(rollout.loss_mask.sum())
    truncated = rollout.status == "truncated"
    prompt_tokens = len(rollout.token_ids) - sampled
    add_answer(trace, answer.text, truncated=truncated, prompt_tokens=prompt_tokens, tokens=sampled)
    trace.stop("agent_completed")
    trace.ok = True
    return trace
