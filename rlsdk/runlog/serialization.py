"""Lossless conversion of groups to bytes and back: arrays in numpy's format, the rest as JSON, no code (no pickle).

A prompt and a rollout are also given in a form for people to read.
"""

from __future__ import annotations

import base64
import io
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rlsdk.errors import ValueFault
from rlsdk.types import Group, Message, Rollout, Score, Task

FORMAT = 5
"""Newest format; a group without `Learned` arrays is written as format 4, which has none. Also read: 1 and 2, in which
messages had no calls and thoughts, and 3, without images."""
ARRAYS = ("token_ids", "loss_mask", "logprobs", "policy_versions")
LEARNED = ("learner_logprobs", "advantages", "entropy")
"""Per-token arrays stored with a trained group; logprobs and entropy are the learner's before the update."""
Learned = Mapping[str, Sequence[np.ndarray | None]]
"""Name of a field -> its values of each rollout, `[T]` as the rollout's tokens; None for one that was not trained."""
_WIDE = 2**63
"""Integers of at least this size are written in hexadecimal, since Python refuses to parse very long decimals."""
_PLAIN = frozenset({type(None), bool, str, float})
"""Types whose values are JSON as they are."""
_SCORE = tuple(field.name for field in attrs.fields(Score))
to_text = json.JSONEncoder(ensure_ascii=False).encode
"""Convert JSON values to text, as `json.dumps` would, which makes an encoder at each call."""


class OpaqueFault(ValueFault):
    """A task's answer or metadata holds a value that cannot be stored exactly."""


def encode(group: Group, learned: Learned | None = None) -> bytes:
    """Convert a group to bytes.

    Only plain data is stored: numbers, text, bytes, lists, tuples, mappings and arrays. Of other values in a task,
    only the type is noted, and then `decode` must be given the task.

    Args:
        group: The group.
        learned: The learner's per-token results, such as its logprobs; read by `decode_learned`.
    """
    # Each task object once; nearly all groups have only one.
    tasks = list({id(task): task for task in (group.task, *(r.task for r in group.rollouts))}.values())
    header = {
        "format": FORMAT if learned else 4,
        "uid": group.uid,
        "tasks": [_task(task) for task in tasks],
        "rollouts": [_rollout(r, tasks) for r in group.rollouts],
        "scores": [
            {**{name: getattr(score, name) for name in _SCORE}, "metrics": _to_json(score.metrics)}
            for score in group.scores
        ],
        "lengths": [len(r.token_ids) for r in group.rollouts],
    }
    routed = [r.routed_experts is not None for r in group.rollouts]
    header |= {"routed": routed} if any(routed) else {}
    if learned:
        header["learned"] = {name: [values is not None for values in each] for name, each in learned.items()}
    out = io.BytesIO()
    # UTF-8 with lone surrogates instead of escapes: two consecutive escaped halves would be read as one character.
    text = to_text(header).encode("utf-8", "surrogatepass")
    out.write(len(text).to_bytes(8, "little") + text)
    for name in ARRAYS if group.rollouts else ():
        joined = np.concatenate([getattr(r, name) for r in group.rollouts])
        _write_array(out, joined)
    if any(routed):
        _write_array(out, np.concatenate([r.routed_experts for r in group.rollouts if r.routed_experts is not None]))
    for each in (learned or {}).values():
        _write_array(
            out, np.concatenate([np.zeros(0, np.float32), *(v for v in each if v is not None)], dtype=np.float32)
        )
    return zlib.compress(out.getvalue(), 1)


def decode(payload: bytes, task: Task | None = None) -> Group:
    """Convert bytes from `encode` back to a group.

    Args:
        payload: Result of `encode`.
        task: The group's task, if available: the group and its rollouts then refer to this object.

    Raises:
        ValueFault: The bytes have a different format, or belong to another task.
        OpaqueFault: The task holds a value that cannot be stored, and was not given.
    """
    header, arrays, routing, _ = _read(payload)
    own = header["tasks"][0]
    if task is not None and (task.id, task.source) != (own["id"], own["source"]):
        raise ValueFault(f"a stored group belongs to task {own['id']!r} of {own['source']!r}, not to {task.id!r}")
    tasks = [task or _read_task(own), *(_read_task(each) for each in header["tasks"][1:])]
    cuts = np.cumsum(header["lengths"])[:-1]
    parts = zip(*(np.split(array, cuts) for array in arrays), strict=True)
    rollouts = [_read_rollout(each, tasks, part) for each, part in zip(header["rollouts"], parts, strict=True)]
    if routing is not None:
        routed = header["routed"]
        ends = np.cumsum([n if has else 0 for n, has in zip(header["lengths"], routed, strict=True)])
        experts = np.split(routing, ends[:-1])
        rollouts = [
            attrs.evolve(rollout, routed_experts=own) if has else rollout
            for rollout, own, has in zip(rollouts, experts, routed, strict=True)
        ]
    scores = [Score(**{**each, "metrics": _from_json(each["metrics"])}) for each in header["scores"]]
    named = {"uid": header["uid"]} if "uid" in header else {}  # older groups were stored without one
    return Group(tasks[0], rollouts, scores, **named)


