"""The chunked head against the naive one on a GPU, in bfloat16. Never run so far."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch

from rlsdk.engines.cached import ExactHead
from rlsdk.head import token_logprobs

pytestmark = pytest.mark.gpu
TOKENS, HIDDEN, VOCABULARY = 2048, 896, 151_936


def naive(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logp = (hidden @ weight.t()).float().log_softmax(dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(dim=-1)


def chunked(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs, entropy, _ = token_logprobs(hidden, weight, targets, entropy="gradient")
    assert entropy is not None
    return logprobs, entropy


@pytest.fixture
def work() -> Callable[..., None]:
    """Runs a head, with or without its backward pass."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (0.03 * torch.randn(VOCABULARY, HIDDEN, device="cuda")).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), device="cuda")

    def run(head: Callable[..., tuple[torch.Tensor, torch.Tensor]], backward: bool) -> None:
        logprobs, entropy = head(hidden, weight, targets)
        if backward:
            torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))

    return run


def milliseconds(call: Callable[[], None], rounds: int = 10) -> float:
    found = []
    for _ in range(rounds + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found[3:])


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
def test_a_tenth_more_time_at_most(backward: bool, work: Callable[..., None]) -> None:
    own, theirs = (milliseconds(lambda head=head: work(head, backward)) for head in (chunked, naive))
    assert own <= 1.1 * theirs


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
def test_an_eighth_of_the_memory(backward: bool, work: Callable[..., None]) -> None:
    def peak(head: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work(head, backward)
        gradients = 2 * HIDDEN * (TOKENS + VOCABULARY) if backward else 0
        return torch.cuda.max_memory_allocated() - before - gradients

    assert peak(chunked) <= peak(naive) / 8


def test_a_float32_head_with_bfloat16_weights() -> None:
    """The learner's and the engine's, which sums in float32 without a float32 copy of the weight, against float64."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(512, 4096, device="cuda", dtype=torch.bfloat16)
    hidden = 8 * torch.randn(3, 64, 512, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(4096, (192,), device="cuda")
    expected = torch.nn.functional.linear(hidden.double(), linear.weight.double(), linear.bias.double())
    logprobs = expected.view(192, -1).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    logits = ExactHead(linear)(hidden)
    assert (logits.dtype, logits.shape) == (torch.float32, (3, 64, 4096))
    torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=1e-5)
    flat = hidden.view(192, -1)
    found = [token_logprobs(flat, linear.weight, targets, bias=linear.bias, exact=exact)[0] for exact in (True, False)]
    near, far = ((each.double() - logprobs).abs().max().item() for each in found)
    assert near < 1e-4 < 1e-3 < far
