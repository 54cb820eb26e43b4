"""A chat template from a file, in place of the tokenizer's own: wherever conversations are rendered, and in exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from transformers import AutoTokenizer

from rlsdk import nano
from rlsdk.cli import root
from rlsdk.cluster.portable import PortablePlan
from rlsdk.config import Plan, check
from rlsdk.contracts import Model
from rlsdk.engines.pretrained import open_tokenizer
from rlsdk.errors import ConfigError, OptionError
from rlsdk.learners.export import copy_tokenizer, write_template
from rlsdk.plugins import load
from rlsdk.readiness.checks import examine
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.types import Message, Task
from tests.rollout.codecs import QWEN, like

PLAIN = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% else %}={% endif %}"
    "{% endfor %}"
)
"""A template for the small model, whose tokenizer has none."""
THINKS = QWEN.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}",
)
"""As Qwen3's: without thinking, the prompt opens and closes an empty thought."""
ASKED = (Message("user", "1+1"),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration, and beside it a small model, a chat template and a conversation."""
    nano.create(tmp_path / "model", largest=250)
    (tmp_path / "chat.jinja").write_text(PLAIN, encoding="utf-8")
    row = {"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    tree = {
        "name": "trial",
        "model": {"path": "model", "max_length": 24, "renderer": {"use": "template", "file": "chat.jinja"}},
        "tasks": {"train": {"use": "jsonl", "path": "tasks.jsonl"}},
        "reward": "exact_match",
        "engine": "transformers",
        "sampling": {"max_tokens": 8},
        "batch_size": 1,
        "group_size": 2,
        "steps": 1,
        "placement": {"device": "cpu"},
    }
    (tmp_path / "trial.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path


@pytest.fixture
def plan(folder: Path) -> Plan:
    return check(folder / "trial.yaml")


def shown(codec: ChatTokenizer) -> str:
    return codec.shown(codec.prompt(Task("t", ASKED))[1])


def test_a_file_next_to_the_configuration_replaces_the_missing_template(plan: Plan, folder: Path) -> None:
    codec = ChatTokenizer.of(plan)
    assert shown(codec) == "1+1="
    assert not examine(plan, starts=False).faults
    assert codec.tokenizer.chat_template == open_tokenizer(plan.model).chat_template == PLAIN
    assert codec.renderer.title == f"the chat template '{folder / 'chat.jinja'}'"
    own = check(folder / "trial.yaml", ["model.renderer=template"])
    assert "has no chat template; name a file with one" in str(examine(own, starts=False).faults[0])


def test_all_processes_get_the_text_that_was_checked(plan: Plan, folder: Path) -> None:
    (folder / "chat.jinja").unlink()  # as on another machine
    assert shown(ChatTokenizer.of(PortablePlan.of(plan).plan())) == "1+1="


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (None, "there is no file 'FILE', neither in the working folder"),
        ("{% for m in messages %}\n{{ m.content }", "'FILE' is not a chat template in Jinja: line 2: unexpected '}'"),
        (" \n", "'FILE' is empty; expected a chat template in Jinja"),
        (b"\xff", "'FILE' cannot be read: 'utf-8' codec can't decode byte 0xff"),
        ((), "'FILE' cannot be read: [Errno 21] Is a directory"),
    ],
)
def test_a_file_without_a_template_is_named_with_its_setting(folder: Path, text: Any, fault: str) -> None:
    file = folder / "chat.jinja"
    file.unlink()
    if isinstance(text, str):
        file.write_text(text)
    elif isinstance(text, bytes):
        file.write_bytes(text)
    elif text is not None:
        file.mkdir()
    given = "chat.jinja" if text is None else str(file)
    with pytest.raises(ConfigError) as caught:
        check(folder / "trial.yaml")
    (found,) = caught.value.faults
    assert found.startswith(f"model.renderer.file: {fault.replace('FILE', given)}")


def test_tags_of_transformers_and_byte_order_marks_are_read(tmp_path: Path) -> None:
    text = "{%- for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}"
    text += "{% generation %}x{% endgeneration %}{% endfor %}"
    (tmp_path / "chat.jinja").write_text(text, encoding="utf-8-sig")
    assert load("renderer", "template", file=str(tmp_path / "chat.jinja")).read_template() == text
    with pytest.raises(OptionError):
        load("renderer", "template", file=str(tmp_path / "none.jinja")).read_template()


@pytest.mark.parametrize(("thinks", "opening"), [(True, ""), (False, "<think>\n\n</think>\n\n")])
def test_variables_belong_to_the_template_of_the_file(folder: Path, thinks: bool, opening: str) -> None:
    like("qwen").tokenizer.save_pretrained(folder / "model")
    (folder / "chat.jinja").write_text(THINKS)
    plan = check(folder / "trial.yaml", [f"model.renderer.variables={{enable_thinking: {str(thinks).lower()}}}"])
    codec = ChatTokenizer.of(plan)
    assert shown(codec) == f"<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n{opening}"
    parsed = codec.renderer.parse(codec.encode("why</think>2" if thinks else "2"))
    assert (parsed.content, parsed.reasoning) == ("2", "why" if thinks else "")


@pytest.mark.parametrize(
    "own", [None, PLAIN, [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": "x"}]]
)
def test_an_exported_tokenizer_has_the_template(folder: Path, tmp_path: Path, own: Any) -> None:
    config = folder / "model" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **({"chat_template": own} if own else {})}))
    made = tmp_path / "export"
    made.mkdir()
    copy_tokenizer(str(folder / "model"), made, trust_remote_code=False)
    write_template(made, THINKS)
    assert AutoTokenizer.from_pretrained(made).chat_template == THINKS
    assert "chat_template" not in json.loads((made / "tokenizer_config.json").read_text())
    assert open_tokenizer(Model(path=str(made))).chat_template == THINKS


def test_check_model_uses_the_file_and_variables_of_its_options(folder: Path) -> None:
    def run(*options: str) -> Any:
        words = [word for option in options for word in ("--option", option)]
        return CliRunner().invoke(root, ["check", "model", str(folder / "model"), "--json", *words])

    def properties(*options: str) -> dict[str, Any]:
        return {each["name"]: each for each in json.loads(run(*options).stdout)["properties"]}

    (folder / "model" / "config.json").unlink()  # without weights, only the tokenizer is checked
    assert "no chat template" in properties()["prefix"]["reason"]
    found = properties(f"template.file={folder / 'chat.jinja'}")
    assert found["prompt"]["ok"] and found["prefix"]["ok"]
    missing = run("template.file=none.jinja")
    assert missing.exit_code == 2 and "there is no file 'none.jinja'" in missing.output
    other = run("jsonl.path=x")
    assert other.exit_code == 2 and "only options of the renderer 'template'; got jsonl" in other.output
