"""Options of commands that take numbers."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from rlsdk.cli import root


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "run.yaml", "--gpu-memory"],
        ["simulate", "run.yaml", "--gpus", "8", "--learner-share"],
        ["replay", "batch.pt", "--tolerance"],
        ["rollouts", "run", "--timeout"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_numbers_that_are_not_finite_are_refused(arguments: list[str]) -> None:
    ran = CliRunner().invoke(root, [*arguments, "nan"])
    assert ran.exit_code == 2
    assert f"Invalid value for '{arguments[-1]}': nan is not a finite number." in ran.output


@pytest.mark.parametrize("given", ["inf", "0", "-3"])
def test_the_memory_of_a_gpu_is_finite_and_above_zero(given: str) -> None:
    ran = CliRunner().invoke(root, ["explain", "run.yaml", "--gpu-memory", given])
    assert ran.exit_code == 2
    assert "Invalid value for '--gpu-memory'" in ran.output
