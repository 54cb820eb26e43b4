"""A run resumed with another configuration, or without its plugins: shown, refused and kept settings."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml
from rich.console import Console

from rlsdk.checkpoints.checkpoint import SECTIONS, Checkpoints
from rlsdk.config import Plan, check
from rlsdk.errors import CheckpointError, ConfigError, PluginError, RlsdkError
from rlsdk.learners.checkpoint import write_manifest
from rlsdk.opening.changes import HARMLESS, settings_of
from rlsdk.opening.record import RunRecord
from rlsdk.opening.resuming import Prepared, check_resumed, finished_before, prepare_folder
from rlsdk.readiness.base_models import fingerprints
from rlsdk.readiness.data_files import data_fingerprints
from rlsdk.runlog.observers import Observers
from rlsdk.runlog.store import DATABASE, Address, RolloutStore
from rlsdk.trainer import Trainer
from tests.trainer.fakes import MODEL, FakeLearner, ScriptedRollouts, make_plan

OBSERVER = "import rlsdk\n\n@rlsdk.hookimpl\ndef rlsdk_step_end(step):\n    pass\n"


class Run:
    """The folder of a run, prepared again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        self.common: dict[str, Any] = {
            "name": "trial",
            "out": str(folder / "runs"),
            "model": str(folder / "model"),
            "tasks": {"train": {"use": "countdown", "size": 100}},
            "reward": "countdown",
            "steps": 2,
            "learner": {"use": "deepspeed", "lr": 1.0e-4},
            "placement": {"device": "cpu"},
        }

    def plan(self, *changes: str, plugins: tuple[str, ...] = ()) -> Plan:
        return check(self.common, changes, plugins)

    def prepare(self, plan: Plan, *, loads: bool = True, **how: Any) -> Prepared:
        """Prepare the folder; with `loads`, the learner can load the checkpoint."""
        how = {"resume": False, "overwrite": False, "allow_changes": False, **how}
        found = prepare_folder(plan, Checkpoints(plan.folder, 2), **how)
        return attrs.evolve(found, notices=(*found.notices, *found.keep_changes()) if loads else found.notices)

    def begin(self, *changes: str, plugins: tuple[str, ...] = (), step: int = 4) -> None:
        """A run with a checkpoint."""
        self.prepare(self.plan(*changes, plugins=plugins))
        self.save(*changes, plugins=plugins, step=step)

    def save(self, *changes: str, plugins: tuple[str, ...] = (), step: int = 4) -> None:
        """A checkpoint."""
        plan = self.plan(*changes, plugins=plugins)
        marks = {"plugins": plan.code, "models": fingerprints(plan), "data": data_fingerprints(plan)}
        state = {**{key: {} for key in SECTIONS}, **marks}
        Checkpoints(plan.folder, 2).save(step, state, lambda _: None)

    def resume(
        self, *changes: str, plugins: tuple[str, ...] = (), allow_changes: bool = False, step: bool | int = True
    ) -> Prepared:
        return self.prepare(self.plan(*changes, plugins=plugins), resume=step, allow_changes=allow_changes)

    def kept(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "runs" / "trial").glob("config*.yaml"))

    def text(self, name: str = "config.yaml") -> str:
        return (self.folder / "runs" / "trial" / name).read_text()


def test_a_folder_of_somebody_else_is_neither_used_nor_deleted(run: Run) -> None:
    folder = run.folder / "runs" / "trial"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    for how in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(ConfigError, match=r"not a run of rlsdk|was not made by rlsdk"):
            run.prepare(run.plan(), **how)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("how", [{}, {"resume": True}, {"overwrite": True}])
def test_a_folder_with_an_evaluation_or_a_server_alone_may_become_a_run(run: Run, how: dict[str, bool]) -> None:
    folder = run.folder / "runs" / "trial"
    evaluated, program = folder / "eval" / "model" / "evaluation.json", folder / "cache" / "engine-0" / "kernel.so"
    for file in (evaluated, program, folder / "serve" / "logs" / "engine-0.log"):
        file.parent.mkdir(parents=True)
        file.touch()
    assert run.prepare(run.plan(), **how).step is None
    assert evaluated.exists() and not program.exists()


def test_overwrite_deletes_the_run(run: Run) -> None:
    run.begin()
    assert run.prepare(run.plan(), overwrite=True).step is None
    assert not Checkpoints(run.plan().folder, 2).latest()


def test_a_run_that_finished_no_step_starts_again_with_other_settings(run: Run) -> None:
    run.prepare(run.plan())
    folder = run.plan().folder
    (folder / "metrics.jsonl").write_text('{"step": 0, "accuracy/mean": 0.1}\n')
    (folder / "logs" / "driver.log").write_text("why it failed")
    found = run.prepare(run.plan("learner.lr=0.5"))
    assert found.step is None
    assert found.notices[0] == f"the earlier run in {folder} did not finish a step; it starts again from the beginning"
    assert "learner.lr: was 0.0001, is 0.5" in found.notices[1]
    assert yaml.safe_load(run.text())["learner"]["lr"] == 0.5
    assert (folder / "logs" / "driver.log").read_text() == "why it failed"
    assert run.resume("learner.lr=0.25").step is None  # there is no training that the change could mix


