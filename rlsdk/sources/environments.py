"""Tasks for environments: of several environments with a seed per group, or only seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

import attrs
import numpy as np

import rlsdk
from rlsdk.components import Use
from rlsdk.contracts import TaskList
from rlsdk.errors import OptionError
from rlsdk.plugins import faults_of
from rlsdk.types import Message, Task

NAME = "tasks 'environments'"
ROUNDS = {"train": 10_000, "test": 1}
_SEEDS = 2**30
"""Training seeds are below this number, test seeds start at it."""
_TEST = 1_000_000_000
"""Training seeds are below this number, test seeds start at it."""


@rlsdk.tasks("environments")
@attrs.frozen(kw_only=True)
class Environments:
    """Tasks for several environments: the rollouts of a task (`group_size`) share one environment and one seed.

    Each round has `groups` tasks, divided among tags by `partition` and spread evenly over the round. Training keeps
    this order, so that with `batch_size` equal to `groups`, each step has exactly the partition, with new seeds.
    Training and test seeds are disjoint, and every evaluation plays the same levels.

    Use the workflow `environment` without its option `environment`, so that it plays the task's environment. With
    several tags, metrics are also logged per tag, as `source/TAG/…` and `eval/TAG/…`.

    Attributes:
        environments: Tag -> environment with its options.
        groups: Number of tasks in a round.
        tags: Tags of the environments to play; by default, all.
        partition: Number of tasks per tag in a round, in the order of the tags; by default, equal shares.
        split: `train`, or `test`.
        rounds: Number of rounds; by default, 10,000 for `train` and 1 for `test`.
        seed: Random seed of the levels.
        prompt: Text before the first observation.
        system: System message of a chat.
        form: Messages for a chat template, or text for a model without one.
    """

    environments: Mapping[str, Use]
    groups: int
    tags: tuple[str, ...] | None = None
    partition: tuple[int, ...] | None = None
    split: Literal["train", "test"] = "train"
    rounds: int | None = None
    seed: int = 0
    prompt: str = ""
    system: str | None = None
    form: Literal["chat", "text"] = "chat"
    _tasks: TaskList = attrs.field(init=False, eq=False, repr=False)
    ordered: ClassVar[bool] = True

    def __attrs_post_init__(self) -> None:
        faults = self._own_faults()
        for tag, use in self.environments.items():
            faults += faults_of("environment", use, f"environments.{tag}")
        if faults:
            raise OptionError(NAME, faults)
        rounds = ROUNDS[self.split] if self.rounds is None else self.rounds
        before = (Message("system", self.system),) if self.system else ()
        prompt = self.prompt if self.form == "text" else (*before, Message("user", self.prompt))
        maker = _EnvironmentMaker(
            split=self.split,
            environments={tag: {"use": use.name, **use.options} for tag, use in self.environments.items()},
            tags=self._tags,
            round=spread(self._partition),
            first=int.from_bytes(hashlib.blake2b(f"{self.seed}".encode(), digest_size=4).digest(), "big") % _SEEDS,
            prompt=prompt,
        )
        object.__setattr__(self, "_tasks", TaskList(maker, self.groups * rounds))

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]

    @property
    def _tags(self) -> tuple[str, ...]:
        return tuple(self.environments) if self.tags is None else self.tags

    @property
    def _partition(self) -> tuple[int, ...]:
        if self.partition is not None:
            return self.partition
        share, more = divmod(self.groups, len(self._tags))
        return tuple(share + (i < more) for i in range(len(self._tags)))

    def _own_faults(self) -> list[tuple[str, str]]:
        tags, known = self._tags, ", ".join(self.environments)
        if not tags:
            return [("tags" if self.environments else "environments", "expected at least one; got none")]
        unknown = [tag for tag in tags if tag not in self.environments]
        partition = self._partition
        rules = [
            ("tags", f"{', '.join(unknown)} is not among environments: {known}", not unknown),
            ("tags", f"each once; got {list(tags)}", len(set(tags)) == len(tags)),
            ("groups", f"at least one for each of {len(tags)} tags; got {self.groups}", self.groups >= len(tags)),
            ("rounds", f"at least 1; got {self.rounds}", self.rounds is None or self.rounds > 0),
            (
                "partition",
                f"a number for each of {len(tags)} tags ({', '.join(tags)}), at least 1, which add up to groups="
                f"{self.groups}; got {list(partition)}, together {sum(partition)}",
                self.partition is None
                or (len(partition) == len(tags) and min(partition) > 0 and sum(partition) == self.groups),
            ),
            (
                "system",
                "form text has no system message; write it into the prompt",
                self.form == "chat" or not self.system,
            ),
        ]
        return [(option, text) for option, text, kept in rules if not kept]


@attrs.frozen(kw_only=True, eq=False)
class _EnvironmentMaker:
    """Creates the task at an index.

    Attributes:
        round: int, index of the tag of each task in a round.
    """

    split: str
    environments: Mapping[str, Mapping[str, object]]
    tags: tuple[str, ...]
    round: np.ndarray
    first: int
    prompt: str | tuple[Message, ...]

    def __call__(self, index: int) -> Task:
        """Create a task."""
        tag = self.tags[self.round[index % len(self.round)]]
        return Task(
            id=f"{tag}/{self.split}/{index}",
            prompt=self.prompt,
            metadata={
                "environment": dict(self.environments[tag]),
                "seed": (self.first + index) % _SEEDS + (_SEEDS if self.split == "test" else 0),
                "tag": tag,
            },
            source=tag,
        )


def spread(counts: Sequence[int]) -> np.ndarray:
    """Return each index of `counts` that many times, spread evenly: an integer array `[sum(counts)]`."""
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    of = np.repeat(np.arange(len(counts), dtype=np.min_scalar_type(len(counts))), counts)
    return np.asarray(of[np.lexsort((of, places))])


@rlsdk.tasks("seeds")
def seeds(
    *,
    split: Literal["train", "test"] = "train",
    size: int = 100_000,
    start: int = 0,
    prompt: str = "",
    system: str | None = None,
    form: Literal["chat", "text"] = "chat",
) -> TaskList:
    """One task per seed, all with the same prompt, followed by the environment's first observation.

    The seed is `seed` in a task's metadata. Training and test seeds are disjoint.

    Args:
        split: `train`, or `test`.
        size: Number of tasks.
        start: First seed; test seeds are a billion higher.
        prompt: Text before the first observation.
        system: System message of a chat.
        form: Messages for a chat template, or text for a model without one.

    Raises:
        OptionError: A number is out of range.
    """
    faults = [
        (name, f"expected at least {least}, got {value}")
        for name, value, least in (("size", size, 1), ("start", start, 0))
        if value < least
    ]
    if start + size > _TEST:
        faults.append(
            ("size", f"expected start + size of at most {_TEST}, where the seeds of tests begin; got {start + size}")
        )
    if form == "text" and system:
        faults.append(("system", "form text has no system message; write it into the prompt"))
    if faults:
        raise OptionError("tasks 'seeds'", faults)
    before = (Message("system", system),) if system else ()
    whole = prompt if form == "text" else (*before, Message("user", prompt))
    first = start + (_TEST if split == "test" else 0)
    return TaskList(partial(_task, first, whole), size)


def _task(first: int, prompt: str | tuple[Message, ...], index: int) -> Task:
    return Task(id=f"seed-{first + index}", prompt=prompt, metadata={"seed": first + index}, source="seeds")
