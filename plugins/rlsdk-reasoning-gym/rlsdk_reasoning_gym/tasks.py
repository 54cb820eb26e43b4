"""Tasks from a dataset of reasoning-gym, or from a mixture of several."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import accumulate
from random import Random
from typing import Any, Literal

import attrs

import rlsdk
from rlsdk.errors import DataError, OptionError
from rlsdk.kit import TaskList, Wording, structure
from rlsdk.types import Task
from rlsdk_reasoning_gym import datasets as gym
from rlsdk_reasoning_gym.datasets import Spec, Split
from rlsdk_reasoning_gym.plain import plain

SIZES: Mapping[Split, int] = {"train": 10_000, "test": 500}
INSTRUCTION = "Think first. Then give your final answer, and nothing else, between <answer> and </answer>."
MAX_DRAWS = 500
"""Maximum number of draws until a question belongs to the split."""
_TEST_SHARE = 10
"""With `hold_out: questions`, one in ten questions is a test question."""
_WHERE = "tasks 'reasoning_gym/tasks'"


@attrs.frozen(kw_only=True)
class Share:
    """Share of a dataset in a mixture.

    Attributes:
        weight: Frequency relative to the other datasets.
        config: Fields of the dataset's own configuration.
    """

    weight: float = 1.0
    config: Mapping[str, Any] = attrs.field(factory=dict)


@rlsdk.tasks("tasks")
def tasks(
    *,
    datasets: str | Mapping[str, Any],
    config: Mapping[str, Any] = {},
    split: Split = "train",
    size: int | None = None,
    seed: int = 0,
    hold_out: Literal["seeds", "questions"] = "seeds",
    instruction: str = INSTRUCTION,
    chat: bool = False,
    system: str | None = None,
    prefill: str | None = None,
) -> TaskList:
    """Tasks of reasoning-gym's datasets, created on demand; the two splits draw from different halves of all seeds.

    The task at an index depends only on seed, split and index, in every process. Its source is the dataset's name, and
    its metadata contain the dataset's specification, which `reasoning_gym/score` uses.

    Args:
        datasets: Name of a dataset, or names of several with their shares: `{chain_sum: {weight: 2, config:
            {max_terms: 4}}, countdown: {}}`.
        config: Fields of the dataset's configuration, if there is only one dataset; others keep their defaults.
        split: `train` or `test`.
        size: Number of tasks; by default, 10,000 for training and 500 for test.
        seed: Random seed of the tasks.
        hold_out: `seeds`: the splits use different seeds, but if a dataset has few possible questions, some may occur
            in both. `questions`: a hash of the question determines its split, so that no test question is trained on;
            a test task takes about ten draws.
        instruction: Text after each question, on a separate line; empty for none.
        chat: Use a user message as the prompt instead of plain text.
        system: System message at the start of every prompt.
        prefill: Beginning of every answer, which is not trained on.

    Returns:
        Tasks with the dataset's answers, which are text.

    Raises:
        OptionError: A dataset is unknown, or its configuration is wrong.
        DataError: No question of the split was found.
    """
    shares, faults = _shares(datasets, config)
    size = SIZES[split] if size is None else size
    limit = gym.SEEDS // 2 // MAX_DRAWS
    if not 1 <= size < limit:
        faults.append(("size", f"expected 1 to {limit - 1:,}, got {size}"))
    if faults:
        raise OptionError(_WHERE, faults)
    maker = _Maker(
        shares=tuple((name, share.weight, json.dumps(dict(share.config), sort_keys=True)) for name, share in shares),
        split=split,
        seed=seed,
        size=size,
        by_question=hold_out == "questions",
        instruction=instruction,
        wording=Wording(chat=chat, system=system, prefill=prefill),
    )
    maker.check()
    return TaskList(maker, size)


def _shares(
    datasets: str | Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[list[tuple[str, Share]], list[tuple[str, str]]]:
    """Return the name and share of each dataset, and what is wrong with them."""
    if isinstance(datasets, str):
        problem = gym.fault(datasets, config)
        unknown = problem.startswith("unknown dataset")
        hashed = gym.irreproducible(datasets)
        faults = [("datasets" if unknown else "config", problem)] if problem else []
        return [(datasets, Share(config=config))], [*faults, *([("datasets", hashed)] if hashed else [])]
    faults = [("config", "belongs to one dataset; give each its own, {NAME: {config: …}}")] if config else []
    if not datasets:
        faults.append(("datasets", "names no dataset"))
    shares = []
    for name, given in datasets.items():
        share, found = structure({} if given is None else given, Share)
        path = f"datasets.{name}"
        if not found:
            problems = (gym.fault(name, share.config), gym.irreproducible(name))
            found = [("", problem) for problem in problems if problem]
            found += [] if share.weight > 0 else [(".weight", f"expected more than 0, got {share.weight:g}")]
            shares.append((name, share))
        faults += [(path + below, text) for below, text in found]
    return shares, faults


@attrs.frozen(kw_only=True)
class _Maker:
    """Creates the task at an index."""

    shares: tuple[tuple[str, float, str], ...]
    split: Split
    seed: int
    size: int
    by_question: bool
    instruction: str
    wording: Wording

    def check(self) -> None:
        """Create the first task of each dataset, so that a failure does not occur in the middle of a run.

        Raises:
            OptionError: A dataset cannot create a task.
        """
        faults = []
        for name, _, config in self.shares:
            try:
                self._task(name, config, 0)
            except DataError:
                raise
            except Exception as error:  # noqa: BLE001 - the library's exception says why
                faults.append(("datasets", f"{name} cannot create a task: {type(error).__name__}: {error}"))
        if faults:
            raise OptionError(_WHERE, faults)

    def __call__(self, index: int) -> Task:
        """Create a task."""
        name, config = self._chosen(index)
        return self._task(name, config, index)

    def _chosen(self, index: int) -> tuple[str, str]:
        if len(self.shares) > 1:
            point = Random(f"{self.seed}/{self.split}/{index}").random()
            reached = list(accumulate(weight for _, weight, _ in self.shares))
            at = next((i for i, end in enumerate(reached) if point * reached[-1] < end), -1)
        else:
            at = 0
        name, _, config = self.shares[at]
        return name, config

    def _task(self, name: str, config: str, index: int) -> Task:
        draws = MAX_DRAWS if self.by_question else 1
        spec = Spec(name, config, gym.first_seed(self.split, self.seed, self.size * draws), self.size * draws)
        for draw in range(draws):
            place = index + draw * self.size
            entry = gym.entry(spec, place)
            if not self.by_question or is_test(entry["question"]) == (self.split == "test"):
                return self._of(spec, place, index, entry)
        raise DataError(
            f"{_WHERE}: {draws} draws of {name} found no question for {self.split}: it has too few; use hold_out: seeds"
        )

    def _of(self, spec: Spec, place: int, index: int, entry: Mapping[str, Any]) -> Task:
        metadata, exact = plain(entry["metadata"])
        question = f"{entry['question']}\n\n{self.instruction}" if self.instruction else entry["question"]
        origin = {"config": spec.fields, "seed": spec.seed, "size": spec.size, "index": place}
        origin["exact"] = exact and spec.name not in gym.BY_TUPLES
        return Task(
            id=f"{spec.name}/{self.split}/{index}",
            prompt=self.wording.put(question),
            answer=entry["answer"],
            metadata={"dataset": spec.name, "question": entry["question"], "made": origin, "metadata": metadata},
            source=spec.name,
        )


def is_test(question: str) -> bool:
    """Return True for a test question: one in ten, by a hash."""
    digest = hashlib.blake2b(question.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _TEST_SHARE == 0
