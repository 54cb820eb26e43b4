"""The marks: decorators that attach a `Component` to a function or class without changing it.

    @rlsdk.reward("exact")
    def exact(rollout, *, ignore_case: bool = False) -> float:
        '''1.0 if the answer is the task's, else 0.0.'''

The mark must be the outermost decorator. `rlsdk.plugins` collects marked objects and finds them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rlsdk import calls
from rlsdk.components import ISOLATIONS, WHERE, Batch, Check, CostlyToRead, Isolation, SamplerRatio, Where, mark, named
from rlsdk.errors import PluginError
from rlsdk.fields import MARK, Field

T = TypeVar("T", bound=Callable[..., Any])
Needs = Sequence[str | Callable[..., Any]]
"""Fields of a batch: names of core fields, and functions marked with `rlsdk.field`."""


@named
def field(name: str, *, needs: Sequence[str] = (), sample: tuple[float, float] = (-1.0, 1.0)) -> Callable[[T], T]:
    """Declare a field of a batch, one number per response token: `(batch: StepBatch, *, …) -> array [t]`, maybe async.

    The marked function computes the field in the trainer, before shaping and advantage, in every run with a component
    that lists the function in its `needs`. Such components read it from their inputs, as `x.NAME`. A configuration sets
    its options, keyword-only parameters with defaults, under `fields.NAME`.

    Args:
        name: Name of the field.
        needs: Learner fields that the function reads from `batch.fields`: logprobs, entropy, ref_logprobs, values, ….
        sample: Minimum and maximum value in the batches used to check components that read the field.
    """
    read = calls.new_field(name, needs)

    def attach(function: T) -> T:
        calls.check_producer(name, function)
        made = Field(
            name=name,
            axis="token",
            producer="plugin",
            credit="on request",
            loss="on request",
            needs=read,
            produce=function,
            sample=sample,
        )
        setattr(function, MARK, made)
        return function

    return attach


@named
def reward(
    name: str,
    *,
    batch: Batch = False,
    runs: Where | Callable[[Any], Where] = "pool",
    cache: bool = False,
    imports: tuple[str, ...] = (),
    reads_given: bool = False,
    check: Check | None = None,
) -> Callable[[T], T]:
    """Mark a reward: `(rollout, *, …) -> float | Score`, sync or async; with `batch`, lists of both.

    Args:
        name: Name within the plugin.
        batch: `True`: takes and returns lists; each score depends only on its own rollout, so that lists may be split
            anywhere. `"group"`: compares rollouts; called once with all rollouts of a task, in order.
        runs: `pool`: in one of several processes, which is killed if a call takes too long. `driver`: in the driver's
            event loop, for rewards that are fast whatever the model wrote; async rewards, and those with a `state()`,
            always run there. `actor`: in a separate actor, for rewards that hold a model. If the choice depends on
            options, a function that takes the reward, ready to run, and returns one of these.
        cache: Reuse the score of an equal rollout; equal rollouts must get equal scores.
        imports: Heavy modules that the reward imports on first use; a pool imports them once for all its processes.
        reads_given: True if the reward uses `rollout.rewards`, given by the workflow or environment. A run warns if its
            workflow gives rewards that nothing uses.
        check: As for a shaping.
    """
    if not callable(runs) and runs not in WHERE:
        raise PluginError(f"@rlsdk.reward({name!r}): runs must be one of {', '.join(WHERE)}; got {runs!r}")
    if batch not in (False, True, "group"):
        raise PluginError(f"@rlsdk.reward({name!r}): batch must be False, True or 'group'; got {batch!r}")
    if cache and batch == "group":
        raise PluginError(
            f"@rlsdk.reward({name!r}): cache=True keeps the score of a rollout, but with batch='group' it depends on "
            "the rest of its group; leave cache out"
        )
    return mark(
        "reward",
        name,
        batch=batch,
        runs=runs,
        cache=cache,
        imports=tuple(imports),
        reads_given=reads_given,
        check=check,
    )


@named
def shaping(
    name: str, *, needs: Needs = (), lengths: tuple[str, ...] = (), check: Check | None = None
) -> Callable[[T], T]:
    """Mark a shaping: `(x: CreditInputs, *, …) -> Tensor[n] | Tensor[t]`, which changes rewards before the advantage.

    A sync function runs in a thread; an async one is awaited on the training's event loop.

    Args:
        name: Name within the plugin.
        needs: Optional input fields that it reads.
        lengths: Options that are response lengths; null is replaced by the run's `sampling.max_tokens`.
        check: `(run: RunFacts, options) -> [(option, why)]`: options that have no effect in a run, reported as faults
            of its configuration.
    """
    return mark("shaping", name, needs=needs, lengths=tuple(lengths), check=check)


@named
def advantage(
    name: str,
    *,
    needs: Needs = (),
    reads_rewards: bool = True,
    lengths: tuple[str, ...] = (),
    check: Check | None = None,
) -> Callable[[T], T]:
    """Mark an advantage: `(x: CreditInputs, *, …) -> Tensor[n] | Tensor[t] | Credit`.

    A sync function runs in a thread; an async one is awaited on the training's event loop.

    Args:
        name: Name within the plugin.
        needs: Optional input fields that it reads.
        reads_rewards: False if it does not read rewards: a run without other readers needs no reward.
        lengths: As for a shaping.
        check: As for a shaping.
    """
    marks = {"reads_rewards": reads_rewards, "lengths": tuple(lengths), "check": check}
    return mark("advantage", name, needs=needs, **marks)


@named
def policy_loss(
    name: str,
    *,
    needs: Needs = (),
    whole_batch: bool = False,
    aggregates: tuple[str, ...] = (),
    corrects: SamplerRatio | None = None,
    lengths: tuple[str, ...] = (),
    check: Check | None = None,
) -> Callable[[T], T]:
    """Mark a policy loss: `(x: LossInputs, *, …) -> Tensor[t] | (Tensor[t], metrics)`, per token and not averaged.

    A metric is a number, or a tensor with a value per token (averaged over trained tokens), rollout, group or pair.

    Args:
        name: Name within the plugin.
        needs: Optional input fields that it reads. With `groups`, the rollouts of a group are always together. Without
            `pairs`, `preferred` is True for right answers; with `pairs`, for the better answer of each pair.
        whole_batch: True if it reads `x.whole`.
        aggregates: Aggregations that its formula is defined for; a run with another one is refused. Empty: all.
        corrects: Importance weight that the loss applies itself: `old` for the ratio of `old_logprobs` to
            `behaviour_logprobs`, `policy` for that of `logprobs`. A correction that also reweights is refused, and so
            is `old` if both are the same numbers (`old_logprobs: rollout`).
        lengths: As for a shaping.
        check: As for a shaping.
    """
    marks = {"aggregates": tuple(aggregates), "corrects": corrects, "lengths": tuple(lengths), "check": check}
    return mark("policy_loss", name, needs=needs, whole_batch=whole_batch, **marks)


@named
def correction(
    name: str,
    *,
    needs: Needs = (),
    masks: bool | Callable[[Mapping[str, Any]], bool] = False,
    compares: SamplerRatio = "old",
    replays_routing: bool = False,
    check: Check | None = None,
) -> Callable[[T], T]:
    """Mark a correction: `(x: LossInputs, *, …) -> Tensor[t] | (Tensor[t], metrics)`, detached weights.

    Args:
        name: Name within the plugin.
        needs: Optional input fields that it reads.
        masks: True if its weights are 0 or 1; it may then be combined with a policy loss, or another correction, that
            reweights. A function decides from the options.
        compares: Policy that it compares with the sampler: `old` if it reads `old_logprobs`, so that it has no effect
            where these are the sampler's own (`old_logprobs: rollout`), or `policy` if it reads `logprobs`.
        replays_routing: True if the learner's actor must use the experts that the engine chose.
        check: As for a shaping.
    """
    marks = {"masks": masks, "replays_routing": replays_routing, "check": check}
    return mark("correction", name, needs=needs, corrects=compares, **marks)


@named
def kl(name: str) -> Callable[[T], T]:
    """Mark a KL estimator: `(logprobs[t], ref_logprobs[t]) -> Tensor[t]`."""
    return mark("kl", name)


@named
def filter(  # noqa: A001 - the contract's name
    name: str, *, reads_rewards: bool = True, check: Check | None = None
) -> Callable[[T], T]:
    """Mark a filter: `(group: Group, *, …) -> bool | Group`, whether to train on a group, or on which part.

    Args:
        name: Name within the plugin.
        reads_rewards: False if it does not read rewards.
        check: As for a shaping.
    """
    return mark("filter", name, reads_rewards=reads_rewards, check=check)


@named
def buffer(name: str, *, reads_rewards: bool = True, check: Check | None = None) -> Callable[[T], T]:
    """Mark a buffer policy: `(group, *, step, uses, …) -> priority | None`; None drops the group.

    Args:
        name: Name within the plugin.
        reads_rewards: False if it does not read rewards.
        check: As for a shaping.
    """
    return mark("buffer", name, reads_rewards=reads_rewards, check=check)


@named
def sampler(name: str, *, reads_rewards: bool = True, check: Check | None = None) -> Callable[[T], T]:
    """Mark a task sampler: a class with `draw(available, random) -> index` and `note(index, group)`.

    Args:
        name: Name within the plugin.
        reads_rewards: False if it does not read rewards.
        check: As for a shaping.
    """
    return mark("sampler", name, reads_rewards=reads_rewards, check=check)


@named
def stop(name: str) -> Callable[[T], T]:
    """Mark a stop rule: `(*, available, target, …) -> bool`, True to end sampling for this step."""
    return mark("stop", name)


@named
def workflow(name: str, *, rewards: bool = False, one_answer: bool = False) -> Callable[[T], T]:
    """Mark a workflow: a class with `async run(self, task, chat) -> Rollout | Sequence[Rollout]`, or a function.

    Args:
        name: Name within the plugin.
        rewards: True if it gives rewards (`chat.reward`); they are used if the configuration names no reward.
        one_answer: True if a rollout is the task's prompt and a single answer, of at most `sampling.max_tokens`;
            otherwise responses may be as long as `model.max_length`.
    """
    return mark("workflow", name, rewards=rewards, one_answer=one_answer)


@named
def environment(name: str, *, isolation: Isolation = "thread") -> Callable[[T], T]:
    """Mark an environment: a class with `reset(seed) -> Observation` and `step(text) -> Step`, sync or async.

    Args:
        name: Name within the plugin.
        isolation: `thread`: calls of several instances run concurrently, in threads of one process. `lock`: one call at
            a time, for instances that share state. `process`: each instance has its own process, which is killed if a
            call takes too long.
    """
    if isolation not in ISOLATIONS:
        raise PluginError(
            f"@rlsdk.environment({name!r}): isolation must be one of {', '.join(ISOLATIONS)}; got {isolation!r}"
        )
    return mark("environment", name, isolation=isolation)


@named
def tasks(name: str, *, costly: CostlyToRead | None = None) -> Callable[[T], T]:
    """Mark a task source: `(*, split, …) -> Sequence[Task]`, sized, indexable, and deterministic given its seed.

    Args:
        name: Name within the plugin.
        costly: `(options) -> bool`: True if reading the source with these options downloads data or is slow; `rlsdk
            explain` then does not read it. It may raise `DataError`.
    """
    return mark("tasks", name, costly=costly)


@named
def engine(name: str) -> Callable[[T], T]:
    """Mark an engine: generates tokens with logprobs, and loads versioned weights."""
    return mark("engine", name)


@named
def learner(name: str) -> Callable[[T], T]:
    """Mark a learner: computes logprobs and values, updates, exports weights, saves and loads."""
    return mark("learner", name)


@named
def optimizer(name: str, *, whole_tensors: bool = False) -> Callable[[T], T]:
    """Mark an optimiser: `(groups, *, …) -> torch.optim.Optimizer`, a function or a subclass of that class.

    `groups` are torch's parameter groups, each with `params`, `param_names`, `lr` and `weight_decay`. The learner clips
    gradients and sets each group's `lr` before each step.

    Args:
        name: Name within the plugin.
        whole_tensors: True if it needs tensors in their shapes, as Muon needs matrices. False if each element's step
            depends only on that element's weight, gradients and state, so that tensors may be flattened and sharded.
    """
    return mark("optimizer", name, whole_tensors=whole_tensors)


@named
def lr_schedule(name: str) -> Callable[[T], T]:
    """Mark a learning-rate schedule: `(step, steps, *, …) -> float`, the share of the peak learning rate.

    Both arguments count optimiser steps after the learner's warm-up: `step` those taken so far, `steps` those of the
    run. The value must depend on nothing else, so that a resumed run continues with the same rates.

    Args:
        name: Name within the plugin.
    """
    return mark("lr_schedule", name)


@named
def tracker(name: str) -> Callable[[T], T]:
    """Mark a tracker: `open(run)`, `log(step, metrics)`, `close()`."""
    return mark("tracker", name)


@named
def renderer(name: str) -> Callable[[T], T]:
    """Mark a renderer: turns conversations into a model's tokens, and its answers into messages."""
    return mark("renderer", name)


@named
def tool_parser(name: str) -> Callable[[T], T]:
    """Mark a tool parser: a class with `parse(text)`, `write(calls)`, `instructions` and `begins`."""
    return mark("tool_parser", name)


@named
def diagnosis(name: str, *, metrics: Sequence[str] = ()) -> Callable[[T], T]:
    """Mark a diagnosis: `(history: History, *, …) -> Finding | None`, which finds a problem of a run in its metrics.

    It is called after each step of a run, and by `rlsdk diagnose`; `History` and `Finding` are in `rlsdk.contracts`. It
    only observes: the run continues even if it raises.

    Args:
        name: Name of the component.
        metrics: Names of metrics that it reads and that rlsdk itself does not log, such as those of the plugin's loss.
            `rlsdk check` refuses other names that it does not know.
    """
    return mark("diagnosis", name, metrics=tuple(metrics))


@named
def weight_transfer(name: str) -> Callable[[T], T]:
    """Mark a weight transfer: sends weights from learner ranks to engines."""
    return mark("weight_transfer", name)
