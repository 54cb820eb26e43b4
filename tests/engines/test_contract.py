"""Requirements of every engine; the same tests run with `transformers` in this process and `vllm` in its actor."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import tiny

import rlsdk
from rlsdk.contracts import ActorSpec, Completion, Model, Request, Sampling, Weights
from rlsdk.engines.vllm import Vllm
from rlsdk.errors import EngineError, RlsdkError
from rlsdk.weights import on_host, to_weights

LONG = Sampling(max_tokens=12, ignore_eos=True)
PROMPTS = [np.array([20 + i, 7, 30, 3, 40 + i, 12][i % 3 :]) for i in range(6)]


@pytest.fixture(autouse=True, scope="module")
def _bodies_travel_by_value() -> None:
    """Functions of this module run in the engine's process, which cannot import it."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])


def requests(sampling: Sampling = LONG, *, n: int = 1, seed: int | None = None, count: int = 6) -> list[Request]:
    return [
        Request(id=f"r{i}", prompt_ids=PROMPTS[i % 6], sampling=sampling, n=n, seed=None if seed is None else seed + i)
        for i in range(count)
    ]


def finish(engine: Any) -> list[Completion]:
    done = []
    while engine.unfinished:
        done += engine.step()
    return sorted(done, key=lambda c: (c.request, c.index))


def generate(engine: Any, asked: Sequence[Request]) -> list[Completion]:
    engine.add(asked)
    return finish(engine)


def prompt_of(completion: Completion) -> np.ndarray:
    return PROMPTS[int(completion.request[1:]) % 6]


def expected(model: Model, completion: Completion, weights: Weights | None = None, **how: Any) -> np.ndarray:
    return behind(model, prompt_of(completion), completion, weights, **how)


def behind(
    model: Model, prompt: np.ndarray, completion: Completion, weights: Weights | None = None, **how: Any
) -> np.ndarray:
    whole = np.concatenate([prompt, completion.token_ids])
    return tiny.reference_logprobs(model, whole, weights, **how)[len(prompt) - 1 :]


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [c.token_ids.tolist() for c in completions]


@pytest.mark.parametrize(
    "how",
    [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 1.3, "top_k": 20, "top_p": 0.9}],
    ids=str,
)
def test_logprobs_are_those_of_the_distribution_sampled_from(subject: Any, model: Model, how: dict[str, float]) -> None:
    sampling = Sampling(max_tokens=8, ignore_eos=True, **how)
    for completion in subject.run(generate, requests(sampling, n=2, seed=5)):
        assert completion.token_ids.dtype == np.int64
        assert completion.logprobs.dtype == np.float32
        np.testing.assert_allclose(completion.logprobs, expected(model, completion, **how), atol=1e-4)


def test_samples_follow_the_distribution(subject: Any, model: Model) -> None:
    many = [Request(id="r0", prompt_ids=PROMPTS[0], sampling=Sampling(max_tokens=1, ignore_eos=True), n=3000, seed=1)]
    drawn = np.array([c.token_ids[0] for c in subject.run(generate, many)])
    size = len(tiny.vocabulary())
    every = [
        tiny.reference_logprobs(model, np.append(PROMPTS[0], t))[-1]
        for t in np.argsort(np.bincount(drawn, minlength=size))[-5:]
    ]
    seen = np.sort(np.bincount(drawn, minlength=size))[-5:] / len(drawn)
    np.testing.assert_allclose(seen, np.exp(every), atol=4 * np.sqrt(0.25 / len(drawn)))


def test_the_likeliest_tokens_are_reported_with_the_sampled_ones(subject: Any, model: Model) -> None:
    warm = Sampling(max_tokens=6, ignore_eos=True, temperature=0.7, top_k=4, top_logprobs=4)
    greedy = Sampling(max_tokens=6, ignore_eos=True, temperature=0.0, top_logprobs=1)
    asked = [
        Request(id=f"r{i}", prompt_ids=PROMPTS[i], sampling=how, n=2) for i, how in enumerate((warm, greedy, LONG))
    ]
    done = subject.run(generate, asked)
    assert [c.top is None for c in done] == [False] * 4 + [True] * 2
    for completion in done[:2]:
        assert completion.top.ids.shape == completion.top.logprobs.shape == (6, 4)
        assert (np.diff(completion.top.logprobs, axis=1) <= 0).all()
        np.testing.assert_allclose(np.exp(completion.top.logprobs).sum(1), 1, atol=1e-5)  # all that top-k leaves
        at = np.argwhere(completion.top.ids == completion.token_ids[:, None])[:, 1]
        np.testing.assert_allclose(completion.top.logprobs[np.arange(6), at], completion.logprobs, atol=1e-5)
    for completion in done[2:4]:
        assert completion.top.ids[:, 0].tolist() == completion.token_ids.tolist()


