"""Check that a run's group size gives a learning signal, by trying its advantage and filters on toy batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rlsdk.components import component_of
from rlsdk.isolation.process_settings import settings_kept
from rlsdk.types import Group, Rollout, Score, Task

if TYPE_CHECKING:
    from rlsdk.batch import CreditInputs
    from rlsdk.config.plan import Plan

GROUPS = 8
"""Number of groups in a trial batch, and the largest group size to try."""
MOST_TRIED = 1024
"""Largest trial group: a greater `group_size` behaves alike, and would take long."""
REWARDS = (0.0, 1.0, 0.25, 0.75)
"""Rewards of the rollouts in a trial batch, repeated in this order."""


def learning_faults(plan: Plan) -> list[str]:
    """Report parts of a plan that together leave nothing to learn, though each is valid."""
    algorithm, size, resolve = plan.algorithm, plan.config.group_size, plan.plugins.resolve
    loss, filters = resolve(plan.loss.policy_loss), [resolve(each) for each in plan.filters]
    faults: list[str] = []
    # A group may be too small to learn from, but demonstrations are learned from in any group.
    if algorithm.rollouts != "demonstrations":
        sampled = algorithm.rollouts == "sampled"  # otherwise there are other learning signals
        advantage = resolve(plan.advantage) if sampled or algorithm.critic else None
        faults += group_faults(size, advantage if sampled else None, filters)
        one_answer = plan.plugins.component(plan.workflow).one_answer
        if sampled and (one_answer or not filters) and not faults:
            faults += pair_faults(size, loss, filters) if one_answer else []
            orders = plan.plugins.component(plan.buffer).reads_rewards
            faults += [] if orders else reward_faults(size, advantage, loss, filters)
        if algorithm.critic:
            faults += critic_faults(advantage)
    if not faults and algorithm.top_entropy_quantile is not None:
        faults += entropy_faults(loss, algorithm.rollouts)
    return faults


def group_faults(size: int, advantage: Any, filters: Iterable[Any]) -> list[str]:
    """Report parts that leave nothing to learn from groups of this size, but would from larger ones.

    Args:
        size: The run's `group_size`.
        advantage: Advantage function, ready to run; None if the run also has other learning signals.
        filters: Filters, ready to run.
    """
    found = []
    least = None if advantage is None else _least(size, lambda k: _teaches(advantage, k))
    if least:
        found.append(
            f"group_size: {size} given, but the advantage {_name(advantage)} compares the rollouts of a task with each "
            f"other: with fewer than {least} every advantage is 0 and nothing is learned; set group_size to {least} or "
            "more, or use an advantage that needs no group, such as 'reinforce_plus_plus'"
        )
    for each in filters:
        least = _least(size, lambda k, each=each: _keeps(each, k))  # type: ignore[misc]
        if least:
            found.append(
                f"group_size: {size} given, but the filter {_name(each)} drops every group of fewer than {least} "
                f"rollouts: nothing is trained; set group_size to {least} or more, or leave the filter out"
            )
    return found


def critic_faults(advantage: Any) -> list[str]:
    """Report a critic that would have nothing to learn, since the advantage gives no returns."""
    found = _tried(advantage, 2)
    if found is None or hasattr(found, "returns"):
        return []
    return [
        f"algorithm.critic: a critic learns the returns that an advantage gives, and {_name(advantage)} gives none; "
        "set it to false, or use an advantage with returns, such as 'gae'"
    ]


def pair_faults(size: int, loss: Any, filters: Sequence[Any]) -> list[str]:
    """Report filters that leave a pairwise loss groups other than pairs of a better and a worse rollout."""
    component = component_of(loss)
    if component is None or "pairs" not in component.needs:
        return []
    tried = min(size, MOST_TRIED)
    for rewards in ([1.0] * tried, _rewards(tried)[:tried]):
        left = _filtered(_group(rewards), filters)
        if left and (len(left) != 2 or len({score.value for score in left.scores}) != 2):
            what = f"{len(left)} rollouts" if len(left) != 2 else "two equal rewards"
            return [
                f"algorithm.filters: the policy loss {_name(loss)} learns from pairs of a better and a worse rollout, "
                f"but with group_size={size} these filters leave groups of {what}; add the filter 'best_worst'"
            ]
    return []


def reward_faults(size: int, advantage: Any, loss: Any, filters: Sequence[Any]) -> list[str]:
    """Report parts that make rewards irrelevant, although the advantage or a filter reads them."""
    compares, learns = component_of(advantage), component_of(loss)
    if compares is None or learns is None or "preferred" in learns.needs or not _keeps_all(filters, size):
        return []
    if compares.reads_rewards:
        if _reads_advantages(loss):
            return []
        return [
            f"algorithm.policy_loss: {_name(loss)} learns from all rollouts alike, whatever their advantages, and "
            f"algorithm.filters leave none out: rewards change nothing, although the advantage {_name(advantage)} "
            "reads them; use another policy loss, such as 'ppo', or add a filter, such as 'top_k' (if intended, set "
            "algorithm.advantage=constant)"
        ]
    if _keeps_all(filters, MOST_TRIED):
        return []
    return [
        f"group_size: {size} given, but algorithm.filters leave out only rollouts of larger groups, and the advantage "
        f"{_name(advantage)} reads no rewards: rewards would change nothing; set a greater group_size, or let the "
        "filters keep fewer"
    ]


def entropy_faults(loss: Any, rollouts: str) -> list[str]:
    """Report a limit to tokens of high entropy where no token has an advantage, or the loss reads none.

    Args:
        loss: Policy loss, ready to run.
        rollouts: Source of the rollouts: sampled, demonstrations or mixed.
    """
    where = "algorithm.top_entropy_quantile: it leaves tokens of low entropy without an advantage, but"
    if rollouts == "demonstrations":
        return [f"{where} demonstrations have none; leave it out (null)"]
    if not _reads_advantages(loss):
        return [f"{where} the policy loss {_name(loss)} reads none; leave it out (null), or use another loss"]
    return []


def _keeps_all(filters: Sequence[Any], size: int) -> bool:
    """Return whether filters keep every rollout of trial groups; False if they cannot be tried."""
    tried = min(size, MOST_TRIED)
    trial = [_group(rewards) for rewards in (_rewards(tried)[:tried], [0.0] * tried, [1.0] * tried)]
    return all((left := _filtered(group, filters)) is not None and len(left) == tried for group in trial)


def _reads_advantages(loss: Any) -> bool:
    """Return whether a policy loss depends on the advantages; True if this cannot be tried."""
    return _differ(_gradient(loss), _gradient(loss, sign=-1.0))


def ignores_updates(loss: Any) -> bool:
    """Return whether a policy loss learns from advantages as if its samples were the current policy's.

    After the first of several updates per batch they are not, and other losses weight or clip by the ratio of the
    current policy to an older one. False for losses of right and wrong answers, and if the loss cannot be tried.
    """
    component = component_of(loss)
    labelled = component is not None and "preferred" in component.needs
    return not labelled and _reads_advantages(loss) and not _differ(_gradient(loss), _gradient(loss, moved=-0.1))


def _differ(one: Any | None, other: Any | None) -> bool:
    import torch

    return one is None or other is None or not torch.equal(one, other)


def _gradient(loss: Any, *, sign: float = 1.0, moved: float = 0.0) -> Any | None:
    """Return the gradient of a policy loss on a trial batch; None if it cannot be tried.

    Args:
        loss: Policy loss, ready to run.
        sign: Factor on the advantages.
        moved: Current minus older logprobs; below 0, since a ratio above 1 may be capped at 1.
    """
    import torch

    from rlsdk.batch import LossInputs

    logprobs = torch.tensor([-0.5, -1.0, -1.5, -2.0], requires_grad=True)
    old, labels = logprobs.detach() - moved, torch.tensor([True, False])
    x = LossInputs(
        logprobs,
        old,
        sign * torch.tensor([1.0, 1.0, -0.5, -0.5]),
        torch.ones(4, dtype=torch.bool),
        torch.tensor([0, 0, 1, 1]),
        behaviour_logprobs=old,
        ref_logprobs=logprobs.detach(),
        entropy=-logprobs.detach(),
        values=logprobs.detach(),
        groups=torch.zeros(2, dtype=torch.long),
        pairs=torch.zeros(2, dtype=torch.long),
        preferred=labels,
        expert=~labels,
    )
    try:
        with settings_kept():
            values = loss(x)
        values = values[0] if isinstance(values, tuple) else values
        (slope,) = torch.autograd.grad(values.sum(), logprobs)
    except (Exception, SystemExit):  # noqa: BLE001 - as above
        return None
    return slope


def _least(size: int, works: Callable[[int], bool]) -> int | None:
    """Return the smallest larger size up to `GROUPS` that works; None if `size` works, or none does."""
    if size >= GROUPS or works(size):
        return None
    return next((k for k in range(size + 1, GROUPS + 1) if works(k)), None)


def _teaches(advantage: Any, size: int) -> bool:
    """Return whether any rollout of a trial batch gets an advantage; True if this cannot be tried."""
    try:
        result = _tried(advantage, size)
        return result is None or bool(getattr(result, "advantages", result).abs().max() > 0)
    except (Exception, SystemExit):  # noqa: BLE001 - `rlsdk check` and the run report a part that is wrong
        return True


def _tried(advantage: Any, size: int) -> Any:
    """Return what an advantage gives for a trial batch with groups of this size; None if this cannot be tried."""
    component = component_of(advantage)
    if component is None or component.is_async:
        return None
    try:
        with settings_kept():
            return advantage(_batch(size).only(component.needs))
    except (Exception, SystemExit):  # noqa: BLE001 - as above
        return None


def _keeps(part: Any, size: int) -> bool:
    """Return whether a filter keeps any group of a trial batch, or part of one."""
    rewards = _rewards(size)
    trial = [_group(rewards[first * size :][:size]) for first in range(len(REWARDS))]
    try:
        with settings_kept():
            answers = [part(group) for group in trial]
        return any(len(answer) if isinstance(answer, Group) else answer for answer in answers)
    except (Exception, SystemExit):  # noqa: BLE001 - as above
        return True


def _filtered(group: Group, filters: Sequence[Any]) -> Group | None:
    """Return the part of a trial group that filters keep; None if they drop it, or if they cannot be tried."""
    try:
        for each in filters:
            with settings_kept():
                answer = each(group)
            if not answer:
                return None
            group = answer if isinstance(answer, Group) else group
    except (Exception, SystemExit):  # noqa: BLE001 - as above
        return None
    return group


def _group(rewards: Sequence[float]) -> Group:
    """Return a trial group with these rewards."""
    rollout = Rollout(Task("trial", "1 + 1 =", "2"), (), [1, 2], [False, True], [0.0, -1.0], [-1, 0])
    return Group(rollout.task, [rollout] * len(rewards), [Score(reward) for reward in rewards])


def _name(part: Any) -> str:
    component = component_of(part)
    return repr(component.name if component else part)


def _rewards(size: int) -> list[float]:
    """Return the rewards of `GROUPS` groups, in order; they differ within a group and, for size 1, between groups."""
    return [REWARDS[(group + member) % len(REWARDS)] for group in range(GROUPS) for member in range(size)]


def _batch(size: int) -> CreditInputs:
    """Return a trial batch of two-token rollouts, with all optional fields."""
    import torch

    from rlsdk.batch import CreditInputs

    rewards = torch.tensor(_rewards(size))
    count = len(rewards)
    groups = torch.arange(GROUPS).repeat_interleave(size)
    tokens = torch.linspace(0.1, 0.9, 2 * count)
    return CreditInputs(
        rewards,
        groups,
        torch.full((count,), 2),
        torch.ones(2 * count, dtype=torch.bool),
        values=tokens,
        logprobs=-tokens,
        ref_logprobs=-tokens.flip(0),
        entropy=tokens,
        probs_squared_sum=tokens,
        baseline_rewards=torch.full((count,), 0.5),
        sources=torch.zeros(count, dtype=torch.long),
        trajectories=torch.arange(count),
        steps=torch.zeros(count, dtype=torch.long),
        states=groups,
        reward_parts={"reward": rewards},
        reward_weights={"reward": 1.0},
        train_step=0,
        train_steps=1,
    )
