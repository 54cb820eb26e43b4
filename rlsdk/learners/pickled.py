"""Read checkpoints of rlsdk 0.1, which DeepSpeed wrote as pickles, without executing their contents."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from rlsdk.errors import CheckpointError


def read_pickled(folder: Path, rank: int, *, stage: int, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the files of DeepSpeed's `save_checkpoint`.

    Args:
        folder: Folder of a role, actor or critic.
        rank: Rank of this process.
        stage: ZeRO stage.
        dtype: Compute dtype of the weights.

    Returns:
        State of the model and of the optimiser, in the form that `Trained.save` writes.

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
        said = next((line for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line), str(error))
        raise CheckpointError(
            f"{path} is damaged, or a pickle with more than tensors and plain values; it was not "
            f"loaded, and nothing in it was executed: {said.strip()}"
        ) from error
    return state
