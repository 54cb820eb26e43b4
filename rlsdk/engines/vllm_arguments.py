"""Arguments of vLLM: its `EngineArgs`, from a model, its placement and the options, and prompts with images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlsdk.contracts import ActorSpec, Adapter, Model, Request
from rlsdk.engines import vllm_adapter
from rlsdk.engines.common import mix
from rlsdk.vision import Vision

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
_EXECUTOR = "rlsdk.engines.vllm_classes.TensorParallelExecutor"


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
        "scheduler_cls": "rlsdk.engines.vllm_classes.DecodeScheduler",
    }
    if adapter is not None:
        found |= vllm_adapter.arguments(adapter)
    if routing:
        found["enable_return_routed_experts"] = True
    if images:
        found |= _IMAGE_ARGUMENTS
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


_IMAGE_ARGUMENTS = {
    # vLLM creates the model's processor, which requires the tokenizer even for ids and pixels.
    "skip_tokenizer_init": False,
    "mm_processor_cache_gb": 0,
    "mm_device_do_normalize": False,  # the pixels are normalised already
}
"""Fields of vLLM's `EngineArgs` for a model that reads images."""


def prompt_with_images(request: Request, vision: Vision) -> Any:
    """Return vLLM's input for a prompt with images: the ids unchanged, and the same pixels as the learner reads.

    vLLM's own tokenisation and preprocessing of images might differ from the learner's.

    Args:
        request: Request with images; its prompt contains their tokens.
        vision: Image preprocessing of the model.
    """
    import torch
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    positions = [] if request.image_positions is None else request.image_positions.tolist()
    items, places = [], []
    begin = 0
    for image in request.images:
        given = dict(vision.pixels(image))
        patches = torch.tensor([len(given["pixel_values"])])
        if "image_grid_thw" not in given:  # Gemma 3
            given["num_patches"] = patches
        fields = {name: MultiModalFieldConfig.batched("image", keep_on_cpu=True) for name in given}
        fields["pixel_values"] = MultiModalFieldConfig.flat_from_sizes("image", patches)
        items += MultiModalKwargsItems.from_hf_inputs(given, fields)["image"]
        count = vision.count(image)
        places.append(PlaceholderRange(offset=positions[begin], length=count))
        begin += count
    hashes = [image.digest for image in request.images]
    return mm_input(
        request.prompt_ids.tolist(), MultiModalKwargsItems({"image": items}), {"image": hashes}, {"image": places}
    )