def decode_learned(payload: bytes) -> dict[str, list[np.ndarray | None]]:
    """Read the learner's per-token results of a stored group; empty for a group without them.

    Raises:
        ValueFault: The bytes have another format.
    """
    header, _, _, source = _read(payload)
    return _learned(header, source)


def decode_tokens(payload: bytes) -> dict[str, list[np.ndarray | None]]:
    """Read all per-token values of a stored group, whatever its task holds: name -> values of each rollout, `[T]`.

    Raises:
        ValueFault: The bytes have another format.
    """
    header, arrays, _, source = _read(payload)
    cuts = np.cumsum(header["lengths"])[:-1]
    found: dict[str, list[np.ndarray | None]] = _learned(header, source)
    for name, array in zip(ARRAYS, arrays, strict=False):  # a group without rollouts has no arrays
        found[name] = [*np.split(array, cuts)]
    return found


def _learned(header: Mapping[str, Any], source: io.BytesIO) -> dict[str, list[np.ndarray | None]]:
    found: dict[str, list[np.ndarray | None]] = {}
    for name, trained in header.get("learned", {}).items():
        ends = np.cumsum([n if has else 0 for n, has in zip(header["lengths"], trained, strict=True)])
        parts = np.split(_read_array(source), ends[:-1])
        found[name] = [part if has else None for part, has in zip(parts, trained, strict=True)]
    return found


def _read(payload: bytes) -> tuple[dict[str, Any], list[np.ndarray], np.ndarray | None, io.BytesIO]:
    """Read JSON, `ARRAYS` and routing of a stored group; the stream is then at the learner's arrays."""
    try:
        source = io.BytesIO(zlib.decompress(payload))
        header = json.loads(source.read(int.from_bytes(source.read(8), "little")).decode("utf-8", "surrogatepass"))
        if header["format"] not in range(1, FORMAT + 1):
            raise ValueFault(f"a stored group has format {header['format']}; this rlsdk reads 1 to {FORMAT}")
        arrays = [_read_array(source) for _ in ARRAYS if header["rollouts"]]
        routing = _read_array(source) if any(header.get("routed", ())) else None
    except (zlib.error, ValueError, KeyError, EOFError) as error:
        raise ValueFault(f"a stored group cannot be read: {error}") from error
    return header, arrays, routing, source


def _write_array(out: io.BytesIO, array: np.ndarray) -> None:
    np.lib.format.write_array(out, array, allow_pickle=False)  # type: ignore[no-untyped-call]


def _read_array(source: io.BytesIO) -> np.ndarray:
    array: np.ndarray = np.lib.format.read_array(source, allow_pickle=False)  # type: ignore[no-untyped-call]
    return array


def _task(task: Task) -> dict[str, Any]:
    prompt = task.prompt if isinstance(task.prompt, str) else _messages(task.prompt)
    return {
        "id": task.id,
        "prompt": prompt,
        "answer": _to_json(task.answer),
        "metadata": _to_json(task.metadata),
        "source": task.source,
    }


def _read_task(header: Mapping[str, Any]) -> Task:
    prompt = (
        header["prompt"] if isinstance(header["prompt"], str) else tuple(_read_message(m) for m in header["prompt"])
    )
    return Task(header["id"], prompt, _from_json(header["answer"]), _from_json(header["metadata"]), header["source"])


def _messages(messages: Sequence[Message]) -> list[list[Any]]:
    # Only arguments of calls may hold what JSON lacks.
    return [[m.prompt, _to_json(m.as_json()) if m.tool_calls else m.as_json()] for m in messages]


def _read_message(header: Sequence[Any]) -> Message:
    if isinstance(header[1], str):  # formats 1 and 2: role, content, name and, in 2, whether it belongs to the prompt
        return Message(*header[:3], prompt=header[3] if len(header) > 3 else None)
    return attrs.evolve(Message.from_json(_from_json(header[1])), prompt=header[0])


def _rollout(rollout: Rollout, tasks: Sequence[Task]) -> dict[str, Any]:
    return {
        "task": next(i for i, task in enumerate(tasks) if task is rollout.task),
        "messages": _messages(rollout.messages),
        "status": rollout.status,
        "metrics": _to_json(rollout.metrics),
        "rewards": rollout.rewards,
        "trajectory": rollout.trajectory,
        "step": rollout.step,
        "state": rollout.state,
        **({"image_positions": rollout.image_positions.tolist()} if len(rollout.image_positions) else {}),
    }


