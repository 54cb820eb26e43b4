"""`rlsdk check model`: one tokenizer, template or configuration violates each property and no other."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from click.testing import CliRunner

from rlsdk import nano
from rlsdk.cli import root
from rlsdk.errors import ConfigError
from rlsdk.renderers.template import TemplateRenderer
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.testing.model_check import PROPERTIES, ModelProperty, check_model
from rlsdk.testing.model_subject import ModelSubject
from rlsdk.types import Message
from tests.chat_templates import byte_tokenizer, shipped, tried
from tests.rollout.codecs import CHATML

CALLS = (
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
TEMPLATE = CHATML.replace("{{ m.content }}<|im_end|>\n{% endfor %}", "{{ m.content }}" + CALLS + "CLOSE{% endfor %}")
TEMPLATE = TEMPLATE.replace("CLOSE", "{% if not (loop.last and continue_final_message) %}<|im_end|>\n{% endif %}")
CONFIG = {
    "max_position_embeddings": 512,
    "vocab_size": 300,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "dtype": "bfloat16",
}


CHATML_CONTROLS = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]


def tokenizer_of(template: str, **special: Any) -> Any:
    return byte_tokenizer(template, CHATML_CONTROLS, **special)


def subject(
    template: str = TEMPLATE,
    renderer: type[TemplateRenderer] = TemplateRenderer,
    codec: type[ChatTokenizer] = ChatTokenizer,
    config: dict[str, Any] | None = None,
    **special: Any,
) -> ModelSubject:
    made = tokenizer_of(template, **special)
    stops = frozenset() if made.eos_token_id is None else frozenset({made.eos_token_id})
    return ModelSubject(codec(made, renderer=renderer()), made, {**CONFIG, **(config or {})}, stops)


def broken(properties: Sequence[ModelProperty]) -> dict[str, str]:
    return {each.name: each.reason for each in properties if not each.ok}


class AddsToPrompt(TemplateRenderer):
    def prompt_tokens(self, messages: Any, tools: Any = ()) -> Any:
        ids = super().prompt_tokens(messages, tools)
        alone = messages[-1].role == "user" and all(m.role in ("system", "user") for m in messages) and not tools
        return np.append(ids, ids[-1]) if alone else ids


class ClosesPrefills(TemplateRenderer):
    def prompt_tokens(self, messages: Any, tools: Any = ()) -> Any:
        ids = super().prompt_tokens(messages, tools)
        return np.append(ids, ids[-1]) if messages[-1].role == "assistant" else ids


class ForgetsTheSecondTool(TemplateRenderer):
    def prompt_tokens(self, messages: Any, tools: Any = ()) -> Any:
        return super().prompt_tokens(messages, tools[:1])


class DropsBridge(TemplateRenderer):
    def bridge_tokens(self, *given: Any, **more: Any) -> Any:
        bridge = super().bridge_tokens(*given, **more)
        return None if bridge is None else bridge[:-1]


class RepeatsEnd(TemplateRenderer):
    def bridge_tokens(self, *given: Any, **more: Any) -> Any:
        return super().bridge_tokens(*given, **{**more, "ended": np.empty(0, np.int64)})


class NeverBeginsAnew(TemplateRenderer):
    def bridge_tokens(self, messages: Any, new: int, **more: Any) -> Any:
        bridge = super().bridge_tokens(messages, new, **more)
        return self.prompt_tokens(messages[-new:]) if bridge is None else bridge


class NeverStops(TemplateRenderer):
    stop_tokens = ()


class LosesThoughts(TemplateRenderer):
    def parse(self, *given: Any, **more: Any) -> Any:
        return attrs.evolve(super().parse(*given, **more), reasoning="")


class KeepsTheEnd(TemplateRenderer):
    def parse(self, token_ids: Any, **more: Any) -> Any:
        parsed = super().parse(token_ids, **more)
        return attrs.evolve(parsed, content=parsed.content + "<|im_end|>")


class TrustsText(ChatTokenizer):
    def as_data(self, text: str) -> str:
        return text


UPPER = TEMPLATE.replace(
    "{{ m.content }}",
    "{{ m.content.upper() if m.role == 'assistant' and not loop.last else m.content }}",
)
DROPS = TEMPLATE.replace(
    "{{ m.content }}",
    "{{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' and not loop.last else m.content }}",
)
WITHOUT_HEADER = TEMPLATE.partition("{% if add_generation_prompt %}")[0]
LOSES_ARGUMENTS = TEMPLATE.replace("call.function.arguments | tojson", "{'key': 'word', 'count': 3} | tojson")
BROKEN: dict[str, list[tuple[Callable[[], ModelSubject], str]]] = {
    "prompt": [
        (lambda: subject(renderer=AddsToPrompt), "token"),
        (lambda: subject(WITHOUT_HEADER), "ends before '<|im_start|>assistant', which the template writes"),
    ],
    "prefix": [
        (lambda: subject(UPPER), "RLSDK"),
        (lambda: subject(DROPS, renderer=NeverBeginsAnew), "its tokens stay"),
    ],
    "bridge": [
        (lambda: subject(renderer=DropsBridge), "after a truncated answer"),
        (lambda: subject(renderer=RepeatsEnd), "after an answer that ended"),
    ],
    "stop": [
        (lambda: subject(renderer=NeverStops, eos_token="<|endoftext|>"), "but sampling stops only at"),
    ],
    "prefill": [(lambda: subject(renderer=ClosesPrefills), "token")],
    "tool_calls": [(lambda: subject(LOSES_ARGUMENTS), "the parser 'hermes' read")],
    "tools": [(lambda: subject(renderer=ForgetsTheSecondTool), "lacks the tool 'rlsdk_count'")],
    "parse": [
        (lambda: subject(renderer=LosesThoughts), "an answer with a thought"),
        (lambda: subject(renderer=KeepsTheEnd), "an answer without a thought"),
    ],
    "injection": [(lambda: subject(codec=TrustsText), "becomes the control token")],
    "length": [(lambda: subject(config={"max_position_embeddings": 8}), "leaves no room")],
    "padding": [
        (lambda: subject(eos_token=None), "no end-of-text token"),
        (lambda: subject(config={"vocab_size": 100}), "outside the model's 100 tokens"),
        (lambda: subject(pad_token="<|im_start|>"), "into prompts"),
        (
            lambda: subject(config={"vocab_size": 258}),
            "has the token 258, '<|im_start|>', but the model has embeddings",
        ),
    ],
    "engine": [
        (lambda: subject(config={"num_attention_heads": 8}), "head size 16"),
        (lambda: subject(config={"dtype": "float64"}), "float64"),
    ],
}


def test_a_sound_model_keeps_every_property() -> None:
    assert [each for each in check_model(subject()) if each.ok is not True] == []


@pytest.mark.parametrize(
    ("name", "made", "said"), [(name, made, said) for name, cases in BROKEN.items() for made, said in cases]
)
def test_a_broken_renderer_breaks_one_property_and_no_other(name: str, made: Any, said: str) -> None:
    found = broken(check_model(made()))
    assert list(found) == [name] and said in found[name] and "conversation: " in found[name]


def test_every_property_has_a_renderer_that_breaks_it() -> None:
    assert set(BROKEN) == set(PROPERTIES)


def test_an_end_that_only_the_models_config_names_is_an_end() -> None:
    named = attrs.evolve(subject(eos_token=None), stops=frozenset({258}))
    assert "padding" not in broken(check_model(named))


def test_the_shortest_conversation_is_shown() -> None:
    found = broken(check_model(subject(UPPER)))["prefix"]
    assert found.endswith("conversation: user: 'rlsdku0' | assistant: 'rlsdka1' | user: 'rlsdku2'")


def test_a_conversation_is_shrunk_to_what_breaks_the_property() -> None:
    shouts = TEMPLATE.replace(
        "{{ m.content }}", "{{ m.content.replace('#!', '!!') if m.role == 'user' else m.content }}"
    )
    found = broken(check_model(subject(shouts)))["prompt"]
    assert found.endswith("conversation: user: 'rlsdku0 #!'")


RESULTS_AFTER_CALLS = TEMPLATE.replace(
    "{{ m.content }}",
    "{{ m.content if m.role != 'tool' or messages[:loop.index0] | selectattr('tool_calls') | list else '' }}",
)


def test_a_template_that_shows_results_after_calls_alone_holds() -> None:
    assert [each for each in check_model(subject(RESULTS_AFTER_CALLS)) if each.ok is not True] == []


class LosesResults(TemplateRenderer):
    results_shown = "always"


def test_a_result_that_the_policy_is_not_shown_breaks_the_bridge_and_no_other() -> None:
    found = broken(check_model(subject(RESULTS_AFTER_CALLS, renderer=LosesResults)))
    assert list(found) == ["bridge"]
    assert found["bridge"].startswith("after a call: ")


def test_a_template_without_results_is_refused_instead_of_leaving_them_out() -> None:
    never = TEMPLATE.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' else '' }}")
    made = subject(never)
    with pytest.raises(ConfigError, match="drops messages of the role tool"):
        made.codec.bridge_tokens(
            [Message("user", "Q"), Message("assistant", "A"), Message("tool", "R", "lookup")], 1, plain=False
        )
    assert broken(check_model(made)) == {}


def test_a_template_that_drops_thoughts_passes_since_its_turns_start_again() -> None:
    found = {each.name: each for each in check_model(subject(DROPS))}
    assert found["prefix"].ok is True and found["bridge"].ok == "n/a"
    assert "starts a new rollout" in found["bridge"].reason


def test_an_end_that_only_the_template_knows_is_stopped_at() -> None:
    assert broken(check_model(subject(eos_token="<|endoftext|>"))) == {}


PAGE = (Path(__file__).parents[2] / "docs" / "templates.md").read_text("utf-8")
ROWS = {
    cells[0]: tuple(cells[1:])
    for line in PAGE.partition("## ")[0].splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 4 + len(PROPERTIES)
}
"""Cells of the page's table by the name of the template."""


