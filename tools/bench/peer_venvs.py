"""Create missing environments of the peers, one for each, since their versions of torch and transformers differ."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[2]
INSTALL_TORCH = "import sys; sys.path.insert(0, 'tools'); import install; sys.exit(not install.install_torch())"


@attrs.frozen
class Peer:
    """A peer, and the requirements for running the part that is compared.

    Attributes:
        name: Name of the peer, and of its environment `.venv-NAME`.
        whole: Requirements that pip resolves.
        alone: Requirements installed without their dependencies, which do not support CPUs.
        probe: Code that imports the compared modules.
    """

    name: str
    whole: tuple[str, ...]
    alone: tuple[str, ...] = ()
    probe: str = "pass"

    @property
    def python(self) -> Path:
        """Python of the environment."""
        return ROOT / f".venv-{self.name}" / "bin" / "python"


PEERS = {
    peer.name: peer
    for peer in (
        # The version in tests/benchmarks; the range of transformers is rlsdk's.
        Peer("trl", ("trl==1.16.*", "transformers>=5.16.1,<5.20"), probe="from trl import GRPOTrainer"),
        Peer(
            "verl",
            (
                "numpy",
                "omegaconf",
                "hydra-core",
                "packaging",
                "tensordict==0.10.0",
                "transformers>=5.5.3,<5.11",
                "ray>=2.60,<2.61",
                "codetiming",
                "pandas",
            ),
            ("verl==0.9.1",),
            "import verl.trainer.ppo.core_algos",
        ),
        # It requires flash-attn, which does not support CPUs; its losses need deepspeed.
        Peer("openrlhf", ("numpy", "deepspeed==0.19.6"), ("openrlhf==0.11.2",), "import deepspeed, openrlhf"),
    )
}


def prepare(peer: Peer) -> str:
    """Create a peer's environment if it is missing; return the reason for a failure, empty on success."""
    stamp = peer.python.parents[1] / ".installed"
    wanted = "\n".join((*peer.whole, *peer.alone) if peer.alone else peer.whole)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return ""
    pip = [str(peer.python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    commands: list[Sequence[str]] = [
        [sys.executable, "-m", "venv", str(peer.python.parents[1])],
        [str(peer.python), "-c", INSTALL_TORCH],
        [*pip, *peer.whole],
        *([[*pip, "--no-deps", *peer.alone]] if peer.alone else []),
        [str(peer.python), "-c", peer.probe],
    ]
    for command in commands:
        ran = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        if ran.returncode:
            end = (ran.stderr or ran.stdout).strip().splitlines()[-1:] or ["no message"]
            return f"`{' '.join(command[1:4])} …` ended with status {ran.returncode}: {end[0][:300]}"
    stamp.write_text(wanted, encoding="utf-8")
    return ""
