"""Convert text to tokens and back, once each way: sampled tokens are never retokenized."""

from __future__ import annotations

import itertools
import logging
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import attrs
import numpy as np
import regex

from rlsdk.config import Plan, defaults
from rlsdk.contracts import Call, Renderer, ToolParser
from rlsdk.engines.pretrained import open_tokenizer
from rlsdk.errors import ConfigError
from rlsdk.plugins import load, names
from rlsdk.types import Content, Image, Message, Task, ToolCall
from rlsdk.vision import Vision

_log = logging.getLogger(__name__)
_PROBE = Call("rlsdk_lookup", {"key": "word", "count": 3})
NOTHING = np.empty(0, np.int64)
NOTHING.setflags(write=False)
CUT = "\ufdd0"
"""Mark at which a text is cut before it is tokenized: a Unicode noncharacter, which no text contains."""
_NO_TEXT = re.compile(f"[{CUT}\ud800-\udfff]")
_HALVES = re.compile("[\ud800-\udfff]")
"""Halves of surrogate pairs, which JSON may contain but no tokenizer accepts."""
_PARALLEL = 1 << 15
"""Tokens from which several texts are decoded in threads. The call waits for them and must then get back the
interpreter's lock, which on a busy machine takes milliseconds: longer than to decode a few thousand tokens."""
_KEPT_TEXTS, _KEPT_LENGTH = 4096, 1024
"""Number of texts whose tokens are kept, and their maximum length in characters. Rollouts of a group read the same
observations, which an environment also repeats."""


