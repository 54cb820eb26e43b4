"""Settings of other trainers that have a near or an exact counterpart, given by several keys together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsdk.migration import Migration, migrate


def todo(found: Migration) -> list[str]:
    return [entry.key for entry in found.entries if entry.status == "missing"]


def roll(tmp_path: Path, content: dict[str, Any]) -> Migration:
    file = tmp_path / "roll.yaml"
    file.write_text(yaml.safe_dump(content))
    return migrate("roll", [str(file)], {})


@pytest.mark.parametrize(
    ("weight", "filters", "correction"),
    [
        ({"enabled": True, "upper_bound": 3.0}, [], {"use": "tis", "cap": 3.0, "level": "token"}),
        ({"enabled": True, "weight_type": "sequence"}, [], {"use": "tis", "cap": 1.2, "level": "sequence"}),
        ({}, [{"enabled": True}], {"use": "token_mask", "low": 0.8, "high": 1.2}),
        (
            {},
            [{"enabled": True, "agg_type": "geometric", "ratio_low": 0.99}],
            {"use": "geometric", "low": 0.99, "high": 1.2},
        ),
        (
            {"enabled": True, "upper_bound": 5.0},
            [{"enabled": True, "ratio_low": 0.5, "ratio_high": 5.0}],
            {"use": "mis", "low": 0.5, "high": 5.0, "level": "token"},
        ),
        ({"enabled": True, "weight_type": "geometric"}, [], None),
        ({}, [{"enabled": True, "diff_enabled": True}], None),
        ({}, [{"enabled": True, "agg_type": "segment"}], None),
        (
            {},
            [{"enabled": True}, {"enabled": True, "agg_type": "sequence"}, {"enabled": False, "agg_type": "segment"}],
            [{"use": "token_mask", "low": 0.8, "high": 1.2}, {"use": "sequence_mask", "low": 0.8, "high": 1.2}],
        ),
        (
            {"enabled": True, "upper_bound": 1.1},
            [{"enabled": True}],
            [{"use": "tis", "cap": 1.1, "level": "token"}, {"use": "token_mask", "low": 0.8, "high": 1.2}],
        ),
        ({"enabled": False}, [{"enabled": False}], None),
    ],
)
def test_rolls_weights_and_filters_of_the_mismatch_are_corrections(tmp_path, weight, filters, correction):
    found = roll(tmp_path, {"train_infer_correction": {"is_weight": weight, "filters": filters}, "seed": 1})
    assert found.config["algorithm"].get("correction") == correction
    off = not any(each.get("enabled") for each in (weight, *filters))
    assert bool(todo(found)) == (correction is None and not off)


def judged(**options: str) -> dict[str, Any]:
    return {"worker_cls": "x.LLMJudgeRewardWorker", "tag_included": ["RLVR"], **options}


def test_rolls_judge_behind_an_api_is_a_judge(tmp_path):
    api = {"judge_model_type": "api", "judge_api_url": "http://j/v1", "judge_model_name": "j"}
    found = roll(tmp_path, {"rewards": {"llm": judged(**api, judge_api_key="${oc.env:J_KEY}")}})
    judge = {"use": "judge", "base_url": "http://j/v1", "model": "j", "api_key_env": "J_KEY", "sources": ["RLVR"]}
    assert found.config["reward"] == [judge]
    assert not todo(found)
    assert todo(roll(tmp_path, {"rewards": {"llm": judged(**api, judge_api_key="sk-1", judge_prompt="p")}})) == [
        "rewards.llm.judge_api_key",
        "rewards.llm.judge_prompt",
    ]
    assert todo(roll(tmp_path, {"rewards": {"llm": judged(judge_model_type="inference")}})) == [
        "rewards.llm.worker_cls"
    ]


def test_rolls_filters_of_tasks_replace_them(tmp_path):
    mean = {"query_filter_config": {"type": "mean_filter", "filter_args": {"threshold_up": 0.9, "threshold_down": 0.1}}}
    spread = {"query_filter_config": {"type": "std_filter", "filter_args": {"std_threshold": 0}}}
    rule = {"worker_cls": "x.MathRuleRewardWorker"}
    found = roll(tmp_path, {"rewards": {"math": {**rule, **mean}}, "is_use_additional_prompts": True})
    assert found.config["algorithm"]["filters"] == [{"use": "pass_rate", "low": 0.1, "high": 0.9}]
    assert found.config["rollout"]["dynamic_sampling"] is True
    assert not todo(found)
    found = roll(tmp_path, {"rewards": {"math": {**rule, **spread}, "code": rule}})
    assert found.config["algorithm"]["filters"] == [{"use": "min_std", "threshold": 0.0}]
    assert "applies to all domains" in {entry.note for entry in found.entries}
    both = roll(tmp_path, {"rewards": {"math": {**rule, **spread}, "code": {**rule, **mean}}})
    assert "filters" not in both.config["algorithm"]
    assert len(todo(both)) == 2


def test_rolls_on_policy_distillation_is_opd(tmp_path):
    role = {"device_mapping": "list(range(0,4))", "training_args": {"learning_rate": 5e-7}}
    teacher = {
        "model_args": {"model_name_or_path": "o/teacher"},
        "opd_kl_coef": 0.5,
        "device_mapping": "list(range(0,4))",
    }
    infer = {"generating_args": {"temperature": 0.9, "top_p": 1.0, "top_k": 0}, "device_mapping": "list(range(0,4))"}
    content = {"student_train": role, "student_infer": infer, "teacher": teacher, "adv_estimator": "reinforce"}
    found = roll(tmp_path, {**content, "pretrain": "o/m", "advantage_clip": 5.0, "sequence_length": 64})
    config = found.config
    assert (config["algorithm"]["use"], config["model"]["reference"]) == ("opd", "o/teacher")
    assert config["algorithm"]["advantage"] == {"use": "on_policy_distill", "coef": 0.5}
    assert config["algorithm"]["clip_advantages"] == 5.0
    assert (config["learner"]["lr"], config["sampling"]["temperature"], config["placement"]["learners"]) == (
        5e-7,
        0.9,
        4,
    )
    assert not todo(found)
    assert "student_train.training_args.learning_rate" in {entry.key for entry in found.entries}


def test_rolls_variables_micro_batches_and_options_of_losses(tmp_path):
    train = {
        "pg_variant": "tis",
        "tis_upper_bound": 2.0,
        "use_dynamic_batching_in_train": True,
        "max_tokens_per_microbatch_in_train": 8192,
    }
    found = roll(tmp_path, {"actor_train": train, "system_envs": {"NCCL_DEBUG": "WARN", "USE_MODELSCOPE": "1"}})
    assert found.config["placement"]["runtime_env"] == {"env_vars": {"NCCL_DEBUG": "WARN"}}
    assert found.config["algorithm"]["policy_loss"] == {"use": "tis", "cap": 2.0}
    assert found.config["learner"]["micro_batch_tokens"] == 8192
    assert todo(found) == ["system_envs.USE_MODELSCOPE"]


def test_rolls_grpo_divides_by_the_deviation_whatever_the_norm_types(tmp_path):
    advantage = roll(tmp_path, {"adv_estimator": "grpo", "norm_mean_type": "group"}).config["algorithm"]["advantage"]
    assert advantage == {"use": "grpo", "std_normalize": True}


def test_arguments_of_vllm_become_engine_args(tmp_path):
    config = {"kv_cache_dtype": "fp8", "sleep_level": 1, "cuda_graph_sizes": [1]}
    found = roll(tmp_path, {"actor_infer": {"strategy_args": {"strategy_name": "vllm", "strategy_config": config}}})
    assert found.config["engine"]["args"] == {"kv_cache_dtype": "fp8"}
    assert todo(found) == ["actor_infer.strategy_args.strategy_config.cuda_graph_sizes"]
    arguments = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    found = migrate("verl", [f"{arguments}.enable_expert_parallel=True", f"{arguments}.no_such=1"], {})
    assert found.config["engine"]["args"] == {"enable_expert_parallel": True}
    assert todo(found) == [f"{arguments}.no_such"]


@pytest.mark.parametrize(
    ("value", "rank", "missing"),
    [("'.*visual.*'", 16, False), ("lm_head", 16, False), ("q_proj", 16, True), ("q_proj", 0, False)],
)
def test_layers_that_verl_excludes_are_nothing_to_do_if_rlsdk_adapts_none_of_them(value, rank, missing):
    model = "actor_rollout_ref.model"
    found = migrate("verl", [f"{model}.lora_rank={rank}", f"{model}.exclude_modules={value}"], {})
    assert bool(todo(found)) == missing


XTUNER_IS = """
importance = RolloutImportanceSampling(rollout_is_level="{level}", rollout_is_mode="{mode}",
    rollout_is_threshold=({high}, 0){mask})