@pytest.mark.parametrize("left", ["metrics.jsonl", "annotations.jsonl", "checkpoints/step-1.damaged/state.json"])
@pytest.mark.parametrize("text", ['{"step": 0}\n{"step": 1}\n', "garbled\n"])
def test_a_run_of_which_anything_would_be_lost_is_not_started_again(run: Run, left: str, text: str) -> None:
    run.prepare(run.plan())
    kept = run.plan().folder / left
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(text)
    with pytest.raises(ConfigError, match="already holds a run; continue it with --resume"):
        run.prepare(run.plan())
    with pytest.raises(ConfigError, match="resuming it would mix two training runs"):
        run.resume("learner.lr=0.5")
    assert kept.read_text() == text


def test_what_an_interrupted_overwrite_left_is_deleted_by_the_next_start(run: Run) -> None:
    run.begin()
    runs = run.folder / "runs"
    (runs / "trial").rename(runs / ".trial.deleted-0123abcd")  # and was killed
    run.prepare(run.plan())
    assert [path.name for path in runs.iterdir()] == ["trial"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return Run(tmp_path)


def test_the_same_configuration_continues_and_leaves_the_file_alone(run: Run) -> None:
    run.begin()
    before = run.text()
    assert run.resume() == Prepared(4)
    assert run.kept() == ["config.yaml"] and run.text() == before


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ("learner.lr=0.001", "learner.lr: was 0.0001, is 0.001"),
        ("learner.zero_stage=2", "learner.zero_stage: was "),
        ("seed=7", "seed: was 0, is 7"),
        ("batch_size=32", "batch_size: was 64, is 32"),
        ("algorithm=rloo", "algorithm.use: was grpo, is rloo"),
        ("algorithm.policy_loss.clip_high=0.3", "algorithm.policy_loss.clip_high: was 0.2, is 0.3"),
        ("algorithm.entropy_coef={target: 0.2}", "algorithm.entropy_coef: was 0, is 0 to 1, from 0 in steps of 0.005"),
        ("reward.format_score=0.5", "reward.format_score: was 0.1, is 0.5"),
        ("tasks.train.size=200", "tasks.train.size: was 100, is 200"),
        ("sampling.max_tokens=100", "sampling.max_tokens: was 256, is 100"),
        ("rollout.max_staleness=1", "rollout.max_staleness: was 0, is 1"),
        ("model.dtype=bfloat16", "model.dtype: was float32, is bfloat16"),
        ("engine=transformers", "engine.use: was vllm, is transformers"),
    ],
)
def test_what_makes_it_another_training_is_shown_and_refused(run: Run, change: str, shown: str) -> None:
    run.begin()
    before = run.text()
    with pytest.raises(ConfigError) as refused:
        run.resume(change)
    assert shown in str(refused.value)
    assert "--allow-changes (in Python: allow_changes=True)" in str(refused.value)
    assert run.kept() == ["config.yaml"] and run.text() == before


def test_a_schedule_of_the_same_greatest_value_is_another_training(run: Run) -> None:
    run.begin("algorithm.kl_coef={from: 0.1, to: 0.0, over: 5}")
    with pytest.raises(ConfigError, match=r"algorithm\.kl_coef: was 0\.1 to 0 over 5 steps, is 0\.1 to 0 over 9 steps"):
        run.resume("algorithm.kl_coef={from: 0.1, to: 0.0, over: 9}")


def test_with_leave_it_goes_on_and_the_old_file_is_kept(run: Run) -> None:
    run.begin()
    before = run.text()
    summary = run.folder / "runs" / "trial" / "summary.json"
    summary.touch()
    assert run.resume() == Prepared(4) and summary.exists()
    found = run.resume("learner.lr=0.001", allow_changes=True)
    assert not summary.exists()  # it is that of the old configuration
    assert found.step == 4
    assert found.notices == (
        "changed since the run was last started: learner.lr: was 0.0001, is 0.001",
        "the previous configuration is kept as config.step-4.yaml",
    )
    assert run.text("config.step-4.yaml") == before and "lr: 0.001" in run.text()
    run.resume("learner.lr=0.01", allow_changes=True)
    assert run.kept() == ["config.step-4-2.yaml", "config.step-4.yaml", "config.yaml"]
    assert "lr: 0.001" in run.text("config.step-4-2.yaml")


def test_a_change_that_the_learner_refuses_leaves_the_configuration_as_it_is(run: Run) -> None:
    run.begin()
    before = run.text()
    run.prepare(run.plan("learner.zero_stage=2"), loads=False, resume=True, allow_changes=True)
    assert run.kept() == ["config.yaml"] and run.text() == before
    assert run.resume() == Prepared(4)


