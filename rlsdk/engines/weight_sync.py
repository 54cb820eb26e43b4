"""Deliver weights from the learner to all engines at a sync, or to one that starts later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from rlsdk.cluster.actors import cause_of
from rlsdk.contracts import FreesDevice, StreamsToEngines
from rlsdk.contracts.rollouts import WeightSender
from rlsdk.engines.canary import Canary
from rlsdk.errors import CanaryError, TransferError

if TYPE_CHECKING:
    from rlsdk.engines.group import EngineGroup

log = logging.getLogger(__name__)


@attrs.frozen
class LoadedWeights:
    """Weights that engines have loaded.

    Attributes:
        learner: Learner that sent them.
        canary: Check that they passed.
        version: Their version.
        weights: `ObjectRef` of the weights; None if they were streamed.
    """

    learner: WeightSender
    canary: Canary
    version: int
    weights: Any = None


@attrs.frozen
class SyncResult:
    """Outcome of a sync.

    Attributes:
        seen: Rank -> the engine's logprobs of the fixed tokens, float32 `[k - 1]`.
        expected: The learner's logprobs of the fixed tokens.
        weights: `ObjectRef` of the weights; None if they were streamed.
    """

    seen: Mapping[int, np.ndarray]
    expected: np.ndarray
    weights: Any = None


async def deliver(engines: EngineGroup, learner: WeightSender, version: int, ids: np.ndarray, wake: bool) -> SyncResult:
    """Load the learner's weights into all engines.

    A failed stream is not retried; the remaining engines get the weights from Ray's object store. Sleeping engines take
    back the memory of their weights, load them, and take back the rest once the learner has freed what it needed to
    send them.

    Args:
        engines: Engines to call.
        learner: Source of the weights.
        version: Number of completed steps.
        ids: Fixed tokens, int64 `[k]`.
        wake: True if engines are asleep and must be woken.
    """
    canary = None if wake else ids  # an engine without its KV cache cannot compute it
    result, asleep = None, wake
    if isinstance(learner, StreamsToEngines) and learner.streams:
        if asleep:
            await _wake_weights(engines, learner)
            asleep = False
        result = await _stream(engines, learner, version, ids, canary)
    if result is None:
        weights = await asyncio.to_thread(learner.weights, version)
        if asleep:
            await _wake_weights(engines, learner)
        # Engines compute the canary as part of loading, before any other request sees the new weights; the learner
        # computes its own in parallel.
        loads, forward = engines.all("load_weights", weights, canary), asyncio.to_thread(learner.canary, ids)
        seen, expected = await asyncio.gather(loads, forward)
        result = SyncResult(seen, expected, weights)
    if wake:
        await _free_device(learner)
        result = attrs.evolve(result, seen=await engines.all("wake", ids))
    return result


async def _wake_weights(engines: EngineGroup, learner: WeightSender) -> None:
    """Let engines take back the memory of their weights on GPUs that they share with the learner."""
    await _free_device(learner)
    await engines.all("wake_weights")


async def _free_device(learner: WeightSender) -> None:
    if isinstance(learner, FreesDevice):
        await asyncio.to_thread(learner.sleep)


async def _stream(
    engines: EngineGroup, learner: StreamsToEngines, version: int, ids: np.ndarray, canary: np.ndarray | None
) -> SyncResult | None:
    """Stream weights to all engines; None unless all live engines have loaded them."""
    await engines.all("clock")  # detect dead engines first, since the others would wait for them
    ranks = engines.ranks
    if not ranks:
        return None
    stream = await asyncio.to_thread(learner.stream, len(ranks), ids, version)
    places = [{"version": version, "seat": seat} for seat in range(1, len(ranks) + 1)]
    loads = [engines.call(r, "load_weights", stream.offer, canary, **at) for r, at in zip(ranks, places, strict=True)]
    (fault, expected), *answers = await asyncio.gather(asyncio.to_thread(stream.finish), *loads)
    seen = {rank: answer[0] for rank, answer in zip(ranks, answers, strict=True) if answer}
    if fault or any(rank in engines.ranks and rank not in seen for rank in ranks):
        log.warning("the engines get weights of version %d from Ray's object store: %s", version, fault or "no answer")
        return None
    return SyncResult(seen, expected)


async def deliver_late(loaded: LoadedWeights, rank: int, actor: Any, engines: EngineGroup) -> None:
    """Load the other engines' weights into a newly started engine, and compare.

    If no object holds them, another engine sends them while it samples. If none can, the learner sends its current
    weights, which may be newer, once it is idle.

    Raises:
        CanaryError: Engine and learner disagree.
    """
    learner, canary = loaded.learner, loaded.canary
    if loaded.weights is not None or not isinstance(learner, StreamsToEngines):
        canary.join(rank, await actor.load_weights.remote(loaded.weights, canary.token_ids))
        return
    if await _copy(loaded, rank, actor, engines):
        return
    stream = await asyncio.to_thread(learner.stream, 1, canary.token_ids)
    load = actor.load_weights.remote(stream.offer, canary.token_ids, version=stream.version, seat=1)
    (_, expected), seen = await asyncio.gather(asyncio.to_thread(stream.finish), load)
    canary.join(rank, seen, (stream.version, expected))


async def _copy(loaded: LoadedWeights, rank: int, actor: Any, engines: EngineGroup) -> bool:
    """Copy the weights of another engine; False if none could send them."""
    version, ids = loaded.version, loaded.canary.token_ids
    _, layout = await actor.weight_layout.remote()
    if not layout:
        return False
    layouts = await engines.all("weight_layout")
    peer = next((each for each, found in layouts.items() if found == (version, layout)), None)
    offer = () if peer is None else await engines.call(peer, "offer_copy")
    if peer is None or not offer:
        return False
    load = actor.load_weights.remote(*offer, ids, version=version, seat=1, copied=True)
    # Both end before anything else is loaded: if either side dies, the transfer ends the other's part.
    sent, seen = await asyncio.gather(engines.call(peer, "send_copy"), load, return_exceptions=True)
    if isinstance(sent, BaseException):
        raise sent
    try:
        if isinstance(seen, BaseException):
            raise cause_of(seen) if isinstance(cause_of(seen), TransferError) else seen
        loaded.canary.join(rank, seen)
    except (TransferError, CanaryError) as error:
        log.warning("engine %d gets the weights of the learner instead of engine %d's: %s", rank, peer, error)
        return False
    log.info("engine %d has the weights of engine %d", rank, peer)
    return True


async def received_checksums(
    engines: EngineGroup, learner: WeightSender, weights: Any, ids: np.ndarray
) -> dict[str, str]:
    """Return the CRC-32 of each tensor as an engine receives it, which sends a stream again."""
    rank = min(engines.ranks)
    if weights is not None or not isinstance(learner, StreamsToEngines):
        checksums = await engines.call(rank, "checksums", weights)
    else:
        stream = await asyncio.to_thread(learner.stream, 1, ids)
        call = engines.call(rank, "checksums", stream.offer, seat=1)
        _, checksums = await asyncio.gather(asyncio.to_thread(stream.finish), call)
    return dict(*checksums)
