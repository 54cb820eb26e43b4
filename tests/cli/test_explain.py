"""`rlsdk explain`: what a configuration would run, and which of its parts have never been run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlsdk.cli import root

EXAMPLE = Path(__file__).parents[2] / "examples/countdown_nano.yaml"
YAML = """\
name: trial
model: MODEL
tasks: {train: countdown, eval: {use: countdown, split: test}}
reward: [countdown, {use: format, weight: 0.1}]
algorithm: grpo
steps: 2
batch_size: 4
group_size: 4
engine: transformers
placement: {device: cpu}
"""


@pytest.fixture
def explain(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "trial.yaml"
    file.write_text(YAML.replace("MODEL", str(tmp_path)))

    def call(*arguments, as_json=True, status=0):
        ran = CliRunner().invoke(root, ["explain", str(file), *arguments, *(["--json"] if as_json else [])])
        assert ran.exit_code == status, ran.stderr
        return (json.loads(ran.stdout)["plan"] if as_json else ran.stdout) if status == 0 else ran.stderr

    return call


def test_the_resolved_parts(explain):
    found = explain("algorithm.policy_loss.clip_high=0.28")
    assert found["run"]["each step"] == "4 tasks × 4 rollouts, 1 optimiser step"
    assert found["algorithm"]["advantage"] == "grpo(std_normalize=true)"
    assert found["algorithm"]["policy_loss"] == "ppo(clip_low=0.2, clip_high=0.28, dual_clip=20.0)"
    assert found["algorithm"]["kl"] == "low_var"
    assert found["rollouts"]["rewards"] == ["1 × countdown", "0.1 × format"]
    assert found["rollouts"]["held-out tasks"] == "countdown(split=test)"
    assert (found["learner"]["reference model"], found["learner"]["critic"]) == (True, False)
    assert list(found["plugins"]) == ["core"]


def test_what_a_reward_prints_when_it_is_prepared_is_not_in_the_json(explain, tmp_path):
    lab = tmp_path / "lab.py"
    lab.write_text("""
import rlsdk
print("imported")
@rlsdk.reward("loud")
class Loud:
    def __init__(self) -> None: print("prepared")
    def __call__(self, rollout) -> float: return 1.0
