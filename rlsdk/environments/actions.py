"""Extraction of the action from a model's text."""

from __future__ import annotations

from typing import Any

import attrs

from rlsdk.errors import ValueFault

PATTERN = r"<answer>(.*?)</answer>"
"""Default pattern of an action in an answer."""
LONGEST = 100_000
"""Maximum number of characters to search, since the time of a search is quadratic in it."""
SECONDS = 1.0
"""Time limit of a search; one that takes longer finds nothing."""


@attrs.frozen
class ActionPattern:
    """Finds the action in a model's text.

    Attributes:
        pattern: Regular expression of the package `regex`; the dot also matches line breaks. The action is the group
            `action` of the first match, else its last group, else the whole match.
        opening: Prefill: text written by the environment that the model's answer continues.
    """

    pattern: str = PATTERN
    opening: str = ""
    _compiled: Any = attrs.field(default=None, init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        import regex

        try:
            object.__setattr__(self, "_compiled", regex.compile(self.pattern, regex.DOTALL))
        except regex.error as error:
            raise ValueFault(f"action_pattern {self.pattern!r} is not a regular expression: {error}") from error

    def find(self, text: str) -> str | None:
        """Extract the action, stripped of surrounding space; None if there is none.

        Args:
            text: Text from the model, with or without `opening`.
        """
        for whole in (text, self.opening + text) if self.opening else (text,):
            if len(whole) > LONGEST:
                continue
            try:
                match = self._compiled.search(whole, timeout=SECONDS)
            except TimeoutError:
                continue
            group = "action" if "action" in self._compiled.groupindex else self._compiled.groups
            if match is not None and match[group] is not None:
                return str(match[group]).strip()
        return None
