"""The engine `vllm`: vLLM's scheduler and kernels in the engine actor's process, one decode step at a time."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any, ClassVar

import attrs
import numpy as np

from rlsdk.contracts import (
    ActorSpec,
    Adapter,
    Completion,
    Finish,
    Model,
    Request,
    Sampled,
    SendsFromEachRank,
    StreamsWeights,
    Weights,
)
from rlsdk.conversion import trained_shapes
from rlsdk.engines import vllm_options
from rlsdk.engines.checks import (
    check_images,
    check_known,
    check_names,
    check_requests,
    checked,
    with_tied_head,
    with_tied_heads,
)
from rlsdk.engines.continuation import Continuation
from rlsdk.engines.copying import copy_parts, held_parts, layout_of
from rlsdk.engines.pretrained import end_ids, open_tokenizer
from rlsdk.engines.vllm_model import import_architectures
from rlsdk.engines.vllm_options import VllmOptions
from rlsdk.engines.vllm_worker import WeightStreamCall, shared, sockets_deleted, unname_shared_memory
from rlsdk.errors import EngineError, ValueFault
from rlsdk.marks import engine
from rlsdk.seeds import mix
from rlsdk.vision import Vision
from rlsdk.weights import joined

_FINISH: tuple[Finish, Finish, Finish] = ("stop", "length", "abort")
"""vLLM's `FinishReason` by number; higher numbers are failures."""


