"""`compile: true`: the same gradients from a compiled model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlsdk.contracts import Model, Roles, TrainBatch
from tests.learners.test_gradients import COUNT, budget, distance, learn, make_spec, plain_gradients, shared_out

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(400)]


def test_gradients_of_a_compiled_model(
    tied: Model, launch: Callable[..., Any], make_grouped_batch: Callable[..., TrainBatch]
) -> None:
    batch, spec = make_grouped_batch(COUNT, seed=2), make_spec()
    shares = shared_out(batch, 1, "balanced")
    options = {"rows": "shared", "attention": "eager", "micro_batch_tokens": budget(shares, 3)}
    # A process of its own: in those of other tests the compiler is switched off.
    group = launch(1, Roles(actor=tied), spec, fresh=True, lr=0.0, compile=True, **options)
    try:
        assert distance(learn(group, shares, batch), plain_gradients(tied, batch, spec)) < 1e-5
    finally:
        group.stop()
