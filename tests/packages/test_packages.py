"""Third-party packages: listed from metadata, loaded by name, explained, and used in training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.packages.conftest import write_config

CONFIG = {
    "name": "labs",
    "tasks": {
        "train": {
            "use": "countdown",
            "split": "train",
            "size": 64,
            "numbers": 3,
            "number_range": [1, 20],
            "target_range": [1, 100],
            "operators": "+-",
            "template": "compact",
        }
    },
    "max_prompt_tokens": 16,
    "plugins": ["mylab"],
    "workflow": {"use": "otherlab/brief", "tokens": 6},
    "reward": [{"use": "mylab/exact", "scale": 2.0}, {"use": "countdown", "weight": 0.5}],
    "algorithm": {
        "use": "grpo",
        "kl_coef": 0.0,
        "advantage": "mylab/median",
        "policy_loss": {"use": "mylab/soft_clip", "temperature": 0.5},
    },
    "sampling": {"max_tokens": 10},
    "steps": 2,
    "batch_size": 4,
    "group_size": 4,
    "engine": "transformers",
    "learner": {"use": "deepspeed", "lr": 0.001},
    "checkpoint": {"export": "never"},
    "placement": {"device": "cpu", "engine_threads": 1, "learner_threads": 1},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration with parts of both packages, and the smallest model."""
    return write_config(tmp_path, CONFIG, max_length=32)


def test_both_are_listed_from_metadata(rlsdk):
    listed = {
        e["plugin"]: (e["distribution"], e["version"], e["broken"])
        for e in json.loads(rlsdk("plugins", "--json").stdout)
    }
    assert listed["mylab"] == ("rlsdk-mylab", "1.2.0", None)
    assert listed["otherlab"] == ("rlsdk-otherlab", "0.3.0", None)


def test_listing_and_help_import_neither(environment, tmp_path):
    code = (
        "import sys; from rlsdk.cli import root\n"
        "for typed in (['plugins'], ['--help']): root(typed, standalone_mode=False)\n"
        "print('IMPORTED', *(m for m in sys.modules if m.startswith(('rlsdk_', 'torch', 'rlsdk.builtins'))))"
    )
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path)
    assert ran.stdout.rpartition("IMPORTED")[2].split() == []
    assert "count  of rlsdk-otherlab 0.3.0" in " ".join(ran.stdout.split(" ")).replace("    ", "  ")


def test_their_components_are_shown_with_options(rlsdk):
    mylab = " ".join(rlsdk("plugins", "mylab").stdout.split())
    assert "mylab/exact The share of the answer's characters that are digits. scale float = 1.0 Factor." in mylab
    assert "mylab/median" in mylab
    assert "mylab/soft_clip" in mylab
    assert "otherlab/brief" in rlsdk("plugins", "workflow").stdout


def test_they_are_loaded_by_name(environment, tmp_path):
    code = (
        "import rlsdk\n"
        "task = rlsdk.Task(id='1', prompt='?')\n"
        "print(rlsdk.load('reward', 'mylab/exact', scale=2)(rlsdk.Rollout.from_text(task, 'a1')).value)\n"
        "print(rlsdk.load('workflow', 'otherlab/brief', tokens=3).tokens)\n"
        "print([n for n in rlsdk.names('policy_loss') if '/' in n])\n"
    )
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path)
    assert ran.stdout.splitlines() == ["1.0", "3", "['mylab/soft_clip']"]


def test_explain_resolves_them(rlsdk, config):
    found = json.loads(rlsdk("explain", config, "--json").stdout)["plan"]
    assert found["algorithm"]["advantage"] == "mylab/median"
    assert found["algorithm"]["policy_loss"] == "mylab/soft_clip(temperature=0.5)"
    assert found["rollouts"]["rewards"] == ["1 × mylab/exact(scale=2.0)", "0.5 × countdown"]
    assert found["rollouts"]["workflow"] == "otherlab/brief(tokens=6)"
    assert set(found["plugins"]) == {"core", "mylab", "otherlab"}
    assert found["plugins"]["mylab"].startswith("rlsdk-mylab 1.2.0 ")


def test_a_wrong_name_among_them_is_a_fault_with_what_there_is(rlsdk, config):
    ran = rlsdk("explain", config, "reward=mylab/exat", "workflow.tokens=few", status=2)
    assert "  - workflow.tokens: expected int, got 'few'\n" in ran.stderr
    assert "  - reward: unknown reward 'mylab/exat'; mylab offers: exact\n" in ran.stderr


@pytest.mark.parametrize(("plugin", "components"), [("mylab", 3), ("otherlab", 1)])
def test_they_are_checked(rlsdk, plugin, components):
    found = json.loads(rlsdk("check", plugin, "--json").stdout)
    assert (found["conforms"], found["counts"]["skipped"]) == (True, 0)
    assert len({(f["kind"], f["component"]) for f in found["findings"]}) == components
    if plugin == "mylab":
        held = {f["property"] for f in found["findings"] if f["component"] == "mylab/soft_clip"}
        assert {"micro-batches", "gradient-only-through-logprobs", "finite-when-all-invalid"} <= held


@pytest.mark.slow
@pytest.mark.stack
def test_they_are_trained_with_by_name(rlsdk, config, tmp_path):
    from rlsdk import nano

    nano.create(tmp_path / "model")
    summary = json.loads(rlsdk("train", config, "--json", fresh=True).stdout)
    run = tmp_path / "runs" / "labs"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert (summary["status"], summary["steps"], len(lines)) == ("finished", 2, 2)
    assert all(line["rollouts/length"] <= 6 for line in lines)  # the workflow's limit, not the sampling's
    assert any("bent" in name for name in lines[0])  # the loss's own metric
    noted = [json.loads(line) for line in (run / "mylab.jsonl").read_text().splitlines()]
    assert [n["step"] for n in noted] == [1, 2]  # what the hook saw
    assert noted[0]["reward"] == pytest.approx(lines[0]["reward/mean"])
    assert "rlsdk-mylab 1.2.0" in (run / "config.yaml").read_text()
    assert rlsdk("count", run).stdout == "2\n"  # the other package's command

    rlsdk("export", run, tmp_path / "trained", fresh=True)  # no checkpoint has an export: the learner starts again
    before, after = weights(tmp_path / "model"), weights(tmp_path / "trained")
    assert before.keys() == after.keys()
    assert any(not bool((before[name] == after[name]).all()) for name in before)
    assert not list(tmp_path.glob(".trained*"))


def weights(folder: Path) -> dict[str, Any]:
    """The weights of a model as transformers opens it, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(folder)("3,5>8:").input_ids
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())
