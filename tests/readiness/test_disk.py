"""The disk space of a run, estimated before it starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from rlsdk import preflight
from rlsdk.cli import root
from rlsdk.config import Plan, check
from rlsdk.learners.lora import Lora, count_adapter
from rlsdk.readiness import disk
from rlsdk.readiness.checks import machine, space
from rlsdk.readiness.disk import estimate, in_words
from rlsdk.runlog.store import Address, RolloutStore
from rlsdk.runlog.tables import Entry
from rlsdk.types import Group, Message, Rollout, Score, Task
from tests.trainer.fakes import make_plan

HUB_ID = "lab/small-model"
SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
LAYER = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
PARAMETERS = 2 * LAYER + 64 + 2 * 1000 * 64


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub that holds one model's config, on a machine without a network."""
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = folder / "models--lab--small-model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(SHAPE))
    refs = folder / "models--lab--small-model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    return folder


@pytest.fixture
def plan(tmp_path: Path, cache: Path) -> Callable[..., Plan]:
    tree = {
        "name": "trial",
        "out": str(tmp_path / "runs"),
        "model": HUB_ID,
        "tasks": {"train": "countdown"},
        "reward": "countdown",
        "engine": "transformers",
        "steps": 10,
        "batch_size": 4,
        "group_size": 8,
        "placement": {"device": "cpu"},
    }
    return lambda *settings: check(tree, settings)


def test_the_size_of_a_hub_model_comes_from_its_cached_config(plan: Callable[..., Plan]) -> None:
    found = estimate(plan())
    assert found.parameters == PARAMETERS and not found.unknown
    assert found.checkpoint == PARAMETERS * 16  # float32: weights, a copy, two moments
    assert (found.checkpoints, found.exports, found.export) == (2, 1, PARAMETERS * 4)
    assert found.total == 2 * found.checkpoint + found.export + found.rollouts + found.logs


def test_dtype_critic_exports_and_kept_checkpoints_count(plan: Callable[..., Plan]) -> None:
    half = estimate(plan("model.dtype=bfloat16", "checkpoint={every: 1, keep: 5, export: every}"))
    assert half.checkpoint == PARAMETERS * 14
    assert (half.checkpoints, half.exports, half.export) == (6, 6, PARAMETERS * 2)
    assert estimate(plan("algorithm=ppo")).checkpoint == 2 * PARAMETERS * 16
    moves = ("algorithm={use: grpo, kl: k3, kl_coef: 0.1}", "model.dtype=bfloat16")
    assert estimate(plan(*moves, "reference={update_every: 5}")).checkpoint == PARAMETERS * (14 + 2)
    assert estimate(plan(*moves, "reference={update_every: 5, mix: 0.5}")).checkpoint == PARAMETERS * (14 + 4)
    assert estimate(plan("checkpoint.export=never")).exports == 0


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (["checkpoint={every: 0, keep: 1000}"], 1),
        (["checkpoint={every: 4, keep: 1000}"], 3),  # after the steps 4, 8 and 10
        (["checkpoint={every: 4, keep: 1000}", "steps=null", "epochs=1"], 1),
        (["checkpoint={every: 4, keep: 2}"], 2),
    ],
)
def test_no_more_checkpoints_count_than_the_run_writes(
    settings: list[str], kept: int, plan: Callable[..., Plan]
) -> None:
    planned = plan(*settings)
    found = estimate(planned, tasks=16)  # 4 steps of an epoch
    assert found.checkpoints == kept + 1
    assert f"({kept} kept, 1 while written)" in in_words(planned, found)["checkpoints"]


def test_of_lora_only_the_adapter_is_in_a_checkpoint(plan: Callable[..., Plan]) -> None:
    found = estimate(plan("learner.lora={rank: 4}"))
    adapter = 2 * 4 * (4 * (64 + 64) + 3 * (64 + 128))
    assert found.checkpoint == adapter * 16
    assert found.export == PARAMETERS * 4  # merged


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_adapters_are_counted_as_peft_adds_them(targets: Any) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    pytest.importorskip("peft")
    from rlsdk.learners.lora import wrap

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE))
    lora = Lora(rank=3, targets=targets)
    counted = count_adapter(model, lora)
    wrap(model, lora, 0)
    assert counted == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert torch.get_default_device().type == "cpu"


def test_an_uncached_hub_model_is_reported_and_not_counted_as_zero(plan: Callable[..., Plan]) -> None:
    found = estimate(plan("model.path=lab/another"), download=True)
    assert found.parameters is None
    (said,) = found.unknown
    assert "checkpoints and exports are not counted" in said and "'lab/another' is not in this machine's cache" in said


