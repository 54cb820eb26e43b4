"""Options of the engine `vllm`, and what they imply before vLLM starts: faults, memory, environment variables."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs

from rlsdk.contracts import ActorSpec, Adapter, MemoryUse, Model
from rlsdk.engines import vllm_model
from rlsdk.engines.memory import vllm_memory
from rlsdk.engines.pretrained import positions
from rlsdk.engines.vllm_arguments import OWNED, adapter_arguments
from rlsdk.errors import OptionError
from rlsdk.limits import Count, above, at_most


@attrs.define(kw_only=True, eq=False, slots=False)
class VllmOptions:
    """Options of `Vllm`.

    Attributes:
        tensor_parallel_size: Number of GPUs, or of processes on a CPU, that share the layers of one model.
        kv_cache_gib: Memory for the KV cache on a CPU, in GiB, per tensor-parallel process.
        gpu_memory_utilization: Share of GPU memory that vLLM may use for weights and KV cache.
        max_num_seqs: Maximum number of sequences that run at once; the rest wait.
        max_num_batched_tokens: Maximum number of tokens per step, prompts included; longer prompts are read in chunks.
        enforce_eager: Disable compilation and CUDA graphs. Default: true on a CPU, where compilation takes half a
            minute and saves a small model about 5 % of its time, and false on a GPU.
        args: Additional fields of vLLM's `EngineArgs`.
    """

    tensor_parallel_size: Count = 1
    kv_cache_gib: Count = 1
    gpu_memory_utilization: Annotated[float, above(0), at_most(1)] = 0.85
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

    def longest(self, model: Any) -> float:
        """Return the maximum sequence length in tokens; see `LimitsLength`."""
        overridden = "hf_overrides" in self.args or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1"
        return math.inf if overridden else positions(model.config.get_text_config())

    def generation_memory(
        self, model: Model, net: Any, place: ActorSpec, device_bytes: int | None
    ) -> Sequence[MemoryUse]:
        """Estimate the peak memory of an engine; see `EstimatesGeneration`."""
        room, adapter = int(self.gpu_memory_utilization * (device_bytes or 0)), self._adapter is not None
        return vllm_memory(
            model, net, place, kv_cache_gib=self.kv_cache_gib, gpus=self.gpus, room=room, adapter=adapter
        )

    def environment(self, place: ActorSpec) -> Mapping[str, str]:
        """Return the environment variables to set before the actor's process imports anything."""
        workers = self.tensor_parallel_size
        each = attrs.evolve(place, threads=max(1, place.threads // workers), world_size=place.world_size * workers)
        found = each.environment() | {
            "VLLM_NO_USAGE_STATS": "1",
            # Keep the scheduler in this process, so that canary requests can go first.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        if place.cache:
            found["VLLM_CACHE_ROOT"] = str(Path(place.cache) / "vllm")
        if place.device == "cpu":
            found |= {
                # vLLM would pin each engine to the same cores.
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
            }
            if self.enforce_eager is not False:
                # Otherwise vLLM compiles a sampler kernel anyway, which takes 12 s and gains nothing.
                found["TORCHDYNAMO_DISABLE"] = "1"
        return found

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
