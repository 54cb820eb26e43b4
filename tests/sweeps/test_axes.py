"""Settings of a sweep: lists, ranges, and refused values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.errors import ConfigError
from rlsdk.sweeps.runs import LONGEST_NAME, Axis, axes_of, combinations, run_name


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("a=1,2,3", ("1", "2", "3")),
        ("a=x, y", ("x", "y")),
        ("a=[1, 2],[3]", ("[1, 2]", "[3]")),
        ("a={use: x, b: 1},y", ("{use: x, b: 1}", "y")),
        ("a='x,y',z", ("'x,y'", "z")),
        ("lr=log:1e-6:1e-4", ("1e-06", "1e-05", "0.0001")),
        ("lr=log:1:8:4", ("1", "2", "4", "8")),
        ("steps=lin:1000000:2000002:3", ("1000000", "1500001", "2000002")),
        ("lr=lin:0:1:5", ("0", "0.25", "0.5", "0.75", "1")),
    ],
)
def test_several_values(setting: str, values: tuple[str, ...]) -> None:
    assert axes_of([setting]) == ([Axis(setting.partition("=")[0], values)], [])


@pytest.mark.parametrize("setting", ["a=1", "a=[1,2]", "a='1,2'", "a={b: 1, c: 2}", "a=", "steps"])
def test_one_value_is_a_setting_of_all_runs(setting: str) -> None:
    assert axes_of([setting]) == ([], [setting])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["a=1,,2"], "empty value"),
        (["a=1,1"], r"has a duplicate value \(1 and 1\); use --seeds for several runs of one setting"),
        (["lr=0.001,0.1,1e-3"], r"lr: '0.001,0.1,1e-3' has a duplicate value \(0.001 and 1e-3\)"),
        (["a=1,2", "a=3,4"], "a: several values are given more than once"),
        (["name=a,b"], "each run of a sweep gets its own"),
        (["a=log:1e-6"], "expected log:LOW:HIGH"),
        (["a=log:0:1"], "LOW below HIGH, above 0"),
        (["a=lin:2:1"], "LOW below HIGH"),
        (["a=lin:0:1:1"], "at least 2 points"),
        (["a=lin:0:inf"], "both finite"),
        (["a=lin:nan:1"], "both finite"),
        (["a=lin:1:1.0000001"], "are equal in six digits; list them, as in 1.0,1.0000001"),
        (["a=lin:0:1:1000000"], "gives 1,000,000 values; a sweep has at most 1,000 runs"),
        (["a=lin:0:one"], "as in lin:1e-6:1e-3:4"),
    ],
)
def test_refused(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        axes_of(settings)


def test_all_combinations() -> None:
    axes, _ = axes_of(["a=1,2", "b=x,y"])
    assert [*combinations(axes)] == [{"a": a, "b": b} for a in "12" for b in "xy"]
    assert [*combinations([])] == [{}]


def test_names_of_runs_say_their_settings() -> None:
    assert run_name({"learner.lr": "1e-06", "algorithm": "grpo"}, 2) == "lr=1e-06_algorithm=grpo_seed=2"
    assert run_name({}, 0) == "seed=0"


VALUES = st.lists(st.tuples(st.text(max_size=120), st.text(max_size=9)), unique=True, max_size=20)


@given(VALUES, st.sampled_from([("a.lr", "b.lr"), ("a.lr", "x")]))
def test_names_of_runs_differ_and_fit_a_file_system(values: list[tuple[str, str]], keys: tuple[str, str]) -> None:
    names = [run_name(dict(zip(keys, some, strict=True)), 1) for some in values]
    assert len(set(names)) == len(names)
    assert all("/" not in name and len(name.encode()) < LONGEST_NAME + 20 for name in names)
