"""Chunked logprobs and entropy against the naive formulas, in float64."""

from __future__ import annotations

from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rlsdk.head import Head, logit_scale, token_logprobs


def naive(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = hidden @ weight.t() + (0 if bias is None else bias)
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), log_p.exp().square().sum(-1)


def make(
    t: int, d: int, v: int, *, bias: bool, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    shapes = [(t, d), (v, d), *([(v,)] if bias else [])]
    tensors = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
    return (*tensors, torch.randint(v, (t,), generator=g))


@settings(max_examples=60, deadline=None)
@given(
    t=st.integers(1, 9),
    d=st.integers(1, 6),
    v=st.integers(1, 12),
    chunk=st.integers(1, 10),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    bias=st.booleans(),
    entropy=st.sampled_from(["none", "value", "gradient"]),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_are_the_naive_ones(
    t: int, d: int, v: int, chunk: int, temperature: float, bias: bool, entropy: str, seed: int
) -> None:
    *leaves, targets = make(t, d, v, bias=bias, seed=seed)
    hidden, weight, *rest = leaves
    head_bias = rest[0] if rest else None
    found = token_logprobs(
        hidden, weight, targets, bias=head_bias, temperature=temperature, entropy=entropy, squares=True, chunk=chunk
    )
    expected = naive(hidden, weight, head_bias, targets, temperature)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[2], expected[2])
    g = torch.Generator().manual_seed(seed + 1)
    weights = torch.randn(2, t, generator=g, dtype=torch.float64)
    losses = [(weights[0] * out[0]).sum() for out in (found, expected)]
    if entropy != "none":
        torch.testing.assert_close(found[1], expected[1])
    if entropy == "gradient":
        losses = [loss + (weights[1] * out[1]).sum() for loss, out in zip(losses, (found, expected), strict=True)]
    for mine, theirs in zip(*(torch.autograd.grad(loss, leaves) for loss in losses), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_gradient_of_the_entropy_alone() -> None:
    hidden, weight, targets = make(7, 4, 11, bias=False)
    entropy = token_logprobs(hidden, weight, targets, entropy="gradient", chunk=3)[1]
    assert entropy is not None
    mine = torch.autograd.grad(entropy.sum(), (hidden, weight))
    theirs = torch.autograd.grad(naive(hidden, weight, None, targets, 1.0)[1].sum(), (hidden, weight))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_what_was_not_asked_for_is_not_there() -> None:
    hidden, weight, targets = make(5, 3, 4, bias=False)
    logprobs, entropy, squares = token_logprobs(hidden, weight, targets)
    assert entropy is None
    assert squares is None
    assert logprobs.requires_grad
    _, entropy, squares = token_logprobs(hidden, weight, targets, entropy="value", squares=True)
    assert entropy is not None
    assert squares is not None
    assert not entropy.requires_grad
    assert not squares.requires_grad


def test_no_tokens_give_zero_gradients() -> None:
    hidden, weight, _ = make(2, 3, 4, bias=False)
    logprobs = token_logprobs(hidden[:0], weight, torch.zeros(0, dtype=torch.int64), entropy="gradient")[0]
    gradient = torch.autograd.grad(logprobs.sum(), weight)[0]
    assert logprobs.shape == (0,)
    assert not gradient.any()


def test_a_tied_weight_gets_both_gradients() -> None:
    hidden, weight, targets = make(6, 4, 9, bias=False)
    linear = torch.nn.Linear(4, 9, bias=False)
    linear.weight = torch.nn.Parameter(weight.detach())
    head = Head(linear)

    def states() -> torch.Tensor:
        return torch.nn.functional.embedding(targets, head.weight) + hidden.detach()

    mine = torch.autograd.grad(head(states(), targets, 1.0)[0].sum(), head.weight)[0]
    theirs = torch.autograd.grad(naive(states(), head.weight, None, targets, 1.0)[0].sum(), head.weight)[0]
    torch.testing.assert_close(mine, theirs)
    assert head.weight is linear.weight


@pytest.mark.parametrize(("kind", "scale"), [("granite", 1 / 8), ("minicpm3", 1 / 8), ("llama", 1.0)])
def test_a_models_scale_of_logits_is_in_values_and_gradients(kind: str, scale: float) -> None:
    config = SimpleNamespace(model_type=kind, logits_scaling=8.0)
    assert logit_scale(config) == scale
    hidden, weight, targets = make(7, 4, 9, bias=False)
    linear = torch.nn.Linear(4, 9, bias=False)
    linear.weight = torch.nn.Parameter(weight.detach())
    mine = Head(linear, scale=scale)(hidden, targets, 0.7, "gradient")[:2]
    theirs = naive(hidden * scale, linear.weight, None, targets, 0.7)[:2]
    for found, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found, expected)
        leaves = (hidden, linear.weight)
        gradients = [torch.autograd.grad(each.sum(), leaves, retain_graph=True) for each in (found, expected)]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("chunk", [4, 64])
def test_bfloat16_sums_in_float32(chunk: int) -> None:
    """Many tokens' gradients of one weight: summed in bfloat16 they would stand still."""
    t, d, v = 2048, 8, 5
    hidden, weight, targets = make(t, d, v, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        hidden.abs_()
    logprobs = token_logprobs(hidden, weight, targets, chunk=chunk)[0]
    assert logprobs.dtype == torch.float32
    mine = torch.autograd.grad(logprobs.sum(), weight)[0]
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    theirs = torch.autograd.grad(naive(*wide, None, targets, 1.0)[0].sum(), wide[1])[0]
    assert mine.dtype == torch.bfloat16
    assert float((mine.double() - theirs).norm() / theirs.norm()) < 1e-2


def test_memory_is_limited_to_a_chunk() -> None:
    """No tensor of tokens × vocabulary is ever allocated, in either direction."""
    t, d, v, chunk = 512, 4, 1000, 16
    hidden, weight, targets = make(t, d, v, bias=False, dtype=torch.float32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for each in out if isinstance(out, tuple | list) else (out,):
                if isinstance(each, torch.Tensor):
                    largest = max(largest, each.numel())
            return out

    with Watch():
        logprobs, entropy, _ = token_logprobs(hidden, weight, targets, entropy="gradient", squares=True, chunk=chunk)
        assert entropy is not None
        (logprobs.sum() + entropy.sum()).backward()
    assert largest == chunk * v


def test_a_float32_head_takes_the_rounding_of_bfloat16_logits_away() -> None:
    """The same bfloat16 states and weights, logits of deviation 5 over 4,096 tokens, against float64."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 256, generator=g).bfloat16().requires_grad_()
    weight = (5 / 16 * torch.randn(4096, 256, generator=g)).bfloat16().requires_grad_()
    targets = torch.randint(4096, (64,), generator=g)
    expected = naive(hidden.double(), weight.double(), None, targets, 1.0)[0]
    gradients = torch.autograd.grad(expected.sum(), [hidden, weight])

    def off(exact: bool) -> tuple[float, list[float]]:
        found = token_logprobs(hidden, weight, targets, exact=exact)[0]
        assert found.dtype == torch.float32
        steps = torch.autograd.grad(found.sum(), [hidden, weight])
        gaps = [float((a - b).norm() / b.norm()) for a, b in zip(steps, gradients, strict=True)]
        return float((found - expected).detach().abs().mean()), gaps

    rounded, (hidden_rounded, weight_rounded) = off(False)
    wide, (hidden_wide, weight_wide) = off(True)
    assert rounded > 1e-2 and wide < 1e-5
    assert hidden_wide < hidden_rounded and weight_wide < weight_rounded
