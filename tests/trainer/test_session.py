"""What a run says at its end."""

from __future__ import annotations

import logging

import pytest

from rlsdk.trainer import session


def failed() -> BaseException:
    """Of a group of tasks, with its traceback."""
    try:
        try:
            raise ZeroDivisionError("by nought")
        except ZeroDivisionError as error:
            raise ExceptionGroup("tasks", [error]) from None
    except ExceptionGroup as group:
        return group


def test_what_failed_in_the_background_is_reported_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "rlsdk")
    logging.getLogger("rlsdk").propagate = True
    session._report(failed())
    assert "after the last batch was taken: ZeroDivisionError: by nought" in caplog.text
    assert 'raise ZeroDivisionError("by nought")' in caplog.text


def test_what_ended_the_run_is_not_reported_twice(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("rlsdk").propagate = True
    error = failed()
    try:
        raise error
    except ExceptionGroup:
        session._report(error)
    session._report(None)
    assert caplog.text == ""
