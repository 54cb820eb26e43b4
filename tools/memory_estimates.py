"""Compare the estimated memory of a learner with the measured peak on the CPU, for three shapes.

    python tools/memory_estimates.py                  # all shapes; writes the table in docs/memory.md
    python tools/memory_estimates.py --shape packed   # one, as JSON

Each shape is trained for two steps in a separate process, with random weights: once with glibc's allocator as it is,
and once with freed blocks returned at once, since an estimate cannot include memory that an allocator keeps. The exit
status is 1 if an estimate differs by more than 15 % from the second measurement.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from curves import ROOT, git

PAGE = ROOT / "docs" / "memory.md"
TOLERANCE = 0.15
BEGIN, END = "<!-- estimates -->", "<!-- end of estimates -->"
RESPONSE = 96
GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""Environment variables that make glibc return freed blocks to the system at once."""


@attrs.frozen
class Shape:
    """A learner and its rollouts.

    Attributes:
        text: Description for the table.
        model: Settings of a Llama model.
        options: Options of the learner.
        rollouts: Number of rollouts per optimiser step, of 128 tokens each.
        dtype: Dtype of the model.
    """

    text: str
    model: Mapping[str, int]
    options: Mapping[str, Any]
    rollouts: int
    dtype: str = "float32"


SHAPES = {
    "wide": Shape(
        "13M parameters, ZeRO-1, 2,048 tokens",
        {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "vocab_size": 2048},
        {"zero_stage": 1, "micro_batch_tokens": 2048},
        16,
    ),
    "checkpointed": Shape(
        "48M parameters, ZeRO-2, gradient checkpointing, 512 tokens",
        {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "vocab_size": 2048},
        {"zero_stage": 2, "micro_batch_tokens": 512, "gradient_checkpointing": True},
        4,
    ),
    "packed": Shape(
        "19M parameters, vocabulary of 65,536, no ZeRO, packed rows, 512 tokens",
        {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "vocab_size": 65536},
        {"zero_stage": 0, "micro_batch_tokens": 512, "rows": "packed"},
        4,
    ),
}


def make_model(folder: Path, shape: Shape) -> None:
    """Write a Llama model with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=True, **shape.model)
    LlamaForCausalLM(config).to(getattr(torch, shape.dtype)).save_pretrained(folder)


def measure(folder: Path, shape: Shape) -> dict[str, int]:
    """Train two steps in this process; return its estimated and its measured peak memory, in bytes."""
    from rlsdk.contracts import ActorSpec, LossSpec, Model, Roles, TrainBatch, UpdateShape
    from rlsdk.plugins import Plugins

    plugins = Plugins()
    learner = plugins.resolve(plugins.reference("learner", "deepspeed", dict(shape.options)))
    roles, place = Roles(actor=Model(path=str(folder), dtype=shape.dtype, max_length=128)), ActorSpec(role="learner")
    length, prompt = 128, 128 - RESPONSE
    count = shape.rollouts * 2  # two micro-batches
    uses = learner.update_memory(roles, place, UpdateShape(rollouts=count, prompt=prompt, response=RESPONSE))
    ones = np.ones(count * RESPONSE, np.float32)
    batch = TrainBatch(
        token_ids=np.random.default_rng(0).integers(0, 2048, count * length),
        lengths=np.full(count, length),
        starts=np.full(count, prompt),
        responses=np.full(count, RESPONSE),
        loss_mask=ones.astype(bool),
        tokens={"behaviour_logprobs": -8 * ones, "advantages": ones},
    )
    learner.start(roles, LossSpec(policy_loss=plugins.reference("policy_loss", "ppo")), place, 10)
    for step in range(2):
        learner.update([(batch, batch.totals.tokens, batch.totals.rollouts)], step)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
    return {"estimated": sum(use.bytes for use in uses), "measured": peak, **{use.role: use.bytes for use in uses}}


def in_process(name: str) -> dict[str, int]:
    """Measure a shape in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, __file__, "--folder", folder, "--shape", name]
        subprocess.run([*run, "--make"], check=True, stdout=subprocess.DEVNULL)
        found: dict[str, int] = {}
        for key, settings in (("kept", {}), ("measured", GIVING_BACK)):
            ran = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **settings})
            sizes = json.loads(ran.stdout.splitlines()[-1])
            found |= {**sizes, key: sizes["measured"]}
    return found


def table(found: Mapping[str, Mapping[str, int]]) -> str:
    """Return the table of docs/memory.md."""
    rows = [
        "| learner | estimated, MiB | measured, MiB | estimate against measurement | with what glibc keeps, MiB |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, sizes in found.items():
        off = sizes["estimated"] / sizes["measured"] - 1
        estimated, measured, kept = (f"{sizes[key] / 2**20:,.0f}" for key in ("estimated", "measured", "kept"))
        rows.append(f"| {SHAPES[name].text} | {estimated} | {measured} | {off:+.1%} | {kept} |")
    commit = git("describe", "--always", "--dirty")
    return "\n".join([*rows, "", f"Commit `{commit}`, {datetime.date.today()}."])


def main() -> int:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.folder and asked.make:
        make_model(asked.folder, SHAPES[asked.shape])
        return 0
    if asked.folder:
        print(json.dumps(measure(asked.folder, SHAPES[asked.shape])))
        return 0
    found = {name: in_process(name) for name in ([asked.shape] if asked.shape else SHAPES)}
    if asked.shape:
        print(json.dumps(found))
    else:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{after}", encoding="utf-8")
        print(table(found))
    return int(any(abs(s["estimated"] / s["measured"] - 1) > TOLERANCE for s in found.values()))


if __name__ == "__main__":
    sys.exit(main())
