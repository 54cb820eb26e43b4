"""Whole runs of tiny random models whose checkpoint names differ from their tensor names in memory."""

from __future__ import annotations

import datetime
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parents[2] / "tools"))
import architectures

from tools.architectures import RUNS, in_process, read_page

pytestmark = [pytest.mark.stack, pytest.mark.slow]
REWARD = '''
import rlsdk

@rlsdk.reward("small")
def small(rollout):
    """The share of even tokens: it differs between the answers of a random model."""
    return float((rollout.token_ids[rollout.loss_mask] % 2 == 0).mean())
'''


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3-moe", {}),
        pytest.param("gpt-neox", {}, marks=pytest.mark.long),
        pytest.param("gemma3", {"tied": True}, marks=pytest.mark.long),
    ],
)
def test_three_steps_on_vllm_an_export_and_a_resumed_step(
    name: str, options: dict[str, Any], runner: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    from rlsdk.conversion import read_header

    architectures.make(tmp_path / "model", name, **options)
    lab = tmp_path / "small_lab.py"
    lab.write_text(REWARD)
    settings = ("--plugin", str(lab), f"model.path={tmp_path / 'model'}", "reward=small_lab/small", "learner.lr=1.0e-2")
    settings += ("learner.router_loss_coef=0.01",) if name == "qwen3-moe" else ()
    runner.train(*settings)
    lines = runner.metrics()[1:4]
    assert len(lines) == 3
    assert all(line["actor/grad_norm"] > 0 and line["canary/gap"] < 1e-4 for line in lines)
    assert all(("actor/router_loss" in line) == (name == "qwen3-moe") for line in lines)
    export = Path(runner.summary()["export"])
    assert read_header(str(export)) == read_header(str(tmp_path / "model"))
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(export).state_dict()
    assert before.keys() == after.keys()
    assert any(not before[key].equal(after[key]) for key in before)
    runner.train(*settings, "steps=4", "--resume")
    assert runner.metrics()[-1]["canary/gap"] < 1e-4


def test_routing_is_replayed_over_steps_and_a_resumed_step(runner: Any, tmp_path: Path) -> None:
    architectures.make(tmp_path / "model", "qwen3-moe")
    lab = tmp_path / "small_lab.py"
    lab.write_text(REWARD)
    settings = (
        *("--plugin", str(lab), f"model.path={tmp_path / 'model'}", "reward=small_lab/small", "learner.lr=1.0e-2"),
        *("engine={use: transformers}", "old_logprobs=learner", "algorithm.correction=routing_replay"),
        "learner.rows=packed",
    )
    runner.train(*settings, "save_rollouts=1")
    lines = runner.metrics()[1:4]
    assert len(lines) == 3
    assert all(line["routing/unknown"] == 0 and line["actor/k3"] < 1e-8 for line in lines)
    runner.train(*settings, "steps=4", "--resume")
    assert runner.metrics()[-1]["routing/unknown"] == 0


PAGE = read_page()
TODAY = random.Random(datetime.datetime.now(datetime.UTC).date().toordinal())
"""The whole matrix takes half an hour (`make models`): each day has a sample of its own."""


@pytest.mark.parametrize(("name", "head", "dtype", "engine"), TODAY.sample(sorted(PAGE), 2))
def test_a_sample_of_the_page_of_models_still_holds(name: str, head: str, dtype: str, engine: str) -> None:
    found = in_process(name, head, dtype, engine)
    if "error" in found:
        assert "error" in PAGE[name, head, dtype, engine], found["error"]
        return
    tolerance = 1e-4 if dtype == "float32" else 0.25
    assert found["after"] < tolerance
    assert found["moved"] > 3 * tolerance  # else a sync that does nothing would pass


WHOLE = {key: row for key, row in read_page(RUNS).items() if "error" not in row}


@pytest.mark.parametrize(("name", "head", "dtype", "engine"), TODAY.sample(sorted(WHOLE), 1))
def test_a_sample_of_the_whole_runs_still_trains_exports_and_resumes(
    name: str, head: str, dtype: str, engine: str
) -> None:
    found = in_process(name, head, dtype, engine, RUNS)
    assert "error" not in found, found["error"]
    assert found["gap"] < 0.3 * found["moved"]  # else a sync that does nothing would pass
