"""Options of the engine `vllm`, what they imply before vLLM starts, and the arguments of vLLM that they become."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs

from rlsdk.contracts import ActorSpec, Adapter, MemoryUse, Model, Request, Sampling, Weights
from rlsdk.engines import vllm_model
from rlsdk.engines.memory import vllm_memory
from rlsdk.engines.pretrained import positions
from rlsdk.errors import EngineError, OptionError
from rlsdk.isolation.scratch import scratch_folder
from rlsdk.limits import Count, above, at_most
from rlsdk.seeds import mix
from rlsdk.vision import Vision
from rlsdk.weights import from_weights

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
    options: VllmOptions,
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
    arguments: dict[str, Any] = {
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
        arguments |= adapter_arguments(adapter)
    if routing:
        arguments["enable_return_routed_experts"] = True
    if images:
        arguments |= _IMAGE_ARGUMENTS
    if cpu:
        # With vLLM's 128, attention over short sequences reads mostly padding; smaller blocks cost bookkeeping.
        arguments["block_size"] = 64
        if latent:
            # vLLM's CPU kernel rotates slices as if they were contiguous, which gives wrong results.
            arguments["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
    else:
        arguments |= {"gpu_memory_utilization": options.gpu_share(place), "enable_sleep_mode": place.colocated}
    if options.tensor_parallel_size > 1:
        arguments |= {"tensor_parallel_size": options.tensor_parallel_size, "distributed_executor_backend": _EXECUTOR}
    chosen = {**arguments, **options.args}
    if model.head_dtype == "float32":
        chosen["hf_overrides"] = {**chosen.get("hf_overrides", {}), "head_dtype": "float32"}
    return chosen


_IMAGE_ARGUMENTS = {
    # vLLM creates the model's processor, which requires the tokenizer even for ids and pixels.
    "skip_tokenizer_init": False,
    "mm_processor_cache_gb": 0,
    "mm_device_do_normalize": False,  # the pixels are normalised already
}
"""Fields of vLLM's `EngineArgs` for a model that reads images."""


def sampling_params(sampling: Sampling, room: int, ends: Iterable[int]) -> Any:
    """Return vLLM's `SamplingParams`.

    Args:
        sampling: Sampling parameters of a request.
        room: Maximum number of tokens after the prompt.
        ends: End tokens of the model.
    """
    from vllm import SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=min(sampling.max_tokens, room),
        stop_token_ids=[] if sampling.ignore_eos else sorted({*sampling.stop_token_ids, *ends}),
        ignore_eos=True,  # all ends are in stop_token_ids
        logprobs=sampling.top_logprobs,
        detokenize=False,
        skip_clone=True,
    )


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
        inputs = dict(vision.pixels(image))
        patches = torch.tensor([len(inputs["pixel_values"])])
        if "image_grid_thw" not in inputs:  # Gemma 3
            inputs["num_patches"] = patches
        fields = {name: MultiModalFieldConfig.batched("image", keep_on_cpu=True) for name in inputs}
        fields["pixel_values"] = MultiModalFieldConfig.flat_from_sizes("image", patches)
        items += MultiModalKwargsItems.from_hf_inputs(inputs, fields)["image"]
        count = vision.count(image)
        places.append(PlaceholderRange(offset=positions[begin], length=count))
        begin += count
    hashes = [image.digest for image in request.images]
    return mm_input(
        request.prompt_ids.tolist(),
        MultiModalKwargsItems({"image": items}),
        {"image": hashes},
        {"image": places},
    )


_NAME, _ID = "rlsdk", 1
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's `MaxLoRARanks`: the maximum ranks that it can reserve memory for; lower ranks also fit."""


def adapter_arguments(adapter: Adapter) -> dict[str, Any]:
    """Return the fields of vLLM's `EngineArgs` that reserve memory for one adapter.

    Raises:
        EngineError: The rank is higher than vLLM supports.
    """
    ranks = [rank for rank in _RANKS if rank >= adapter.rank]
    if not ranks:
        raise EngineError(
            f"an adapter of rank {adapter.rank}: vLLM supports ranks up to {_RANKS[-1]}; choose a lower rank, or send "
            "whole models (learner.lora.sync: merged)"
        )
    return {"enable_lora": True, "max_lora_rank": ranks[0], "max_loras": 1}