def test_tokens_are_shown_while_they_are_sampled(subject: Any) -> None:
    def watch(engine: Any, asked: list[Request]) -> tuple[list[Any], list[Completion]]:
        engine.add(asked)
        seen, done, since = [], [], {("r0", 0): 0, ("r0", 1): 0}
        while engine.unfinished:
            done += engine.step()
            new = engine.sampled(since)
            since |= {(s.request, s.index): s.start + len(s.token_ids) for s in new}
            seen += new
        return seen, done

    sampling = Sampling(max_tokens=12, ignore_eos=True, top_logprobs=2)
    seen, done = subject.run(watch, [*requests(sampling, n=2, count=1), *requests(count=6)[1:]])
    assert {s.request for s in seen} == {"r0"}
    for index in (0, 1):
        parts = [s for s in seen if s.index == index]
        whole = next(c for c in done if (c.request, c.index) == ("r0", index))
        assert [s.start for s in parts] == list(range(11))  # the twelfth comes with the completion
        for name in ("token_ids", "logprobs", "versions"):
            joined = np.concatenate([getattr(s, name) for s in parts])
            assert joined.tolist() == getattr(whole, name)[:11].tolist()
        assert np.concatenate([s.top.ids for s in parts]).tolist() == whole.top.ids[:11].tolist()


def test_a_group_is_one_request(subject: Any) -> None:
    done = subject.run(generate, requests(n=8, count=2))
    assert [(c.request, c.index) for c in done] == [(r, i) for r in ("r0", "r1") for i in range(8)]
    assert len({tuple(t) for t in tokens(done[:8])}) == 8


def test_a_seed_gives_the_same_tokens_whatever_else_runs(subject: Any) -> None:
    alone = subject.run(generate, requests(n=3, seed=9, count=1))
    crowded = subject.run(generate, [*requests(count=6)[1:], *requests(n=3, seed=9, count=1)])
    assert tokens(alone) == tokens(crowded[:3])
    assert tokens(alone) != tokens(subject.run(generate, requests(n=3, seed=10, count=1)))


def test_neighbouring_seeds_share_no_continuation(subject: Any) -> None:
    same = [attrs.evolve(r, prompt_ids=PROMPTS[0]) for r in requests(n=4, seed=1, count=4)]
    done = tokens(subject.run(generate, same))
    assert len({tuple(t) for t in done}) == 16


def test_the_engines_own_generator_is_reproducible(subject: Any) -> None:
    def twice(engine: Any, asked: list[Request]) -> list[list[Completion]]:
        found = []
        for seed in (3, 3, 4):
            engine.reseed(seed)
            found.append(generate(engine, asked))
        return found

    first, second, other = subject.run(twice, requests(n=5))
    assert tokens(first) == tokens(second)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
    assert tokens(first) != tokens(other)


def test_requests_beyond_the_batch_wait_their_turn(subject: Any, model: Model) -> None:
    lengths = [Sampling(max_tokens=1 + i % 11, ignore_eos=True) for i in range(90)]
    asked = [Request(id=f"r{i}", prompt_ids=PROMPTS[i % 6], sampling=s, seed=i) for i, s in enumerate(lengths)]
    done = {c.request: c for c in subject.run(generate, asked)}
    assert len(done) == 90
    for i in range(0, 90, 13):
        assert len(done[f"r{i}"].token_ids) == lengths[i].max_tokens
        np.testing.assert_allclose(done[f"r{i}"].logprobs, expected(model, done[f"r{i}"]), atol=1e-4)


