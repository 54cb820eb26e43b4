"""Task source of environment levels."""

from __future__ import annotations

import hashlib
from random import Random
from typing import Any, Literal

import attrs

import rlsdk
from rlsdk import Task, Use
from rlsdk.errors import DataError, OptionError
from rlsdk.kit import TaskList
from rlsdk.types import Message, Observation
from rlsdk_gridworlds.chance import pick

SIZES = {"train": 10_000, "test": 200}
_MAX_DRAWS = 2_000
_TEST_SHARE = 10
"""One in ten levels is a test level."""


@rlsdk.tasks("levels")
def levels(
    *,
    environment: Use = Use("gridworlds/frozen_lake"),  # noqa: B008 - frozen
    split: Literal["train", "test"] = "train",
    size: int | None = None,
    seed: int = 0,
    chat: bool = False,
    demonstrations: float | None = None,
) -> TaskList:
    """Levels of an environment; no test level occurs in training.

    A hash of the first observation assigns a level to training or test, so that the splits share neither seeds nor
    levels, whatever their sizes and seeds. Levels are drawn independently: if few are possible, they repeat within a
    split.

    Args:
        environment: Environment with its options, such as `{use: gridworlds/sokoban, num_boxes: 2}`.
        split: `train`, or `test` (a tenth of all levels).
        size: Number of tasks; by default, 10,000 for training and 200 for test.
        seed: Random seed of the levels.
        chat: Use user messages as prompts instead of plain text.
        demonstrations: Add an episode to imitate to each task, as `metadata["demonstration"]`; this share of its
            actions comes from the environment's `expert()`, the rest is drawn from its `answers()`.

    Returns:
        Tasks whose prompt is the first observation. `reset` returns this observation for `metadata["seed"]`, and
        `metadata["environment"]` is the environment as in a config.

    Raises:
        OptionError: An option is wrong.
        DataError: The first observation does not depend on the seed, so a split is empty.
    """
    size = SIZES[split] if size is None else size
    if size < 1:
        raise OptionError("tasks 'levels'", [("size", f"expected at least 1, got {size}")])
    if not isinstance(environment.name, str):
        raise OptionError("tasks 'levels'", [("environment", "expected the name of an environment")])
    if demonstrations is not None and not 0 <= demonstrations <= 1:
        raise OptionError("tasks 'levels'", [("demonstrations", f"expected a share from 0 to 1, got {demonstrations}")])
    made = rlsdk.load("environment", environment.name, **environment.options)
    maker = _Maker(environment.name, dict(environment.options), made, split, seed, chat, demonstrations)
    maker(0)  # an environment without levels fails here, not in the middle of a run
    return TaskList(maker, size)


@attrs.frozen
class _Maker:
    """Creates the task at an index, with random generators seeded by seed, split and index."""

    name: str
    options: dict[str, Any]
    environment: Any
    split: Literal["train", "test"]
    seed: int
    chat: bool
    demonstrations: float | None

    def __call__(self, index: int) -> Task:
        """Create a task."""
        key = f"levels/{self.seed}/{self.split}/{index}"
        level, text = self._level(Random(key))
        return Task(
            id=f"{self.name}/{self.split}/{index}",
            prompt=(Message("user", text),) if self.chat else text,
            metadata={
                "seed": level,
                "environment": {"use": self.name, **self.options},
                "split": self.split,
                "index": index,
                **self._demonstration(level, Random(f"{key}/demonstration")),
            },
            source=self.name,
        )

    def _demonstration(self, level: int, random: Random) -> dict[str, list[dict[str, str]]]:
        """Return a whole episode, as in the workflow `environment`, of an expert who sometimes errs."""
        if self.demonstrations is None:
            return {}
        environment = self.environment
        if not hasattr(environment, "expert") or not hasattr(environment, "answers"):
            raise DataError(
                f"tasks 'levels': environment {self.name!r} has no expert() and answers() to demonstrate it"
            )
        environment.reset(level)
        episode: list[dict[str, str]] = []
        while True:
            errs = random.random() >= self.demonstrations
            text = pick(random, environment.answers()) if errs else environment.expert()
            episode.append({"role": "assistant", "content": text})
            step = environment.step(text)
            if step.terminated or step.truncated:
                return {"demonstration": episode}
            episode.append({"role": "user", "content": step.observation.content})

    def _level(self, random: Random) -> tuple[int, str]:
        """Return a seed whose level is in the split, and its first observation."""
        for _ in range(_MAX_DRAWS):
            level = int(random.random() * 2**31)
            shown = self.environment.reset(level)
            if is_test(shown) == (self.split == "test"):
                return level, shown.text
        raise DataError(
            f"tasks 'levels': none of {_MAX_DRAWS:,} seeds of environment {self.name!r} with options {self.options} "
            f"gave a level for split {self.split!r}; its first observation must depend on the seed"
        )


def is_test(shown: Observation) -> bool:
    """Return True for a test level: one in ten, by a hash of its state, or of its text if it has no state."""
    key = (shown.state or shown.text).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.md5(key, usedforsecurity=False).digest()[:8]) % _TEST_SHARE == 0
