"""The engines' small parts: seeds, random numbers, stop strings, engine arguments, environments, options."""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import attrs
import numpy as np
import pytest
import tiny
import torch

import rlsdk
from rlsdk.contracts import ActorSpec, Model, Request, Sampling, Weights
from rlsdk.conversion import read_header
from rlsdk.engines.cached import sample, uniforms
from rlsdk.engines.checks import check_names, with_tied_head
from rlsdk.engines.continuation import StopStrings, spread
from rlsdk.engines.memory import vllm_memory
from rlsdk.engines.pretrained import positions
from rlsdk.engines.transformers import Transformers
from rlsdk.engines.vllm import Vllm
from rlsdk.engines.vllm_model import parallel_faults
from rlsdk.engines.vllm_options import engine_arguments
from rlsdk.engines.vllm_worker import read_shared, shared, unname_shared_memory
from rlsdk.errors import EngineError, OptionError
from rlsdk.seeds import mix

CPU = ActorSpec(role="engine", threads=2, cpus=2, cache="cache", seed=5)
GPU = attrs.evolve(CPU, device="cuda")
MODEL = Model(path="folder", dtype="bfloat16", max_length=100)


def test_mixed_numbers_differ_and_stay_the_same() -> None:
    found = {mix(a, b) for a in range(50) for b in range(50)}
    assert len(found) == 2500
    assert mix(1, 2) != mix(2, 1)
    assert all(0 <= n < 2**63 for n in found)
    assert mix(3, 1) == 6796496416428451910


def test_uniforms_are_uniform_and_independent_of_the_batch() -> None:
    seeds = np.array([mix(7, i) for i in range(1000)], dtype=np.uint64)
    table = np.stack([uniforms(seeds, np.full(1000, c)) for c in range(100)])
    assert table.min() >= 0 and table.max() < 1
    assert abs(table.mean() - 0.5) < 0.005
    assert abs(table.var() - 1 / 12) < 0.001
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.02
    np.testing.assert_array_equal(uniforms(seeds[5:7], np.array([3, 9])), [table[3, 5], table[9, 6]])


def test_sampling_never_takes_what_was_cut_off() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4000, 50)
    ends = np.tile([0.0, 1 - 2.0**-48], 2000)
    ones, zeros = np.ones(4000, dtype=np.float32), np.zeros(4000, dtype=np.int64)
    tokens, logprobs = sample(logits, ones, ones, zeros + 3, ends)
    kept = logits.topk(3).indices.numpy()
    assert (kept == tokens[:, None]).any(1).all()
    assert np.isfinite(logprobs).all()
    tokens, logprobs = sample(logits, ones, ones * 1e-6, zeros, ends)
    np.testing.assert_array_equal(tokens, logits.argmax(-1).numpy())
    np.testing.assert_allclose(logprobs, 0, atol=1e-6)


def test_each_row_is_sampled_by_its_own_rules() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]] * 3)
    temperature, top_k = np.array([0.0, 0.5, 1.0], dtype=np.float32), np.array([0, 2, 0])
    tokens, logprobs = sample(logits, temperature, np.ones(3, dtype=np.float32), top_k, np.array([0.0, 0.0, 0.999]))
    assert tokens.tolist() == [2, 1, 2]
    plain, halved = np.exp([0.0, 1.0, 2.0]), np.exp([2.0, 4.0])
    np.testing.assert_allclose(
        np.exp(logprobs), [plain[2] / plain.sum(), halved[0] / halved.sum(), plain[2] / plain.sum()], rtol=1e-6
    )


def test_stop_strings_within_and_across_tokens() -> None:
    tokenizer = tiny.make_tokenizer()

    def first(stops: tuple[str, ...], text: str) -> int:
        watch = StopStrings(tokenizer, stops)
        return next((i for i, t in enumerate(tokenizer(text).input_ids) if watch.feed(t)), -1)

    assert first(("</answer>",), "12</answer>+") == 1
    assert first(("2+3",), "1+2+3+4") == 4
    assert first(("ab", "+"), "aab+") == 2
    assert first((">",), "1<answer>2") == 1
    assert first(("x",), "1+2") == -1
    assert first(("1+2+3",), "1+2+3") == 4  # at the very beginning, where less text has come than is kept


