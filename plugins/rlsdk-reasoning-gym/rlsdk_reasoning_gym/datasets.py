"""Datasets of reasoning-gym: check their configurations and create their entries."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import io
import json
import os
import random
import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal

import attrs
import numpy as np

from rlsdk.errors import ValueFault
from rlsdk.kit import nearest

Split = Literal["train", "test"]
SEEDS = 2**32
"""Upper limit of seeds, since some datasets seed numpy, which does not accept larger ones."""
OWN = ("seed", "size")
"""Fields of every configuration that the task source sets."""
EXCLUDED = frozenset({"composite"})
"""Excluded datasets; the task source creates mixtures instead."""
BY_HASH = frozenset({"isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder"})
"""Datasets that draw from sets of strings, whose order differs between processes unless PYTHONHASHSEED is a number."""
BY_TUPLES = frozenset({"arc_agi", "rearc"})
"""Datasets whose scorers compare with tuples, which JSON lacks."""


def names() -> list[str]:
    """Return the names of all datasets, sorted."""
    import reasoning_gym.factory

    return sorted(set(reasoning_gym.factory.DATASETS) - EXCLUDED)


def first_seed(split: Split, seed: int, size: int) -> int:
    """Return the seed of a dataset's entry 0; entry `i` has `seed + i`, and each split uses one half of all seeds.

    Args:
        split: `train` for the lower half, `test` for the upper half.
        seed: Random seed of the task source, from which the start within the half is derived.
        size: Maximum number of entries used.
    """
    half = SEEDS // 2
    digest = hashlib.blake2b(f"{split}/{seed}".encode(), digest_size=8).digest()
    start = 0 if split == "train" else half
    return start + int.from_bytes(digest, "big") % (half - size)


@attrs.frozen
class Spec:
    """Hashable specification of a dataset.

    Attributes:
        name: Name in reasoning-gym's registry.
        config: Fields of its configuration other than seed and size, as JSON.
        seed: Seed of entry 0.
        size: Number of entries.
    """

    name: str
    config: str = "{}"
    seed: int = 0
    size: int = 1

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any], seed: int = 0, size: int = 1) -> Spec:
        """Create a specification from a configuration mapping."""
        return cls(name, json.dumps(config, sort_keys=True), seed, size)

    @property
    def fields(self) -> dict[str, Any]:
        """The configuration."""
        found: dict[str, Any] = json.loads(self.config)
        return found


def fault(name: str, config: Mapping[str, Any]) -> str:
    """Return what is wrong with a dataset's name or configuration, or an empty text, without creating the dataset."""
    import reasoning_gym.factory

    known = names()
    if name not in known:
        near = nearest(name, known)
        guess = f"did you mean {near!r}?" if near else f"there are {len(known)}, such as {', '.join(known[:5])}"
        return f"unknown dataset {name!r}; {guess}"
    config_class = reasoning_gym.factory.DATASETS[name][1]
    fields = [field.name for field in dataclasses.fields(config_class) if field.init and field.name not in OWN]
    for key in config:
        if key in OWN:
            return f"{name}: {key} is set by the task source; use the source's option"
        if key not in fields:
            near = nearest(key, fields)
            guess = f"did you mean {near!r}? " if near else ""
            return f"{name} has no option {key!r}; {guess}it has: {', '.join(fields) or 'none'}"
    try:
        made = config_class(**_tuples(config_class, config), seed=0, size=1)
        if hasattr(made, "validate"):
            made.validate()
        json.dumps(dict(config))
    except Exception as error:  # noqa: BLE001 - whatever the library raises says what is wrong with the configuration
        return f"{name}: {error or type(error).__name__}"
    return ""


def irreproducible(name: str) -> str:
    """Return why another process would create different tasks from the same seed; empty if it would not."""
    if name not in BY_HASH or os.environ.get("PYTHONHASHSEED", "random").isdigit():
        return ""
    return (
        f"{name} draws from sets of strings, whose order differs between processes, so its tasks also differ; set "
        "PYTHONHASHSEED=0 in the environment"
    )


def _tuples(config_class: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert lists to tuples where the defaults are tuples, since YAML and JSON have only lists."""
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    return {
        key: tuple(value) if isinstance(value, list) and isinstance(defaults.get(key), tuple) else value
        for key, value in copy.deepcopy(dict(config)).items()
    }


@lru_cache(maxsize=256)
def dataset(spec: Spec) -> Any:
    """Return a dataset; the result is cached, since some datasets read large files.

    Raises:
        ValueFault: The dataset cannot be created.
    """
    import reasoning_gym.factory

    problem = fault(spec.name, spec.fields)
    if problem:
        raise ValueFault(problem)
    config_class = reasoning_gym.factory.DATASETS[spec.name][1]
    with undisturbed(f"{spec}"):
        return reasoning_gym.create_dataset(
            spec.name, **_tuples(config_class, spec.fields), seed=spec.seed, size=spec.size
        )


def entry(spec: Spec, index: int) -> dict[str, Any]:
    """Return a copy of the entry at an index, which is the same each time and in each process.

    Raises:
        ValueFault: The dataset cannot be created.
    """
    made = dataset(spec)
    with undisturbed(f"{spec}/{index}"):
        found: dict[str, Any] = copy.deepcopy(made[index])
    return found


@contextlib.contextmanager
def undisturbed(seed: str) -> Iterator[None]:
    """Context manager: isolate library code by seeding the process-wide random generators and silencing output.

    A few datasets seed numpy's generator or draw from Python's, and some scorers print what is wrong with an answer.

    Args:
        seed: Seed of both generators in the block; afterwards their previous states are restored.
    """
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(random.getrandbits(32))
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
