"""Configurations that users posted: a launch command of TinyZero, and an agentic pipeline of ROLL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import rlsdk
from rlsdk.config import check
from rlsdk.migration import Migration, migrate
from tests.migration.conftest import installed

FILES = Path(__file__).parent / "files"
LAUNCH = {"N_GPUS": "2", "ROLLOUT_TP_SIZE": "2", "BASE_MODEL": "model", "DATA_DIR": "data", "EXPERIMENT_NAME": "run"}


@pytest.fixture
def gridworlds(tmp_path):
    """The plugin with environments of ROLL."""
    pytest.importorskip("gymnasium")
    with installed("gridworlds", tmp_path / "site"):
        yield


def test_tinyzeros_command(folder, monkeypatch):
    for name, value in LAUNCH.items():
        monkeypatch.setenv(name, value)
    found = migrate("verl", [str(FILES / "tinyzero_train.sh")], LAUNCH)
    assert len(found.entries) == 29
    assert {entry.status for entry in found.entries} <= {"mapped", "changed", "ignored"}
    plan = check(found.config)
    config = plan.config
    assert (config.batch_size, config.group_size, config.minibatches, config.epochs) == (256, 1, 2, 15)
    assert (config.sampling.max_tokens, config.model.max_length, config.max_prompt_tokens) == (1024, 1280, 256)
    assert plan.algorithm.critic
    assert plan.advantage.name == "core/gae"
    assert dict(plan.shaping[0].options) == {"coef": 0.001, "estimator": "k1"}
    assert plan.learner.options["lr"] == 1e-6
    assert plan.learner.options["critic_lr"] == 1e-5
    assert plan.learner.options["micro_batch_tokens"] == 4 * 1280  # 8 sequences over two ranks
    assert (config.placement.engines, config.placement.gpus_per_engine, config.placement.learners) == (1, 2, 2)
    assert plan.rewards[0].reference.name == "core/countdown"
    assert any("countdown" in note for note in found.notes)  # the reward is a guess, and told as one


def test_rolls_pipeline(folder, gridworlds, tmp_path):
    found = migrate("roll", [str(FILES / "roll_agentic_pipeline.yaml")], {})
    todo = {entry.key for entry in found.entries if entry.status == "missing"}
    assert todo == {
        "system_envs.USE_MODELSCOPE",
        "actor_infer.generating_args.top_p",
        "actor_infer.generating_args.top_k",
    }
    file = tmp_path / "migrated.yaml"
    file.write_text(yaml.safe_dump(found.config))
    plan = check(file, ["model.path=model"])
    config = plan.config
    assert (config.batch_size, config.group_size, config.minibatches, config.steps) == (128, 8, 1, 1024)
    assert (config.environments.workers, config.environments.per_worker) == (64, 16)
    assert plan.algorithm.whiten_advantages
    assert plan.algorithm.clip_advantages == 0.2
    train, held_out = plan.tasks_train[0].reference.options, plan.tasks_eval[0].reference.options
    assert (train["groups"], train["tags"], train["partition"]) == (128, ["FrozenLake"], [128])
    assert held_out["partition"] == [256, 256, 256, 256]
    vocabulary = held_out["environments"]["SokobanDifferentGridVocab"]
    assert (vocabulary["grid_lookup"][3], vocabulary["grid_vocab"]["C"]) == ("C", "box on target")
    tasks = plan.plugins.resolve(plan.tasks_train[0].reference)
    assert tasks[0].metadata["environment"]["is_slippery"] is False


def test_verls_harmless_values_leave_nothing_to_do():
    validation = ["temperature=0", "do_sample=False", "top_p=1.0", "top_k=-1", "n=1"]
    found = migrate(
        "verl",
        [
            *("data.filter_overlong_prompts=True", "data.truncation=error", "trainer.critic_warmup=0"),
            *(f"actor_rollout_ref.rollout.val_kwargs.{each}" for each in validation),
        ],
        {},
    )
    assert not [entry.key for entry in found.entries if entry.status == "missing"]
    assert found.config["long_prompts"] == "drop"
    warm = migrate("verl", ["actor_rollout_ref.rollout.val_kwargs.temperature=0.6"], {})
    assert [entry.status for entry in warm.entries] == ["mapped"]


VERLS, ROLLS = "trainer.critic_warmup=10", "critic_warmup=10"


@pytest.mark.parametrize(
    ("name", "words", "steps", "status"),
    [
        ("verl", [VERLS], 9, "changed"),
        ("verl", ["trainer.critic_warmup=1"], None, "ignored"),
        ("verl", [VERLS, "algorithm.adv_estimator=grpo"], None, "ignored"),
        ("roll", [ROLLS, "pretrain=o/m"], 10, "mapped"),
        ("roll", [ROLLS, "pretrain=o/m", "adv_estimator=grpo"], None, "ignored"),
        ("trinity", [f"trainer.trainer_config.{VERLS}", "algorithm.algorithm_type=ppo"], 9, "changed"),
        ("trinity", [f"trainer.trainer_config.{VERLS}", "algorithm.algorithm_type=grpo"], None, "ignored"),
        ("openrlhf", ["--critic.freezing_steps", "10"], 11, "changed"),
        ("openrlhf", ["--critic.freezing_steps", "-1"], None, "ignored"),
        ("openrlhf", ["--freezing_actor_steps", "10"], 10, "changed"),
    ],
)
def test_the_steps_that_train_the_critic_alone_are_counted_as_each_trainer_counts_them(name, words, steps, status):
    found = migrate(name, words, {})
    assert found.config.get("critic", {}).get("warmup_steps") == steps
    (entry,) = [entry for entry in found.entries if "warmup" in entry.key or "freezing" in entry.key]
    assert entry.status == status


def test_trls_adaptive_entropy_is_a_target_of_the_entropy():
    words = ["--entropy_coef", "0.01", "--entropy_target", "2.5", "--entropy_coef_delta", "0.001"]
    found = migrate("trl", [*words, "--use_adaptive_entropy", "true", "--entropy_coef_max", "0.1"], {})
    target = {"target": 2.5, "initial": 0.01, "delta": 0.001, "min": 0.0, "max": 0.1}
    assert found.config["algorithm"]["entropy_coef"] == target
    assert migrate("trl", words, {}).config["algorithm"]["entropy_coef"] == 0.01


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--loss_type", "dapo"], []),
        (["--loss_type", "dr_grpo"], ["reduces the bonus, too (seq-mean-token-sum-norm)"]),
        (["--top_entropy_quantile", "0.2"], ["over all sampled tokens"]),
    ],
)
def test_trls_entropy_bonus_says_where_it_is_another(more, says):
    for words, key in (
        (["--entropy_coef", "0.01"], "entropy_coef"),
        (["--use_adaptive_entropy", "true"], "use_adaptive_entropy"),
    ):
        found = migrate("trl", [*words, *more], {})
        (entry,) = [entry for entry in found.entries if entry.key == key]
        assert entry.status == ("changed" if says else "mapped")
        assert all(text in entry.note for text in says)


def test_verls_reward_section_is_read():
    function = "reward.custom_reward_function"
    found = migrate("verl", [f"{function}.path=a.py", f"{function}.name=f", f"+{function}.reward_kwargs.least=0.1"], {})
    assert found.config["reward"]["path"] == "a.py:f"
    assert found.config["reward"]["arguments"] == {"least": 0.1}
    assert not [entry.key for entry in found.entries if entry.status == "missing"]


def test_verls_defaults_that_differ_are_carried():
    found = migrate("verl", ["actor_rollout_ref.actor.optim.warmup_style=cosine", "trainer.save_freq=20"], {}).config
    assert found["learner"]["final_ratio"] == 0.0
    assert found["checkpoint"] == {"every": 20, "keep": 1000}  # all
    assert migrate("verl", ["trainer.save_freq=-1"], {}).config["checkpoint"] == {"every": 0}


def test_verls_dapo_script():
    found = migrate(
        "verl",
        [
            *("data.max_response_length=2048", "reward_model.reward_manager=dapo", "data.gen_batch_size=96"),
            *("+reward_model.overlong_buffer.enable=True", "+reward_model.overlong_buffer.len=512"),
            *("+reward_model.overlong_buffer.penalty_factor=0.5", "+algorithm.filter_groups.enable=True"),
            *("algorithm.adv_estimator=grpo", "algorithm.filter_groups.max_num_gen_batches=10"),
            *("algorithm.filter_groups.metric=acc", "algorithm.use_kl_in_reward=True"),
        ],
        {},
    )
    assert not [entry.key for entry in found.entries if entry.status == "missing"]
    algorithm = found.config["algorithm"]
    assert algorithm["shaping"] == [
        {"use": "overlong", "max_length": 2048, "buffer": 512, "penalty": 0.5},
        {"use": "kl_penalty", "coef": 0.001, "estimator": "k1"},
    ]
    assert algorithm["filters"] == ["nonzero_variance"]
    assert found.config["rollout"]["dynamic_sampling"] is True


RS = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("options", "correction"),
    [
        # bounds of k1 are on the inverse ratio: "0.5_1.25" keeps ratios from 0.8 to 2
        (["rollout_rs=token_k1", "rollout_rs_threshold=0.5_1.25"], {"use": "token_mask", "low": 0.8, "high": 2.0}),
        (["rollout_rs=token_k1", "rollout_rs_threshold=4.0"], {"use": "token_mask", "low": 0.25, "high": 4.0}),
        (["rollout_rs=seq_sum_k1", "rollout_rs_threshold=0.5_2.0"], {"use": "sequence_mask", "low": 0.5, "high": 2.0}),
        (["rollout_rs=seq_mean_k1", "rollout_rs_threshold=0.8_1.25"], {"use": "geometric", "low": 0.8, "high": 1.25}),
        (["rollout_rs=geometric", "rollout_rs_threshold=1.25"], {"use": "geometric", "low": 0.8, "high": 1.25}),
        (
            ["rollout_rs=seq_mean_k3", "rollout_rs_threshold=0.01"],
            {"use": "divergence_mask", "estimator": "k3", "level": "mean", "threshold": 0.01},
        ),
        (
            ["rollout_rs=seq_max_k2", "rollout_rs_threshold=2.5"],
            {"use": "divergence_mask", "estimator": "k2", "level": "max", "threshold": 2.5},
        ),
        (
            ["rollout_rs=token_k3", "rollout_rs_threshold=0.1"],
            {"use": "divergence_mask", "estimator": "k3", "level": "token", "threshold": 0.1},
        ),
        # weights and masks of one level, with the greatest ratio below the cap
        (
            ["rollout_is=token", "rollout_rs=token_k1", "rollout_rs_threshold=0.625_1.25"],
            {"use": "mis", "low": 0.8, "high": 1.6, "level": "token"},
        ),
        (
            [
                "rollout_rs=seq_sum_k1",
                "rollout_rs_threshold=0.5_2.0",
                "rollout_is=sequence",
                "rollout_is_threshold=2.0",
            ],
            {"use": "mis", "low": 0.5, "high": 2.0, "level": "sequence"},
        ),
    ],
)
def test_verls_rejection_is_a_correction(folder, options, correction):
    found = migrate("verl", ["algorithm.adv_estimator=grpo", *(f"{RS}.{each}" for each in options)], {})
    assert found.config["algorithm"]["correction"] == correction
    notes = {entry.key: (entry.status, entry.note) for entry in found.entries}
    assert notes[f"{RS}.rollout_rs"] == ("changed", "rejected tokens still count in the denominators")
    assert not [key for key, (status, _) in notes.items() if status == "missing"]
    assert rlsdk.load("correction", correction["use"], **{k: v for k, v in correction.items() if k != "use"})


def test_the_converted_bounds_keep_what_verl_keeps():
    found = migrate("verl", [f"{RS}.rollout_rs=token_k1", f"{RS}.rollout_rs_threshold=0.5_1.2"], {})
    options = dict(found.config["algorithm"]["correction"])
    ratio = torch.tensor([1.4, 0.6], dtype=torch.float64)
    zeros = torch.zeros(2, dtype=torch.float64)
    x = rlsdk.LossInputs(ratio.log(), ratio.log(), zeros, zeros == 0, torch.tensor([0, 0]), behaviour_logprobs=zeros)
    assert rlsdk.load("correction", options.pop("use"), **options)(x)[0].tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("options", "correction", "note"),
    [
        (["rollout_rs=token_k1"], None, "set rollout_rs_threshold"),
        (["rollout_rs=seq_max_k1", "rollout_rs_threshold=2.0"], None, "the rejection 'seq_max_k1' has no counterpart"),
        (
            ["rollout_rs=token_k1,seq_max_k2,token_k3", "rollout_rs_threshold=0.6_1.6,2.5"],
            None,
            "set rollout_rs_threshold: one for all of rollout_rs, or one for each",
        ),
    ],
)
def test_what_is_left_of_verls_rejection_is_to_do(options, correction, note):
    found = migrate("verl", ["algorithm.adv_estimator=grpo", *(f"{RS}.{each}" for each in options)], {})
    assert found.config["algorithm"].get("correction", {}).get("use") == correction
    entry = next(entry for entry in found.entries if entry.key == f"{RS}.rollout_rs")
    assert entry.status == "missing" and note in entry.note


@pytest.mark.parametrize(
    ("options", "correction"),
    [
        (
            ["rollout_rs=seq_mean_k3", "rollout_rs_threshold=0.01"],
            {"use": "zoo/rejection", "measure": "k3", "level": "mean", "high": 0.01},
        ),
        (
            ["loss_type=reinforce", "rollout_rs=seq_mean_k1", "rollout_rs_threshold=0.5_1.25"],
            {"use": "zoo/rejection", "measure": "ratio", "level": "mean", "low": 0.8, "high": 2.0},
        ),
        (
            ["rollout_is=token", "rollout_rs=token_k1,seq_max_k2", "rollout_rs_threshold=2.0,2.5"],
            [
                {"use": "zoo/rejection", "measure": "ratio", "level": "token", "low": 0.5, "high": 2.0},
                {"use": "zoo/rejection", "measure": "k2", "level": "max", "high": 2.5},
            ],
        ),
    ],
)
def test_verls_rejection_in_bypass_mode_compares_the_policy_being_trained(folder, zoo, options, correction):
    given = ("bypass_mode=True", *options)
    found = migrate("verl", ["algorithm.adv_estimator=grpo", *(f"{RS}.{each}" for each in given)], {})
    assert found.config["old_logprobs"] == "rollout"
    assert found.config["algorithm"]["correction"] == correction
    (entry,) = [entry for entry in found.entries if entry.key == f"{RS}.rollout_rs"]
    assert entry.status == "changed" and "pip install plugins/rlsdk-zoo" in entry.note
    more = {"model": {"path": "model", "max_length": 2048}, "tasks": {"train": "countdown"}, "reward": "countdown"}
    check({**found.config, **more, "group_size": 4})


@pytest.mark.parametrize(
    ("lengths", "answers", "whole", "status"),
    [
        (["sequence_length=3072", "val_sequence_length=9216", "val_prompt_length=1024"], 8192, 9216, "changed"),
        (["sequence_length=3072", "val_sequence_length=1536", "val_prompt_length=1024"], 512, 3072, "changed"),
        (["response_length=2048", "val_sequence_length=5120"], 4096, 5120, "changed"),
        (["sequence_length=3072", "val_sequence_length=3072", "val_prompt_length=1024"], None, 3072, "ignored"),
    ],
)
def test_the_length_of_rolls_validation_is_that_of_answers_in_evaluations(lengths, answers, whole, status):
    found = migrate("roll", ["prompt_length=1024", *lengths, "rollout_batch_size=8"], {})
    assert found.config.get("eval", {}).get("max_tokens") == answers
    assert (found.config["sampling"]["max_tokens"], found.config["model"]["max_length"]) == (2048, whole)
    (entry,) = [entry for entry in found.entries if entry.key == "val_sequence_length"]
    assert entry.status == status


@pytest.mark.parametrize(
    ("more", "others"),
    [
        ([], []),
        (["algorithm.kl_penalty_fn=k1", "algorithm.kl_penalty_fn_args.kl_coef=0.1"], ["kl_penalty"]),
        (
            ["buffer.explorer_input.tasksets.0.reward_fn_args.enable_overlong_penalty=true"],
            ["overlong"],
        ),
    ],
)
def test_trinitys_rank_penalty_is_a_shaping(more, others):
    given = ["seed=1", *more, "algorithm.advantage_fn_args.rank_penalty=0.3", "algorithm.algorithm_type=grpo"]
    found = migrate("trinity", given, {})
    shaping = found.config["algorithm"]["shaping"]
    assert shaping[0] == {"use": "rank_penalty", "coef": 0.3} and [part["use"] for part in shaping[1:]] == others
    (entry,) = [entry for entry in found.entries if entry.key == "algorithm.advantage_fn_args.rank_penalty"]
    assert entry.status == "changed" and "as in the paper" in entry.note


MEAN_K3 = {"use": "divergence_mask", "estimator": "k3", "level": "mean", "threshold": 0.01}
MAX_K2 = {"use": "divergence_mask", "estimator": "k2", "level": "max", "threshold": 2.5}
TOKEN_TIS = {"use": "tis", "cap": 2.0, "level": "token"}


@pytest.mark.parametrize(
    ("options", "corrections"),
    [
        (["rollout_is=token", "rollout_rs=seq_mean_k3", "rollout_rs_threshold=0.01"], [TOKEN_TIS, MEAN_K3]),
        (
            ["rollout_is=token", "rollout_is_threshold=1.2", "rollout_rs=token_k1", "rollout_rs_threshold=2.0"],
            [{**TOKEN_TIS, "cap": 1.2}, {"use": "token_mask", "low": 0.5, "high": 2.0}],
        ),
        (
            ["rollout_rs=token_k1,seq_max_k2", "rollout_rs_threshold=0.625_1.25,2.5"],
            [{"use": "token_mask", "low": 0.8, "high": 1.6}, MAX_K2],
        ),
        (
            ["rollout_is=sequence", "rollout_rs=seq_mean_k3,token_k3,seq_mean_k3", "rollout_rs_threshold=0.01"],
            [{**TOKEN_TIS, "level": "sequence"}, MEAN_K3, {**MEAN_K3, "level": "token"}],
        ),
        (
            ["rollout_is=token", "rollout_is_threshold=0.5_5.0", "rollout_rs=seq_max_k2", "rollout_rs_threshold=2.5"],
            [{"use": "mis", "low": 0.5, "high": 5.0, "level": "token"}, MAX_K2],
        ),
    ],
)
def test_verls_weights_and_rejections_are_corrections_that_act_together(folder, options, corrections):
    found = migrate("verl", ["algorithm.adv_estimator=grpo", *(f"{RS}.{each}" for each in options)], {})
    assert found.config["algorithm"]["correction"] == corrections
    status = {entry.key: entry.status for entry in found.entries}
    assert status[f"{RS}.rollout_rs"] == "changed" and "missing" not in status.values()
    assert not [key for key, value in status.items() if value == "ignored"]
    more = {"model": {"path": "model", "max_length": 2048}, "tasks": {"train": "countdown"}, "reward": "countdown"}
    parts = check({**found.config, **more, "group_size": 4}).loss.correction.parts
    assert [part.name.removeprefix("core/") for part in parts] == [each["use"] for each in corrections]


def test_verls_weights_with_two_bounds_are_masked():
    found = migrate("verl", [f"{RS}.rollout_is=token", f"{RS}.rollout_is_threshold=0.5_5.0"], {}).config
    assert found["algorithm"]["correction"] == {"use": "mis", "low": 0.5, "high": 5.0, "level": "token"}


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_verls_dppo_is_a_loss_of_the_zoo(folder, zoo, divergence):
    actor, correction = "actor_rollout_ref.actor", "algorithm.rollout_correction"
    words = [f"{actor}.policy_loss.loss_mode=dppo_{divergence}", f"{actor}.clip_ratio_high=0.15"]
    found = migrate("verl", [*words, f"{correction}.rollout_is=token"], {})
    assert found.config["algorithm"]["policy_loss"] == {
        "use": "zoo/dppo",
        "divergence": divergence,
        "threshold": 0.15,
    }
    assert "correction" not in found.config["algorithm"]
    notes = {entry.key: (entry.status, entry.note) for entry in found.entries}
    status, note = notes[f"{actor}.policy_loss.loss_mode"]
    assert status == "changed" and "pip install plugins/rlsdk-zoo" in note
    assert notes[f"{correction}.rollout_is"][0] == "ignored"


@pytest.mark.parametrize(
    ("trainer", "key", "words"),
    [
        (
            "verl",
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.dro_beta=0.5"],
        ),
        ("roll", "actor_train.pg_variant", ["adv_estimator=reinforce", "actor_train.kimi15_tau=0.5"]),
    ],
)
def test_a_squared_log_ratio_of_each_token_is_a_loss_of_the_zoo_with_any_aggregation(folder, zoo, trainer, key, words):
    found = migrate(trainer, [*words, f"{key}={'dro' if trainer == 'verl' else 'kimi15'}"], {})
    assert found.config["algorithm"]["policy_loss"] == {"use": "zoo/kimi", "tau": 0.5, "level": "token"}
    entry = next(entry for entry in found.entries if entry.key == key)
    assert (entry.status, entry.note) == (
        "changed",
        "from a plugin: pip install plugins/rlsdk-zoo, in a clone of rlsdk",
    )
    more = {"model": {"path": "model", "max_length": 2048}, "tasks": {"train": "countdown"}, "reward": "countdown"}
    for aggregate in ("token-mean", "seq-mean-token-mean"):
        tree = {**found.config, **more, "group_size": 4}
        tree["algorithm"] = {**tree["algorithm"], "aggregate": aggregate}
        assert check(tree).loss.aggregate == aggregate


def test_trls_vespo_is_a_loss_of_the_zoo(folder, zoo):
    words = ["loss_type=vespo", "vespo_k_pos=1.5", "vespo_lambda_neg=2.5", "use_vllm=True"]
    found = migrate("trl", [*words, "vllm_importance_sampling_mode=token_truncate"], {})
    assert found.config["algorithm"]["policy_loss"] == {
        "use": "zoo/vespo",
        "power_pos": 1.5,
        "decay_pos": 3.0,
        "power_neg": 3.0,
        "decay_neg": 2.5,
    }
    assert found.config["algorithm"]["aggregate"] == "token-mean"
    assert "correction" not in found.config["algorithm"]
    assert next(entry.note for entry in found.entries if entry.key == "loss_type").endswith(
        "pip install plugins/rlsdk-zoo, in a clone of rlsdk"
    )
    more = {"model": {"path": "model", "max_length": 1024}, "tasks": {"train": "countdown"}, "reward": "countdown"}
    assert check({**found.config, **more}).loss.policy_loss.name == "zoo/vespo"


def test_trls_mask_of_bad_answers_is_a_correction_of_the_zoo(folder, zoo):
    words = ["off_policy_mask_threshold=0.5", "loss_type=grpo"]
    found = migrate("trl", words, {})
    assert found.config["algorithm"]["correction"] == {"use": "zoo/off_policy_mask", "threshold": 0.5}
    assert next(entry.status for entry in found.entries) == "changed"
    both = migrate("trl", [*words, "use_vllm=True"], {})
    weights = {"use": "mis", "low": 0.0, "high": 3.0, "level": "sequence"}
    assert both.config["algorithm"]["correction"] == [weights, {"use": "zoo/off_policy_mask", "threshold": 0.5}]
    assert next((entry.status, entry.to) for entry in both.entries) == ("changed", ("algorithm.correction",))
    more = {"model": {"path": "model", "max_length": 1024}, "tasks": {"train": "countdown"}, "reward": "countdown"}
    assert check({**both.config, **more}).loss.correction.name == "mis × zoo/off_policy_mask"
    alone = migrate("trl", [*words, "use_vllm=True", "vllm_importance_sampling_correction=False"], {})
    assert alone.config["algorithm"]["correction"]["use"] == "zoo/off_policy_mask"


def test_trinitys_sppo_is_a_loss_of_the_zoo(folder, zoo):
    words = ["algorithm.algorithm_type=sppo", "algorithm.policy_loss_fn_args.epsilon=0.25"]
    found = migrate("trinity", words, {})
    assert not [entry.key for entry in found.entries if entry.status == "missing"]
    assert "algorithm.policy_loss: from a plugin: pip install plugins/rlsdk-zoo, in a clone of rlsdk" in found.notes
    sppo = found.config["algorithm"]
    assert (sppo["advantage"], sppo["policy_loss"], sppo["kl_coef"]) == (
        {"use": "opmd"},
        {"use": "zoo/sppo", "clip": 0.25},
        0.0,
    )


def test_trinitys_sequence_masking_is_a_correction_that_its_old_logprobs_allow(folder, zoo):
    words = ["algorithm.algorithm_type=grpo", "algorithm.policy_loss_fn_args.enable_sequence_masking=true"]
    found = migrate("trinity", [*words, "algorithm.policy_loss_fn_args.delta_sequence_masking=0.2"], {}).config
    assert found["algorithm"]["correction"] == {"use": "zoo/off_policy_mask", "threshold": 0.2}
    assert found["old_logprobs"] == "rollout"
    more = {"model": {"path": "model", "max_length": 2048}, "tasks": {"train": "countdown"}, "reward": "countdown"}
    assert check({**found, **more, "group_size": 4}).loss.correction.name == "zoo/off_policy_mask"


KEYS = 'algorithm.gdpo_reward_keys=["right", "form"]'


@pytest.mark.parametrize(
    ("options", "advantage", "weights"),
    [
        ([KEYS], {"use": "gdpo"}, [1.0, 1.0]),
        ([KEYS, "algorithm.gdpo_reward_weights=[1.0,0.5]"], {"use": "gdpo"}, [1.0, 0.5]),
        ([KEYS, "algorithm.norm_adv_by_std_in_grpo=False"], {"use": "grpo", "std_normalize": False}, [1.0, 1.0]),
        (["algorithm.gdpo_reward_keys=[right]"], {"use": "grpo", "std_normalize": True}, [1.0]),
    ],
)
def test_verls_gdpo_normalises_the_numbers_of_its_reward(options, advantage, weights):
    words = [
        "algorithm.adv_estimator=gdpo",
        "reward.custom_reward_function.path=a.py",
        "reward.reward_manager.name=gdpo",
    ]
    found = migrate("verl", [*words, "algorithm.kl_ctrl.kl_coef=0.001", *options], {})
    assert not [entry.key for entry in found.entries if entry.status == "missing"]
    algorithm = found.config["algorithm"]
    assert (algorithm["use"], algorithm["advantage"]) == ("gdpo", advantage)
    assert algorithm["whiten_advantages"] is True and "shaping" not in algorithm
    parts = [("right", weights[0]), ("form", weights[-1])][: len(weights)]
    assert [(part["path"], part["key"], part["weight"]) for part in found.config["reward"]] == [
        ("a.py:compute_score", *part) for part in parts
    ]


def test_verls_gdpo_without_its_numbers_is_to_do():
    (entry, *_) = migrate("verl", ["algorithm.adv_estimator=gdpo"], {}).entries
    assert entry.status == "missing" and "gdpo_reward_keys" in entry.note


def test_trls_rewards_that_are_normalised_before_they_are_added():
    words = ["multi_objective_aggregation=normalize_then_sum", "reward_weights=[1.0,0.5]"]
    functions = "reward_funcs=[accuracy_reward,get_soft_overlong_punishment]"
    found = migrate("trl", [*words, functions, "max_completion_length=2000"], {}).config
    assert (found["algorithm"]["use"], found["algorithm"]["advantage"]) == ("gdpo", "gdpo")
    assert "shaping" not in found["algorithm"]
    assert found["reward"] == [
        {"use": "math", "weight": 1.0},
        {"use": "length_penalty", "free": 1024, "limit": 1280, "weight": 0.5},
    ]
    summed = ["multi_objective_aggregation=sum_then_normalize", functions]
    for single in ([*words, "reward_funcs=accuracy_reward"], summed):
        assert migrate("trl", single, {}).config["algorithm"]["advantage"] == {"use": "grpo", "std_normalize": True}


@pytest.mark.parametrize(
    ("options", "loss", "status"),
    [
        (["loss_type=ppo_clip", "rollout_is=token"], "ppo", "changed"),
        (["loss_type=reinforce", "rollout_is=token", "rollout_is_threshold=3"], "tis", "mapped"),
        (["loss_type=reinforce"], "reinforce", "mapped"),
        (["loss_type=reinforce", "rollout_is=sequence"], "reinforce", "missing"),
    ],
)
def test_verls_bypass_mode_needs_no_correction(options, loss, status):
    section = "algorithm.rollout_correction"
    found = migrate("verl", [f"{section}.{each}" for each in ("bypass_mode=True", *options)], {})
    assert found.config["old_logprobs"] == "rollout"
    assert "correction" not in found.config["algorithm"]
    assert found.config["algorithm"]["policy_loss"]["use"] == loss
    assert found.entries[0].status == status


def test_verls_fully_asynchronous_trainer():
    found = migrate(
        "verl",
        [
            *("data.train_batch_size=0", "actor_rollout_ref.actor.ppo_mini_batch_size=32", "rollout.nnodes=2"),
            *("rollout.n_gpus_per_node=4", "trainer.n_gpus_per_node=8", "rollout.total_rollout_steps=6400"),
            *("async_training.require_batches=2", "async_training.staleness_threshold=0.5", "rollout.test_freq=3"),
            *("async_training.trigger_parameter_sync_step=4", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"),
            *("async_training.use_rollout_log_probs=True", "trainer.total_epochs=10"),
        ],
        {},
    )
    assert not [entry.key for entry in found.entries if entry.status == "missing"]
    config = found.config
    assert (config["batch_size"], config["minibatches"], config["steps"]) == (64, 2, 100)
    assert config["rollout"] == {"max_staleness": 1, "sync_interval": 4}
    assert (config["eval"]["every"], config["old_logprobs"]) == (12, "rollout")
    assert config["placement"] == {"learners": 8, "engines": 4, "gpus_per_engine": 2, "colocate": False}
    assert "epochs" not in config


def test_verls_critic_and_reward_models():
    values = ["critic.model.path=o/c", "critic.ppo_epochs=4", "critic.optim.weight_decay=0.01"]
    found = migrate("verl", [*values, "reward_model.enable=True", "reward_model.model.path=o/r"], {})
    assert found.config["model"]["critic"] == "o/c"
    assert found.config["reward"] == {"use": "reward_model", "path": "o/r"}
    assert [entry.status for entry in found.entries] == ["mapped", "missing", "ignored", "changed", "changed"]
    (entry,) = migrate("verl", ["critic.ppo_epochs=4", "algorithm.adv_estimator=grpo"], {}).entries[:1]
    assert entry.status == "ignored"


def test_options_of_vllm_are_left_out_for_another_engine():
    rollout = "actor_rollout_ref.rollout"
    found = migrate("verl", [f"{rollout}.name=hf", f"{rollout}.gpu_memory_utilization=0.4"], {})
    assert found.config["engine"] == {"use": "transformers"}
    assert found.entries[1].status == "ignored"
    assert found.config["placement"]["gpus_per_engine"] == 1


@pytest.mark.parametrize(
    ("flags", "lengths"),
    [
        (["--data.max_len", "4096", "--rollout.max_new_tokens", "1024"], (4096, 3072, 1024)),
        (["--data.max_len", "4096"], (4096, 4095, 4095)),  # each answer may fill what its prompt leaves
        (["--prompt_max_len", "512", "--generate_max_len", "8000"], (8512, 512, 8000)),
        (["--generate_max_len", "8000"], (9024, 1024, 8000)),
        (["--seed", "1"], (2048, 2047, 2047)),
    ],
)
def test_openrlhfs_lengths(flags, lengths):
    config = migrate("openrlhf", flags, {}).config
    found = config["model"]["max_length"], config["max_prompt_tokens"], config["sampling"]["max_tokens"]
    assert found == lengths


def test_openrlhfs_defaults_that_differ_are_carried():
    found = migrate("openrlhf", ["--data.max_samples", "102400"], {})
    assert found.config["learner"]["warmup_steps"] == 24  # 0.03 of 100 steps with 8 updates each
    assert (found.config["checkpoint"]["keep"], found.config["eval"]["samples"]) == (3, 4)
    unknown = migrate("openrlhf", ["--seed", "1"], {}).defaults
    assert [entry.key for entry in unknown if entry.status == "missing"] == ["actor.lr_warmup_ratio"]


def test_openrlhfs_critic_starts_from_the_reward_model():
    reward = ["--reward.model_name_or_path", "o/r", "--actor.model_name_or_path", "o/m"]
    assert migrate("openrlhf", reward, {}).config["model"]["critic"] == "o/r"
    named = migrate("openrlhf", [*reward, "--critic.model_name_or_path", "o/c"], {})
    assert named.config["model"]["critic"] == "o/c"
    assert "critic" not in migrate("openrlhf", [*reward, "--algo.advantage.estimator", "rloo"], {}).config["model"]


@pytest.mark.parametrize(
    ("estimator", "advantage", "status"),
    [
        ("group_norm", {"use": "grpo", "std_normalize": True}, "ignored"),
        ("reinforce_baseline", {"use": "grpo", "std_normalize": False}, "changed"),
        ("reinforce", {"use": "reinforce_plus_plus", "gamma": 1.0}, "missing"),
    ],
)
def test_openrlhfs_no_std_norm_is_about_the_batch(estimator, advantage, status):
    found = migrate("openrlhf", ["--advantage_estimator", estimator, "--no_advantage_std_norm"], {})
    assert found.config["algorithm"]["advantage"] == advantage
    assert found.entries[1].status == status


@pytest.mark.parametrize(
    ("flags", "correction"),
    [
        (["--vllm_is_truncated_threshold", "2"], {"use": "tis", "cap": 2.0}),
        (
            ["--algo.advantage.is_correction_type", "seq-mask-tis"],
            [{"use": "tis", "cap": 5.0}, {"use": "geometric", "low": 0.5, "high": 5.0}],
        ),
        (["--policy_loss_type", "gspo"], None),
    ],
)
def test_openrlhfs_corrections(flags, correction):
    found = migrate("openrlhf", ["--enable_vllm_is_correction", *flags], {})
    assert found.config["algorithm"].get("correction") == correction
    assert found.config.get("old_logprobs") == (None if correction else "rollout")
    assert not [entry.key for entry in found.entries if entry.status == "missing"]


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ((), "kl_penalty apply"),
        (("--reward_clip_range", "-5", "5"), "reward_clip and kl_penalty apply"),
        (("--init_kl_coef", "0"), ""),
        (("--use_kl_loss",), ""),
        (("--advantage_estimator", "gae", "--reward_clip_range", "-5", "5"), ""),
    ],
)
def test_openrlhfs_order_of_clipping_kl_and_comparison_is_noted(flags, parts):
    notes = migrate("openrlhf", ["--advantage_estimator", "group_norm", *flags], {}).notes
    found = [note for note in notes if "OpenRLHF applies them to the result of this comparison" in note]
    assert [note.startswith(f"algorithm.shaping: {parts} before rewards are compared") for note in found] == (
        [True] if parts else []
    )


def test_data_files_that_no_source_reads_are_noted(tmp_path):
    file = tmp_path / "verl.yaml"
    file.write_text("""data: {train_files: "${oc.env:DATA, 'data/train.csv'}"}""")
    for found in (
        migrate("openrlhf", ["--data.prompt_dataset", "data/train.csv"], {}),
        migrate("verl", [str(file)], {}),
    ):
        assert found.config["tasks"]["train"]["use"] != "hub"
        assert [note for note in found.notes if note.startswith("tasks: no source reads csv: save the data")]


def test_openrlhfs_overlong_penalty_comes_before_the_bounds():
    found = migrate("openrlhf", ["--reward.overlong_buffer_len", "100", "--init_kl_coef", "0"], {})
    assert found.config["algorithm"]["shaping"] == [
        {"use": "overlong", "max_length": 2048, "buffer": 100, "penalty": 1.0},
        {"use": "reward_clip", "low": -10.0, "high": 10.0},
    ]


@pytest.mark.parametrize("how", ["command", "script"])
def test_trls_rloo_is_not_grpo(tmp_path, how):
    file = tmp_path / "train.py"
    file.write_text("RLOOTrainer(model='a/b', args=RLOOConfig(epsilon=0.1, reward_clip_range=(-5, 5)))\n")
    command = "trl rloo --model_name_or_path a/b --epsilon 0.1 --reward_clip_range -5,5"
    config = migrate("trl", [command.replace("-5,5", "'[-5,5]'") if how == "command" else str(file)], {}).config
    algorithm = config["algorithm"]
    assert (algorithm["use"], algorithm["aggregate"], config["group_size"]) == ("rloo", "seq-mean-token-sum", 2)
    assert algorithm["policy_loss"] == {"use": "ppo", "clip_low": 0.1, "clip_high": 0.1, "dual_clip": None}
    assert algorithm["shaping"] == [
        {"use": "reward_clip", "low": -5.0, "high": 5.0},
        {"use": "kl_penalty", "coef": 0.05, "estimator": "k1"},
    ]


def test_trls_bound_of_cispo_is_the_ratio_itself():
    found = migrate("trl", ["loss_type=cispo", "epsilon_high=5.0"], {}).config
    assert found["algorithm"]["policy_loss"] == {"use": "cispo", "clip_low": 1.0, "clip_high": 4.0}


@pytest.mark.parametrize(
    "launcher",
    [
        "accelerate launch --num_processes 8",
        "accelerate launch --config_file eight.yaml",
        "torchrun --nproc_per_node=4 --nnodes 2",
        "deepspeed --num_gpus 8",
    ],
)
def test_trls_number_of_processes_is_read_from_the_launcher(tmp_path, launcher):
    (tmp_path / "eight.yaml").write_text("num_processes: 8\n")
    script = tmp_path / "train.sh"
    script.write_text(f"{launcher} trl/scripts/grpo.py --per_device_train_batch_size 4 --num_generations 8\n")
    found = migrate("trl", [str(script)], {})
    assert (found.config["batch_size"], found.config["placement"]["learners"]) == (4, 8)
    assert not any("num_processes" in note for note in found.notes)


def test_what_trl_leaves_open_is_noted():
    found = migrate("trl", ["accelerate launch --config_file no.yaml grpo.py --save_steps 10"], {})
    assert found.config["checkpoint"] == {"every": 10, "keep": 1000}  # TRL keeps all
    notes = " ".join(found.notes)
    assert "no.yaml was not found" in notes
    assert "TRL has no limit" in notes
    lengths = migrate("trl", ["vllm_max_model_length=4096", "max_completion_length=1024"], {}).config
    assert (lengths["model"].get("max_length"), lengths["max_prompt_tokens"]) == (None, 3072)


def test_a_default_stands_for_a_value_that_only_a_run_tells(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("GRPOConfig(output_dir=args.out, learning_rate=args.lr)\n")
    found = migrate("trl", [str(file)], {})
    assert (found.config["name"], found.config["learner"]["lr"]) == ("trl-run", 1e-6)
    assert {entry.status for entry in found.entries if entry.key != "class"} == {"missing"}


def rlvr(**more):
    lengths = {"prompt_length": 512, "response_length": 1536, "rollout_batch_size": 64, "adv_estimator": "gae"}
    train = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 32}
    parallel = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    strategy = {"strategy_name": "megatron_train", "strategy_config": parallel}
    role = {"training_args": train, "strategy_args": strategy, "device_mapping": "list(range(0,8))"}
    role["data_args"] = {"file_name": ["math.jsonl"], "messages": "messages", "response": "solution"}
    return {**lengths, "num_return_sequences_in_group": 8, "pretrain": "o/m", "actor_train": role, **more}


def test_rolls_rlvr_pipeline_counts_replicas_and_lengths(tmp_path):
    file = tmp_path / "rlvr.yaml"
    infer = {"generating_args": {"max_new_tokens": 128, "temperature": 0.99}}
    file.write_text(yaml.safe_dump(rlvr(actor_infer=infer, reward_pretrain="o/r")))
    found = migrate("roll", [str(file)], {})
    config = found.config
    assert config["minibatches"] == 64 * 8 // (32 * 2)  # of 8 GPUs, 4 hold one replica
    assert (config["sampling"]["max_tokens"], config["model"]["max_length"]) == (1536, 2048)
    assert config["algorithm"]["advantage"] == {"use": "gae", "whiten": False, "gamma": 1.0, "lam": 0.95}
    assert config["model"]["critic"] == "o/r"
    assert config["tasks"]["train"]["columns"] == {"prompt": "messages", "answer": "ground_truth", "source": "tag"}
    assert config["checkpoint"]["keep"] == 1000
    lacking = {entry.key for entry in found.defaults if entry.status == "missing"}
    assert lacking == {"actor_infer.generating_args.top_p", "actor_infer.generating_args.top_k"}


def test_files_that_hydras_defaults_name_are_read(tmp_path):
    (tmp_path / "config").mkdir()
    environment = {"env_type": "sokoban", "env_config": {"max_steps": "${turns}", "dim_room": [6, 7]}}
    content = {"turns": 3, "custom_env": {"Box": environment}, "seed": 1}
    (tmp_path / "config" / "envs.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "config" / "empty.yaml").write_text("# nothing\n")
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "a.yaml"
    names = ["envs@_here_", "empty@_here_", "deepspeed_zero@_here_", "other@_here_"]
    file.write_text(
        yaml.safe_dump({"defaults": [f"../config/{name}" for name in names], "seed": 2, "turns": 5})
        + "custom_envs:\n  Box: ${custom_env.Box}\ntrain_env_manager: {tags: [Box]}\n"
    )
    found = migrate("roll", [str(file)], {})
    box = found.config["tasks"]["train"]["environments"]["Box"]
    assert box == {"use": "gridworlds/sokoban", "max_steps": 5, "dim_x": 6, "dim_y": 7}
    assert found.config["seed"] == 2
    assert [note for note in found.notes if "defaults" in note] == [
        "defaults: ../config/other.yaml was not found: what it sets is not converted"
    ]


def test_options_of_the_learner_that_exclude_each_other():
    flags = ["--ds.ring_attn_size", "2", "--ds.attn_implementation", "flash_attention_2"]
    found = migrate("openrlhf", flags, {})
    assert found.config["learner"]["attention"] == "sdpa"
    assert any("learner.attention" in note for note in found.notes)
    config = migrate("trl", ["use_peft=true", "torch_compile=true"], {}).config
    assert "compile" not in config["learner"]


def test_trinitys_arguments_are_options_or_things_to_do():
    found = migrate(
        "trinity",
        [
            *("algorithm.algorithm_type=grpo", "algorithm.policy_loss_fn_args.loss_agg_mode=seq-mean-token-sum"),
            *("algorithm.policy_loss_fn_args.clip_ratio_c=10", "algorithm.advantage_fn_args.std_threshold=0.1"),
            *("algorithm.policy_loss_fn_args.clip_range=0.3", "algorithm.optimizer.lr_scheduler_type=cosine"),
            *("explorer.rollout_model.engine_type=vllm_async", "trainer.save_interval=5"),
        ],
        {},
    )
    config = found.config
    assert config["algorithm"]["aggregate"] == "seq-mean-token-sum"
    loss = {"use": "ppo", "clip_low": 0.3, "clip_high": 0.3, "dual_clip": 10.0}
    assert config["algorithm"]["policy_loss"] == loss
    assert config["algorithm"]["filters"] == [{"use": "min_std", "threshold": 0.1}]
    assert not [entry.key for entry in found.entries if entry.status == "missing"]
    assert config["learner"]["final_ratio"] == 0.01
    assert config["checkpoint"] == {"every": 5, "keep": 1000, "export": "last"}


def test_trinitys_adapter_critic_samples_and_trainer_config(tmp_path):
    file = tmp_path / "a.yaml"
    held_out = [{"path": "o/a", "repeat_times": 4}, {"path": "o/b", "rollout_args": {"n": 8}}]
    content = {
        "model": {
            "model_path": "o/m",
            "critic_model_path": "o/c",
            "lora_configs": [{"lora_rank": 16, "lora_alpha": 8}],
        },
        "buffer": {"explorer_input": {"eval_tasksets": held_out}},
        "trainer": {"trainer_config": {"actor_rollout_ref": {"actor": {"optim": {"lr": 1e-5}}}}},
    }
    file.write_text(yaml.safe_dump(content))
    found = migrate("trinity", [str(file)], {})
    assert not [entry.key for entry in found.entries if entry.status == "missing"]
    assert found.config["model"]["critic"] == "o/c"
    assert found.config["learner"]["lora"] == {"rank": 16, "alpha": 8.0}
    assert (found.config["eval"]["samples"], found.config["learner"]["lr"]) == (8, 1e-5)


def test_xtuners_defaults_and_separate_gpus(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(
        "trainer = RLDisaggregatedTrainerConfig(\n"
        "    train_resources=AcceleratorResourcesConfig(num_workers=4), checkpoint_interval=5, total_train_steps=200,\n"
        "    rollout_resources=AcceleratorResourcesConfig(num_workers=6),\n"
        "    rollout_config=RolloutConfig(tensor_parallel_size=2), train_worker_cfg=WorkerConfig(optimizer_steps=2))\n"
    )
    config = migrate("xtuner", [str(file)], {}).config
    assert config["placement"] == {"learners": 4, "engines": 3, "gpus_per_engine": 2, "colocate": False}
    assert config["checkpoint"] == {"every": 5, "keep": 1000}  # all
    assert config["learner"]["warmup_steps"] == 12  # 0.03 of 200 steps with two updates each


def test_trls_least_rate_is_a_share_of_the_peak():
    schedule = ["lr_scheduler_type=cosine_with_min_lr", "learning_rate=1e-5"]
    for more in (
        "lr_scheduler_kwargs.min_lr_rate=0.1",
        "lr_scheduler_kwargs.min_lr=1e-6",
        "lr_scheduler_kwargs={min_lr_rate: 0.1}",
    ):
        assert migrate("trl", [*schedule, more], {}).config["learner"]["final_ratio"] == pytest.approx(0.1)


def test_the_arguments_of_transformers_schedules_are_read():
    given = ["lr_scheduler_kwargs.num_decay_steps=20", "lr_scheduler_kwargs.decay_type=1-sqrt"]
    learner = migrate("trl", ["lr_scheduler_type=warmup_stable_decay", *given], {}).config["learner"]
    found = {"schedule": "wsd", "decay_steps": 20, "decay_shape": "sqrt", "final_ratio": 0.0}
    assert {name: learner[name] for name in found} == found
    assert migrate("trl", ["lr_scheduler_type=polynomial", "seed=1"], {}).config["learner"]["decay_power"] == 1


def test_verls_decay_is_counted_in_optimiser_steps():
    actor = "actor_rollout_ref.actor"
    common = ["data.train_batch_size=64", f"{actor}.ppo_mini_batch_size=32", f"{actor}.optim.lr_warmup_steps=10"]
    cosine = [*common, f"{actor}.optim.lr_decay_style=cosine", f"{actor}.optim.lr_decay_steps=110"]
    assert migrate("verl", cosine, {}).config["learner"]["decay_steps"] == 200
    wsd = [f"{actor}.optim.lr_decay_style=WSD", f"{actor}.optim.lr_wsd_decay_steps=30"]
    learner = migrate("verl", [*common, *wsd, f"{actor}.optim.lr_wsd_decay_style=minus_sqrt"], {}).config["learner"]
    assert (learner["schedule"], learner["decay_steps"], learner["decay_shape"]) == ("wsd", 60, "sqrt")


def test_verls_profile_is_kept_if_torch_makes_it():
    steps = "global_profiler.steps=[2,5]"
    assert migrate("verl", ["global_profiler.tool=torch", steps], {}).config["profile"] == {"steps": [2, 5]}
    assert "profile" not in migrate("verl", ["global_profiler.tool=nsys", steps], {}).config


def test_the_file_of_a_script_is_found_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "multi.yaml").write_text("defaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 32}\n")
    script = 'P="$(pwd)"\npython3 -m verl.trainer.main_ppo --config-path="$P/config" --config-name=multi data.seed=3\n'
    found = migrate("verl", [script], {})
    assert (found.config["batch_size"], found.config["seed"]) == (32, 3)
    assert not found.notes[:-1]  # the last is about the reward


@pytest.mark.parametrize(
    ("files", "source"),
    [
        ("$DATA", {"use": "parquet", "path": "${oc.env:DATA}"}),
        ("\"['$A', '$B/b.parquet']\"", {"use": "parquet", "path": ["${oc.env:A}", "${oc.env:B}/b.parquet"]}),
        ("d/train.jsonl", {"use": "jsonl", "path": "d/train.jsonl"}),
    ],
)
def test_verls_files_are_parquet_unless_their_names_say_otherwise(files, source):
    found = migrate("verl", [f"python3 -m verl.trainer.main_ppo data.train_files={files} data.seed=1"], {})
    assert found.config["tasks"]["train"] == source


@pytest.mark.parametrize(
    ("kind", "columns"), [("dpo", {"prompt": "question"}), ("sft", {"prompt": "question", "demonstration": "response"})]
)
def test_trinitys_offline_algorithms_read_the_trainers_buffer(tmp_path, monkeypatch, kind, columns):
    monkeypatch.chdir(tmp_path)
    buffer = {
        "path": "o/pairs",
        "format": {"prompt_key": "question", "chosen_key": "chosen", "rejected_key": "rejected"},
    }
    content = {
        "mode": "train",
        "algorithm": {"algorithm_type": kind},
        "model": {"model_path": "o/m", "max_model_len": 1536, "max_response_tokens": 1024},
        "buffer": {"train_batch_size": 64, "total_epochs": 2, "trainer_input": {"experience_buffer": buffer}},
        "synchronizer": {"sync_interval": 30},
    }
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump(content))
    found = migrate("trinity", [str(file)], {})
    config = found.config
    source = {"use": "hub", "name": "o/pairs", "split": "train", "columns": columns, "chat": True}
    assert config["tasks"]["train"] == source
    assert (config["batch_size"], config.get("rollout")) == (64, None)
    assert not [entry.key for entry in found.entries if entry.status == "missing"]
    assert check(config).algorithm.rollouts == "demonstrations"


def test_pipelines_of_roll_that_are_not_converted_are_noted():
    found = migrate("roll", ["pretrain=o/m", "sequence_length=512", "student_train.device_mapping=[0]"], {})
    assert any("distillation are not converted" in note for note in found.notes)
    assert not migrate("roll", ["adv_estimator=grpo", "pretrain=o/m", "response_length=512"], {}).notes


def test_rolls_loss_by_name_takes_precedence_over_clip_ranges():
    found = migrate("roll", ["actor_train.pg_variant=topr", "pg_clip=0.2", "dual_clip_loss=true", "pretrain=o/m"], {})
    assert found.config["algorithm"]["policy_loss"] == {"use": "topr", "cap": 1.0}
    assert [entry.status for entry in found.entries[:2]] == ["changed", "ignored"]


@pytest.mark.parametrize(
    ("options", "shaping"),
    [
        (["norm_mean_type=batch", "norm_std_type=batch"], "mean_std"),
        (["norm_mean_type=batch"], "mean"),
        (["norm_mean_type=running", "norm_std_type=running"], "running"),
        (["reward_norm=batch", "reward_shift=true"], "mean"),
        (["reward_norm=null"], None),
    ],
)
def test_rolls_rewards_are_normalised_over_the_batch(options, shaping):
    algorithm = migrate("roll", ["adv_estimator=reinforce", *options], {}).config["algorithm"]
    assert algorithm["advantage"] == {"use": "segment_returns", "gamma": 1.0}
    assert algorithm["shaping"] == ([{"use": "reward_norm", "by": "batch", "method": shaping}] if shaping else [])


def test_rolls_means_of_groups_with_the_deviation_of_the_batch():
    types = [f"reward_normalization.norm_{each}" for each in ("mean_type=group", "std_type=batch")]
    found = migrate("roll", ["adv_estimator=step_reinforce", *types], {})
    assert found.config["algorithm"]["advantage"] == {"use": "grpo", "std_normalize": True, "std_over": "batch"}
    assert not [entry.key for entry in found.entries if entry.status == "missing"]


def test_rolls_masks_adapters_and_columns(tmp_path):
    file = tmp_path / "rlvr.yaml"
    file.write_text("""
        lora_target: q_proj,k_proj
        max_len_mask: true
        difficulty_mask: true
        difficulty_high_threshold: 0.9
        reward_norm: null
        actor_train:
          model_args: {lora_rank: 8, lora_target: '${lora_target}'}
          data_args: {file_name: [a.jsonl], messages: chat}
        validation: {data_args: {file_name: [b.jsonl]}}
        rewards:
          math: {worker_cls: x.MathRuleRewardWorker}
          ifeval: {worker_cls: x.GeneralRuleRewardWorker}
          llm: {worker_cls: x.LLMJudgeRewardWorker}
    """)
    found = migrate("roll", [str(file)], {})
    config = found.config
    assert config["learner"]["lora"]["targets"] == ["q_proj", "k_proj"]
    assert config["algorithm"]["filters"] == ["truncated", {"use": "pass_rate", "low": 0.0, "high": 0.9}]
    assert config["tasks"]["eval"]["columns"] == config["tasks"]["train"]["columns"]
    notes = {entry.key: (entry.status, entry.note) for entry in found.entries}
    assert notes["lora_target"] == ("ignored", "the keys that refer to it are converted")
    assert notes["reward_norm"][0] == "ignored"
    assert notes["rewards.ifeval.worker_cls"][0] == "missing"
    assert "use judge" in notes["rewards.llm.worker_cls"][1]


@pytest.mark.parametrize(
    ("options", "correction"),
    [
        ((), {"use": "tis", "cap": 4.0, "level": "token"}),
        (("level=sequence",), {"use": "tis", "cap": 4.0, "level": "sequence"}),
        (("mode=mask",), {"use": "mis", "low": 0.25, "high": 4.0, "level": "token"}),
        (("mode=mask", "level=geometric", "threshold_lower=0.5"), {"use": "geometric", "low": 0.5, "high": 4.0}),
    ],
)
def test_verls_corrections_of_older_versions(options, correction):
    words = ["algorithm.rollout_is=True", "algorithm.rollout_is_threshold=4"]
    found = migrate("verl", [*words, *(f"algorithm.rollout_is_{each}" for each in options)], {})
    assert found.config["algorithm"]["correction"] == correction
    assert not [entry.key for entry in found.entries if entry.status == "missing"]
    monitored = migrate("verl", ["algorithm.rollout_is=False", words[1]], {})
    assert "correction" not in monitored.config["algorithm"]
    capped = migrate("verl", ["actor_rollout_ref.actor.tis_imp_ratio_cap=2"], {}).config
    assert capped["algorithm"]["correction"] == {"use": "tis", "cap": 2.0}


def test_verls_whole_configuration_leaves_nothing_to_do_for_what_is_off():
    rollout = "actor_rollout_ref.rollout"
    off = ["distillation.enabled=False", "distillation.distillation_loss.topk=32", "trainer.val_only=False"]
    off += [f"{rollout}.multi_turn.enable=False", f"{rollout}.multi_turn.format=hermes", "data.image_key=images"]
    off += ["actor_rollout_ref.model.lora.rank=0", "actor_rollout_ref.model.lora.type=lora"]
    off += ["algorithm._target_=verl.AlgoConfig", f"{rollout}.engine_kwargs.vllm={{}}"]
    assert not [entry for entry in migrate("verl", off, {}).entries if entry.status == "missing"]
    on = [each.replace("enabled=False", "enabled=True") for each in off]
    assert [entry.key for entry in migrate("verl", on, {}).entries if entry.status == "missing"] == [
        "distillation.enabled",
        "distillation.distillation_loss.topk",
    ]


def test_verls_minibatches_of_older_versions_are_noted():
    words = ["data.train_batch_size=1024", "actor_rollout_ref.actor.ppo_mini_batch_size=256"]
    words += ["actor_rollout_ref.rollout.n=5", "actor_rollout_ref.actor.ppo_micro_batch_size=8"]
    assert "TinyZero" in migrate("verl", words, {}).entries[1].note
    assert "TinyZero" not in migrate("verl", words[:3], {}).entries[1].note


def test_older_names_are_reported_as_they_were_written():
    (entry,) = migrate("openrlhf", ["--n_samples_per_prompt", "4"], {}).entries
    assert (entry.key, entry.to) == ("n_samples_per_prompt", ("group_size=4",))


XTUNER = """
import os
from copy import deepcopy
judger = DapoMathJudgerConfig(enable_overlong_buffer=True, overlong_buffer_len=16, max_response_len=64)
sampled = SampleParams(max_tokens=64)
evaluate = os.environ.get("EVALUATE", "1") == "1"
data = [{"dataset": DatasetConfig(anno_path="train.jsonl"), "tokenize_fn": RLTokenizeFnConfig(max_length=32)}]
"""


@pytest.mark.parametrize("version", ["1.0.1", "today"])
def test_xtuners_penalty_of_long_answers_in_every_version(tmp_path, version):
    file = tmp_path / "rl.py"
    older = """
