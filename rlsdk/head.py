"""Compute logprobs and entropy of target tokens in chunks, without ever holding a `[tokens, vocabulary]` tensor.

The backward pass recomputes each chunk of logits, so that either pass needs only two buffers of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor, nn

CHUNK_ELEMENTS = 2**25
"""Number of logits in a chunk: 128 MiB in float32. Smaller chunks would reread the weight's gradient too often."""

EntropyMode = Literal["none", "value", "gradient"]
LOGIT_DIVISORS: Mapping[str, str] = dict.fromkeys(
    ("granite", "granitemoe", "granitemoehybrid", "granitemoeshared", "minicpm3"), "logits_scaling"
)
"""Model type -> setting that divides the logits."""
_CHUNKS: ContextVar[int | None] = ContextVar("_CHUNKS", default=None)


@contextmanager
def few_chunks() -> Iterator[None]:
    """Compute only the first two chunks, to measure a pass's memory: all chunks share the buffers of the first."""
    token = _CHUNKS.set(2)
    try:
        yield
    finally:
        _CHUNKS.reset(token)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    entropy: EntropyMode = "none",
    squares: bool = False,
    chunk: int | None = None,
    exact: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute logprobs of tokens under `softmax((hidden · weightᵀ + bias) / temperature)`.

    Args:
        hidden: Hidden states that predict the targets, float `[t, d]`.
        weight: Weight of the output head, float `[V, d]`.
        targets: Sampled tokens, int64 `[t]`.
        bias: Bias of the head, float `[V]`.
        temperature: Divisor of the logits; above 0.
        entropy: Entropy mode: not computed, computed, or computed with a gradient.
        squares: Compute the sum of squared probabilities (never with a gradient).
        chunk: Rows per chunk; by default, as many as `CHUNK_ELEMENTS` allows.
        exact: Compute logits and their gradient in float32 from narrower states and weights; holds a float32 copy of
            the weight until the backward pass. Otherwise, products of narrow types are rounded to that type.

    Returns:
        Logprobs and entropy in nats, and sum of squared probabilities, `[t]` each, float32 (float64 for float64
        inputs); None for values that were not requested.
    """
    if exact:
        hidden, weight = _at_least_float32(hidden), _at_least_float32(weight)
        bias = None if bias is None else _at_least_float32(bias)
    rows = chunk or _even_chunk(len(targets), max(1, CHUNK_ELEMENTS // max(weight.shape[0], 1)))
    logprobs, found, squared = _Chunked.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, float(temperature), entropy, squares, min(rows, max(len(targets), 1))
    )
    return logprobs, found, squared


def logit_scale(config: Any) -> float:
    """Return the factor on a model's logits after the head, judging by its config; mostly 1."""
    return 1 / float(getattr(config, LOGIT_DIVISORS.get(config.model_type, ""), 1.0))


