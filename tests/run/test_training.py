"""A whole training on the real stack, and its output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsdk.runlog.query import query
from tests.rollout.codecs import chatml
from tests.rollout.test_thoughts import QWEN

pytestmark = pytest.mark.stack
NOTING = """
import asyncio
import json
import attrs
import rlsdk

FOLDER = []

@rlsdk.hookimpl
def rlsdk_run_start(config, folder):
    FOLDER.append(folder)

@rlsdk.hookimpl
def rlsdk_rollout_done(rollout, score, step):
    with (FOLDER[-1] / "made.jsonl").open("a") as file:
        file.write(json.dumps([step, score.value]) + "\\n")

@rlsdk.advantage("asked")
async def asked(x):
    await asyncio.sleep(0)
    return x.rewards - x.group_mean(x.rewards)

@rlsdk.workflow("renames")
async def renames(task, chat):
    await chat.sample()
    return chat.finish(task=attrs.evolve(task, metadata={**task.metadata, "seen": True}))
"""


def test_metrics_of_every_step(finished: Any) -> None:
    lines = finished.metrics(times=True)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert {"eval/greedy", "eval/sampled"} <= lines[0].keys() & lines[3].keys()
    for line in lines[1:]:
        assert line["canary/gap"] < 1e-3
        assert line["staleness/max"] == 0
        assert line["actor/grad_norm"] > 0
        assert 0 <= line["time/outside_share"] < 1
        assert line["time/step"] >= line["time/produce"] + line["time/update"]


def test_no_update_was_skipped(finished: Any) -> None:
    assert all(line["actor/skipped_updates"] == 0 for line in finished.metrics()[1:])
    assert finished.summary()["skipped_updates"] == {}


def test_the_first_loss_is_on_policy(finished: Any) -> None:
    """The learner's logprobs are those that the engine sampled with, before the first update."""
    assert abs(finished.metrics()[1]["actor/kl_to_behaviour"]) < 1e-4


def test_rollouts_are_saved_and_add_up(finished: Any) -> None:
    rows = query(finished.path(), "step = 2")
    assert len(rows) == 16
    line = finished.metrics()[2]
    assert np.mean([r["reward"] for r in rows]) == pytest.approx(line["reward/mean"])
    assert sum(r["tokens"] for r in rows) == line["rollouts/tokens"]


@pytest.mark.slow
def test_with_dynamic_sampling_raw_rewards_are_those_before_filters(runner: Any, tmp_path: Path) -> None:
    lab = tmp_path / "noting_lab.py"
    lab.write_text(NOTING)
    runner.train(
        f"plugins=[{lab}]",
        "algorithm={use: grpo, advantage: noting_lab/asked, kl_coef: 0.0, filters: [nonzero_variance]}",
        "rollout.dynamic_sampling=true",
        "workflow=noting_lab/renames",
        "engine=transformers",
        "eval.before=false",
        "eval.after=false",
    )
    made = [json.loads(line) for line in (runner.path() / "made.jsonl").read_text().splitlines()]
    lines, tasks = runner.metrics(), runner.summary()["tasks"]
    assert tasks["trained"] == 12  # though each rollout holds a task of its own
    assert tasks["filtered"] > 0
    assert len(made) == 4 * (tasks["trained"] + tasks["filtered"])
    for line in lines:
        rewards = [reward for step, reward in made if step == line["step"]]
        assert line["raw/reward"] == pytest.approx(np.mean(rewards))
        assert line["actor/grad_norm"] > 0  # by an advantage that is awaited
        assert line["groups/trained"] == 1  # the batch is full all the same
        assert len(rewards) >= 16