trainer = RLTrainerConfig(
    load_from="o/m", total_epochs=2, hf_interval=15, checkpoint_interval=-1,
    dataflow_config=DataFlowConfig(prompt_repeat_k=5, global_batch_size=16, sample_params=sampled),
    replay_buffer_config=ReplayBufferConfig(dataset_cfg=data),
    judger_config=JudgerConfig(reward_judger_configs=[judger]),
    train_worker_config=WorkerConfig(optim_cfg=AdamWConfig(lr=1e-6), optimizer_steps=4),
    evaluator_config=EvaluatorConfig(dataset_cfg=data, evaluate_step=7, sample_params=deepcopy(sampled))
    if evaluate else None)
"""
    today = """
sampler = SamplerConfig(dataloader_cfg=DataloaderConfig(dataset_config_list=data), prompt_repeat_k=5)
loop = SingleTurnAgentLoopConfig(sample_params=sampled)
tasks = TaskSpecConfig(agent_loop_config=loop, judger_config=judger, sampler_config=sampler)
trainer = RLColocateTrainerConfig(
    load_from="o/m", total_epochs=2, hf_interval=15, checkpoint_interval=-1, train_batch_size=16,
    agent_loop_manager_cfg=AgentLoopManagerConfig(tasks=tasks),
    eval_agent_loop_manager_cfg=AgentLoopManagerConfig(tasks=tasks),
    train_worker_cfg=WorkerConfig(optim_cfg=AdamWConfig(lr=1e-6), optimizer_steps=4),
    enable_evaluate=evaluate, evaluate_step=7)