""")
    assert explain("reward=lab/loud", "--plugin", str(lab))["run"]


def test_schedules_are_shown(explain):
    clip = "algorithm.policy_loss.clip_high={from: 0.4, to: 0.2, over: 10}"
    found = explain(clip, "algorithm.kl_coef={from: 0, to: 0.1, over: 5, shape: cosine}")["algorithm"]
    assert found["policy_loss"] == "ppo(clip_low=0.2, clip_high={from: 0.4, to: 0.2, over: 10}, dual_clip=20.0)"
    assert found["kl_coef"] == "0 to 0.1 over 5 steps, cosine"


def test_a_target_of_the_entropy_is_shown(explain):
    found = explain("algorithm.entropy_coef={target: 0.2, max: 0.5}")["algorithm"]
    assert found["entropy_coef"] == "0 to 0.5, from 0 in steps of 0.005, for an entropy of 0.2 nats"


def test_the_share_of_tokens_that_are_trained_is_shown_down_to_none_but_the_highest(explain):
    assert "top_entropy_quantile" not in explain()["algorithm"]
    for share in (0.2, 0.0):
        assert explain(f"algorithm.top_entropy_quantile={share}")["algorithm"]["top_entropy_quantile"] == share


def test_several_corrections_are_listed(explain):
    assert explain("algorithm.correction=tis")["algorithm"]["correction"] == "tis"
    found = explain("algorithm.correction=[tis, {use: geometric, low: 0.9}]")["algorithm"]
    assert found["correction"] == ["tis", "geometric(low=0.9)"]


def test_what_an_algorithm_makes_necessary(explain):
    found = explain("algorithm=ppo")
    assert (found["learner"]["reference model"], found["learner"]["critic"]) == (True, True)
    assert found["learner"]["computed fields"] == ["logprobs", "ref_logprobs", "values"]
    passes = ["the actor (old logprobs)", "the reference model", "the critic"]
    assert explain("algorithm=ppo", "old_logprobs=learner")["learner"]["passes before the update"] == passes
    assert explain("algorithm=ppo", "old_logprobs=rollout")["learner"]["passes before the update"] == passes[1:]
    grpo = explain("old_logprobs=rollout", "algorithm.kl_coef=0.0")
    assert grpo["learner"]["passes before the update"] == "none"
    found = explain("algorithm=sft", "reward=[]", "tasks.eval=null", "epochs=2", "steps=null")
    assert found["rollouts"]["engine"] == "none: nothing is generated"
    assert found["rollouts"]["workflow"] == "demonstration"
    assert found["run"]["length"] == "2 epochs"
    assert found["placement"]["engines"] == 0


def test_what_an_algorithm_sets_in_other_sections(explain):
    found = explain("algorithm=dapo")["algorithm"]
    assert found["sets elsewhere"] == ["rollout.dynamic_sampling=true"]
    assert found["shaping"] == ["overlong(max_length=256, buffer=null, penalty=1.0)"]
    assert "sets elsewhere" not in explain("algorithm=dapo", "rollout.dynamic_sampling=false")["algorithm"]
    assert explain("algorithm=dr_grpo")["algorithm"]["norm"] == 256.0


def test_as_text(explain):
    text = explain(as_json=False)
    assert "algorithm\n  name: grpo\n" in text
    assert "  rewards: 1 × countdown; 0.1 × format\n" in text
    assert "  reference model: yes\n  critic: no\n" in text


def test_the_last_line_says_that_there_are_no_faults(monkeypatch):
    def said():
        return CliRunner().invoke(root, ["explain", str(EXAMPLE)]).stderr.splitlines()[-1]

    assert said() == "rlsdk: the configuration has no faults"
    monkeypatch.setattr("rlsdk.readiness.memory.DRIVER_BYTES", 2**60)
    assert said() == "rlsdk: the configuration has no faults, but 1 warning"  # of an estimate, for which runs start
    monkeypatch.setattr("rlsdk.preflight.open_files", lambda: ["too few"])
    assert said() == "rlsdk: the configuration has no faults, but 2 warnings: `rlsdk train` would not start here"


def test_long_values_wrap_where_columns_are_limited_and_nothing_is_lost(explain, monkeypatch, tmp_path):
    disk = shutil.disk_usage(tmp_path)  # more or less may be free a moment later
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    whole = explain(as_json=False)
    monkeypatch.setenv("COLUMNS", "80")
    lines = explain(as_json=False).splitlines()
    assert max(map(len, whole.splitlines())) > 80
    assert [line for line in lines if len(line) > 80 and " " in line.strip()] == []
    assert " ".join(" ".join(lines).split()) == " ".join(whole.split())


def test_with_cuda_untested_parts_are_reported(explain):
    assert "never run" not in explain()["placement"]
    found = explain("placement.device=cuda", "placement.gpus_per_engine=2")["placement"]
    assert found["engines"] == "1, 2 GPUs each"
    assert any("learner on CUDA" in text for text in found["never run"])
    assert any("tensor parallelism over 2 GPUs" in text for text in found["never run"])
    apart = explain("placement.device=cuda", "placement.colocate=false")["placement"]
    assert not any("asleep" in text for text in apart["never run"])
    assert apart["learner ranks"] == "1, on their own devices"


def test_ranks_that_run_rollouts_together_are_listed(explain):
    found = explain("learner.sequence_parallel=2", "placement.learners=4")["placement"]
    assert found["learner ranks"] == "4, in groups of 2 that run rollouts together, on the same devices"


def test_faults_are_those_of_the_check(explain):
    text = explain("stepps=3", "batch_size=x", as_json=False, status=2)
    assert text.startswith("rlsdk: the configuration has 2 faults:\n")
    assert "did you mean 'steps'?" in text


def test_around_the_steps(explain):
    found = explain("eval.every=5", "checkpoint.every=10", "trackers=[wandb]", "save_rollouts=0")
    assert found["evaluation"]["when"] == "before the first step, every 5 steps, after the last step"
    assert found["checkpoint"]["saved"] == "every 10 steps and after the last step"
    assert found["checkpoint"]["rollouts"] == "not saved"
    assert found["trackers"]["metrics"] == ["metrics.jsonl", "wandb"]
    assert found["sampling"]["longest answer"] == "256 tokens"
    assert explain("tasks.eval=null")["evaluation"] == {"when": "never"}


@pytest.fixture
def origins(tmp_path, explain):
    def of(*arguments):
        ran = CliRunner().invoke(root, ["explain", str(tmp_path / "trial.yaml"), "--full", "--json", *arguments])
        assert ran.exit_code == 0, ran.stderr
        found = json.loads(ran.stdout)["values"]
        assert len({each["path"] for each in found}) == len(found)
        return {each["path"]: (each["value"], each["origin"].replace(f"{tmp_path}/", "")) for each in found}

    return of


def test_each_value_says_where_it_comes_from(origins):
    found = origins("algorithm=dapo", "learner.lr=1e-3", "reward[0]={use: countdown, weight: 2}")
    assert found["steps"] == (2, "trial.yaml:6")
    assert found["tasks.train"] == ("countdown", "trial.yaml:3")
    assert found["tasks.eval.split"] == ("test", "trial.yaml:3")
    assert found["tasks.eval.numbers"][1] == "default of countdown"
    assert found["rollout.dynamic_sampling"] == (True, "algorithm dapo")
    assert found["algorithm"] == ("dapo", "override algorithm=dapo")
    assert found["algorithm.policy_loss.clip_high"] == (0.28, "algorithm dapo")
    assert found["algorithm.filters"] == ("nonzero_variance", "algorithm dapo")
    assert found["learner"] == ("deepspeed", "default")
    assert found["learner.lr"] == (0.001, "override learner.lr=1e-3")
    assert found["reward[0].weight"] == (2, "override reward[0]={use: countdown, weight: 2}")
    assert found["reward[1].weight"] == (0.1, "trial.yaml:4")
    assert found["sampling.temperature"] == (1.0, "default")


def test_a_schedule_and_a_target_say_where_they_come_from(origins):
    given = ("algorithm.norm={from: 1, to: 2, over: 3}", "algorithm.entropy_coef={target: 0.2}")
    found = origins(*given)
    assert [found[text.partition("=")[0]][1] for text in given] == [f"override {text}" for text in given]


def test_a_value_that_is_merged_in_has_the_line_where_it_is_written(tmp_path, origins):
    text = YAML.replace("MODEL", str(tmp_path)).replace(
        "tasks: {train: countdown, eval: {use: countdown, split: test}}",
        "tasks:\n  train: &task {use: countdown, size: 30}\n  eval:\n    <<: *task\n    split: test",
    )
    (tmp_path / "trial.yaml").write_text(text)
    found = origins()
    assert found["tasks.eval.size"] == (30, "trial.yaml:4")
    assert found["tasks.eval.split"] == ("test", "trial.yaml:7")


def test_an_override_of_a_whole_section_leaves_no_line_of_the_file(origins):
    found = origins("tasks.eval={use: countdown, size: 5}")
    assert found["tasks.eval.size"][1] == "override tasks.eval={use: countdown, size: 5}"
    assert found["tasks.eval.split"] == ("train", "default of countdown")


def test_the_batch_in_words(tmp_path, explain):
    settings = ["batch_size=8", "group_size=4", "minibatches=2", "passes=3", "placement.learners=2", "steps=10"]
    ran = CliRunner().invoke(root, ["explain", str(tmp_path / "trial.yaml"), "--full", *settings])
    assert ran.exit_code == 0, ran.stderr
    assert "rollouts: 8 tasks × 4 = 32 rollouts in each step" in ran.stdout
    assert "32 rollouts / 2 minibatches = 16 rollouts in each optimiser step; 2 × 3 passes = 6" in ran.stdout
    assert "ranks: 16 rollouts / 2 = 8 rollouts on each rank" in ran.stdout
    assert "10 steps: 320 rollouts, 60 optimiser steps" in ran.stdout


def test_a_loss_that_reads_the_whole_batch_costs_another_pass(explain):
    found = " ".join(explain("--full", "algorithm.policy_loss=kl_cov", as_json=False).split())
    assert "whole batch: kl_cov reads the whole batch of an optimiser step: one more forward pass" in found
    assert "whole batch" not in explain("--full", as_json=False)


def test_who_gets_which_gpu_on_nodes_that_do_not_exist(explain):
    pairs = {"node 0, GPU 0": "engine 0, learner rank 0", "node 1, GPU 0": "engine 1, learner rank 1"}
    assert explain("placement.engines=2", "placement.learners=2", "--gpus", "1x2")["gpus"] == pairs
    assert explain("--gpus", "2x2")["gpus"] == {"node 0, GPU 0": "engine 0, learner rank 0", "unused": "3 GPUs"}
    said = " ".join(explain("placement.engines=3", "--gpus", "1x2", as_json=False, status=2).split())
    assert "placement: placement needs 3 GPUs (3 for engines, 1 for learners, shared)" in said
    assert "node 0 has 1, node 1 has 1" in said
    assert "this machine has 0" not in said  # it is not this machine that was asked about
    ahead = " ".join(explain("rollout.max_staleness=1", "--gpus", "2", as_json=False, status=2).split())
    assert "rollouts cannot run ahead of a learner on their own GPUs; set placement.colocate=false" in ahead
    assert "gpus" in explain("rollout.max_staleness=1", "placement.colocate=false", "--gpus", "2")
    shared = " ".join(explain("rollout.weight_transfer=nccl", "--gpus", "2", as_json=False, status=2).split())
    assert "weight_transfer=core/nccl sends weights from GPU to GPU, but engines and learner share" in shared
    assert "gpus" in explain("rollout.weight_transfer=nccl", "placement.colocate=false", "--gpus", "2")
    assert "gpus" in explain("rollout.weight_transfer=cuda_ipc", "--gpus", "2")
    ipc = ("rollout.weight_transfer=cuda_ipc", "placement.engines=2", "--gpus", "4")
    for more, expected in (
        ((), "2 engines with 1 GPU each and 1 learner rank; set placement.gpus_per_engine=1 and at least as many"),
        (("placement.colocate=false",), "but theirs are separate; set placement.colocate=true, or use nccl"),
    ):
        assert expected in " ".join(explain(*ipc, *more, as_json=False, status=2).split())
    assert "expected GPUS or GPUSxNODES" in explain("--gpus", "many", as_json=False, status=2)


def test_a_transfer_in_which_every_rank_sends_needs_a_learner_with_weights_on_every_rank(explain, tmp_path):
    lab = tmp_path / "lab.py"
    lab.write_text("""
import rlsdk
from rlsdk.transfers.cuda_ipc import CudaIpc
@rlsdk.weight_transfer("each")
class Each(CudaIpc):
    device = "cpu"
@rlsdk.learner("single")
class Single: pass
""")
    given = (f"plugins=[{lab}]", "rollout.weight_transfer=lab/each")
    assert "learner" in explain(*given)
    said = " ".join(explain(*given, "learner=lab/single", as_json=False, status=2).split())
    assert "rollout.weight_transfer: 'lab/each' sends from every rank, but the learner 'lab/single' yields" in said
    assert "use object_store, gloo or shared_memory" in said