def test_long_answers_are_the_models_wherever_blocks_of_the_cache_end(subject: Any, model: Model) -> None:
    prompts = [np.arange(length) % 90 + 20 for length in (1, 2, 61, 62, 63, 64, 65, 66)]
    long = Sampling(max_tokens=140, ignore_eos=True)
    asked = [Request(id=f"r{i}", prompt_ids=p, sampling=long, seed=i) for i, p in enumerate(prompts)]
    for prompt, done in zip(prompts, subject.run(generate, asked), strict=True):
        np.testing.assert_allclose(done.logprobs, behind(model, prompt, done), atol=1e-4)


def test_tokens_bear_the_version_of_the_weights_that_sampled_them(subject: Any, model: Model) -> None:
    new = tiny.changed(model, 7)

    def swap(engine: Any, asked: list[Request], weights: Weights) -> list[Completion]:
        engine.add(asked)
        done = [c for _ in range(5) for c in engine.step()]
        engine.load_weights(weights)
        return sorted(done + finish(engine), key=lambda c: (c.request, c.index))

    for completion in subject.run(swap, requests(n=3, seed=2), new):
        versions = completion.versions
        assert versions.dtype == np.int64
        change = int((versions == 0).sum())
        assert versions.tolist() == [0] * change + [7] * (12 - change)
        assert 0 < change < 12
        old, fresh = expected(model, completion), expected(model, completion, new)
        np.testing.assert_allclose(completion.logprobs[:change], old[:change], atol=1e-4)
        # All of the context is read anew with the new weights.
        np.testing.assert_allclose(completion.logprobs[change:], fresh[change:], atol=1e-4)
        assert np.abs(old - fresh).max() > 0.01


@pytest.mark.parametrize("in_parts", [True, False])
def test_requests_in_flight_survive_sleep_and_continue_under_the_next_weights(
    subject: Any, model: Model, in_parts: bool
) -> None:
    """The order of a colocated step; on a CPU, vLLM does all but free the memory."""
    new = tiny.changed(model, 7)

    def turns(engine: Any, asked: list[Request], weights: Weights) -> list[Completion]:
        engine.add(asked)
        engine.step()
        for _ in range(2):  # a step that trains on nothing is followed by another sleep
            engine.sleep()
            if in_parts:
                engine.wake_weights()
                engine.load_weights(weights)
                engine.wake()
            else:
                engine.wake()
                engine.load_weights(weights)
        return finish(engine)

    done = subject.run(turns, requests(n=2, seed=2), new)
    assert len(done) == 12
    for completion in done:
        change = int((completion.versions == 0).sum())
        assert 0 < change < 12
        fresh = expected(model, completion, new)
        np.testing.assert_allclose(completion.logprobs[change:], fresh[change:], atol=1e-4)


@pytest.mark.stack
def test_an_engine_that_sleeps_or_has_no_weights_yet_does_not_step(vllm_engine: Any, model: Model) -> None:
    def refusals(engine: Any, asked: list[Request], weights: Weights) -> list[str]:
        engine.add(asked)
        engine.sleep()
        said = []
        load = lambda: engine.load_weights(weights)  # noqa: E731
        for call in (engine.step, load, engine.wake_weights, engine.step, engine.wake, engine.step):
            try:
                call()
            except Exception as error:
                said.append(str(error))
        engine.load_weights(weights)
        return [*said, f"{len(finish(engine))} completions"]

    asleep = "the engine is asleep; call wake() first"
    discarded = "the engine discarded its weights when it went to sleep; call load_weights() first"
    said = vllm_engine.run(refusals, requests(), tiny.original(model))
    assert said == [asleep, asleep, asleep, discarded, "6 completions"]


def copied(engine: Any, asked: list[Request], ids: np.ndarray, old: Weights, new: Weights) -> list[Completion] | None:
    """Copy the new weights over the old ones while requests are in flight; None if the engine cannot."""
    layout = engine.weight_layout()
    if not layout:
        return None
    engine.load_weights(new)
    seen = engine.logprobs(ids)
    sent = [on_host(part, copy=True) for part in engine.held_weights()]
    engine.load_weights(old)
    before = engine.logprobs(ids)
    engine.add(asked)
    engine.step()
    engine.copy_weights(7, iter(sent))
    assert np.array_equal(engine.logprobs(ids), seen) and not np.array_equal(seen, before)
    assert engine.weight_layout() == layout and {part.version for part in sent} == {7}
    return finish(engine)


