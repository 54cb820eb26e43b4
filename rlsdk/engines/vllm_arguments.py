"""Build vLLM's `EngineArgs` from a model, its placement and the engine's options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlsdk.contracts import ActorSpec, Adapter, Model
from rlsdk.engines import vllm_adapter, vllm_images
from rlsdk.engines.common import mix

if TYPE_CHECKING:
    from rlsdk.engines.vllm import Vllm

OWNED = {
    "model": "model.path",
    "dtype": "model.dtype",
    "max_model_len": "model.max_length",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "the run's seed",
    "logprobs_mode": "rlsdk itself: logprobs are those of the distribution sampled from",
    "async_scheduling": "rlsdk itself: a token's weight version must be that of the weights that sampled it",
    "worker_extension_cls": "rlsdk itself",
    "scheduler_cls": "rlsdk itself",
    "distributed_executor_backend": "rlsdk itself",
    "data_parallel_size": "placement.engines, each of which holds a model",
    "skip_tokenizer_init": "rlsdk itself",
    "enable_sleep_mode": "placement.colocate",
    "enable_lora": "learner.lora",
    "max_lora_rank": "learner.lora.rank",
    "enable_return_routed_experts": "a correction such as routing_replay",
}
"""Engine arguments that `args` may not set, with what sets them; engine options are checked separately."""
_EXECUTOR = "rlsdk.engines.vllm_executor.TensorParallelExecutor"


def engine_arguments(
    model: Model,
    place: ActorSpec,
    options: Vllm,
    adapter: Adapter | None = None,
    *,
    routing: bool = False,
    latent: bool = False,
    images: bool = False,
) -> dict[str, Any]:
    """Return fields for vLLM's `EngineArgs`.

    Args:
        model: Model to generate with.
        place: Placement of the engine.
        options: The engine's options; its `args` override the rest.
        adapter: Shape of the adapters that the engine will receive; None for whole models.
        routing: True to return routed experts.
        latent: True if the model uses latent attention, as DeepSeek-V3 does; matters only on a CPU.
        images: True if the model reads images.
    """
    cpu = place.device == "cpu"
    found: dict[str, Any] = {
        "model": model.path,
        "dtype": model.dtype,
        "max_model_len": model.max_length,
        "trust_remote_code": model.trust_remote_code,
        "skip_tokenizer_init": True,
        "seed": mix(place.seed, place.rank) % 2**31,
        "logprobs_mode": "processed_logprobs",
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": max(options.max_num_batched_tokens, options.max_num_seqs),
        "enforce_eager": cpu if options.enforce_eager is None else options.enforce_eager,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        # Each step then returns its own tokens, and none is running while weights are replaced.
        "async_scheduling": False,
        "worker_extension_cls": "rlsdk.engines.vllm_worker.WorkerExtension",
        "scheduler_cls": "rlsdk.engines.vllm_scheduler.DecodeScheduler",
    }
    if adapter is not None:
        found |= vllm_adapter.arguments(adapter)
    if routing:
        found["enable_return_routed_experts"] = True
    if images:
        found |= vllm_images.ARGUMENTS
    if cpu:
        found |= _for_cpu(latent=latent)
    else:
        found |= {"gpu_memory_utilization": options.gpu_memory_utilization, "enable_sleep_mode": place.colocated}
    if options.tensor_parallel_size > 1:
        found |= {"tensor_parallel_size": options.tensor_parallel_size, "distributed_executor_backend": _EXECUTOR}
    given = {**found, **options.args}
    if model.head_dtype == "float32":
        given["hf_overrides"] = {**given.get("hf_overrides", {}), "head_dtype": "float32"}
    return given


def _for_cpu(*, latent: bool) -> dict[str, Any]:
    # With vLLM's 128, attention over short sequences reads mostly padding; smaller blocks cost bookkeeping.
    found: dict[str, Any] = {"block_size": 64}
    if latent:
        # vLLM's CPU kernel rotates slices as if they were contiguous, which gives wrong results.
        found["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
    return found
