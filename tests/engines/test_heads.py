"""A float32 head with bfloat16 weights: engine and learner compute the same logprobs from the same states."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from rlsdk.contracts import ActorSpec, Model, Request, Sampling, TrainBatch
from rlsdk.engines.transformers import Transformers
from rlsdk.learners.model import load_policy
from rlsdk.learners.rows import to_rows

IDS = np.arange(24) * 7 % 60


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Model:
    model = tiny.make_model(tmp_path_factory.mktemp("exact"))
    return attrs.evolve(model, dtype="bfloat16", head_dtype="float32")


@pytest.fixture(scope="module")
def engine(exact: Model) -> Iterator[Transformers]:
    engine = Transformers()
    engine.start(exact, ActorSpec(role="engine"))
    yield engine
    engine.stop()


@torch.inference_mode()
def reference(model: Model, ids: np.ndarray) -> np.ndarray:
    """The float64 head on bfloat16 states."""
    net = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.bfloat16).eval()
    tokens = torch.as_tensor(ids)
    states = net.model(tokens[None], use_cache=False).last_hidden_state[0, :-1]
    scores = (states.double() @ net.lm_head.weight.double().t()).log_softmax(-1)
    return scores.gather(-1, tokens[1:, None])[:, 0].numpy()


def learned(model: Model, ids: np.ndarray) -> np.ndarray:
    """Logprobs of the same tokens from the learner's policy."""
    one, size = np.ones(1, np.int64), len(ids)
    mask = np.ones(size - 1, bool)
    batch = TrainBatch(token_ids=ids, lengths=size * one, starts=one, responses=(size - 1) * one, loss_mask=mask)
    with torch.no_grad():
        return load_policy(model, "sdpa", False)(to_rows(batch, "padded"))[0].numpy()


def test_engine_and_learner_agree_with_a_float64_head(exact: Model, engine: Transformers) -> None:
    expected = reference(exact, IDS)
    for found in (learned(exact, IDS), engine.logprobs(IDS)):
        gap = np.abs(found - expected)
        # A CPU may round a bfloat16 state or two otherwise, in kernels of another shape; the head rounds nothing.
        assert np.median(gap) < 1e-5 and gap.max() < 0.05
    rounded = learned(attrs.evolve(exact, head_dtype="model"), IDS)
    assert np.median(np.abs(rounded - expected)) > 1e-3


def test_new_weights_reach_the_head(exact: Model, engine: Transformers) -> None:
    before = engine.logprobs(IDS)
    engine.load_weights(tiny.changed(exact, 1))
    assert np.abs(engine.logprobs(IDS) - before).max() > 1e-2
    engine.load_weights(tiny.original(exact, 2))
    np.testing.assert_array_equal(engine.logprobs(IDS), before)


def test_what_is_sampled_bears_the_learners_logprobs(exact: Model, engine: Transformers) -> None:
    prompt = IDS[:6]
    engine.add([Request(id="r", prompt_ids=prompt, sampling=Sampling(max_tokens=12, ignore_eos=True), n=2, seed=3)])
    done = []
    while engine.unfinished:
        done += engine.step()
    for each in done:
        whole = np.concatenate([prompt, each.token_ids])
        np.testing.assert_allclose(each.logprobs, learned(exact, whole)[len(prompt) - 1 :], atol=0.05)
