"""The chat templates in TRL's wheel, each with a tokenizer that has its control tokens, and the results of checks."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

import attrs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlsdk.errors import ConfigError
from rlsdk.renderers.text import TextRenderer
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.testing.model_check import ModelProperty, check_model
from rlsdk.testing.model_subject import ModelSubject, with_calls
from rlsdk.types import Message

CONFIG = {
    "max_position_embeddings": 1 << 16,
    "vocab_size": 4096,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "dtype": "bfloat16",
}
_CONTROLS = re.compile(r"<[|｜]?[^<>\s|]{1,40}[|｜]?>|<[|｜][^<>\s]{1,40}[|｜]>|\[/?[A-Z_]{1,40}\]")


@functools.cache
def shipped() -> dict[str, str]:
    """Templates by name, without the variants that TRL trains with; empty if TRL is not installed."""
    trl = importlib.util.find_spec("trl")
    if trl is None or trl.origin is None:
        return {}
    paths = sorted((Path(trl.origin).parent / "chat_templates").glob("*.jinja"))
    return {path.stem: path.read_text("utf-8") for path in paths if not path.stem.endswith("_training")}


def byte_tokenizer(template: str, controls: list[str], **special: Any) -> Any:
    """A tokenizer of bytes and control tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, **{"eos_token": "<|im_end|>", "pad_token": "<pad>", **special}
    )
    made.add_tokens(controls, special_tokens=True)
    made.chat_template = template
    return made


def subject_of(template: str) -> ModelSubject:
    """A template with a tokenizer of bytes that has every control token it names."""
    controls = sorted(set(_CONTROLS.findall(template)))
    made = byte_tokenizer(template, controls, eos_token="<|endoftext|>", bos_token="<s>")
    return ModelSubject(ChatTokenizer(made), made, CONFIG, frozenset({made.eos_token_id}))


@attrs.frozen
class TemplateResult:
    """Results of the check for a template.

    Attributes:
        question: What becomes of an answer once a question follows.
        result: What becomes of it once a tool's result follows.
        parser: Name of the parser that reads the calls it writes; empty for none.
        properties: Outcome of each property.
    """

    question: str
    result: str
    parser: str
    properties: tuple[ModelProperty, ...]

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of the template's row in docs/templates.md, without its name."""
        marks = {"True": "✓", "False": "✗"}
        parser = f"`{self.parser}`" if self.parser else "none"
        return (self.question, self.result, parser, *(marks.get(str(p.ok), "n/a") for p in self.properties))


@functools.cache
def tried(name: str) -> TemplateResult:
    """Check one of the templates."""
    subject = subject_of(shipped()[name])
    properties = tuple(check_model(subject))
    follows = [_followed(subject, role) for role in ("user", "tool")]
    return TemplateResult(*follows, subject.codec.tool_form, properties)


def _followed(subject: ModelSubject, role: str) -> str:
    history = [Message("user", "Q"), Message("assistant", "A"), Message(role, "R", "lookup" if role == "tool" else "")]
    text: TextRenderer = subject.text
    try:
        if text.rewrite([role]) is not None:
            return "thought dropped"
        if role == "user" or text.results_shown == "always":
            return "kept"
    except ConfigError:
        if role == "user":
            return "refused"
    try:
        bridge = subject.codec.bridge_tokens(with_calls(history), 1, plain=False)
    except ConfigError:
        return "refused"
    return "thought dropped" if bridge is None else "kept, after a call"
