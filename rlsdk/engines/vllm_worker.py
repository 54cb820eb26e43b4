"""Extension class that vLLM mixes into its workers, to load versioned weights and set a seed."""

from __future__ import annotations

import gc
import logging
import math
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from rlsdk.contracts import StreamsWeights, Weights
from rlsdk.engines.checks import checked, with_tied_heads
from rlsdk.errors import EngineError, RlsdkError, TransferError
from rlsdk.isolation.process import environment_variable
from rlsdk.isolation.scratch import scratch_folder
from rlsdk.weights import from_weights

# It warns about every layer without weights, such as rotary embeddings; the engine checks for missing tensors before.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


def unname_shared_memory() -> None:
    """Delete the names of the memory in /dev/shm that vLLM's processes share, once all of them have opened it.

    vLLM deletes them when its processes end by themselves; those of a killed engine would stay, with their memory.
    """
    from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

    frozen = gc.get_freeze_count() > 0
    if frozen:  # vLLM has hidden its objects from `gc.get_objects`: in the scheduler's process, and in workers on GPUs
        gc.unfreeze()
    for each in gc.get_objects():
        if type(each) is ShmRingBuffer and each.is_creator:
            each.shared_memory.unlink()
            each.is_creator = False  # or vLLM would delete it again
    if frozen:
        gc.freeze()
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.match("/dev/shm/vllm_dist_*"):  # of the workers' reductions on the CPU
            path.unlink(missing_ok=True)


@contextmanager
def sockets_deleted() -> Iterator[None]:
    """Context manager: start vLLM's processes; their sockets are deleted at its end, when all of them have connected.

    vLLM creates the sockets in the folder of temporary files, where those of a killed engine would stay.
    """
    with (
        scratch_folder("rlsdk-vllm-", "/dev/shm") as folder,  # a socket's path must be short
        environment_variable("VLLM_RPC_BASE_PATH", str(folder)),
    ):
        yield


_ALIGNMENT = 64
"""Bytes to which the arrays in shared memory are aligned."""


@attrs.frozen
class WeightStreamCall:
    """Arguments with which the first of several workers receives weights; see `Vllm.receive_weights`.

    Attributes:
        transfer: The weight transfer.
        offer: Its offer.
        seat: Number of this engine among the receivers of the offer, from 1.
        version: Version of the weights.
        tied: True if the output head is tied to the input embeddings.
        expected: Shape of every tensor of the model, by name.
    """

    transfer: StreamsWeights
    offer: Any
    seat: int
    version: int
    tied: bool
    expected: Mapping[str, tuple[int, ...]]

    def received(self) -> Iterator[Weights]:
        """Yield the weights in parts that fit the model."""
        parts = self.transfer.receive(self.offer, self.seat)
        return checked(self.version, with_tied_heads(parts, self.tied), self.expected)


