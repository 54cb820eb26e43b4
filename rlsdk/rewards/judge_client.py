"""Client for chat completions of an OpenAI-compatible endpoint: bounded concurrency, retries within one time limit."""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import json
import math
import os
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs

from rlsdk.plurals import counted
from rlsdk.preflight import is_loopback

if TYPE_CHECKING:
    import httpx

MAX_BODY = 2**21
"""Maximum bytes of an answer; a verdict has a few hundred."""

_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
_MOST = 200


class EndpointError(Exception):
    """An endpoint gave no answer; the message says why, without secrets.

    Attributes:
        wait: Seconds until a retry, 0 if the endpoint gives none; None if a retry is useless.
    """

    def __init__(self, message: str, wait: float | None = None) -> None:
        self.wait = wait
        super().__init__(message)


@attrs.define
class _LoopConnections:
    client: httpx.AsyncClient
    slots: asyncio.Semaphore
    users: int = 0


@attrs.define(eq=False)
class JudgeClient:
    """Client of an endpoint for concurrent requests.

    Attributes:
        base_url: URL of the endpoint without `/chat/completions`.
        key_variable: Environment variable with the API key, read for each request.
        max_concurrency: Maximum number of concurrent requests.
        retries: Retries of a request after its first attempt.
        timeout: Seconds for a request with its retries, excluding the wait for its turn.
        attempt_timeout: Seconds for one attempt; None for no limit of its own.
    """

    base_url: str
    key_variable: str | None
    max_concurrency: int
    retries: int
    timeout: float
    attempt_timeout: float | None = None
    _session: _LoopConnections | None = attrs.field(default=None, init=False)

    async def ask(self, body: Mapping[str, Any]) -> str:
        """Return the text of the answer to one request.

        Raises:
            EndpointError: There is no answer, or not in time.
        """
        async with self._opened() as session, session.slots:
            last = ""
            try:
                async with asyncio.timeout(self.timeout) as limit:
                    for attempt in range(self.retries + 1):
                        try:
                            return await self._attempt(session.client, body)
                        except EndpointError as error:
                            last = str(error)
                            if error.wait is None:
                                raise
                            # Exponential backoff with jitter, so that clients do not all retry at once.
                            backoff = min(_FIRST_WAIT * 2.0**attempt, _LONGEST_WAIT) * random.uniform(0.5, 1.0)
                            wait = max(error.wait, backoff)
                            if asyncio.get_running_loop().time() + wait > (limit.when() or math.inf):
                                raise EndpointError(f"{last}; no time is left to retry in {wait:.0f} s") from error
                            if attempt < self.retries:
                                await asyncio.sleep(wait)
            except TimeoutError as error:
                before = f"; the last attempt before: {last}" if last else ""
                hint = "" if last or self.attempt_timeout else "; attempt_timeout makes it ask again sooner"
                raise EndpointError(f"no answer within {self.timeout:g} s{before}{hint}") from error
            raise EndpointError(f"{last} (after {counted(self.retries + 1, 'attempt')})")

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[_LoopConnections]:
        """Provide an HTTP client shared by concurrent requests, and close it after the last one, in its event loop."""
        if self._session is None:
            import httpx

            pool = httpx.Limits(max_connections=self.max_concurrency)
            proxy = not is_loopback(self.base_url)
            client = httpx.AsyncClient(timeout=None, limits=pool, follow_redirects=False, trust_env=proxy)
            self._session = _LoopConnections(client, asyncio.Semaphore(self.max_concurrency))
        session = self._session
        session.users += 1
        try:
            yield session
        finally:
            session.users -= 1
            if not session.users:
                self._session = None
                await session.client.aclose()

    async def _attempt(self, client: httpx.AsyncClient, body: Mapping[str, Any]) -> str:
        import httpx

        key = self._key()
        headers = {"accept-encoding": "identity", **({"authorization": f"Bearer {key}"} if key else {})}
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        try:
            async with (
                _attempt_limited(self.attempt_timeout),
                client.stream("POST", url, json=body, headers=headers) as response,
            ):
                text = await self._body(response)
                status, wait = response.status_code, _retry_after(response.headers)
        except httpx.RequestError as error:
            raise EndpointError(self._clean(f"{type(error).__name__}: {error} ({url})"), 0.0) from error
        if status == 200:
            return _content(text)
        again = status in (408, 429) or status >= 500
        where = "" if again or status in (400, 401, 403) else f" ({url})"  # the address may be wrong
        raise EndpointError(self._clean(f"status {status}: {text.strip()}") + where, wait if again else None)

    def _key(self) -> str | None:
        return os.environ.get(self.key_variable) if self.key_variable else None

    def _clean(self, text: str) -> str:
        """Return a server's message, shortened and without the API key, which some servers repeat."""
        key = self._key()
        text = text.replace(key, "[key]") if key else text
        return "".join(c if c.isprintable() else " " for c in text[:_MOST])

    async def _body(self, response: httpx.Response) -> str:
        held = bytearray()
        async for part in response.aiter_bytes():
            held += part
            if len(held) > MAX_BODY:
                raise EndpointError(f"its answer has more than {MAX_BODY} bytes")
        return held.decode("utf-8", "replace")


@asynccontextmanager
async def _attempt_limited(seconds: float | None) -> AsyncIterator[None]:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise EndpointError(f"no answer to an attempt within {seconds:g} s", 0.0) from error


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that a server asks to wait (`retry-after`, a number or a date); 0 without that header."""
    value = headers.get("retry-after")
    if value is None:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        until = _date(value)
        # By the server's own clock: this machine's may be wrong.
        now = _date(headers.get("date")) or datetime.datetime.now(datetime.UTC)
        seconds = 0.0 if until is None else (until - now).total_seconds()
    return max(seconds, 0.0) if math.isfinite(seconds) else 0.0


def _date(value: str | None) -> datetime.datetime | None:
    """Parse the date of a header; None if it is none."""
    try:
        found = email.utils.parsedate_to_datetime(value or "")
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)


def _content(text: str) -> str:
    try:
        choice = json.loads(text)["choices"][0]
        content, cut = choice["message"]["content"], choice.get("finish_reason") == "length"
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        # The page of a gateway, an `error` with status 200, or half an answer: the next attempt may succeed.
        raise EndpointError(f"its answer is not a chat completion: {text[:_MOST]!r}", 0.0) from error
    if not isinstance(content, str):
        raise EndpointError(f"its answer holds no text: {text[:_MOST]!r}")
    if cut:  # the verdict is at the end; an earlier one may be a draft, or half a number
        raise EndpointError(f"its answer was cut off at max_tokens, before its end: {content[-_MOST:]!r}")
    return content
