"""Base of renderers that write conversations as text, such as the one that uses the tokenizer's chat template."""

from __future__ import annotations

import logging
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import attrs
import numpy as np

from rlsdk.contracts import ParsedAnswer, TextCodec, ToolParser
from rlsdk.errors import ConfigError, RefusedMessagesError, described
from rlsdk.renderers.forms import (
    ANSWERS,
    CLOSED_THOUGHT,
    QUESTION,
    RESULT,
    RESULTS,
    TEXT,
    THINK,
    THOUGHT,
    THOUGHT_KEYS,
    Between,
    Rewrite,
    alike,
    images_of,
    marks_around,
    plain,
    split,
    with_thought_or_text,
    with_written_arguments,
)
from rlsdk.tool_calls import before_mark, beginnings, with_json_arguments
from rlsdk.types import Message

_log = logging.getLogger(__name__)
_CALL_ENDS = ("<|call|>", "<|eom_id|>", "<|tool_response>")
"""Control tokens that end an answer with a tool call in gpt-oss, Llama 3 and Gemma 4."""


class TextRenderer:
    """Renderer that writes conversations as text; a subclass defines `render_text`."""

    codec: TextCodec
    keep_history: bool

    def open(self, codec: TextCodec, *, keep_history: bool = False) -> None:
        """Set the tokenizer."""
        self.codec, self.keep_history = codec, keep_history
        self._keeps: dict[tuple[str, ...], bool] = {}
        self._logged: set[str] = set()

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """Write a conversation.

        Args:
            messages: Messages in OpenAI's format, with thoughts also as `reasoning_content` and `thinking`.
            tools: JSON schemas of functions that the policy may call.
            add_generation_prompt: Open the next answer.
            continue_final_message: Leave the last message, the assistant's, open.
        """
        raise NotImplementedError

    @property
    def usable(self) -> bool:
        """True if conversations can be rendered."""
        return True

    @property
    def title(self) -> str:
        """Description of the renderer, for messages."""
        return f"the renderer of {self.codec.name!r}"

    def prompt_tokens(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """Return the tokens of a conversation with the next answer opened, or its last message left open."""
        text = self.render(messages, tools)
        self._expect_shown(messages, text, lambda marked: self.render(marked, tools))
        return self.codec.encode(self.codec.with_images(text, images_of(messages)))

    def generation_prompt(self) -> np.ndarray:
        """Return the tokens that open an answer."""
        return self.codec.encode(self._opening)

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that end an answer: the end of text, and the control token written after an answer."""
        found = [] if self.codec.end is None else [self.codec.end]
        names = [name for name in _CALL_ENDS if name in self.codec.controls]
        if self.usable and (closing := self._closing_token()):
            names.append(closing)
        found += [int(token) for name in names for token in self.codec.encode(name)[:1]]
        return tuple(dict.fromkeys(found))

    def _closing_token(self) -> str:
        """Return the control token written directly after an answer; empty if there is none."""
        try:
            inside, _, closing = self.render_closed([QUESTION, self._answer()]).rpartition(TEXT)
            opened = self.render([QUESTION])
        except ConfigError:
            return ""
        starting = (name for name in self.codec.controls if closing.lstrip().startswith(name))
        name = max(starting, key=len, default="")
        # A token that also occurs within an answer, between thought and text, does not end it
        return "" if name and name in inside[alike(inside, opened) :] else name

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Write a conversation with the next answer opened, or the last message left open if it is the assistant's.

        Raises:
            ConfigError: The conversation is refused.
        """
        goes_on = messages[-1].role == "assistant"
        return self._render(messages, tools, add_generation_prompt=not goes_on, continue_final_message=goes_on)

    def render_closed(
        self, messages: Sequence[Message | Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Write a finished conversation: its last message is closed, and no answer is opened.

        Args:
            messages: The conversation; mappings are passed on unchanged.
            tools: JSON schemas of functions that the policy may call.

        Raises:
            ConfigError: The conversation is refused.
        """
        return self._render(messages, tools, add_generation_prompt=False)

    def _render(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
    ) -> str:
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        given = [plain(m) if isinstance(m, Message) else dict(m) for m in messages]
        refusal: Exception | None = None
        for form in (dict, with_written_arguments, with_thought_or_text):
            written = [form(message) for message in given]
            if refusal is None or written != given:
                try:
                    text = self.render_text(written, tools, **how)
                    if isinstance(text, str):
                        return text
                    raise TypeError(f"render_text returned {type(text).__name__}; expected str")
                except Exception as error:  # noqa: BLE001 - a template may raise anything
                    refusal = refusal or error
        roles = ", ".join(message["role"] for message in given)
        of_template = type(refusal).__module__.startswith("jinja2.")
        said = str(refusal) if refusal is None or of_template else described(refusal)
        raise RefusedMessagesError([f"{self.title} refuses a conversation of {roles}: {said}"]) from refusal

    def shows_tools(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if prompts list tools for the policy."""
        return self.render([QUESTION], tools) != self.render([QUESTION])

    def write_calls(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Write an answer that makes calls, without the text around it; empty if calls are not rendered."""
        made = [
            {"id": f"call{i:05}", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
            for i, (name, arguments) in enumerate(calls)
        ]
        try:
            text = self.render_closed([QUESTION, {"role": "assistant", "content": "", "tool_calls": made}])
            opened = self.render([QUESTION])
            closed = self.render_closed([QUESTION, {"role": "assistant", "content": TEXT}])
        except ConfigError:
            return ""
        begin = len(opened) if text.startswith(opened) else text.find(QUESTION.text) + 1
        written = text[begin:].removesuffix(closed.partition(TEXT)[2])
        return written if all(name in written for name, _ in calls) else ""

    def bridge_tokens(
        self,
        messages: Sequence[Message],
        new: int,
        *,
        ended: np.ndarray,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> np.ndarray | None:
        """Return the tokens between the last answer and the next; None if the text before them changes."""
        written = self.between(messages, new, tools)
        if written is None:
            return None
        before, behind = messages[: len(messages) - new], messages[len(messages) - new :]

        def write(marked: Sequence[Message]) -> str:
            found = self.between([*before, *marked], new, tools)
            return "" if found is None else found.text

        self._expect_shown(behind, written.text, write)
        text = self.codec.with_images(written.text, images_of(behind))
        ids, closing = self.codec.encode(text), self.codec.encode(written.closing)
        for count in range(min(len(closing), len(ended)), 0, -1):
            if np.array_equal(ids[:count], ended[len(ended) - count :]):
                return ids[count:]
        if not len(ended) or self.codec.shown(ended[-1:]) not in self.codec.controls:
            return ids
        # GLM's answers end with the header of the next speaker: `<|user|>`, `<|observation|>`.
        if ids[0] == ended[-1]:
            return ids[1:]
        # An answer that makes a call may end differently from others: in Cohere's templates with only the second of two
        # tokens, in Llama 3's with `<|eom_id|>` instead of `<|eot_id|>`.
        same = alike(closing.tolist(), ids.tolist())
        found = np.flatnonzero(closing[:same] == ended[-1])
        if len(found):
            return ids[found[-1] + 1 :]
        instead = self.codec.shown(ended[-1:]) in _CALL_ENDS and int(ids[0]) in self.stop_tokens
        return ids[1:] if instead else ids

    def _expect_shown(self, messages: Sequence[Message], text: str, write: Callable[[Sequence[Message]], str]) -> None:
        """Refuse a conversation if the template silently leaves out one of its messages.

        Args:
            messages: Messages that the text shows; answers may lack their thoughts.
            text: Rendered text.
            write: Renders other messages in their place.

        Raises:
            RefusedMessagesError: A message is left out.
        """
        missing = [
            i
            for i, m in enumerate(messages)
            if m.role != "assistant"
            and not m.images
            and m.text.strip() not in text
            # Without the call before it, which may not have been readable, some templates show no result.
            and not (m.role == "tool" and self.results_shown == "after calls")
        ]
        if not missing:
            return
        # A template may write a text in another form, such as JSON; a message is left out if one word in its place is.
        marks = {i: f"rlsdkmessage{i}" for i in missing}
        marked = [attrs.evolve(m, content=marks[i]) if i in marks else m for i, m in enumerate(messages)]
        shown = write(marked)
        for i, mark in marks.items():
            if mark not in shown:
                raise RefusedMessagesError(
                    [
                        f"{self.title} leaves out a message of the role {messages[i].role} "
                        f"({reprlib.repr(messages[i].text)}), so the policy would not see it. A template reads "
                        "message['content'] or message.content of each message; let model.tokenizer name a folder "
                        "whose template shows this one, or put its text into another message"
                    ]
                )

    def between(self, messages: Sequence[Message], new: int, tools: Sequence[Mapping[str, Any]] = ()) -> Between | None:
        """Return the text between the last answer and the next; None if it changes the text before.

        Most templates then drop the thoughts of earlier answers; some move system messages to the beginning.

        A marker replaces the last answer, so that the policy's own text has no influence.

        Args:
            messages: The conversation.
            new: Number of messages, from the end, that follow the last answer.
            tools: JSON schemas of functions that the policy may call.

        Raises:
            ConfigError: The messages are refused, or earlier answers rewritten because of them.
        """
        before, behind = messages[: len(messages) - new - 1], messages[len(messages) - new :]
        try:
            kept = self.keeps_answers(tuple(dict.fromkeys(m.role for m in behind)))
        except ConfigError as error:
            if all(m.role != "tool" for m in behind):
                raise
            try:
                return self._after_calls(before, behind, tools)  # gpt-oss, Mistral: results only after calls
            except ConfigError:
                raise error from None
        if not kept:
            return None
        if any(m.role == "tool" for m in behind) and self.results_shown != "always":
            return self._after_calls(before, behind, tools)
        mark = "rlsdkmark"
        while any(mark in m.text for m in messages):
            mark += "x"
        answered = [*before, Message("assistant", mark)]
        closed = self._render(answered, tools, add_generation_prompt=False).partition(mark)[2]
        earlier, _, text = self._render([*answered, *behind], tools, add_generation_prompt=True).partition(mark)
        if self._moves(before, behind, tools, earlier):
            return None
        return Between(closed[: alike(closed, text)], text)

    def _moves(
        self, before: Sequence[Message], behind: Sequence[Message], tools: Sequence[Mapping[str, Any]], earlier: str
    ) -> bool:
        """Return True if a new question moves the system message or the list of tools, as in Mistral's templates."""
        if self.keep_history or not (tools or before[0].role == "system") or not behind or behind[-1].role == "tool":
            return False
        first = next((i for i, m in enumerate(before) if m.role == "assistant"), len(before))
        opened = self.render(before[:first], tools)
        # The header of the answer is left out, since it may open a thought that the answer does not have.
        if alike(opened, earlier) >= len(opened) - len(self._opening):
            return False
        if "moves" not in self._logged:
            self._logged.add("moves")
            _log.info(
                "%s moves the system message or the tools once a message (%s) follows: such a conversation trains as "
                "several rollouts of one trajectory, each after the prompt that is rendered at its turn",
                self.title,
                behind[-1].role,
            )
        return True

    @cached_property
    def results_shown(self) -> str:
        """When tool results are rendered: "always", only "after calls" (Gemma 4), or "never" (Phi-3)."""
        for when, messages in RESULTS.items():
            with suppress(ConfigError):
                if RESULT in self.render_closed(messages):
                    return when
        return "never"

    def _after_calls(
        self, before: Sequence[Message], behind: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> Between | None:
        """Return the text after an answer that made the calls whose results follow; None if its thought is dropped."""
        if self.results_shown == "never":
            raise ConfigError(
                [
                    f"{self.title} drops messages of the role tool, so that the policy would not see results. Let "
                    "model.tokenizer name a folder whose template shows them, or give results as user messages"
                ]
            )
        results = [m for m in behind if m.role == "tool"]
        calls = [
            {"id": m.tool_call_id, "type": "function", "function": {"name": m.name, "arguments": {}}} for m in results
        ]
        answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
        thinking = {**answer, **dict.fromkeys(THOUGHT_KEYS, THOUGHT)}
        kept = self._kept_after_calls([*before, thinking], behind, tools)
        if not kept and not self.keep_history:
            return None
        return self._kept_after_calls([*before, answer], behind, tools)

    def _kept_after_calls(
        self, answered: Sequence[Any], behind: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> Between | None:
        closed = self._render(answered, tools, add_generation_prompt=False)
        text = self._render([*answered, *behind], tools, add_generation_prompt=True)
        ends = "|".join(re.escape(name) for name in sorted(self.codec.controls, key=len, reverse=True))
        end = re.search(rf"(?:{ends})\s*$", closed) if ends else None
        at = end.start() if end else len(closed)
        if not text.startswith(closed[:at]):
            return None
        return Between(closed[at : alike(closed, text)], text[at:])

    def keeps_answers(self, roles: tuple[str, ...]) -> bool:
        """Return True if all text up to an answer stays unchanged when messages of these roles follow.

        It is False if the answer's thought is dropped, or a message moved before the answer.

        Raises:
            ConfigError: The answer is changed in another way.
        """
        if self.keep_history:
            return True
        if roles not in self._keeps:
            rewrite = self.rewrite(roles)
            if rewrite is not None and not rewrite.keeps_text:
                following = ", ".join(roles) or "assistant"
                raise ConfigError(
                    [
                        f"{self.title} rewrites an earlier answer once a message ({following}) follows: "
                        f"{rewrite.written!r} becomes {rewrite.found!r}, which is not what the policy wrote. Let "
                        "model.tokenizer name a folder whose template leaves answers unchanged; or set "
                        "model.keep_history, so that later turns follow the tokens as sampled, including thoughts"
                    ]
                )
            if rewrite is not None:
                _log.info(
                    "%s %s once a message (%s) follows: such a conversation trains as several rollouts of one "
                    "trajectory, each after the prompt that is rendered at its turn",
                    self.title,
                    "moves messages" if THOUGHT in rewrite.found_whole else "drops the thoughts of earlier answers",
                    ", ".join(roles),
                )
            self._keeps[roles] = rewrite is None
        return self._keeps[roles]

    def rewrite(self, roles: Sequence[str]) -> Rewrite | None:
        """Compare an answer as the policy writes it with the same answer when messages of these roles follow.

        The policy's text begins where the generation prompt ends. If that prompt opens a thought, the answer continues
        it; if it also closes it, the answer has none. The template itself writes the answer, since each model has its
        own format of thoughts.

        Returns:
            The first difference; None if there is none.

        Raises:
            ConfigError: The conversation is refused.
        """
        opened, answer = self.render([QUESTION]), self._answer()
        written = self._up_to_answer([answer])
        if not written.startswith(opened):
            # Thoughts that the template does not write at all, or writes differently from how the prompt opened them
            begun = next((each for each in ("<think>\n", "<think>") if opened.endswith(each)), "")
            thought = "" if answer == {"role": "assistant", "content": TEXT} else f"<think>\n{THOUGHT}\n</think>\n\n"
            written = opened + thought.removeprefix(begun) + TEXT
        found = self._up_to_answer([answer, *({"role": role, "content": "R"} for role in roles)])
        return None if found == written else Rewrite(written, found)

    def _answer(self) -> dict[str, str]:
        """Return an answer's message in the format that the template understands, with a thought if supported."""
        if CLOSED_THOUGHT.search(self.render([QUESTION])):
            return {"role": "assistant", "content": TEXT}
        for answer in ANSWERS:
            if THOUGHT in self._up_to_answer([message := {"role": "assistant", **answer}]):
                return message
        return {"role": "assistant", **ANSWERS[1]}

    def _up_to_answer(self, following: Sequence[Mapping[str, Any]]) -> str:
        """Render a question and the following messages, up to the end of the first answer's text."""
        text = self._render([QUESTION, *following], add_generation_prompt=False)
        begin, text_of_answer, _ = text.partition(TEXT)
        return begin + text_of_answer

    @cached_property
    def _opening(self) -> str:
        """Return the text that opens an answer; empty if conversations cannot be rendered."""
        if not self.usable:
            return ""
        opened = self.render([QUESTION])
        return opened[alike(opened, self.render_closed([QUESTION])) :]

    @cached_property
    def thought_marks(self) -> tuple[str, str]:
        """Delimiters of a thought."""
        if not self.usable:
            return THINK
        try:
            return marks_around(self._up_to_answer([{"role": "assistant", **ANSWERS[0]}]), THOUGHT)
        except ConfigError:
            return THINK

    def parse(
        self,
        token_ids: np.ndarray,
        *,
        prefill: str = "",
        continued: bool = False,
        parser: ToolParser | None = None,
        done: bool = True,
    ) -> ParsedAnswer:
        """Parse an answer: the thought by the template's delimiters, tool calls by the parser, the rest as content."""
        end = len(token_ids)
        while end and int(token_ids[end - 1]) in self.stop_tokens:  # tokens that end a call are left for parsers
            end -= 1
        ids, marks = token_ids[:end], self.thought_marks
        text, begins = prefill + self.codec.shown(ids), () if parser is None else beginnings(parser)
        whole = text
        head = prefill if continued else self._opening + prefill
        opened = head.rfind(marks[0]) > head.rfind(marks[1]) and not prefill.strip().startswith(marks[0])
        if not done:
            text = before_mark(text, [mark for mark in marks if mark not in text])
        parts = split(text, marks, opened=opened)
        calls = () if parser is None or not done else tuple(map(with_json_arguments, parser.parse(parts.rest)))
        content = parts.rest
        if parser is not None and (calls or not done):
            content = before_mark(content, begins).rstrip() if begins else ""
        if any(name in content for name in self._special_names):
            # If nothing was removed, as the tokenizer decodes it without special tokens.
            content = prefill + self.codec.decode([ids])[0] if done and content == whole else content
            names = sorted(self._special_names, key=len, reverse=True)
            content = re.sub("|".join(map(re.escape, names)), "", content)
        return ParsedAnswer(content, parts.reasoning, calls)

    @cached_property
    def _special_names(self) -> tuple[str, ...]:
        return tuple(getattr(self.codec.tokenizer, "all_special_tokens", ()))
