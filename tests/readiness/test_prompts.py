"""Prompts that leave no room for an answer: dropped in training, and reported for evaluations before the start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlsdk import nano, preflight
from rlsdk.config import Plan, check
from rlsdk.readiness.checks import examine, machine
from rlsdk.readiness.memory import estimate_memory
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.trainer.assembly import _streams, examined, train_tasks
from tests.rollout.codecs import CHATML, chatml
from tests.rollout.test_thoughts import QWEN

SHORT, LONG = {"prompt": "1+1=", "answer": "2"}, {"prompt": "1+" * 20 + "1=", "answer": "21"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nano") / "model"
    nano.create(folder, largest=250)  # embeddings for the tokens of the chat templates below, too
    return folder


def plan(model: Path, folder: Path, train: list[dict[str, str]], held_out: list[dict[str, str]], *more: str) -> Plan:
    for name, rows in (("train", train), ("eval", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tree = {
        "name": "trial",
        "out": str(folder / "runs"),
        "model": {"path": str(model), "max_length": 24},
        "tasks": {name: {"use": "jsonl", "path": str(folder / f"{name}.jsonl")} for name in ("train", "eval")},
        "reward": "exact_match",
        "engine": "transformers",
        "sampling": {"max_tokens": 8},
        "batch_size": 1,
        "group_size": 2,
        "steps": 1,
        "placement": {"device": "cpu"},
    }
    return check(tree, more)


def test_a_prompt_as_long_as_the_model_is_dropped_although_max_prompt_tokens_allows_it(
    model: Path, tmp_path: Path
) -> None:
    found = plan(model, tmp_path, [SHORT, LONG], [SHORT])
    assert found.config.max_prompt_tokens == 512 and not examine(found, starts=False).faults
    streams = _streams(found, train_tasks(found), ChatTokenizer.of(found))
    name = streams.names[0]
    assert {streams[name].draw()[0].prompt for _ in range(4)} == {SHORT["prompt"]}
    assert streams.dropped


def test_prompts_that_are_dropped_are_noted(model: Path, tmp_path: Path) -> None:
    (note,) = examine(plan(model, tmp_path, [SHORT, SHORT, LONG], [SHORT]), starts=False).notes
    text = "model.max_length: 23 tokens: of 3 prompts of tasks.train that were tried, 1 would be dropped as longer"
    assert str(note) == text
    by_epoch = plan(model, tmp_path, [SHORT, SHORT, LONG], [SHORT], "steps=null", "epochs=1")
    (note,) = examine(by_epoch, starts=False).notes
    assert str(note) == f"{text}; epochs count them, so the others are drawn again in their place"


def test_fewer_tasks_than_a_batch_holds_are_noted(model: Path, tmp_path: Path) -> None:
    (note,) = examine(plan(model, tmp_path, [SHORT], [SHORT], "batch_size=2"), starts=False).notes
    assert str(note) == "tasks.train: 1 task, fewer than batch_size=2: some repeat in a step"
    assert not examine(plan(model, tmp_path, [SHORT] * 2, [SHORT], "batch_size=2"), starts=False).notes


def test_an_order_that_a_sampler_replaces_is_noted(model: Path, tmp_path: Path) -> None:
    sampler, ordered = "rollout.sampler=by_pass_rate", "tasks.train.shuffle=false"
    (note,) = examine(plan(model, tmp_path, [SHORT], [SHORT], sampler, ordered), starts=False).notes
    text = "training does not keep the order of these tasks, since rollout.sampler chooses the next one"
    assert str(note) == f"tasks.train: {text}"
    for given in (sampler, ordered):
        assert not examine(plan(model, tmp_path, [SHORT], [SHORT], given), starts=False).notes


def test_a_template_that_drops_thoughts_is_noted_and_keeps_no_run_from_starting(model: Path, tmp_path: Path) -> None:
    row: Any = {"prompt": [{"role": "user", "content": "1+1?"}], "answer": "2"}
    notes = {}
    for name, template in (("keeps", CHATML), ("drops", QWEN)):
        shutil.copytree(model, folder := tmp_path / name)
        chatml(template).tokenizer.save_pretrained(folder)
        given = ("workflow={use: dialogue, turns: 2}", "model.max_length=200", "model.tokenizer=null")
        notes[name] = examine(plan(folder, tmp_path, [row], [row], *given), starts=False).require().notes
    assert notes["keeps"] == ()
    (note,) = notes["drops"]
    assert note.path == "model.renderer" and "drops the thoughts of earlier answers" in note.message


def test_a_template_without_a_generation_prompt_is_noted(model: Path, tmp_path: Path) -> None:
    row: Any = {"prompt": [{"role": "user", "content": "1+1?"}], "answer": "2"}
    shutil.copytree(model, folder := tmp_path / "ignores-it")
    chatml(CHATML.partition("{% if add_generation_prompt %}")[0]).tokenizer.save_pretrained(folder)
    given = ("model.max_length=200", "model.tokenizer=null")
    (note,) = examine(plan(folder, tmp_path, [row], [row], *given), starts=False).require().notes
    assert note.path == "model.renderer"
    assert note.message.startswith("prompts end before '<|im_start|>assistant', which the chat template of ")


def test_a_model_with_many_tokens_that_have_no_text_is_noted(tmp_path: Path) -> None:
    nano.create(folder := tmp_path / "larger", largest=400)
    assert not examine(plan(folder, tmp_path, [SHORT], [SHORT]), starts=False).notes
    tokenizer = chatml().tokenizer
    tokenizer.save_pretrained(folder)
    (note,) = examine(plan(folder, tmp_path, [SHORT], [SHORT], "model.tokenizer=null"), starts=False).notes
    assert f"has {len(tokenizer)} tokens, and the model has embeddings of " in note.message
    assert note.message.endswith("when the policy samples one of the others, it adds no text")


def test_prompts_that_end_with_an_answer_are_noted_unless_a_prefill_was_asked_for(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, folder := tmp_path / "chat")
    chatml(CHATML).tokenizer.save_pretrained(folder)
    asked: Any = [{"role": "user", "content": "1+1?"}]
    rows: list[Any] = [{"prompt": asked}, {"prompt": [*asked, {"role": "assistant", "content": "It is 2."}]}]
    for row, prefill, noted in ((rows[0], "", False), (rows[1], "", True), (rows[0], "It", False)):
        given = (f"tasks.train.prefill={prefill or 'null'}", "model.max_length=200", "model.tokenizer=null")
        notes = examine(plan(folder, tmp_path, [row], [rows[0]], *given), starts=False).require().notes
        assert [(note.path, "such as 'It is 2.': the policy continues it" in note.message) for note in notes] == [
            ("tasks.train", True)
        ] * noted


def test_a_task_from_a_source_without_a_reward_part_is_a_fault(model: Path, tmp_path: Path) -> None:
    rows: Any = [{**SHORT, "data_source": "openai/gsm8k"}, {**SHORT, "data_source": "MATH"}]
    given = "reward=[{use: exact_match, sources: openai/gsm8k}, {use: math, sources: [%s]}]"
    faults = examine(plan(model, tmp_path, rows, rows[:1], given % "Maths"), starts=False).faults
    assert [str(fault) for fault in faults] == [
        "reward: no part applies to task 'train:1' of tasks.train, whose source is 'MATH'; `sources` has "
        "exact_match: openai/gsm8k; math: Maths"
    ]
    found = examine(plan(model, tmp_path, rows, rows[:1], given % "MATH"), starts=False)
    assert (found.faults, found.notes) == ((), ())
    misspelt = "reward=[exact_match, {use: math, sources: Maths}]"
    assert [str(note) for note in examine(plan(model, tmp_path, rows, rows[:1], misspelt), starts=False).notes] == [
        "reward[1].sources: Maths: none of the tried tasks has this source, so math may score none; their sources "
        "are: MATH, openai/gsm8k"
    ]


def test_evaluations_without_tasks_are_noted(model: Path, tmp_path: Path) -> None:
    given = ("eval.every=5", "tasks.eval=null")
    notes = [
        examine(plan(model, tmp_path, [SHORT], [SHORT], *some), starts=False).notes
        for some in (given, given[:1], given[1:])
    ]
    assert [str(note) for note in notes[0]] == [
        "eval.every: 5, but nothing is evaluated, since there are no tasks.eval"
    ]
    assert notes[1:] == [(), ()]
    more = (
        "tasks.eval=null",
        "eval={before: false, samples: 4, temperature: 0.6, greedy: false, workflow: single_turn}",
    )
    found = examine(plan(model, tmp_path, [SHORT], [SHORT], *more), starts=False).notes
    said = ["eval.samples: 4", "eval.greedy: false", "eval.temperature: 0.6", "eval.workflow: given"]
    assert [str(note).partition(",")[0] for note in found] == said
    _, rehearsed = examined(plan(model, tmp_path, [SHORT], [SHORT], *given))
    assert rehearsed.notes == tuple(map(str, notes[0]))  # the log of a run begins with it


def test_a_task_without_an_environment_that_there_is_is_a_fault(model: Path, tmp_path: Path) -> None:
    def found(*settings: str, **metadata: Any) -> list[str]:
        row: Any = {**SHORT, **metadata}
        return [str(each) for each in examine(plan(model, tmp_path, [SHORT], [row], *settings), starts=False).faults]

    plays = "eval.workflow={use: environment}"
    assert found(plays) == [
        "tasks.eval: task 'eval:0' names no environment in its metadata, and workflow 'environment' has none: set "
        "workflow.environment, or take a source whose tasks name one, such as `environments`"
    ]
    (fault,) = found(plays, environment="gridwold")
    assert fault.startswith("tasks.eval: the environment of task 'eval:0': unknown environment 'gridwold'")
    assert found() == []


def changed(model: Path, folder: Path, file: str, **values: Any) -> Path:
    """Copy a model, with other values in one of its files."""
    shutil.copytree(model, folder)
    read = json.loads((folder / file).read_text(encoding="utf-8"))
    (folder / file).write_text(json.dumps({**read, **values}), encoding="utf-8")
    return folder


def test_the_hub_is_asked_once_for_a_model_that_several_settings_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(preflight, "hub_model", lambda name: asked.append(name) or ["not there"])
    settings = ("algorithm=grpo", "algorithm.kl_coef=0.1", "model.reference=lab/small", "model.tokenizer=lab/small")
    found = machine(plan(Path("lab/small"), tmp_path, [SHORT], [SHORT], *settings), devices=False)
    assert asked == ["lab/small"]
    assert [each.path for each in found if each.message == "not there"] == [
        "model.path", "model.tokenizer", "model.reference",
    ]  # fmt: skip


def test_a_config_that_no_model_can_be_built_from_is_a_fault(model: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "spiral", "rope_theta": 10000.0}
    folder = changed(model, tmp_path / "rope", "config.json", rope_parameters=rope)
    (fault,) = examine(plan(folder, tmp_path, [SHORT], [SHORT]), starts=False).faults
    assert fault.path == "model.path"
    assert "cannot be built from its config: it names 'spiral', which transformers does not know" in fault.message


def test_end_tokens_outside_the_vocabulary_are_a_fault_if_no_others_end_answers(model: Path, tmp_path: Path) -> None:
    folder = changed(model, tmp_path / "ends", "generation_config.json", eos_token_id=[999, 1])
    found = examine(plan(folder, tmp_path, [SHORT], [SHORT]), starts=False)
    (note,) = found.notes
    assert not found.faults and "eos_token_id 999" in note.message and "no answer ends there" in note.message
    changed(folder, tmp_path / "copy", "config.json", eos_token_id=None)
    only = changed(tmp_path / "copy", tmp_path / "only", "generation_config.json", eos_token_id=999)
    settings = json.loads((only / "tokenizer_config.json").read_text())
    (only / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": None}))
    (fault,) = examine(plan(only, tmp_path, [SHORT], [SHORT]), starts=False).faults
    assert fault.path == "model.path" and "every answer would have sampling.max_tokens tokens" in fault.message


@pytest.mark.parametrize("content", ['{"eos_token_id": ', "[]"])
def test_a_damaged_generation_config_is_a_fault(model: Path, tmp_path: Path, content: str) -> None:
    folder = changed(model, tmp_path / "damaged", "generation_config.json")
    (folder / "generation_config.json").write_text(content)
    (fault,) = examine(plan(folder, tmp_path, [SHORT], [SHORT]), starts=False).faults
    assert fault.path == "model.path" and "generation_config.json cannot be read" in fault.message
    (folder / "generation_config.json").unlink()
    assert not examine(plan(folder, tmp_path, [SHORT], [SHORT]), starts=False).faults


@pytest.mark.parametrize("role", ["reference", "critic"])
def test_a_critic_or_reference_that_cannot_be_read_is_a_fault(model: Path, tmp_path: Path, role: str) -> None:
    adapter, broken = tmp_path / "adapter", tmp_path / "broken"
    for folder, file in ((adapter, "adapter_config.json"), (broken, "config.json")):
        folder.mkdir()
        (folder / file).write_text("{")
    algorithm = ("algorithm=ppo", "algorithm.kl_coef=0.1", "algorithm.kl=k3")
    for folder, why in ((adapter, "it has no config.json, only an adapter: give"), (broken, "not a valid JSON file")):
        found = plan(model, tmp_path, [SHORT], [SHORT], *algorithm, f"model.{role}={folder}")
        examination = examine(found, starts=False)
        (fault,) = examination.faults
        assert fault.path == f"model.{role}" and why in fault.message
        (unknown,) = estimate_memory(found, examination.built).unknown
        assert unknown.startswith("memory is not estimated: ")


def test_settings_that_change_nothing_are_noted(model: Path, tmp_path: Path) -> None:
    def noted(*given: str) -> list[str]:
        found = examine(plan(model, tmp_path, [SHORT], [SHORT], *given), starts=False)
        return [note.path for note in found.notes]

    critic = ("learner.critic_lr=1.0e-5", "learner.value_init=small", "critic.ranks=1", f"model.critic={model}")
    assert noted(*critic, "algorithm=grpo") == [
        "model.critic", "critic.ranks", "learner.critic_lr", "learner.value_init",
    ]  # fmt: skip
    assert noted(*critic, "algorithm=ppo") == []
    assert noted("algorithm=dapo", "reference.ranks=1", "learner.lr=0", "learner.final_ratio=0.5") == [
        "reference.ranks", "learner.final_ratio", "learner.lr",
    ]  # fmt: skip
    assert noted("steps=3", "passes=2", "learner.warmup_steps=7") == ["learner.warmup_steps"]
    assert noted("steps=3", "passes=2", "learner.warmup_steps=6") == []
    unread = ("algorithm.value_clip=0.2", "algorithm.kl_coef=0", "algorithm.kl=k3", "algorithm.norm=9")
    assert noted("algorithm=grpo", *unread, "algorithm.passing=0.5") == [
        "algorithm.value_clip", "algorithm.kl", "algorithm.norm", "algorithm.passing",
    ]  # fmt: skip
    assert noted("algorithm=ppo", "algorithm.value_clip=0.2", "algorithm.kl_coef=0.1", "algorithm.kl=k3") == []
    assert noted("algorithm=dr_grpo", "algorithm.norm=9") == noted("algorithm=kto", "algorithm.passing=0.5") == []
    assert noted("algorithm=grpo", "reference.ranks=1", "learner.final_ratio=0.5", "learner.schedule=cosine") == []


def test_losses_without_a_ratio_are_noted_if_batches_are_used_for_several_updates(model: Path, tmp_path: Path) -> None:
    def noted(*given: str) -> list[str]:
        found = examine(plan(model, tmp_path, [SHORT], [SHORT], *given), starts=False)
        return [note.message for note in found.notes if note.path == "algorithm.policy_loss"]

    for loss in ("reinforce", "gpg"):
        (note,) = noted(f"algorithm.policy_loss={loss}", "passes=2", "minibatches=2")
        assert note.startswith(f"{loss} learns as if") and "first of 4 optimiser steps" in note
        assert noted(f"algorithm.policy_loss={loss}") == []
    for algorithm in ("grpo", "gspo", "topr", "cispo", "dpo", "kto", "raft", "grpo, policy_loss: kl_cov"):
        assert noted(f"algorithm={{use: {algorithm}}}", "passes=2") == []


def test_dynamic_sampling_without_filters_is_noted(model: Path, tmp_path: Path) -> None:
    def noted(*given: str) -> list[str]:
        found = examine(plan(model, tmp_path, [SHORT], [SHORT], *given), starts=False)
        return [note.path for note in found.notes]

    assert noted("rollout.dynamic_sampling=true") == ["rollout.dynamic_sampling"]
    assert noted("rollout.dynamic_sampling=true", "algorithm.filters=[nonzero_variance]") == []
    assert noted("algorithm=dapo") == []


def test_where_it_is_no_fault_of_max_prompt_tokens_the_checks_name_the_models_length(
    model: Path, tmp_path: Path
) -> None:
    length = len(ChatTokenizer.of(plan(model, tmp_path, [SHORT], [SHORT])).encode(LONG["prompt"]))
    assert length > 24
    (fault,) = examine(plan(model, tmp_path, [LONG], [SHORT]), starts=False).faults
    assert fault.path == "model.max_length" and f"give at least {length + 1}" in fault.message
    (fault,) = examine(plan(model, tmp_path, [SHORT, LONG], [SHORT], "long_prompts=error"), starts=False).faults
    assert fault.path == "model.max_length" and "long_prompts=error" in fault.message
    (fault,) = examine(plan(model, tmp_path, [SHORT], [SHORT, LONG]), starts=False).faults
    assert fault.path == "model.max_length" and f"tasks.eval has a prompt of {length} tokens" in fault.message


def test_prompts_that_the_tokenizer_does_not_know_are_a_fault_unless_some_are_known(
    model: Path, tmp_path: Path
) -> None:
    odd = {"prompt": "\u732b\u72ac\u9ce5=", "answer": "2"}
    some = examine(plan(model, tmp_path, [SHORT, odd], [SHORT]), starts=False)
    (note,) = (each for each in some.notes if each.path == "tasks.train")
    assert not some.faults
    assert "for most of what 1 of 2 prompts that were tried say: task 'train:1' becomes '<unk><unk>" in note.message
    (fault,) = examine(plan(model, tmp_path, [odd], [SHORT]), starts=False).faults
    assert fault.path == "tasks.train"
    assert "has no token for most of what the prompts say: task 'train:0' becomes" in fault.message


def test_a_chat_template_does_not_hide_that_the_tokenizer_does_not_know_the_prompts(
    model: Path, tmp_path: Path
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(f"{'1+' * 20}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}=")
    chat = ("tasks.train.chat=true", f"model.renderer={{use: template, file: {template}}}", "model.max_length=200")
    for prompt in ("\u732b\u72ac\u9ce5=", "\u732b\u72ac\u9ce5 1"):
        odd = {"prompt": prompt, "answer": "2"}
        (fault,) = examine(plan(model, tmp_path, [odd], [SHORT], *chat), starts=False).faults
        assert "has no token for most of what the prompts say: task 'train:0' becomes '<unk><unk>" in fault.message
    assert not examine(plan(model, tmp_path, [SHORT], [SHORT], *chat), starts=False).faults


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("None", "returned NoneType; expected a list of rlsdk.Task"),
        ("(t for t in ())", "returned generator; expected a list of rlsdk.Task"),
        ("{}", "returned dict; expected a list of rlsdk.Task"),
        ("[]", "holds no task"),
        ("['1+1=']", "holds str; expected rlsdk.Task"),
        ("exit(0)", "failed: SystemExit: 0 (lab.py, line 5)"),
    ],
)
def test_a_source_that_holds_something_else_than_tasks_is_a_fault(
    model: Path, tmp_path: Path, made: str, said: str
) -> None:
    lab = tmp_path / "lab.py"
    lab.write_text(f"import rlsdk\n\n@rlsdk.tasks('mine')\ndef mine():\n    return {made}\n")
    one = plan(model, tmp_path, [SHORT], [SHORT], "tasks.train=lab/mine", f"plugins=[{lab}]")
    (fault,) = examine(one, starts=False).faults
    assert (fault.path, fault.message.replace(f"{tmp_path}/", "")) == ("tasks.train", f"source 'lab/mine' {said}")
