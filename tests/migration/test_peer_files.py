"""Settings of current examples of other trainers, which were reported as unknown or converted wrongly."""

from __future__ import annotations

import pytest

from rlsdk.errors import ConfigError
from rlsdk.migration import migrate


@pytest.mark.parametrize(
    ("name", "words", "setting"),
    [
        ("verl", ["bash", "-c", "torchrun -m ${ENTRY:-verl.trainer.sft_trainer} data.train_batch_size=8"], "sft"),
        ("trl", ["python", "orpo.py", "--learning_rate", "1e-6"], "dpo"),
        ("trl", ["python", "sdpo.py", "--learning_rate", "1e-6"], "policy_loss"),
    ],
)
def test_trainers_that_are_not_converted_are_refused_with_what_replaces_them(name, words, setting):
    with pytest.raises(ConfigError, match=rf"cannot be converted; in rlsdk, set .*{setting}"):
        migrate(name, words, {})


@pytest.mark.parametrize(
    ("section", "setting"),
    [("sft_train: {device_mapping: x}", "sft"), ("student_pretrain: o/m", "opd"), ("chosen_key: chosen", "dpo")],
)
def test_rolls_pipelines_without_rollouts_are_refused(tmp_path, section, setting):
    file = tmp_path / "pipeline.yaml"
    file.write_text(f"exp_name: x\n{section}\n")
    with pytest.raises(ConfigError, match=f"ROLL's .* cannot be converted; in rlsdk, set algorithm: {setting}"):
        migrate("roll", [str(file)], {})


def test_rolls_pipeline_for_dpo_says_what_to_write(tmp_path):
    file = tmp_path / "pipeline.yaml"
    file.write_text("exp_name: x\nchosen_key: chosen\n")
    with pytest.raises(ConfigError, match=r"rename the two columns .* by hand \(docs/howto/learn_from\.md"):
        migrate("roll", [str(file)], {})


@pytest.mark.parametrize(("coefficient", "status"), [("0.05", "missing"), ("0", "ignored")])
def test_openrlhfs_loss_on_further_texts_has_no_counterpart(coefficient, status):
    found = migrate("openrlhf", ["--ptx_coef", coefficient, "--pretrain_data", "o/texts"], {})
    entries = {entry.key: entry for entry in found.entries}
    assert (entries["ptx_coef"].status, entries["pretrain_data"].status) == (status, "ignored")
    assert ("algorithm: sft" in entries["ptx_coef"].note) == (status == "missing")


@pytest.mark.parametrize(
    ("name", "words", "key"),
    [
        ("roll", ["pretrain=o/m", "actor_train.model_args.additional_target=lm_head"], "additional_target"),
        ("trl", ["--use_peft", "--lora_modules_to_save", "lm_head"], "lora_modules_to_save"),
    ],
)
def test_layers_that_peft_trains_fully_beside_an_adapter_are_to_do(name, words, key):
    (entry,) = [each for each in migrate(name, words, {}).entries if each.key.endswith(key)]
    assert entry.status == "missing"
    assert "remove learner.lora to train all weights" in entry.note


def test_xtuners_greatest_limit_of_a_task_applies_to_all(tmp_path):
    def task(answer: int, prompt: int) -> str:
        fn, loop = f"Tokenize(max_length={prompt})", f"Single(sample_params=SampleParams(max_tokens={answer}))"
        data = f'[{{"dataset": DatasetConfig(anno_path="a.jsonl"), "tokenize_fn": {fn}}}]'
        sampler = f"SamplerConfig(dataloader_cfg=DataloaderConfig(dataset_config_list={data}))"
        return f"TaskSpecConfig(agent_loop_config={loop}, sampler_config={sampler})"

    file = tmp_path / "rl.py"
    tasks = f"[{task(64, 512)}, {task(1024, 128)}, {task(64, 512)}]"
    file.write_text(f"RLColocateTrainerConfig(agent_loop_manager_cfg=ManagerConfig(tasks={tasks}), seed=1)\n")
    found = migrate("xtuner", [str(file)], {})
    assert (found.config["sampling"]["max_tokens"], found.config["max_prompt_tokens"]) == (1024, 512)
    assert found.config["model"]["max_length"] == 1536
    limits = [each for each in found.entries if each.key.endswith("max_tokens") and ".tasks." in each.key]
    assert "the greatest of all tasks, 1024" in " ".join(each.note for each in limits)


def test_verls_quoted_list_of_loggers_is_read():
    found = migrate("verl", ["trainer.logger='[console,wandb]'", "trainer.project_name=p"], {})
    assert not [entry for entry in found.entries if entry.status == "missing"]
    assert found.config["trackers"] == [{"use": "wandb", "project": "p"}]