def _even_chunk(count: int, most: int) -> int:
    """Return the rows per chunk for an even split: a last chunk of one row would be summed by another kernel."""
    return max(1, -(-count // max(1, -(-count // most))))


def _at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


class Head(nn.Module):
    """Output head that returns token logprobs instead of logits; ZeRO-3 gathers its weight for the call.

    Attributes:
        weight: `[V, d]`; the same parameter as the input embeddings if they are tied.
        bias: `[V]` or None.
        exact: Compute logits in float32, regardless of the weight's dtype.
        scale: Factor on the logits.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, linear: Any, *, exact: bool = False, scale: float = 1.0) -> None:
        super().__init__()
        self.exact, self.scale = exact, scale
        self.weight = linear.weight
        self.bias = getattr(linear, "bias", None)

    def forward(
        self, hidden: Tensor, targets: Tensor, temperature: float, entropy: EntropyMode = "none", squares: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See `token_logprobs`."""
        return token_logprobs(
            hidden,
            self.weight,
            targets,
            bias=self.bias,
            temperature=temperature / self.scale,
            entropy=entropy,
            squares=squares,
            exact=self.exact,
        )


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        entropy: EntropyMode,
        squares: bool,
        rows: int,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        logits = _Logits(weight, bias, temperature, rows)
        work = torch.empty_like(logits.buffer)
        results = hidden.new_empty(4, len(targets), dtype=logits.buffer.dtype)
        logprobs, normalisers, entropies, squared = results
        for part in _parts(len(targets), rows):
            shifted = logits(hidden[part])
            top = shifted.amax(dim=1, keepdim=True)
            shifted.sub_(top)
            exponentials = torch.exp(shifted, out=work[: len(shifted)])
            total = exponentials.sum(dim=1)
            log_total = total.log()
            logprobs[part] = shifted.gather(1, targets[part, None])[:, 0] - log_total
            normalisers[part] = log_total + top[:, 0]
            if entropy != "none":
                entropies[part] = log_total - _dot(exponentials, shifted) / total
            if squares:
                squared[part] = _dot(exponentials, exponentials) / total**2
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, entropies)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.set_materialize_grads(False)
        found = entropies.clone() if entropy != "none" else None
        sums = squared.clone() if squares else None
        ctx.mark_non_differentiable(*(x for x in (found if entropy == "value" else None, sums) if x is not None))
        return logprobs.clone(), found, sums

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: Any) -> tuple[Any, ...]:
        hidden, weight, bias, targets, normalisers, entropies = ctx.saved_tensors
        logits = _Logits(weight, bias, ctx.temperature, ctx.rows)
        work = torch.empty_like(logits.buffer)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=work.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=work.dtype) if needs_bias and bias is not None else None
        for part in _parts(len(targets), ctx.rows):
            logp = logits(hidden[part]).sub_(normalisers[part, None])
            gradient = torch.exp(logp, out=work[: len(logp)])
            _to_logit_gradient(
                gradient,
                logp,
                targets[part],
                None if grad_logprobs is None else grad_logprobs[part] / ctx.temperature,
                None if grad_entropy is None else grad_entropy[part] / ctx.temperature,
                entropies[part],
            )
            narrow = gradient.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(narrow, weight, out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight, narrow, hidden[part])
            if grad_bias is not None:
                grad_bias += gradient.sum(dim=0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            *(None,) * 5,
        )


class _Logits:
    """Logits of a few rows in a reused buffer: allocating fresh pages costs more than the arithmetic."""

    def __init__(self, weight: Tensor, bias: Tensor | None, temperature: float, rows: int) -> None:
        wide = weight.dtype if weight.dtype == torch.float64 else torch.float32
        self.buffer = weight.new_empty(rows, weight.shape[0], dtype=wide)
        self._weight, self._bias, self._temperature = weight, bias, temperature

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.buffer[: len(hidden)]
        if self._weight.dtype == self.buffer.dtype:
            torch.mm(hidden, self._weight.t(), out=logits)
        else:  # a product of narrow types is summed in float32 internally and rounded once
            logits.copy_(torch.mm(hidden, self._weight.t()))
        if self._bias is not None:
            logits.add_(self._bias)
        return logits if self._temperature == 1.0 else logits.div_(self._temperature)


def _to_logit_gradient(
    probabilities: Tensor,
    logp: Tensor,
    targets: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    entropies: Tensor,
) -> None:
    """Turn `probabilities` `[r, V]` into the gradient of the logits, in place; `logp` is used up.

    With `z` the logits, `p` their softmax and `H` its entropy: `∂logp_y/∂z = 1_y - p` and `∂H/∂z = -p (log p + H)`.
    """
    if grad_entropy is not None:
        factor = logp.add_(entropies[:, None]).mul_(-grad_entropy[:, None])
        if grad_logprobs is not None:
            factor.sub_(grad_logprobs[:, None])
        probabilities.mul_(factor)
    elif grad_logprobs is not None:
        probabilities.mul_(-grad_logprobs[:, None])
    else:
        probabilities.zero_()
    if grad_logprobs is not None:
        probabilities.scatter_add_(1, targets[:, None], grad_logprobs[:, None].to(probabilities.dtype))


def _add_product(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """`total` `[V, d]` += `gradient`ᵀ `[V, r]` · `hidden` `[r, d]`, summed in `total`'s dtype."""
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.t(), hidden)
    else:
        total.add_(torch.mm(gradient.t(), hidden))


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Row-wise dot products `[r, V]` · `[r, V]` -> `[r]`, without a third buffer."""
    return torch.bmm(left[:, None], right[:, :, None]).view(-1)


def _parts(count: int, rows: int) -> list[slice]:
    begins = range(0, count, rows)[: _CHUNKS.get()]
    return [slice(begin, min(begin + rows, count)) for begin in begins]
