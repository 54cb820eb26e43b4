"""These tests run where reasoning-gym is installed."""

import importlib.util


def pytest_ignore_collect() -> bool | None:
    """Nothing is collected without the library, whose absence `pytest_report_header` tells."""
    return None if importlib.util.find_spec("reasoning_gym") else True


def pytest_report_header() -> str:
    """Say what is left out."""
    found = importlib.util.find_spec("reasoning_gym")
    return "" if found else "plugins/rlsdk-reasoning-gym: reasoning-gym is not installed; make test-slow runs its tests"
