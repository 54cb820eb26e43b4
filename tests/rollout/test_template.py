"""Chat templates that open a thought in the generation prompt, and their treatment of earlier answers."""

from __future__ import annotations

import numpy as np
import pytest

from rlsdk.errors import ConfigError, RefusedMessagesError
from rlsdk.renderers.template import TemplateRenderer
from rlsdk.types import Message
from tests.rollout.codecs import CHATML, chatml

HEAD = "<|im_start|>assistant\n"
OPENS = CHATML.replace("{% if add_generation_prompt %}" + HEAD, "{% if add_generation_prompt %}" + HEAD + "<think>\n")
SPLIT = (
    "{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% if KEPT %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}"
)
KEEPS = OPENS.replace("{{ m.content }}", SPLIT.replace("KEPT", "true"))
"""As Qwen3.5's when a tool's result follows: the thought is normalised, and kept."""
UNTIL_NEXT_QUESTION = OPENS.replace("{{ m.content }}", SPLIT.replace("KEPT", "messages[-1].role != 'user'"))
IN_A_FIELD = OPENS.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}",
)
CLOSES = OPENS.replace(HEAD + "<think>\n", HEAD + "<think>\n\n</think>\n\n")
CLOSES_IN_HISTORY = CLOSES.replace(
    "{{ m.role }}\n", "{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
)


def template(text: str) -> TemplateRenderer:
    renderer = chatml(text).renderer
    assert isinstance(renderer, TemplateRenderer)
    return renderer


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("text", [CHATML, KEEPS, IN_A_FIELD, CLOSES_IN_HISTORY])
def test_a_template_that_leaves_the_answer_alone_has_no_rewrite(text: str, role: str) -> None:
    assert template(text).rewrite([role]) is None


@pytest.mark.parametrize(
    ("opens", "closes"),
    [
        ("<|channel>thought\n", "<channel|>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<think:open>", "</think:open>"),
    ],
)
def test_a_prompt_that_closes_the_thought_under_other_names_begins_another_rollout(opens: str, closes: str) -> None:
    renderer = template(CLOSES.replace("<think>\n\n</think>\n\n", opens + closes))
    assert renderer.bridge_tokens([*LATE[:2], LATE[3]], 1, ended=np.array([], int)) is None


@pytest.mark.parametrize("text", [UNTIL_NEXT_QUESTION, CLOSES])
def test_a_template_that_drops_the_thought_before_a_question_is_refused(text: str) -> None:
    found = template(text).rewrite(["user"])
    assert found is not None and "<think>" in found.written and "<think>" not in found.found


def test_a_template_that_drops_the_thought_before_a_question_keeps_it_before_a_result() -> None:
    assert template(UNTIL_NEXT_QUESTION).rewrite(["tool"]) is None


def test_a_conversation_that_a_template_refuses_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no tools"):
        template("{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + CHATML).rewrite(
            ["tool"]
        )


FIRST_SYSTEM = CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'system' or loop.first }}")
"""As that of Qwen3-VL, it shows a system message only at the beginning."""
LATE = [Message("user", "Q"), Message("assistant", "A"), Message("system", "Be brief."), Message("user", "R")]


SYSTEM_FIRST = CHATML.replace(
    "{% for m in messages %}",
    "{{ messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join }}"
    "{% for m in messages if m.role != 'system' %}",
)
"""As DeepSeek-V3's, it moves all system messages to the front."""


def test_a_template_that_moves_a_system_message_begins_another_rollout() -> None:
    renderer = template(SYSTEM_FIRST)
    assert renderer.bridge_tokens(LATE, 2, ended=np.array([], int)) is None
    assert "Be brief.<|im_start|>user\nQ" in renderer.codec.shown(renderer.prompt_tokens(LATE))
    assert renderer.bridge_tokens([*LATE[:2], LATE[3]], 1, ended=np.array([], int)) is not None


AT_LAST_QUESTION = (
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages if m.role != 'system' %}{% if m == asked[-1] %}"
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% if messages[0].role == 'system' and loop.last %}{{ messages[0].content }}{% endif %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Mistral's, it shows the system message and the tools at the last question."""
LOOK = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}


@pytest.mark.parametrize(("system", "tools"), [("Be brief.", []), ("", [LOOK])])
def test_a_template_that_moves_the_system_message_or_the_tools_to_the_last_question_begins_another_rollout(
    system: str, tools: list[dict[str, object]]
) -> None:
    renderer, ended = template(AT_LAST_QUESTION), np.array([], int)
    talk = [Message("system", system)] * bool(system) + [*LATE[:2], LATE[3]]
    assert renderer.bridge_tokens(talk, 1, ended=ended, tools=tools) is None
    result = [*talk[:-1], Message("tool", "3", "look")]
    assert renderer.bridge_tokens(result, 1, ended=ended, tools=tools) is not None
    assert renderer.bridge_tokens([*result, *LATE[1:2], LATE[3]], 1, ended=ended, tools=tools) is None
    assert renderer.bridge_tokens([*LATE[:2], LATE[3]], 1, ended=ended) is not None
    assert chatml().renderer.bridge_tokens(talk, 1, ended=ended, tools=tools) is not None


def test_a_template_that_leaves_out_a_message_is_refused_in_words() -> None:
    renderer = template(FIRST_SYSTEM)
    assert len(renderer.prompt_tokens([LATE[2], LATE[0]]))
    for made in (
        lambda: renderer.prompt_tokens(LATE),
        lambda: renderer.bridge_tokens(LATE, 2, ended=np.array([], int)),
    ):
        with pytest.raises(RefusedMessagesError, match=r"leaves out a message of the role system \('Be brief.'\)"):
            made()


def test_a_text_that_the_template_writes_in_another_form_is_not_left_out() -> None:
    renderer = template(CHATML.replace("{{ m.content }}", "{{ m.content | trim | tojson }}"))
    said = [Message("system", ' "quoted"\n'), *LATE[:2], Message("tool", '{"é": "\\n"}', "look"), Message("user", " ")]
    assert len(renderer.prompt_tokens(said))
    bridge = renderer.bridge_tokens(said, 2, ended=np.array([], int))
    assert bridge is not None and len(bridge)
