"""A stored group as JSON for the page: conversations by turn, scores by part, and tokens with their numbers."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlsdk.runlog.files import read_yaml
from rlsdk.runlog.serialization import decode, decode_learned, prompt_text, transcript
from rlsdk.runlog.tables import version_range
from rlsdk.types import Group, Rollout

log = logging.getLogger(__name__)
MOST_TEXT = 200_000
"""Maximum number of characters of a message; longer ones are cut and marked."""
MOST_TOKENS = 40_000
"""Maximum number of tokens of a rollout."""
_UNFINISHED = "\ufffd"


def group_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored group: its task, and each rollout's conversation and score, without tokens."""
    group = decode(row["payload"])
    summary = {name: row[name] for name in ("number", "step", "source", "state", "uses")}
    return {
        **summary,
        "task": group.task.id,
        "prompt": prompt_text(group.task)[:MOST_TEXT],
        "answer": _plain(group.task.answer),
        "metadata": _plain(dict(group.task.metadata)),
        "uid": group.uid,
        "rollouts": [_rollout(group, i) for i in range(len(group))],
    }


def _rollout(group: Group, i: int) -> dict[str, Any]:
    rollout, score = group.rollouts[i], group.scores[i]
    found = transcript(rollout, score)
    for name in ("token_ids", "loss_mask", "logprobs", "policy_versions", "response"):
        del found[name]
    versions = version_range(rollout)
    messages = []
    for message in found["messages"]:
        content = message["content"]
        if isinstance(content, str):
            cut = {"cut": len(content)} if len(content) > MOST_TEXT else {}
            messages.append({**message, "content": content[:MOST_TEXT], **cut})
        else:  # parts: an image must not be cut
            parts = [part if part.get("type") == "image" else _plain(part) for part in content]
            messages.append({**message, "content": parts})
    return {
        **found,
        "messages": messages,
        "parts": dict(score.metrics),
        "token_rewards": None if score.token_rewards is None else [list(pair) for pair in score.token_rewards],
        "tokens": int(rollout.loss_mask.sum()),
        "length": len(rollout.token_ids),
        "versions": None if None in versions else list(versions),
        "state": rollout.state,
    }


def _plain(value: Any, depth: int = 8) -> Any:
    """Return a value as JSON can hold it; other types, and values nested too deeply, become text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value[:MOST_TEXT]
    if depth and isinstance(value, Mapping):
        return {str(key): _plain(each, depth - 1) for key, each in value.items()}
    if depth and isinstance(value, list | tuple):
        return [_plain(each, depth - 1) for each in value]
    return repr(value)[:MOST_TEXT]


def tokens_json(row: Mapping[str, Any], i: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the tokens of a rollout with their texts and numbers; columns that were not stored are absent.

    `ratio` is the learner's probability before the update divided by the engine's.
    """
    rollout: Rollout = decode(row["payload"]).rollouts[i]
    learned = {name: each[i] for name, each in decode_learned(row["payload"]).items()}
    count = min(len(rollout.token_ids), MOST_TOKENS)
    ids, mask = rollout.token_ids[:count], rollout.loss_mask[:count]
    columns: dict[str, np.ndarray] = {"logprob": rollout.logprobs[:count]}
    if (logprobs := learned.get("learner_logprobs")) is not None:
        columns["learner_logprob"] = logprobs[:count]
        columns["ratio"] = np.exp(np.clip(logprobs[:count] - rollout.logprobs[:count], -20, 20))
    for stored, name in (("advantages", "advantage"), ("entropy", "entropy")):
        if (values := learned.get(stored)) is not None:
            columns[name] = values[:count]
    return {
        "ids": ids.tolist(),
        "texts": vocabulary.texts(ids.tolist()),
        "known": vocabulary.known,
        "mask": mask.astype(int).tolist(),
        "versions": rollout.policy_versions[:count].tolist(),
        "columns": {name: _numbers(values, mask) for name, values in columns.items()},
        "rewards": [[int(at), float(value)] for at, value in rollout.rewards],
        "left_out": len(rollout.token_ids) - count,
    }


def _numbers(values: np.ndarray, mask: np.ndarray) -> list[float | None]:
    return [
        round(float(v), 5) if sampled and math.isfinite(v) else None for v, sampled in zip(values, mask, strict=True)
    ]


@attrs.define
class Vocabulary:
    """Texts of a model's tokens, read from its `tokenizer.json`; without one, tokens are shown as ids."""

    _tokenizer: Any = None

    @property
    def known(self) -> bool:
        """True if a tokenizer was found."""
        return self._tokenizer is not None

    @classmethod
    def of(cls, folder: Path) -> Vocabulary:
        """Return the vocabulary of a run's model, from an export, the model's folder, or the local cache."""
        for path in _candidates(folder):
            file = path if path.is_file() else path / "tokenizer.json"
            if file.is_file():
                try:
                    from tokenizers import Tokenizer

                    return cls(Tokenizer.from_file(str(file)))
                except Exception as error:  # noqa: BLE001 - the library raises bare exceptions
                    log.debug("%s cannot be read: %s", file, error)
        return cls()

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token; if several make up one character, the last one gets it."""
        if self._tokenizer is None:
            return [f"⟨{number}⟩" for number in ids]
        found: list[str] = []
        before: list[int] = []
        waiting: list[int] = []
        for number in ids:
            waiting.append(int(number))
            # After the tokens before them: alone, words of Llama or Mistral lack the space in front.
            parts = (before, [*before, *waiting], waiting)
            begun, whole, alone = (str(self._tokenizer.decode(each, skip_special_tokens=False)) for each in parts)
            text = whole[len(begun) :] if whole.startswith(begun) else alone
            unfinished = text.endswith(_UNFINISHED) and len(waiting) < 4
            found.append("" if unfinished else text)
            if not unfinished:
                before, waiting = waiting, []
        return found


def _candidates(folder: Path) -> list[Path]:
    exports = sorted(folder.glob("checkpoints/step-*/export"), key=lambda path: path.stat().st_mtime, reverse=True)
    model = read_yaml(folder / "config.yaml").get("model") or {}
    model = model if isinstance(model, dict) else {"path": model}
    found = list(exports[:1])
    for name in filter(None, (model.get("tokenizer"), model.get("path"))):
        path = Path(str(name)).expanduser()
        found += [path] if path.is_absolute() else [path, *(parent / path for parent in folder.resolve().parents)]
        found += _cached(str(name))
    return found


def _cached(name: str) -> list[Path]:
    """Return the cached tokenizer of a hub model; nothing is downloaded."""
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        return []
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "tokenizer.json")
    except (ImportError, ValueError):
        return []
    return [Path(found)] if isinstance(found, str) else []