def _read_rollout(header: Mapping[str, Any], tasks: Sequence[Task], arrays: Sequence[np.ndarray]) -> Rollout:
    given = {name: header[name] for name in ("status", "rewards", "trajectory", "step", "state")}
    given["image_positions"] = header.get("image_positions", ())
    messages = [_read_message(m) for m in header["messages"]]
    fields: dict[str, Any] = dict(zip(ARRAYS, arrays, strict=True))
    return Rollout(tasks[header["task"]], messages, **fields, metrics=_from_json(header["metrics"]), **given)


def _to_json(value: Any) -> Any:
    """Convert a value to JSON; types that JSON lacks become a mapping with a single key that begins with `$`."""
    if type(value) in _PLAIN or isinstance(value, str):
        return value
    if isinstance(value, int):
        return value if abs(value) < _WIDE else {"$int": hex(value)}
    if isinstance(value, list):
        return [_to_json(each) for each in value]
    if isinstance(value, Mapping):
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: v if type(v) in _PLAIN else _to_json(v) for k, v in value.items()}
        return {"$map": [[_to_json(k), _to_json(v)] for k, v in value.items()]}
    if type(value) is tuple:
        return {"$tuple": [_to_json(each) for each in value]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    return _tagged(value)


def _tagged(value: Any) -> dict[str, str]:
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        out = io.BytesIO()
        _write_array(out, np.asarray(value))
        tag = "$array" if isinstance(value, np.ndarray) else "$scalar"
        return {tag: base64.b64encode(out.getvalue()).decode()}
    return {"$opaque": f"{type(value).__module__}.{type(value).__qualname__}"}


def _from_json(header: Any) -> Any:
    """Restore a value that `_to_json` converted to JSON."""
    if isinstance(header, list):
        return [_from_json(each) for each in header]
    if not isinstance(header, dict):
        return header
    held: Any
    tag, held = next(iter(header.items())) if len(header) == 1 else ("", None)
    if not tag.startswith("$"):
        return {k: _from_json(v) for k, v in header.items()}
    match tag:
        case "$int":
            return int(held, 16)
        case "$tuple":
            return tuple(_from_json(each) for each in held)
        case "$bytes":
            return base64.b64decode(held)
        case "$array" | "$scalar":
            array = _read_array(io.BytesIO(base64.b64decode(held)))
            return array if tag == "$array" else array[()]
        case "$map":
            return {_from_json(k): _from_json(v) for k, v in held}
        case "$opaque":
            raise OpaqueFault(f"a task holds a {held}, which cannot be stored")
    raise ValueFault(f"a stored group holds {tag!r}, which this rlsdk does not know")


def prompt_text(task: Task) -> str:
    """Return a prompt as one text, with a line for each message of a chat."""
    return task.prompt if isinstance(task.prompt, str) else "\n".join(f"{m.role}: {m.text}" for m in task.prompt)


def exchange(rollout: Rollout) -> tuple[str, str]:
    """Return what the policy was shown first, and what was said from its first answer on, observations included."""
    messages, prompt = rollout.messages, rollout.task.prompt
    first = next((i for i, m in enumerate(messages) if m.role == "assistant" and not m.prompt), len(messages))
    begun = messages[:first]
    shown = [f"{m.role}: {m.text}" for m in begun] or [prompt_text(rollout.task)]
    # Not so for an agent's conversation, which may begin with anything, and after a first observation.
    if isinstance(prompt, str) and begun and begun[0].text == prompt:
        shown[0] = prompt
    said = [m.text if m.role == "assistant" else f"{m.role}: {m.text}" for m in messages[first:]]
    return "\n".join(shown), "\n".join(said)


def transcript(rollout: Rollout, score: Score) -> dict[str, Any]:
    """Convert a rollout to JSON values: conversation, score, and every token with its mask, logprob and version."""
    return {
        "task": rollout.task.id,
        "source": rollout.task.source,
        "trajectory": rollout.trajectory,
        "step": rollout.step,
        "status": rollout.status,
        "reward": score.value if score.valid else None,
        "valid": score.valid,
        "reason": score.reason,
        "metrics": {**rollout.metrics, **score.metrics},
        "rewards": [list(pair) for pair in rollout.rewards],
        "messages": [
            m.as_json() | ({"prompt": m.prompt} if m.role == "assistant" else {})  # true if it belongs to the prompt
            for m in rollout.messages
        ],
        "response": rollout.response,
        "token_ids": rollout.token_ids.tolist(),
        "loss_mask": rollout.loss_mask.tolist(),
        "logprobs": [float(value) for value in rollout.logprobs],
        "policy_versions": rollout.policy_versions.tolist(),
    }