class ChatTokenizer:
    """A model's tokenizer together with its renderer.

    A prompt of messages is rendered, by default with the tokenizer's chat template. A text prompt stays text: later
    messages are appended after a separator.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        separator: str = "\n",
        keep_history: bool = False,
        renderer: Renderer | None = None,
        tool_parser: ToolParser | None = None,
        vision: Vision | None = None,
    ) -> None:
        """Wrap a tokenizer.

        Args:
            tokenizer: A transformers tokenizer.
            separator: Text before each message of a conversation that started as text.
            keep_history: True to continue even if the renderer would change earlier answers.
            renderer: Renderer of conversations; default: the tokenizer's chat template.
            tool_parser: Parser of tool calls; default: the one that reads the renderer's syntax.
            vision: Image processing of the model; None for a text model.
        """
        self.vision = vision
        self.tokenizer, self.separator = tokenizer, separator
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._direct = self._fast if adds_nothing(tokenizer) else None
        self._single: dict[str, int | None] = {}
        self._longest = 0
        self._told = False
        self.controls = frozenset(control_tokens(tokenizer))
        added = sorted(self.controls)
        self._controls = regex.compile("|".join(map(regex.escape, added))) if added else None
        self._control_starts = {text[0] for text in added}
        self._kept: dict[str, np.ndarray] = {}
        self._tool_parser = tool_parser
        self.renderer: Renderer = load("renderer", defaults.RENDERER.name) if renderer is None else renderer
        self.renderer.open(self, keep_history=keep_history)

    @classmethod
    def of(cls, plan: Plan, tokenizer: Any = None) -> ChatTokenizer:
        """Return the tokenizer of a plan's model, with the renderer and the tool parser that the plan names."""
        model = plan.model
        return cls(
            open_tokenizer(model) if tokenizer is None else tokenizer,
            separator=model.separator,
            keep_history=model.keep_history,
            renderer=plan.plugins.resolve(plan.renderer),
            tool_parser=None if plan.tool_parser is None else plan.plugins.resolve(plan.tool_parser),
            vision=Vision(model),
        )

    @cached_property
    def tool_parser(self) -> ToolParser:
        """Parser of tool calls: the chosen one, the one that reads the renderer's syntax, or the default."""
        if self._tool_parser is not None:
            return self._tool_parser
        if not self.tool_form and self._written_call:
            _log.warning("%s; %s is used", self._unread, defaults.TOOL_PARSER.name)
        found: ToolParser = load("tool_parser", self.tool_form or defaults.TOOL_PARSER.name)
        return found

    @cached_property
    def tool_form(self) -> str:
        """Name of the tool parser that reads the renderer's syntax; empty if there is none."""
        text = self._written_call
        parsers: dict[str, ToolParser] = (
            {name: load("tool_parser", name) for name in names("tool_parser")} if text else {}
        )
        readers = [name for name, parser in parsers.items() if parser.parse(text) == [_PROBE]]
        # Several read Llama 3's calls; the one that also writes them knows what else its models may write.
        pairs = [(_PROBE.name, _PROBE.arguments)]
        writers = (name for name in readers if parsers[name].write(pairs).split() == text.split())
        return next(writers, readers[0] if readers else "")

    @cached_property
    def _written_call(self) -> str:
        """A call as the renderer writes it; empty if it writes none."""
        return self.renderer.write_calls([(_PROBE.name, _PROBE.arguments)]) if self.renderer.usable else ""

    @property
    def _unread(self) -> str:
        return (
            f"no tool parser reads the calls that the chat template of {self.name!r} writes "
            f"({reprlib.repr(self._written_call)})"
        )

    def expect_calls(self) -> None:
        """Check that a policy whose prompt lists tools can call them.

        Raises:
            ConfigError: No parser reads the calls that the renderer writes, and none was chosen.
        """
        if self._tool_parser is not None or self.tool_form:
            return
        if self._written_call:
            raise ConfigError(
                [
                    f"{self._unread}, so every call would be taken for a final answer. Set model.tool_parser to one "
                    "that reads them (docs/howto/tool_parser.md shows how to write one), or to one whose syntax the "
                    "policy should learn"
                ]
            )
        if not self._told:
            self._told = True
            _log.warning(
                "the chat template of %r lists tools, but writes no calls; their syntax is taken to be that of %s. "
                "If the model writes them differently, set model.tool_parser",
                self.name,
                defaults.TOOL_PARSER.name,
            )

    def prompt(self, task: Task) -> tuple[tuple[Message, ...], np.ndarray]:
        """Return a prompt's messages and tokens, int64 `[p]`; a final assistant message is left open as a prefill."""
        if isinstance(task.prompt, str):
            messages: tuple[Message, ...] = (Message("user", task.prompt),)
            return messages, self.prompt_tokens(messages, plain=True)
        if not self.renderer.usable:
            raise ConfigError(
                [
                    f"task {task.id!r} is a conversation, but the tokenizer {self.name!r} has no chat template; name "
                    "a file with one (model.renderer: {use: template, file: FILE}), set model.tokenizer to a tokenizer "
                    "that has one, or use prompts that are text (for files whose prompts are single messages: columns: "
                    "{prompt: prompt.0.content})"
                ]
            )
        return task.prompt, self.prompt_tokens(task.prompt, plain=False)

    def prompt_tokens(
        self, messages: Sequence[Message], *, plain: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> np.ndarray:
        """See `Renderer.prompt_tokens`; a conversation that is `plain` started as text."""
        if plain:
            self._refuse_images(messages)
            text = self.separator.join(m.text for m in messages if m.text)
            begin, _, more = text.partition(CUT)
            return self._array([*self._ids(_whole(begin), special=True), *self.encode(more)])
        return self._checked(self.renderer.prompt_tokens(messages, self._tools_as_data(tools)), messages)

    def bridge_tokens(
        self,
        messages: Sequence[Message],
        new: int,
        *,
        plain: bool,
        ended: np.ndarray = NOTHING,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> np.ndarray | None:
        """See `Renderer.bridge_tokens`; a conversation that is `plain` started as text, without headers and ends."""
        later = messages[len(messages) - new :]
        if plain:
            self._refuse_images(later)
            return self.encode("".join(self.separator + m.text for m in later))
        found = self.renderer.bridge_tokens(messages, new, ended=ended, tools=self._tools_as_data(tools))
        return None if found is None else self._checked(found, later)

    @staticmethod
    def _refuse_images(messages: Sequence[Message]) -> None:
        if any(message.images for message in messages):
            raise ConfigError(
                [
                    "a message contains an image, but the conversation began as text, without a chat template; give "
                    "the task's prompt as messages (for a source with the option form, form: chat)"
                ]
            )

    def _checked(self, ids: np.ndarray, messages: Sequence[Message]) -> np.ndarray:
        """Return tokens unchanged after checking that their number of image tokens matches the messages' images."""
        images = [image for message in messages for image in message.images]
        if images:
            wanted = sum(map(self._sight.count, images))
            found = int(np.count_nonzero(ids == self._sight.token))
            if found != wanted:
                raise ConfigError(
                    [
                        f"the renderer of {self.name!r} gives {len(images)} images {found} tokens, but the model needs "
                        f"{wanted}; a renderer must pass its text through codec.with_images, and no text of a prompt "
                        "may contain the model's image token"
                    ]
                )
        return ids

    def with_images(self, text: str, images: Sequence[Image]) -> str:
        """Replace each image mark in a rendered text by the text of its image tokens.

        Raises:
            ConfigError: The model does not read images, or the text does not have one mark per image.
        """
        if not images:
            return text
        pieces = text.split(self._sight.mark(self.tokenizer))
        if len(pieces) != len(images) + 1:
            raise ConfigError(
                [
                    f"the chat template of {self.name!r} shows {len(pieces) - 1} of {len(images)} images; set "
                    "model.tokenizer to a folder whose template writes parts of the type image, and put no image "
                    "marks into the text of prompts"
                ]
            )
        shown = [self._sight.expansion(image, self.tokenizer) for image in images]
        return pieces[0] + "".join(a + b for a, b in zip(shown, pieces[1:], strict=True))

    @property
    def _sight(self) -> Vision:
        if self.vision is None:
            raise ConfigError([f"a message contains an image, but {self.name!r} is opened for text only"])
        return self.vision

    def image_token(self, messages: Sequence[Message]) -> int | None:
        """Return the id of the image token; None if no message contains an image."""
        # Called at every turn for all messages so far, most of which are text.
        seen = any(message.images for message in messages if not isinstance(message.content, str))
        return self._sight.token if seen else None

    def encode(self, text: str) -> np.ndarray:
        """Tokenize text within a conversation, int64; no special tokens are added."""
        if not text:
            return NOTHING
        found = self._kept.get(text)
        if found is None:
            texts = [piece for piece in _whole(text).split(CUT) if piece]
            found = self._array([token for piece in texts for token in self._ids(piece)])
            if len(text) <= _KEPT_LENGTH:
                if len(self._kept) >= _KEPT_TEXTS:
                    self._kept.clear()
                self._kept[text] = found
        return found

    def _ids(self, text: str, *, special: bool = False) -> list[int]:
        """Tokenize a text, with `special` tokens around it or without.

        Transformers' call takes four times as long for a short text.
        """
        inner = self._direct
        if inner is not None and inner.truncation is None and inner.padding is None:
            direct: list[int] = inner.encode(text, add_special_tokens=special).ids
            return direct
        found: list[int] = self.tokenizer(text, add_special_tokens=special).input_ids
        return found

    def as_data(self, text: str) -> str:
        """Insert cuts into a text, so that names of control tokens in it are tokenized as ordinary characters.

        Otherwise an observation or a tool result could end its own turn and impersonate another role. Control tokens
        are all tokens added to the vocabulary: role headers, `<tool_call>` and `</think>` as well as the end of text.
        Unpaired surrogates become U+FFFD.
        """
        if not text.isascii():
            text = _NO_TEXT.sub("\N{REPLACEMENT CHARACTER}", text)
        if self._controls is None or not any(start in text for start in self._control_starts):
            return text
        if self._controls.search(text) is None:
            return text
        cuts = [0, *(m.start() + 1 for m in self._controls.finditer(text, overlapped=True)), len(text)]
        return CUT.join(text[a:b] for a, b in itertools.pairwise(cuts))

    def _tools_as_data(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Cut every text in the JSON schemas of tools, which may come from a server."""
        return [_mapped(tool, self.as_data) for tool in tools]

    def content_as_data(self, content: Content) -> Content:
        """Cut every text of a message's content as `as_data` does."""
        return _content(content, self.as_data)

    def message_as_data(self, message: Message) -> Message:
        """Cut every text of a message as `as_data` does."""
        return _with_texts(message, self.as_data)

    @staticmethod
    def readable(message: Message) -> Message:
        """Return a message without the cuts of `as_data`."""
        return _with_texts(message, lambda text: text.replace(CUT, ""))

    def decode(self, ids: Sequence[np.ndarray]) -> list[str]:
        """Decode several sequences without special tokens."""
        if self._fast is not None and sum(map(len, ids)) < _PARALLEL:
            return [self._fast.decode(i.tolist(), skip_special_tokens=True) for i in ids]
        if self._fast is not None:
            return list(self._fast.decode_batch([i.tolist() for i in ids], skip_special_tokens=True))
        plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return list(self.tokenizer.batch_decode(list(ids), **plain))

    def decoder(self) -> Callable[[int], str]:
        """Return a streaming decoder: a function from a token to the text that it adds, without special tokens.

        A token that ends within a character adds nothing; the next one adds the whole character.
        """
        if self._fast is not None:
            from tokenizers.decoders import DecodeStream

            stream, fast = DecodeStream(skip_special_tokens=True), self._fast
            return lambda token: stream.step(fast, token) or ""
        ids: list[int] = []
        emitted = 0

        def step(token: int) -> str:
            nonlocal emitted
            ids.append(token)
            text = self.decode([np.array(ids)])[0]
            if text.endswith("\N{REPLACEMENT CHARACTER}"):
                return ""
            new, emitted = text[emitted:], len(text)
            return new

        return step

    def shown(self, ids: np.ndarray) -> str:
        """Decode tokens for display, special tokens included."""
        decoder = self.tokenizer if self._direct is None else self._direct
        text: str = decoder.decode(ids.tolist(), skip_special_tokens=False)
        return text

    def token_text(self, token: int) -> str:
        """Decode a token as it stands within a text: alone, words of Llama's and Mistral's lack the space before."""
        before, begun = self._before_a_token
        whole = self.shown(np.append(before, token))
        return whole[len(begun) :] if whole.startswith(begun) else self.shown(np.array([token]))

    @cached_property
    def _before_a_token(self) -> tuple[np.ndarray, str]:
        ids = self.encode("a")
        return ids, self.shown(ids)

    @property
    def size(self) -> int:
        """Number of tokens in the vocabulary."""
        return len(self.tokenizer)

    @property
    def longest(self) -> int:
        """Characters of the longest token; a text of more than `n` times this length cannot be read in `n` tokens.

        A tokenizer may have one token for all that it does not know, or drop characters: such a text loses its meaning.
        """
        self._longest = self._longest or max(map(len, self.tokenizer.get_vocab()), default=1)
        return self._longest

    @property
    def name(self) -> str:
        """Folder or hub id of the tokenizer, for messages."""
        return getattr(self.tokenizer, "name_or_path", "") or "without a name"

    @property
    def end(self) -> int | None:
        """Id of the end-of-text token; None if there is none."""
        end: int | None = self.tokenizer.eos_token_id
        return end

    @cached_property
    def turn_end(self) -> int | None:
        """Id of the end-of-turn token if it differs from the end of text; else `end`.

        Gemma's and Phi's templates use a different token to end a turn.
        """
        if not self.renderer.usable:
            return self.end
        mark = "rlsdkanswer"
        talk = [Message("user", "Q"), Message("assistant", mark), Message("user", "Q")]
        try:
            ids = self.renderer.prompt_tokens(talk)
        except ConfigError:
            return self.end
        after = next((i for i in range(len(ids)) if mark in self.shown(ids[:i])), len(ids) - 1)
        return int(ids[after]) if int(ids[after]) in self.renderer.stop_tokens else self.end

    @cached_property
    def missing_header(self) -> str:
        """Text that the renderer writes before an answer, but not at the end of a prompt; empty if there is none.

        A chat template that ignores `add_generation_prompt` leaves it to the policy to write who speaks.
        """
        question = (Message("user", "rlsdkquestion"),)
        try:
            if len(self.renderer.generation_prompt()):
                return ""
            prompt = self.shown(self.renderer.prompt_tokens(question))
            prefilled = self.shown(self.renderer.prompt_tokens((*question, Message("assistant", "rlsdkanswer"))))
        except ConfigError:
            return ""  # the prompts of a run have the same fault, and are reported
        before, found, _ = prefilled.partition("rlsdkanswer")
        return before.removeprefix(prompt).strip() if found and before.startswith(prompt) else ""

    def split_stops(self, stops: Sequence[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the strings and the token ids at which sampling ends, for `contracts.Sampling`.

        Stop strings that are a single token become token ids, which cost an engine nothing; the rest stay strings. The
        renderer's end-of-answer tokens are added. Every engine stops at the end of text anyway.
        """
        ids = {s: self._as_one_token(s) for s in stops}
        given = (i for i in ids.values() if i is not None)
        ends = (token for token in self.renderer.stop_tokens if token != self.end)
        return tuple(s for s in stops if ids[s] is None), tuple(dict.fromkeys((*given, *ends)))

    def _as_one_token(self, text: str) -> int | None:
        with suppress(KeyError):
            return self._single[text]
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        added = getattr(self.tokenizer, "added_tokens_encoder", {})
        vocabulary = self.tokenizer.get_vocab()
        # Only a token that no other token contains: '>' may hide inside '</a>' or '>>'
        alone = len(ids) == 1 and (text in added or sum(text in token for token in vocabulary) == 1)
        if len(self._single) >= _KEPT_TEXTS:  # clients of a server may send ever new stop strings
            self._single.clear()
        found = self._single[text] = ids[0] if alone else None
        return found

    @staticmethod
    def _array(ids: Any) -> np.ndarray:
        array = np.asarray(ids, dtype=np.int64)
        array.setflags(write=False)
        return array


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Change every text in a JSON value."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _mapped(below, change) for key, below in value.items()}
    return [_mapped(below, change) for below in value] if isinstance(value, list | tuple) else value


def _with_texts(message: Message, change: Callable[[str], str]) -> Message:
    if isinstance(message.content, str) and not message.tool_calls:
        texts = (message.content, message.name, message.tool_call_id, message.reasoning)
        if all(change(text) == text for text in texts if text):  # nearly always
            return message
    calls = [ToolCall(change(c.name), _mapped(c.arguments, change), change(c.id)) for c in message.tool_calls]
    return attrs.evolve(
        message,
        content=_content(message.content, change),
        name=change(message.name),
        tool_calls=calls,
        tool_call_id=change(message.tool_call_id),
        reasoning=change(message.reasoning),
    )


def _content(content: Content, change: Callable[[str], str]) -> Content:
    if isinstance(content, str):
        return change(content)
    return tuple(part if isinstance(part, Image) else change(part) for part in content)


def _whole(text: str) -> str:
    return _HALVES.sub("\N{REPLACEMENT CHARACTER}", text)


def adds_nothing(tokenizer: Any) -> bool:
    """Return True if transformers passes texts and ids unchanged to the underlying tokenizer, and back."""
    methods = (getattr(type(tokenizer), name, None) for name in ("__call__", "_encode_plus", "decode", "_decode"))
    own = all(str(getattr(each, "__module__", "")).startswith("transformers.tokenization_utils") for each in methods)
    return own and not tokenizer.clean_up_tokenization_spaces and not tokenizer.split_special_tokens


def control_tokens(tokenizer: Any) -> set[str]:
    """Return the texts that a tokenizer always turns into tokens of their own.

    Runs of white space, which some vocabularies add, are left out: they cannot end a turn.
    """
    added = map(str, getattr(tokenizer, "added_tokens_decoder", {}).values())
    return {t for t in {*getattr(tokenizer, "all_special_tokens", ()), *added} if len(t) > 1 and not t.isspace()}