loss_cfg = GRPOLossConfig(policy_loss_cfg=dict(loss_type="vanilla"), rollout_is=importance)
RLColocateTrainerConfig(train_worker_cfg=WorkerConfig(loss_cfg=loss_cfg), seed=1)
"""


@pytest.mark.parametrize(
    ("level", "mode", "mask", "correction"),
    [
        ("token", "truncate", "", {"use": "tis", "cap": 5.0, "level": "token"}),
        ("token", "both", "(5, 0.5)", {"use": "mis", "low": 0.5, "high": 5.0, "level": "token"}),
        ("sequence", "mask", "(2, 0.5)", {"use": "mis", "low": 0.5, "high": 2.0, "level": "sequence"}),
        ("geometric", "mask", "(1.1, 0.9)", {"use": "geometric", "low": 0.9, "high": 1.1}),
        ("geometric", "truncate", "", None),
        (
            "token",
            "both",
            "(9, 0.5)",
            [{"use": "tis", "cap": 5.0, "level": "token"}, {"use": "token_mask", "low": 0.5, "high": 9.0}],
        ),
        ("geometric", "both", "(9, 0.5)", None),
    ],
)
def test_xtuners_bounds_of_weights_are_given_from_above(tmp_path, level, mode, mask, correction):
    file = tmp_path / "rl.py"
    mask = f", rollout_is_mask_threshold={mask}" if mask else ""
    file.write_text(XTUNER_IS.format(level=level, mode=mode, high=5, mask=mask))
    found = migrate("xtuner", [str(file)], {})
    assert found.config["algorithm"].get("correction") == correction
    assert bool(todo(found)) == (correction is None)


XTUNER_TASKS = """
short, long = RLTextTokenizeFnConfig(max_length=512), RLTextTokenizeFnConfig(max_length=2048)
gsm = SamplerConfig(prompt_repeat_k=8, dataloader_cfg=DataloaderConfig(pack_max_length=1024, dataset_config_list=[
    {"dataset": DatasetConfig(name="gsm8k", anno_path="gsm.jsonl"), "tokenize_fn": short},
    {"dataset": DatasetConfig(name="more", anno_path="more.jsonl"), "tokenize_fn": short}]))
dapo = SamplerConfig(prompt_repeat_k=8, dataloader_cfg=DataloaderConfig(pack_max_length=1024, dataset_config_list=[
    {"dataset": DatasetConfig(name="dapo", anno_path="dapo.jsonl"), "tokenize_fn": long}]))
single = SingleTurnAgentLoopConfig(sample_params=SampleParams(max_tokens=64))
tasks = [
    TaskSpecConfig(task_name="gsm", weight=2.0, agent_loop_config=single, judger_config=GSM8KJudgerConfig(),
                   sampler_config=gsm),
    TaskSpecConfig(task_name="dapo", weight=1.0, agent_loop_config=single, judger_config=DapoMathJudgerConfig(),
                   sampler_config=dapo)]
trainer = RLColocateTrainerConfig(
    load_from="o/m", total_train_steps=2, agent_loop_manager_cfg=AgentLoopManagerConfig(tasks=tasks),
    eval_agent_loop_manager_cfg=AgentLoopManagerConfig(tasks=tasks))
