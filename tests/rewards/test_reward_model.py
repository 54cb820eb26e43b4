"""The reward model: batching changes nothing, and rollouts without a value are invalid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import rlsdk
from rlsdk import nano
from rlsdk.errors import DataError, OptionError
from rlsdk.types import Message, Rollout, Task
from tests.engines.tiny import make_classifier

TEXTS = ["<answer>3+4</answer>", "17-5-3", "", "<answer>" + "1+" * 40 + "1</answer>", "3", "(20-3)*4"]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("classifier"), labels=2)


def rollouts(texts: list[str]) -> list[Rollout]:
    return [Rollout.from_text(Task(id=str(i), prompt="3,4>7:"), text) for i, text in enumerate(texts)]


def by_hand(folder: Path, text: str, label: int = 0) -> float:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return float(model(**tokenizer(text, return_tensors="pt")).logits[0, label])


@pytest.mark.parametrize("batch_tokens", [1, 60, 100_000])
def test_batches_change_nothing(classifier: Path, batch_tokens: int) -> None:
    reward = rlsdk.load("reward", "reward_model", path=str(classifier), batch_tokens=batch_tokens, label=1)
    found = reward(rollouts(TEXTS))
    for score, text in zip(found, TEXTS, strict=True):
        assert score.valid
        assert score.value == pytest.approx(by_hand(classifier, "3,4>7:" + text, 1), abs=1e-5)


def test_the_end_of_a_long_conversation_counts(classifier: Path) -> None:
    reward = rlsdk.load("reward", "reward_model", path=str(classifier), max_length=5, activation="sigmoid")
    long, other = reward(rollouts([":" * 50 + "1+1=2", "/" * 60 + "1+1=2"]))
    expected = torch.tensor(by_hand(classifier, "1+1=2")).sigmoid()
    assert [long.value, other.value] == pytest.approx([float(expected)] * 2, abs=1e-5)


def test_a_template_writes_the_text(classifier: Path, tmp_path: Path) -> None:
    folder = make_classifier(tmp_path, template="{% for m in messages %}{{ m.role[0] }}:{{ m.content }}>{% endfor %}")
    task = Task(id="t", prompt=(Message("user", "3,4"),))
    rollout = Rollout.from_text(task, "3+4")
    [score] = rlsdk.load("reward", "reward_model", path=str(folder))([rollout])
    assert score.value == pytest.approx(by_hand(folder, "u:3,4>a:3+4>"), abs=1e-5)


def test_a_padding_token_with_the_number_0_is_the_padding_where_the_config_names_none(tmp_path: Path) -> None:
    """With the end of text in its place, a text would be read up to the token before its end."""
    folder = make_classifier(tmp_path, template="{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    rollout = Rollout.from_text(Task(id="t", prompt=(Message("user", "3,4"),)), "3+4")
    expected = by_hand(folder, "3,4<eos>3+4<eos>")
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("pad_token_id") == AutoTokenizer.from_pretrained(folder).pad_token_id == 0
    (folder / "config.json").write_text(json.dumps(config))
    [score] = rlsdk.load("reward", "reward_model", path=str(folder))([rollout])
    assert score.value == pytest.approx(expected, abs=1e-5)


def test_texts_are_read_to_their_end_where_neither_config_nor_tokenizer_name_a_padding_token(tmp_path: Path) -> None:
    """The end of text, which ends each of them, does not serve as padding."""
    folder = make_classifier(tmp_path, template="{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    expected = [by_hand(folder, f"3,4<eos>{text}<eos>") for text in ("3+4", "(20-3)*4")]
    for name, key in (("config.json", "pad_token_id"), ("tokenizer_config.json", "pad_token")):
        content = json.loads((folder / name).read_text())
        del content[key]
        (folder / name).write_text(json.dumps(content))
    assert AutoTokenizer.from_pretrained(folder).pad_token_id is None
    task = Task(id="t", prompt=(Message("user", "3,4"),))
    found = rlsdk.load("reward", "reward_model", path=str(folder))(
        [Rollout.from_text(task, text) for text in ("3+4", "(20-3)*4")]
    )
    assert [score.value for score in found] == pytest.approx(expected, abs=1e-5)


def test_the_last_answer_of_the_policy_is_judged_and_no_example_in_its_prompt(classifier: Path, tmp_path: Path) -> None:
    folder = make_classifier(tmp_path, template="{% for m in messages %}{{ m.role[0] }}:{{ m.content }}>{% endfor %}")
    examples = (Message("user", "3,4"), Message("assistant", "3+4"), Message("user", "1,2"))
    task = Task(id="t", prompt=examples)

    def rollout(*said: Message) -> Rollout:
        return Rollout(task, (*examples, *said), (), (), (), ())

    answered = rollout(Message("assistant", "1+2", prompt=False))
    asked_again = rollout(Message("assistant", "1+2", prompt=False), Message("user", "9,9"))
    found = rlsdk.load("reward", "reward_model", path=str(folder))([answered, asked_again, rollout()])
    expected = by_hand(folder, "u:3,4>a:3+4>u:1,2>a:1+2>")
    assert [score.value for score in found[:2]] == pytest.approx([expected] * 2, abs=1e-5)
    assert (found[2].valid, found[2].reason) == (False, "the policy wrote nothing")


def test_no_number_is_invalid(tmp_path: Path) -> None:
    folder = make_classifier(tmp_path, broken=True)
    [score] = rlsdk.load("reward", "reward_model", path=str(folder))(rollouts(["1"]))
    assert (score.valid, score.reason) == (False, "the model's logit is nan")


def test_faults(classifier: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no folder"):
        rlsdk.load("reward", "reward_model", path=str(tmp_path / "nowhere"))
    with pytest.raises(OptionError, match="at least 1"):
        rlsdk.load("reward", "reward_model", path=str(classifier), batch_tokens=0)
    with pytest.raises(OptionError, match=r"label: 2 given, but .* has 2 logits, numbered from 0"):
        rlsdk.load("reward", "reward_model", path=str(classifier), label=2)
    policy = tmp_path / "policy"
    nano.create(policy)
    with pytest.raises(OptionError, match=r"is a language model \(LlamaForCausalLM\), not a trained classifier"):
        rlsdk.load("reward", "reward_model", path=str(policy))
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps({**config, "architectures": None}))  # found only with the weights
    with pytest.raises(DataError, match=r"policy is not a trained classifier: it lacks score\.weight"):
        rlsdk.load("reward", "reward_model", path=str(policy))(rollouts(["1"]))


def test_nothing_to_score(classifier: Path) -> None:
    reward: Any = rlsdk.load("reward", "reward_model", path=str(classifier))
    assert reward([]) == []


def test_no_gpu_is_taken_that_was_not_asked_for(classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    [score] = rlsdk.load("reward", "reward_model", path=str(classifier))(rollouts(TEXTS[:1]))
    assert score.valid
