"""An importable torchvision for a CPU torch: only its Python parts, which are all that vLLM needs.

The wheel of the public index is built for CUDA, and its compiled operators do not load here; importing it fails because
it then describes operators that do not exist. Whoever imports it from this folder declares two of them before.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DECLARE = '''
import importlib.abc
import sys


class Declare(importlib.abc.MetaPathFinder):
    """Declares torchvision's operators to torch when it is imported."""

    def find_spec(self, name, path, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            held.append(self)
        return None


held = []
sys.meta_path.insert(0, Declare())
'''


def install(folder: Path) -> str:
    """Install torchvision into a folder that is to stand on PYTHONPATH.

    Returns:
        Why it cannot be had; empty if it was installed.
    """
    import torch

    _, minor, *_ = torch.__version__.split(".")
    wanted = f"torchvision==0.{int(minor) + 15}.*"  # as the two are released
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), wanted]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=250)
    if ran.returncode:
        return f"pip finds no {wanted}: {ran.stderr.strip().splitlines()[-1]}"
    # What rlsdk and transformers look at to tell a build for CUDA from one for CPUs.
    (info,) = folder.glob("torchvision-*.dist-info")
    metadata = info / "METADATA"
    version = info.name.removeprefix("torchvision-").removesuffix(".dist-info")
    metadata.write_text(
        metadata.read_text("utf-8").replace(f"Version: {version}", f"Version: {version}+cpu", 1), "utf-8"
    )
    info.rename(folder / f"torchvision-{version}+cpu.dist-info")
    (folder / "sitecustomize.py").write_text(DECLARE, encoding="utf-8")
    return ""
