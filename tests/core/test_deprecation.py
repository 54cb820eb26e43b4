"""A deprecated name works until its removal version, with a warning that names the replacement."""

from __future__ import annotations

import importlib

import pytest

import rlsdk
from rlsdk import deprecation
from rlsdk.deprecation import Deprecation

OLD = {
    "rlsdk.Answer": Deprecation(old="rlsdk.Answer", new="rlsdk.Rollout", since="0.2", until="1.0"),
    "rlsdk.kit.lookup": Deprecation(old="rlsdk.kit.lookup", new="rlsdk.kit.find", since="0.2", until="1.0"),
}


@pytest.fixture(autouse=True)
def old_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecation, "NAMES", OLD)
    monkeypatch.setattr("rlsdk.kit.NAMES", OLD)


def test_an_old_name_works_and_the_warning_says_what_replaces_it_and_until_when() -> None:
    with pytest.warns(DeprecationWarning) as caught:
        found = rlsdk.Answer
    assert found is rlsdk.Rollout
    (warning,) = caught
    assert str(warning.message) == (
        "rlsdk.Answer is now called rlsdk.Rollout (since rlsdk 0.2); the old name works until rlsdk 1.0: "
        "please rename it"
    )
    assert warning.filename == __file__  # the place of use, not rlsdk's own


def test_an_old_name_of_another_module_works() -> None:
    kit = importlib.import_module("rlsdk.kit")
    with pytest.warns(DeprecationWarning, match=r"rlsdk\.kit\.lookup is now called rlsdk\.kit\.find"):
        assert kit.lookup is kit.find


def test_a_name_that_never_was_is_an_error_as_ever() -> None:
    with pytest.raises(AttributeError, match="module 'rlsdk' has no attribute 'Nothing'"):
        rlsdk.Nothing  # noqa: B018


def test_every_replacement_is_public() -> None:
    for old, found in importlib.reload(deprecation).NAMES.items():
        home, _, name = found.new.rpartition(".")
        assert home in rlsdk.PUBLIC_MODULES and name in importlib.import_module(home).__all__, old
