"""LLM judge: a reward from a language model at an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import attrs

import rlsdk
from rlsdk.errors import ValueFault
from rlsdk.rewards import judge_verdict as verdict
from rlsdk.rewards.judge_client import EndpointError, JudgeClient
from rlsdk.rewards.judge_verdict import DEFAULT_RUBRIC, Form, NoVerdictError, Verdict
from rlsdk.types import Image, Rollout, Score

_RESERVED = frozenset({"model", "messages", "temperature", "max_tokens", "stream", "n"})


@rlsdk.reward("judge", runs="driver")
@attrs.frozen(kw_only=True)
class Judge:
    """A language model's score of a response, scaled to 0 … 1.

    The rubric is the question; the response is enclosed in delimiters that it cannot predict, and is never read as a
    template. If the judge cannot be reached, or its answer has no score on the scale, the score is invalid, never zero.

    Attributes:
        base_url: URL of an OpenAI-compatible endpoint without `/chat/completions`: `http://localhost:8000/v1`.
        model: Name of the judge at that endpoint.
        api_key_env: Environment variable that holds the API key, which does not belong in a config.
        rubric: Text, or the name of a .txt or .md file; `{prompt}`, `{response}` and `{reference}` are replaced by the
            task's prompt, the policy's response and the task's answer. Instructions on the score's format are added.
        verdict: Format of the judge's score: JSON with `score` (and `reason`), `[[7]]`, or the last number.
        scale: Minimum and maximum score, which become 0 and 1.
        where: Text to judge: the last message, or the whole response (all turns).
        images: Maximum number of images to send, the last ones of the conversation, to a judge that accepts images. 0:
            none; `<image>` replaces them.
        temperature: Sampling temperature of the judge; null omits it from the request.
        max_tokens: Maximum tokens of the judge's answer; null omits it from the request.
        extra: Additional fields of the request, such as `{reasoning_effort: low}`.
        max_characters: Maximum characters of each text; the middle of longer texts is omitted.
        max_concurrency: Maximum concurrent requests.
        retries: Number of retries after connection errors, status 429 and 5xx, with exponential backoff, or after the
            server's Retry-After if that is longer.
        timeout: Time limit in seconds for a verdict, including retries, excluding the wait for its turn.
        cache: File that stores verdicts; a response already judged by the same judge with the same rubric is not judged
            again.
    """

    base_url: str
    model: str
    api_key_env: str | None = None
    rubric: str = DEFAULT_RUBRIC
    verdict: Form = "json"
    scale: tuple[float, float] = (0.0, 10.0)
    where: Literal["message", "response"] = "message"
    images: int = 0
    temperature: float | None = 0.0
    max_tokens: int | None = 1024
    extra: Mapping[str, Any] = attrs.field(factory=dict)
    max_characters: int = 50_000
    max_concurrency: int = 16
    retries: int = 4
    timeout: float = 120.0
    cache: str | None = None
    _text: str = attrs.field(default="", init=False, repr=False)
    _endpoint: JudgeClient = attrs.field(default=None, init=False, eq=False, repr=False)
    _kept: _Kept | None = attrs.field(default=None, init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueFault(f"base_url must be a URL such as http://localhost:8000/v1; got {self.base_url!r}")
        if url.username or url.password or url.query:
            raise ValueFault("base_url must hold no password and no query; name an environment variable in api_key_env")
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise ValueFault(
                f"the environment variable {self.api_key_env!r}, named by api_key_env, is not set or is empty"
            )
        low, high = self.scale
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueFault(f"scale must be the minimum and maximum score, such as [0, 10]; got {list(self.scale)}")
        least = {"max_tokens": 1, "max_concurrency": 1, "max_characters": 2, "retries": 0, "images": 0}
        low_ones = [
            f"{name} is {value}"
            for name, limit in least.items()
            if (value := getattr(self, name)) is not None and value < limit
        ]
        if low_ones:
            raise ValueFault(f"too low: {', '.join(low_ones)}")
        if not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise ValueFault(f"timeout must be a number of seconds above 0; got {self.timeout}")
        if taken := sorted(_RESERVED & set(self.extra)):
            raise ValueFault(f"extra must not hold {', '.join(taken)}: the reward sets them itself")
        object.__setattr__(self, "_text", verdict.read_rubric(self.rubric))
        endpoint = JudgeClient(self.base_url, self.api_key_env, self.max_concurrency, self.retries, self.timeout)
        object.__setattr__(self, "_endpoint", endpoint)
        object.__setattr__(self, "_kept", None if self.cache is None else _Kept(self.cache))

    async def __call__(self, rollout: Rollout) -> Score:
        """Score one rollout.

        Args:
            rollout: Rollout to score; its task's answer, if any, is the reference.

        Returns:
            Score with the metrics `raw` (on the judge's scale) and `cached` (0 or 1), and the judge's reason; invalid
            without a verdict.
        """
        given = _given(rollout, self.where)
        images = rollout.images[-self.images :] if self.images else ()
        key = self._key(given, images) if self._kept else ""
        found = await asyncio.to_thread(self._kept.get, key) if self._kept else None
        if found is not None:
            return self._score(found, cached=True)
        try:
            found = verdict.read(await self._endpoint.ask(self._body(given, images)), self.verdict, self.scale)
        except (EndpointError, NoVerdictError) as error:
            return Score.invalid(f"the judge {self.model}: {error}")
        if self._kept:
            await asyncio.to_thread(self._kept.put, key, found)
        return self._score(found, cached=False)

    def _body(self, given: dict[str, str], images: Sequence[Image]) -> dict[str, Any]:
        sampling = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return {
            "model": self.model,
            "messages": verdict.messages(self._text, given, self.verdict, self.scale, self.max_characters, images),
            **{name: value for name, value in sampling.items() if value is not None},
            **self.extra,
        }

    def _key(self, given: dict[str, str], images: Sequence[Image]) -> str:
        """Compute the cache key of everything that determines a verdict."""
        settings = (self.base_url, self.model, self._text, self.verdict, self.scale, self.temperature, self.max_tokens)
        held: list[Any] = [*settings, dict(self.extra), self.max_characters, given]
        held += [[image.digest for image in images]] if images else []  # without images, the key of earlier versions
        return hashlib.sha256(json.dumps(held, sort_keys=True, default=str).encode()).hexdigest()

    def _score(self, found: Verdict, *, cached: bool) -> Score:
        low, high = self.scale
        return Score(
            (found.score - low) / (high - low),
            metrics={"raw": found.score, "cached": float(cached)},
            reason=found.reason,
        )


def _given(rollout: Rollout, where: Literal["message", "response"]) -> dict[str, str]:
    task = rollout.task
    prompt = task.prompt
    if not isinstance(prompt, str):
        prompt = "\n\n".join(f"{message.role}: {message.text}" for message in prompt)
    answer = task.answer
    reference = "" if answer is None else answer if isinstance(answer, str) else json.dumps(answer, default=str)
    return {
        "prompt": prompt,
        "response": rollout.text if where == "message" else rollout.response,
        "reference": reference,
    }


class _Kept:
    """Store of verdicts in an SQLite file that several runs may share."""

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._connect()) as connection, connection:
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, score REAL, reason TEXT)"
                )
                connection.execute("SELECT key, score, reason FROM verdicts LIMIT 1")
        except (OSError, sqlite3.Error) as error:
            raise ValueFault(f"cache {path!r} cannot be used as a file of verdicts: {error}") from error

    def get(self, key: str) -> Verdict | None:
        """Return the stored verdict; None if there is none."""
        with closing(self._connect()) as connection:
            row = connection.execute("SELECT score, reason FROM verdicts WHERE key = ?", (key,)).fetchone()
        return None if row is None else Verdict(*row)

    def put(self, key: str, found: Verdict) -> None:
        """Store a verdict."""
        with closing(self._connect()) as connection, connection:
            values = (key, found.score, found.reason)
            connection.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?)", values)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=30)
