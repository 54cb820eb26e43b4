"""Random conversations on which a tokenizer and its chat template are checked."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rlsdk.types import Message

_WORDS = (
    "a",
    "12",
    "x y",
    "é",
    "日本",
    "🙂",
    "\u0301e",
    "{{ x }}",
    "{% if %}",
    "\\n",
    "'\"",
    "line\nline",
    "<b>",
    "#!",
)
"""Pieces of texts: unicode, white space within, and what means something to Jinja, JSON and Markdown."""


def conversations(count: int, seed: int = 0) -> list[tuple[Message, ...]]:
    """Return conversations that begin with a question, the shortest first; the first few are the same for each seed.

    Each text occurs once, so that it can be found in a rendering. None begins or ends with white space, which many
    templates trim.

    Args:
        count: Number of conversations.
        seed: Seed of the random ones.
    """
    shapes = ["u", "uau", "uat", "su", "suau", "uatau", "uauau", "uatt"]
    draw = random.Random(seed)
    while len(shapes) < count:
        turns = "".join(draw.choice(("au", "au", "at", "att")) for _ in range(draw.randint(1, 4)))
        shapes.append(draw.choice(("", "s")) + "u" + turns)
    made = [_conversation(shape, draw if i >= 8 else None) for i, shape in enumerate(shapes[:count])]
    return sorted(made, key=lambda messages: (len(messages), sum(len(m.content) for m in messages)))


def describe(messages: Sequence[Message]) -> str:
    """Write a conversation on one line."""
    return " | ".join(f"{message.role}: {message.content!r}" for message in messages)


def _conversation(shape: str, draw: random.Random | None) -> tuple[Message, ...]:
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = []
    for i, letter in enumerate(shape):
        more = "" if draw is None else " ".join(draw.choices(_WORDS, k=draw.randint(0, 4)))
        text = f"rlsdk{letter}{i} {more}".strip()
        name = "lookup" if letter == "t" else ""
        messages.append(Message(roles[letter], text, name))  # type: ignore[arg-type]
    return tuple(messages)