"""
    file.write_text(XTUNER + (today if version == "today" else older))
    found = migrate("xtuner", [str(file)], {})
    config = found.config
    assert config["algorithm"]["shaping"] == [{"use": "overlong", "max_length": 64, "buffer": 16, "penalty": 1.0}]
    assert (config["batch_size"], config["group_size"], config["minibatches"], config["epochs"]) == (16, 5, 4, 2)
    assert (config["learner"]["lr"], config["max_prompt_tokens"], config["sampling"]["max_tokens"]) == (1e-6, 32, 64)
    assert config["tasks"]["train"] == config["tasks"]["eval"] == {"use": "jsonl", "path": "train.jsonl"}
    assert (config["eval"]["every"], config["reward"]) == (7, {"use": "math", "strict": False})
    assert config["checkpoint"] == {"export": "every", "every": 15, "keep": 1000}
    assert not [entry.key for entry in found.entries if entry.status == "missing"]


def test_splits_that_trls_script_loads_together_are_the_sources(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(
        "from trl.rewards import accuracy_reward\n"
        'train, held_out = load_dataset("o/d", split=["train[:5%]", "test[:5%]"])\n'
        'args = GRPOConfig("out", eval_strategy="steps", model_init_kwargs={"dtype": torch.float32})\n'
        'GRPOTrainer("o/m", [accuracy_reward], args, train, held_out, callbacks=[Progress()])\n'
    )
    found = migrate("trl", [str(file)], {})
    assert found.config["tasks"]["train"] == {"use": "hub", "name": "o/d", "split": "train[:5%]"}
    assert found.config["tasks"]["eval"]["split"] == "test[:5%]"
    assert {entry.key: entry.to for entry in found.entries}["model_init_kwargs.dtype"] == ("model.dtype=float32",)
    assert not [entry.key for entry in found.entries if entry.status == "missing"]


def test_arguments_that_trls_script_reads_from_the_command_are_asked_for(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(
        "from trl.rewards import accuracy_reward\n"
        "script, training = TrlParser((ScriptArguments, GRPOConfig)).parse_args_and_config()\n"
        'GRPOTrainer("o/m", accuracy_reward, args=training, peft_config=LoraConfig() if script.peft else None)\n'
    )
    found = migrate("trl", [str(file)], {})
    (entry,) = [entry for entry in found.entries if entry.status == "missing"]
    assert (entry.key, "give the command that runs this script" in entry.note) == ("args", True)
    assert "line 3: script.peft is taken to be true: please check" in found.notes


def test_trinitys_settings_of_verl_are_converted(tmp_path):
    (tmp_path / "examples" / "ppo").mkdir(parents=True)
    verl = {
        "actor_rollout_ref": {"actor": {"optim": {"lr": 5e-7, "lr_warmup_steps": 20}, "clip_ratio_high": 0.3}},
        "critic": {"optim": {"lr": 2e-5}, "cliprange_value": 0.4, "ppo_max_token_len_per_gpu": 1},
        "trainer": {"max_actor_ckpt_to_keep": 5},
    }
    (tmp_path / "examples" / "ppo" / "train.yaml").write_text(yaml.safe_dump(verl))
    config = {
        "algorithm": {"algorithm_type": "ppo"},
        "model": {"model_path": "o/m", "max_token_len": 96, "max_response_tokens": 64},
        "trainer": {"trainer_config_path": "examples/ppo/train.yaml"},
    }
    file = tmp_path / "examples" / "ppo" / "ppo.yaml"
    file.write_text(yaml.safe_dump(config))
    found = migrate("trinity", [str(file)], {})
    learner = found.config["learner"]
    assert (learner["lr"], learner["warmup_steps"], learner["critic_lr"]) == (5e-7, 20, 2e-5)
    assert (found.config["algorithm"]["value_clip"], found.config["checkpoint"]["keep"]) == (0.4, 5)
    assert found.config["model"]["max_length"] == 96
    assert not [entry.key for entry in found.entries if entry.status == "missing"]
    config["algorithm"] |= {"algorithm_type": "grpo", "optimizer": {"lr": 1e-5}}
    file.write_text(yaml.safe_dump(config))
    grpo = migrate("trinity", [str(file)], {}).config
    assert (grpo["learner"]["lr"], grpo["learner"].get("critic_lr")) == (1e-5, None)
    (tmp_path / "examples" / "ppo" / "train.yaml").unlink()
    lost = [entry for entry in migrate("trinity", [str(file)], {}).entries if entry.status == "missing"]
    assert [entry.key for entry in lost] == ["trainer.trainer_config_path"]


def test_trinitys_first_version_and_its_penalty_of_long_answers(tmp_path):
    taskset = "buffer.explorer_input.taskset"
    words = ["data.batch_size=16", "data.dataset_path=openai/gsm8k", "data.format.prompt_key=question"]
    words += ["explorer.repeat_times=4", "explorer.engine_num=2", "trainer.algorithm_type=grpo", "data.total_epochs=2"]
    words += [f"{taskset}.reward_fn_args.enable_overlong_penalty=true", f"{taskset}.reward_fn_args.cache_length=8"]
    found = migrate("trinity", [*words, "model.max_response_tokens=64", "algorithm.kl_loss_fn=none"], {})
    config = found.config
    assert (config["batch_size"], config["group_size"], config["epochs"]) == (16, 4, 2)
    assert (config["placement"]["engines"], config["algorithm"]["use"]) == (2, "grpo")
    assert config["tasks"]["train"]["columns"]["prompt"] == "question"
    assert config["algorithm"]["shaping"] == [{"use": "overlong", "max_length": 64, "buffer": 8, "penalty": 1.0}]
    assert {entry.key for entry in found.entries} >= {"explorer.repeat_times", "data.dataset_path"}


@pytest.mark.parametrize(("key", "least"), [("lr_scheduler_type", 0.01), ("warmup_style", 0.0)])
def test_trinitys_least_rate_depends_on_the_version(key, least):
    config = migrate("trinity", [f"algorithm.optimizer.{key}=cosine", "buffer.batch_size=2"], {}).config
    assert (config["learner"]["schedule"], config["learner"]["final_ratio"]) == ("cosine", least)


@pytest.mark.parametrize("script", ["examples/scripts/gspo.py", "train.py"])
def test_the_launcher_of_any_script_is_read_apart_from_its_flags(tmp_path, monkeypatch, script):
    monkeypatch.chdir(tmp_path)
    Path("zero3.yaml").write_text("num_processes: 4\ndeepspeed_config: {zero_stage: 3}\n")
    flags = "--model_name_or_path o/m --per_device_train_batch_size 8 --num_generations 8"
    found = migrate("trl", [f"accelerate launch --config_file zero3.yaml {script} {flags}"], {})
    assert (found.config["batch_size"], found.config["placement"]["learners"]) == (4, 4)
    assert found.config["learner"]["zero_stage"] == 3
    assert not [entry.key for entry in found.entries if entry.status == "missing"]


def test_trls_modules_are_its_commands():
    words = "--model_name_or_path o/m --dataset_name o/d"
    algorithms = [
        migrate("trl", [f"python -m trl.scripts.{name} {words}"], {}).config["algorithm"]["use"]
        for name in ("grpo", "rloo")
    ]
    assert algorithms == ["grpo", "rloo"]
    assert migrate("trl", [f"trl grpo {words}"], {}).config["eval"]["before"] is False  # TRL's default


AVERAGED = {"samples": 32, "temperature": 0.6, "top_p": 0.95, "greedy": False}


def section(found: Migration, *keys: str) -> dict[str, Any]:
    """Settings of evaluations, and no key that is left to do."""
    assert not [entry.key for entry in found.entries if entry.status == "missing"]
    return {key: value for key, value in found.config["eval"].items() if key in {*AVERAGED, "top_k", *keys}}


def test_verls_evaluations_sample_as_before():
    kwargs = "actor_rollout_ref.rollout.val_kwargs"
    sampled = [f"{kwargs}.{each}" for each in ("n=32", "do_sample=True", "temperature=0.6", "top_p=0.95", "top_k=-1")]
    assert section(migrate("verl", sampled, {})) == {**AVERAGED, "top_k": 0}
    assert section(migrate("verl", [f"{kwargs}.top_p=0.95", f"{kwargs}.n=1"], {})) == {"samples": 1}  # greedy, as usual


def test_trinitys_evaluations_sample_as_before(tmp_path):
    file = tmp_path / "a.yaml"
    sampled = {"n": 32, "temperature": 0.6, "top_p": 0.95, "max_tokens": 256}

    def written(*arguments: dict[str, Any], **model: float) -> Migration:
        tasksets = [{"path": f"o/{i}", "rollout_args": given} for i, given in enumerate(arguments)]
        content = {"model": {"model_path": "o/m", **model}, "buffer": {"explorer_input": {"eval_tasksets": tasksets}}}
        file.write_text(yaml.safe_dump(content))
        return migrate("trinity", [str(file)], {})

    assert section(written(sampled, sampled), "max_tokens") == {**AVERAGED, "max_tokens": 256}
    assert section(written({"n": 2}, temperature=0.7)) == {"samples": 2, "temperature": 0.7}
    other = [entry for entry in written(sampled, {"temperature": 1.0}).entries if entry.status == "missing"]
    assert [entry.key.rpartition(".")[2] for entry in other] == ["temperature", "top_p", "temperature"]
    assert "they have 0.6, 1" in other[0].note


def test_rolls_evaluations_sample_as_before(tmp_path):
    file = tmp_path / "a.yaml"

    def written(**arguments: float) -> Migration:
        file.write_text(yaml.safe_dump({"pretrain": "o/m", "validation": {"generating_args": arguments}}))
        return migrate("roll", [str(file)], {})

    given = {"num_return_sequences": 32, "temperature": 0.6, "top_p": 0.95, "top_k": 0}
    assert section(written(**given)) == {**AVERAGED, "top_k": 0}
    usual = {"samples": 2, "temperature": 0.95, "top_p": 0.7, "top_k": 50, "greedy": False}
    assert section(written(num_return_sequences=2)) == usual


def test_xtuners_evaluations_sample_as_before(tmp_path):
    file = tmp_path / "rl.py"
    drawn = "EvaluatorConfig(dataset_cfg=data, sample_params=SampleParams(temperature=%s, top_p=0.95, top_k=20))"
    file.write_text(f"{XTUNER}\ntrainer = RLTrainerConfig(load_from='o/m', evaluator_config={drawn % 0.6})\n")
    found = section(migrate("xtuner", [str(file)], {}))
    assert found == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "greedy": False}
    file.write_text(f"{XTUNER}\ntrainer = RLTrainerConfig(load_from='o/m', evaluator_config={drawn % 0})\n")
    assert section(migrate("xtuner", [str(file)], {})) == {}


def test_openrlhfs_and_trls_evaluations_sample_as_before():
    flags = "--actor.model_name_or_path o/m --eval.n_samples_per_prompt 32 --eval.temperature"
    found = migrate("openrlhf", [f"python -m openrlhf.cli.train_ppo_ray {flags} 0.7"], {})
    assert section(found) == {"samples": 32, "temperature": 0.7, "greedy": False}
    found = migrate("openrlhf", [f"python -m openrlhf.cli.train_ppo_ray {flags} 0.0"], {})
    assert section(found) == {"samples": 32}
    words = "trl grpo --model_name_or_path o/m --dataset_name o/d --temperature 0.7 --num_generations_eval 4"
    assert section(migrate("trl", [f"{words} --eval_strategy steps"], {})) == {"samples": 4, "temperature": 0.7}
    assert section(migrate("trl", [words], {})) == {"samples": 4}


def rendered(found: Migration) -> dict[str, Any]:
    """Settings of the renderer, and no key that is left to do."""
    assert not [entry.key for entry in found.entries if entry.status == "missing"]
    return found.config["model"]["renderer"]


def test_variables_and_files_of_chat_templates_are_those_of_the_renderer(tmp_path):
    quiet = {"variables": {"enable_thinking": False}}
    assert rendered(migrate("verl", ["+data.apply_chat_template_kwargs.enable_thinking=False"], {})) == quiet
    words = "trl grpo --model_name_or_path o/m --dataset_name o/d --chat_template"
    assert rendered(migrate("trl", [f"{words}_path t/chat.jinja"], {})) == {"file": "t/chat.jinja"}
    assert (
        rendered(migrate("trl", [*words.split()[:-1], "--chat_template_kwargs", '{"enable_thinking": false}'], {}))
        == quiet
    )
    (entry,) = [e for e in migrate("trl", [f"{words}_path o/other"], {}).entries if e.status == "missing"]
    assert entry.note.endswith("to a file, and set model.renderer: {use: template, file: FILE}")
    file = tmp_path / "a.yaml"
    for content in (
        {"model": {"model_path": "Qwen/Qwen3-8B", "enable_thinking": False, "chat_template_path": "chat.jinja"}},
        {"model": {"model_path": "Qwen/Qwen3-8B"}, "explorer": {"rollout_model": {"enable_thinking": False}}},
    ):
        file.write_text(yaml.safe_dump(content))
        found = migrate("trinity", [str(file)], {})
        assert {**quiet, **rendered(found)} == rendered(found)
        assert "enable_thinking" not in str(found.notes)
    file.write_text(yaml.safe_dump({"model": {"model_path": "Qwen/Qwen3-8B"}}))
    assert "turns off the thoughts of Qwen3" in str(migrate("trinity", [str(file)], {}).notes)


def test_trls_reference_model_follows_the_policy_in_training_steps_if_there_is_one():
    batch = ["num_generations=8", "per_device_train_batch_size=8", "steps_per_generation=4", "num_iterations=2"]
    follows = ["sync_ref_model=true", "ref_model_sync_steps=64"]
    found = migrate("trl", [*batch, *follows, "beta=0.04"], {}).config
    assert found["reference"] == {"update_every": 8, "mix": 0.6}  # 4 minibatches, twice
    found = migrate("trl", [*batch, *follows, "beta=0.04", "ref_model_mixup_alpha=1"], {}).config
    assert found["reference"]["mix"] == 1.0
    assert "reference" not in migrate("trl", [*batch, *follows], {}).config
    lora = migrate("trl", [*batch, *follows, "beta=0.04", "use_peft=true"], {})
    assert "reference" not in lora.config


@pytest.mark.parametrize(
    ("model", "config", "experts"),
    [
        ("Qwen/Qwen3-30B-A3B", None, True),
        ("mistralai/Mixtral-8x7B-v0.1", None, True),
        ("Qwen/Qwen2.5-0.5B", None, None),
        ("model", {"num_experts": 128}, True),
        ("model", {"text_config": {"num_local_experts": 8}}, True),
        ("A3B-moe", {"hidden_size": 8}, False),
    ],
)
def test_trls_default_load_balancing_loss_of_a_mixture_of_experts_is_told(
    tmp_path, monkeypatch, model, config, experts
):
    monkeypatch.chdir(tmp_path)
    if config is not None:
        Path(model).mkdir()
        (Path(model) / "config.json").write_text(json.dumps(config))
    words = ["seed=1", f"model_name_or_path={model}"]
    plain = migrate("trl", words, {})
    told = [note for note in plain.notes if note.startswith("learner.router_loss_coef: ")]
    assert plain.config["learner"].get("router_loss_coef") == (0.001 if experts else None)
    assert bool(told) is bool(experts)
    found = migrate("trl", [*words, "router_aux_loss_coef=0.01"], {})
    assert not [note for note in found.notes if note.startswith("learner.router_loss_coef: ")]
    (entry,) = [each for each in found.entries if each.key == "router_aux_loss_coef"]
    assert entry.status == {True: "changed", False: "ignored", None: "missing"}[experts]


def test_the_load_balancing_loss_is_converted_for_mixtures_of_experts():
    found = migrate("trl", ["seed=1", "router_aux_loss_coef=0.01"], {})
    (entry,) = [each for each in found.entries if each.key == "router_aux_loss_coef"]
    assert entry.status == "missing" and "learner.router_loss_coef" in entry.note
    found = migrate("trl", ["router_aux_loss_coef=0.01", "model_init_kwargs.output_router_logits=true"], {}).config
    assert found["learner"]["router_loss_coef"] == 0.01
    found = migrate("trl", ["router_aux_loss_coef=0.01", "model_name_or_path=Qwen/Qwen3-30B-A3B"], {}).config
    assert found["learner"]["router_loss_coef"] == 0.01
    found = migrate("openrlhf", ["--aux_loss_coef", "0.02"], {}).config
    assert found["learner"]["router_loss_coef"] == 0.02


ROLL_DECAY = "actor_train.training_args.weight_decay=0.1"


@pytest.mark.parametrize(
    ("name", "words", "parameters"),
    [
        ("trl", ["--weight_decay=0.1"], "matrices"),
        ("openrlhf", ["--l2=0.1"], "matrices"),
        ("roll", [ROLL_DECAY, "actor_train.strategy_args.strategy_name=deepspeed_train"], "matrices"),
        ("roll", [ROLL_DECAY, "actor_train.strategy_args.strategy_name=fsdp2_train"], None),
        ("verl", ["actor_rollout_ref.actor.optim.weight_decay=0.1"], None),
        ("verl", ["actor_rollout_ref.actor.optim.weight_decay=0.1", "model_engine=megatron"], "matrices"),
        ("verl", ["actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"], "matrices"),
        ("trinity", ["algorithm.optimizer.weight_decay=0.1"], None),
        ("trinity", ["trainer.trainer_strategy=megatron"], "matrices"),
        ("trl", ["--weight_decay=0"], None),
    ],
)
def test_weight_decay_leaves_out_biases_and_norms_where_the_other_trainer_does(name, words, parameters):
    learner = migrate(name, words, {}).config["learner"]
    assert learner.get("weight_decay_on") == parameters
    assert parameters is None or learner["weight_decay"] > 0


ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("words", "staleness", "apart"),
    [
        ([], None, False),
        (["trainer.v1.trainer_mode=sync", "trainer.v1.colocate_async.num_warmup_batches=2"], None, False),
        (["trainer.use_v1=False", "trainer.v1.trainer_mode=separate_async"], None, False),
        (["trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=2"], 2, False),
        (["trainer.v1.trainer_mode=separate_async", "trainer.v1.sampler.max_off_policy_threshold=4"], 1, True),
    ],
)
def test_the_modes_of_verls_second_trainer_set_how_far_sampling_is_ahead(folder, words, staleness, apart):
    sizes = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=16", f"{ROLLOUT}.n=4"]
    gpus = ["trainer.n_gpus_per_node=4", f"{ROLLOUT}.nnodes=2", f"{ROLLOUT}.n_gpus_per_node=2"]
    more = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=model", "data.train_files=train.parquet"]
    found = migrate("verl", [*sizes, *gpus, *more, "custom_reward_function.path=my_reward.py", *words], {})
    config = check(found.config).config
    assert (config.batch_size, config.minibatches, config.rollout.sync_interval) == (64, 4, 1)
    assert (config.rollout.max_staleness, config.rollout.partial_rollouts) == (staleness or 0, True)
    placement = config.placement
    assert (placement.learners, placement.engines, placement.gpus_per_engine) == (4, 2, 2)
    assert placement.colocate is not apart
    assert not [entry.key for entry in found.entries if entry.status == "missing"]


@pytest.mark.parametrize("section", ["reward", "reward_model"])
def test_verls_penalty_of_long_answers_in_both_of_its_places(section):
    options = ["enable=True", "len=128", "penalty_factor=0.5"]
    words = [f"{section}.reward_kwargs.overlong_buffer_cfg.{option}" for option in options]
    found = migrate("verl", [*words, f"{section}.reward_kwargs.max_resp_len=512"], {})
    shaping = {"use": "overlong", "max_length": 512, "buffer": 128, "penalty": 0.5}
    assert found.config["algorithm"]["shaping"] == [shaping]
    assert {entry.status for entry in found.entries} <= {"mapped", "changed"}


def test_variables_of_a_script_have_their_fallbacks_in_all_settings_but_texts(tmp_path):
    names = {"rollout_is": "W:-token", "rollout_is_threshold": "T:-0.5_4.0", "rollout_rs": "R:-seq_mean_k2"}
    words = [f"algorithm.rollout_correction.{name}=${{{value}}}" for name, value in names.items()]
    words += ["algorithm.rollout_correction.rollout_rs_threshold=${M:-0.2}", "trainer.experiment_name=${N:-run}"]
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo " + " ".join(words))
    found = migrate("verl", [str(script)], {"T": "4.0"})
    mask = {"use": "divergence_mask", "estimator": "k2", "level": "mean", "threshold": 0.2}
    assert found.config["algorithm"]["correction"] == [{"use": "tis", "cap": 4.0, "level": "token"}, mask]
    assert found.config["name"] == "${oc.env:N,run}"


def test_arguments_of_vllm_within_arguments_are_kept():
    words = ["compilation_config.cudagraph_mode=FULL_AND_PIECEWISE", "max_model_len=2048"]
    found = migrate("verl", [f"+{ROLLOUT}.engine_kwargs.vllm.{word}" for word in words], {})
    assert found.config["engine"]["args"] == {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}
    assert not [entry.key for entry in found.entries if entry.status == "missing"]


ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron.override_transformer_config"


@pytest.mark.parametrize(
    ("words", "setting", "value", "status"),
    [
        ([f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=k3+"], ("algorithm", "kl"), "k2", "mapped"),
        (
            [f"{ACTOR}.use_kl_loss=True", "actor_rollout_ref.ref.model.path=o/m"],
            ("model", "reference"),
            "o/m",
            "mapped",
        ),
        (["actor_rollout_ref.ref.model.path=o/m"], ("model", "reference"), None, "ignored"),
        ([f"{MEGATRON}.moe_aux_loss_coeff=0.01"], ("learner", "router_loss_coef"), 0.01, "changed"),
        (
            [f"{MEGATRON}.moe_router_load_balancing_type=none", f"{MEGATRON}.moe_aux_loss_coeff=0.01"],
            ("learner", "router_loss_coef"),
            0.0,
            "mapped",
        ),
        ([f"{MEGATRON}.moe_z_loss_coeff=0.001"], ("learner", "router_loss_coef"), None, "missing"),
        ([f"{MEGATRON}.hidden_dropout=0.1"], ("learner", "dropout"), None, "missing"),
        ([f"{ROLLOUT}.repetition_penalty=1.1"], ("sampling", "repetition_penalty"), None, "missing"),
        ([f"{ROLLOUT}.repetition_penalty=1.0"], ("sampling", "repetition_penalty"), None, "ignored"),
        ([f"{ROLLOUT}.quantization=fp8"], ("engine", "quantization"), None, "missing"),
        ([f"{ROLLOUT}.enable_rollout_routing_replay=True"], ("algorithm", "correction"), None, "ignored"),
        ([f"{ACTOR}.router_replay.mode=disabled"], ("algorithm", "correction"), None, "ignored"),
        (
            [f"{ACTOR}.router_replay.mode=R3"],
            ("algorithm", "correction"),
            [{"use": "routing_replay", "cap": None}],
            "mapped",
        ),
        (
            ["algorithm.rollout_correction.rollout_is=token", f"{ACTOR}.router_replay.mode=R2"],
            ("algorithm", "correction"),
            [{"use": "tis", "cap": 2.0, "level": "token"}, {"use": "routing_replay", "cap": None}],
            "changed",
        ),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.expert_parallel_size=2"],
            ("engine", "args"),
            {"enable_expert_parallel": True},
            "mapped",
        ),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=4", f"{ROLLOUT}.expert_parallel_size=2"],
            ("engine", "args"),
            {"enable_expert_parallel": True},
            "changed",
        ),
        ([f"{ROLLOUT}.expert_parallel_size=1"], ("engine", "args"), None, "ignored"),
        (["reward_model.reward_kwargs.alpha=2"], ("reward", "alpha"), None, "missing"),
    ],
)
def test_verls_settings_among_many_without_effect_are_converted_or_to_do(words, setting, value, status):
    found = migrate("verl", words, {})
    section, key = setting
    assert found.config.get(section, {}).get(key) == value
    assert found.entries[-1].status == status


def test_trls_asynchronous_trainer_has_defaults_of_its_own(folder, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("""
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.rewards import accuracy_reward
config = AsyncGRPOConfig("out", per_device_train_batch_size=16, gradient_accumulation_steps=2, weight_sync_steps=2)
trainer = AsyncGRPOTrainer(model="model", reward_funcs=accuracy_reward, args=config, train_dataset="x")
trainer.train()
""")
    config = {**migrate("trl", [str(script)], {}).config, "tasks": {"train": "countdown"}}
    plan = check(config)
    assert (plan.config.batch_size, plan.config.group_size, plan.config.minibatches) == (4, 8, 1)
    assert (plan.config.rollout.max_staleness, plan.config.rollout.sync_interval) == (4, 2)
    assert plan.config.old_logprobs == "rollout" and not plan.config.placement.colocate
    assert plan.config.sampling.max_tokens == 2048
    assert plan.learner.options["schedule"] == "constant"
    assert "correction" not in config["algorithm"]


@pytest.mark.parametrize(
    ("words", "every", "saved", "held_out"),
    [
        (["--eval_strategy", "no", "--save_strategy", "no"], None, 0, False),
        (["--eval_strategy", "steps", "--save_strategy", "steps", "--save_steps", "20"], 10, 20, True),
        (["--eval_strategy", "steps", "--logging_steps", "5", "--save_strategy", "epoch"], 5, None, True),
        (["--eval_strategy", "epoch"], None, 500, True),
        (["--eval_strategy", "steps", "--eval_steps", "30", "--logging_steps", "5"], 30, 500, True),
    ],
)
def test_trls_strategies_of_evaluations_and_checkpoints_are_those_of_its_trainer(words, every, saved, held_out):
    found = migrate("trl", ["trl", "grpo", "--dataset_name", "openai/gsm8k", *words], {})
    config = found.config
    assert ("eval" in config["tasks"]) is held_out
    assert config.get("eval", {}).get("every") == every
    assert config.get("checkpoint", {}).get("every") == saved
    told = [*found.notes, *(entry.note for entry in (*found.entries, *found.defaults) if entry.status == "missing")]
    assert any("epoch" in each for each in told) is ("epoch" in words)


def test_trls_plain_no_in_a_file_is_no(tmp_path):
    file = tmp_path / "grpo.yaml"
    file.write_text("dataset_name: openai/gsm8k\neval_strategy: no\nsave_strategy: no\nuse_peft: true\n")
    found = migrate("trl", [str(file)], {})
    assert "eval" not in found.config["tasks"] and found.config["checkpoint"]["every"] == 0
    assert any("dropout" in note for note in found.notes)
    file.write_text("lora_dropout: 0.05\nseed: 1\n")
    assert not [entry for entry in migrate("trl", [str(file)], {}).entries if entry.status == "missing"]


def test_rolls_current_options_that_are_off_leave_nothing_to_do(tmp_path):
    off = {"enable_reference": False, "force_disable_old_logprobs_recompute": False, "l2": 0.0, "exp_mode": "train"}
    unread = {"use_policy_loss_type": "PPO", "minibatch_data_iter_num": 1, "balance_length": False}
    file = tmp_path / "roll.yaml"
    file.write_text(yaml.safe_dump({**off, **unread}))
    assert {entry.status for entry in migrate("roll", [str(file)], {}).entries} == {"ignored"}
    file.write_text(yaml.safe_dump({"force_disable_old_logprobs_recompute": True, "reward_model": {"name": "r"}}))
    assert {entry.status for entry in migrate("roll", [str(file)], {}).entries} == {"missing"}


def test_verls_least_rate_of_megatron_is_a_share_of_the_peak():
    words = [f"{ACTOR}.optim.{option}" for option in ("lr=1e-6", "min_lr=1e-7", "lr_decay_style=cosine")]
    learner = migrate("verl", words, {}).config["learner"]
    assert (learner["schedule"], learner["final_ratio"]) == ("cosine", pytest.approx(0.1))


def test_verls_options_of_megatrons_optimiser_that_are_off_leave_nothing_to_do():
    off = ["optimizer=adam", "weight_decay_incr_style=constant", "lr_wsd_decay_style=exponential", "muon_momentum=0.95"]
    words = [f"{ACTOR}.optim.{option}" for option in [*off, "exp_avg_dtype=fp32"]]
    found = migrate("verl", [*words, "model_engine=megatron"], {})
    assert {entry.status for entry in found.entries} == {"ignored"}
    assert [entry.status for entry in migrate("verl", words[:1], {}).entries] == ["missing"]  # torch's Adam
    wsd = [f"{ACTOR}.optim.lr_decay_style=WSD", f"{ACTOR}.optim.lr_wsd_decay_style=exponential"]
    assert [entry.status for entry in migrate("verl", wsd, {}).entries] == ["mapped", "missing"]


def test_prompts_that_verl_truncates_are_dropped_with_a_note():
    found = migrate("verl", ["data.truncation=left", "trainer.experiment_name=a"], {})
    (entry,) = [entry for entry in found.entries if entry.key == "data.truncation"]
    assert (found.config["long_prompts"], entry.status, "never truncates" in entry.note) == ("drop", "changed", True)
