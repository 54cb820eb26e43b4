"""Other trainers' files and keys are recognised in every check of a configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlsdk.cli import root
from rlsdk.config import check
from rlsdk.errors import ConfigError
from rlsdk.migration import FRAMEWORKS, framework
from rlsdk.migration.recognition import aliases, hint, recognise

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(p for p in (ROOT / "examples").rglob("*.yaml") if "cluster" not in p.parts)
FILES = Path(__file__).parent / "files"
TRL = "learning_rate: 1e-6\nnum_generations: 8\nbeta: 0.04\nmodel_name_or_path: org/model\n"


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("learning_rate", "learner.lr"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size", "learner.micro_batch_tokens"),
        ("ppo_mini_batch_size", "minibatches"),
        ("num_generations", "group_size"),
        ("rollout.n", "group_size"),
        ("total_epochs", "epochs"),
        ("actor_learning_rate", "learner.lr"),
        ("n_samples_per_prompt", "group_size"),
        ("max_completion_length", "sampling.max_tokens"),
        ("save_freq", "checkpoint.every"),
        ("rollout_batch_size", "batch_size"),
        ("repeat_times", "group_size"),
        ("prompt_repeat_k", "group_size"),
    ],
)
def test_a_key_of_another_trainer_is_reported_with_its_name_in_rlsdk(key, told):
    assert told in hint(key)


def test_names_that_nobody_has():
    assert hint("lrr") == hint("stpes") == hint("") == ""


def test_there_are_hundreds():
    tables = [framework(name) for name in FRAMEWORKS]
    keys = {row.key for table in tables for row in table.rows if row.to and "*" not in row.key}
    assert len(keys) > 350
    assert keys <= aliases().keys()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("learning_rate=1e-5", "learning_rate: unknown key 'learning_rate'; TRL's learning_rate is learner.lr here"),
        ("learner.learning_rate=1e-5", "TRL's learning_rate is learner.lr here"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=8", "is minibatches here"),
        ("stpes=3", "did you mean 'steps'?"),
        # an option of another engine: veRL's name for it is the same path, which helps nobody
        ("engine.gpu_memory_utilization=0.4", "unknown option 'gpu_memory_utilization'; known: "),
    ],
)
def test_a_fault_tells_it(override, says):
    with pytest.raises(ConfigError) as caught:
        check(ROOT / "examples" / "quickstart.yaml", [override])
    assert says in str(caught.value)


def test_an_option_with_dashes_tells_it():
    ran = CliRunner().invoke(root, ["train", "x.yaml", "--learning_rate", "1e-5"])
    assert (ran.exit_code, "learner.lr here" in ran.stderr) == (2, True)


@pytest.mark.parametrize(
    ("file", "name"),
    [("tinyzero_train.sh", "verl"), ("roll_agentic_pipeline.yaml", "roll"), ("xtuner_grpo.py", "xtuner")],
)
@pytest.mark.parametrize("command", ["explain", "train"])
def test_the_trainer_of_a_foreign_file_is_recognised(command, file, name):
    ran = CliRunner().invoke(root, [command, str(FILES / file)])
    assert ran.exit_code == 2
    assert f"`rlsdk migrate {name} {FILES / file}`" in ran.stderr
    assert ran.stderr.count("\n") <= 3


def test_a_mapping_is_recognised_too(tmp_path):
    file = tmp_path / "trl.yaml"
    file.write_text(TRL)
    assert recognise(file) is framework("trl")
    assert recognise({"algorithm": {"repeat_times": 8}, "buffer": {"batch_size": 3}}) is None  # too few
    with pytest.raises(ConfigError, match="looks like a config of Trinity-RFT"):
        check({"model": {"model_path": "x"}, "algorithm": {"repeat_times": 8}, "buffer": {"batch_size": 3}})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_rlsdks_own_are_nobody_elses(path):
    assert recognise(path) is None


def test_what_the_command_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("trl.yaml").write_text(TRL + "no_such: 1\ntop_k: 50\n")
    ran = CliRunner().invoke(root, ["migrate", "trl", "trl.yaml"])
    assert ran.exit_code == 0
    assert "group_size: 8" in ran.stdout
    assert "# To do: no_such: unknown" in ran.stdout
    assert "6 keys: 2 no counterpart" in ran.stderr
    assert "tasks: is required" in ran.stderr  # rlsdk's own check of the result
    ran = CliRunner().invoke(root, ["migrate", "trl", "trl.yaml", "--out", "new/run.yaml"])
    assert (ran.exit_code, ran.stderr, "written: new/run.yaml" in ran.stdout) == (0, "", True)
    assert CliRunner().invoke(root, ["migrate", "trl", "trl.yaml", "--out", "new/run.yaml"]).exit_code == 2
    found = json.loads(CliRunner().invoke(root, ["migrate", "trl", "--json", "trl.yaml"]).stdout)
    assert [key["status"] for key in found["keys"]] == ["mapped"] * 4 + ["missing"] * 2
    assert [key["key"] for key in found["missing"]] == ["no_such", "top_k"]
    assert (len(found["mapped"]), found["changed"], found["ignored"]) == (4, [], [])
    ran = CliRunner().invoke(root, ["migrate", "trl", "--table", "report.md", "trl.yaml"])
    assert ran.exit_code == 0
    assert "| no_such | 1 | no counterpart: to do |" in Path("report.md").read_text()
    assert CliRunner().invoke(root, ["migrate", "trl", "--table", "report.md", "trl.yaml"]).exit_code == 2
    ran = CliRunner().invoke(root, ["migrate", "trl", "--table", "new.md", "--out", "./new.md", "trl.yaml"])
    assert "new.md is given for both --out and --table" in ran.output and not Path("new.md").exists()


def test_a_command_in_words():
    words = ["migrate", "verl", "python3", "-m", "verl.trainer.main_ppo", "data.train_batch_size=64"]
    assert "batch_size: 64" in CliRunner().invoke(root, words).stdout
    words = ["migrate", "trl", "trl", "grpo", "--learning_rate", "1e-5", "--num_generations", "4", "--bf16"]
    ran = CliRunner().invoke(root, words)
    assert "lr: 1.0e-05" in ran.stdout
    assert "group_size: 4" in ran.stdout