"""


def test_xtuners_tasks_are_sources_with_weights_and_rewards(tmp_path):
    file = tmp_path / "rl.py"
    file.write_text(XTUNER_TASKS)
    found = migrate("xtuner", [str(file)], {})
    sources = [
        {"use": "jsonl", "path": ["gsm.jsonl", "more.jsonl"], "source": "gsm", "weight": 2.0},
        {"use": "jsonl", "path": "dapo.jsonl", "source": "dapo", "weight": 1.0},
    ]
    assert found.config["tasks"] == {"train": sources, "eval": sources}
    math = {"use": "math", "strict": False}
    assert found.config["reward"] == [{**math, "sources": ["gsm", "dapo"]}]
    assert not todo(found)
    lacking = XTUNER_TASKS.replace("judger_config=DapoMathJudgerConfig(),", "")
    file.write_text(lacking)
    assert any("the tasks of dapo have no reward yet" in note for note in migrate("xtuner", [str(file)], {}).notes)


def test_openrlhfs_probabilities_are_weights_of_sources():
    words = ["--data.prompt_dataset", "o/a,o/b", "--data.prompt_probs", "0.7,0.3", "--data.input_key", "q"]
    found = migrate("openrlhf", words, {})
    hub = {"use": "hub", "split": "train", "columns": {"prompt": "q"}}
    assert found.config["tasks"]["train"] == [
        {**hub, "name": "o/a", "weight": 0.7, "source": "a"},
        {**hub, "name": "o/b", "weight": 0.3, "source": "b"},
    ]
    assert not todo(found)
    mixed = migrate("openrlhf", words[:2], {})
    assert any("OpenRLHF mixes them by size" in note for note in mixed.notes)
    files = migrate("openrlhf", ["--data.prompt_dataset", "a.jsonl,b.jsonl"], {}).config
    assert files["tasks"]["train"]["path"] == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(("size", "share", "missing"), [(192, 0.5, False), (128, None, False), (64, None, True)])
def test_openrlhfs_larger_batches_of_generation_are_oversampled(size, share, missing):
    found = migrate("openrlhf", ["--rollout_batch_size", "128", "--vllm_generate_batch_size", str(size)], {})
    assert found.config.get("rollout", {}).get("oversample") == share
    assert bool(todo(found)) == missing


def test_trls_mixture_of_data_sets_is_a_list_of_sources(tmp_path):
    file = tmp_path / "trl.yaml"
    data = [
        {"path": "o/a", "name": "main", "fraction": 0.75},
        {"path": "json", "data_files": "b.jsonl", "fraction": 0.25},
    ]
    file.write_text(yaml.safe_dump({"datasets": data, "reward_funcs": ["accuracy_reward"], "streaming": False}))
    found = migrate("trl", [str(file)], {})
    assert found.config["tasks"]["train"] == [
        {"use": "hub", "name": "o/a", "config": "main", "split": "train", "weight": 0.75},
        {"use": "jsonl", "path": "b.jsonl", "weight": 0.25},
    ]
    assert not todo(found)


def test_trls_adapter_with_another_scale_keeps_its_scale():
    words = ["use_peft=true", "lora_r=16", "lora_alpha=32", "use_rslora=true", "lora_target_modules=[q_proj]"]
    found = migrate("trl", [*words, "load_in_4bit=false", "lora_task_type=CAUSAL_LM", "cast_lm_head_to_fp32=true"], {})
    assert found.config["learner"]["lora"] == {"rank": 16, "alpha": 128.0, "targets": ["q_proj"]}
    assert found.config["model"]["head_dtype"] == "float32"
    assert not todo(found)
    assert todo(migrate("trl", ["use_peft=true", "lora_target_modules=.*_proj"], {})) == ["lora_target_modules"]
    assert any("q_proj and v_proj" in note for note in migrate("trl", words[:2], {}).notes)


def test_trls_tools_are_a_workflow(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(
        "from trl.rewards import accuracy_reward\ndef add(a: int, b: int) -> int:\n    return a + b\n"
        "def main():\n    args = GRPOConfig('out', max_tool_calling_iterations=4)\n"
        "    GRPOTrainer('o/m', accuracy_reward, args, tools=[add])\n"
    )
    found = migrate("trl", [str(file)], {})
    assert found.config["workflow"] == {"use": "tools", "tools": [f"{file}:add"], "max_turns": 5}
    assert not todo(found)


TRL_WITH_ENVIRONMENTS = """
from trl import GRPOConfig, GRPOTrainer

class Env:
    def reset(self, **others): ...
    def move(self, to: str) -> str: ...

def make(): return Env()
def add(a: int) -> int: return a
def counted(environments, **others): return [each.moves for each in environments]

def main():
    trainer = GRPOTrainer("o/m", args=GRPOConfig("out"), {given})
if __name__ == "__main__":
    main()
