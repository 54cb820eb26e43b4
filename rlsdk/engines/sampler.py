"""Batched sampling, reproducible for each continuation regardless of the rest of the batch."""

from __future__ import annotations

import numpy as np
import torch


def uniforms(seeds: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Draw a number in [0, 1) for each continuation, determined only by its seed and position.

    SplitMix64 as a counter-based generator: no state, and no loop over generators.

    Args:
        seeds: Seeds of the continuations, uint64 `[n]`.
        counts: Number of tokens sampled so far, int64 `[n]`.

    Returns:
        float64 `[n]`, multiples of 2^-48, so that a product with a rounded sum also stays below that sum.
    """
    state = seeds + (counts.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    numbers: np.ndarray = (state >> np.uint64(16)).astype(np.float64) * 2.0**-48
    return numbers


def sample(
    logits: torch.Tensor, temperature: np.ndarray, top_p: np.ndarray, top_k: np.ndarray, uniform: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sample one token per row by inverting the cumulative distribution.

    Args:
        logits: `[n, vocabulary]`, any float type; not changed.
        temperature: float32 `[n]`; 0 takes the most likely token, with its logprob at temperature 1.
        top_p: float32 `[n]`; 1 is off. Applied after top-k.
        top_k: int64 `[n]`; 0 is off.
        uniform: float64 `[n]`, in [0, 1).

    Returns:
        Tokens int64 `[n]` and their logprobs float32 `[n]`, nats, of the distribution sampled from.
    """
    logprobs, greedy = _distribution(logits, temperature, top_p, top_k), temperature == 0
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    point = torch.from_numpy(uniform).to(logits.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, point, right=True)
    if greedy.any():
        chosen = torch.from_numpy(greedy).to(logits.device)[:, None]
        tokens = torch.where(chosen, logprobs.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0].cpu().numpy(), logprobs.gather(-1, tokens)[:, 0].cpu().numpy()


def likeliest(
    logits: torch.Tensor, temperature: np.ndarray, top_p: np.ndarray, top_k: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the most likely tokens of one row, in the distribution that `sample` draws from.

    Returns:
        Ids int64 `[count]` and their logprobs float32 `[count]`, descending.
    """
    found = _distribution(logits, temperature, top_p, top_k)[0].topk(count)
    return found.indices.cpu().numpy(), found.values.cpu().numpy()


def _distribution(logits: torch.Tensor, temperature: np.ndarray, top_p: np.ndarray, top_k: np.ndarray) -> torch.Tensor:
    """Return the logprobs `[n, vocabulary]` of the distributions to sample from."""
    scores = logits.float()
    greedy = temperature == 0
    if (temperature != 1).any():
        divisor = np.where(greedy, 1.0, temperature).astype(np.float32)
        scores = scores / torch.from_numpy(divisor).to(scores.device)[:, None]
    limited = ~greedy & ((top_p < 1) | (top_k > 0))
    if limited.any():
        rows = torch.from_numpy(np.flatnonzero(limited)).to(scores.device)
        scores = scores.index_copy(0, rows, _limit(scores[rows], top_p[limited], top_k[limited]))
    return scores.log_softmax(-1)


def _limit(scores: torch.Tensor, top_p: np.ndarray, top_k: np.ndarray) -> torch.Tensor:
    """Return `scores` `[n, vocabulary]` with minus infinity outside `top_k` and, within it, outside `top_p`."""
    ordered, order = scores.sort(dim=-1, descending=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    most = torch.from_numpy(np.where(top_k > 0, top_k, scores.shape[-1])).to(scores.device)[:, None]
    ordered = ordered.masked_fill(rank >= most, -torch.inf)
    mass = ordered.softmax(-1)
    before = mass.cumsum(-1) - mass
    # Keep the most likely token despite rounding and, if top_p is off, all others.
    share = torch.from_numpy(np.where(top_p < 1, top_p, np.inf).astype(np.float32)).to(scores.device)[:, None]
    ordered = ordered.masked_fill((before >= share) & (rank > 0), -torch.inf)
    return torch.empty_like(scores).scatter_(-1, order, ordered)
