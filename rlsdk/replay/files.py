"""Read dumped batches of other trainers without executing their content, and recognise the names of their fields."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlsdk.errors import DataError, first_line

KINDS = "JSON lines, parquet, .npz, .safetensors or .pt"
_WRAPPERS = ("batch", "non_tensor_batch", "meta_info", "rollout_data", "train_data", "inputs", "experience")
"""Names under which trainers nest a batch; the nested fields count as the file's."""
_ROWS = ("samples", "rollouts", "experiences")
"""Names under which trainers put a list with one mapping per rollout."""
_TENSORS = "torch.save({name: value for name, value in batch.batch.items()}, 'batch.pt')"


def read_columns(path: Path) -> dict[str, Any]:
    """Return the fields of a dumped batch: arrays, lists with one value per rollout, and single values.

    Raises:
        DataError: The file is missing, damaged, of an unknown kind, or cannot be read without executing code.
    """
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; expected a dumped batch ({KINDS})")
    with path.open("rb") as opened:
        head = opened.read(16)
    if not head:
        raise DataError(f"{path} is empty; expected a dumped batch ({KINDS})")
    try:
        found = _read(path, head)
    except DataError:
        raise
    except Exception as error:  # each of the four readers raises its own exceptions on damaged files
        reason = f"{type(error).__name__}: {first_line(error)[:300]}"
        raise DataError(f"{path} cannot be read: {reason}; expected {KINDS}") from error
    columns = _flat(found, path)
    if not columns:
        raise DataError(f"{path} has no fields; expected those of a batch, such as responses and rewards")
    return columns


def _read(path: Path, head: bytes) -> Any:
    if head.startswith(b"PAR1"):
        import pyarrow.parquet as pq

        return pq.read_table(path).to_pydict()
    if head.startswith(b"PK"):
        with zipfile.ZipFile(path) as archive:
            pickled = any(name.rpartition("/")[2] == "data.pkl" for name in archive.namelist())
        if pickled:
            return _torch(path)
        with np.load(path, allow_pickle=False) as opened:
            return {name: opened[name] for name in opened.files}
    if head.startswith(b"\x80"):
        return _torch(path)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size:
        from safetensors.numpy import load_file

        return load_file(path)
    return _json(path)


def _torch(path: Path) -> Any:
    """Load tensors and plain values; reject any other pickle, since it would execute code."""
    import pickle

    import torch
    from numpy._core import multiarray

    arrays: list[Any] = [multiarray._reconstruct, multiarray.scalar, np.ndarray, np.dtype]
    kinds = {type(np.dtype(name)) for name in ("?", "i1", "i4", "i8", "u1", "f2", "f4", "f8")}
    try:
        with torch.serialization.safe_globals([*arrays, *kinds]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{path} is a pickle of more than tensors and plain values (as DataProto.save_to_disk writes it); "
            f"reading it would execute code. Save only the tensors, where the batch was created: {_TENSORS}"
        ) from error


