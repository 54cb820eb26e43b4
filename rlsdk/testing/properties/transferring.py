"""Properties of weight transfers: engines load exactly the learner's bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from rlsdk.contracts import StreamsTensors, StreamsWeights, Weights
from rlsdk.testing.findings import Case, NotApplicable, Violated
from rlsdk.testing.properties.base import holds
from rlsdk.testing.subject import Subject
from rlsdk.weights import checksums, joined

ENGINES = 2
HOST = "127.0.0.1"


def _models(_: Subject) -> Iterator[Case[Sequence[Weights]]]:
    """Yield weights in parts, as learners send them, each with a title."""
    random = np.random.default_rng(0)

    def part(**tensors: np.ndarray) -> Weights:
        # Dtypes that numpy lacks are sent as integers with the same bits.
        names = {"uint16": "bfloat16"}
        return Weights(3, tensors, {name: names.get(a.dtype.name, a.dtype.name) for name, a in tensors.items()})

    def layer(index: int, dtype: str) -> Weights:
        bits = random.integers(0, 2**16, (257, 33)).astype(dtype)
        return part(**{f"layers.{index}.weight": bits, f"layers.{index}.bias": bits[0].copy()})

    tied = random.random((100, 7), np.float32)
    yield Case("one tensor", [part(weight=tied)])
    yield Case("16-bit layers", [layer(i, "uint16") for i in range(5)])
    yield Case("tied tensors, a number, and none at all", [part(a=tied, b=tied), part(c=np.array(1.5)), part()])
    yield Case("not contiguous", [part(a=tied.T, b=tied[::2])])


def _carried(subject: Subject, parts: Sequence[Weights]) -> list[Weights | None]:
    """Return the weights that engines receive in successive transfers, in threads of this process."""
    makes: Callable[[], Any] = subject.make
    sender, receivers = makes(), [makes() for _ in range(ENGINES)]
    if isinstance(sender, StreamsTensors) and sender.device == "cuda":
        raise NotApplicable(f"needs {ENGINES + 1} GPUs")  # the members are threads here, and would share one
    found: list[Weights | None] = []
    for _ in range(2):  # an instance performs many transfers
        offer = subject.call(sender.offer, iter(parts), ENGINES, HOST)
        if not isinstance(sender, StreamsWeights):
            found.append(offer)
            continue
        with ThreadPoolExecutor(ENGINES + 1) as pool:

            def received(receiver: Any, seat: int, offer: Any = offer) -> Any:
                return subject.call(lambda: joined(receiver.receive(offer, seat), copy=True))

            sent = pool.submit(subject.call, sender.send, iter(parts))
            gets = [pool.submit(received, receiver, seat) for seat, receiver in enumerate(receivers, 1)]
            found += [get.result() for get in gets]
            sent.result()
    return found


@holds(
    "carries-all-bits",
    "weight_transfer",
    inputs=_models,
    remedy="send each tensor's exact bytes, with its shape, its dtype from `Weights.dtypes`, and the version",
)
def carries_all_bits(subject: Subject, parts: Any) -> None:
    """In every transfer, every engine gets all tensors of the learner with the same bits, names, shapes and dtypes."""
    sent = joined(parts)
    assert sent is not None
    for found in _carried(subject, parts):
        if not isinstance(found, Weights):
            raise Violated("form", "Weights, from offer() or receive()", f"{type(found).__name__} {found!r}"[:200])
        if found.version != sent.version or dict(found.dtypes) != dict(sent.dtypes):
            raise Violated("form", f"version {sent.version}, {sent.dtypes}", f"{found.version}, {found.dtypes}")
        shapes = {name: array.shape for name, array in found.tensors.items()}
        if shapes != {name: array.shape for name, array in sent.tensors.items()}:
            raise Violated("form", "the same names and shapes", repr(shapes)[:200])
        if checksums(found) != checksums(sent):
            raise Violated("value", repr(checksums(sent))[:200], repr(checksums(found))[:200])