def test_the_export_opens_and_is_the_trained_model(finished: Any, model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished.summary()["export"]
    trained, start = AutoModelForCausalLM.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(model)
    moved = [not (a == b).all() for a, b in zip(trained.parameters(), start.parameters(), strict=True)]
    assert all(moved)
    assert (
        AutoTokenizer.from_pretrained(folder)("3,17").input_ids
        == AutoTokenizer.from_pretrained(model)("3,17").input_ids
    )


def test_summary_picture_and_logs(finished: Any) -> None:
    summary = finished.summary()
    assert summary["status"] == "finished" and summary["steps"] == 3
    for when in ("accuracy_before", "accuracy_after"):
        assert summary[when].keys() >= {"sampled", "greedy"}
    assert summary["tokens_per_second"] > 0
    assert (finished.path() / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (finished.path() / "logs" / "engine-0.log").is_file()
    assert list((finished.path() / "logs").glob("learner-0*.log"))
    assert "held-out accuracy" in finished.console()
    log = (finished.path() / "logs" / "driver.log").read_text()
    told = [log.index(text) for text in ("run 'run'", "settings: {", "ready after", "held-out accuracy", "saved in")]
    assert told == sorted(told) and "finished after step 3; seconds: " in log


def test_a_tracker_and_an_observer_that_fail_do_not_end_the_run(finished: Any) -> None:
    assert finished.summary()["trackers"] == {
        "tensorboard": "ok",
        "rude_lab/rude": f"open: ConnectionError: no route to the service ({finished.folder / 'rude_lab.py'}, line 7)",
    }
    said = " ".join(finished.console().split())
    assert "plugin rude_lab: 3 of 3 calls failed; the first: rlsdk_step_end: RuntimeError: a hook fails" in said


@pytest.mark.slow
def test_a_run_that_learns_nothing_ends_early_and_fails(runner: Any, tmp_path: Path) -> None:
    lab = tmp_path / "flat_lab.py"
    lab.write_text("import rlsdk\n\n@rlsdk.reward('flat')\ndef flat(rollout):\n    return 0.25\n")
    settings = ("steps=9", "max_empty_steps=2", "engine=transformers", "eval={before: false, after: false}")
    runner.train("--plugin", str(lab), "reward=flat_lab/flat", *settings, code=1)
    summary = runner.summary()
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    assert "every rollout earned 0.25" in summary["error"]
    assert "nothing was learned in this run (2 steps)" in " ".join(runner.console().split())


@pytest.mark.slow
def test_sft_on_dialogues_is_evaluated_in_dialogues(runner: Any) -> None:
    shown = ("tasks.train.demonstrations=1.0", "tasks.train.turns=2", "tasks.train.feedback=':'", "model.max_length=48")
    evaluated = "eval={before: false, limit: 40, workflow: {use: dialogue, turns: 2, feedback: ':'}}"
    runner.train("algorithm=sft", *shown, evaluated, "steps=2", "batch_size=8", "engine=transformers")
    found = runner.metrics()[-1]
    assert 1 < found["eval/workflow/turns"] <= 2
    assert found["eval/invalid"] == 0


THINKING = """
import rlsdk

@rlsdk.workflow("two_thoughts")
async def two_thoughts(task, chat):
    await chat.sample(prefill="<think>\\nhm\\n</think>\\n\\n")
    chat.say("and 2+2?")
    await chat.sample()
    return chat.finish()

@rlsdk.reward("even")
def even(rollout):
    return float((rollout.token_ids[rollout.loss_mask] % 2 == 0).mean())
"""


@pytest.mark.slow
def test_a_conversation_whose_template_drops_thoughts_trains_as_several_rollouts(runner: Any, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = chatml(QWEN).tokenizer
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ends)).save_pretrained(tmp_path / "thinking")
    tokenizer.save_pretrained(tmp_path / "thinking")
    (tmp_path / "thinking_lab.py").write_text(THINKING)
    chat = [{"role": "user", "content": "1+2?"}]
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": chat, "answer": "3"}) + "\n")
    tasks = f"tasks={{train: {{use: jsonl, path: {tmp_path / 'tasks.jsonl'}}}}}"
    model = f"model={{path: {tmp_path / 'thinking'}, max_length: 300}}"
    lab = (
        "--plugin",
        str(tmp_path / "thinking_lab.py"),
        "workflow=thinking_lab/two_thoughts",
        "reward=thinking_lab/even",
    )
    runner.train(*lab, tasks, model, "max_prompt_tokens=64", "steps=2", "engine=transformers", "save_rollouts=1")
    rows = query(runner.path())
    assert len(rows) > len({row["trajectory"] for row in rows}) > 1


@pytest.mark.slow
def test_sft_needs_no_engine(runner: Any) -> None:
    shown = ("tasks.train.demonstrations=1.0", "eval.before=false", "eval.after=false")
    runner.train("algorithm=sft", *shown, "steps=20", "batch_size=64", "group_size=1")
    losses = [line["actor/loss"] for line in runner.metrics()]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    assert not (runner.path() / "logs" / "engine-0.log").exists()
