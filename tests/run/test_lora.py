"""Whole runs that train an adapter: vLLM gets it alone, others merged; a sync without effect ends the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow]
LORA = ["learner.lora={rank: 4, alpha: 8}", "learner.lr=1.0e-2", "algorithm.kl_coef=0.01"]
FORGETFUL = '''
import attrs
import rlsdk
from rlsdk.engines.vllm import Vllm


@rlsdk.engine("vllm")
@attrs.define(kw_only=True, eq=False, slots=False)
class Forgetful(Vllm):
    """Takes note of the version, and keeps the adapter that it has from some version on."""

    keep_from: int = 1

    def load_weights(self, weights):
        if weights.version < self.keep_from:
            return super().load_weights(weights)
        self._version = weights.version
        self._llm.set_weight_version(str(weights.version))
'''


def check_learned(runner: Any, name: str = "run") -> None:
    """Engine and learner agree, the adapter moved the policy, and the reference stayed the base."""
    lines = runner.metrics(name)[1:4]
    assert len(lines) == 3
    assert all(line["canary/gap"] < 1e-4 and line["actor/grad_norm"] > 0 for line in lines)
    assert abs(lines[0]["actor/ref_kl"]) < 1e-6
    assert lines[2]["actor/ref_kl"] > 1e-4


def check_opens(folder: Path, base: Path) -> None:
    """The merged model equals the base with the adapter, and not the base alone."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(base)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        ours, theirs = merged(ids).logits, plain(ids).logits
        again = PeftModel.from_pretrained(plain, folder / "adapter")(ids).logits
    assert (ours - theirs).abs().max() > 1e-2
    torch.testing.assert_close(again, ours, atol=1e-4, rtol=1e-4)


def test_vllm_takes_the_adapter_alone(runner: Any, model: Path) -> None:
    runner.train(*LORA)
    check_learned(runner)
    check_opens(Path(runner.summary()["export"]), model)


def test_the_transformers_engine_takes_merged_weights(runner: Any, model: Path) -> None:
    two_ranks = ("learner.zero_stage=2", "placement.learners=2")
    runner.train(*LORA, *two_ranks, "engine=transformers", "checkpoint.export=never")
    check_learned(runner)
    folder = runner.folder / "model"
    command = [sys.executable, "-m", "rlsdk.cli", "export", str(runner.path()), str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    check_opens(folder, model)


def test_a_sync_that_keeps_the_old_adapter_ends_the_run(runner: Any) -> None:
    """The steps are so small that the gap alone would not show it."""
    plugin = runner.folder / "forgetful.py"
    plugin.write_text(FORGETFUL)
    engine = "engine={use: forgetful/vllm, keep_from: 2}"
    runner.train(*LORA, engine, "learner.lr=3.0e-5", "eval.before=false", "--plugin", str(plugin), code=1)
    said = " ".join(runner.console().split())
    assert "weights version 2: the logprobs of engine 0 did not change" in said
    assert "base_model.model.model.layers" not in said  # what was sent arrived whole
    assert "equal, 0 different" in said
