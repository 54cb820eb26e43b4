"""All engines of a run: calls that name the one that fails, seeds, new weights and the comparison with the learner."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlsdk.engines.actor import STEP
from rlsdk.errors import CanaryError, EngineError
from rlsdk.learners.group import LearnerGroup
from rlsdk.trainer.canary import Canary, describe_checksums


class Engines:
    """The engines' actors, called together.

    Attributes:
        step: The step that is worked on, for messages.
    """

    def __init__(self, actors: Sequence[Any], *, shared: bool) -> None:
        """Make one.

        Args:
            actors: Handles, by rank.
            shared: Whether they sleep while the learner works, on the device of both.
        """
        self._actors = actors
        self.shared = shared
        self.step = 0

    async def call(self, rank: int, method: str, *arguments: Any) -> Any:
        """Call an engine.

        Raises:
            EngineError: It failed; the message names it and the step.
        """
        try:
            return await getattr(self._actors[rank], method).remote(*arguments)
        except Exception as error:
            cause = getattr(error, "cause", None) or error
            said = f"{type(cause).__name__}: {cause}"
            raise EngineError(f"step {self.step}: engine {rank} failed in {method}: {said}") from error

    async def all(self, method: str, *arguments: Any) -> list[Any]:
        """Call all engines; their answers by rank.

        Raises:
            EngineError: One failed.
        """
        return list(await asyncio.gather(*(self.call(rank, method, *arguments) for rank in range(len(self._actors)))))

    async def reseed(self, seed: int, step: int) -> None:
        """The engines' own generators: a step's samples depend on the seed and the step, not on what came before.

        Args:
            seed: Of the run.
            step: Steps that will be done; 0: of evaluations.
        """
        seeds = _seeds(seed, step, len(self._actors))
        await asyncio.gather(*(self.call(rank, "reseed", own) for rank, own in enumerate(seeds)))

    async def publish(self, learner: LearnerGroup, version: int, canary: Canary, *, updated: bool) -> float:
        """Send the learner's weights and compare; returns the canary's gap in nats, 0 where there is no engine.

        Args:
            learner: Whose weights.
            version: Steps done.
            canary: Fixed tokens, and what was seen of them before.
            updated: Whether the weights must have changed since they were last sent.

        Raises:
            CanaryError: Engine and learner disagree.
            EngineError: An engine failed.
        """
        if not self._actors:
            return 0.0
        weights = await asyncio.to_thread(learner.weights, version)
        if self.shared:
            await self.all("wake")
        ids = canary.token_ids
        loads, forward = self.all("load_weights", weights, ids), asyncio.to_thread(learner.canary, ids)
        seen, own = await asyncio.gather(loads, forward)
        try:
            return canary.check(version, own, seen, updated=updated)
        except CanaryError as error:
            received = await self._actors[0].checksums.remote(weights)
            sent = await asyncio.to_thread(learner.checksums)
            raise CanaryError(f"{error}\n{describe_checksums(sent, received)}") from error

    async def clock(self) -> dict[str, float]:
        """Since the start: seconds, of the slowest and in the mean; tokens of all; decode steps, with sums over all."""
        clocks: list[Mapping[str, float]] = await self.all("clock")
        return {
            "engine": max((c["step_seconds"] for c in clocks), default=0.0),
            "engines": sum(c["step_seconds"] for c in clocks) / max(len(clocks), 1),
            "steps": max((c["steps"] for c in clocks), default=0.0),
            **{f"all_{name}": sum(c[name] for c in clocks) for name in STEP},
            "tokens": float(sum(c["tokens"] for c in clocks)),
        }


def _seeds(seed: int, step: int, engines: int) -> list[int]:
    """Of the engines' own generators in a step; 0: in evaluations."""
    root = np.random.SeedSequence([seed, step])
    return [int(s.generate_state(1)[0] >> 1) for s in root.spawn(engines)]
