"""Checks of what a learner's methods return, before the trainer computes with it."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np


def tokens_fault(result: Any, fields: Sequence[str], tokens: int) -> str:
    """Return what is wrong with fields that a learner computed, with what was expected; empty if nothing is.

    Args:
        result: What the method returned for the rollouts of one rank.
        fields: Names of the requested fields.
        tokens: Number of response tokens of these rollouts.
    """
    if not isinstance(result, Mapping):
        return f"{reprlib.repr(result)}; expected a mapping with {', '.join(fields)}"
    for name in fields:
        if name not in result:
            return f"a mapping with {', '.join(map(str, result)) or 'nothing'}; expected {', '.join(fields)}"
        if fault := array_fault(result[name], tokens):
            return f"{name} as {fault}"
        # With logprobs that are NaN, the update is skipped (`skip_limit`), and a single bad batch ends no run.
        if name == "values" and (missing := int(np.isnan(result[name]).sum())):
            return f"{name} with NaN for {missing} of {tokens} tokens; weights or activations are not finite"
    return ""


def array_fault(values: Any, length: int) -> str:
    """Return what a value is instead of an array of `length` floats; empty if it is one."""
    if isinstance(values, np.ndarray) and values.shape == (length,) and values.dtype.kind == "f":
        return ""
    is_array = isinstance(values, np.ndarray)
    told = f"an array of {values.dtype} {list(values.shape)}" if is_array else f"a {type(values).__name__}"
    return f"{told}; expected an array of float32 [{length}]"


def metrics_fault(metrics: Any) -> str:
    """Return what is wrong with the metrics of an update; empty if nothing is."""
    if not isinstance(metrics, Mapping):
        return f"{reprlib.repr(metrics)}; expected a mapping from names of metrics to numbers"
    for name, value in metrics.items():
        if not isinstance(name, str) or not name.isprintable():
            return f"a metric named {reprlib.repr(name)}; expected printable text, such as 'actor/grad_norm'"
        if not isinstance(value, Real):
            return f"{reprlib.repr(value)} as metric {name!r}; expected a number"
    return ""
