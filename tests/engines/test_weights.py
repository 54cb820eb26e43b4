"""Tensors survive the conversion through numpy bit by bit, including read-only memory."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from rlsdk.errors import ValueFault
from rlsdk.weights import checksums, from_weights, pack, to_weights, unpack


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64"])
def test_a_tensor_comes_back_with_the_same_bits(dtype: str) -> None:
    tensor = (torch.randn(3, 5) * 10).to(getattr(torch, dtype))
    weights = to_weights(3, {"a": tensor.T, "empty": tensor[:0], "scalar": tensor[0, 0]})
    assert weights.version == 3
    assert weights.dtypes["a"] == dtype
    back = dict(from_weights(weights))
    assert back["a"].dtype == tensor.dtype
    assert torch.equal(back["a"], tensor.T)
    assert back["empty"].shape == (0, 5)
    assert torch.equal(back["scalar"], tensor[0, 0])


def test_read_only_arrays_are_read_without_a_copy_or_a_warning() -> None:
    array = np.arange(6, dtype=np.float32)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = unpack(array, "float32")
    assert tensor.tolist() == list(range(6))
    assert tensor.data_ptr() == array.__array_interface__["data"][0]
    del array
    assert tensor.tolist() == list(range(6))


def test_a_packed_tensor_does_not_change_with_the_model_unless_asked() -> None:
    tensor = torch.zeros(2)
    owned, shared = pack(tensor), pack(tensor, copy=False)
    tensor += 1
    assert owned.tolist() == [0, 0]
    assert shared.tolist() == [1, 1]


def test_tied_tensors_share_one_array_and_slices_do_not() -> None:
    tensor = torch.randn(4, 4)
    weights = to_weights(0, [("embed", tensor), ("head", tensor.detach()), ("half", tensor[:2])])
    assert weights.tensors["embed"] is weights.tensors["head"]
    assert weights.tensors["half"].shape == (2, 4)


def test_tensors_that_an_iterator_makes_and_drops_are_all_kept() -> None:
    weights = to_weights(0, ((f"{i}", torch.full((64, 64), float(i))) for i in range(12)), dtype="bfloat16")
    assert [float(tensor[0, 0]) for _, tensor in from_weights(weights)] == [float(i) for i in range(12)]


def test_a_cast_changes_floats_only() -> None:
    weights = to_weights(0, {"w": torch.ones(2), "i": torch.arange(2)}, dtype="bfloat16")
    assert dict(weights.dtypes) == {"w": "bfloat16", "i": "int64"}
    assert weights.tensors["w"].dtype == np.uint16


def test_checksums_tell_one_bit_apart() -> None:
    array = torch.zeros(1000, dtype=torch.bfloat16)
    before = checksums(to_weights(0, {"a": array, "b": array[:0], "c": array[1]}))
    array[7] = 1e-30
    after = checksums(to_weights(0, {"a": array, "b": array[:0], "c": array[1]}))
    assert before["a"] != after["a"]
    assert before["b"] == after["b"]
    assert all(len(v) == 8 for v in after.values())


def test_a_name_that_comes_twice_is_an_error() -> None:
    with pytest.raises(ValueFault, match="'a' is given twice"):
        to_weights(0, [("a", torch.zeros(1)), ("a", torch.ones(1))])