def test_a_stop_string_may_begin_in_what_was_sampled_before() -> None:
    tokenizer = tiny.make_tokenizer()

    def watch(begun: int, stop: str = "2+3") -> StopStrings | None:
        ids = np.array(tokenizer("1+2+").input_ids)
        return StopStrings.of(Request(id="r", prompt_ids=ids, sampling=Sampling(stop=(stop,)), begun=begun), tokenizer)

    three = tokenizer("3").input_ids[0]
    fed = [watch(begun) for begun in (0, 1, 2)]
    assert [each.feed(three) for each in fed if each] == [False, False, True]


def test_stop_strings_of_a_tokenizer_without_a_backend() -> None:
    class Slow:
        def decode(self, ids: list[int], **_: Any) -> str:
            return bytes(ids).decode("utf-8", errors="replace")

    watch = StopStrings(Slow(), ("é!",))
    assert [watch.feed(b) for b in "aé!".encode()] == [False, False, False, True]


def test_versions_from_spans() -> None:
    assert spread([(0, 3), (2, 5)], 4).tolist() == [3, 3, 5, 5]
    assert spread([(0, 3), (2, 5)], 2).tolist() == [3, 3]
    assert spread([], 0).tolist() == []


def test_a_tied_head_without_embeddings_is_an_error() -> None:
    lonely = Weights(4, {"lm_head.weight": np.zeros((2, 2))}, {"lm_head.weight": "float32"})
    with pytest.raises(EngineError, match=r"version 4.*embed_tokens"):
        with_tied_head(lonely, True)
    assert with_tied_head(lonely, False) is lonely


def test_names_beyond_the_model_are_let_through_and_few_are_listed() -> None:
    sent = Weights(1, {"a": np.zeros(2), "more": np.zeros(1)}, {"a": "float32", "more": "float32"})
    check_names(sent, {"a": (2,)})
    with pytest.raises(EngineError, match=r"9 of 10 tensors are missing: b0, b1, b2, b3, b4"):
        check_names(sent, {"a": (2,), **{f"b{i}": (1,) for i in range(9)}})


def test_weights_through_shared_memory() -> None:
    sent = Weights(
        3,
        {
            "a.b": np.arange(6, dtype=np.uint16).reshape(2, 3),
            "c": np.array([1.5], np.float32),
            "d": np.arange(6, dtype=np.float32).reshape(2, 3).T,
            "e": np.array(2.5, np.float64),
        },
        {"a.b": "bfloat16", "c": "float32", "d": "float32", "e": "float64"},
    )
    with shared(sent) as description:
        got = read_shared(description)
    assert got.version == 3 and dict(got.dtypes) == dict(sent.dtypes)
    assert list(got.tensors) == list(sent.tensors)
    for name, tensor in got.tensors.items():
        assert isinstance(tensor, np.ndarray)
        np.testing.assert_array_equal(tensor, sent.tensors[name])
        assert tensor.shape == sent.tensors[name].shape
        assert not tensor.flags.writeable and tensor.flags.aligned


SENDER = """
import sys
import numpy as np
from rlsdk.contracts import Weights
from rlsdk.engines.vllm_worker import shared

with shared(Weights(3, {"a": np.arange(6, dtype=np.uint16)}, {"a": "bfloat16"})) as description:
    print(description, flush=True)
    sys.stdin.read()
"""


def test_weights_that_an_engine_shares_with_its_workers_end_with_it_when_it_is_killed() -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SENDER], text=True, **pipes) as sender:
        assert sender.stdout
        description = sender.stdout.readline()
        np.testing.assert_array_equal(read_shared(description).tensors["a"], np.arange(6))
        assert os.readlink(json.loads(description)["path"]).startswith("/memfd:")  # and not a file that would stay
        sender.kill()
    with pytest.raises(FileNotFoundError):
        read_shared(description)


