"""Configurations that users posted: a launch command of TinyZero, and an agentic pipeline of ROLL."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rlsdk.config import check
from rlsdk.migration import migrate
from rlsdk.plugins import loading

FILES = Path(__file__).parent / "files"
LAUNCH = {"N_GPUS": "2", "ROLLOUT_TP_SIZE": "2", "BASE_MODEL": "model", "DATA_DIR": "data", "EXPERIMENT_NAME": "run"}


@pytest.fixture
def gridworlds(tmp_path, monkeypatch):
    """The plugin as pip would have installed it."""
    pytest.importorskip("gymnasium")
    info = tmp_path / "site" / "rlsdk_gridworlds-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlsdk-gridworlds\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[rlsdk.v1]\ngridworlds = rlsdk_gridworlds\n")
    monkeypatch.syspath_prepend(str(info.parent))
    loading._default.cache_clear()
    yield
    loading._default.cache_clear()


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
        "render_save_dir",
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
    warm = migrate("verl", ["trainer.critic_warmup=10", "actor_rollout_ref.rollout.val_kwargs.temperature=0.6"], {})
    assert [entry.status for entry in warm.entries] == ["missing", "missing"]


def test_verls_reward_section_is_read():
    function = "reward.custom_reward_function"
    found = migrate("verl", [f"{function}.path=a.py", f"{function}.name=f", f"+{function}.reward_kwargs.least=0.1"], {})
    assert found.config["reward"]["path"] == "a.py:f"
    assert found.config["reward"]["arguments"] == {"least": 0.1}
    assert not [entry.key for entry in found.entries if entry.status == "missing"]
