"""Routers of mixtures of experts: compute logits in float32, and record or replay the chosen experts.

The router's own code runs; only its linear layer and its last `topk` are intercepted. So the model's own rule computes
the expert weights, and gradients flow through them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

UNKNOWN = -1
"""Placeholder for an unknown expert."""
_LAYER = re.compile(r"\.(\d+)\.")
_TOPK = (torch.topk, torch.Tensor.topk)


class Routers:
    """The routers of a model, modified in place.

    Attributes:
        layers: Number of layers in routing records: all layers of the model, including those without experts.
        chosen: Number of experts per token.
    """

    def __init__(self, model: nn.Module) -> None:
        """Make a model's routers compute their logits in float32.

        Args:
            model: A transformers model; one without routers is left unchanged.
        """
        self._routers = routers_of(model)
        self._forced: Tensor | None = None
        self._recorded: dict[int, Tensor] | None = None
        self.layers = max(self._routers, default=-1) + 1
        self.chosen = max((router.top_k for router in self._routers.values()), default=0)
        for layer, router in self._routers.items():
            router.forward = self._routed(layer, router, router.forward)

    def __len__(self) -> int:
        return len(self._routers)

    def force(self, routing: Tensor | None) -> None:
        """Set the experts that tokens use in all later passes, including recomputation in a backward pass.

        Args:
            routing: Integers `[tokens, layers, k]` for the tokens of a pass, in order; `UNKNOWN` leaves a choice to
                the router. None leaves all choices to it.
        """
        self._forced = routing

    def record(self) -> None:
        """Record the experts chosen in the next passes; each layer keeps those of its latest pass."""
        self._recorded = {}

    def take(self) -> Tensor:
        """Stop recording, and return the recorded experts, int16 `[tokens, layers, k]`.

        Layers without experts hold `UNKNOWN`.
        """
        recorded, self._recorded = self._recorded, None
        assert recorded
        tokens = len(next(iter(recorded.values())))
        found = torch.full((tokens, self.layers, self.chosen), UNKNOWN, dtype=torch.int16)
        for layer, experts in recorded.items():
            found[:, layer, : experts.shape[1]] = experts
        return found

    def _routed(self, layer: int, router: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        def routed(*args: Any, **kwargs: Any) -> Any:
            forced = None if self._forced is None else self._forced[:, layer, : router.top_k]
            mode = _Router(router.num_experts, router.top_k, forced)
            with mode:
                found = forward(*args, **kwargs)
            if self._recorded is not None and mode.experts is not None:
                self._recorded[layer] = mode.experts.to("cpu", torch.int16)
            return found

        return routed


class _Router(TorchFunctionMode):
    """Run linear layers in float32, and optionally replace the choice of `k` experts.

    Attributes:
        experts: Chosen experts, integers `[tokens, k]`; None before the choice.
    """

    def __init__(self, count: int, k: int, forced: Tensor | None) -> None:
        super().__init__()
        self._count, self._k, self._forced = count, k, forced
        self.experts: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear:
            args = [each.float() if _is_narrow(each) else each for each in args]
            kwargs = {name: each.float() if _is_narrow(each) else each for name, each in kwargs.items()}
        found = func(*args, **kwargs)
        if func not in _TOPK or args[0].shape[-1] != self._count or found[1].shape[-1] != self._k:
            return found
        # DeepSeek's routers choose groups of experts first; the choice of `k` experts comes last.
        chosen = found[1]
        if self._forced is None:
            self.experts = chosen
            return found
        given = self._forced.to(chosen.device, chosen.dtype).view(chosen.shape)
        self.experts = torch.where(given >= 0, given, chosen)
        return type(found)((args[0].gather(-1, self.experts), self.experts))


def routers_of(model: nn.Module) -> dict[int, Any]:
    """Find the routers of a transformers model, by layer index."""
    found = {}
    for name, module in model.named_modules():
        layer = _LAYER.search(name)
        if (
            layer
            and type(module).__name__.endswith("Router")
            and all(isinstance(getattr(module, size, None), int) for size in ("top_k", "num_experts"))
        ):
            found[int(layer[1])] = module
    return found


def replay_fault(model: Any) -> str:
    """Explain why a model's expert choices cannot be recorded and replayed; empty if they can.

    Args:
        model: A transformers model, possibly without weights. It is not changed.
    """
    kind = type(model).__name__
    routers = routers_of(model)
    if not routers:
        return f"a {kind} has no expert routers that transformers marks as such; choose another model"
    for layer, router in routers.items():
        mode = _Router(router.num_experts, router.top_k, None)
        states = torch.empty(1, model.config.get_text_config().hidden_size, dtype=model.dtype, device="meta")
        with torch.no_grad(), mode:
            router.forward(states)
        if mode.experts is None:
            routers_are = f"the routers of a {kind} ({type(router).__name__}, layer {layer})"
            return f"{routers_are} do not choose experts by topk; choose another model"
    return ""


def _is_narrow(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