"""


def test_trls_environments_are_a_tool_class(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(TRL_WITH_ENVIRONMENTS.replace("{given}", "tools=[add], environment_factory=Env"))
    found = migrate("trl", [str(file)], {})
    assert found.config["workflow"] == {"use": "tools", "tools": [f"{file}:add", f"{file}:Env"], "max_turns": 64}
    assert found.config["reward"] == {"use": "environment"}  # TRL refuses a class without get_reward and reward_funcs
    assert found.config["tasks"]["train"] == {"use": "seeds", "size": 10_000}
    assert not todo(found)
    file.write_text(
        TRL_WITH_ENVIRONMENTS.replace(
            "{given}", "reward_funcs=counted, environment_factory=Env, train_dataset=load_dataset('o/d', split='train')"
        )
    )
    found = migrate("trl", [str(file)], {})
    assert found.config["workflow"]["tools"] == [f"{file}:Env"]
    assert found.config["reward"]["path"] == f"{file}:counted"
    assert found.config["tasks"]["train"]["use"] == "hub"
    assert any("add {use: environment}" in note for note in found.notes)


@pytest.mark.parametrize("given", ["make", "lambda: Env()", "partial(Env, 1)", "{'a': Env, 'b': Env}"])
def test_trls_factories_that_name_no_class_are_to_do(tmp_path, given):
    file = tmp_path / "train.py"
    file.write_text(TRL_WITH_ENVIRONMENTS.replace("{given}", f"reward_funcs=counted, environment_factory={given}"))
    found = migrate("trl", [str(file)], {})
    assert "workflow" not in found.config
    assert {key.partition(".")[0] for key in todo(found)} == {"environment_factory"}


def test_trls_rollout_function_is_to_be_a_workflow(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(TRL_WITH_ENVIRONMENTS.replace("{given}", "reward_funcs=counted, rollout_func=make"))
    found = migrate("trl", [str(file)], {})
    [entry] = [entry for entry in found.entries if entry.key == "rollout_func"]
    assert entry.status == "missing" and "write a workflow, an async function of one task" in entry.note


@pytest.mark.parametrize(("longest", "shaping"), [(2048, True), (1024, False)])
def test_trls_punishment_by_name_has_the_limits_of_its_command(longest, shaping):
    words = ["trl", "grpo", "--reward_funcs", "accuracy_reward", "get_soft_overlong_punishment"]
    found = migrate("trl", [*words, "--max_completion_length", str(longest)], {})
    penalty = {"use": "overlong", "max_length": 1280, "buffer": 256}
    assert found.config["algorithm"].get("shaping") == ([penalty] if shaping else None)
    assert any("left out" in note for note in found.notes) != shaping


def test_trls_punishment_comes_before_the_bounds_and_the_penalty_of_rloo():
    words = ["trl", "rloo", "--reward_funcs", "accuracy_reward", "get_soft_overlong_punishment", "--beta", "0.1"]
    found = migrate("trl", [*words, "--max_completion_length", "2048", "--reward_clip_range", "-5", "5"], {})
    used = [part["use"] for part in found.config["algorithm"]["shaping"]]
    assert used == ["overlong", "reward_clip", "kl_penalty"]


def test_the_deepspeed_file_that_trl_names_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    Path("zero3.json").write_text(json.dumps({"zero_optimization": offload, "train_batch_size": "auto"}))
    found = migrate("trl", ["trl", "grpo", "--deepspeed", "zero3.json", "--seed", "1"], {})
    assert (found.config["learner"]["zero_stage"], found.config["learner"]["offload"]) == (3, "optimizer")
    assert not todo(found)
    assert todo(migrate("trl", ["trl", "grpo", "--deepspeed", "other.json", "--seed", "1"], {})) == ["deepspeed"]


TRL_WITH_FLAGS = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, TrlParser, get_peft_config

def exact(completions, solution, **kwargs):
    return [0.0 for _ in completions]

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    data = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, dtype="bfloat16")
    trainer = GRPOTrainer(model=model, args=training_args, reward_funcs=exact, peft_config=get_peft_config(model_args),
        train_dataset=data[script_args.dataset_train_split], eval_dataset=data[script_args.dataset_test_split])
"""


@pytest.mark.parametrize("how", ["command", "script", "file"])
def test_a_command_of_trl_is_read_together_with_its_script(tmp_path, monkeypatch, how):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRL_WITH_FLAGS)
    flags = "--model_name_or_path o/m --dataset_name o/d --learning_rate 1e-5 --num_generations 4 --eval_strategy steps"
    command = f"accelerate launch --num_processes 2 train.py {flags}"
    Path("run.sh").write_text(f"{command}\n")
    given = {"command": [command], "script": ["run.sh"], "file": ["train.py", *flags.split()]}[how]
    found = migrate("trl", given, {})
    config = found.config
    assert (config["model"]["path"], config["learner"]["lr"], config["group_size"]) == ("o/m", 1e-5, 4)
    assert config["reward"] == {"use": "foreign", "path": "train.py:exact", "style": "trl"}
    hub = {"use": "hub", "name": "o/d"}
    assert config["tasks"] == {"train": {**hub, "split": "train"}, "eval": {**hub, "split": "test"}}
    assert config["placement"]["learners"] == (1 if how == "file" else 2)
    assert not todo(found)


TASKSET = "buffer.explorer_input.taskset"


def trinity(*words: str) -> Migration:
    return migrate("trinity", ["model.model_path=o/m", *words], {})


@pytest.mark.parametrize(
    ("kind", "arguments", "advantage"),
    [
        ("opmd", ["tau=2.0"], {"use": "opmd"}),  # the mean has no temperature
        (
            "opmd",
            ["opmd_baseline=logavgexp", "tau=2.0"],
            {"use": "opmd", "baseline": "logavgexp", "tau": 2.0},
        ),
        ("asymre", ["baseline_shift=-0.2"], {"use": "asymre", "shift": -0.2}),
        ("rec", ["drop=balance"], {"use": "rec", "std_normalize": False, "drop": "balance"}),
        ("multi_step_grpo", ["enable_step_norm=true"], {"use": "step_grpo", "divide_by_steps": True}),
        ("gigpo", ["omega=0.5", "fnorm=std"], {"use": "gigpo", "omega": 0.5, "gamma": 1.0, "std_normalize": True}),
    ],
)
def test_trinitys_arguments_of_advantages_are_options(kind, arguments, advantage):
    found = trinity(f"algorithm.algorithm_type={kind}", *(f"algorithm.advantage_fn_args.{each}" for each in arguments))
    assert found.config["algorithm"]["advantage"] == advantage
    assert not [key for key in todo(found) if "advantage" in key]


