"""Learner state files: nested plain values and tensors in one safetensors file; loading executes no code.

Also reads checkpoints of rlsdk 0.1, which DeepSpeed wrote as pickles, without executing their contents.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.errors import CheckpointError, LearnerError

if TYPE_CHECKING:
    from torch import Tensor

_TREE = "rlsdk"
"""Metadata key of the nested structure, as JSON."""


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state: mappings, lists, tuples, sets, numbers, text, None and tensors, nested arbitrarily.

    Args:
        path: Path of the file.
        state: State to write; a tensor that occurs several times is written once.

    Raises:
        LearnerError: The state contains a value of another type; the message names its path.
    """
    from safetensors.torch import save_file

    packer = _Packer()
    tree = packer.pack(state, "")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(packer.tensors, str(path), metadata={"format": "pt", _TREE: json.dumps(tree)})


def read_state(path: Path) -> dict[str, Any]:
    """Read what `write_state` wrote; tensors are on the CPU and own their memory.

    Raises:
        CheckpointError: The file is missing or not a state file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            tree = json.loads((file.metadata() or {})[_TREE])
            # Copies: a memory-mapped tensor would read the file later, when it may be gone.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no mapping
        state = _unpack(tree, tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a learner state file (safetensors with the structure in its metadata): {error}"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds an object of type {type(state).__name__}; expected the state of a learner")
    return state


class _Packer:
    """Moves tensors from a nested value to a flat mapping."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def pack(self, value: Any, path: str) -> Any:
        """Return a value as JSON; types that JSON lacks become mappings with a single key that begins with `$`."""
        import torch

        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.Tensor):
            tensor = value.detach()
            where = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
            name = self._names.get(where) if tensor.numel() else None
            if name is None:
                name = path.lstrip(".")
                while name in self.tensors:  # keys may contain dots, or differ only in type
                    name += "'"
                self.tensors[name], self._names[where] = tensor.cpu().contiguous(), name
            return {"$tensor": name}
        if isinstance(value, list | tuple | set | frozenset):
            items = [self.pack(each, f"{path}.{i}") for i, each in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple" if isinstance(value, tuple) else "$set": items}
        if not isinstance(value, Mapping):
            raise LearnerError(
                f"a checkpoint cannot hold {path.lstrip('.')}, a {type(value).__module__}.{type(value).__qualname__}: "
                "expected numbers, text, lists, mappings and tensors"
            )
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: self.pack(each, f"{path}.{key}") for key, each in value.items()}
        return {"$map": [[self.pack(key, path), self.pack(each, f"{path}.{key}")] for key, each in value.items()]}


def _unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_unpack(each, tensors) for each in tree]
    if not isinstance(tree, dict):
        return tree
    tag: str
    content: Any
    tag, content = next(iter(tree.items())) if len(tree) == 1 else ("", None)
    match tag:
        case "$tensor":
            return tensors[content]
        case "$tuple":
            return tuple(_unpack(each, tensors) for each in content)
        case "$set":
            return {_unpack(each, tensors) for each in content}
        case "$map":
            return {_unpack(key, tensors): _unpack(each, tensors) for key, each in content}
    if tag.startswith("$"):
        raise ValueError(f"unknown form {tag!r}")
    return {key: _unpack(each, tensors) for key, each in tree.items()}


def read_pickled(folder: Path, rank: int, *, stage: int, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the files of DeepSpeed's `save_checkpoint`.

    Returns:
        State of the model and of the optimiser, in the form that `TrainedModule.save` writes.

    Raises:
        CheckpointError: A file is missing or has unexpected contents.
    """
    number = f"zero_pp_rank_{rank}_"
    path = folder / f"{number if stage == 3 else ''}mp_rank_00_model_states.pt"
    if not path.is_file():
        raise CheckpointError(f"checkpoint {folder} has no {folder.name}: {path.name} is missing")
    old = read_pickled_state(path)
    try:
        counts = {name: old[name] for name in ("global_steps", "global_samples", "skipped_steps")}
        model = {"module": old["module"], "engine": counts, "run": old}
        if not stage:
            return model, old["optimizer"]
        prefix = "bf16_" if dtype == "bfloat16" else ""
        saved = read_pickled_state(folder / f"{prefix}{number}mp_rank_00_optim_states.pt")
        return model, saved["optimizer_state_dict"]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a DeepSpeed checkpoint: {error!r}") from error


def read_pickled_state(path: Path) -> dict[str, Any]:
    """Read a file that rlsdk 0.1 wrote through `torch.save`, without executing its contents.

    Only tensors, plain values and three types of DeepSpeed are read; any other name in a pickle is refused before it
    is looked up.

    Raises:
        CheckpointError: The file is missing, or holds anything else.
    """
    import torch
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError, TypeError) as error:
        lines = str(error).splitlines()
        reason = next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), str(error))
        raise CheckpointError(
            f"{path} is damaged, or a pickle with more than tensors and plain values; it was not "
            f"loaded, and nothing in it was executed: {reason.strip()}"
        ) from error
    return state
