"""Before the start: whether an adapter is sent, and whether machine and engine suit the learner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlsdk import preflight
from rlsdk.config import Plan, check
from rlsdk.contracts import Adapter
from rlsdk.engines.starting import exchanged_adapter
from rlsdk.errors import EngineError, EnvironmentFault
from rlsdk.readiness.checks import machine
from rlsdk.trainer.run import run


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Plan]:
    """Checks a configuration whose engine and learner are given."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").touch()
    common: dict[str, Any] = {
        "name": "trial",
        "out": str(tmp_path / "runs"),
        "model": str(tmp_path / "model"),
        "tasks": {"train": "countdown"},
        "reward": "countdown",
        "algorithm": "grpo",
        "steps": 2,
        "batch_size": 4,
        "group_size": 4,
        "placement": {"device": "cpu"},
    }
    return lambda engine, **learner: check({**common, "engine": engine, "learner": {"use": "deepspeed", **learner}})


def test_an_adapter_is_sent_where_the_learner_gives_one_and_the_engine_takes_it(plan: Callable[..., Plan]) -> None:
    assert exchanged_adapter(plan("vllm", lora={"rank": 8})) == Adapter(rank=8, alpha=32.0)
    assert exchanged_adapter(plan("vllm", lora={"rank": 8, "sync": "merged"})) is None
    assert exchanged_adapter(plan("transformers", lora={"rank": 8})) is None
    assert exchanged_adapter(plan("vllm")) is None


def test_a_rank_that_the_engine_cannot_serve_stops_the_run_before_it_starts(plan: Callable[..., Plan]) -> None:
    wide = plan("vllm", lora={"rank": 600})
    with pytest.raises(EngineError, match="rank 600: vLLM supports ranks up to 512"):
        run(wide)
    assert not wide.folder.exists()


def test_a_missing_peft_stops_the_run_before_it_starts(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = preflight.version
    monkeypatch.setattr(preflight, "version", lambda name: None if name == "peft" else known(name))
    with pytest.raises(EnvironmentFault, match=r"learner core/deepspeed with these options needs peft, .* pip install"):
        run(plan("vllm", lora={"rank": 8}))
    assert exchanged_adapter(plan("vllm")) is None


def test_a_missing_compiler_stops_the_run_before_it_starts(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    both = plan({"use": "transformers", "compile": True}, compile=True)
    with pytest.raises(EnvironmentFault) as refused:
        run(both)
    for named in ("engine core/transformers", "learner core/deepspeed"):
        assert f"{named} with these options starts no-such-compiler, which is not" in str(refused.value)
    assert len(machine(both, trains=False)) == 1  # an evaluation has no learner
    assert machine(plan("transformers")) == []