def templates() -> list[Any]:
    """The templates that TRL ships; those like an earlier one in all cells of their row are slow tests."""
    first: dict[tuple[str, ...], str] = {}
    for name in shipped():
        first.setdefault(ROWS.get(name, ()), name)
    return [pytest.param(n, marks=[] if n in first.values() else pytest.mark.slow) for n in shipped()]


@pytest.mark.parametrize("name", templates())
def test_a_template_that_trl_ships_is_as_its_row_says(name: str) -> None:
    assert tried(name).cells == ROWS[name]


def test_all_properties_hold_for_at_least_36_of_the_templates() -> None:
    named = [name for name in ROWS if name in shipped()]
    assert sum("✗" not in ROWS[name] for name in named) >= min(36, len(shipped()))


def command(*arguments: str) -> Any:
    return CliRunner().invoke(root, ["check", *arguments])


def test_the_command_reads_a_folder(tmp_path: Path) -> None:
    tokenizer_of(TEMPLATE).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "llama"}))
    result = command("model", str(tmp_path), "--json")
    told = json.loads(result.stdout)
    assert result.exit_code == 0 and told["ok"] is True
    assert [each["name"] for each in told["properties"]] == [*PROPERTIES, "logprobs"]
    assert all(set(each) == {"name", "ok", "reason"} for each in told["properties"])
    result = command("model", str(tmp_path), "--max-length", "1024")
    assert result.exit_code == 1 and "exceeds the model's 512 positions" in " ".join(result.output.split())


def test_the_nano_model_without_a_template_holds(tmp_path: Path) -> None:
    nano.create(tmp_path / "nano")
    told = json.loads(command("model", str(tmp_path / "nano"), "--json").stdout)
    assert told["ok"] is True
    assert {each["name"] for each in told["properties"] if each["ok"] == "n/a"} >= {"prompt", "prefix", "bridge"}


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    result = command("model", str(tmp_path), "--json")
    assert result.exit_code == 2 and "no tokenizer" in result.output
