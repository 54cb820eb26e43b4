"""The subject of `rlsdk check model`: a tokenizer with its renderer, the configuration of its model, its tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from rlsdk import preflight
from rlsdk.components import Use
from rlsdk.config import defaults
from rlsdk.contracts import ReplacesTemplate
from rlsdk.errors import ConfigError
from rlsdk.messages import ToolCall
from rlsdk.plugins import Plugins, load
from rlsdk.renderers.text import TextRenderer
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.testing.findings import NotApplicable
from rlsdk.tool_calls import Call
from rlsdk.types import Message

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
"""Files of a hub model to download, without its weights."""


@attrs.frozen(eq=False, slots=False)
class ModelSubject:
    """A tokenizer with its renderer, and the known properties of its model.

    Attributes:
        codec: Tokenizer and renderer.
        tokenizer: The same tokenizer as a transformers object.
        config: Content of the model's `config.json`; empty if there is none.
        stops: Ids of the tokens that end an answer.
        max_length: `model.max_length` of the planned run; None if unknown.
    """

    codec: ChatTokenizer
    tokenizer: Any
    config: dict[str, Any] = attrs.field(factory=dict)
    stops: frozenset[int] = frozenset()
    max_length: int | None = None

    @cached_property
    def text(self) -> TextRenderer:
        """The renderer as text: itself or, if it creates tokens without text, the tokenizer's own template."""
        if isinstance(self.codec.renderer, TextRenderer):
            return self.codec.renderer
        template: TextRenderer = load("renderer", defaults.RENDERER.name)
        template.open(self.codec)
        return template

    @property
    def ends(self) -> frozenset[int]:
        """Ids of the tokens at which a run stops sampling."""
        return self.stops.union(self.codec.renderer.stop_tokens)

    @property
    def text_config(self) -> dict[str, Any]:
        """Configuration of the language model, nested in some architectures."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config


def open_subject(
    path: str,
    *,
    trust_remote_code: bool = False,
    max_length: int | None = None,
    renderer: Use = defaults.RENDERER,
    plugins: Plugins | None = None,
) -> ModelSubject:
    """Read the tokenizer and the configuration of a model, without its weights.

    Args:
        path: Folder of the model, or a hub id.
        trust_remote_code: Run code shipped with the tokenizer.
        max_length: `model.max_length` of the planned run.
        renderer: Renderer of the run.
        plugins: Where the renderer is looked up; None for the installed plugins.

    Raises:
        ConfigError: There is no tokenizer, or a file is not JSON.
    """
    folder = _folder(path)
    config, generation = _read(folder / "config.json"), _read(folder / "generation_config.json")
    tokenizer = _tokenizer(path, folder, trust_remote_code)
    given = (tokenizer.eos_token_id, config.get("eos_token_id"), generation.get("eos_token_id"))
    stops = {stop for each in given for stop in (each if isinstance(each, list) else [each]) if stop is not None}
    plugins = plugins or Plugins()
    rendering = plugins.resolve(plugins.reference("renderer", renderer.name, renderer.options))
    if isinstance(rendering, ReplacesTemplate) and (template := rendering.read_template()) is not None:
        tokenizer.chat_template = template
    codec = ChatTokenizer(tokenizer, renderer=rendering)
    return ModelSubject(codec, tokenizer, config, frozenset(stops), max_length)


def _folder(path: str) -> Path:
    """Return a model's folder; for a hub id, the cache folder, after downloading everything except weights."""
    if (folder := Path(path).expanduser()).is_dir():
        return folder
    if faults := preflight.hub_model(path):
        raise ConfigError(faults)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, allow_patterns=list(_SMALL_FILES)))


def _tokenizer(path: str, folder: Path, trust_remote_code: bool) -> Any:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(
            [
                f"{path!r} has no tokenizer: it holds none of {', '.join(_TOKENIZER_FILES)}. Copy these files from the "
                "model that it was trained from, or write them with tokenizer.save_pretrained"
            ]
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError([f"transformers cannot open the tokenizer of {path!r}: {reason}"]) from error


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        read = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError([f"{path} is not JSON: {error}"]) from error
    return read if isinstance(read, dict) else {}


_NAMES = ("rlsdk_lookup", "rlsdk_count")


def tools_of(conversation: Sequence[Message]) -> list[Mapping[str, Any]]:
    """Return schemas of two tools, with a text of a conversation in their descriptions."""
    parameters = {"type": "object", "properties": {"first": {"type": "string"}}, "required": ["first"]}
    return [
        {
            "type": "function",
            "function": {"name": name, "description": f"Look up {conversation[0].text}", "parameters": parameters},
        }
        for name in _NAMES
    ]


def round_trip_fault(codec: ChatTokenizer, conversation: Sequence[Message]) -> str | None:
    """Write calls with the texts of a conversation, parse them, and return how they differ; None if they match.

    Raises:
        NotApplicable: The renderer does not write calls, or no parser knows their format.
    """
    if not codec.tool_form:
        raise NotApplicable("the template writes no tool calls, or no installed parser knows their format")
    texts = [" ".join(("text", message.text)) for message in conversation]
    calls = [Call(_NAMES[0], {"first": texts[0], "count": 3})]
    # Llama 3.1's template enforces one call at a time, gpt-oss's assumes it
    if len(texts) > 1 and codec.renderer.write_calls([(name, {"a": 1}) for name in _NAMES]):
        calls.append(Call(_NAMES[1], {"second": texts[-1]}))
    got = load("tool_parser", codec.tool_form).parse(
        codec.renderer.write_calls([(call.name, call.arguments) for call in calls])
    )
    return None if got == calls else f"the parser {codec.tool_form!r} read {got}, but the template wrote {calls}"


def with_calls(conversation: Sequence[Message]) -> list[Message]:
    """Return a conversation with a call before each tool result, in place of the answer's text."""
    made, answer = list(conversation), -1
    for i, message in enumerate(conversation):
        if message.role == "assistant":
            answer = i
        elif message.role == "tool" and answer >= 0:
            call = ToolCall(message.name, {}, f"call{i:05}")
            made[answer] = attrs.evolve(made[answer], content="", tool_calls=(*made[answer].tool_calls, call))
            made[i] = attrs.evolve(message, tool_call_id=call.id)
    return made
