"""New plugins written by `rlsdk new`, not installed, but with the metadata that pip would write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlsdk.cli import root

Rlsdk = Callable[..., Result]


@pytest.fixture
def rlsdk() -> Rlsdk:
    """Run a command, and check its exit status."""

    def run(*arguments: str, status: int = 0) -> Result:
        ran = CliRunner().invoke(root, list(arguments), env={"COLUMNS": "200"})
        assert ran.exit_code == status, ran.output
        return ran

    return run


def add_metadata(folder: Path, name: str, *, point: str | None = None, module: str | None = None) -> None:
    """Write a distribution as pip would, with an entry point, found if its folder is on the search path."""
    metadata = folder / f"rlsdk_{name}-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rlsdk-{name}\nVersion: 0.1.0\n")
    (metadata / "RECORD").write_text(f"rlsdk_{name}/__init__.py,,\n")
    (metadata / "entry_points.txt").write_text(f"[rlsdk.v1]\n{point or name} = {module or f'rlsdk_{name}'}\n")