def test_files_that_a_training_run_removes_meanwhile_do_not_fail_the_estimate(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = plan()
    given.folder.mkdir(parents=True)
    (given.folder / "metrics.jsonl").write_bytes(b"x" * 100)
    removed = given.folder / "checkpoint.partial"
    removed.symlink_to("nowhere")  # as a file that is gone once its name has been read
    monkeypatch.setattr(Path, "is_file", lambda path: path == removed or path.name == "metrics.jsonl")
    assert estimate(given).present == 100


def test_rollouts_of_the_whole_run_count(plan: Callable[..., Plan]) -> None:
    found = estimate(plan())
    assert estimate(plan("steps=20")).rollouts == 2 * found.rollouts
    assert estimate(plan("group_size=16")).rollouts == 2 * found.rollouts
    assert estimate(plan("save_rollouts=5")).rollouts == found.rollouts // 5
    assert estimate(plan("sampling.max_tokens=512")).rollouts > found.rollouts
    assert estimate(plan("save_rollouts=0")).rollouts == 0
    assert estimate(plan("rollout.storage.url=postgresql+psycopg://me@host/name")).rollouts == 0
    epochs = plan("steps=null", "epochs=2")
    assert estimate(epochs, tasks=20).rollouts == found.rollouts
    assert any("the number of tasks" in text for text in estimate(epochs).unknown)


def test_the_estimated_size_of_a_rollout_is_near_that_in_the_store(tmp_path: Path) -> None:
    prompt, response, rng = 100, 400, np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghij"), rng.integers(1, 9))) for _ in range(3000)]
    store = RolloutStore(Address.make(tmp_path, None, None))
    for number in range(20):
        task = Task(f"t{number}", " ".join(rng.choice(words, prompt)), 1, source="s")
        ids = rng.integers(0, 150_000, prompt)
        rollouts = [
            Rollout(
                task,
                (Message("user", str(task.prompt)), Message("assistant", " ".join(rng.choice(words, response)))),
                np.concatenate([ids, np.minimum(rng.zipf(1.3, response), 149_999)]),
                [False] * prompt + [True] * response,
                -rng.random(prompt + response),
                [-1] * prompt + [0] * response,
            )
            for _ in range(8)
        ]
        with store.transaction():
            group = Group(task, rollouts, [Score(1.0)] * 8)
            store.put([Entry(number=number, source="s", state="trained", step=1, uses=1, group=group)])
    store.close()
    real = sum(file.stat().st_size for file in tmp_path.iterdir()) / 160
    told = disk.ROLLOUT_BYTES + disk.PROMPT_TOKEN_BYTES * prompt + disk.RESPONSE_TOKEN_BYTES * response
    assert 0.6 < told / real < 1.6


def test_what_the_folder_holds_already_need_not_be_free(plan: Callable[..., Plan], tmp_path: Path) -> None:
    before = estimate(plan())
    folder = tmp_path / "runs" / "trial" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(1000))
    after = estimate(plan())
    assert (after.total, after.needed) == (before.total, before.needed - 1000)


def test_explain_shows_the_estimate_in_words_and_as_json(plan: Callable[..., Plan], tmp_path: Path) -> None:
    file = tmp_path / "trial.yaml"
    file.write_text(json.dumps(plan().tree))
    ran = CliRunner().invoke(root, ["explain", str(file), "--json"])
    found = json.loads(ran.stdout)["disk"]
    assert found["parameters"] == PARAMETERS and found["needed"] == found["total"] > 2 * PARAMETERS * 16
    text = CliRunner().invoke(root, ["explain", str(file)]).stdout
    assert f"disk\n  needed: {preflight.size_text(found['needed'])}, of" in text
    assert f"  checkpoints: 2 × {preflight.size_text(PARAMETERS * 16)} (1 kept, 1 while written)" in text
    ran = CliRunner().invoke(root, ["explain", str(file), "model.path=lab/another"])
    assert "unknown: checkpoints and exports are not counted: the config of the model" in ran.stdout


def test_words_say_what_is_there_already(plan: Callable[..., Plan], tmp_path: Path) -> None:
    (tmp_path / "runs" / "trial").mkdir(parents=True)
    (tmp_path / "runs" / "trial" / "file").write_bytes(bytes(2048))
    assert "holds 2 KiB already" in in_words(plan(), estimate(plan()))["needed"]


def test_a_run_that_does_not_fit_is_refused(plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    from rlsdk.readiness.checks import examine

    needed = estimate(plan()).needed
    usage = shutil.disk_usage("/")
    for free, refused in ((needed - 1, True), (needed, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        found = [str(each) for each in examine(plan(), starts=False).warnings if each.path == "out"]
        assert bool(found) is refused, found
        assert all("are needed" in text for text in found)


def test_checkpoints_that_wait_to_be_uploaded_count(plan: Callable[..., Plan], tmp_path: Path) -> None:
    local, remote = estimate(plan()), estimate(plan("out=memory://runs", f"mirror={tmp_path}"))
    assert remote.checkpoints == local.checkpoints + 2 and remote.rollouts == 2 * local.rollouts


def test_a_cached_hub_model_without_weights_is_reported_if_they_cannot_be_downloaded(
    plan: Callable[..., Plan], cache: Path
) -> None:
    def found() -> list[str]:
        return [each.message for each in machine(plan()) if each.path == "model.path"]

    assert [f"{HUB_ID} has no weights for the learner" in each for each in found()] == [True]
    (config,) = cache.rglob("config.json")
    (config.parent / "model.safetensors").touch()
    assert found() == []


def test_a_folder_that_ray_deletes_after_the_job_is_refused(tmp_path: Path) -> None:
    job = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123456789abcdef"
    for folder, count in ((job / "runs", 1), (tmp_path / "runs", 0)):
        plan = make_plan(folder)
        found = [f"{each.path}: {each}" for each in space(plan, estimate(plan)) if "working-dir" in str(each)]
        assert len(found) == count
        assert all("give a folder outside it, such as out=/shared/runs" in each for each in found)
