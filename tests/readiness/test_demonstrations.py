"""The checks before Ray starts report a task without a demonstration."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from rlsdk import nano
from rlsdk.config import check
from rlsdk.readiness.checks import examine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nano") / "model"
    nano.create(folder)
    return folder


def faults(model: Path, folder: Path, rows: Sequence[Mapping[str, object]], *settings: str) -> list[str]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tree = {
        "name": "trial",
        "out": str(folder / "runs"),
        "model": {"path": str(model), "max_length": 64},
        "tasks": {"train": {"use": "jsonl", "path": str(file)}},
        "max_prompt_tokens": 24,
        "steps": 1,
        "placement": {"device": "cpu"},
    }
    return [str(fault) for fault in examine(check(tree, settings), starts=False).faults]


GOOD = {"prompt": "1+1=", "answer": "2", "demonstration": "2"}
BAD = {"prompt": "1+2=", "answer": "3"}
MIXED = ("algorithm=mix", "reward=exact_match", "sampling.max_tokens=8", "engine=transformers")


@pytest.mark.parametrize("settings", [("algorithm=sft",), MIXED], ids=["sft", "mix"])
def test_a_task_without_a_demonstration_is_a_fault(model: Path, tmp_path: Path, settings: tuple[str, ...]) -> None:
    assert faults(model, tmp_path, [GOOD], *settings) == []
    (found,) = faults(model, tmp_path, [GOOD, BAD], *settings)
    assert found.startswith("tasks.train: task 'rows:1' has no demonstration") and "Map a column" in found


def test_a_pair_without_its_worse_answer_is_a_fault(model: Path, tmp_path: Path) -> None:
    pairs = ("algorithm={use: dpo, rollouts: demonstrations}", "minibatches=1")
    whole = {**BAD, "chosen": "3", "rejected": "4"}
    half = {**BAD, "chosen": "3"}
    assert faults(model, tmp_path, [whole], *pairs) == []
    (found,) = faults(model, tmp_path, [whole, half], *pairs)
    assert found.startswith("tasks.train: task 'rows:1' has no rejected; its metadata holds: chosen")


def test_a_workflow_that_samples_is_a_fault(model: Path, tmp_path: Path) -> None:
    (found,) = faults(model, tmp_path, [GOOD], "algorithm=sft", "workflow=single_turn")
    assert found.startswith(
        "workflow: 'core/single_turn': the workflow samples the policy, but the algorithm trains on demo"
    )


def test_a_demonstration_that_is_neither_right_nor_wrong_is_a_fault_where_a_loss_asks(
    model: Path, tmp_path: Path
) -> None:
    kto = ("algorithm={use: kto, rollouts: demonstrations}",)
    assert faults(model, tmp_path, [{**GOOD, "label": True}, {**GOOD, "label": False}], *kto) == []
    (found,) = faults(model, tmp_path, [{**GOOD, "label": True}, GOOD], *kto)
    assert found.startswith("tasks.train: task 'rows:1': nothing says whether its demonstration is right")
    assert faults(model, tmp_path, [GOOD], *kto, "reward=exact_match") == []  # the reward says


def test_it_is_refused_in_a_notebook_with_a_running_event_loop(model: Path, tmp_path: Path) -> None:
    async def cell() -> list[str]:
        return faults(model, tmp_path, [BAD], "algorithm=sft")

    assert "has no demonstration" in asyncio.run(cell())[0]


def test_an_algorithm_that_samples_asks_for_none(model: Path, tmp_path: Path) -> None:
    sampled = ("algorithm=grpo", "reward=exact_match", "sampling.max_tokens=8", "engine=transformers", "group_size=2")
    assert faults(model, tmp_path, [BAD], *sampled) == []