def adapter_request() -> Any:
    """Return the LoRA request to attach to every request: the id of the loaded adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(_NAME, _ID, _NAME)


def load_blank_adapter(llm: Any) -> None:
    """Load a zero adapter under the id, so that requests before the first real adapter sample from the base model."""
    llm.collective_rpc("rlsdk_blank_adapter", args=(_NAME, _ID))


def load_adapter(llm: Any, weights: Weights) -> None:
    """Replace the adapter on every worker; in-flight requests keep its id, so they continue with the new adapter.

    Raises:
        EngineError: vLLM rejected the adapter.
    """
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    assert weights.adapter is not None
    # The fields of peft's format that vLLM reads; it finds the adapted layers by the tensors' names.
    config = {"r": weights.adapter.rank, "lora_alpha": weights.adapter.alpha, "target_modules": "all-linear"}
    with scratch_folder("rlsdk-lora-", "/dev/shm") as folder:  # in memory that workers in any process can read
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(dict(from_weights(weights)), str(folder / "adapter_model.safetensors"))
        if not llm.add_lora(LoRARequest(_NAME, _ID, str(folder), load_inplace=True)):
            raise EngineError(f"vLLM did not load the adapter of version {weights.version}")


@attrs.define(kw_only=True, eq=False, slots=False)
class VllmOptions:
    """Options of `Vllm`.

    Attributes:
        tensor_parallel_size: Number of GPUs, or of processes on a CPU, that share the layers of one model.
        kv_cache_gib: Memory for the KV cache on a CPU, in GiB, per tensor-parallel process.
        gpu_memory_utilization: Share of GPU memory that vLLM may use for weights and KV cache. Default: 0.85, or 0.7 on
            a GPU of the learner, whose weights stay there while engines generate.
        max_num_seqs: Maximum number of sequences that run at once; the rest wait.
        max_num_batched_tokens: Maximum number of tokens per step, prompts included; longer prompts are read in chunks.
        enforce_eager: Disable compilation and CUDA graphs. Default: true on a CPU, where compilation takes half a
            minute and saves a small model about 5 % of its time, and false on a GPU.
        args: Additional fields of vLLM's `EngineArgs`.
    """

    tensor_parallel_size: Count = 1
    kv_cache_gib: Count = 1
    gpu_memory_utilization: Annotated[float, above(0), at_most(1)] | None = None
    max_num_seqs: Count = 256
    max_num_batched_tokens: Count = 8192
    enforce_eager: bool | None = None
    args: Mapping[str, Any] = attrs.field(factory=dict)

    _adapter: Adapter | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        own = {field.name: f"engine.{field.name}" for field in attrs.fields(type(self)) if field.init}
        taken = {name: owner for name, owner in {**own, **OWNED}.items() if name in self.args}
        faults = [(f"args.{name}", f"is set by {owner}; remove it from args") for name, owner in taken.items()]
        if self.args.get("pipeline_parallel_size", 1) != 1:
            # A pipeline runs several batches at once, so a token could be tagged with the wrong weight version.
            text = "rlsdk runs one batch at a time, but a pipeline runs several; set engine.tensor_parallel_size"
            faults.append(("args.pipeline_parallel_size", text))
        if faults:
            raise OptionError("engine 'vllm'", faults)

    @property
    def gpus(self) -> int:
        """Number of GPUs that one engine uses."""
        return self.tensor_parallel_size

    def gpu_share(self, place: ActorSpec) -> float:
        """Return the share of a GPU's memory that vLLM may use."""
        if self.gpu_memory_utilization is not None:
            return self.gpu_memory_utilization
        return 0.7 if place.colocated else 0.85

    def longest(self, model: Any) -> float:
        """Return the maximum sequence length in tokens; see `LimitsLength`."""
        overridden = "hf_overrides" in self.args or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1"
        return math.inf if overridden else positions(model.config.get_text_config())

    def generation_memory(
        self, model: Model, net: Any, place: ActorSpec, device_bytes: int | None
    ) -> Sequence[MemoryUse]:
        """Estimate the peak memory of an engine; see `EstimatesGeneration`."""
        room, adapter = int(self.gpu_share(place) * (device_bytes or 0)), self._adapter is not None
        return vllm_memory(
            model, net, place, kv_cache_gib=self.kv_cache_gib, gpus=self.gpus, room=room, adapter=adapter
        )

    def environment(self, place: ActorSpec) -> Mapping[str, str]:
        """Return the environment variables to set before the actor's process imports anything."""
        workers = self.tensor_parallel_size
        each = attrs.evolve(place, threads=max(1, place.threads // workers), world_size=place.world_size * workers)
        variables = each.environment() | {
            "VLLM_NO_USAGE_STATS": "1",
            # Keep the scheduler in this process, so that canary requests can go first.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        if place.cache:
            variables["VLLM_CACHE_ROOT"] = str(Path(place.cache) / "vllm")
        if place.device == "cpu":
            variables |= {
                # vLLM would pin each engine to the same cores.
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
            }
            if self.enforce_eager is not False:
                # Otherwise vLLM compiles a sampler kernel anyway, which takes 12 s and gains nothing.
                variables["TORCHDYNAMO_DISABLE"] = "1"
        return variables

    def expect_adapter(self, adapter: Adapter) -> None:
        """Make `load_weights` expect adapters of this shape on top of the folder's weights; called before `start`.

        Raises:
            EngineError: The rank is higher than vLLM supports.
        """
        adapter_arguments(adapter)
        self._adapter = adapter

    def model_faults(self, model: Any) -> Sequence[str]:
        """Return why a model cannot be trained with the installed vLLM; the model may have no weights."""
        adapters = [] if self._adapter is None else vllm_model.adapter_faults(model)
        parallel = vllm_model.parallel_faults(model, self.tensor_parallel_size)
        return [*vllm_model.model_faults(model), *adapters, *parallel]

    def image_faults(self, model: Any) -> Sequence[str]:
        """Return why this engine cannot read images for a model; the model may have no weights."""
        return vllm_model.image_faults(model)

    def routing_faults(self, model: Any) -> Sequence[str]:
        """Return why vLLM cannot return routed experts; independent of the model."""
        return vllm_model.routing_faults()