@engine("vllm")
@attrs.define(kw_only=True, eq=False, slots=False)
class Vllm(VllmOptions):
    """Generate with vLLM.

    On a CPU or a single GPU, vLLM runs in the actor's process, which drives each step. Weights are replaced between
    steps; in-flight requests continue, and their KV cache is recomputed with the new weights. Per-request seeds cost
    about 5 % of the throughput on a small model, since vLLM then uses one generator per sequence. Requests without a
    seed share the engine's generator, which `reseed` sets: the same requests in the same order give the same tokens.
    At temperature 0, logprobs are those at temperature 1. If the learner trains a LoRA adapter, only the adapter is
    loaded.

    The CUDA path (kernels, NCCL, sleep and wake) has never been run; tensor parallelism has been run on CPUs.

    Its options are those of `VllmOptions`.
    """

    loads_tensors: ClassVar[bool] = True

    _llm: Any = attrs.field(init=False, default=None)
    _model: Any = attrs.field(init=False, default=None)
    _place: Any = attrs.field(init=False, default=None)
    _tokenizer: Any = attrs.field(init=False, default=None)
    _ends: Any = attrs.field(init=False, default=())
    _expected: Mapping[str, tuple[int, ...]] = attrs.field(init=False, factory=dict)
    _version: int = attrs.field(init=False, default=0)
    _asleep: bool = attrs.field(init=False, default=False)
    _weights_asleep: bool = attrs.field(init=False, default=False)
    _discarded: bool = attrs.field(init=False, default=False)
    _serial: int = attrs.field(init=False, default=0)
    _returns_routing: bool = attrs.field(init=False, default=False)
    _vision: Vision | None = attrs.field(init=False, default=None)
    _running: dict[str, Continuation] = attrs.field(init=False, factory=dict)
    _ready: list[Completion] = attrs.field(init=False, factory=list)
    _canaries: dict[str, Any] = attrs.field(init=False, factory=dict)

    def preload(self) -> None:
        """Import vLLM, its CPU worker, and the modules that the worker imports when it loads a model."""
        from vllm import EngineArgs, LLMEngine  # noqa: F401
        from vllm.model_executor.layers.quantization.online import base  # noqa: F401
        from vllm.v1.worker import cpu_model_runner, cpu_worker  # noqa: F401

        from rlsdk.engines import actor  # noqa: F401

    def return_routing(self) -> None:
        """Make completions carry their tokens' routed experts; called before `start`."""
        self._returns_routing = True

    def start(self, model: Model, place: ActorSpec) -> None:
        """Load the model; the folder's weights are version 0.

        Raises:
            EngineError: The process lacks environment variables from `environment`.
        """
        for name, value in self.environment(place).items():
            if name.startswith("VLLM_") and os.environ.get(name) != value:
                raise EngineError(
                    f"{name} is {os.environ.get(name)!r}, but must be {value!r} before vLLM is imported; start the "
                    "engine in a process with the variables of `environment(place)`"
                )
        from vllm import EngineArgs, LLMEngine

        from rlsdk.engines.lazy_zeros import LazyZeros

        if place.device == "cuda" and model.dtype == "float32":
            # In TF32, Triton's default, vLLM's attention is off by more than the canary tolerates.
            os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
        self._model, self._place = model, place
        self._tokenizer = open_tokenizer(model)
        self._ends = end_ids(model, self._tokenizer)
        # Before vLLM starts, since it replaces transformers classes that it implements itself, such as GPT-NeoX's.
        self._expected = trained_shapes(model) or {}
        latent = False
        if place.device == "cpu":
            config = import_architectures(model).get_text_config()
            latent = getattr(config, "kv_lora_rank", None) is not None
        vision = Vision(model)
        images = vision.usable
        self._vision = vision if images else None
        arguments = vllm_options.engine_arguments(
            model, place, self, self._adapter, routing=self._returns_routing, latent=latent, images=images
        )
        with sockets_deleted() if self.tensor_parallel_size > 1 else nullcontext():
            with LazyZeros() if place.device == "cpu" and arguments["enforce_eager"] else nullcontext():
                self._llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
            if place.device == "cpu":  # on GPUs, NCCL's watchdog reads the file as long as the workers live
                self._llm.collective_rpc("rlsdk_remove_rendezvous")
            if self.tensor_parallel_size > 1:  # all its processes have answered, and thus opened what they share
                self._llm.collective_rpc("rlsdk_unname_shared_memory")
                unname_shared_memory()
        self._llm.set_weight_version("0")
        if self._adapter is not None:
            vllm_options.load_blank_adapter(self._llm)

    def add(self, requests: Sequence[Request]) -> None:
        """Admit requests in this order, or none if one of them cannot be generated.

        Raises:
            ValueFault: A request cannot be generated, or its id is in use.
        """
        from vllm.inputs import tokens_input

        vocabulary = self._llm.model_config.get_vocab_size()
        check_images(requests, self._vision)
        check_requests(requests, max_length=self._model.max_length, vocabulary=vocabulary)
        check_known([r.id for r in requests], (c.request for c in self._running.values()))
        for request in requests:
            ids = request.prompt_ids.tolist()
            prompt: Any = tokens_input(ids)
            if self._vision is not None and request.images:
                prompt = vllm_options.prompt_with_images(request, self._vision)
            room = self._model.max_length - len(ids)
            parent = self._process(prompt, vllm_options.sampling_params(request.sampling, room, self._ends))
            for index in range(request.n):  # as separate requests of vLLM, so that none waits for the others
                child = copy(parent)
                child.request_id = self._next_id()
                if request.seed is not None:
                    child.sampling_params = copy(parent.sampling_params)
                    child.sampling_params.seed = mix(request.seed, index)
                self._running[child.request_id] = Continuation.of(request, index, self._tokenizer)
                self._llm.engine_core.add_request(child)

    def _process(self, prompt: Any, params: Any) -> Any:
        tasks = self._llm.get_supported_tasks()
        adapter = None if self._adapter is None else vllm_options.adapter_request()
        return self._llm.input_processor.process_inputs("", prompt, params, tasks, lora_request=adapter)

    def _next_id(self) -> str:
        self._serial += 1
        return str(self._serial)

    def step(self) -> list[Completion]:
        """Run one decode step for all running requests; return the finished completions."""
        if not self._ready and self._running:
            self._advance()
        ready, self._ready = self._ready, []
        return ready

    def _advance(self) -> None:
        """Step vLLM once and record what it sampled."""
        self._check_awake(self._asleep)
        if self._discarded:
            raise EngineError("the engine discarded its weights when it went to sleep; call load_weights() first")
        outputs = self._llm.engine_core.get_output()
        version = int(outputs.weight_version or self._version)
        stopped = []
        for output in outputs.outputs:
            name = output.request_id
            if name in self._canaries:
                self._canaries[name] = self._canary(output, self._canaries[name])
                continue
            running = self._running.get(name)
            if running is None:  # aborted while this step ran
                continue
            reason = output.finish_reason
            if output.routed_experts is not None:
                running.routing.append(output.routed_experts)
            if output.new_token_ids:
                running.stamp(version)
                logprobs, top = output.new_logprobs, tuple[Any, ...]()
                if running.likeliest:  # the first column is the sampled token's
                    columns = slice(1, 1 + running.likeliest)
                    top = tuple(zip(logprobs.logprob_token_ids[:, columns], logprobs.logprobs[:, columns], strict=True))
                if running.record(output.new_token_ids, logprobs.logprobs[:, 0].tolist(), top):
                    if reason is None:
                        stopped.append(name)
                    reason = 0
            if reason is not None:
                del self._running[name]
                self._ready.append(running.complete(self._finish(running, reason)))
        self._llm.engine_core.abort_requests(stopped)

    @staticmethod
    def _canary(output: Any, found: np.ndarray | None) -> np.ndarray | None:
        """Return the logprobs of a prompt once vLLM has them."""
        tensors = output.new_prompt_logprobs_tensors
        if tensors is not None:
            found = tensors.logprobs[:, 0].numpy()
        if found is None and output.finish_reason is not None:
            raise EngineError(
                f"vLLM ended a request for the logprobs of a prompt without them: {output.finish_reason!r}"
            )
        return found

    @staticmethod
    def _check_awake(asleep: bool) -> None:
        if asleep:
            raise EngineError("the engine is asleep; call wake() first")

    @staticmethod
    def _finish(running: Continuation, reason: int) -> Finish:
        if reason >= len(_FINISH):
            raise EngineError(
                f"vLLM failed request {running.request!r}, continuation {running.index}: reason {reason!r}"
            )
        return _FINISH[reason]

    def sampled(self, since: Mapping[tuple[str, int], int]) -> list[Sampled]:
        """Return new tokens of running continuations.

        Args:
            since: (request id, index) -> first position to return; only these continuations are considered.
        """
        wanted = ((c, since.get((c.request, c.index))) for c in self._running.values())
        return [c.since(start) for c, start in wanted if start is not None and len(c.token_ids) > start]

    @property
    def unfinished(self) -> int:
        """Number of continuations that run or wait, or that `step` has yet to return."""
        return len(self._running) + len(self._ready)

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        """Abort requests (None: all); return what they had sampled, with finish reason `abort`."""
        wanted = None if ids is None else set(ids)
        ended = [n for n, c in self._running.items() if wanted is None or c.request in wanted]
        self._llm.engine_core.abort_requests(ended)
        return [self._running.pop(name).complete("abort") for name in ended]

    def load_weights(self, weights: Weights) -> None:
        """Replace the weights between steps; in-flight requests continue with a recomputed KV cache.

        Raises:
            EngineError: A tensor of the model is missing or has the wrong shape, the engine is asleep, or it got a
                whole model instead of an adapter or vice versa.
        """
        self._prepare(weights.version, weights.adapter)
        if self._adapter is not None:
            vllm_options.load_adapter(self._llm, weights)
        else:
            weights = with_tied_head(weights, self._tied)
            check_names(weights, self._expected)
            if self.tensor_parallel_size > 1:
                with shared(weights) as description:
                    self._llm.collective_rpc("rlsdk_load", args=(description,))
            else:
                self._llm.collective_rpc("rlsdk_load", args=(weights,))
        self._loaded(weights.version)

    def load_weight_parts(self, version: int, parts: Iterator[Weights]) -> None:
        """Replace the weights as `load_weights` does, loading each part, arrays or tensors, as it arrives.

        Workers in separate processes get the whole weights from shared memory, since their calls take no iterators.

        Raises:
            EngineError: As `load_weights`.
            TransferError: The stream of parts ended early.
        """
        if self.tensor_parallel_size > 1:
            if (weights := joined(parts, copy=True)) is not None:
                self.load_weights(weights)
            return
        self._prepare(version, None)
        fitting = checked(version, with_tied_heads(parts, self._tied), self._expected)
        self._llm.collective_rpc("rlsdk_load_parts", args=(fitting,))
        self._loaded(version)

    def receive_weights(self, version: int, transfer: StreamsWeights, offer: Any, seat: int) -> None:
        """Receive weights; of several workers, the first one receives them and sends them to the others.

        Raises:
            EngineError: As `load_weights`.
            TransferError: The stream of parts ended early.
        """
        if self.tensor_parallel_size == 1 or isinstance(transfer, SendsFromEachRank):
            self.load_weight_parts(version, transfer.receive(offer, seat))
            return
        import cloudpickle

        self._prepare(version, None)
        module = sys.modules.get(type(transfer).__module__)
        if module is not None and not module.__name__.startswith("rlsdk."):  # workers may be unable to import its file
            cloudpickle.register_pickle_by_value(module)
        stream = WeightStreamCall(transfer, offer, seat, version, self._tied, self._expected)
        for fault in self._llm.collective_rpc("rlsdk_receive", args=(cloudpickle.dumps(stream),)):
            if fault is not None:
                kind, text = fault
                raise kind(text)
        self._loaded(version)

    @property
    def _tied(self) -> bool:
        return bool(self._llm.model_config.hf_config.get_text_config().tie_word_embeddings)

    def weight_layout(self) -> str:
        """Return a digest of the names, dtypes and shapes of vLLM's tensors; see `CopiesEngines`.

        It is empty, and other engines get their weights from the learner, if several processes share the model, or if
        the model holds weights elsewhere too, as on CPUs, where vLLM prepacks them.
        """
        return layout_of(self._held())

    def held_weights(self) -> Iterator[Weights]:
        """Return vLLM's tensors in parts; see `CopiesEngines`."""
        return held_parts(self._version, self._held())

    def copy_weights(self, version: int, parts: Iterator[Weights]) -> None:
        """Replace the weights by those of another engine; see `CopiesEngines`."""
        self._prepare(version, None)
        copy_parts(self._held(), parts)
        self._loaded(version)

    def _held(self) -> Mapping[str, Any]:
        if self.tensor_parallel_size > 1 or self._adapter is not None:
            return {}
        (only,) = self._llm.collective_rpc("rlsdk_held")
        tensors: Mapping[str, Any] = only
        return tensors

    def _prepare(self, version: int, adapter: Adapter | None) -> None:
        self._check_awake(self._weights_asleep)
        if adapter != self._adapter:
            raise EngineError(
                f"weights of version {version} are those of {adapter or 'a whole model'}; this engine was "
                f"started for {self._adapter or 'whole models'}"
            )
        # Drop the prefix cache and the KV cache of running requests, which would mix two policies in one sequence.
        self._llm.reset_prefix_cache(reset_running_requests=True)
        self._llm.reset_encoder_cache()

    def _loaded(self, version: int) -> None:
        self._version, self._discarded = version, False
        self._llm.set_weight_version(str(version))

    def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the logprob of each token given those before it, at temperature 1, float32 `[k - 1]`.

        In-flight requests continue meanwhile; the next `step` returns those that finish.

        Raises:
            ValueFault: `k` is less than 2 or not below `model.max_length`, since vLLM needs room for one more token.
        """
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        count, limit = len(token_ids), self._model.max_length
        if not 2 <= count < limit:
            raise ValueFault(f"logprobs of {count} tokens; give at least 2 and fewer than model.max_length, {limit}")
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        request = self._process(tokens_input(np.asarray(token_ids).tolist()), params)
        name = request.request_id = self._next_id()
        self._canaries[name] = None
        self._llm.engine_core.add_request(request)
        # Read it before, not along with, requests whose cache must be recomputed, which may take long: the weight sync
        # waits for these logprobs. If vLLM runs in separate processes, its scheduler is out of reach, and it waits.
        core = getattr(self._llm.engine_core, "engine_core", None)
        with nullcontext() if core is None else core.scheduler.before_others(name, count):
            while self._canaries[name] is None:
                self._advance()
        logprobs: np.ndarray = np.asarray(self._canaries.pop(name), dtype=np.float32)
        return logprobs

    def reseed(self, seed: int) -> None:
        """Seed the engine's generator, so that the same requests in the same order give the same tokens."""
        self._llm.collective_rpc("rlsdk_seed", args=(mix(seed),))

    def sleep(self) -> None:
        """Free the device for a colocated learner; vLLM frees nothing on a CPU.

        A whole model is discarded (vLLM's level 2), since `load_weights` brings the next one. A base model under an
        adapter is moved to main memory (level 1).
        """
        self._llm.reset_prefix_cache(reset_running_requests=True)
        self._llm.sleep(level=2 if self._adapter is None else 1, mode="keep")
        self._asleep = self._weights_asleep = True
        self._discarded = self._adapter is None

    def wake_weights(self) -> None:
        """Take back the memory of the weights; `load_weights` may follow, and only `wake` takes back the KV cache."""
        if self._weights_asleep:
            self._llm.wake_up(tags=["weights"])
            self._weights_asleep = False

    def wake(self) -> None:
        """Take the device back; discarded weights must be loaded before the next step."""
        if self._asleep:
            self._llm.wake_up(tags=None if self._weights_asleep else ["kv_cache"])
            self._asleep = self._weights_asleep = False

    def stop(self) -> None:
        """Free everything."""
        if self._llm is not None:
            self._llm.engine_core.shutdown()
            self._llm = None
        self._running.clear()
        self._ready.clear()
