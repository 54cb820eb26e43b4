"""Estimate the memory of a learner rank from the configs of its models, without loading weights."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from rlsdk.contracts import ActorSpec, MemoryUse, Model, Roles, TrainBatch, UpdateShape
from rlsdk.contracts.generation import DTYPE_BYTES
from rlsdk.learners.microbatch import plan
from rlsdk.learners.rows import TokenRows, read_lengths, to_exact_row, to_rows

if TYPE_CHECKING:
    from rlsdk.learners.activations import PassMemory
    from rlsdk.learners.deepspeed import DeepSpeedOptions
    from rlsdk.learners.options import LearnerOptions

AUTO_SHARE = 0.5
"""Share of the free memory that `micro_batch_tokens: auto` gives to a rank; the rest is a reserve."""
AUTO_MOST, AUTO_LEAST = 32768, 256
"""Range of token budgets for `micro_batch_tokens: auto`; larger budgets are not faster."""
DEFAULT_TOKENS = 16384
"""Token budget assumed for `auto` if the free memory is unknown."""
PROCESS_BYTES = 450 * 2**20
"""Memory of a rank's process without any model: Python, torch, DeepSpeed and Ray."""
BUCKET_ELEMENTS = 500_000_000
"""Elements of DeepSpeed's communication buffers (`reduce_bucket_size`)."""
LIVE_ELEMENTS = 1_000_000_000
"""Elements of parameters that ZeRO-3 gathers ahead at most (`stage3_max_live_parameters`)."""


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
    held = options.rank_memory(roles, place)
    tokens = options.micro_batch_tokens
    if tokens == "auto":
        tokens = DEFAULT_TOKENS if shape.free is None else auto_tokens(options, roles, place, shape.free)
    found = micro_batch_memory(options, roles.main, shape, tokens, trains=roles.trains)
    step = max(0, held.step - found.bytes)
    return (
        *held.uses,
        MemoryUse("learner activations", found.bytes - found.head),
        MemoryUse("learner output head", found.head),
        *([MemoryUse("learner optimiser step", step)] if step else []),
    )


def zero_memory(options: DeepSpeedOptions, roles: Roles, place: ActorSpec) -> RankMemory:
    """Return the memory of a rank, as DeepSpeed shards it."""
    cpu = place.device == "cpu"
    uses, trained = [], []
    if roles.actor is not None:
        actor = _Trained.of(options, roles.actor, place, lora=options.lora is not None)
        uses += [
            MemoryUse("learner weights", actor.weights, actor.weights_on_host),
            MemoryUse("learner gradients", actor.gradients),
            MemoryUse("learner optimiser state", actor.optimizer, actor.optimizer_on_host),
        ]
        trained.append(actor)
    if roles.critic is not None:
        critic = _Trained.of(options, roles.critic, place, lora=False)
        uses += [
            MemoryUse("critic", critic.weights + critic.gradients, critic.weights_on_host),
            MemoryUse("critic optimiser state", critic.optimizer, critic.optimizer_on_host),
        ]
        trained.append(critic)
    if roles.reference is not None and not (options.lora and roles.reference == roles.actor):
        shared = place.world_size if options.zero_stage == 3 else 1
        size = count_parameters(roles.reference)[0] * DTYPE_BYTES[roles.reference.dtype] // shared
        uses.append(MemoryUse("reference model", size, options.offload == "all"))
    if not cpu and trained:
        uses.append(MemoryUse("communication buffers", trained[0].buffers))
    uses.append(MemoryUse("learner process", PROCESS_BYTES, on_host=not cpu))
    return RankMemory(uses=tuple(uses), step=max((each.step for each in trained), default=0))


@attrs.frozen(kw_only=True)
class _Trained:
    """Bytes of a trained model on one rank."""

    weights: int
    gradients: int
    optimizer: int
    step: int
    buffers: int
    weights_on_host: bool
    optimizer_on_host: bool

    @classmethod
    def of(cls, options: DeepSpeedOptions, model: Model, place: ActorSpec, *, lora: bool) -> _Trained:
        every, trained = count_parameters(model, options.lora if lora else None)
        width, ranks, cuda = DTYPE_BYTES[model.dtype], place.world_size, place.device == "cuda"
        stage = 1 if width == 2 and options.zero_stage == 0 else options.zero_stage
        share = -(-trained // ranks) if stage else trained
        # Gradients accumulate in float32; in stages 2 and 3 only those of the rank's shard.
        gradients = 4 * (share if stage >= 2 else trained)
        narrow = stage == 1 and width == 2
        if narrow:  # a separate optimiser, which also keeps gradients of each micro-batch, but needs no buffers
            gradients += width * trained
        buckets = 0 if stage == 0 or narrow else 1 if stage == 3 else 2
        gathered = min(every, LIVE_ELEMENTS) * width if stage == 3 and ranks > 1 else 0
        return cls(
            weights=every * width // (ranks if stage == 3 else 1) + gathered,
            gradients=gradients,
            # Two moments and, with ZeRO, a copy of the weights in float32.
            optimizer=share * (12 if stage else 8),
            step=4 * share if buckets == 2 else 0,
            buffers=BUCKET_ELEMENTS * 4 * buckets,
            weights_on_host=cuda and options.offload == "all",
            optimizer_on_host=cuda and options.offload != "none",
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
        policy = blank_policy(model, "sdpa" if flash else options.attention, options.gradient_checkpointing)
        if options.lora is not None:
            wrap(policy.model, options.lora, 0)
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
    part = plan(read_lengths(batch), tokens, packed=options.rows == "packed")[0]
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
