"""Routed experts, from an engine over interrupted answers and turns into a training batch."""

from __future__ import annotations

import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
import architectures

from rlsdk.contracts import ActorSpec, Completion, Model, Request, Sampling
from rlsdk.engines.continuation import Continuation
from rlsdk.engines.messages import Bundle
from rlsdk.engines.pausable import beginning, joined
from rlsdk.engines.transformers import Transformers
from rlsdk.learners.export import WeightExporter
from rlsdk.learners.ranks import Ranks
from rlsdk.learners.zero import full_tensors
from rlsdk.routing import UNKNOWN, Routers
from rlsdk.types import Rollout, Task

FULL = Sampling(max_tokens=20, ignore_eos=True)


def _engine(folder: Path, name: str = "qwen3-moe", **options: Any) -> Transformers:
    architectures.make(folder, name)
    engine = Transformers(**options)
    engine.return_routing()
    engine.start(Model(path=str(folder), max_length=128), ActorSpec(role="engine"))
    return engine


def _run(engine: Transformers, *requests: Request, steps: int = 10**6) -> list[Completion]:
    engine.add(requests)
    done: list[Completion] = []
    while engine.unfinished and steps:
        done += engine.step()
        steps -= 1
    return done


def _request(name: str, count: int, n: int = 1, sampling: Sampling = FULL) -> Request:
    prompt = np.random.default_rng(count).integers(3, 100, count)
    return Request(id=name, prompt_ids=prompt, sampling=sampling, n=n, seed=count)


def _expected(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Experts that a plain model of transformers chooses for all tokens but the last."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    routers = Routers(model)
    routers.record()
    with torch.no_grad():
        model(torch.from_numpy(ids[None, :-1]), use_cache=False)
    return np.asarray(routers.take())


@pytest.mark.parametrize("name", ["qwen3-moe", "glm4-moe", "gpt-oss"])
def test_completions_carry_the_experts_of_all_tokens_that_were_read(name: str, tmp_path: Path) -> None:
    engine = _engine(tmp_path, name, max_num_seqs=4, max_num_batched_tokens=24)
    lengths = (5, 11, 3)  # some wait for a row, prompts are read in parts, rows end at different steps
    sampling = [attrs.evolve(FULL, max_tokens=count) for count in (20, 4, 9)]
    requests = [_request(f"r{i}", n, 2, s) for i, (n, s) in enumerate(zip(lengths, sampling, strict=True))]
    prompts = {request.id: request.prompt_ids for request in requests}
    done = _run(engine, *requests)
    engine.stop()
    assert len(done) == 6
    for each in done:
        assert each.routed_experts is not None
        ids = np.concatenate([prompts[each.request], each.token_ids])
        assert each.routed_experts.dtype == np.int16
        np.testing.assert_array_equal(np.sort(each.routed_experts, axis=-1), np.sort(_expected(tmp_path, ids), axis=-1))


def test_an_engine_returns_no_routing_unless_requested(tmp_path: Path) -> None:
    architectures.make(tmp_path, "qwen3-moe")
    engine = Transformers()
    engine.start(Model(path=str(tmp_path), max_length=128), ActorSpec(role="engine"))
    assert _run(engine, _request("a", 4))[0].routed_experts is None
    engine.stop()


def test_tokens_keep_the_experts_they_were_sampled_with_when_new_weights_come(tmp_path: Path) -> None:
    engine = _engine(tmp_path / "old")
    architectures.make(tmp_path / "new", "qwen3-moe", seed=1)
    request = _request("a", 6)
    assert not _run(engine, request, steps=8)
    net = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    weights = WeightExporter(
        net, Model(path=str(tmp_path / "new")), Ranks(0, 1, "cpu"), None, partial(full_tensors, net)
    ).weights(1)
    engine.load_weights(weights)
    done = _run(engine)[0]
    engine.stop()
    assert done.routed_experts is not None
    ids = np.concatenate([request.prompt_ids, done.token_ids])
    sampled = int((done.versions == 0).sum())
    before = _expected(tmp_path / "old", ids)
    read = len(request.prompt_ids) + sampled - 1  # the last token of the old weights was read by the new ones
    np.testing.assert_array_equal(np.sort(done.routed_experts[:read]), np.sort(before[:read]))
    assert (np.sort(done.routed_experts[read:]) != np.sort(before[read:])).any()


def _completion(count: int, experts: np.ndarray | None, prompt: int = 3) -> Completion:
    return Completion(
        request="a",
        index=0,
        token_ids=np.arange(count),
        logprobs=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int64),
        finish="abort",
        routed_experts=experts,
    )


def _experts(count: int, value: int) -> np.ndarray:
    return np.full((count, 2, 2), value, np.int16)


def test_a_resumed_answer_keeps_the_experts_of_its_first_part() -> None:
    found = joined(_completion(4, _experts(6, 1)), _completion(5, _experts(11, 2))).routed_experts
    assert found is not None
    assert found[:, 0, 0].tolist() == [1] * 6 + [2] * 5


def test_a_first_part_without_known_experts_stays_unknown() -> None:
    found = joined(_completion(4, None), _completion(5, _experts(11, 2))).routed_experts
    assert found is not None
    assert found[:, 0, 0].tolist() == [UNKNOWN] * 6 + [2] * 5


@pytest.mark.parametrize(("experts", "expected"), [(_experts(6, 1), 6), (None, None)])
def test_an_answer_interrupted_before_it_continued_keeps_its_tokens(experts: Any, expected: int | None) -> None:
    found = joined(_completion(4, experts), _completion(0, None)).routed_experts
    assert (None if found is None else len(found)) == expected


def test_an_aborted_rollout_begins_again_with_its_experts() -> None:
    ids, mask = np.arange(7), np.arange(7) >= 3
    rollout = Rollout(Task("t", "p"), (), ids, mask, np.zeros(7), np.zeros(7), "aborted", routed_experts=_experts(7, 3))
    begun = beginning(rollout)
    assert begun is not None
    assert begun[1].routed_experts is not None
    assert len(begun[1].routed_experts) == 6


def test_a_bundle_of_completions_is_pickled_with_their_experts() -> None:
    bundle = Bundle([_completion(2, _experts(4, 1)), _completion(3, None)])
    first, second = pickle.loads(pickle.dumps(bundle))
    np.testing.assert_array_equal(first.routed_experts, _experts(4, 1))
    assert second.routed_experts is None


def test_experts_that_vllm_reports_step_by_step_are_those_of_all_tokens_but_the_last() -> None:
    """Its reports are arrays of uint8: those of the prompt, then of one token at a time."""
    running = Continuation("a", 0, prompt=3)
    reports = (_experts(3, 1), _experts(1, 2), _experts(1, 3))
    for report, token in zip(reports, (7, 8, 9), strict=True):
        running.routing.append(report.astype(np.uint8))
        running.stamp(0)
        running.record([token], [0.0])
    found = running.complete("stop").routed_experts
    assert found is not None
    assert (found.dtype, found[:, 0, 0].tolist()) == (np.int16, [1, 1, 1, 2, 3])
    running.routing.pop()
    assert running.complete("stop").routed_experts[-1, 0].tolist() == [UNKNOWN, UNKNOWN]
