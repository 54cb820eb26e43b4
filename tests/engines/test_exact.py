"""`model.exact`: engine and learner compute bitwise equal logprobs of a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from rlsdk.contracts import ActorSpec, Completion, Model, Request, Sampling, TrainBatch
from rlsdk.engines.transformers import Transformers
from rlsdk.exact import architecture_fault
from rlsdk.learners.model import load_policy
from rlsdk.learners.rows import to_exact_row, to_rows
from tests.architectures import ARCHITECTURES, MOE, make

WIDTH = 48
DENSE = sorted(set(ARCHITECTURES) - set(MOE) - {"qwen3.5", "nemotron-h"})
"""The engine refuses layers other than attention."""


def finish(engine: Transformers, requests: list[Request]) -> list[Completion]:
    engine.add(requests)
    found: list[Completion] = []
    while engine.unfinished:
        found += engine.step()
    return sorted(found, key=lambda each: (each.request, each.index))


def learned(policy: Any, token_ids: np.ndarray, start: int, temperature: float, *, exact: bool = False) -> np.ndarray:
    """The learner's logprobs of a rollout's tokens from `start` on."""
    length = len(token_ids)
    batch = TrainBatch(
        token_ids=token_ids,
        lengths=np.array([length]),
        starts=np.array([start]),
        responses=np.array([length - start]),
        loss_mask=np.ones(length - start, bool),
    )
    rows = to_exact_row(batch, WIDTH) if exact else to_rows(batch, "padded")
    return np.asarray(policy(rows, temperature)[0].detach().numpy())


def conversations(engine: Transformers, temperature: float) -> list[tuple[np.ndarray, int, np.ndarray]]:
    """Conversations of two turns: tokens, the first sampled one, and logprobs (NaN where nothing was sampled)."""
    rng = np.random.default_rng(0)
    sampling = Sampling(temperature=temperature, max_tokens=9, ignore_eos=True)
    prompts = {f"p{i}": rng.integers(5, 60, 3 + 4 * i) for i in range(3)}
    first = finish(engine, [Request(id=n, prompt_ids=p, sampling=sampling, n=2) for n, p in prompts.items()])
    histories = {
        f"{each.request}-{each.index}": np.concatenate([prompts[each.request], each.token_ids, rng.integers(5, 60, 2)])
        for each in first
    }
    more = attrs.evolve(sampling, max_tokens=6)
    second = finish(engine, [Request(id=n, prompt_ids=h, sampling=more) for n, h in histories.items()])
    found = []
    for before, after in zip(first, second, strict=True):
        start = len(prompts[before.request])
        logprobs = np.concatenate([before.logprobs, [np.nan] * 2, after.logprobs])
        found.append((np.concatenate([histories[after.request], after.token_ids]), start, logprobs))
    return found


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 0.7])
def test_logprobs_of_conversations_are_the_learners_bit_for_bit(tmp_path: Path, name: str, temperature: float) -> None:
    """Batches of unlike lengths, a cache, turns: none of them shows; with a gradient and without."""
    make(tmp_path, name)
    model = Model(path=str(tmp_path), max_length=WIDTH, exact=True)
    engine = Transformers(max_num_seqs=4)
    engine.start(model, ActorSpec(role="engine"))
    policy = load_policy(model, "sdpa" if name != "gpt-oss" else "eager", False)
    for tokens, start, logprobs in conversations(engine, temperature):
        sampled = ~np.isnan(logprobs)
        got = learned(policy, tokens, start, temperature, exact=True)
        np.testing.assert_array_equal(got[sampled], logprobs[sampled].astype(np.float32))
        with torch.no_grad():
            np.testing.assert_array_equal(learned(policy, tokens, start, temperature, exact=True), got)
        np.testing.assert_allclose(learned(policy, tokens, start, temperature), got, atol=1e-4)
    tokens = conversations(engine, 1.0)[0][0]
    np.testing.assert_array_equal(engine.logprobs(tokens), learned(policy, tokens, 1, 1.0, exact=True))


def test_without_it_they_differ_by_rounding(tmp_path: Path) -> None:
    """The mode does something: in the plain one, some logprob of these conversations is another number."""
    make(tmp_path, "qwen3")
    model = Model(path=str(tmp_path), max_length=WIDTH)
    engine = Transformers(max_num_seqs=4)
    engine.start(model, ActorSpec(role="engine"))
    policy = load_policy(model, "sdpa", False)
    gaps = [np.nanmax(np.abs(learned(policy, t, s, 1.0) - p)) for t, s, p in conversations(engine, 1.0)]
    assert 0 < max(gaps) < 1e-4


@pytest.mark.parametrize("name", MOE)
def test_experts_have_no_exact_logprobs(tmp_path: Path, name: str) -> None:
    assert "experts" in str(architecture_fault(make(tmp_path, name).config))