def _json(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    try:
        whole = json.loads(text)
    except ValueError:
        return [_row(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not isinstance(whole, dict):
        return whole
    is_rollout = any(name in whole and not isinstance(whole[name], list) for name in _PER_ROLLOUT)
    return [whole] if is_rollout or not any(isinstance(v, list | dict) for v in whole.values()) else whole


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}, line {number}: {error}; expected one JSON object per line ({KINDS})") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number}: a JSON {type(row).__name__}; expected one object per line")
    return row


def _flat(found: Any, path: Path) -> dict[str, Any]:
    """Return a file's content as columns, with the fields of nested mappings on the top level."""
    if isinstance(found, list | tuple):
        return _columns(found, path)
    if not isinstance(found, Mapping):
        raise DataError(
            f"{path} contains an object of type {type(found).__name__}; expected a mapping from field names to values"
        )
    columns: dict[str, Any] = {}
    for name, value in found.items():
        if name in _WRAPPERS and isinstance(value, Mapping):
            columns |= _flat(value, path)
        elif name in _ROWS and isinstance(value, list | tuple):
            columns |= _columns(value, path)
        else:
            columns[str(name)] = _plain(value)
    return columns


def _columns(rows: Sequence[Any], path: Path) -> dict[str, Any]:
    """Convert rows to columns; a row may be a list of rows (the rollouts of one group)."""
    flat = [row for each in rows for row in (each if isinstance(each, list | tuple) else [each])]
    for i, row in enumerate(flat):
        if not isinstance(row, Mapping):
            raise DataError(
                f"{path}: rollout {i} is of type {type(row).__name__}; expected a mapping from names to values"
            )
    names = dict.fromkeys(name for row in flat for name in row)
    missing = {name: next((i for i, row in enumerate(flat) if name not in row), None) for name in names}
    return {str(n): [_plain(row[n]) for row in flat] for n in names if missing[n] is None}


def _plain(value: Any) -> Any:
    """Convert tensors to arrays, also within lists."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        return (value.float() if value.is_floating_point() else value).numpy()
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


FRAMEWORKS = ("verl", "trl", "slime", "openrlhf")
NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "prompt_ids": {"verl": ("prompts",), "trl": ("prompt_ids",)},
    "prompt_mask": {"trl": ("prompt_mask",)},
    "response_ids": {"verl": ("responses",), "trl": ("completion_ids",)},
    "sequences": {"verl": ("input_ids",), "slime": ("tokens",), "openrlhf": ("sequences",)},
    "attention_mask": {"verl": ("attention_mask",), "openrlhf": ("attention_mask",)},
    "response_lengths": {"slime": ("response_lengths", "response_length")},
    "response_mask": {
        "verl": ("response_mask", "loss_mask"),
        "trl": ("completion_mask",),
        "slime": ("loss_masks", "loss_mask"),
        "openrlhf": ("action_mask",),
    },
    "tool_mask": {"trl": ("tool_mask",)},
    "behaviour_logprobs": {
        "verl": ("rollout_log_probs",),
        "trl": ("sampling_per_token_logps",),
        "slime": ("rollout_log_probs",),
        "openrlhf": ("rollout_log_probs",),
    },
    "old_logprobs": {
        "verl": ("old_log_probs", "old_log_prob"),
        "trl": ("old_per_token_logps",),
        "slime": ("log_probs", "old_log_probs"),
        "openrlhf": ("action_log_probs", "old_action_log_probs"),
    },
    "logprobs": {
        "verl": ("log_probs", "log_prob"),
        "trl": ("per_token_logps",),
        "slime": ("current_log_probs",),
        "openrlhf": ("current_action_log_probs",),
    },
    "ref_logprobs": {
        "verl": ("ref_log_prob", "ref_log_probs"),
        "trl": ("ref_per_token_logps",),
        "slime": ("ref_log_probs",),
        "openrlhf": ("base_action_log_probs",),
    },
    "scores": {
        "verl": ("token_level_scores", "rm_scores", "score"),
        "trl": ("rewards", "reward"),
        "slime": ("raw_reward", "reward"),
        "openrlhf": ("reward",),
    },
    "rewards": {"verl": ("token_level_rewards",), "slime": ("rewards",), "openrlhf": ("rewards",)},
    "values": {"verl": ("values",), "slime": ("values",), "openrlhf": ("values",)},
    "advantages": {
        "verl": ("advantages",),
        "trl": ("advantages", "advantage"),
        "slime": ("advantages",),
        "openrlhf": ("advantages",),
    },
    "ratios": {
        "verl": ("ratio",),
        "trl": ("coef_1", "ratio"),
        "slime": ("ratio",),
        "openrlhf": ("ratio",),
    },
    "losses": {
        "verl": ("pg_losses", "per_token_loss"),
        "trl": ("per_token_loss",),
        "slime": ("pg_loss_per_token", "per_token_loss"),
        "openrlhf": ("per_token_loss",),
    },
    "loss": {
        "verl": ("loss", "pg_loss", "actor/pg_loss"),
        "trl": ("loss",),
        "slime": ("loss", "pg_loss", "train/pg_loss"),
        "openrlhf": ("loss", "policy_loss", "actor_loss"),
    },
    "gradient": {
        "verl": ("grad_log_prob", "log_prob_grad"),
        "trl": ("per_token_logps_grad",),
        "slime": ("log_probs_grad",),
        "openrlhf": ("action_log_probs_grad",),
    },
    "gradient_norm": {
        "verl": ("grad_norm", "actor/grad_norm"),
        "trl": ("grad_norm",),
        "slime": ("grad_norm", "train/grad_norm"),
        "openrlhf": ("grad_norm", "actor_grad_norm"),
    },
    "groups": {"verl": ("uid",), "trl": ("group",), "slime": ("group_index",), "openrlhf": ("group",)},
    "prompts": {"verl": ("input",), "trl": ("prompt",), "slime": ("prompt",), "openrlhf": ("prompts", "prompt")},
    "texts": {"verl": ("output",), "trl": ("completion",), "slime": ("response",), "openrlhf": ("responses",)},
}
"""rlsdk's field -> trainer -> its names, preferred one first."""
_PER_ROLLOUT = [name for field in ("scores", "rewards", "groups") for names in NAMES[field].values() for name in names]
"""Names whose value is a list in a batch, and not in a single rollout."""
IGNORED = frozenset({"step", "mode", "index", "rollout_id", "rank", "num_items_in_batch", "total_lengths", "truncated"})
"""Names of numeric columns that are not rewards."""


@attrs.frozen(eq=False)
class Recognised:
    """The recognised fields of a file.

    Attributes:
        framework: The trainer whose names were found.
        names: rlsdk's field -> the name in the file.
        values: rlsdk's field -> content in the file.
        others: Unknown fields.
    """

    framework: str
    names: Mapping[str, str]
    values: Mapping[str, Any]
    others: Mapping[str, Any]


def recognise(columns: Mapping[str, Any], framework: str | None = None) -> Recognised:
    """Recognise the trainer that wrote a batch by its field names, and map them to rlsdk's names."""
    found = {each: _named(columns, each) for each in FRAMEWORKS}
    chosen = framework or max(FRAMEWORKS, key=lambda each: (len(found[each]), _distinct(found, each)))
    names = found[chosen]
    known = set(names.values())
    return Recognised(
        chosen,
        names,
        {field: columns[name] for field, name in names.items()},
        {name: value for name, value in columns.items() if name not in known},
    )


def _named(columns: Mapping[str, Any], framework: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for field, by_framework in NAMES.items():
        name = next((n for n in by_framework.get(framework, ()) if n in columns and n not in found.values()), None)
        if name is not None:
            found[field] = name
    return found


def _distinct(found: Mapping[str, Mapping[str, str]], framework: str) -> int:
    """Count names that no other trainer uses."""
    others = {name for each, names in found.items() if each != framework for name in names.values()}
    return sum(name not in others for name in found[framework].values())
