"""Sequence parallelism (DeepSpeed-Ulysses, arXiv:2309.14509): the ranks of a group share the tokens of each rollout.

Outside attention a rank holds one slice of the tokens, inside it all tokens of some of the heads; DeepSpeed exchanges
the two by all-to-all. The ranks of a group take turns: in each turn all of them run the micro-batch of one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from rlsdk.errors import LearnerError
from rlsdk.learners.ranks import Ranks
from rlsdk.learners.router import RouterLoss
from rlsdk.learners.rows import TokenRows

ATTENTION = "rlsdk_ulysses"
"""Name under which transformers knows the attention that exchanges tokens for heads."""


@attrs.frozen(eq=False)
class Sequences:
    """The group of ranks that share each rollout.

    Attributes:
        rank: Rank of this process within the group.
        size: Number of ranks that share a rollout.
        group: Process group of torch.
    """

    rank: int
    size: int
    group: Any
    _exchanges: dict[tuple[int, ...], Any] = attrs.field(init=False, factory=dict)

    @classmethod
    def join(cls, ranks: Ranks, size: int) -> Sequences:
        """Join the group of `size` neighbouring ranks, which are likely on one node; `size` divides the ranks."""
        from transformers import AttentionInterface

        # Every rank takes part in the making of every group.
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks.world, size)]
        found = cls(ranks.rank % size, size, groups[ranks.rank // size])
        AttentionInterface.register(ATTENTION, found._attention)
        return found

    @property
    def slices(self) -> int:
        """Each of these ranks reads its slice of the tokens of a micro-batch."""
        return self.size

    def adopt(self, model: Any, path: str) -> None:
        """Patch a transformers model to exchange tokens for heads in its attention.

        Raises:
            LearnerError: It cannot.
        """
        check_model(model, path, self.size)
        model.set_attn_implementation(ATTENTION)

    def turns(self, rows: TokenRows) -> list[TokenRows]:
        """The rows of each rank of the group, on all of them."""
        held: list[Any] = [None] * self.size
        dist.all_gather_object(held, rows, group=self.group)
        return held

    def __call__(self, model: Callable[..., Any], rows: TokenRows, *args: Any) -> Any:
        """Run a model that gives `[t]`, or a tuple of `[t]` and None, on rows that all ranks of the group gave alike.

        Gradients of the results are summed over the group: each rank may weigh them as it likes.
        """
        share, places = self._slice(rows)
        results = model(share, *args)
        given = results if isinstance(results, tuple) else (results,)
        # In one exchange, which runs in the backward pass of every rank or of none.
        stacked = torch.stack([result for result in given if result is not None])
        whole = iter(_Gather.apply(stacked, places, len(rows.states), self.group))  # type: ignore[no-untyped-call]
        found = tuple(None if g is None else next(whole) if g.requires_grad else next(whole).detach() for g in given)
        return found if isinstance(results, tuple) else found[0]

    def _slice(self, rows: TokenRows) -> tuple[TokenRows, Tensor]:
        """This rank's columns of the rows, and which of the states lie in them."""
        count, width = rows.input_ids.shape
        share = -(-width // self.size)
        begin = self.rank * share
        # As wide on every rank: the last ones may hold padding, which causal attention keeps out of every state.
        padded = torch.nn.functional.pad(rows.input_ids, (0, share * self.size - width))
        positions = torch.arange(begin, begin + share, device=padded.device).repeat(count, 1)
        row, column = rows.states // width, rows.states % width - begin
        places = ((column >= 0) & (column < share)).nonzero()[:, 0]
        states = (row * share + column)[places]
        routing = rows.routing
        if routing is not None:
            routing = routing.view(count, width, *routing.shape[1:])
            beyond = (*(0,) * 4, 0, share * self.size - width)
            routing = torch.nn.functional.pad(routing, beyond, value=-1)[:, begin : begin + share].flatten(0, 1)
        own = padded[:, begin : begin + share].contiguous()
        return TokenRows(own, positions, states, rows.targets[places], routing=routing), places

    def _attention(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        """Attention as transformers calls it: `query` `[rows, heads, share, size]` to `[rows, share, heads, size]`."""
        rows, heads, _, size = query.shape
        shape = (rows, heads, key.shape[1], size)
        if shape not in self._exchanges:
            self._exchanges[shape] = _exchange(*shape, self.group)
        return self._exchanges[shape](module, query, key, value, None, **options)


def _exchange(rows: int, heads: int, key_heads: int, size: int, group: Any) -> Any:
    """DeepSpeed's all-to-all around torch's attention, for a number of rows and heads."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers import AttentionInterface

    return UlyssesSPAttentionHF(
        attn=AttentionInterface()["sdpa"],
        batch_size=rows,
        attn_head_count=heads,
        attn_head_size=size,
        kv_head_count=key_heads,
        num_hidden_layers=1,
        process_group=group,
        seq_length_is_variable=True,
    )


class _Gather(torch.autograd.Function):
    """Columns of `[k, t]` that the ranks of a group hold, on all of them; the gradient is summed over the group."""

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


def check_model(model: Any, path: str, size: int) -> None:
    """Refuse a model that mixes tokens outside full attention, or whose heads cannot be divided among ranks.

    Raises:
        LearnerError: It is one.
    """
    text = model.config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if not getattr(text, "layer_types", None) and getattr(text, "sliding_window", None) is not None:
        layers = {"sliding_attention"}
    if layers:
        raise LearnerError(
            f"model {path} has layers of type {', '.join(sorted(layers))}; sequence_parallel runs models of full "
            "attention alone, set sequence_parallel: 1"
        )
    if not type(model)._supports_attention_backend:
        raise LearnerError(
            f"model {path}: attention of {type(model).__name__} cannot be replaced in transformers; set "
            "sequence_parallel: 1"
        )
    if RouterLoss.of(model.config) is not None:
        raise LearnerError(
            f"model {path} is trained with a load-balancing loss (output_router_logits: true in its config), which "
            "ranks that share rollouts do not compute; set sequence_parallel: 1, or output_router_logits: false"
        )
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % size or (key_heads % size and size % key_heads):
        raise LearnerError(
            f"model {path} has {heads} heads of attention and {key_heads} of keys and values; sequence_parallel must "
            f"divide the former, and divide the latter or be a multiple of it, got {size}"
        )
