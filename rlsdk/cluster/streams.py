"""Values that an actor yields, one after another, each unpickled once.

While Ray waits for the next value of a stream it fetches, and so unpickles, the value, and once more when the value is
awaited (ray 2.60, `ObjectRefGenerator._next_async`). Bytes are only copied, so actors yield bytes.
"""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from typing import Any

import cloudpickle


def pickled(value: Any) -> bytes:
    """Pickle a value that an actor yields; `streamed` unpickles it."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - an object of a class that only cloudpickle pickles, which takes half as long again
        data: bytes = cloudpickle.dumps(value)
        return data


async def streamed(method: Any, *arguments: Any) -> AsyncIterator[Any]:
    """Call a method of an actor that yields values made by `pickled`, and yield them as they arrive.

    Args:
        method: Bound method of an actor's handle. An actor in this process may yield its values as they are.
        *arguments: Arguments of the call.

    Raises:
        RayError: The actor has died.
        Exception: The method raised.
    """
    async for reference in method.options(num_returns="streaming").remote(*arguments):
        value = await reference
        yield pickle.loads(value) if isinstance(value, bytes) else value  # noqa: S301 - from an actor of the run