def test_trinitys_cap_of_the_dual_clip_is_carried():
    loss = trinity("algorithm.algorithm_type=grpo").config["algorithm"]["policy_loss"]
    assert loss == {"use": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    assert trinity("algorithm.algorithm_type=gspo").config["algorithm"]["policy_loss"]["dual_clip"] is None


def test_trinitys_old_logprobs_are_the_engines_unless_told_otherwise():
    assert trinity("algorithm.algorithm_type=grpo").config["old_logprobs"] == "rollout"
    assert "old_logprobs" not in trinity("algorithm.bypass_old_logprobs=false").config
    assert "old_logprobs" not in trinity("algorithm.algorithm_type=sft").config


def test_trinitys_mix_weighs_demonstrations_of_the_tasks():
    words = ["algorithm.algorithm_type=mix", "algorithm.sample_strategy_args.expert_data_ratio=0.2"]
    words += ["algorithm.policy_loss_fn_args.mu=0.3", "algorithm.policy_loss_fn_args.train_batch_size_expert=8"]
    found = trinity(*words, "buffer.trainer_input.auxiliary_buffers.sft_dataset.path=o/d")
    loss = {"use": "mix", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "mu": 0.3}
    assert found.config["algorithm"]["policy_loss"] == loss
    assert todo(found) == ["buffer.trainer_input.auxiliary_buffers.sft_dataset.path"]
    arguments = ["mu_peak=0.9", "mu_valley=0.05", "mu_decay_steps=200", "enable_phi_function=true"]
    found = trinity("algorithm.algorithm_type=mix_chord", *(f"algorithm.policy_loss_fn_args.{e}" for e in arguments))
    mu = {"from": 0.9, "to": 0.05, "over": 200, "shape": "cosine"}
    assert found.config["algorithm"]["policy_loss"]["mu"] == mu
    assert todo(found) == ["algorithm.policy_loss_fn_args.enable_phi_function"]


def test_trinitys_teacher_is_the_reference_model(tmp_path):
    file = tmp_path / "opd.yaml"
    taskset = {
        "path": "o/d",
        "default_workflow_type": "on_policy_distill_math_workflow",
        "rollout_args": {"max_tokens": 64},
    }
    content = {
        "algorithm": {"algorithm_type": "on_policy_distill", "advantage_fn_args": {"kl_coef": 0.5}},
        "buffer": {"explorer_input": {"taskset": taskset}},
        "explorer": {"auxiliary_models": [{"model_path": "o/teacher", "engine_num": 1}], "max_timeout": 900},
    }
    file.write_text(yaml.safe_dump(content))
    found = migrate("trinity", [str(file)], {})
    assert found.config["model"]["reference"] == "o/teacher"
    assert found.config["algorithm"]["advantage"] == {"use": "on_policy_distill", "coef": 0.5}
    assert found.config["algorithm"]["clip_advantages"] is None
    assert (found.config["sampling"]["max_tokens"], found.config["workflow"]) == (64, "single_turn")
    assert not todo(found)


def test_trinitys_operators_on_experiences_are_filters(tmp_path):
    file = tmp_path / "dapo.yaml"
    operators = [{"name": "reward_std_filter", "args": {"threshold": 0.3}}, {"name": "mask_response_truncated"}]
    content = {
        "algorithm": {"algorithm_type": "dapo", "repeat_times": 10},
        "data_processor": {"experience_pipeline": {"operators": operators, "save_input": True}},
    }
    file.write_text(yaml.safe_dump(content))
    found = migrate("trinity", [str(file)], {})
    spread, cut = found.config["algorithm"]["filters"]
    assert (spread["use"], spread["threshold"]) == ("min_std", pytest.approx(0.3 * (10 / 9) ** 0.5))
    assert (cut, found.config["rollout"]["dynamic_sampling"]) == ("truncated", False)
    assert not todo(found)
    operators[:] = [{"name": "dapo_dynamic_sampling"}, {"name": "reward_shaping_mapper"}]
    file.write_text(yaml.safe_dump(content))
    found = migrate("trinity", [str(file)], {})
    assert (found.config["algorithm"]["filters"], found.config["rollout"]["dynamic_sampling"]) == (
        ["nonzero_variance"],
        True,
    )
    assert len(todo(found)) == 1


def test_trinitys_prompts_folders_and_settings_of_engine_and_trainer_are_kept(tmp_path):
    words = ["checkpoint_root_dir=c", "project=p", "group=g", "buffer.explorer_input.system_prompt=Think."]
    words += [f"{TASKSET}.path=o/d", f"{TASKSET}.format.reply_prefix=So", "trainer.param_offload=true"]
    words += ["explorer.rollout_model.extra_engine_args.kv_cache_dtype=fp8", "explorer.rollout_model.top_p=0.9"]
    words += [f"{TASKSET}.data_selector.selector_type=shuffle", "algorithm.kl_penalty_fn=k1"]
    words += [f"algorithm.kl_penalty_fn_args.{each}" for each in ("adaptive=true", "target_kl=0.2", "horizon=500")]
    found = trinity(*words)
    assert found.config["out"] == "c/p/g"
    train = found.config["tasks"]["train"]
    assert (train["system"], train["prefill"]) == ("Think.", "So")
    assert (found.config["engine"]["args"], found.config["learner"]["offload"]) == ({"kv_cache_dtype": "fp8"}, "all")
    (penalty,) = found.config["algorithm"]["shaping"]
    assert (penalty["target"], penalty["horizon"]) == (0.2, 500)
    assert todo(found) == ["explorer.rollout_model.top_p"]


EASY_FIRST = "data_selector.selector_type=offline_easy2hard"


@pytest.mark.parametrize(
    ("words", "order", "missing"),
    [
        ([], {"shuffle": False}, []),  # Trinity's default is sequential
        (["data_selector.selector_type=random"], {}, []),
        (["task_selector.selector_type=shuffle"], {}, []),
        ([EASY_FIRST, "data_selector.feature_keys=[rate]"], {"sort_by": "-rate"}, []),
        ([EASY_FIRST, "data_selector.feature_keys=[a,b]"], {}, ["data_selector.selector_type"]),
        (["data_selector.selector_type=mine"], {}, ["data_selector.selector_type"]),
    ],
)
def test_trinitys_selectors_order_the_tasks(words, order, missing):
    found = trinity(f"{TASKSET}.path=o/d", *(f"{TASKSET}.{word}" for word in words))
    train = found.config["tasks"]["train"]
    assert {key: train[key] for key in ("shuffle", "sort_by") if key in train} == order
    assert todo(found) == [f"{TASKSET}.{key}" for key in missing]


def test_several_tasksets_of_trinity_become_as_many_sources():
    words = [f"tasksets.0.path=o/d tasksets.0.name=easy tasksets.1.path=o/e tasksets.1.{EASY_FIRST}".split()]
    words += [["tasksets.1.data_selector.feature_keys=[rate]", "tasksets.1.default_reward_fn_type=math_reward"]]
    found = trinity(*(f"{TASKSET.removesuffix('.taskset')}.{word}" for some in words for word in some))
    first, second = found.config["tasks"]["train"]
    assert (first["name"], first["source"], first["shuffle"]) == ("o/d", "easy", False)
    assert (second["name"], second["source"], second["sort_by"]) == ("o/e", "taskset_1", "-rate")
    shares, reward = (note for note in found.notes if "taskset" in note)
    assert "in proportion to their sizes" in shares and "tasksets differ in theirs or in their reward" in reward


def test_trinitys_selector_by_difficulty_becomes_a_sampler_with_its_target():
    selector = f"{TASKSET}.task_selector"
    words = [f"{selector}.selector_type=difficulty_based", f"{selector}.feature_keys=[weak,strong]"]
    found = trinity(f"{TASKSET}.path=o/d", *words, f"{selector}.kwargs.target_reward=0.8", f"{selector}.kwargs.m=16")
    assert found.config["rollout"]["sampler"] == {"use": "by_pass_rate", "target": 0.8}
    assert "shuffle" not in found.config["tasks"]["train"] and todo(found) == [f"{selector}.kwargs.m"]
    default = trinity(f"{TASKSET}.path=o/d", *words).config["rollout"]["sampler"]
    assert default == {"use": "by_pass_rate", "target": 1.0}


def test_trainings_without_shuffling_keep_the_order_of_their_data(tmp_path):
    for files in ("[a.parquet]", "[a.parquet,b.parquet]"):
        found = verl(f"data.train_files={files}", "data.val_files=[t.parquet]", "data.shuffle=False")
        assert found.config["tasks"]["train"]["shuffle"] is False and "shuffle" not in found.config["tasks"]["eval"]
        assert "shuffle" not in verl(f"data.train_files={files}", "data.shuffle=True").config["tasks"]["train"]
    file = tmp_path / "trl.yaml"
    content = {"model_name_or_path": "m", "reward_funcs": ["think_format_reward"], "shuffle_dataset": False}
    for data, expected in (
        ({"dataset_name": "o/d"}, {"use": "hub", "name": "o/d", "split": "train", "shuffle": False}),
        (
            {"datasets": [{"path": "o/d"}, {"path": "o/e"}]},
            [{"use": "hub", "name": f"o/{n}", "split": "train", "shuffle": False, "source": n} for n in "de"],
        ),
    ):
        file.write_text(yaml.safe_dump({**content, **data}))
        assert migrate("trl", [str(file)], {}).config["tasks"]["train"] == expected


def test_swanlab_and_trackio_get_their_projects(tmp_path):
    names = "trainer.logger=[console,swanlab,trackio,tensorboard]"
    projects = [{"use": name, "project": "p"} for name in ("swanlab", "trackio")]
    assert verl(names, "trainer.project_name=p").config["trackers"] == [*projects, "tensorboard"]
    file = tmp_path / "trl.yaml"
    content = {"model_name_or_path": "m", "dataset_name": "o/d", "report_to": ["wandb", "swanlab", "trackio"]}
    file.write_text(yaml.safe_dump({**content, "trackio_space_id": "me/s", "wandb_project": "w"}))
    found = migrate("trl", [str(file)], {})
    space = {"use": "trackio", "project": "huggingface", "space": "me/s"}  # transformers' name of the project
    assert found.config["trackers"] == [{"use": "wandb", "project": "w"}, "swanlab", space]
    assert "trackio_space_id" not in todo(found)


VERL_TEACHER = [
    "distillation.enabled=True",
    "distillation.teacher_models.math.model_path=o/teacher",
    "distillation.distillation_loss.loss_mode=k1",
    "distillation.distillation_loss.use_task_rewards=False",
    "distillation.distillation_loss.use_policy_gradient=True",
    "distillation.distillation_loss.loss_max_clamp=10.0",
]


def verl(*words: str) -> Migration:
    return migrate("verl", ["actor_rollout_ref.model.path=o/m", "algorithm.adv_estimator=grpo", *words], {})


def test_verls_distillation_by_policy_gradients_is_opd():
    found = verl(*VERL_TEACHER)
    assert (found.config["algorithm"]["use"], found.config["model"]["reference"]) == ("opd", "o/teacher")
    assert found.config["algorithm"]["clip_advantages"] == 10.0
    assert not todo(found)


@pytest.mark.parametrize(
    "other",
    [
        "distillation.distillation_loss.loss_mode=k3",
        "distillation.distillation_loss.use_task_rewards=True",
        "distillation.distillation_loss.use_policy_gradient=False",
        "distillation.teacher_models.code.model_path=o/other",
    ],
)
def test_verls_other_distillations_are_to_do(other):
    found = verl(*VERL_TEACHER, other)
    assert (found.config["algorithm"]["use"], found.config["model"].get("reference")) == ("grpo", None)
    assert "distillation.enabled" in todo(found)
    assert not todo(verl(*VERL_TEACHER, other, "distillation.enabled=False"))


def test_verls_offload_to_main_memory_and_frozen_towers():
    actor = "actor_rollout_ref.actor"
    optimizer = f"{actor}.optim.override_optimizer_config.optimizer_cpu_offload=True"
    assert verl(optimizer).config["learner"]["offload"] == "optimizer"
    assert verl(f"{actor}.megatron.optimizer_offload=True").config["learner"]["offload"] == "optimizer"
    everything = verl(f"{actor}.megatron.param_offload=True", f"{actor}.megatron.optimizer_offload=True")
    assert (everything.config["learner"]["offload"], everything.config["learner"]["zero_stage"]) == ("all", 3)
    assert todo(verl(f"{actor}.freeze_vision_tower=True")) == [f"{actor}.freeze_vision_tower"]
    assert not todo(verl(f"{actor}.freeze_vision_tower=False"))


def test_openrlhfs_engines_of_an_asynchronous_run_stand_apart():
    words = ["--train.colocate_all", "--vllm.num_engines", "2", "--data.image_key", "images"]
    assert migrate("openrlhf", words, {}).config["placement"]["colocate"] is True
    found = migrate("openrlhf", [*words, "--train.async_enable"], {})
    assert not found.config["placement"].get("colocate")
    assert not todo(found)
    others = ["--data.image_key", "pictures", "--actor.freeze_visual_encoder"]
    assert todo(migrate("openrlhf", others, {})) == ["data.image_key", "actor.freeze_visual_encoder"]


def test_rolls_rewards_without_counterpart_leave_their_sources_unused(tmp_path):
    rewards = {
        "rule": {"worker_cls": "x.MathRuleRewardWorker", "tag_included": ["a"]},
        "own": {"worker_cls": "my.Worker", "tag_included": ["b"]},
    }
    found = roll(tmp_path, {"rewards": rewards, "adv_estimator": "grpo", "reward_clip": 5.0})
    assert found.config["reward"] == [{"use": "math", "sources": ["a"]}]
    assert todo(found) == ["rewards.own.worker_cls"]
    notes = {entry.key: entry.note for entry in found.entries}
    assert notes["rewards.own.tag_included"] == "sources of the reward that worker_cls needs"
    assert "bounds what is left after rewards are compared" in notes["reward_clip"]


def test_rolls_packed_sequences_are_counted_in_tokens(tmp_path):
    train = {
        "training_args": {"per_device_train_batch_size": 2},
        "use_sequence_packing": True,
        "sequence_packing_args": {"max_packed_sequence_length_train": 6144},
    }
    found = roll(tmp_path, {"actor_train": train, "prompt_length": 1024, "response_length": 1024})
    assert found.config["learner"]["micro_batch_tokens"] == 6144
    assert not todo(found)
    del train["use_sequence_packing"]
    found = roll(tmp_path, {"actor_train": train, "prompt_length": 1024, "response_length": 1024})
    assert found.config["learner"]["micro_batch_tokens"] == 4096


def test_xtuners_head_exports_and_frozen_parts(tmp_path):
    file = tmp_path / "rl.py"
    worker = (
        "WorkerConfig(fsdp_cfg=FSDPConfig(fp32_lm_head=True), "
        "model_cfg=VLConfig(freeze_vision=True, freeze_projector=False))"
    )
    rollout = "RolloutConfig(fp32_lm_head=True, enable_return_routed_experts=True)"
    file.write_text(
        f"RLColocateTrainerConfig(train_worker_cfg={worker}, rollout_config={rollout}, hf_interval=5, hf_max_keep=3, "
        "debug_rollout_dir='out')"
    )
    found = migrate("xtuner", [str(file)], {})
    assert found.config["model"]["head_dtype"] == "float32"
    assert found.config["checkpoint"] == {"export": "every", "every": 5, "keep": 3}
    assert {key.rsplit(".", 1)[-1] for key in todo(found)} == {"freeze_vision"}
    assert found.config["algorithm"]["correction"][-1] == {"use": "routing_replay", "cap": None}
    assert any("no file of annotations could be read" in note for note in found.notes)


@pytest.mark.parametrize(
    ("arguments", "loss", "missing"),
    [
        ({"clip_mode": "none", "weight": "none"}, {"use": "reinforce"}, []),
        (
            {"clip_mode": "one-side", "weight": "importance_sampling", "epsilon_low": 0.1, "epsilon_high": 0.3},
            {"use": "ppo", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": None},
            [],
        ),
        (
            {"clip_mode": "ring", "weight": "advantage"},
            {"use": "reinforce"},
            ["algorithm.policy_loss_fn_args.clip_mode", "algorithm.policy_loss_fn_args.weight"],
        ),
    ],
)
def test_trinitys_rec_is_reinforce_or_ppo(arguments, loss, missing):
    words = [f"algorithm.policy_loss_fn_args.{name}={value}" for name, value in arguments.items()]
    found = trinity("algorithm.algorithm_type=rec", *words)
    assert found.config["algorithm"]["policy_loss"] == loss
    assert [key for key in todo(found) if "policy_loss" in key] == missing


def test_trls_rloo_does_not_correct_the_mismatch():
    assert "correction" not in migrate("trl", ["trl", "rloo", "--use_vllm"], {}).config["algorithm"]
    assert migrate("trl", ["trl", "grpo", "--use_vllm"], {}).config["algorithm"]["correction"]["use"] == "mis"


def test_trls_own_function_for_adapters_has_its_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRL_WITH_FLAGS)
    found = migrate("trl", ["train.py", "--model_name_or_path", "o/m", "--use_peft", "--lora_r", "8"], {})
    assert found.config["learner"]["lora"] == {"rank": 8, "alpha": 32.0}
    Path("train.py").write_text(TRL_WITH_FLAGS.replace("get_peft_config(model_args)", "LoraConfig(r=4)"))
    found = migrate("trl", ["train.py", "--model_name_or_path", "o/m"], {})
    assert found.config["learner"]["lora"] == {"rank": 4, "alpha": 8.0}


def test_open_r1s_columns_prompts_and_projects_are_kept(tmp_path):
    file = tmp_path / "config.yaml"
    content = {
        "dataset_name": "o/d",
        "dataset_prompt_column": "problem",
        "system_prompt": "Think first.",
        "report_to": ["wandb"],
        "wandb_project": "p",
        "wandb_entity": "e",
        "vllm_device": "auto",
        "callbacks": ["push"],
        "loss_type": "grpo",
        "scale_rewards": False,
    }
    file.write_text(yaml.safe_dump(content))
    found = migrate("trl", [str(file)], {})
    source = {"use": "hub", "name": "o/d", "split": "train", "columns": {"prompt": "problem"}, "system": "Think first."}
    assert found.config["tasks"]["train"] == source
    assert found.config["trackers"] == [{"use": "wandb", "project": "p"}]
    assert found.config["algorithm"]["advantage"] == {"use": "grpo", "std_normalize": False}
    assert not todo(found)


def test_verls_engines_compute_as_its_learner_does():
    key, actor = "actor_rollout_ref.rollout.dtype", "actor_rollout_ref.actor.fsdp_config"
    found = verl(f"{key}=float16")
    assert found.config["model"]["dtype"] == "bfloat16"
    assert todo(found) == [key]
    for learner in ("dtype=float16", "mixed_precision.param_dtype=fp16"):
        found = verl(f"{key}=float16", f"{actor}.{learner}")
        assert found.config["model"]["dtype"] == "float16"
        assert not todo(found)


@pytest.mark.parametrize(
    ("flags", "steps", "noted"),
    [
        (["--max_samples", "12800"], 24, True),
        (["--max_samples", "12800", "--lr_warmup_ratio", "0"], 0, False),
        (["--max_samples", "100000000"], None, False),
    ],
)
def test_openrlhfs_warmup_from_max_samples_says_so(flags, steps, noted):
    batches = ["--rollout_batch_size", "128", "--train_batch_size", "128", "--n_samples_per_prompt", "8"]
    found = migrate("openrlhf", [*batches, *flags], {})
    assert found.config["learner"].get("warmup_steps") == steps
    assert any("12800 tasks (max_samples)" in note for note in found.notes) == noted


def test_rolls_unknown_environments_their_prompts_and_tools_are_to_do(tmp_path):
    tool = {"wrapper_args": {"max_tool_uses": 1}, "tool_configs": [{"tool_id": "python_code"}]}
    own = {"env_type": "roll_math", "agent_template": "{observation} Be brief.", "tool_wrapper": tool}
    lake = {"env_type": "frozen_lake", "agent_template": "{observation}"}
    found = roll(tmp_path, {"custom_envs": {"own": own, "lake": lake}, "train_env_manager": {"tags": ["own", "lake"]}})
    assert set(todo(found)) == {
        "custom_envs.own.env_type",
        "custom_envs.own.agent_template",
        "custom_envs.own.tool_wrapper.wrapper_args.max_tool_uses",
        "custom_envs.own.tool_wrapper.tool_configs.0.tool_id",
    }


def test_rolls_frozen_modules_and_sizes_of_images_are_to_do(tmp_path):
    train = {
        "model_args": {"freeze_module_prefix": "vision_model", "model_type": "x"},
        "data_args": {"image_max_pixels": 1048576, "preprocessing_num_workers": 4},
    }
    assert set(todo(roll(tmp_path, {"actor_train": train, "adv_estimator": "grpo"}))) == {
        "actor_train.model_args.freeze_module_prefix",
        "actor_train.data_args.image_max_pixels",
    }


@pytest.mark.parametrize(
    ("files", "weights"),
    [
        (
            ["data/math_deepmath.jsonl", "data/llm_judge_Multi.jsonl", "data/general_CrossThink-QA.jsonl"],
            [0.5, 0.2, 0.3],
        ),
        (["data/math_deepmath.jsonl", "data/llm_judge_Multi.jsonl", "data/others.jsonl"], None),
        (["data/math_deepmath.jsonl", "data/llm_judge_Multi.jsonl"], None),
        (["data/math_judge_llm.jsonl", "data/llm_judge_Multi.jsonl", "data/general_CrossThink-QA.jsonl"], None),
    ],
)
def test_rolls_domains_become_sources_with_weights_if_the_names_of_files_tell_them_apart(files, weights, tmp_path):
    shares = {"math_rule": 0.5, "llm_judge": 0.2, "crossthinkqa": 0.3, "unused": 0.0}
    data = {"file_name": files, "domain_interleave_probs": shares}
    worker = "roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker"
    rewards = {"math_rule": {"worker_cls": worker, "tag_included": ["deepmath"]}}
    (tmp_path / "rlvr.yaml").write_text(json.dumps({"actor_train": {"data_args": data}, "rewards": rewards}))
    found = migrate("roll", [str(tmp_path / "rlvr.yaml")], {})
    sources = found.config["tasks"]["train"]
    (reward,) = found.config["reward"]
    if weights is None:
        assert (sources["path"], reward["sources"]) == (files, ["deepmath"])
        assert len(todo(found)) == len(shares)
    else:
        assert [(source["path"], source["weight"]) for source in sources] == list(zip(files, weights, strict=True))
        assert [source["source"] for source in sources] == ["math_rule", "llm_judge", "crossthinkqa"]
        assert reward["sources"] == ["math_rule", "deepmath"]
        assert not todo(found)


def test_sources_of_a_mixture_have_names_of_their_own():
    paths = ["o/first", "p/first", "o/second"]
    words = [f"datasets=[{','.join('{path: ' + path + '}' for path in paths)}]", "reward_funcs=[accuracy_reward]"]
    found = migrate("trl", ["model_name_or_path=o/m", *words], {})
    assert [source["source"] for source in found.config["tasks"]["train"]] == ["first", "first_1", "second"]


def test_routing_replay_takes_the_learners_old_logprobs():
    found = migrate("trinity", ["algorithm.enable_router_replay=true", "algorithm.algorithm_type=grpo"], {})
    assert found.config["algorithm"]["correction"] == [{"use": "routing_replay", "cap": None}]
    assert found.config["old_logprobs"] == "learner"
    assert "old_logprobs: routing_replay needs those of the learner" in found.notes


@pytest.mark.parametrize(
    ("trainer", "keys", "expected"),
    [
        ("trl", ["--optim", "sgd", "--adam_beta2", "0.99"], "sgd"),
        ("trl", ["--optim", "lion_32bit", "--adam_beta2", "0.99"], {"use": "zoo/lion", "betas": [0.9, 0.99]}),
        ("verl", ["actor_rollout_ref.actor.optim.optimizer=SGD"], "sgd"),
        ("trinity", ["algorithm.optimizer.optimizer_type=sgd"], "sgd"),
        ("roll", ["actor_train.strategy_args.strategy_config.optimizer=sgd"], "sgd"),
    ],
)
def test_an_optimiser_is_converted_without_the_options_of_adamw(trainer: str, keys: list[str], expected: Any) -> None:
    learner = migrate(trainer, keys, {}).config["learner"]
    assert learner["optimizer"] == expected
    assert {"betas", "eps"}.isdisjoint(learner)


@pytest.mark.parametrize(
    ("trainer", "key", "said"),
    [
        ("openrlhf", "--actor.optim muon", "learner.optimizer=zoo/muon needs model.dtype=float32"),
        (
            "verl",
            "actor_rollout_ref.actor.optim.optimizer=Muon",
            "learner.optimizer=zoo/muon needs model.dtype=float32",
        ),
        ("trl", "--optim galore_adamw", "learner.optimizer is adamw, sgd, or one of a plugin"),
        ("trl", "--optim adamw_torch", "AdamW, the default"),
    ],
)
def test_an_optimiser_without_a_counterpart_is_explained(trainer: str, key: str, said: str) -> None:
    (entry,) = migrate(trainer, key.split(), {}).entries
    assert entry.note.startswith(said)


def test_rolls_reward_of_ifeval_names_the_package_that_checks_its_instructions(tmp_path: Path) -> None:
    worker = "roll.pipeline.rlvr.rewards.ifeval_rule_reward_worker.GeneralRuleRewardWorker"
    found = roll(tmp_path, {"rewards": {"ifeval": {"worker_cls": worker, "tag_included": ["ifeval"]}}, "seed": 1})
    (entry,) = (entry for entry in found.entries if entry.key == "rewards.ifeval.worker_cls")
    assert entry.status == "missing" and "ifeval/followed of rlsdk-ifeval" in entry.note
