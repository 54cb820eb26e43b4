"""Files of a learner's state are restored exactly, and reading one executes nothing."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsdk.errors import CheckpointError, LearnerError
from rlsdk.learners.statefile import read_pickled_state, read_state, write_state


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "executed")


def test_values_and_tensors_come_back_exactly(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "weights": {"a.b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "empty": torch.zeros(0)},
        "state": {0: {"step": torch.tensor(3.0), "betas": (0.9, 0.95)}, (1, "x"): None},
        "$odd": [True, -0.0, 2**70, "text", float("inf"), {"inner": {1, 2}}],
    }
    write_state(tmp_path / "deep" / "state.safetensors", state)
    found = read_state(tmp_path / "deep" / "state.safetensors")
    expected = {**state, "weights": None, "state": {**state["state"], 0: None}}
    assert {**found, "weights": None, "state": {**found["state"], 0: None}} == expected
    assert found["state"][0]["betas"] == (0.9, 0.95)
    for old, new in (
        *((state["weights"][name], found["weights"][name]) for name in state["weights"]),
        (state["state"][0]["step"], found["state"][0]["step"]),
    ):
        assert old.dtype == new.dtype and old.shape == new.shape and torch.equal(old, new)


def test_tied_tensors_are_written_once_and_views_of_one_buffer_apart(tmp_path: Path) -> None:
    buffer = torch.arange(2000.0)
    whole, path = buffer.clone(), tmp_path / "state.safetensors"
    write_state(path, {"tied": [whole, whole], "views": [buffer[:1000], buffer[1000:], buffer[::2]][:2]})
    assert path.stat().st_size < 2 * 8000 + 1000
    found = read_state(path)
    assert torch.equal(found["tied"][1], whole) and torch.equal(found["views"][1], buffer[1000:])
    path.unlink()
    assert float(found["tied"][0].sum()) == float(whole.sum())


def test_tensors_whose_keys_join_to_the_same_name_are_written_apart(tmp_path: Path) -> None:
    write_state(tmp_path / "s", {"a": {"b": torch.ones(1), 0: torch.zeros(0)}, "a.b": torch.zeros(1), "a.0": [1]})
    write_state(tmp_path / "t", {0: torch.ones(1), "0": torch.zeros(1)})
    found, other = read_state(tmp_path / "s"), read_state(tmp_path / "t")
    assert [float(found["a"]["b"]), float(found["a.b"]), float(other[0]), float(other["0"])] == [1, 0, 1, 0]


def test_a_tensor_that_is_not_contiguous_comes_back(tmp_path: Path) -> None:
    write_state(tmp_path / "s", {"t": torch.arange(6).reshape(2, 3).T})
    assert read_state(tmp_path / "s")["t"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_another_type_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match=r"cannot hold optimizer\.0\.scaler, a .*Bomb"):
        write_state(tmp_path / "s", {"optimizer": [{"scaler": Bomb(tmp_path)}]})


@pytest.mark.parametrize(
    "tree", ["", "[", "[]", "3", '{"a": {"$tensor": "missing"}}', '{"a": {"$eval": "1"}}', "[" * 100_000]
)
def test_a_wrong_nesting_names_the_file(tmp_path: Path, tree: str) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "model-0.safetensors"
    save_file({"t": torch.zeros(1)}, str(path), metadata={"rlsdk": tree} if tree else None)
    with pytest.raises(CheckpointError, match=r"model-0\.safetensors"):
        read_state(path)


def test_a_pickle_in_place_of_a_state_is_not_executed(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for name, content in (
        ("plain", pickle.dumps(Bomb(trace))),
        ("torch", None),
        ("legacy", None),
    ):
        path = tmp_path / f"{name}.pt"
        state = {"module": {}, "bomb": Bomb(trace)}
        if content is None:
            torch.save(state, path, _use_new_zipfile_serialization=name == "torch")
        else:
            path.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{name}\.pt is not a learner state file"):
            read_state(path)
        pytest.importorskip("deepspeed")
        with pytest.raises(CheckpointError, match=rf"{name}\.pt is damaged, or a pickle .* nothing in it was executed"):
            read_pickled_state(path)
    assert not trace.exists()
    torch.load(tmp_path / "torch.pt", weights_only=False)
    assert trace.read_text() == "executed"  # the trap works


def test_the_nesting_is_json_in_the_header(tmp_path: Path) -> None:
    from safetensors import safe_open

    write_state(tmp_path / "s", {"updates": 3, "step": torch.tensor(1)})
    with safe_open(str(tmp_path / "s"), framework="pt") as file:
        assert json.loads(file.metadata()["rlsdk"]) == {"updates": 3, "step": {"$tensor": "step"}}
