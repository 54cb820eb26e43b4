"""A worker that runs core functions of one trainer, asked through its standard input; one for each environment.

{"load": FILE}                       read the data of a shape -> {"ready": names of functions}
{"time": NAME}                       -> {"seconds": …}
{"memory": NAME}                     -> {"peak_mib": …} above what was resident before, of one call
{"result": NAME, "to": FILE}         write what the function gives, as padded planes
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
    """Answer until the input ends.

    Args:
        functions: Makes the functions of a case, each ready to be called, from its data.
        padded: Turns what a function gives, and the mask `[n, L]`, into the tensor that is compared.
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
    """The kernel's high-water mark of resident memory during a call, minus what was resident before, in MiB."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # another libc than GNU's
        ctypes.CDLL(None).malloc_trim(0)  # else memory that an earlier call left behind is used again, unseen
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    found = function()
    peak = _status("VmHWM")
    del found
    return round((peak - before) / 1024, 1)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