def check_copied(subject: Any, model: Model) -> None:
    new = tiny.changed(model, 7)
    done = subject.run(copied, requests(n=2, seed=2), np.concatenate(PROMPTS), tiny.original(model), new)
    assert len(done) == 12
    for completion in done:
        change = int((completion.versions == 0).sum())
        assert 0 < change < 12
        fresh = expected(model, completion, new)
        np.testing.assert_allclose(completion.logprobs[change:], fresh[change:], atol=1e-4)


def test_an_engine_copies_the_weights_of_another_bit_for_bit(transformers_engine: Any, model: Model) -> None:
    transformers_engine.run(lambda engine: engine.load_weights(tiny.original(model)))
    check_copied(transformers_engine, model)


@rlsdk.engine("torchs_kernels")
class TorchsKernels(Vllm):
    """vLLM on a CPU with torch's kernel for linear layers, which leaves weights as they are, as on a GPU."""

    def start(self, model: Model, place: ActorSpec) -> None:
        from vllm import _custom_ops

        _custom_ops._supports_onednn = False
        super().start(model, place)


@pytest.mark.slow
@pytest.mark.stack
def test_vllm_copies_the_weights_of_another_bit_for_bit(launched: Any, tmp_path: Path, model: Model) -> None:
    with launched(tmp_path, {}, name=TorchsKernels) as subject:
        check_copied(subject, model)


@pytest.mark.stack
def test_vllm_with_prepacked_weights_leaves_it_to_the_learner_to_send_them(vllm_engine: Any) -> None:
    assert vllm_engine.run(lambda engine: engine.weight_layout()) == ""


def test_a_prompt_read_under_old_weights_is_not_reused(subject: Any, model: Model) -> None:
    prompt = np.tile(PROMPTS[0], 30)[:150]  # longer than a block of vLLM's prefix cache
    ask = [Request(id="r0", prompt_ids=prompt, sampling=LONG, seed=1)]
    new = tiny.changed(model, 1)
    subject.run(generate, ask)
    subject.run(lambda engine, weights: engine.load_weights(weights), new)
    done = subject.run(generate, ask)[0]
    found = tiny.reference_logprobs(model, np.concatenate([prompt, done.token_ids]), new)[len(prompt) - 1 :]
    np.testing.assert_allclose(done.logprobs, found, atol=1e-4)


def test_the_canary_leaves_requests_in_flight_alone(subject: Any, model: Model) -> None:
    ids = np.concatenate(PROMPTS)

    def ask(engine: Any, asked: list[Request], ids: np.ndarray) -> tuple[np.ndarray, list[Completion]]:
        engine.add(asked)
        engine.step()
        engine.step()
        found = engine.logprobs(ids)
        for _ in range(12):
            engine.logprobs(ids[:3])
        return found, finish(engine)

    found, done = subject.run(ask, requests(n=2, seed=4), ids)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, tiny.reference_logprobs(model, ids), atol=1e-4)
    assert tokens(done) == tokens(subject.run(generate, requests(n=2, seed=4)))


def test_the_canary_of_new_weights_does_not_wait_for_what_is_in_flight(subject: Any, model: Model) -> None:
    """In-flight requests are prefilled again with new weights; the sender waits for the canary, but not for that."""
    ids, old, new = np.concatenate(PROMPTS), tiny.original(model), tiny.changed(model, 7)

    def swap(
        engine: Any, asked: list[Request], old: Weights, new: Weights, ids: np.ndarray, canaries: int
    ) -> tuple[int, list[np.ndarray], list[Completion]]:
        engine.load_weights(old)
        engine.add(asked)
        done = [c for _ in range(5) for c in engine.step()]
        engine.load_weights(new)
        found = [engine.logprobs(ids) for _ in range(canaries)]
        steps = 0
        while engine.unfinished:
            done += engine.step()
            steps += 1
        return steps, found, done

    steps, _, plain = subject.run(swap, requests(n=3, seed=2), old, new, ids, 0)
    same, found, done = subject.run(swap, requests(n=3, seed=2), old, new, ids, 2)
    assert (same, tokens(done)) == (steps, tokens(plain))
    for logprobs in found:
        np.testing.assert_allclose(logprobs, tiny.reference_logprobs(model, ids, new), atol=1e-4)


