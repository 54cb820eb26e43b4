"""The rollouts of a training step: filtered, packed into arrays, with the labels and fields that losses read."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np

from rlsdk.components import calling, see_definition, title_of
from rlsdk.contracts import TrainBatch
from rlsdk.contracts.tasks import label_of
from rlsdk.errors import RlsdkError, RunError, described
from rlsdk.fields import FORWARD, UPDATE_FIELDS, Field
from rlsdk.plurals import counted
from rlsdk.types import Group, Rollout, Score


@attrs.frozen(eq=False)
class StepBatch:
    """Packed valid rollouts of a training step.

    Attributes:
        arrays: Packed arrays, as the learner reads them.
        rollouts: Rollouts, in the order of the arrays.
        scores: Scores of the rollouts.
        groups: int64 `[n]`, dense index of each rollout's group.
        uids: `uid` of each rollout's group.
        sampled: Number of rollouts that the policy sampled; expert rollouts follow, each in its own group.
        baselines: float32 `[n]`, reward of the greedy answer to the task; None if no component reads it.
        fields: Field name -> `[t]` array that the learner or a producer computed; see `rlsdk.fields`.
    """

    arrays: TrainBatch
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]
    groups: np.ndarray
    uids: tuple[str, ...]
    sampled: int
    baselines: np.ndarray | None = None
    fields: Mapping[str, np.ndarray] = attrs.field(factory=dict)

    def with_fields(self, **fields: np.ndarray) -> StepBatch:
        """Return a copy with more per-token fields."""
        return attrs.evolve(self, fields={**self.fields, **fields})

    def for_update(self, **labels: np.ndarray) -> StepBatch:
        """Return a copy whose arrays hold everything that a loss may read: old logprobs, update fields, labels.

        The behaviour logprobs of tokens that were not sampled are the old logprobs or, without these, those of the
        policy that is being trained.
        """
        read = {n: v for n, v in self.fields.items() if n in UPDATE_FIELDS or n not in FORWARD}
        tokens, old = {**self.arrays.tokens, **read}, self.fields.get("logprobs")
        if old is None:
            del tokens["behaviour_logprobs"]
        else:
            sampled = tokens["policy_versions"] >= 0
            tokens |= {"old_logprobs": old, "behaviour_logprobs": np.where(sampled, tokens["behaviour_logprobs"], old)}
        arrays = attrs.evolve(self.arrays, tokens=tokens)
        return attrs.evolve(self, arrays=arrays.with_rollouts(**labels))

    @property
    def has_experts(self) -> bool:
        """True if the batch contains expert rollouts."""
        return self.sampled < len(self.rollouts)

    @property
    def sampled_tokens(self) -> int:
        """Number of response tokens in the rollouts that the policy sampled."""
        return int(self.arrays.responses[: self.sampled].sum())

    def without_experts(self) -> StepBatch:
        """Return only the rollouts that the policy sampled, which are the ones that get credit."""
        count, tokens = self.sampled, self.sampled_tokens
        return attrs.evolve(
            self,
            arrays=self.arrays.select(np.arange(count)),
            rollouts=self.rollouts[:count],
            scores=self.scores[:count],
            groups=self.groups[:count],
            uids=self.uids[:count],
            baselines=None if self.baselines is None else self.baselines[:count],
            fields={name: values[:tokens] for name, values in self.fields.items()},
        )


def apply_filters(groups: Sequence[Group], filters: Sequence[Callable[[Group], bool | Group]]) -> list[Group]:
    """Return the groups, or parts of groups, that all filters let through.

    Filters see what `pack` would train on: trajectories whose rollouts are all valid and have a token to train on, if
    the group has any. Otherwise a group of equal rewards would pass `nonzero_variance` for the reward of a rollout that
    is left out afterwards. The returned groups keep the `uid` of the input groups, even if a filter builds a new group.

    Raises:
        RunError: A filter raised, or returned neither a bool nor a group, such as None.
    """
    kept = []
    for group in groups:
        every = group.scored_trajectories
        taught = [each for each in every if any(is_trained(group.rollouts[i]) for i in each)] or every
        index = sorted(i for each in taught for i in each)
        left: Group | None = attrs.evolve(
            group, rollouts=[group.rollouts[i] for i in index], scores=[group.scores[i] for i in index]
        )
        for each in filters:
            with calling(each):
                answer = each(left) if left is not None and len(left) else False
            if not isinstance(answer, bool | np.bool_ | Group):
                raise RunError(
                    f"{title_of(each)} returned {answer!r:.80}; expected True, False or a Group{see_definition(each)}"
                )
            left = attrs.evolve(answer, uid=group.uid) if isinstance(answer, Group) else (left if answer else None)
        if left is not None and len(left):
            kept.append(left)
    return kept


def pack(
    groups: Sequence[Group], experts: Sequence[Group] = (), baselines: Mapping[str, float] | None = None
) -> StepBatch | None:
    """Pack the valid rollouts with a sampled token after their first token; None if there are none.

    Invalid rollouts, and the other rollouts of their trajectories, are dropped: no baseline or loss sees them.

    Args:
        groups: Groups that the policy sampled.
        experts: Groups of expert demonstrations.
        baselines: `uid` of a group -> reward of the greedy answer to its task; groups without one are dropped.
    """
    if baselines is not None:
        groups = [group for group in groups if group.uid in baselines]
    every = [*groups, *experts]
    kept = [
        (g, rollout, score) for g, group in enumerate(every) for rollout, score in scored(group) if is_trained(rollout)
    ]
    sampled = sum(g < len(groups) for g, _, _ in kept)
    if not sampled:
        return None
    index, rollouts, scores = (tuple(part) for part in zip(*kept, strict=True))
    lengths = np.array([len(r.token_ids) for r in rollouts], np.int64)
    mask = np.concatenate([r.loss_mask for r in rollouts])
    versions = np.concatenate([r.policy_versions for r in rollouts])
    # A response begins with the first token that was sampled, even if that is too old to be trained on.
    sampled_tokens = mask | (versions >= 0)
    firsts = np.cumsum(lengths) - lengths
    mask[firsts] = sampled_tokens[firsts] = False
    starts, responses = spans(sampled_tokens, lengths)
    inside = _inside(lengths, starts, responses)
    arrays = TrainBatch(
        token_ids=np.concatenate([r.token_ids for r in rollouts]),
        lengths=lengths,
        starts=starts,
        responses=responses,
        loss_mask=mask[inside],
        tokens={
            "behaviour_logprobs": np.concatenate([r.logprobs for r in rollouts])[inside],
            "policy_versions": versions[inside],
        },
        context={**_routing(rollouts), **_image_mask(rollouts)},
        images=tuple(r.images for r in rollouts) if any(len(r.image_positions) for r in rollouts) else (),
    )
    dense = np.unique(np.array(index), return_inverse=True)[1].astype(np.int64)
    greedy = None
    if baselines is not None:
        greedy = np.zeros(len(rollouts), np.float32)
        greedy[:sampled] = [baselines[groups[g].uid] for g in index[:sampled]]
    return StepBatch(arrays, rollouts, scores, dense, tuple(every[g].uid for g in index), sampled, greedy)


def is_trained(rollout: Rollout) -> bool:
    """Return True if the loss reads any token of a rollout."""
    # No hidden state predicts the first token; in a rollout without a prompt, it only conditions the others.
    return bool(rollout.loss_mask[1:].any())


def scored(group: Group) -> list[tuple[Rollout, Score]]:
    """Return the rollouts and scores of the trajectories in a group whose steps all have valid scores.

    If one step could not be scored, the value of the whole trajectory is unknown: the failed step may be the one that
    is rewarded.
    """
    whole = sorted(i for trajectory in group.scored_trajectories for i in trajectory)
    return [(group.rollouts[i], group.scores[i]) for i in whole]


def labels(
    batch: StepBatch, needs: frozenset[str], *, passing: float = 1.0, rewarded: bool = True
) -> dict[str, np.ndarray]:
    """Return the labels in `needs` that losses on groups, preferences and experts' answers read, `[n]` each.

    `groups` and `pairs` are the group; `expert` is True for an expert's answer. If a loss reads `pairs`, `preferred` is
    True for the better one of each pair. Otherwise it is True for each right answer, whose reward is at least
    `passing`.

    Raises:
        RunError: A group is not a pair, or its two rewards are equal.
        DataError: A demonstration has no label that says whether it is right.
    """
    found: dict[str, np.ndarray] = {}
    if "pairs" in needs:
        found = {"pairs": batch.groups, "preferred": _better(batch)}
    elif "preferred" in needs:
        found["preferred"] = _right(batch, passing, rewarded)
    if "groups" in needs:
        found["groups"] = batch.groups
    if "expert" in needs:
        found["expert"] = np.arange(len(batch.rollouts)) >= batch.sampled
    return {name: values for name, values in found.items() if name in needs}


def _better(batch: StepBatch) -> np.ndarray:
    """Bool `[n]`: True for the rollout with the greater reward in each pair."""
    rewards, size = np.array([s.value for s in batch.scores]), np.bincount(batch.groups)
    least = np.full(len(size), np.inf)
    np.minimum.at(least, batch.groups, rewards)
    better: np.ndarray = rewards > least[batch.groups]  # not above the mean, which may round up to the greater one
    count = np.bincount(batch.groups, better)
    if wrong := np.flatnonzero((size != 2) | (count != 1)).tolist():
        at = next(i for i, group in enumerate(batch.groups) if group == wrong[0])
        raise RunError(
            f"the policy loss learns from pairs of a better and a worse rollout, but task "
            f"{batch.rollouts[at].task.id!r} has {counted(size[wrong[0]].item(), 'rollout')}, {count[wrong[0]]:g} of "
            "them better; add the filter 'best_worst'"
        )
    return better


def _right(batch: StepBatch, passing: float, rewarded: bool) -> np.ndarray:
    """Bool `[n]`: True for a right rollout, judged by its reward or, for a demonstration, by its task's label."""
    right = np.array([score.value >= passing for score in batch.scores])
    for i, rollout in enumerate(batch.rollouts):
        if (rollout.policy_versions[rollout.loss_mask] >= 0).any():
            continue  # sampled: the task's label does not apply to this answer
        labelled = isinstance(rollout.task.metadata.get("label"), bool)
        if labelled or i >= batch.sampled or not rewarded:
            right[i] = label_of(rollout.task)
    return right


