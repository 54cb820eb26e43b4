"""Fingerprints of the models that a run loads, so that a resumed run notices that they have changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlsdk.config import Plan
from rlsdk.contracts import ContinuesAdapter
from rlsdk.preflight import cached_folder

_TEXTS = frozenset({".json", ".jinja", ".model", ".tiktoken", ".txt"})
"""Suffixes of configurations and tokenizers, whose whole content counts."""
_WEIGHTS = frozenset({".bin", ".safetensors"})
"""Suffixes of weights, which are too large to be read as a whole."""
_SAMPLES = 16
"""Parts of a file of weights that are read, spread evenly."""
_SAMPLE = 2**14
"""Bytes of each part."""


def fingerprints(plan: Plan) -> dict[str, dict[str, str]]:
    """Return the fingerprints of the models of a run, by setting; a hub model that is not cached has none.

    Returns:
        Setting -> `weights` and `files` (configuration and tokenizer), each a hash; of a hub model, `revision`: the
        commit in this machine's cache.
    """
    given = {"model.path": plan.model.path}
    if plan.model.tokenizer:
        given["model.tokenizer"] = plan.model.tokenizer
    if plan.needs_reference and plan.config.model.reference:
        given["model.reference"] = plan.reference.path
    if plan.algorithm.critic and plan.config.model.critic:
        given["model.critic"] = plan.critic.path
    found = {}
    for setting, path in given.items():
        if Path(path).is_dir():
            found[setting] = fingerprint(Path(path))
            continue
        with suppress(ValueError):  # not a name of the hub
            if commit := Path(cached_folder(path)).name:
                found[setting] = {"revision": commit}
    return found


def changed_models(plan: Plan, then: Any) -> dict[str, str]:
    """Compare the models of a run with those at a checkpoint.

    Args:
        plan: Checked plan of the resumed run.
        then: `fingerprints` at the checkpoint, as read from its file; None if it is of an earlier version.

    Returns:
        Setting -> what has changed, in words.
    """
    found: dict[str, str] = {}
    whats = {
        "weights": "weights",
        "files": "files of its configuration or tokenizer",
        "revision": "files of the revision from the hub",
    }
    for setting, now in fingerprints(plan).items():
        before = then.get(setting) if isinstance(then, Mapping) else None
        if isinstance(before, Mapping):
            parts = [what for part, what in whats.items() if before.get(part) != now.get(part)]
            found |= {setting: " and ".join(parts)} if parts else {}
    return found


def adapter_notes(plan: Plan) -> Iterator[tuple[str, str]]:
    """Note an adapter to continue that was trained on another model than the plan's, as far as its files tell."""
    learner, given = plan.plugins.resolve(plan.learner), plan.model.path
    base = learner.adapter_base if isinstance(learner, ContinuesAdapter) else ""
    if not base or base == given:
        return
    folders = [Path(path).expanduser() for path in (base, given)]
    if all(folder.is_dir() for folder in folders):
        weights = [fingerprint(folder)["weights"] for folder in folders]
        differs = weights[0] != weights[1]
    else:  # copies and mirrors usually keep the last part of the name
        differs = Path(base).name.casefold() != Path(given).name.casefold()
    if differs:
        yield (
            "model.path",
            f"{given}, but the adapter to continue was trained on {base} (adapter_config.json): above other weights it "
            "does not compute what it learned; give that model, unless both hold the same weights",
        )


def fingerprint(folder: Path) -> dict[str, str]:
    """Return a hash of the weights in a folder, of which parts are read, and one of configuration and tokenizer."""
    hashes: dict[str, Any] = {"weights": hashlib.sha256(), "files": hashlib.sha256()}
    for path in sorted(folder.iterdir()):
        part = "weights" if path.suffix in _WEIGHTS else "files" if path.suffix in _TEXTS else ""
        if part and path.is_file():
            size = path.stat().st_size
            hashes[part].update(f"{path.name} {size}\n".encode())
            hashes[part].update(path.read_bytes() if part == "files" else samples(path, size))
    return {part: found.hexdigest() for part, found in hashes.items()}


def contents(folder: Path) -> dict[str, bytes]:
    """Return a hash of each file below a folder, of its size and of parts of its content; hidden files do not count."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            size = path.stat().st_size
            found[str(name)] = hashlib.sha256(f"{size}\n".encode() + samples(path, size)).digest()
    return found


def samples(path: Path, size: int) -> bytes:
    """Return parts of a large file; a model that was trained further differs in nearly every one."""
    if size <= _SAMPLES * _SAMPLE:
        return path.read_bytes()
    with path.open("rb") as file:
        parts = []
        for number in range(_SAMPLES):
            file.seek((size - _SAMPLE) * number // (_SAMPLES - 1))
            parts.append(file.read(_SAMPLE))
        return b"".join(parts)
