"""These tests run where the client `tinker` is installed."""

import importlib.util


def pytest_ignore_collect() -> bool | None:
    """Nothing is collected without the library, whose absence `pytest_report_header` tells."""
    return None if importlib.util.find_spec("tinker") else True


def pytest_report_header() -> str:
    """Say what is left out."""
    found = importlib.util.find_spec("tinker")
    return "" if found else "plugins/rlsdk-tinker: tinker is not installed; make test-slow runs its tests"