def test_arguments_on_a_cpu() -> None:
    found = engine_arguments(MODEL, CPU, Vllm(max_num_seqs=64))
    assert found["enforce_eager"] and found["skip_tokenizer_init"] and not found["async_scheduling"]
    assert (found["model"], found["dtype"], found["max_model_len"]) == ("folder", "bfloat16", 100)
    assert found["logprobs_mode"] == "processed_logprobs"
    assert found["max_num_seqs"] == 64
    assert "tensor_parallel_size" not in found and "enable_sleep_mode" not in found
    divided = engine_arguments(MODEL, CPU, Vllm(tensor_parallel_size=2))
    assert divided["tensor_parallel_size"] == 2 and "enable_sleep_mode" not in divided
    assert "hf_overrides" not in found
    exact = engine_arguments(attrs.evolve(MODEL, head_dtype="float32"), CPU, Vllm(args={"hf_overrides": {"a": 1}}))
    assert exact["hf_overrides"] == {"a": 1, "head_dtype": "float32"}
    other = engine_arguments(MODEL, attrs.evolve(CPU, rank=1), Vllm())
    assert other["seed"] != found["seed"]
    assert 0 <= other["seed"] < 2**31


def test_latent_attention_on_a_cpu_is_rotated_by_torch() -> None:
    assert "compilation_config" not in engine_arguments(MODEL, CPU, Vllm())
    found = engine_arguments(MODEL, CPU, Vllm(), latent=True)
    assert found["compilation_config"] == {"custom_ops": ["-rotary_embedding"]}
    assert "compilation_config" not in engine_arguments(MODEL, GPU, Vllm(), latent=True)


def test_arguments_on_gpus() -> None:
    alone = engine_arguments(MODEL, attrs.evolve(GPU, colocated=False), Vllm())
    assert "tensor_parallel_size" not in alone and "distributed_executor_backend" not in alone
    assert not alone["enable_sleep_mode"] and not alone["enforce_eager"]
    shared = engine_arguments(MODEL, GPU, Vllm(tensor_parallel_size=2, gpu_memory_utilization=0.4, enforce_eager=True))
    assert shared["tensor_parallel_size"] == 2
    assert shared["distributed_executor_backend"] == "rlsdk.engines.vllm_classes.TensorParallelExecutor"
    assert shared["enable_sleep_mode"] and shared["enforce_eager"]
    assert shared["gpu_memory_utilization"] == 0.4


def test_on_a_gpu_of_the_learner_an_engine_leaves_room_for_its_weights() -> None:
    shares = [
        engine_arguments(MODEL, attrs.evolve(GPU, colocated=colocated), Vllm())["gpu_memory_utilization"]
        for colocated in (True, False)
    ]
    assert shares == [0.7, 0.85]


def test_further_arguments() -> None:
    assert engine_arguments(MODEL, CPU, Vllm(args={"block_size": 32}))["block_size"] == 32
    with pytest.raises(OptionError, match=r"args\.max_model_len: is set by model\.max_length"):
        rlsdk.load("engine", "vllm", args={"max_model_len": 5})
    given = {"max_num_seqs": 5, "data_parallel_size": 2, "pipeline_parallel_size": 2}
    with pytest.raises(OptionError) as wrong:
        rlsdk.load("engine", "vllm", args=given)
    assert "args.max_num_seqs: is set by engine.max_num_seqs; remove it from args" in str(wrong.value)
    assert "args.data_parallel_size: is set by placement.engines, each of which holds a model" in str(wrong.value)
    assert "args.pipeline_parallel_size: rlsdk runs one batch at a time" in str(wrong.value)