class WorkerExtension:
    """Methods called on every worker through `collective_rpc`."""

    reload_weights: Callable[..., None]
    model_runner: Any
    distributed_init_method: str

    def rlsdk_load(self, source: Weights | str) -> None:
        """Replace the weights in place.

        vLLM's layerwise reload repeats each layer's processing after loading. On the CPU this prepacks linear weights,
        so a plain copy into the parameters would have no effect.

        Args:
            source: The weights or, for a worker in a separate process, the description that `shared` yielded.

        Raises:
            EngineError: vLLM did not update the weights of some experts.
        """
        weights = source if isinstance(source, Weights) else read_shared(source)
        with self._new_expert_kernels():
            self.reload_weights(weights_iterator=from_weights(weights))

    def rlsdk_load_parts(self, parts: Iterator[Weights]) -> None:
        """Replace the weights in place, loading each part as it arrives.

        Raises:
            EngineError: A part does not fit the model, or vLLM did not update the weights of some experts.
            TransferError: The stream of parts ended early.
        """
        faults: list[RlsdkError] = []

        def tensors() -> Iterator[tuple[str, Any]]:
            try:
                for part in parts:
                    yield from from_weights(part)
            except RlsdkError as error:  # vLLM must finish this reload, or the next one would mix its weights in
                faults.append(error)

        with self._new_expert_kernels():
            self.reload_weights(weights_iterator=tensors())
            if faults:
                raise faults[0]

    def rlsdk_receive(self, given: bytes) -> tuple[type[RlsdkError], str] | None:
        """Replace the weights in place by those that the first worker receives and sends to the others.

        Args:
            given: A pickled `WeightStreamCall`.

        Returns:
            Type and text of an error that left all workers ready for other weights; vLLM would pass on only its text.
        """
        from vllm.distributed.parallel_state import get_tp_group

        parts = relayed(pickle.loads(given), get_tp_group())  # noqa: S301 - from the process that started this one
        try:
            self.rlsdk_load_parts(parts)
        except (EngineError, TransferError) as error:
            return type(error), str(error)
        finally:
            for _ in parts:  # after another error, too: the other workers take part to the end
                pass
        return None

    def rlsdk_held(self) -> dict[str, Any]:
        """Return the tensors that determine the model's output; none if some of them are out of reach.

        Out of reach are tensors that the CPU's kernels have prepacked, which leave an empty parameter, and those that
        vLLM computes from others when it loads them, such as latent attention's, which are plain attributes. Plain
        scalars are copies of the cache's scales.
        """
        import torch

        model = self.model_runner.get_model()
        tensors: dict[str, Any] = model.state_dict()
        prepacked = any(not tensor.numel() for tensor in tensors.values())
        derived = any(
            isinstance(value, torch.Tensor) and value.ndim and not name.startswith("kv_cache")
            for module in model.modules()
            for name, value in vars(module).items()
        )
        return {} if prepacked or derived else tensors

    @contextmanager
    def _new_expert_kernels(self) -> Iterator[None]:
        """Context manager: make vLLM 0.32 pad and prepack experts on a CPU, which it does only on kernel setup.

        Otherwise it copies plain weights into the memory of prepacked ones, and every logprob is wrong.

        Raises:
            EngineError: vLLM did not update the weights of some experts.
        """
        from vllm.platforms import current_platform

        kernels = {}
        for name, module in self.model_runner.model.named_modules():
            method: Any = getattr(module, "quant_method", None)
            if current_platform.is_cpu() and getattr(method, "moe_kernel", None) is not None:
                kernels[name] = method, method.moe_kernel
                method.moe_kernel = None
        yield
        old = {name: held for name, held in kernels.items() if held[0].moe_kernel is None}
        for method, kernel in old.values():
            method.moe_kernel = kernel
        if old:
            raise EngineError(
                f"vLLM on the CPU cannot update the expert weights of this model ({', '.join(old)}); it would keep "
                "the old ones; use engine=transformers"
            )

    def rlsdk_blank_adapter(self, name: str, number: int) -> None:
        """Load the zero adapter that vLLM warms up with, since it cannot load an adapter file without tensors."""
        from vllm.lora.request import LoRARequest

        self.model_runner.lora_manager.add_dummy_lora(LoRARequest(name, number, name), rank=1)

    def rlsdk_remove_rendezvous(self) -> None:
        """Delete the file in the folder of temporary files in which vLLM's workers met, which it leaves there."""
        if self.distributed_init_method.startswith("file://"):
            Path(self.distributed_init_method.removeprefix("file://")).unlink(missing_ok=True)

    def rlsdk_unname_shared_memory(self) -> None:
        """Delete the names of this worker's shared memory."""
        unname_shared_memory()

    def rlsdk_seed(self, seed: int) -> None:
        """Seed the generators that sample for requests without a seed.

        vLLM samples with torch's generator. Its second model runner, the default on GPUs, draws a seed for each such
        request from numpy's.
        """
        import numpy as np
        import torch

        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)


def relayed(stream: WeightStreamCall, group: Any) -> Iterator[Weights]:
    """Yield the parts of a stream in every worker of a group, each before the next one is received.

    Args:
        stream: The stream, which only the first worker receives.
        group: vLLM's group of the workers.

    Raises:
        EngineError: A part does not fit the model.
        TransferError: The stream ended early.
    """
    if group.rank_in_group > 0:
        while "fault" not in (sent := group.broadcast_tensor_dict(src=0)):
            tensors = {name: sent[tensor] for name, tensor in sent["names"].items()}
            yield Weights(stream.version, tensors, sent["dtypes"])
            del tensors, sent
        if sent["fault"] is not None:
            raise sent["fault"]
        return
    fault: RlsdkError | None = None
    try:
        for part in stream.received():
            # Tied tensors have several names, and are sent once.
            names = {name: str(id(array)) for name, array in part.tensors.items()}
            tensors = {names[name]: tensor.contiguous() for name, tensor in from_weights(part)}
            group.broadcast_tensor_dict({**tensors, "names": names, "dtypes": dict(part.dtypes)}, src=0)
            del tensors
            yield part
            del part  # its buffer is used again once nothing references it
    except RlsdkError as error:
        fault = error
        raise
    finally:
        group.broadcast_tensor_dict({"fault": fault}, src=0)


@contextmanager
def shared(weights: Weights) -> Iterator[str]:
    """Write weights to memory, and yield a description with which workers of this machine map them.

    Call arguments go through msgpack. The memory has no name in /dev/shm: it is free when this process is killed, and
    needs no room there.

    Args:
        weights: Weights to write.
    """
    import json

    import numpy as np

    descriptor = os.memfd_create("rlsdk-weights")
    with open(descriptor, "wb") as file:
        places = {}
        for name, tensor in weights.tensors.items():
            array = np.ascontiguousarray(tensor)
            file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
            places[name] = (file.tell(), array.dtype.str, np.shape(tensor))
            file.write(array.data)
        file.flush()
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        yield json.dumps({"path": path, "version": weights.version, "dtypes": dict(weights.dtypes), "places": places})


def read_shared(description: str) -> Weights:
    """Return the weights that `shared` wrote, mapped read-only."""
    import json

    import numpy as np

    head = json.loads(description)
    whole = np.memmap(head["path"], np.uint8, "r")
    arrays = {}
    for name, (begin, dtype, shape) in head["places"].items():
        size = np.dtype(dtype).itemsize * math.prod(shape)
        arrays[name] = whole[begin : begin + size].view(dtype).reshape(shape)
    return Weights(head["version"], arrays, head["dtypes"])
