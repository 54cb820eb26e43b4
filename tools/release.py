"""Build the files of a release into `dist/`: wheel, sdist, constraints and a bill of materials.

    python tools/release.py [FOLDER]

The bill of materials (SBOM) is CycloneDX JSON with every package of `constraints-cpu.txt`, which were tested together.
cyclonedx-bom writes it in a separate environment, so that its requirements do not conflict with the stack's. Nothing
is uploaded.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SBOM_TOOL = "cyclonedx-bom==7.5.0"
CONSTRAINTS = ROOT / "constraints-cpu.txt"


def run(*command: str | Path) -> None:
    """Run a program in the repository's root; raise if it fails."""
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True)


def write_sbom(target: Path) -> None:
    """Write the bill of materials for the constraints."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        python = Path(folder) / "bin" / "python"
        run(python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", SBOM_TOOL)
        options = (
            "--pyproject",
            ROOT / "pyproject.toml",
            "--output-reproducible",
            "--no-validate",
            "--output-format",
            "JSON",
        )
        run(python, "-m", "cyclonedx_py", "requirements", *options, "--output-file", target, CONSTRAINTS)


def main() -> None:
    """Build all files and list them."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").resolve()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    run(sys.executable, "-m", "hatchling", "build", "--directory", out)
    shutil.copy(CONSTRAINTS, out)
    write_sbom(out / f"rlsdk-{version}.cdx.json")
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size:>12,}  {path.name}")


if __name__ == "__main__":
    main()
