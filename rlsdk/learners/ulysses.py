"""Sequence parallelism (DeepSpeed-Ulysses, arXiv:2309.14509): the ranks of a group share the tokens of each rollout.

Outside attention, a rank holds a slice of the tokens; inside attention, all tokens of a subset of the heads. An
all-to-all converts between the two. Ranks of a group take turns: in each turn, all of them run one rank's micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from rlsdk.errors import LearnerError
from rlsdk.learners.packing import PackedSpans, attend, check_plain, other_layers, replace_attention, replaceable
from rlsdk.learners.ranks import Ranks
from rlsdk.learners.rows import TokenRows, tree_mask


@attrs.define(eq=False)
class SequenceGroup:
    """The ranks that share the tokens of each rollout with this one; see `SharedRows`.

    Attributes:
        rank: Rank of this process within the group.
        size: Number of ranks that share a rollout.
        group: Process group of torch.
        option: Name of the learner's option, for messages.
        divided: Number of ranks over which the heads are already sharded.
    """

    rank: int
    size: int
    group: Any
    option: str = "sequence_parallel"
    divided: int = 1
    _within: PackedSpans | Tensor = attrs.field(init=False)

    @classmethod
    def join(cls, ranks: Ranks, size: int) -> SequenceGroup:
        """Join the group of `size` neighbouring ranks, which are likely on one node; `size` divides the world size."""
        # Every rank takes part in creating every group.
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks.world, size)]
        return cls(ranks.rank % size, size, groups[ranks.rank // size])

    @property
    def slices(self) -> int:
        """Number of slices of a micro-batch's tokens: one per rank."""
        return self.size

    def adopt(self, model: Any, path: str) -> None:
        """Make a transformers model's attention exchange tokens for heads.

        Raises:
            LearnerError: The model does not allow it.
        """
        if faults := sequence_faults(model, self.size, self.option, divided=self.divided):
            raise LearnerError(f"model {path}: {'; '.join(faults)}")
        replace_attention(model, self._attention)

    def turns(self, rows: Any) -> list[Any]:
        """All-gather the rows of the group, by rank."""
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, rows, group=self.group)
        return gathered

    def __call__(self, model: Callable[..., Any], rows: TokenRows, *args: Any) -> Any:
        """Run a model that returns `[t]`, or a tuple of `[t]` and None, on rows that are equal on all ranks of a group.

        Gradients of the results are summed over the group, so each rank may weight them differently.
        """
        share, places = self._slice(rows)
        # Attention reads it now, and again if the backward pass recomputes activations; both precede the next pass.
        width, whole = rows.input_ids.shape[1], share.input_ids.shape[1] * self.size  # without padding, and with it
        if rows.ends is None:
            self._within = PackedSpans.of_rows(rows, whole)
        else:
            padding = torch.arange(width + 1, whole + 1, device=rows.ends.device).expand(len(rows.ends), -1)
            self._within = tree_mask(torch.cat([rows.ends, padding], 1))
        results = model(share, *args)
        local = results if isinstance(results, tuple) else (results,)
        # A single exchange, so its backward pass runs on all ranks or on none.
        stacked = torch.stack([result for result in local if result is not None])
        gathered = iter(_Gather.apply(stacked, places, len(rows.states), self.group))  # type: ignore[no-untyped-call]
        outputs = tuple(
            None if g is None else next(gathered) if g.requires_grad else next(gathered).detach() for g in local
        )
        return outputs if isinstance(results, tuple) else outputs[0]

    def _slice(self, rows: TokenRows) -> tuple[TokenRows, Tensor]:
        """Return this rank's columns of the rows, and the indices of the states in them."""
        count, width = rows.input_ids.shape
        share = -(-width // self.size)
        begin = self.rank * share
        # Equal width on every rank: the last ones may hold padding, which causal attention keeps out of every state.
        beyond = (0, share * self.size - width)
        if rows.position_ids is None:
            positions = torch.arange(begin, begin + share, device=rows.input_ids.device).repeat(count, 1)
        else:
            positions = torch.nn.functional.pad(rows.position_ids, beyond)[:, begin : begin + share].contiguous()
        row, column = rows.states // width, rows.states % width - begin
        places = ((column >= 0) & (column < share)).nonzero()[:, 0]
        states = (row * share + column)[places]
        routing = rows.routing
        if routing is not None:
            routing = routing.view(count, width, *routing.shape[1:])
            routing = torch.nn.functional.pad(routing, (*(0,) * 4, *beyond), value=-1)
            routing = routing[:, begin : begin + share].flatten(0, 1)
        own = torch.nn.functional.pad(rows.input_ids, beyond)[:, begin : begin + share].contiguous()
        return TokenRows(own, positions, states, rows.targets[places], routing=routing), places

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
    ) -> Any:
        """Implement transformers' interface: `query` `[rows, heads, share, size]` to `[rows, share, heads, size]`."""
        check_plain(module, attention_mask, options)
        if key.shape[1] < self.size:  # several ranks read the same key-value head
            copies = self.size // key.shape[1]
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        query, key, value = (self._to_heads(each) for each in (query, key, value))
        return self._to_tokens(attend(query, key, value, self._within, options.get("scaling"))), None

    def _to_heads(self, held: Tensor) -> Tensor:
        """Exchange `[rows, heads, share, size]` to `[rows, heads / ranks, tokens, size]`."""
        rows, heads, share, size = held.shape
        parts = held.reshape(rows, self.size, heads // self.size, share, size).permute(1, 3, 0, 2, 4)
        exchanged: Tensor = _Exchange.apply(parts, self.group)  # type: ignore[no-untyped-call]
        return exchanged.flatten(0, 1).permute(1, 2, 0, 3)

    def _to_tokens(self, held: Tensor) -> Tensor:
        """Exchange `[rows, heads / ranks, tokens, size]` to `[rows, share, heads, size]`."""
        rows, heads, tokens, size = held.shape
        parts = held.permute(2, 0, 1, 3).reshape(self.size, tokens // self.size, rows, heads, size)
        exchanged: Tensor = _Exchange.apply(parts, self.group)  # type: ignore[no-untyped-call]
        return exchanged.permute(2, 1, 0, 3, 4).flatten(2, 3)


class _Exchange(torch.autograd.Function):
    """All-to-all over `[ranks, …]`: part `i` goes to rank `i`, where it is indexed by the sender; its own inverse."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return _Exchange.apply(gradients[0], ctx.group), None  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """Gather the columns of `[k, t]` that are spread over a group; the gradient is summed over the group."""

    @staticmethod
    def forward(ctx: Any, held: Tensor, places: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(places)
        ctx.group = group
        whole = held.new_zeros(len(held), count)
        whole[:, places] = held
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (places,) = ctx.saved_tensors
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[:, places], None, None, None


def sequence_faults(model: Any, size: int, option: str = "sequence_parallel", *, divided: int = 1) -> Sequence[str]:
    """List the reasons why ranks cannot share the tokens of rollouts; the model needs no weights.

    Tokens may interact only through full attention, with heads that can be divided among the ranks.

    Args:
        model: A transformers causal language model, or its backbone.
        size: Number of ranks that share a rollout.
        option: Name of the learner's option, for messages.
        divided: Number of ranks over which the heads are already sharded.
    """
    kind, text = type(model).__name__, model.config.get_text_config()
    leave = f"set learner.{option}=1"
    faults = []
    if layers := other_layers(model.config):
        types = ", ".join(sorted(layers))
        faults.append(f"layers of type {types} in a {kind}; {option} needs full attention in every layer; {leave}")
    if not replaceable(model):
        faults.append(f"attention of a {kind} cannot be replaced in transformers; {leave}")
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    among = f", already divided by {divided}" if divided > 1 else ""
    if heads // divided % size or (key_heads // divided % size and size % max(1, key_heads // divided)):
        faults.append(
            f"{heads} attention heads and {key_heads} key-value heads{among}: learner.{option} must divide the former, "
            f"and divide the latter or be a multiple of it; got {size}"
        )
    return faults
