"""Estimate the peak memory of a forward and backward pass with torch's fake tensors, which compute nothing."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn, set_grad_enabled
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlsdk.head import Head, few_chunks
from rlsdk.learners.rows import TokenRows

FEW_LAYERS = 4
"""Up to this many layers of a kind, all are run; otherwise only two, since each further layer adds the same memory."""


@attrs.frozen
class PassMemory:
    """Peak memory of a forward pass, or of forward and backward, beyond weights and accumulated gradients.

    Attributes:
        bytes: Total peak.
        head: Part that the output head holds at the peak.
    """

    bytes: int
    head: int = 0

    def plus(self, other: PassMemory, minus: PassMemory, times: int) -> PassMemory:
        """Add `other - minus` the given number of times."""
        return PassMemory(
            self.bytes + times * (other.bytes - minus.bytes), max(0, self.head + times * (other.head - minus.head))
        )


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the bytes of all live tensors, by the computation that created them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        model_tensors = (*module.parameters(), *module.buffers())
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in model_tensors)
        self.part = "layers"
        self.living: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Fake tensors multiply experts only in bfloat16 and in aligned sizes, unlike the kernels of a CPU.
        run = _grouped_product if func is torch.ops.aten._grouped_mm.default else func
        result = run(*args, **(kwargs or {}))
        for storage in [leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]:
            if storage in self._seen:
                continue
            self._seen.add(storage)
            size = storage.nbytes()
            weakref.finalize(storage, self.living.subtract, {self.part: size})
            self.living[self.part] += size
            if self.living.total() > self.peak.total():
                self.peak = self.living.copy()
        return result


def _grouped_product(left: Tensor, right: Tensor, ends: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return an empty tensor of the shape of `torch.nn.functional.grouped_mm`."""
    experts = () if 2 in {left.ndim, right.ndim} and left.ndim != right.ndim else (len(ends),)
    return left.new_empty(*experts, left.shape[-2], right.shape[-1])


def pass_memory(
    build: Callable[[], nn.Module], make_rows: Callable[[], TokenRows], *, trains: bool = True, **options: Any
) -> PassMemory:
    """Return the peak memory of a micro-batch of an update: forward pass, loss and backward pass.

    Only a few layers of each kind are run. The operators are those of a CPU; GPU operators keep the same tensors.

    Args:
        build: Builds the module with fake tensors, which takes no memory.
        make_rows: Builds the rows of the micro-batch.
        trains: False for a forward pass without a graph.
        **options: Arguments of the module besides the rows.
    """
    from transformers.initialization import no_init_weights

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # The mode keeps weak references to new tensors, in case one is made fake twice. torch cannot convert a module whose
    # parameters are weakly referenced, and peft converts the layers of an adapter.
    fake.fake_tensor_converter.set_tensor_memo = lambda t, v: None  # type: ignore[method-assign]
    with fake, no_init_weights(), few_chunks():
        module = build()
        _keep_frequencies(module)
        lists = [each for each in module.modules() if isinstance(each, nn.ModuleList) and len(each)]
        layers = max(lists, key=len, default=None)
        kinds = {} if layers is None else _kinds(layers)
        run = partial(_run, module, make_rows, options, trains=trains)
        if all(len(each) <= FEW_LAYERS for each in kinds.values()):
            return run()
        assert layers is not None
        few = {kind: each[: 2 if len(each) > FEW_LAYERS else len(each)] for kind, each in kinds.items()}
        with _only(layers, few):
            memory = base = run()
        for kind, each in kinds.items():
            if len(each) > FEW_LAYERS:
                with _only(layers, {**few, kind: each[:3]}):
                    memory = memory.plus(run(), base, len(each) - 2)
    return memory


def _kinds(layers: nn.ModuleList) -> dict[Any, list[nn.Module]]:
    """Group layers that need the same memory: same class, parameters of the same shapes."""
    kinds: dict[Any, list[nn.Module]] = {}
    for layer in layers:
        shapes = tuple((name, tuple(p.shape), p.requires_grad) for name, p in layer.named_parameters())
        windows = tuple(getattr(each, "sliding_window", None) for each in layer.children())
        kinds.setdefault((type(layer), shapes, windows), []).append(layer)
    return kinds


@contextmanager
def _only(layers: nn.ModuleList, kept: dict[Any, list[nn.Module]]) -> Iterator[None]:
    """Remove all other layers from a list of layers in a block."""
    every = list(layers)
    chosen = {id(layer) for each in kept.values() for layer in each}
    layers._modules = {str(i): layer for i, layer in enumerate(x for x in every if id(x) in chosen)}
    try:
        yield
    finally:
        layers._modules = {str(i): layer for i, layer in enumerate(every)}


def _run(module: nn.Module, make_rows: Callable[[], TokenRows], options: dict[str, Any], *, trains: bool) -> PassMemory:
    handles: list[Any] = []
    with _Allocations(module) as counted:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        handles += [each.register_post_accumulate_grad_hook(_drop_gradient) for each in trained]  # type: ignore[no-untyped-call]
        for head in [each for each in module.modules() if isinstance(each, Head)]:
            begin, end = (partial(_enter, counted, part) for part in ("head", "layers"))
            handles += [head.register_forward_pre_hook(begin), head.register_full_backward_pre_hook(begin)]
            handles += [head.register_forward_hook(end), head.register_full_backward_hook(end)]
        with set_grad_enabled(trains):
            results = module(make_rows(), **options)
        if trains:
            results = results if isinstance(results, tuple) else (results,)
            loss = sum(each.sum() for each in results if each is not None and each.requires_grad)
            del results
            loss.backward()
    for handle in handles:
        handle.remove()
    return PassMemory(counted.peak.total(), counted.peak["head"])


@contextmanager
def no_packed_rows() -> Iterator[None]:
    """Stop transformers from building a mask for packed rows, which it cannot rule out from fake positions."""
    from transformers import masking_utils

    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


def _keep_frequencies(module: nn.Module) -> None:
    """Stop rotary embeddings of type `dynamic` or `longrope` from reading positions, which are fake."""
    each: Any
    for each in module.modules():
        kind = getattr(each, "rope_type", None)
        if isinstance(kind, dict):
            each.rope_type = dict.fromkeys(kind, "default")
        elif kind is not None:
            each.rope_type = "default"


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None  # added to the gradient of the optimiser step, which is counted elsewhere


def _enter(counted: _Allocations, part: str, *_: Any) -> None:
    counted.part = part  # as a hook, whose other arguments do not matter
