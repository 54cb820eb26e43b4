"""Time attention over a packed row of rollouts on a GPU: a call for each, as rlsdk does, and one call for all.

    python tools/gpu_attention.py --out attention.json

The sizes are those of Qwen2.5-0.5B: 14 query heads on 2 key-value heads of 64. A time is the median of a layer's
forward and backward pass, in milliseconds, and the memory is its peak above what it was given. `--device cpu` tries the
calls without the one for all, for which torch has a kernel on GPUs only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsdk.learners.packing import PackedSpans, attend

HEADS, KEPT, SIZE = 14, 2, 64


def separately(lengths: Sequence[int], device: str) -> Callable[..., Tensor]:
    """Return attention as rlsdk computes it: a call for each long rollout, and one for short ones of similar length."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    spans = PackedSpans.of(list(zip([0, *ends], ends, strict=False)), device)
    return lambda query, key, value: attend(query, key, value, spans, None)


def together(lengths: Sequence[int], device: str) -> Callable[..., Tensor]:
    """Return attention by torch's flash kernel for sequences of variable length."""
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)

    def attention(*given: Tensor) -> Tensor:
        tokens = [each[0].transpose(0, 1) for each in given]
        longest = max(lengths)
        found = varlen_attn(*tokens, ends, ends, longest, longest, window_size=(-1, 0), enable_gqa=True)
        assert isinstance(found, Tensor)
        return found.transpose(0, 1)[None]

    return attention


def measure(attention: Callable[..., Tensor], tokens: int, device: str, dtype: torch.dtype, rounds: int) -> Any:
    """Run forward and backward passes; return milliseconds, MiB, and the last output."""
    cuda, seconds = device == "cuda", []
    torch.manual_seed(0)
    heads = (HEADS, KEPT, KEPT)
    given = [torch.randn(1, n, tokens, SIZE, dtype=dtype, device=device).requires_grad_() for n in heads]
    for _ in range(rounds + 1):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        before, start = torch.cuda.memory_allocated() if cuda else 0, time.perf_counter()
        found = attention(*given)
        found.float().square().sum().backward()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if cuda else 0.0
    return 1000 * statistics.median(seconds[1:]), peak, found.detach()


def rows(device: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Measure rows of rollouts of equal length, in bfloat16 and in float32, which the flash kernel does not take."""
    found = []
    for length in (128, 512, 2048):
        lengths = [length] * max(1, tokens // length)
        for dtype in (torch.bfloat16, torch.float32):
            name = str(dtype).removeprefix("torch.")
            milliseconds, peak, one = measure(separately(lengths, device), sum(lengths), device, dtype, rounds)
            row = {"rollouts": len(lengths), "tokens": length, "dtype": name, "separate_ms": milliseconds, "MiB": peak}
            if device == "cuda" and dtype == torch.bfloat16:
                row["together_ms"], _, other = measure(together(lengths, device), sum(lengths), device, dtype, rounds)
                row["difference"] = (one.float() - other.float()).abs().max().item()
            found.append(row)
    return found


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--out", type=Path, required=True, help="file of the result")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--tokens", type=int, default=16_384, help="tokens of the row")
    found.add_argument("--rounds", type=int, default=10, help="passes of which the median is taken")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the rows as JSON."""
    given = parser().parse_args(arguments)
    if given.device == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # as in the learner
    given.out.write_text(json.dumps(rows(given.device, given.tokens, given.rounds), indent=1))


if __name__ == "__main__":
    main()
