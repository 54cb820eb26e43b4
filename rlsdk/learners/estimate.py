"""Estimate the memory of a learner rank from the configs of its models, without loading weights."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from rlsdk.contracts import ActorSpec, MemoryUse, Model, Roles, TrainBatch, UpdateShape
from rlsdk.learners.rows import TokenRows, plan, read_lengths, to_exact_row, to_rows

if TYPE_CHECKING:
    from rlsdk.learners.activations import PassMemory
    from rlsdk.learners.options import LearnerOptions

AUTO_SHARE = 0.5
"""Share of the free memory that `micro_batch_tokens: auto` gives to a rank; the rest is a reserve."""
AUTO_MOST, AUTO_LEAST = 32768, 256
"""Range of token budgets for `micro_batch_tokens: auto`; larger budgets are not faster."""
DEFAULT_TOKENS = 16384
"""Token budget assumed for `auto` if the free memory is unknown."""


@attrs.frozen(kw_only=True)
class RankMemory:
    """Memory of a rank, independent of its micro-batches.

    Attributes:
        uses: Weights, gradients, optimiser state and the like.
        step: Additional memory of an optimiser step, when there are no activations.
    """

    uses: tuple[MemoryUse, ...]
    step: int

    @property
    def on_device(self) -> int:
        """Bytes on the compute device."""
        return sum(use.bytes for use in self.uses if not use.on_host)


def update_memory(options: LearnerOptions, roles: Roles, place: ActorSpec, shape: UpdateShape) -> tuple[MemoryUse, ...]:
    """Estimate the peak memory of a rank; see `EstimatesUpdates`."""
    rank = options.rank_memory(roles, place)
    tokens = options.micro_batch_tokens
    if tokens == "auto":
        tokens = DEFAULT_TOKENS if shape.free is None else auto_tokens(options, roles, place, shape.free)
    passes = micro_batch_memory(options, roles.main, shape, tokens, trains=roles.trains)
    step = max(0, rank.step - passes.bytes)
    return (
        *rank.uses,
        MemoryUse("learner activations", passes.bytes - passes.head, turn="learn"),
        MemoryUse("learner output head", passes.head, turn="learn"),
        *([MemoryUse("learner optimiser step", step, turn="learn")] if step else []),
    )


def micro_batch_memory(
    options: LearnerOptions, model: Model, shape: UpdateShape, tokens: int, *, trains: bool = True
) -> PassMemory:
    """Return the memory of the largest micro-batch of an optimiser step: activations of a model and its head.

    Args:
        options: Options of the learner.
        model: Model that is trained, or that runs only forward passes.
        shape: Rollouts of an optimiser step.
        tokens: Token budget of a micro-batch.
        trains: False for a model that runs only forward passes.
    """
    from rlsdk.learners.activations import no_packed_rows, pass_memory
    from rlsdk.learners.lora import wrap
    from rlsdk.learners.model import blank_policy

    # Flash attention keeps the same tensors as the kernel of sdpa, and needs no mask for packed rows.
    flash = options.attention == "flash_attention_2"
    apart = flash or (options.packs_without_mask and _attends_fully(model))

    def build() -> Any:
        attention = "sdpa" if flash else options.attention
        policy = blank_policy(
            model, attention, options.gradient_checkpointing, router_loss=options.router_loss_coef if trains else 0.0
        )
        if options.lora is not None:
            wrap(policy.model, attrs.evolve(options.lora, path=None), 0)
        return policy

    def rows() -> TokenRows:
        made = largest_rows(options, model, shape, tokens)
        return attrs.evolve(made, position_ids=None) if apart and made.prompts is None else made

    with no_packed_rows() if apart or options.rows != "packed" else nullcontext():
        return pass_memory(build, rows, trains=trains, temperature=1.0, entropy="gradient" if trains else "none")


def largest_rows(options: LearnerOptions, model: Model, shape: UpdateShape, tokens: int) -> TokenRows:
    """Lay out the first micro-batch, which has the longest rollouts, as a rank would."""
    # Ranks that share sequences read as many tokens each as ranks that do not.
    prompt, response = (max(1, -(-n // options.readers)) for n in (shape.prompt, shape.response))
    count = max(1, shape.rollouts)
    of_prompt = np.arange(count) * min(shape.prompts, count) // count
    batch = TrainBatch(
        token_ids=np.repeat(of_prompt, prompt + response),
        lengths=np.full(count, prompt + response),
        starts=np.full(count, prompt),
        responses=np.full(count, response),
        loss_mask=np.ones(count * response, bool),
    )
    if model.exact:
        return to_exact_row(batch.select(np.arange(1)), model.max_length)
    groups = np.arange(count) // shape.together
    part = plan(read_lengths(batch), tokens, packed=options.rows == "packed", groups=groups)[0]
    # In a tree, rollouts without a common prefix have a row each.
    return to_rows(batch.select(part), "padded" if options.rows == "tree" else options.rows)


def auto_tokens(options: LearnerOptions, roles: Roles, place: ActorSpec, free: int) -> int:
    """Choose the largest micro-batch token budget that fits, halving until it does.

    Args:
        options: Options of the learner.
        roles: Models of the learner.
        place: Ranks of the learner.
        free: Free bytes on the rank's device before it loads anything.
    """
    left = AUTO_SHARE * free - options.rank_memory(roles, place).on_device
    longest, tokens = roles.main.max_length, AUTO_MOST
    while tokens > AUTO_LEAST:
        shape = UpdateShape(rollouts=-(-tokens // longest), prompt=1, response=longest - 1)
        # A budget below the longest rollout does not affect that rollout, but all others.
        needed = micro_batch_memory(options, roles.main, shape, tokens, trains=roles.trains).bytes
        if needed <= left or tokens < longest:
            break
        tokens //= 2
    return tokens


def free_memory(place: ActorSpec) -> int:
    """Return the free bytes of this rank: on its GPU, or its share of the machine's main memory."""
    if place.device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    import psutil

    from rlsdk.preflight import main_memory

    machine = psutil.virtual_memory()
    used_elsewhere = machine.total - machine.available
    return max(0, min(machine.available, (main_memory() or machine.total) - used_elsewhere)) // place.world_size


@cache
def _attends_fully(model: Model) -> bool:
    """Return True if packed rollouts of a model can attend separately; reads only its config."""
    from rlsdk.conversion import without_weights
    from rlsdk.learners.packing import attends_fully

    return attends_fully(without_weights(model, local_files_only=True))


@cache
def count_parameters(model: Model, lora: Any = None) -> tuple[int, int]:
    """Count all parameters of a model and the trained ones.

    Args:
        model: Folder or hub id; only the config is read.
        lora: Adapters that are trained instead of all weights, if any.
    """
    from rlsdk.conversion import without_weights
    from rlsdk.learners.lora import count_adapter

    net = without_weights(model, local_files_only=True)
    every = sum(p.numel() for p in net.parameters())
    if lora is None:
        return every, every
    adapter = count_adapter(net, lora)
    return every + adapter, adapter