@pytest.mark.parametrize(
    "change",
    [
        "steps=20",
        "trackers=[tensorboard]",
        "placement.engines=2",
        "checkpoint.every=1",
        "eval.every=5",
        "log_level=debug",
        "save_rollouts=10",
    ],
)
def test_changes_without_effect_on_the_training_continue_with_a_notice(run: Run, change: str) -> None:
    run.begin()
    found = run.resume(change)
    path = change.partition("=")[0]
    assert found.step == 4 and found.notices[0].startswith(f"changed since the run was last started: {path}")
    assert run.kept() == ["config.step-4.yaml", "config.yaml"]


@pytest.mark.parametrize("text", ["", "name: [trial", "- a list", "\xff"])
def test_a_damaged_configuration_is_named_and_without_one_nothing_is_compared(run: Run, text: str) -> None:
    run.begin()
    kept = run.plan().folder / "config.yaml"
    kept.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.yaml is damaged: it contains no configuration; .* or delete it"):
        run.resume("learner.lr=1")
    kept.unlink()
    assert "the run's folder has no config.yaml: the settings are not compared with the previous ones" in (
        run.resume("learner.lr=1").notices
    )


def test_an_explicit_default_is_not_a_change(run: Run) -> None:
    run.begin()
    same = ("batch_size=64", "tasks.train.seed=0", "algorithm.policy_loss.clip_high=0.2", "learner.lr=0.0001")
    assert run.resume(*same) == Prepared(4)


def test_several_corrections_are_compared_one_by_one(run: Run) -> None:
    run.begin("algorithm.correction=[tis, {use: divergence_mask, threshold: 0.02}]")
    same = "algorithm.correction=[{use: tis, cap: 2.0}, {use: divergence_mask, threshold: 0.02, level: mean}]"
    assert run.resume(same) == Prepared(4)
    with pytest.raises(ConfigError, match=r"algorithm\.correction\[1\]\.threshold: was 0\.02, is 0\.03"):
        run.resume("algorithm.correction=[tis, {use: divergence_mask, threshold: 0.03}]")
    with pytest.raises(ConfigError, match=r"algorithm\.correction\.use: was nothing, is tis"):
        run.resume("algorithm.correction=tis")


def test_a_list_of_one_correction_is_no_change(run: Run) -> None:
    run.begin("algorithm.correction=tis")
    assert run.resume("algorithm.correction=[tis]") == Prepared(4)


def test_before_the_first_checkpoint_changes_are_refused_as_well(run: Run) -> None:
    run.prepare(run.plan())
    (run.plan().folder / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="seed: was 0, is 1"):
        run.resume("seed=1")
    assert run.resume("seed=1", allow_changes=True).step is None
    assert run.kept() == ["config.step-0.yaml", "config.yaml"]


def test_every_harmless_path_is_a_setting(run: Run) -> None:
    known = settings_of(run.plan("trackers=[tensorboard]"))
    for path in HARMLESS:
        assert any(key == path or key.startswith((f"{path}.", f"{path}[")) for key in known), path


def test_a_kept_configuration_that_does_not_hold_any_more_is_compared_as_it_is_written(run: Run) -> None:
    run.begin()
    file = run.folder / "runs" / "trial" / "config.yaml"
    file.write_text(file.read_text() + "retired_setting: 3\n")
    with pytest.raises(ConfigError, match="retired_setting: was 3, is nothing"):
        run.resume()
    with pytest.raises(ConfigError) as refused:
        run.resume("reward=[{use: countdown, format_score: 0.5}]")
    assert "reward[0].format_score: was nothing, is 0.5\n" in str(refused.value)
    assert "reward[0].use" not in str(refused.value)  # a name and `use` are the same


def test_a_plugin_that_only_observed_and_is_left_out_is_named_with_its_file(run: Run) -> None:
    (run.folder / "lab.py").write_text(OBSERVER)
    run.begin(plugins=("lab.py",))
    assert "# plugin lab: file lab.py, source " in run.text()
    with pytest.raises(PluginError) as refused:
        run.resume()
    said = str(refused.value)
    assert "started with the plugin file lab.py, which this command lacks; add --plugin lab.py" in said
    assert "{" not in said
    assert run.resume(plugins=("lab.py",)).step == 4
    assert run.resume(allow_changes=True).notices == ("plugin lab is left out",)


def test_a_plugin_that_the_configuration_needs_is_named_before_what_it_lacks(run: Run) -> None:
    (run.folder / "lab.py").write_text("import rlsdk\n\n@rlsdk.reward('mine')\ndef mine(rollout):\n    return 1.0\n")
    run.common["reward"] = "lab/mine"
    run.begin(plugins=("lab.py",))
    with pytest.raises(ConfigError) as refused:
        check_resumed(run.common, (), ())
    assert refused.value.faults[0].endswith("this command lacks; add --plugin lab.py")
    assert "reward" in refused.value.faults[1]
    assert check_resumed(run.common, (), ("lab.py",)).folder == run.plan(plugins=("lab.py",)).folder


