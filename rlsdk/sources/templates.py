"""Prompt templates of Countdown tasks, and expert answers in the same format."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from rlsdk.types import Message

Template = Literal["base", "qwen-instruct", "chat", "compact"]

_PREFILL = "Let me solve this step by step.\n<think>"
_QUESTION = (
    "Take the numbers [{numbers}] and write an arithmetic expression that equals {target}. You may add, subtract, "
    "multiply and divide (+, -, *, /) and use brackets; every number must be used exactly once. First think between "
    "<think> and </think>, then give nothing but the expression between <answer> and </answer>, as in "
    "<answer> (1 + 2) / 3 </answer>."
)
_BASE = (
    "This is a conversation between a User, who asks, and an Assistant, who thinks a question over and answers it.\n"
    "User: {question}\n"
    "Assistant: {prefill}"
)
_QWEN = (
    "<|im_start|>system\nYou are a helpful assistant. You think a question over before you answer it.<|im_end|>\n"
    "<|im_start|>user\n{question}<|im_end|>\n"
    "<|im_start|>assistant\n{prefill}"
)


def prompt(
    template: Template, numbers: Sequence[int], target: int, system: str | None = None, prefill: str | None = None
) -> str | tuple[Message, ...]:
    """Return the prompt of a task: text, or messages if the template is `chat`.

    Args:
        template: Form of the prompt.
        numbers: Numbers to use.
        target: Number to reach.
        system: System message of a chat.
        prefill: Beginning of the answer in a chat; the other forms have their own.
    """
    if template == "compact":
        return f"{','.join(map(str, numbers))}>{target}:"
    question = _QUESTION.format(numbers=", ".join(map(str, numbers)), target=target)
    if template != "chat":
        return (_BASE if template == "base" else _QWEN).format(question=question, prefill=_PREFILL)
    messages = (("system", system), ("user", question), ("assistant", prefill))
    return tuple(Message(role, content) for role, content in messages if content)  # type: ignore[arg-type]


def demonstration(template: Template, expression: str, value: int | Fraction, prefill: str | None = None) -> str:
    """Return the continuation of a prompt that answers with an expression.

    Args:
        template: Form of the prompt.
        expression: Expression to answer with.
        value: Value of the expression.
        prefill: Beginning of the answer in a chat.
    """
    if template == "compact":
        return f"<answer>{expression}</answer>"
    thinking = template != "chat" or (prefill or "").rstrip().endswith("<think>")
    return f"{'' if thinking else '<think>'} {expression} = {value} </think>\n<answer> {expression} </answer>"
