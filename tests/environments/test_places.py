"""Slots for environments in the workers: given in order, never lost, and never waited for in a circle."""

from __future__ import annotations

import asyncio

import pytest

from rlsdk.environments.pool import EnvPlaces


async def test_rollouts_that_each_wait_for_a_second_environment_do_not_wait_for_ever(caplog) -> None:
    places, free, most = EnvPlaces(3), [3], [3]

    async def rollout() -> None:
        owner = object()
        for _ in range(2):
            await places.acquire(owner)
            free[0] -= 1
            most[0] = min(most[0], free[0])
            await asyncio.sleep(0)
        for _ in range(2):
            free[0] += 1
            places.release(owner)

    async with asyncio.timeout(5):
        await asyncio.gather(*(rollout() for _ in range(12)))
    assert free == [3]
    assert most == [-1]  # no more beyond the limit than ends it
    [warning] = caplog.messages
    assert "all 3 slots (workers × per_worker) are held by rollouts that wait for another environment" in warning


async def test_a_place_is_not_lost_with_who_waited_for_it(caplog) -> None:
    places, first, second, third = EnvPlaces(1), object(), object(), object()
    await places.acquire(first)
    given_up, waiting = (asyncio.ensure_future(places.acquire(each)) for each in (second, third))
    await asyncio.sleep(0)
    given_up.cancel()
    places.release(first)
    await asyncio.wait_for(waiting, 5)
    late = asyncio.ensure_future(places.acquire(first))
    await asyncio.sleep(0)
    places.release(third)
    late.cancel()  # it has the place, but has not been told
    with pytest.raises(asyncio.CancelledError):
        await late
    await asyncio.wait_for(places.acquire(second), 5)
    assert caplog.messages == []