def _load_and_ask(engine: Any, weights: Weights, ids: np.ndarray) -> np.ndarray:
    engine.load_weights(weights)
    return engine.logprobs(ids)


@pytest.mark.parametrize("left_out", [None, "lm_head.weight"])
def test_a_tied_head_follows_the_embeddings(subject: Any, model: Model, left_out: str | None) -> None:
    ids = np.concatenate(PROMPTS)
    new = tiny.changed(model, 2)
    sent = Weights(2, {n: t for n, t in new.tensors.items() if n != left_out}, new.dtypes)
    found = subject.run(_load_and_ask, sent, ids)
    np.testing.assert_allclose(found, tiny.reference_logprobs(model, ids, new), atol=1e-4)


def test_weights_of_another_type_are_cast(subject: Any, model: Model) -> None:
    import torch

    ids = np.concatenate(PROMPTS)
    tensors = {n: torch.from_numpy(t.copy()) for n, t in tiny.changed(model, 2).tensors.items()}
    half = to_weights(2, tensors, dtype="bfloat16")
    rounded = to_weights(2, {n: t.bfloat16().float() for n, t in tensors.items()})
    found = subject.run(_load_and_ask, half, ids)
    np.testing.assert_allclose(found, tiny.reference_logprobs(model, ids, rounded), atol=1e-4)


def _attempt(engine: Any, what: str, *args: Any) -> tuple[str, str]:
    try:
        getattr(engine, what)(*args)
    except RlsdkError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_weights_that_do_not_cover_the_model_are_refused(subject: Any, model: Model) -> None:
    new = tiny.changed(model, 5)
    name = "model.layers.1.self_attn.k_proj.weight"
    short = Weights(5, {n: t for n, t in new.tensors.items() if n != name}, new.dtypes)
    kind, text = subject.run(_attempt, "load_weights", short)
    assert kind == EngineError.__name__
    assert "version 5" in text and name in text
    kind, text = subject.run(
        _attempt, "load_weights", Weights(5, {**new.tensors, name: new.tensors[name][:5]}, new.dtypes)
    )
    assert kind == EngineError.__name__ and "(5, 128), not (128, 128)" in text
    ids = np.concatenate(PROMPTS)
    found = subject.run(lambda engine, ids: engine.logprobs(ids), ids)
    np.testing.assert_allclose(found, tiny.reference_logprobs(model, ids), atol=1e-4)


def test_abort_keeps_what_was_sampled(subject: Any, model: Model) -> None:
    def cut(engine: Any, asked: list[Request]) -> tuple[list[Completion], list[Completion], int]:
        engine.add(asked)
        for _ in range(4):
            engine.step()
        return engine.abort(["r1", "none"]), engine.abort(), engine.unfinished

    one, rest, left = subject.run(cut, requests(n=6))
    assert left == 0
    assert {c.request for c in one} == {"r1"} and len(one) == 6
    assert len(rest) == 30
    assert {c.finish for c in [*one, *rest]} == {"abort"}
    assert {len(c.token_ids) for c in one} == {4}
    assert {len(c.token_ids) for c in rest} == {0, 4}  # 36 continuations, 24 places
    np.testing.assert_allclose(one[0].logprobs, expected(model, one[0]), atol=1e-4)


def test_stops(subject: Any, model: Model) -> None:
    free = subject.run(generate, requests(Sampling(max_tokens=40, ignore_eos=True), seed=3))[0]
    text = tiny.make_tokenizer().convert_ids_to_tokens(free.token_ids.tolist())
    seen = set(free.token_ids[:10].tolist())
    end = next(i for i in range(10, 40) if free.token_ids[i] not in seen | {tiny.EOS})
    string = "".join(text[10:12])  # runs over two tokens
    first = min(i for i in range(40) if string in "".join(text[: i + 1]))

    def stopped(**how: Any) -> Completion:
        return subject.run(generate, requests(Sampling(max_tokens=40, **how), seed=3))[0]

    until = 1 + (free.token_ids.tolist().index(tiny.EOS) if tiny.EOS in free.token_ids else 39)
    by_id, by_text = stopped(stop_token_ids=(int(free.token_ids[end]),)), stopped(stop=(string, "never"))
    assert tokens([by_id])[0] == free.token_ids[: min(until, end + 1)].tolist()
    assert tokens([by_text])[0] == free.token_ids[: min(until, first + 1)].tolist()
    assert {by_id.finish, by_text.finish} == {"stop"}
    assert free.finish == "length"
    whatever = stopped(stop=(string,), stop_token_ids=(int(free.token_ids[end]),), ignore_eos=True)
    assert tokens([whatever]) == tokens([free])


