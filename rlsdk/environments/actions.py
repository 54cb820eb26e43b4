"""Extraction of the action from a model's text."""

from __future__ import annotations

from typing import Any

import attrs

from rlsdk.errors import ValueFault

PATTERN = r"<answer>(.*?)</answer>"
"""How an action is marked in an answer, unless an environment says otherwise."""
LONGEST = 100_000
"""Characters beyond which a text holds no action: what a search takes grows with their square."""
SECONDS = 1.0
"""Of a search, beyond which nothing is found."""


@attrs.frozen
class ActionPattern:
    """Finds the action in what a model wrote.

    Attributes:
        pattern: A regular expression of the package `regex`, whose dot matches line breaks, too. Its first match
            counts: the group `action` of it, else its last group, else all of it.
        opening: With what the text may begin unseen, because it was written for the model (a prefill).
    """

    pattern: str = PATTERN
    opening: str = ""
    _compiled: Any = attrs.field(default=None, init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        import regex

        try:
            object.__setattr__(self, "_compiled", regex.compile(self.pattern, regex.DOTALL))
        except regex.error as error:
            raise ValueFault(f"action_pattern {self.pattern!r} is no regular expression: {error}") from error

    def find(self, text: str) -> str | None:
        """Extract the action, stripped of surrounding space; None if there is none.

        Args:
            text: Text from the model, with or without `opening`.
        """
        for whole in (text, self.opening + text) if self.opening else (text,):
            found = self._search(whole)
            if found is not None:
                return found
        return None

    def _search(self, text: str) -> str | None:
        if len(text) > LONGEST:
            return None
        try:
            match = self._compiled.search(text, timeout=SECONDS)
        except TimeoutError:
            return None
        if match is None:
            return None
        held = match["action" if "action" in self._compiled.groupindex else self._compiled.groups]
        return None if held is None else str(held).strip()
