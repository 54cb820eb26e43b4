"""Settings of a run's processes."""

from __future__ import annotations

import gc

import pytest

from rlsdk.isolation.process import importing


def test_no_garbage_is_looked_for_while_importing() -> None:
    try:
        with importing():
            assert not gc.isenabled()
        assert gc.isenabled()
        with pytest.raises(ImportError), importing():
            raise ImportError
        assert gc.isenabled()
        gc.disable()
        with importing():
            pass
        assert not gc.isenabled()  # as whoever called had it
    finally:
        gc.enable()
        gc.unfreeze()