def _routing(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Field `routed_experts`, int16 `[T, layers, k]`, if any rollout has it; -1 for rollouts without it."""
    shape = next((r.routed_experts.shape[1:] for r in rollouts if r.routed_experts is not None), None)
    if shape is None:
        return {}
    parts = (
        np.full((len(r.token_ids), *shape), -1, np.int16) if r.routed_experts is None else r.routed_experts
        for r in rollouts
    )
    return {"routed_experts": np.concatenate(list(parts))}


def _image_mask(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Field `image_mask`, bool `[T]`, if any rollout has image tokens."""
    if not any(len(r.image_positions) for r in rollouts):
        return {}
    masks = [np.zeros(len(r.token_ids), bool) for r in rollouts]
    for mask, rollout in zip(masks, rollouts, strict=True):
        mask[rollout.image_positions] = True
    return {"image_mask": np.concatenate(masks)}


def routing_metrics(batch: TrainBatch) -> dict[str, float]:
    """Return the share of input tokens whose routed experts are unknown; empty without this field."""
    routing = batch.context.get("routed_experts")
    if routing is None:
        return {}
    read = _inside(batch.lengths, np.zeros_like(batch.starts), batch.starts + batch.responses - 1)
    known = (routing[read] >= 0).any(axis=(1, 2))
    return {"routing/unknown": 1.0 - float(known.mean())}


def spans(mask: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and length of each response in its rollout, from the first sampled token to the last.

    Args:
        mask: bool `[T]`, True where sampled; at least one per rollout.
        lengths: int64 `[n]`, tokens of each rollout.
    """
    offsets = np.cumsum(lengths) - lengths
    where = np.flatnonzero(mask)
    owner = np.searchsorted(offsets, where, side="right") - 1
    first = where[np.searchsorted(owner, np.arange(len(lengths)), side="left")]
    last = where[np.searchsorted(owner, np.arange(len(lengths)), side="right") - 1]
    return first - offsets, last - first + 1


def _inside(lengths: np.ndarray, starts: np.ndarray, responses: np.ndarray) -> np.ndarray:
    begin = np.cumsum(lengths) - lengths + starts
    shift = begin - (np.cumsum(responses) - responses)
    inside: np.ndarray = np.arange(int(responses.sum())) + np.repeat(shift, responses)
    return inside


async def produce(batch: StepBatch, fields: Sequence[Field], *, in_thread: bool = True) -> StepBatch:
    """Add the fields that plugins declare by calling their producers, in a thread unless they are `async`.

    Raises:
        RunError: A producer raised, or did not return one finite number per response token.
    """
    for field in fields:
        assert field.produce is not None
        try:
            given = _read_only(batch)
            call = partial(field.produce, given, **field.options)
            found = await asyncio.to_thread(call) if in_thread else call()
            found = await found if inspect.isawaitable(found) else found
        except RlsdkError:
            raise
        except (Exception, SystemExit) as error:
            missing = error.args[0] if isinstance(error, KeyError) and error.args else None
            hint = f"; declare what it reads: needs=({missing!r},)" if missing in FORWARD else ""
            raise RunError(f"field {field.name!r}: its producer failed: {described(error)}{hint}") from error
        expected = len(batch.arrays.loss_mask)
        try:
            values = np.asarray(found, dtype=np.float32)
        except (TypeError, ValueError):  # lists of different lengths, texts
            values = None
        if values is None or values.shape != (expected,) or not np.isfinite(values).all():
            what = f"a {type(found).__name__} that is not an array of numbers"
            if values is not None:
                what = "numbers that are not finite" if values.shape == (expected,) else f"shape {values.shape}"
            raise RunError(
                f"field {field.name!r}: its producer gave {what}; expected ({expected},), one finite number per "
                "response token"
            )
        batch = batch.with_fields(**{field.name: values})
    return batch


def _read_only(batch: StepBatch) -> StepBatch:
    """Return the batch with read-only arrays, since credit and learner share the memory."""

    def locked(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: locked(each) for name, each in value.items()}
        if not isinstance(value, np.ndarray):
            return value
        view = value.view()
        view.flags.writeable = False
        return view

    arrays = attrs.evolve(batch.arrays, **{n: locked(v) for n, v in attrs.asdict(batch.arrays, recurse=False).items()})
    return attrs.evolve(batch, arrays=arrays, groups=locked(batch.groups), fields=locked(batch.fields))