@pytest.mark.stack
def test_all_arguments_are_vllms(vllm_engine: Any) -> None:
    given = {**engine_arguments(MODEL, GPU, Vllm(tensor_parallel_size=2)), **engine_arguments(MODEL, CPU, Vllm())}

    def known(engine: Any) -> set[str]:
        from vllm import EngineArgs

        return set(EngineArgs.__dataclass_fields__)

    assert set(given) <= vllm_engine.run(known)


def test_environment_of_vllm() -> None:
    found = Vllm(kv_cache_gib=3).environment(CPU)
    assert found["OMP_NUM_THREADS"] == "2"
    assert "timeout:" in found["RES_OPTIONS"]  # of name servers
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert found["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in Vllm(enforce_eager=False).environment(CPU)
    folders = ["VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR"]
    assert len({found[f] for f in folders}) == 4
    assert all(Path(found[f]).parent == Path("cache") for f in folders)
    gpu = Vllm().environment(GPU)
    assert "TORCHDYNAMO_DISABLE" not in gpu and "VLLM_CPU_KVCACHE_SPACE" not in gpu


def test_processes_that_divide_a_model_share_the_threads_of_their_engine() -> None:
    assert Vllm(tensor_parallel_size=2).environment(CPU)["OMP_NUM_THREADS"] == "1"
    crowded = Vllm(tensor_parallel_size=4).environment(CPU)
    assert crowded["OMP_NUM_THREADS"] == "1" and crowded["OMP_WAIT_POLICY"] == "PASSIVE"


def test_each_tensor_parallel_process_has_its_own_cache() -> None:
    net = torch.nn.Linear(10, 10, bias=False)
    whole, divided = (
        {use.role: use.bytes for use in vllm_memory(MODEL, net, CPU, kv_cache_gib=2, gpus=gpus, room=0, adapter=False)}
        for gpus in (1, 2)
    )
    assert whole["engine weights"] == divided["engine weights"] == 200
    assert (whole["engine KV cache"], divided["engine KV cache"]) == (2 * 2**30, 4 * 2**30)
    assert divided["engine process"] == 3 * whole["engine process"]  # one more schedules


def test_only_the_base_model_of_an_adapter_sleeps_in_main_memory() -> None:
    net = torch.nn.Linear(10, 10, bias=False)

    def asleep(place: ActorSpec, *, adapter: bool) -> list[tuple[int, bool]]:
        uses = vllm_memory(MODEL, net, place, kv_cache_gib=2, gpus=2, room=1000, adapter=adapter)
        return [(use.bytes, use.on_host) for use in uses if use.role == "sleeping engine weights"]

    assert asleep(GPU, adapter=True) == [(200, True)]
    assert asleep(GPU, adapter=False) == []  # discarded: the next weights replace it
    assert asleep(attrs.evolve(GPU, colocated=False), adapter=True) == asleep(CPU, adapter=True) == []


@pytest.mark.parametrize(
    ("size", "change", "counts"),
    [
        (1, {}, []),
        (2, {}, []),
        (3, {}, ["8 attention heads", "100 rows of a feed-forward layer", "4 key-value heads"]),
        (8, {}, ["100 rows of a feed-forward layer"]),  # two processes for each head of keys and values
        (2, {"moe_intermediate_size": 7, "num_key_value_heads": None}, ["7 rows of an expert"]),
    ],
)
def test_models_that_so_many_processes_cannot_divide(size: int, change: dict[str, Any], counts: list[str]) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 100, **change}
    config = SimpleNamespace(**sizes)
    config.get_text_config = lambda: config
    faults = parallel_faults(SimpleNamespace(config=config), size)
    assert [fault.partition(" (")[0] for fault in faults] == counts
    assert all(f"cannot be divided by {size}; change engine.tensor_parallel_size" in fault for fault in faults)


@pytest.mark.parametrize(
    ("values", "tokens"),
    [
        ({}, math.inf),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 512),
        ({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 2048),
        ({"max_position_embeddings": 512, "rope_parameters": {"sliding": {"rope_type": "dynamic", "factor": 2}}}, 1024),
    ],
)
def test_tokens_that_a_model_was_made_to_read(values: dict[str, Any], tokens: float) -> None:
    assert positions(SimpleNamespace(**values)) == tokens


