"""TRL's trainers other than GRPO."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsdk.config.resolve import check
from rlsdk.errors import ConfigError
from rlsdk.migration import migrate
from tests.migration.test_counterparts import todo

ONLINE_DPO = """
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

config = OnlineDPOConfig("runs/a", per_device_train_batch_size=4, gradient_accumulation_steps=2, beta=[0.2, 0.1],
    missing_eos_penalty=1.0, max_new_tokens=32, max_length=96)
trainer = OnlineDPOTrainer(model="model", reward_funcs=AutoModelForSequenceClassification.from_pretrained("o/reward"),
    args=config, processing_class=AutoTokenizer.from_pretrained("model"),
    train_dataset=load_dataset("o/d", split="train"))
"""
PPO = """
from trl.experimental.ppo import PPOConfig, PPOTrainer

parser = HfArgumentParser((ScriptArguments, PPOConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_into_dataclasses()
value_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
reward_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path)
ref_policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path)
trainer = PPOTrainer(args=training_args, model=policy, ref_model=ref_policy, reward_model=reward_model,
    value_model=value_model, train_dataset=load_dataset(script_args.dataset_name))
"""


def test_online_dpo_of_trl_compares_two_answers(folder):
    Path("train.py").write_text(ONLINE_DPO)
    found = migrate("trl", ["train.py"], {})
    config = found.config
    assert config["algorithm"] == {
        "use": "dpo",
        "policy_loss": {"use": "dpo", "beta": 0.2},
        "shaping": [{"use": "overlong", "buffer": 1, "penalty": 1.0}],
    }
    assert (config["batch_size"], config["group_size"], config["minibatches"], config["passes"]) == (8, 2, 1, 1)
    assert (config["sampling"], config["max_prompt_tokens"]) == ({"max_tokens": 32, "temperature": 0.9}, 64)
    assert (config["model"]["max_length"], config["learner"]["lr"]) == (96, 5e-7)
    assert config["reward"] == {"use": "reward_model", "path": "o/reward"}
    assert not todo(found)
    assert "TRL takes one for each epoch" in next(each.note for each in found.entries if each.key == "beta")
    check({**config, "tasks": {"train": "countdown"}})


def test_another_loss_or_a_judge_of_online_dpo_is_to_do(folder):
    Path("train.py").write_text(
        ONLINE_DPO.replace("beta=[0.2, 0.1]", 'loss_type="ipo"').replace("model=", "judge=PairRM(), model=")
    )
    assert todo(migrate("trl", ["train.py"], {})) == ["loss_type", "judge.class"]


def test_ppo_of_trl_has_a_critic(folder):
    Path("ppo.py").write_text(PPO)
    flags = (
        "--sft_model_path model --reward_model_path o/reward --dataset_name o/d --per_device_train_batch_size 8 "
        "--gradient_accumulation_steps 4 --num_ppo_epochs 2 --num_mini_batches 1 --total_episodes 3200 --kl_coef 0.1 "
        "--lam 0.9 --cliprange_value 0.3 --missing_eos_penalty 1.0 --warmup_steps 5 --stop_token eos --save_steps 10"
    )
    found = migrate("trl", [f"accelerate launch --num_processes 2 ppo.py {flags}"], {})
    config = found.config
    assert config["algorithm"] == {
        "use": "ppo",
        "advantage": {"use": "gae", "gamma": 1.0, "lam": 0.9},
        "critic": True,
        "policy_loss": {"use": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
        "value_clip": 0.3,
        "aggregate": "token-mean",
        "shaping": [
            {"use": "overlong", "buffer": 1, "penalty": 1.0},
            {"use": "kl_penalty", "coef": 0.1, "estimator": "k1"},
        ],
        "kl_coef": 0.0,
    }
    assert (config["batch_size"], config["group_size"], config["passes"], config["steps"]) == (64, 1, 2, 50)
    assert (config["learner"]["warmup_steps"], config["checkpoint"]["every"]) == (10, 10)
    assert (config["learner"]["lr"], config["learner"]["critic_lr"]) == (3e-6, 3e-6)
    assert (config["model"]["path"], config["model"]["critic"]) == ("model", "o/reward")
    assert config["sampling"] == {"max_tokens": 53, "temperature": 0.7}
    assert not todo(found)
    check({**config, "tasks": {"train": "countdown"}, "reward": "countdown"})


def test_a_script_tells_the_trainer_of_a_command(folder):
    Path("train.py").write_text('RLOOTrainer("o/m", "o/reward", RLOOConfig())\n')
    config = migrate("trl", ["python train.py --learning_rate 1e-5"], {}).config
    assert (config["algorithm"]["use"], config["group_size"]) == ("rloo", 2)


def test_the_geometric_mean_of_ratios_is_gmpos(folder):
    Path("train.py").write_text('GMPOTrainer("o/m", "o/reward", GMPOConfig("out"))\n')
    algorithm = migrate("trl", ["train.py"], {}).config["algorithm"]
    assert algorithm["policy_loss"] == {"use": "geo_mean", "clip_low": 0.4, "clip_high": 0.4, "dual_clip": None}
    assert algorithm["aggregate"] == "seq-mean-token-mean"


@pytest.mark.parametrize(
    ("script", "instead"),
    [('XPOTrainer(model="o/m")', "algorithm: dpo"), ('SFTTrainer("o/m", args=SFTConfig())', "algorithm: sft")],
)
def test_trainers_that_are_not_converted_are_named_with_what_replaces_them(folder, script, instead):
    Path("train.py").write_text(script)
    with pytest.raises(ConfigError, match=f"cannot be converted; in rlsdk, set {instead}"):
        migrate("trl", ["train.py"], {})
    Path("train.py").write_text(f'{script}\nGRPOTrainer("o/m", "o/reward", GRPOConfig("out"))\n')
    assert migrate("trl", ["train.py"], {}).config["algorithm"]["use"] == "grpo"


def test_arguments_of_a_model_that_a_command_does_not_set_are_left_out(folder):
    Path("train.py").write_text(
        "script, training, model = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()\n"
        "kwargs = dict(revision=model.model_revision, attn_implementation=model.attn_implementation)\n"
        "loaded = AutoModelForCausalLM.from_pretrained(model.model_name_or_path, dtype=model.dtype, **kwargs)\n"
        "judge = AutoModelForSequenceClassification.from_pretrained(training.reward_model_path)\n"
        "GRPOTrainer(loaded, judge, training, load_dataset(script.dataset_name, name=script.dataset_config))\n"
    )
    command = "python train.py --model_name_or_path o/m --dataset_name o/d --reward_model_path o/reward --dtype float32"
    found = migrate("trl", [command], {})
    assert not todo(found)
    assert found.config["reward"] == {"use": "reward_model", "path": "o/reward"}
    assert found.config["model"]["path"] == "o/m"
