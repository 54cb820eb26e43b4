"""A worker that runs core functions of one trainer in the trainer's environment, on requests from standard input.

{"load": FILE}                       read the data of a shape -> {"ready": names of functions}
{"time": NAME}                       -> {"seconds": …}
{"memory": NAME}                     -> {"peak_mib": …} of one call, above the memory before it
{"result": NAME, "to": FILE}         write the function's result, as padded planes
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import facts
import torch

Function = Callable[[], Any]


def serve(
    functions: Callable[[Mapping[str, Any]], Mapping[str, Function]],
    padded: Callable[[Any, torch.Tensor], torch.Tensor] = lambda found, _: found,
) -> None:
    """Answer requests until the input ends.

    Args:
        functions: Returns the functions of a case, without arguments, from its data.
        padded: Converts a function's result and the mask `[n, L]` to the tensor for the comparison.
    """
    torch.set_num_threads(2)
    ready: Mapping[str, Function] = {}
    data: Mapping[str, Any] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if "load" in asked:
            data = torch.load(asked["load"])
            ready = functions(data)
            answer: dict[str, Any] = {"ready": sorted(ready), "versions": facts.versions()}
        elif "time" in asked:
            answer = {"seconds": _seconds(ready[asked["time"]])}
        elif "memory" in asked:
            answer = {"peak_mib": _peak(ready[asked["memory"]])}
        else:
            torch.save(padded(ready[asked["result"]](), data["mask"]), asked["to"])
            answer = {"written": True}
        print("CORES " + json.dumps(answer), flush=True)


def _seconds(function: Function) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _peak(function: Function) -> float:
    """Return the peak resident memory during a call above the memory before it, in MiB, as measured by the kernel."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # not the GNU libc
        ctypes.CDLL(None).malloc_trim(0)  # otherwise reused memory of earlier calls would not be counted
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    found = function()
    peak = _status("VmHWM")
    del found
    return round((peak - before) / 1024, 1)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