@pytest.mark.parametrize(("named", "tokens"), [(32_768, 131_072), (131_072, 131_072)])
def test_positions_stretched_by_yarn_are_counted_once(named: int, tokens: int) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    assert positions(SimpleNamespace(max_position_embeddings=named, rope_parameters=rope)) == tokens


def test_environment_of_a_compiled_engine() -> None:
    found = rlsdk.load("engine", "transformers", compile=True).environment(CPU)
    assert found["TORCHINDUCTOR_COMPILE_THREADS"] == "2"
    assert Path(found["TORCHINDUCTOR_CACHE_DIR"]).parent == Path("cache")
    assert "TORCHINDUCTOR_COMPILE_THREADS" not in rlsdk.load("engine", "transformers").environment(CPU)


@pytest.mark.parametrize("name", ["vllm", "transformers"])
def test_waiting_threads_sleep_where_others_need_the_cores(name: str) -> None:
    engine = rlsdk.load("engine", name)
    assert "OMP_WAIT_POLICY" not in engine.environment(CPU)
    for busy in ({"world_size": 2}, {"colocated": False}):
        assert engine.environment(attrs.evolve(CPU, **busy))["OMP_WAIT_POLICY"] == "PASSIVE"


def test_vllm_refuses_a_process_without_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    with pytest.raises(EngineError, match=r"VLLM_\w+ is None, but must be '.*environment\(place\)"):
        Vllm().start(MODEL, CPU)


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "ieee"), ("bfloat16", None)])
def test_vllm_attends_in_float32_to_float32_on_a_gpu(
    dtype: Any, precision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    empty = Model(path=str(tmp_path), dtype=dtype)
    with patch.dict(os.environ, Vllm().environment(GPU)):
        with pytest.raises((OSError, ValueError)):
            Vllm().start(empty, GPU)
        assert os.environ.get("TRITON_F32_DEFAULT") == precision


def test_shapes_of_a_checkpoint(model: Model, tmp_path: Path) -> None:
    found = read_header(model.path)
    assert found is not None
    assert found["model.embed_tokens.weight"] == (130, 128)
    assert "lm_head.weight" not in found
    assert read_header(str(tmp_path)) is None


def test_engines_are_found_without_importing_what_they_run_on() -> None:
    code = (
        "import sys, rlsdk; e = [rlsdk.load('engine', n) for n in ('vllm', 'transformers')];"
        "print([m for m in ('vllm', 'ray', 'torch', 'transformers', 'deepspeed') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def _generate(engine: Any, model: Model, asked: list[Request]) -> list[Any]:
    engine.start(model, ActorSpec(role="engine"))
    engine.add(asked)
    done = []
    while engine.unfinished:
        done += engine.step()
    return sorted(done, key=lambda c: (c.request, c.index))


@pytest.mark.parametrize(
    "options",
    [{"max_num_batched_tokens": 16}, {"kv_cache_gib": 0.0005}, {"kv_cache_gib": 1e-9}, {"max_num_seqs": 3}],
    ids=str,
)
def test_limits_of_the_transformers_engine_change_no_sample(model: Model, options: dict[str, Any]) -> None:
    asked = [
        Request(
            id=f"r{i}",
            prompt_ids=np.arange(20, 24 + 5 * (i % 4)),
            sampling=Sampling(max_tokens=3 + 7 * (i % 5), ignore_eos=True),
            n=1 + i % 3,
            seed=i,
        )
        for i in range(12)
    ]
    wide = _generate(rlsdk.load("engine", "transformers"), model, asked)
    narrow = _generate(rlsdk.load("engine", "transformers", **options), model, asked)
    assert [c.token_ids.tolist() for c in wide] == [c.token_ids.tolist() for c in narrow]


@pytest.mark.parametrize("shape", [{"kv_heads": 2}, {"tied": False}], ids=str)
def test_other_shapes_of_models(tmp_path: Path, shape: dict[str, Any]) -> None:
    model = tiny.make_model(tmp_path, seed=3, **shape)
    engine = rlsdk.load("engine", "transformers")
    asked = [Request(id="r", prompt_ids=np.arange(20, 27), sampling=Sampling(max_tokens=9, ignore_eos=True), n=3)]
    for completion in _generate(engine, model, asked):
        whole = np.concatenate([asked[0].prompt_ids, completion.token_ids])
        np.testing.assert_allclose(completion.logprobs, tiny.reference_logprobs(model, whole)[6:], atol=1e-4)
    new = tiny.changed(model, 1)
    engine.load_weights(new)
    np.testing.assert_allclose(engine.logprobs(whole), tiny.reference_logprobs(model, whole, new), atol=1e-4)
    if "tied" in shape:
        short = Weights(1, {n: t for n, t in new.tensors.items() if n != "lm_head.weight"}, new.dtypes)
        with pytest.raises(EngineError, match=r"lm_head\.weight"):
            engine.load_weights(short)
    strange = Weights(1, {**new.tensors, "no.such": np.zeros(1)}, {**new.dtypes, "no.such": "float32"})
    with pytest.raises(EngineError, match=r"do not belong to the model: no\.such"):
        engine.load_weights(strange)


def test_sliding_windows(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=130, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.2, use_sliding_window=True, sliding_window=6, max_window_layers=1,
        eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    assert "sliding_attention" in config.layer_types
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    tiny.make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    model = Model(path=str(tmp_path / "model"), tokenizer=str(tmp_path / "tokenizer"), max_length=64)
    prompts = {"3": np.arange(20, 23), "11": np.arange(20, 31)}
    sampling = Sampling(max_tokens=20, ignore_eos=True)
    asked = [Request(id=name, prompt_ids=prompt, sampling=sampling) for name, prompt in prompts.items()]
    for completion in _generate(rlsdk.load("engine", "transformers"), model, asked):
        prompt = prompts[completion.request]
        found = tiny.reference_logprobs(model, np.concatenate([prompt, completion.token_ids]))[len(prompt) - 1 :]
        np.testing.assert_allclose(completion.logprobs, found, atol=1e-4)


def test_both_model_runners_of_vllm_are_seeded() -> None:
    """The first samples with torch's generator, the second draws the seeds of requests from numpy's."""
    import torch

    from rlsdk.engines.vllm_worker import WorkerExtension

    drawn = []
    with torch.random.fork_rng(devices=[]):
        for seed in (7, 2**40 + 1, 7):
            WorkerExtension().rlsdk_seed(seed)
            drawn.append((np.random.randint(-(2**63), 2**63 - 1), torch.rand(1).item()))
    assert drawn[0] == drawn[2]
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1] != drawn[1][1]


def test_a_sleeping_engine_gives_its_gpus_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Transformers(max_num_seqs=2)
    engine.start(tiny.make_model(tmp_path), CPU)
    engine.add([Request(id="r0", prompt_ids=np.array([20, 7]), sampling=Sampling(max_tokens=4, ignore_eos=True))])
    engine.step()
    held = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: held.append([s.keys for s in engine._loaded._slots.layers]))
    engine.sleep()
    assert not held
    monkeypatch.setattr(engine._loaded, "_device", "cuda")
    engine.sleep()
    assert held == [[None, None]]
    engine.stop()


def test_shared_memory_of_frozen_objects_loses_its_name() -> None:
    """vLLM's workers on GPUs freeze their objects once they are warm; those on CPUs do not."""
    from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer
    from vllm.utils.gc_utils import freeze_gc_heap

    buffer = ShmRingBuffer(1, 64, 1)
    path = Path("/dev/shm", buffer.shared_memory.name)
    assert path.exists()
    freeze_gc_heap()
    try:
        unname_shared_memory()
        assert not path.exists()
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