@pytest.mark.parametrize(
    ("argument", "args", "status"),
    [
        ("vllm.mm-encoder-tp-mode=data", {"mm_encoder_tp_mode": "data"}, "mapped"),
        ("vllm.disable_mm_preprocessor_cache=True", {"mm_processor_cache_gb": 0}, "mapped"),
        ("vllm.disable_mm_preprocessor_cache=False", None, "ignored"),
        ("vllm.max-model-len=2048", None, "ignored"),
        ("vllm.async_scheduling=True", None, "ignored"),
        ("vllm.tool-call-parser=hermes", None, "missing"),
    ],
)
def test_arguments_of_vllm_are_known_by_either_spelling(argument, args, status):
    found = migrate("verl", [f"actor_rollout_ref.rollout.engine_kwargs.{argument}"], {})
    assert [entry.status for entry in found.entries] == [status]
    assert found.config["engine"].get("args") == args


def test_verls_ranks_of_an_engine_become_engines():
    words = ["actor_rollout_ref.rollout.data_parallel_size=4", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    found = migrate("verl", words, {})
    assert not [entry for entry in found.entries if entry.status == "missing"]
    assert found.config["placement"]["engines"] == 4


TRINITYS = """
algorithm: {algorithm_type: grpo, repeat_times: 8}
model: {model_path: o/m}
buffer: {total_epochs: 1, BATCH, explorer_input: {taskset: {path: o/d, storage_type: file}}}
synchronizer: {STYLE}
trainer:
  trainer_config:
    actor_rollout_ref: {actor: {strategy: megatron, megatron: {param_offload: false, tensor_model_parallel_size: 2}}}
    algorithm: {rollout_correction: {bypass_mode: false}}
"""


@pytest.mark.parametrize(
    ("batch", "style", "staleness", "tasks"),
    [
        ("batch_size: 4, train_batch_size: 32", "sync_style: fixed", None, 4),
        ("train_batch_size: 256", "sync_style: explorer_driven", 1, 32),
        ("batch_size: 4", "sync_style: fully_async, sync_offset: 3", 3, 4),
    ],
)
def test_trinitys_styles_and_keys_of_verl(tmp_path, batch, style, staleness, tasks):
    file = tmp_path / "trinity.yaml"
    file.write_text(TRINITYS.replace("BATCH", batch).replace("STYLE", style))
    found = migrate("trinity", [str(file)], {})
    assert not [entry.key for entry in found.entries if entry.status == "missing"]
    assert found.config.get("rollout", {}).get("max_staleness") == staleness
    assert found.config["batch_size"] == tasks


@pytest.mark.parametrize(("enabled", "lora"), [("true", {"rank": 16, "alpha": 32.0}), ("false", None)])
def test_trinitys_adapter_of_tinker_is_an_adapter(tmp_path, enabled, lora):
    file = tmp_path / "trinity.yaml"
    file.write_text(f"model: {{model_path: o/m, tinker: {{enable: {enabled}, rank: 16, base_url: 'http://x'}}}}\n")
    found = migrate("trinity", [str(file)], {})
    assert found.config["learner"].get("lora") == lora
    notes = {entry.note for entry in found.entries if entry.status == "missing"}
    assert all("Tinker" in note for note in notes)
    assert bool(notes) == (enabled == "true")


def test_the_time_in_a_name_of_verl_is_left_out():
    name = "trainer.experiment_name=${oc.env:NAME,'grpo_${oc.env:B,vllm}_$(date +%Y%m%d_%H%M)'}"
    found = migrate("verl", [name, "data.train_batch_size=8"], {})
    assert found.config["name"] == "${oc.env:NAME,'grpo_${oc.env:B,vllm}'}"
    assert "--resume" in next(entry.note for entry in found.entries if entry.key == "trainer.experiment_name")


@pytest.mark.parametrize(("style", "ratio"), [("constant", None), ("cosine", 0.0)])
def test_verls_last_learning_rate_is_set_if_the_rate_falls(style, ratio):
    found = migrate("verl", [f"actor_rollout_ref.actor.optim.lr_scheduler_type={style}"], {})
    assert found.config["learner"].get("final_ratio") == ratio


def test_rolls_lists_of_environments_that_are_not_used_need_nothing(tmp_path):
    file = tmp_path / "pipeline.yaml"
    file.write_text("exp_name: x\npretrain: o/m\nadv_estimator: grpo\ngem_games: {Mastermind: {max_steps: 5}}\n")
    (entry,) = [entry for entry in migrate("roll", [str(file)], {}).entries if entry.key.startswith("gem_games")]
    assert entry.status == "ignored"