def test_changed_code_of_a_plugin_is_refused_in_words_and_accepted_with_leave(run: Run) -> None:
    (run.folder / "lab.py").write_text(OBSERVER)
    run.begin(plugins=("lab.py",))
    before, then = run.text(), run.plan(plugins=("lab.py",)).code["lab"]["source"]
    (run.folder / "lab.py").write_text(OBSERVER + "\nMORE = 1\n")
    with pytest.raises(PluginError) as refused:
        run.resume(plugins=("lab.py",))
    said, now = str(refused.value), run.plan(plugins=("lab.py",)).code["lab"]["source"]
    was = f"plugin lab was source {then[:12]}, is source {now[:12]}"
    assert was in said and "accept the changes with --allow-changes" in said and "{" not in said
    assert run.text() == before
    found = run.resume(plugins=("lab.py",), allow_changes=True)
    assert found.step == 4 and found.notices[0] == was
    assert run.text("config.step-4.yaml") == before and f"source {now}" in run.text()
    run.save(plugins=("lab.py",), step=5)
    assert run.resume(plugins=("lab.py",)).step == 5


def test_a_changed_chat_template_is_refused_and_an_equal_one_elsewhere_is_not(run: Run) -> None:
    file, copy = run.folder / "chat.jinja", run.folder / "copy.jinja"
    for each in (file, copy):
        each.write_text("{{ messages[0].content }}")
    named = f"model.renderer={{file: {file}}}"
    run.begin(named)
    assert "\n# plugin chat template: " in f"\n{run.text()}"
    kept = run.folder / "runs" / "trial" / "code"
    assert (kept / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    run.resume(f"model.renderer={{file: {copy}}}", allow_changes=True)
    copy.write_text("{{ messages[0].content }}!")
    with pytest.raises(PluginError, match=r"- chat template was source [0-9a-f]+, is source"):
        run.resume(f"model.renderer={{file: {copy}}}")
    assert [file.name for file in kept.iterdir()] == ["chat_template.jinja"]
    assert run.resume(f"model.renderer={{file: {copy}}}", allow_changes=True).step == 4
    assert (kept / "chat_template.jinja").read_text() == "{{ messages[0].content }}!"
    assert (kept / "chat_template.step-4.jinja").read_text() == "{{ messages[0].content }}"


@pytest.mark.parametrize("file, what", [
    ("model.safetensors", "weights"),
    ("tokenizer.json", "files of its configuration or tokenizer"),
])  # fmt: skip
def test_other_content_of_the_base_model_is_refused_and_accepted_with_leave(run: Run, file: str, what: str) -> None:
    path, size = run.folder / "model" / file, 2**20
    path.write_bytes(bytes(size))
    run.begin()
    (run.folder / "model" / "README.md").touch()
    assert run.resume().notices == ()
    path.write_bytes(bytes(size // 2) + b"\1" * (size // 2))  # equal size
    with pytest.raises(ConfigError, match=rf"model\.path: {what} in .*/model differ .* --allow-changes"):
        run.resume()
    assert f"model.path: {what} differ from those at step 4" in run.resume(allow_changes=True).notices


def test_another_revision_of_a_hub_model_in_the_cache_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(run.folder / "hub"))
    cache = run.folder / "hub" / "models--lab--tiny"
    (cache / "refs").mkdir(parents=True)

    def download(commit: str) -> None:
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "snapshots" / commit / "config.json").write_text("{}")
        (cache / "refs" / "main").write_text(commit)

    run.common["model"] = "lab/tiny"
    run.begin()  # not cached: nothing to compare with
    assert fingerprints(run.plan()) == {}
    download("a" * 40)
    assert run.resume().notices == ()
    run.save(step=5)
    assert run.resume().notices == ()
    download("b" * 40)
    with pytest.raises(ConfigError, match=r"model\.path: files of the revision from the hub in lab/tiny differ from"):
        run.resume()
    assert run.resume(allow_changes=True).step == 5


def test_a_path_that_names_the_same_files_from_another_folder_has_not_changed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.folder)
    run.common |= {"model": "model", "out": "runs"}
    run.begin()
    (run.folder / "other" / "model").mkdir(parents=True)
    (run.folder / "other" / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(run.folder / "other")
    run.common |= {"model": "../model", "out": "../runs"}
    assert run.resume() == Prepared(4)
    run.common["model"] = "./model"
    with pytest.raises(ConfigError, match=r"model\.path: was model, is \./model"):
        run.resume()


def test_the_function_of_a_file_named_from_another_folder_has_not_changed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.folder)
    code = "def mine(completions, **kwargs):\n    return [1.0 for _ in completions]\nother = mine\n"
    (run.folder / "lab.py").write_text(code)
    run.common["reward"] = {"use": "foreign", "path": "./lab.py:mine"}
    run.begin()
    (run.folder / "other").mkdir()
    monkeypatch.chdir(run.folder / "other")
    run.common["reward"] = {"use": "foreign", "path": "../lab.py:mine"}
    (told,) = run.resume().notices
    assert told.startswith("this run executes foreign ../lab.py:mine")
    run.common["reward"]["path"] = "../lab.py:other"
    with pytest.raises(ConfigError, match=r"reward\[0\]\.path: was \./lab\.py:mine, is \.\./lab\.py:other"):
        run.resume()


