"""Sample groups, rollouts, texts and conversations for checking components and chat templates."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import attrs

from rlsdk.testing.findings import Case
from rlsdk.types import Group, Message, Rollout, Score, Status, Task

QUESTION = "What is 6 × 7? Answer in <answer> </answer>."
TASKS = (
    Task("text", QUESTION, "42"),
    Task("number", QUESTION, 42),
    Task("countdown", "Make 42 from 6 and 7.", {"target": 42, "numbers": [6, 7]}),
    Task("list", QUESTION, ["42"]),
    Task("mapping", QUESTION, {"answer": "42"}),
    Task("none", QUESTION),
)
"""Answers in the formats that rewards look for."""

RESPONSES = (
    "6 × 7 is 42. <answer>42</answer>",
    "<think>Six sevens.</think> \\boxed{42}",
    "<answer>6 * 7</answer>",
    "I do not know.",
)
MEGABYTE = 1_000_000

HOSTILE: tuple[tuple[str, str], ...] = (
    ("nothing", ""),
    ("space alone", " \n\t "),
    ("a megabyte of one letter", "a" * MEGABYTE),
    ("a megabyte of digits in the answer", f"<answer>{'9' * MEGABYTE}</answer>"),
    ("brackets nested 100,000 deep", f"<answer>{'(' * 100_000}</answer>"),
    ("50,000 opening tags", "<answer>" * 50_000),
    ("50,000 opened boxes", "\\boxed{" * 50_000),
    ("an answer that computes forever", "<answer>9**9**9**9</answer> \\boxed{9^{9^{9^{9}}}}"),
    ("a factorial that computes forever", "<answer>10000000!</answer> \\boxed{10000000!}"),
    ("division by zero", "<answer>1/0</answer> \\boxed{\\frac{1}{0}}"),
    ("invalid numbers", "<answer>nan</answer> <answer>inf</answer> \\boxed{1e999}"),
    ("code", "<answer>__import__('os').getcwd()</answer> \\boxed{__import__('os').getcwd()}"),
    ("bytes that are not text, as decoded", "\x00\x01\ufffd\ufffd<answer>\ufffd</answer>"),
    ("Unicode", "<answer>４２ ٤٢ 𝟒𝟐 ½ ∞ 🙂 \u202e24\u202c e\u0301</answer> \\boxed{４２}"),
    ("a pattern that backtracks", f"<answer>{'a ' * 2_000}!</answer>"),
)
"""(description, text) of what a policy may write."""


def rollout(task: Task, response: str, status: Status = "finished") -> Rollout:
    """Return a rollout with a prompt of two tokens and one response token per character, up to 32."""
    count = min(max(len(response), 1), 32)
    prompt = (Message("user", task.prompt),) if isinstance(task.prompt, str) else task.prompt
    return Rollout(
        task,
        (*prompt, Message("assistant", response)),
        token_ids=range(count + 2),
        loss_mask=[False] * 2 + [True] * count,
        logprobs=[0.0] * 2 + [-0.5] * count,
        policy_versions=[-1] * 2 + [0] * count,
        status=status,
    )


def group(values: Sequence[float | None], statuses: Sequence[Status] = ()) -> Group:
    """Return a group with these scores; None is an invalid one."""
    task = TASKS[0]
    statuses = statuses or ["finished"] * len(values)
    rollouts = [rollout(task, f"answer {i}", status) for i, status in enumerate(statuses)]
    scores = [Score.invalid("timed out") if value is None else Score(value) for value in values]
    return Group(task, rollouts, scores)


def ordinary_groups() -> list[Case[Group]]:
    """Return groups with distinct rewards."""
    statuses: list[Status] = ["finished", "truncated", "finished", "finished"]
    return [
        Case("rewards that differ", group((0.0, 1.0, 0.25, 0.5))),
        Case("one truncated rollout", group((1.0, 0.5, 0.0, 2.0), statuses)),
    ]


def degenerate_groups() -> list[Case[Group]]:
    """Return groups with little information."""
    return [
        Case("one rollout", group((1.0,))),
        Case("equal rewards", group((0.1, 0.1, 0.1))),
        Case("all truncated", group((0.0, 1.0), ["truncated", "truncated"])),
        Case("all invalid", group((None, None))),
        Case("no rollout", group(())),
    ]


def smaller(held: Group) -> Iterator[Group]:
    """Yield the group without one of its rollouts."""
    for left_out in range(len(held) if len(held) > 1 else 0):
        yield part(held, [i for i in range(len(held)) if i != left_out])


def part(held: Group, index: Sequence[int]) -> Group:
    """Return the rollouts `index` of a group, in that order."""
    return attrs.evolve(held, rollouts=[held.rollouts[i] for i in index], scores=[held.scores[i] for i in index])


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
"""Pieces of text: Unicode, inner white space, and characters special to Jinja, JSON and Markdown."""


def conversations(count: int, seed: int = 0) -> list[tuple[Message, ...]]:
    """Return conversations that begin with a question, shortest first; the first few are equal for all seeds.

    Each text occurs once, so that it can be found in a rendering. No text begins or ends with white space, which many
    templates trim.
    """
    shapes = ["u", "uau", "uat", "su", "suau", "uatau", "uauau", "uatt"]
    draw = random.Random(seed)
    while len(shapes) < count:
        turns = "".join(draw.choice(("au", "au", "at", "att")) for _ in range(draw.randint(1, 4)))
        shapes.append(draw.choice(("", "s")) + "u" + turns)
    made = [_conversation(shape, draw if i >= 8 else None) for i, shape in enumerate(shapes[:count])]
    return sorted(made, key=lambda messages: (len(messages), sum(len(m.text) for m in messages)))


def smaller_conversations(messages: Sequence[Message]) -> Iterator[tuple[Message, ...]]:
    """Yield conversations with fewer messages, or with one word less in a message; the first words are kept."""
    for end in range(1, len(messages)):
        yield tuple(messages[:end])
    for begin in range(len(messages) - 1):
        yield (*messages[:begin], *messages[begin + (1 if messages[begin].role == "system" else 2) :])
    for i, message in enumerate(messages):
        words = message.text.split(" ")
        for left_out in range(1, len(words)):
            content = " ".join(words[:left_out] + words[left_out + 1 :])
            yield (*messages[:i], attrs.evolve(message, content=content), *messages[i + 1 :])


def describe(messages: Sequence[Message]) -> str:
    """Format a conversation on one line."""
    return " | ".join(f"{message.role}: {message.text!r}" for message in messages)


def _conversation(shape: str, draw: random.Random | None) -> tuple[Message, ...]:
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = []
    for i, letter in enumerate(shape):
        more = "" if draw is None else " ".join(draw.choices(_WORDS, k=draw.randint(0, 4)))
        text = f"rlsdk{letter}{i} {more}".strip()
        name = "lookup" if letter == "t" else ""
        messages.append(Message(roles[letter], text, name))  # type: ignore[arg-type]
    return tuple(messages)
