"""Values that an actor yields."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from rlsdk.cluster.actors import pickled, streamed


class Counted:
    """Notes in this process that it was unpickled."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return (arrive, (self.number,))


def arrive(number: int) -> Counted:
    sys.__dict__["arrived"].append(number)  # this function is pickled with its globals, but not with modules
    return Counted(number)


class Yields:
    async def counted(self, count: int) -> AsyncIterator[bytes]:
        for number in range(count):
            await asyncio.sleep(0.01)  # the caller waits for each
            yield pickled(Counted(number))

    async def functions(self, count: int) -> AsyncIterator[bytes]:
        for number in range(count):
            yield pickled(lambda number=number: number)

    async def fails(self) -> AsyncIterator[bytes]:
        yield pickled("one")
        raise LookupError("there is nothing more")


@pytest.fixture
def actor(cluster: None) -> Iterator[Any]:
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    handle = ray.remote(Yields).options(num_cpus=0).remote()
    yield handle
    ray.kill(handle)
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.stack
def test_values_arrive_in_order_and_are_unpickled_once(actor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[int] = []
    monkeypatch.setattr(sys, "arrived", arrived, raising=False)

    async def numbers() -> list[int]:
        return [value.number async for value in streamed(actor.counted, 5)]

    assert asyncio.run(numbers()) == [*range(5)]
    assert arrived == [*range(5)]


@pytest.mark.stack
def test_values_that_only_cloudpickle_pickles_arrive(actor: Any) -> None:
    async def numbers() -> list[int]:
        return [function() async for function in streamed(actor.functions, 3)]

    assert asyncio.run(numbers()) == [0, 1, 2]


@pytest.mark.stack
def test_an_error_of_the_actor_is_raised_after_its_values(actor: Any) -> None:
    arrived: list[str] = []

    async def listen() -> None:
        async for value in streamed(actor.fails):
            arrived.append(value)  # noqa: PERF401 - the values before the error

    with pytest.raises(LookupError, match="there is nothing more"):
        asyncio.run(listen())
    assert arrived == ["one"]
