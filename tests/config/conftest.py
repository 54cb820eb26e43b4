"""A valid configuration for tests to break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlsdk.config import Plan, check
from rlsdk.errors import ConfigError

YAML = """\
name: trial
model: MODEL
tasks: {train: countdown}
reward: countdown
algorithm: grpo
steps: 2
batch_size: 4
group_size: 4
engine: transformers
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with a configuration that passes."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    path = tmp_path / "trial.yaml"
    path.write_text(YAML.replace("MODEL", str(model)))
    return path


@pytest.fixture
def plan(file: Path) -> Callable[..., Plan]:
    """Checks the file with overrides."""
    return lambda *overrides, plugins=(): check(file, overrides, plugins)


@pytest.fixture
def faults(file: Path) -> Callable[..., tuple[str, ...]]:
    """The faults of the file with overrides."""

    def found(*overrides: str, **options: Any) -> tuple[str, ...]:
        with pytest.raises(ConfigError) as caught:
            check(file, overrides, **options)
        return caught.value.faults

    return found
