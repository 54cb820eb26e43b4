"""Weights loaded in parts, as in a weight transfer: the same as whole, or none at all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import tiny

from rlsdk.contracts import LoadsWeightTensors, Model, Weights
from rlsdk.conversion import by_layer
from rlsdk.errors import EngineError, TransferError
from rlsdk.transfers.buckets import Buffers
from rlsdk.weights import from_weights, to_weights

PROMPT = np.array([1, 5, 9, 30, 2, 17])


def split(weights: Weights, *, without: str = "", until: int = 99) -> Iterator[Weights]:
    """Whole layers in turn, in buffers that are used again; the transfer breaks off after so many."""
    names = [set(group) - {without} for group in by_layer(weights.tensors)]
    buffers = Buffers(max(sum(weights.tensors[n].nbytes for n in group) for group in names))
    for count, group in enumerate(names):
        if count == until:
            raise TransferError("the learner left")
        begin, tensors, room = 0, {}, buffers.take(0)
        for name in sorted(group):
            array = weights.tensors[name]
            tensors[name] = room[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
            tensors[name][...] = array
            begin += array.nbytes
        del room
        yield Weights(weights.version, tensors, {name: weights.dtypes[name] for name in tensors})


def load(engine: Any, weights: Weights, **how: Any) -> tuple[str, str]:
    """The result as text, since exceptions of another process arrive as others."""
    try:
        engine.load_weight_parts(weights.version, split(weights, **how))
    except (EngineError, TransferError) as error:
        return type(error).__name__, str(error)
    return "", ""


def load_tensors(engine: Any, weights: Weights) -> bool:
    """Load torch tensors, as they come from GPU to GPU."""
    tensors = to_weights(weights.version, from_weights(weights), host=False)
    engine.load_weight_parts(weights.version, iter((tensors,)))
    return isinstance(engine, LoadsWeightTensors) and engine.loads_tensors


def test_parts_give_what_the_whole_gives_and_a_broken_stream_leaves_an_engine_that_can_be_loaded(
    subject: Any, model: Model
) -> None:
    if subject.actor is not None:
        import ray

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

    def seen() -> np.ndarray:
        return np.asarray(subject.run(lambda engine: engine.logprobs(PROMPT)))

    new, other = tiny.changed(model, 8, seed=2), tiny.changed(model, 9, seed=3)
    assert subject.run(load, new) == ("", "")
    np.testing.assert_allclose(seen(), tiny.reference_logprobs(model, PROMPT, new), atol=1e-4)

    kind, text = subject.run(lambda engine: load(engine, other, until=2))
    assert (kind, text) == ("TransferError", "the learner left")
    subject.run(lambda engine: engine.load_weights(new))
    np.testing.assert_allclose(seen(), tiny.reference_logprobs(model, PROMPT, new), atol=1e-4)

    name = "model.layers.1.mlp.down_proj.weight"
    kind, text = subject.run(lambda engine: load(engine, other, without=name))
    assert kind == "EngineError" and f"tensors are missing: {name}" in text
    assert subject.run(load, other) == ("", "")
    np.testing.assert_allclose(seen(), tiny.reference_logprobs(model, PROMPT, other), atol=1e-4)

    assert subject.run(load_tensors, new)
    np.testing.assert_allclose(seen(), tiny.reference_logprobs(model, PROMPT, new), atol=1e-4)