def test_the_models_own_end_stops_and_is_kept(subject: Any) -> None:
    done = subject.run(generate, requests(Sampling(max_tokens=60), n=10, seed=8))
    ended = [c for c in done if c.finish == "stop"]
    assert ended
    for completion in ended:
        assert completion.token_ids.tolist().index(tiny.EOS) == len(completion.token_ids) - 1
    assert all(len(c.token_ids) == 60 and tiny.EOS not in c.token_ids[:-1] for c in done if c.finish == "length")


def test_a_response_ends_with_the_models_length(subject: Any, model: Model) -> None:
    prompt = np.tile(PROMPTS[0], 60)[: model.max_length - 3]
    ask = [Request(id="r0", prompt_ids=prompt, sampling=Sampling(max_tokens=50, ignore_eos=True))]
    done = subject.run(generate, ask)[0]
    assert (len(done.token_ids), done.finish) == (3, "length")


def test_temperature_zero_takes_the_likeliest(subject: Any, model: Model) -> None:
    mixed = [*requests(Sampling(temperature=0.0, max_tokens=6, ignore_eos=True), n=2)[:3], *requests()[3:]]
    done = subject.run(generate, mixed)
    assert tokens(done[:1]) == tokens(done[1:2])
    for completion in done[:6:2]:
        np.testing.assert_allclose(completion.logprobs, expected(model, completion), atol=1e-4)
        prompt = prompt_of(completion)
        for i, token in enumerate(completion.token_ids):
            context = np.concatenate([prompt, completion.token_ids[:i]])
            others = [tiny.reference_logprobs(model, np.append(context, t))[-1] for t in (int(token), 5, 60)]
            assert others[0] == max(others)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"prompt_ids": np.array([], dtype=np.int64)}, "empty"),
        ({"prompt_ids": np.full(256, 5)}, "max_length 256"),
        ({"prompt_ids": np.array([5, 130])}, "the model has 0 to 129"),
        ({"n": 0}, "n=0"),
        ({"sampling": Sampling(max_tokens=0)}, "max_tokens=0"),
        ({"sampling": Sampling(top_p=0.0)}, "top_p"),
        ({"sampling": Sampling(top_logprobs=21)}, "top_logprobs must be 0 to 20"),
        ({"id": "r0"}, "'r0' is in use"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_cannot_be_generated_is_refused_and_nothing_admitted(
    subject: Any, change: dict[str, Any], text: str
) -> None:
    good = requests(count=2)

    def attempt(engine: Any, asked: list[Request]) -> tuple[tuple[str, str], int]:
        return _attempt(engine, "add", asked), engine.unfinished

    (kind, said), left = subject.run(attempt, [*good, attrs.evolve(good[1], **{"id": "bad", **change})])
    assert kind == "ValueFault" and text in said
    assert left == 0


@pytest.mark.parametrize("count", [1, 257])
def test_logprobs_need_a_sequence_that_fits(subject: Any, count: int) -> None:
    kind, said = subject.run(_attempt, "logprobs", np.full(count, 5))
    assert kind == "ValueFault" and str(count) in said


@pytest.mark.stack
@pytest.mark.parametrize("name", ["vllm", pytest.param("parallel_vllm", marks=pytest.mark.slow)])
def test_vllm_leaves_no_file_among_the_temporary_ones(name: str, request: pytest.FixtureRequest) -> None:
    def met_in(engine: Any) -> list[str]:
        return list(engine._llm.collective_rpc(lambda worker: worker.distributed_init_method))

    where = request.getfixturevalue(f"{name}_engine").run(met_in)
    assert where and all(each.startswith("file://") for each in where)
    assert not any(Path(each.removeprefix("file://")).exists() for each in where)
