"""Rewards that compare rollouts, that take lists, and that return something other than a score."""

import asyncio
import time

import attrs

import rlsdk

CALLS = "calls"
"""Metadata of a task: the file that takes a line for each call, the responses that it got."""


def _note(rollouts) -> None:
    with open(rollouts[0].task.metadata[CALLS], "a", encoding="utf-8") as file:
        file.write(",".join(rollout.response for rollout in rollouts) + "\n")


def _ranks(rollouts) -> list[float]:
    order = sorted(range(len(rollouts)), key=lambda i: -len(rollouts[i].response))
    return [order.index(i) / max(len(rollouts) - 1, 1) for i in range(len(rollouts))]


@rlsdk.reward("rank", batch="group")
def rank(rollouts) -> list[float]:
    """From 0 for the longest answer to 1 for the shortest."""
    _note(rollouts)
    return _ranks(rollouts)


@rlsdk.reward("rank_here", batch="group")
async def rank_here(rollouts) -> list[float]:
    """The same, awaited in the driver."""
    _note(rollouts)
    await asyncio.sleep(0)
    return _ranks(rollouts)


@rlsdk.reward("picky", batch="group")
def picky(rollouts) -> list[float]:
    """Fails where one response asks for it."""
    for rollout in rollouts:
        if rollout.response == "raise":
            raise KeyError("x")
        if rollout.response == "hang":
            time.sleep(600)
    return [1.0] * (len(rollouts) - sum(rollout.response == "few" for rollout in rollouts))


@rlsdk.reward("lengths", batch=True)
def lengths(rollouts) -> list[float]:
    """The length of each."""
    _note(rollouts)
    return [float(len(rollout.response)) for rollout in rollouts]


@rlsdk.reward("tags")
def tags(rollout) -> float:
    """1.0 if the response has a colon."""
    return float(":" in rollout.response)


class _Odd(Exception):
    def __float__(self):
        raise KeyError("no number")

    def __str__(self):
        raise RuntimeError("no text")


@rlsdk.reward("returns")
def returns(rollout):
    """Returns the value that the response names."""
    import numpy as np
    import torch

    if rollout.response == "raises":
        raise _Odd
    return {
        "None": None,
        "odd": _Odd(),
        "position": rlsdk.Score(1.0, token_rewards=[(-1, 1.0)]),
        "tokens": rlsdk.Score(0.3, token_rewards=[(0, np.float32(0.1)), (1, np.float32(0.2))]),
        "tuple": (1.0, 2.0),
        "complex": 1j,
        "text": "1.0",
        "pair": torch.tensor([1.0, 2.0]),
        "tensor": torch.tensor(0.5),
        "one element": torch.tensor([0.5]),
        "float32": np.float32(0.5),
        "bool": np.bool_(True),
    }[rollout.response]


@rlsdk.reward("constant_list", batch=True)
def constant_list(rollouts):
    """One score, however many rollouts there are."""
    return [1.0]


@rlsdk.reward("imports_late")
def imports_late(rollout) -> float:
    """Imports within the function, and takes long."""
    import torch

    time.sleep(600)
    return torch.tensor(1.0)


@rlsdk.reward("imports_declared", imports=("torch",))
def imports_declared(rollout) -> float:
    """The same, declared."""
    import torch

    time.sleep(600)
    return torch.tensor(1.0)


@rlsdk.reward("either", batch=True)
@attrs.frozen(kw_only=True)
class Either:
    """Compares rollouts on request.

    Attributes:
        compare: Whether it compares.
    """

    compare: bool = False

    @property
    def whole_groups(self) -> bool:
        return self.compare

    def __call__(self, rollouts):
        return [float(len(rollouts))] * len(rollouts)


@rlsdk.reward("asks", batch=True)
async def asks(rollouts) -> list[float]:
    """The length of each, from a server that does not answer all requests."""
    _note(rollouts)

    async def ask(rollout) -> float:
        if rollout.response == "raise":
            raise OSError("the server is down")
        return float(len(rollout.response))

    return await asyncio.gather(*map(ask, rollouts))
