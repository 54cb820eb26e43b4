"""Relative paths of a configuration: the working folder comes first, then the configuration's folder."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rlsdk.config import check
from rlsdk.config.paths import absolute_paths, working_folder_note
from rlsdk.errors import ConfigError
from rlsdk.readiness.checks import examine

YAML = """\
name: trial
model: model
plugins: [lab.py]
tasks: {train: {use: jsonl, path: data/tasks.jsonl}}
reward: lab.py:mine
algorithm: grpo
steps: 2
batch_size: 4
group_size: 4
engine: transformers
"""
LAB = "import rlsdk\n\n\n@rlsdk.reward('mine')\ndef mine(rollout) -> float:\n    'Mine.'\n    return 1.0\n"


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "configs"
    put(made)
    (made / "trial.yaml").write_text(YAML.replace("reward: lab.py:mine", "reward: lab/mine"))
    return made


def put(folder):
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "data").mkdir()
    (folder / "data" / "tasks.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (folder / "lab.py").write_text(LAB)


def test_files_missing_in_the_working_folder_are_found_next_to_the_configuration(tmp_path, folder, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    plan = check(folder / "trial.yaml")
    assert plan.config.model.path == str(folder / "model")
    assert plan.tasks_train[0].reference.options["path"] == str(folder / "data" / "tasks.jsonl")
    assert plan.config.plugins == (str(folder / "lab.py"),)
    assert plan.folder.as_posix() == "runs/trial"  # what a run writes stays relative to the working folder


def test_from_the_folder_itself_paths_stay_as_they_are_written(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert check("trial.yaml").config.model.path == "model"


def test_the_working_folder_comes_first_and_the_other_one_is_reported(tmp_path, folder, monkeypatch, caplog):
    put(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING, "rlsdk"):
        plan = check("../configs/trial.yaml")
    assert plan.config.model.path == "model"
    told = [record.getMessage() for record in caplog.records]
    assert "model.path: model exists in the working folder, which is used, and next to the configuration" in told[0]
    assert len(told) == 3


@pytest.mark.parametrize("inside", [True, False])
def test_the_configuration_of_a_run_finds_its_files_from_anywhere(tmp_path, folder, monkeypatch, inside):
    run = (folder if inside else tmp_path) / "runs" / "trial"
    run.mkdir(parents=True)
    monkeypatch.chdir(folder)
    (run / "config.yaml").write_text(working_folder_note(run) + (folder / "trial.yaml").read_text())
    for place in (folder, tmp_path, run):
        monkeypatch.chdir(place)
        assert (Path.cwd() / check(run / "config.yaml").config.model.path).samefile(folder / "model")
    folder.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    if inside:  # they moved together
        plan = check(tmp_path / "moved" / "runs" / "trial" / "config.yaml")
        assert Path(plan.config.model.path).samefile(tmp_path / "moved" / "model")
    else:
        with pytest.raises(ConfigError, match="there is no folder 'model'"):
            check(run / "config.yaml")


def test_paths_that_mean_the_same_are_equal_texts(folder):
    (folder / "deep").mkdir()
    tree = {"name": "data/x", "model": {"path": "deep/../model"}, "reward": ["lab.py:mine", "Qwen/Qwen3", "grpo"]}
    assert absolute_paths(tree, folder) == {
        "name": "data/x",
        "model": {"path": str(folder.resolve() / "model")},
        "reward": [f"{folder.resolve() / 'lab.py'}:mine", "Qwen/Qwen3", "grpo"],
    }
    assert absolute_paths(tree, None)["model"] == {"path": "model"}


def test_text_that_is_not_a_path_stays(tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("trial", "train", "grpo", "1", "core"):
        (folder / name).mkdir()
    plan = check(folder / "trial.yaml", ["seed=1", "algorithm=grpo"])
    assert (plan.config.name, plan.config.algorithm.name) == ("trial", "grpo")


def test_the_searched_paths_of_a_model_are_reported(tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        check(folder / "trial.yaml", ["model=./nowhere"])
    assert "neither in the working folder" in caught.value.faults[0]
    assert "nor next to the configuration" in caught.value.faults[0]


def test_the_home_folder_is_found_in_plugins_and_in_what_a_run_writes(tmp_path, folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(tmp_path)
    plan = check(folder / "trial.yaml", ["plugins=[~/lab.py]", "out=~/runs"])
    assert plan.config.plugins == (str(folder / "lab.py"),)
    assert plan.folder == folder / "runs" / "trial"


@pytest.mark.parametrize("key", ["path", "reference", "critic", "tokenizer"])
def test_the_home_of_an_unknown_user_is_no_traceback(folder, monkeypatch, key):
    monkeypatch.chdir(folder)
    settings = [f"model.{key}='~nobody-here/model'", "algorithm=ppo", "algorithm.kl_coef=0.1", "algorithm.kl=k3"]
    if key == "path":
        with pytest.raises(ConfigError, match=r"there is no folder '~nobody-here/model' with a config.json"):
            check("trial.yaml", settings)
    else:
        found = [each for each in examine(check("trial.yaml", settings), starts=False).warnings if key in each.path]
        assert found and "there is no folder '~nobody-here/model'" in found[0].message


def test_the_folder_of_a_run_is_told_where_its_model_is(folder, monkeypatch):
    monkeypatch.chdir(folder)
    export = folder / "runs" / "sft" / "checkpoints" / "step-3" / "export"
    export.parent.mkdir(parents=True)
    with pytest.raises(ConfigError, match="'runs/sft' is the folder of a run; write its model by `rlsdk export runs/s"):
        check("trial.yaml", ["model.path=runs/sft"])
    export.mkdir()
    (export / "config.json").write_text("{}")
    for given in ("runs/sft", "runs/sft/checkpoints/step-3"):
        with pytest.raises(ConfigError, match="an exported model: give 'runs/sft/checkpoints/step-3/export'"):
            check("trial.yaml", [f"model.path={given}"])


def test_the_folder_of_an_adapter_is_told_which_model_to_give(folder, monkeypatch):
    monkeypatch.chdir(folder)
    adapter = folder / "export" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(ConfigError, match=r"holds only an adapter .*; give its base model, org/base, to train an ad"):
        check("trial.yaml", ["model.path=export/adapter"])
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"; give its base model to train an ad"):
        check("trial.yaml", ["model.path=export/adapter"])
    (folder / "export" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"; give the folder above it, '.*export', which holds the merged model"):
        check("trial.yaml", ["model.path=export/adapter"])
    (adapter / "config.json").write_text("{}")
    (adapter / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"holds a model and an adapter .*; move the adapter to another folder"):
        check("trial.yaml", ["model.path=export/adapter"])