def test_a_file_of_the_same_name_in_another_folder_has_changed_if_its_content_has(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.folder / "other").mkdir()
    for folder in (run.folder, run.folder / "other"):
        (folder / "tasks.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    monkeypatch.chdir(run.folder)
    run.common["tasks"] = {"train": {"use": "jsonl", "path": "tasks.jsonl"}}
    run.begin()
    monkeypatch.chdir(run.folder / "other")
    assert run.resume() == Prepared(4)
    Path("tasks.jsonl").write_text('{"prompt": "1 + 2?", "answer": "3"}\n')
    with pytest.raises(ConfigError, match=r"tasks\.train\.path: was /.*/tasks\.jsonl, is /.*/other/tasks\.jsonl"):
        run.resume()


def test_a_folder_of_the_same_name_elsewhere_has_changed_if_a_file_in_it_has(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (run.folder, run.folder / "other"):
        (folder / "data" / "parts").mkdir(parents=True)
        (folder / "data" / "parts" / "1.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
        (folder / "data" / "parts" / ".cache").write_text(str(folder))
    monkeypatch.chdir(run.folder)
    run.common["tasks"] = {"train": {"use": "hub", "name": "data/parts"}}
    run.begin()
    monkeypatch.chdir(run.folder / "other")
    assert run.resume() == Prepared(4)
    Path("data", "parts", "1.jsonl").write_text('{"prompt": "1 + 2?", "answer": "3"}\n')
    with pytest.raises(ConfigError, match=r"tasks\.train\.name: was /.*/data/parts, is /.*/other/data/parts"):
        run.resume()


ROW = '{"prompt": "1 + 1?", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("tasks", "file"),
    [
        ({"use": "jsonl", "path": "data/train.jsonl"}, "train.jsonl"),
        ({"use": "jsonl", "path": ["data/train.jsonl", "data/more.jsonl"]}, "more.jsonl"),
        ({"use": "jsonl", "path": "data/*.jsonl"}, "more.jsonl"),
        ({"use": "jsonl", "path": "data"}, "train.jsonl"),
        ({"use": "hub", "name": "./data"}, "train.jsonl"),
    ],
)
def test_data_that_was_edited_in_its_place_is_refused(
    run: Run, tasks: dict[str, Any], file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.folder)
    Path("data").mkdir()
    for name in ("train.jsonl", "more.jsonl"):
        Path("data", name).write_text(ROW * 20_000)
    run.common["tasks"] = {"train": tasks}
    run.begin()
    Path("data", file).touch()
    Path("data", ".cache").touch()
    assert run.resume() == Prepared(4)
    Path("data", file).write_text(ROW * 9_999 + ROW.replace("2", "3") + ROW * 10_000)  # of the same size
    setting = r"tasks\.train\.(path|name)"
    with pytest.raises(ConfigError, match=rf"{setting}: the contents of .*data.* differ from those that the run in"):
        run.resume()
    (notice,) = run.resume(allow_changes=True).notices
    assert re.match(rf"{setting}: the contents of .*data.* differ from those at step 4", notice)


def test_what_is_added_to_annotated_runs_besides_annotations_is_no_data(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.folder)
    Path("annotated").mkdir()
    Path("annotated", "annotations.jsonl").write_text("{}\n")
    run.common["tasks"] = {"train": {"use": "annotations", "path": "annotated", "take": "pairs"}}
    run.begin()
    Path("annotated", "metrics.jsonl").write_text("{}\n")
    assert run.resume() == Prepared(4)
    Path("annotated", "annotations.jsonl").write_text("{}\n{}\n")
    with pytest.raises(ConfigError, match=r"tasks\.train\.path: the contents of annotated differ from"):
        run.resume()


def test_what_killed_processes_had_written_aside_is_deleted_and_what_others_write_is_not(run: Run) -> None:
    run.begin()
    folder, dead = run.folder / "runs" / "trial", 2**22 + 1  # beyond the greatest id of a process
    (folder / "code").mkdir()
    names = {f".config.yaml.{dead}.partial": 100, f"code/.lab.py.{dead}.partial": 100}
    kept = {f".summary.json.{dead}.partial": 0, f".alerts.jsonl.{os.getpid()}.partial": 100, ".mine.partial": 100}
    for name, age in {**names, **kept}.items():
        (folder / name).touch()
        os.utime(folder / name, (time.time() - age,) * 2)
    run.resume()
    assert {name: (folder / name).exists() for name in (*names, *kept)} == {
        **dict.fromkeys(names, False),
        **dict.fromkeys(kept, True),
    }


@pytest.mark.parametrize("models", [{}, {"models": None}, {"models": ["x"]}, {"models": {"model.path": 1}}])
def test_a_checkpoint_without_fingerprints_is_resumed_without_a_comparison_of_the_model(
    run: Run, models: dict[str, Any]
) -> None:
    run.begin()
    (run.folder / "model" / "config.json").write_text('{"changed": true}')
    state = {**{key: {} for key in SECTIONS}, "plugins": run.plan().code, **models}
    Checkpoints(run.plan().folder, 2).save(5, state, lambda _: None)
    assert run.resume().step == 5


def test_a_trainer_keeps_the_fingerprints_of_the_model_and_the_data_that_it_has_loaded(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    how: dict[str, Any] = {"tasks": {"train": {"use": "jsonl", "path": str(data)}}, "reward": "exact_match"}
    plan = make_plan(tmp_path, model={"path": str(tmp_path / "model"), "max_length": 64}, steps=1, **how)
    before = fingerprints(plan), data_fingerprints(plan)
    trainer = Trainer(plan, rollouts=ScriptedRollouts(plan), learner=FakeLearner())
    (tmp_path / "model" / "config.json").write_text("{}")
    data.write_text('{"prompt": "1 + 1?", "answer": "3"}\n')
    trainer.save()
    state = trainer.checkpoints.read(0)
    assert state["models"] == before[0] != fingerprints(plan)
    assert state["data"] == before[1] != data_fingerprints(plan) and list(before[1]) == ["tasks.train.path"]


def test_the_data_files_of_a_resumed_run_are_read_once(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    how: dict[str, Any] = {"tasks": {"train": {"use": "jsonl", "path": str(data)}}, "reward": "exact_match"}
    plan = make_plan(tmp_path, steps=1, **how)
    before, checkpoints = data_fingerprints(plan), Checkpoints(plan.folder, 2)
    prepared = prepare_folder(plan, checkpoints, resume=True, overwrite=False, allow_changes=False)
    data.unlink()
    console, observers = Console(quiet=True), Observers(plan.plugins)
    record = RunRecord(plan, console, checkpoints, observers, None, None, 0.0, list, prepared.data)
    learner: Any = FakeLearner()
    trainer = Trainer.of_run(record, ScriptedRollouts(plan), learner, 1)
    assert trainer.data_files == before != {}


def test_a_new_plugin_needs_leave(run: Run) -> None:
    run.begin()
    (run.folder / "lab.py").write_text(OBSERVER)
    with pytest.raises(PluginError, match=r"plugin lab .* is new; leave it out, or pass --allow-changes"):
        run.resume(plugins=("lab.py",))
    new, told = run.resume(plugins=("lab.py",), allow_changes=True).notices
    assert new == "plugin lab is new"
    source = run.plan(plugins=("lab.py",)).code["lab"]["source"]
    assert told == f"this run executes the plugin file lab.py, source {source[:16]}"


def test_a_marked_object_is_the_same_in_another_process(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that replaces a name in a script is compared by its code, not by its address."""
    sources: list[Callable[[], Any]] = []
    for _ in range(2):
        space: dict[str, Any] = {"__name__": "lab_script"}
        exec("import rlsdk\n\n@rlsdk.reward('mine')\ndef mine(rollout):\n    return 1.0\n", space)
        sources.append(space["mine"])
    run.common["reward"] = sources[0]
    run.begin()
    run.common["reward"] = sources[1]
    found = run.resume()
    assert found.step == 4
    (notice,) = found.notices  # no file or cell holds them
    assert "the source of reward 'mine' cannot be kept" in notice


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_run_continues_from_the_previous_one(run: Run) -> None:
    run.begin(step=4)
    checkpoints = Checkpoints(run.plan().folder, 2)
    checkpoints.save(8, {**{key: {} for key in SECTIONS}, "plugins": run.plan().code}, lambda _: None)
    (checkpoints.path(8) / "state.json").write_text("")
    with pytest.raises(ConfigError):
        run.resume("seed=1")
    assert checkpoints.steps() == [4, 8]  # a refusal changes nothing
    found = run.resume()
    assert found.step == 4
    assert "step-8 cannot be read" in found.notices[0] and "kept as step-8.damaged" in found.notices[0]
    assert "from the checkpoint of step 4" in found.notices[1]
    assert checkpoints.steps() == [4]
    assert run.resume() == Prepared(4)


def test_a_checkpoint_that_a_kill_left_between_two_renames_is_continued_from(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    def rename(self: Path, target: Path) -> Path:
        if self.name == ".step-4.partial":
            raise KilledError
        return Path(shutil.move(self, target))

    run.begin()
    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr(Path, "rename", rename)
        run.save(step=4)
    assert Checkpoints(run.plan().folder, 2).steps() == []
    prepared = run.resume()
    assert prepared.step == 4
    assert "killed while it replaced the checkpoint of step 4" in prepared.notices[0]
    run.save(step=5)
    assert sorted(path.name for path in (run.plan().folder / "checkpoints").iterdir()) == ["step-4", "step-5"]
    assert run.resume(step=4).notices[0].startswith("the checkpoint of step 5 is superseded")


def test_a_step_is_resumed_and_newer_checkpoints_are_set_aside(run: Run) -> None:
    run.begin(step=4)
    checkpoints = Checkpoints(run.plan().folder, 3)
    for step in (8, 12):
        checkpoints.save(step, {**{key: {} for key in SECTIONS}, "plugins": run.plan().code}, lambda _: None)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 6; there are: 4, 8, 12"):
        run.resume(step=6)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 1; there are: 4, 8, 12"):
        run.resume(step=1)  # not True
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 0"):
        run.resume(step=0)  # not False
    assert checkpoints.steps() == [4, 8, 12]
    found = run.resume(step=8)
    assert found == Prepared(
        8,
        (
            "the checkpoint of step 12 is superseded; it is kept as step-12.superseded",
            "the run continues from the checkpoint of step 8",
        ),
    )
    assert checkpoints.steps() == [4, 8] and (checkpoints.path(12).with_name("step-12.superseded")).is_dir()
    assert run.resume() == Prepared(8)


def test_a_step_that_is_damaged_is_refused_and_nothing_changes(run: Run) -> None:
    run.begin(step=4)
    checkpoints = Checkpoints(run.plan().folder, 2)
    checkpoints.save(8, {**{key: {} for key in SECTIONS}, "plugins": run.plan().code}, lambda _: None)
    (checkpoints.path(4) / "state.json").write_text("")
    with pytest.raises(CheckpointError, match=r"step-4 cannot be read.*other steps there: 8"):
        run.resume(step=4)
    assert checkpoints.steps() == [4, 8]


def test_a_run_without_steps_left_is_finished_only_if_its_summary_says_so(run: Run) -> None:
    run.begin(step=4)
    plan, summary = run.plan(), run.plan().folder / "summary.json"
    assert finished_before(plan, True, 5) is None
    assert finished_before(plan, True, 4) is None  # killed before it wrote the summary
    for text in ("", '{"status": "interrupted", "steps": 4}', '{"status": "finished", "steps": 3}'):
        summary.write_text(text)
        assert finished_before(plan, True, 4) is None
    summary.write_text('{"status": "finished", "steps": 4}')
    assert finished_before(plan, True, 4) == {"status": "finished", "steps": 4}
    assert finished_before(run.plan("learner.lr=0.5"), True, 4) is None  # refused, or changed with --allow-changes
    assert finished_before(plan, 4, 4) is None  # which also sets newer checkpoints aside
    assert finished_before(plan, False, 4) is None  # refused by other words, or overwritten
    (Checkpoints(plan.folder, 2).path(4) / "state.json").write_text("")
    with pytest.raises(CheckpointError, match="step-4 cannot be read"):
        finished_before(plan, True, 4)


@pytest.mark.parametrize(("resume", "steps"), [(True, 7), (True, 2), (4, 3), (8, 1)])
def test_fewer_steps_than_the_checkpoint_has_are_refused(run: Run, resume: bool | int, steps: int) -> None:
    run.begin(step=4)
    run.save(step=8)
    done = 8 if resume is True else resume
    with pytest.raises(ConfigError) as refused:
        finished_before(run.plan(), resume, steps)
    (fault,) = refused.value.faults
    assert fault.startswith(f"steps: {steps} step") and f"has a checkpoint of step {done}: nothing is left" in fault
    assert ("(there are checkpoints of: 4)" in fault) is (steps > 4)


TRAP = """
import pathlib

pathlib.Path({path!r}).write_text("executed")


def score(completions):
    return [1.0]
"""


@pytest.mark.parametrize(
    "planted",
    [
        {"plugins": ["runs/trial/trap.py"]},
        {"reward": {"use": "foreign", "path": "runs/trial/trap.py:score"}},
        {"reward": {"use": "foreign", "path": "runs.trial.trap:score"}},
        {"workflow": {"use": "agent", "run": "runs/trial/trap.py:score"}},
        {"reward": "trap/score"},
    ],
    ids=str,
)
def test_code_that_only_the_folder_names_is_not_executed(run: Run, planted: dict[str, Any]) -> None:
    """The configuration that a folder keeps is compared with the one that was given, and not obeyed."""
    run.begin()
    folder, trace = run.plan().folder, run.folder / "trace"
    (folder / "trap.py").write_text(TRAP.format(path=str(trace)))
    kept = yaml.safe_load(run.text())
    (folder / "config.yaml").write_text(
        f"# plugin trap: file {folder / 'trap.py'}, source 1\n" + yaml.safe_dump({**kept, **planted})
    )
    with contextlib.suppress(ConfigError):
        run.resume()
    with contextlib.suppress(RlsdkError):
        check_resumed(run.common, (), ())
    assert not trace.exists()
    with contextlib.suppress(RlsdkError):
        check({**run.common, **planted}, (), (str(folder / "trap.py"),))
    assert trace.exists()  # the trap works


def test_what_was_compiled_is_compiled_again(run: Run) -> None:
    run.begin()
    folder = run.plan().folder
    (folder / "cache" / "learner-0").mkdir(parents=True)
    (folder / "cache" / "learner-0" / "kernel.so").touch()
    run.resume()
    assert not (folder / "cache").exists()
    (run.folder / "elsewhere").mkdir()
    (run.folder / "elsewhere" / "mine").touch()
    (folder / "cache").symlink_to(run.folder / "elsewhere")
    run.resume()
    assert not (folder / "cache").exists() and (run.folder / "elsewhere" / "mine").exists()


def test_garbled_lines_of_metrics_are_named_before_anything_starts(run: Run) -> None:
    run.begin()
    metrics = run.plan().folder / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n{"step": 2, "rew\n{"step": 3}\n{"step": 4}\n')
    (notice,) = run.resume().notices
    assert notice == (
        f'{metrics}, line 2: expected a JSON object with a step, got \'{{"step": 2, "rew\'; the line is skipped'
    )


def test_a_lost_line_of_the_checkpoints_step_is_named(run: Run) -> None:
    run.begin()
    metrics = run.plan().folder / "metrics.jsonl"
    metrics.write_text('{"step": 3}\n{"step": 4, "reward/me')
    (notice,) = run.resume().notices
    assert notice.startswith(f"{metrics} has no line of step 4, although its checkpoint is intact")


def test_a_database_that_cannot_be_read_is_set_aside(run: Run) -> None:
    run.begin()
    folder = run.plan().folder
    RolloutStore(Address.make(folder, None, None)).close()
    assert run.resume() == Prepared(4)
    database = folder / DATABASE
    database.write_bytes(b"x" * 512 + database.read_bytes()[512:])
    (notice,) = run.resume().notices
    assert f"{database} cannot be read (file is not a database); it is kept as rollouts.db.damaged" in notice
    RolloutStore(Address.make(folder, None, None)).close()
    assert run.resume() == Prepared(4)


def test_a_number_of_ranks_that_the_learner_cannot_load_is_refused_before_the_folder_changes(run: Run) -> None:
    """The learner would refuse it only after the run's configuration was replaced."""

    def write(folder: Path) -> None:
        (folder / "learner").mkdir()
        for rank in range(2):
            write_manifest(folder / "learner", rank, 2, {"zero_stage": 1, "lora": None})

    run.prepare(run.plan("placement.learners=2"))
    state = {**{key: {} for key in SECTIONS}, "plugins": run.plan().code}
    Checkpoints(run.plan().folder, 2).save(4, state, write)
    before = run.text()
    with pytest.raises(ConfigError, match=r"placement.learners: the checkpoint of step 4 was written by 2 ranks; .*=2"):
        run.resume()
    assert run.kept() == ["config.yaml"] and run.text() == before
    assert run.resume("placement.learners=2") == Prepared(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlsdk.learners.base.TransformersLearner.reshards", True)
        assert run.resume().step == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("learner.zero_stage=3", "zero_stage 1 there, 3 here"),
        ("learner.lora={rank: 4}", r"lora None there, \{'rank': 4.*\} here"),
        ("learner.zero_stage=2 learner.lora={rank: 4}", "zero_stage 1 there, 2 here; lora None there"),
    ],
)
def test_options_that_the_learner_cannot_change_are_refused_before_anything_starts(
    run: Run, change: str, said: str
) -> None:
    """With --allow-changes, a rank would refuse them only after Ray, engines and models were started."""

    def write(folder: Path) -> None:
        (folder / "learner").mkdir()
        write_manifest(folder / "learner", 0, 1, {"zero_stage": 1, "lora": None, "dtype": "float32"})

    run.prepare(run.plan())
    state = {**{key: {} for key in SECTIONS}, "plugins": run.plan().code}
    Checkpoints(run.plan().folder, 2).save(4, state, write)
    before, changes = run.text(), change.split(" learner.")
    settings = [changes[0], *(f"learner.{each}" for each in changes[1:])]
    with pytest.raises(ConfigError, match=f"learner: checkpoint .* with different settings: {said}.*; restore them"):
        run.resume(*settings, allow_changes=True)
    assert run.kept() == ["config.yaml"] and run.text() == before
    assert run.resume("learner.grad_clip=0.5", allow_changes=True).step == 4
