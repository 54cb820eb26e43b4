"""Measure seconds or peak memory of logprobs and entropy from hidden states; the argument is JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TOKENS, HIDDEN, VOCABULARY = 2048, 896, 151_936


def naive(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logp = (hidden @ weight.t()).log_softmax(dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(dim=-1)


def chunked(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, Any]:
    from rlsdk.head import token_logprobs

    return token_logprobs(hidden, weight, targets, entropy="gradient")[:2]


METHODS: dict[str, Callable[..., Any]] = {"naive": naive, "chunked": chunked}


def run(method: str, leaves: list[torch.Tensor], targets: torch.Tensor, backward: bool) -> list[torch.Tensor]:
    """Gradients, so that they live until the peak was read; none without a backward pass."""
    logprobs, entropy = METHODS[method](*leaves, targets)
    return list(torch.autograd.grad((logprobs * targets).sum() + entropy.sum(), leaves)) if backward else []


def memory(name: str) -> int:
    """Bytes, from Linux."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def peak(method: str, leaves: list[torch.Tensor], targets: torch.Tensor, backward: bool) -> int:
    """Resident bytes at the peak beyond inputs, weights and their gradients."""
    few = [leaf[:64].detach().requires_grad_() for leaf in leaves]
    run(method, few, targets[:64] % 64, backward)  # threads' stacks and libraries' tables
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the high-water mark begins here
    before = memory("VmRSS")
    gradients = run(method, leaves, targets, backward)
    return memory("VmHWM") - before - sum(g.nbytes for g in gradients)


def main(what: str, method: str, backward: bool, rounds: int) -> Any:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=g).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=g).mul_(0.03).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=g)
    leaves = [hidden, weight]
    if what == "memory":
        return peak(method, leaves, targets, backward)
    found: dict[str, list[float]] = {name: [] for name in METHODS}
    for _ in range(rounds):  # in turn: a machine that grows slower meanwhile does so for both
        for name, times in found.items():
            begin = time.perf_counter()
            run(name, leaves, targets, backward)
            times.append(time.perf_counter() - begin)
    return found


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
