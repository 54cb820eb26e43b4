"""Record actors that died and were replaced, and build the message for one that died too often."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from rlsdk.cluster.actors import last_words, reason


class ActorFailures:
    """Deaths of actors of one role.

    Attributes:
        sentences: A sentence for each death: which actor, when and why.
    """

    def __init__(self, role: str, most: int, logs: Path | None = None) -> None:
        """Create a record without failures.

        Args:
            role: Role of the actors, such as `rollout worker`, whose logs are `rollout-worker-RANK.log`.
            most: Maximum number of deaths per rank (`placement.engine_restarts`).
            logs: Folder of their logs; None if they have none.
        """
        self._role, self._most, self._logs = role, most, logs
        self._of: defaultdict[int, list[str]] = defaultdict(list)
        self.sentences: list[str] = []

    def add(self, rank: int, step: int, error: BaseException) -> str:
        """Add a death, and return its sentence.

        Args:
            rank: Rank of the actor.
            step: Step of the training.
            error: Error of a call to the actor.
        """
        words = last_words(self._logs / self._log(rank)) if self._logs is not None else ""
        said = f"step {step}: {self._role} {rank}: {reason(error)}" + (
            f"; its log ends with {words!r}" if words else ""
        )
        for failures in (self.sentences, self._of[rank]):
            failures.append(said)
        return said

    def too_many(self, rank: int) -> str:
        """Return the message for an actor that died too often; empty if it has not."""
        failures = self._of[rank]
        if len(failures) <= self._most:
            return ""
        every = "\n".join(f"  {said}" for said in failures)
        return (
            f"{self._role} {rank} died {len(failures)} times; a run survives "
            f"placement.engine_restarts={self._most}. Its log is logs/{self._log(rank)}:\n{every}"
        )

    def forget(self, rank: int) -> None:
        """Reset the deaths of a rank, since a new actor takes its place."""
        self._of[rank].clear()

    def _log(self, rank: int) -> str:
        return f"{self._role.replace(' ', '-')}-{rank}.log"
