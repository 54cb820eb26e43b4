"""Weights loaded in parts, as in a weight transfer: the same as whole, or none at all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from queue import Queue
from typing import Any

import attrs
import numpy as np
import pytest
import tiny
import torch

from rlsdk.contracts import LoadsWeightTensors, Model, Weights
from rlsdk.conversion import by_layer
from rlsdk.engines.vllm_worker import WeightStreamCall, relayed
from rlsdk.errors import EngineError, TransferError
from rlsdk.transfers.broadcast import Gloo, Nccl
from rlsdk.transfers.buckets import Buffers
from rlsdk.transfers.shared_memory import SharedMemory
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


class WorkerGroup:
    """A group as vLLM's: what the first worker sends, every other one gets, in order."""

    def __init__(self, rank: int, queue: Queue[Any], sent: list[Any]) -> None:
        self.rank_in_group, self._queue, self.sent = rank, queue, sent

    def broadcast_tensor_dict(self, given: Any = None, src: int = 0) -> Any:
        if self.rank_in_group > src:
            return self._queue.get(timeout=20)
        self.sent.append(given)
        self._queue.put({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()})
        return given


@attrs.frozen
class Given:
    """A transfer that yields what it was given."""

    parts: Iterator[Weights]

    def receive(self, offer: Any, seat: int) -> Iterator[Weights]:
        return self.parts


class TestRelayedStreams:
    """The first worker of an engine receives weights, and the others get from it what it got."""

    def relay(self, parts: Iterator[Weights], shapes: dict[str, tuple[int, ...]]) -> tuple[list[Any], list[Any], Any]:
        queue: Queue[Any] = Queue()
        stream = WeightStreamCall(Given(parts), None, 1, 7, True, shapes)
        first = WorkerGroup(0, queue, [])

        def take(group: WorkerGroup) -> list[Any]:
            found: list[Any] = []
            try:
                for part in relayed(stream, group):
                    found += [(name, tensor.tolist()) for name, tensor in from_weights(part)]
            except (EngineError, TransferError) as error:
                found.append(str(error))
            return found

        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(take, WorkerGroup(1, queue, []))
            return take(first), other.result(), first.sent

    def test_are_the_same_in_every_worker_and_tied_tensors_are_sent_once(self) -> None:
        array = np.arange(6, dtype=np.float32).reshape(3, 2)
        parts = [
            Weights(7, {"model.embed_tokens.weight": array}, {"model.embed_tokens.weight": "float32"}),
            Weights(7, {"b": np.array([16256], np.uint16)}, {"b": "bfloat16"}),
        ]
        shapes = {"model.embed_tokens.weight": (3, 2), "lm_head.weight": (3, 2), "b": (1,)}
        first, other, sent = self.relay(iter(parts), shapes)
        assert first == other
        assert dict(first) == {
            "model.embed_tokens.weight": array.tolist(),
            "lm_head.weight": array.tolist(),
            "b": [1.0],
        }
        assert [sum(isinstance(value, torch.Tensor) for value in each.values()) for each in sent] == [1, 1, 0]

    def test_end_for_every_worker_with_the_error_of_the_first(self) -> None:
        def breaks() -> Iterator[Weights]:
            yield Weights(7, {"a": np.zeros(2, np.float32)}, {"a": "float32"})
            raise TransferError("the learner left")

        shapes: dict[str, tuple[int, ...]] = {"a": (2,), "b": (2,)}
        for parts, said in ((breaks(), "the learner left"), (islice(breaks(), 1), "1 of 2 tensors are missing: b")):
            first, other, _ = self.relay(parts, shapes)
            assert first == other and first[0] == ("a", [0.0, 0.0]) and said in first[1]
        first, other, _ = self.relay(islice(breaks(), 1), {"a": (3,)})
        assert first == other and "a is (2,), not (3,)" in first[0]

    def test_end_for_the_others_when_the_first_one_stops_reading(self) -> None:
        queue: Queue[Any] = Queue()
        part = Weights(7, {"a": np.zeros(2, np.float32)}, {"a": "float32"})
        parts = relayed(WeightStreamCall(Given(iter((part, part))), None, 1, 7, False, {}), WorkerGroup(0, queue, []))
        next(parts)
        parts.close()
        other = WeightStreamCall(Given(iter(())), None, 1, 7, False, {})
        assert len(list(relayed(other, WorkerGroup(1, queue, [])))) == 1


class NcclOnCPU(Nccl):
    """The transfer for GPUs, which receives tensors, over gloo."""

    backend, device = "gloo", "cpu"


def receive(engine: Any, weights: Weights, kind: type[Any], **how: Any) -> tuple[str, str]:
    """Send weights to an engine that calls the transfer itself, and return its error as text."""
    sender, receiver = (kind(bucket_mib=1, timeout=10) for _ in range(2))
    offer = sender.offer(iter(()), 1, "127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.send, split(weights, **how))
        try:
            engine.receive_weights(weights.version, receiver, offer, 1)
        except (EngineError, TransferError) as error:
            return type(error).__name__, str(error)
        finally:
            sent.exception()
    return "", ""


@pytest.mark.stack
@pytest.mark.parametrize("kind", [Gloo, pytest.param(NcclOnCPU, marks=pytest.mark.slow), SharedMemory])
@pytest.mark.parametrize("name", ["vllm", pytest.param("parallel_vllm", marks=pytest.mark.slow)])
def test_an_engine_of_several_processes_receives_a_stream_as_one_of_a_single_process_does(
    name: str, kind: type[Any], model: Model, request: pytest.FixtureRequest
) -> None:
    import ray

    subject = request.getfixturevalue(f"{name}_engine")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

    def agrees(weights: Weights) -> None:
        seen = np.asarray(subject.run(lambda engine: engine.logprobs(PROMPT)))
        np.testing.assert_allclose(seen, tiny.reference_logprobs(model, PROMPT, weights), atol=1e-4)

    new, other = tiny.changed(model, 18, seed=2), tiny.changed(model, 19, seed=3)
    assert subject.run(receive, new, kind) == ("", "")
    agrees(new)
    error, text = subject.run(lambda engine: receive(engine, other, kind, until=2))
    assert error == "TransferError" and text
    assert subject.run(receive, other, kind) == ("", "")
    agrees(other)
    missing = "model.layers.1.mlp.down_proj.weight"
    error, text = subject.run(lambda engine: receive(engine, new, kind, without=missing))
    assert error == "EngineError" and f"tensors are missing: {missing}" in text
    assert subject.run(receive, new, kind) == ("", "")
    agrees(new)
