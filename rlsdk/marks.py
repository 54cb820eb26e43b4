"""The marks: decorators that attach a `Component` to a function or class and touch nothing else.

    @rlsdk.reward("exact")
    def exact(rollout, *, ignore_case: bool = False) -> float:
        '''1.0 if the answer is the task's, else 0.0.'''

The mark is the outermost decorator. Collecting marks, and choosing among them by name, is the work of `rlsdk.plugins`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rlsdk import calls
from rlsdk.components import ISOLATIONS, WHERE, Batch, Check, CostlyToRead, Isolation, SamplerRatio, Where, mark
from rlsdk.errors import PluginError
from rlsdk.fields import MARK, Field

T = TypeVar("T", bound=Callable[..., Any])
Needs = Sequence[str | Callable[..., Any]]
"""Fields of a batch: names of the core's, and functions that `rlsdk.field` marks."""


def field(name: str, *, needs: Sequence[str] = (), sample: tuple[float, float] = (-1.0, 1.0)) -> Callable[[T], T]:
    """Declare a field of a batch, one number per response token: `(batch: StepBatch) -> array [t]`, sync or async.

    The marked function computes it in the trainer, before shaping and advantage, in every run that has a component
    with the function in its `needs`. Such components read it from their inputs, as `x.NAME`.

    Args:
        name: Name of the field.
        needs: Fields of the learner that it reads from `batch.fields`: logprobs, entropy, ref_logprobs, values, ….
        sample: Least and greatest value in the batches on which components that read it are checked.
    """
    read = calls.new_field(name, needs)

    def attach(function: T) -> T:
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
        name: Its name within its plugin.
        batch: `True`: it takes and returns lists, and each score depends on its own rollout alone, so that a list may
            be split anywhere. `"group"`: it compares rollouts, and is called once with all of one task, in order.
        runs: `pool`: in one of several processes, which is killed when a call takes too long. `driver`: in the driver's
            event loop, for what is over in an instant whatever the model wrote; what is async, or has a `state()`,
            always runs there. `actor`: in an actor of its own, for what holds a model. Where it depends on options, a
            function that takes the reward, ready to run, and returns one of these.
        cache: Equal rollouts get equal scores: one that was scored is not scored again.
        imports: Heavy modules that it imports when it first scores; a pool imports them once for all its processes.
        reads_given: It counts what the workflow or environment gave (`rollout.rewards`). A run whose workflow gives
            rewards that nothing counts warns of it.
        check: As for a shaping.
    """
    if not callable(runs) and runs not in WHERE:
        raise PluginError(f"@rlsdk.reward({name!r}): runs is one of {', '.join(WHERE)}; got {runs!r}")
    if batch not in (False, True, "group"):
        raise PluginError(f"@rlsdk.reward({name!r}): batch is False, True or 'group'; got {batch!r}")
    if cache and batch == "group":
        raise PluginError(
            f"@rlsdk.reward({name!r}): cache=True keeps the score of a rollout, but with batch='group' it depends on "
            "the rest of its group; leave cache out"
        )
    marks = {"cache": cache, "imports": tuple(imports), "reads_given": reads_given, "check": check}
    return mark("reward", name, batch=batch, runs=runs, **marks)


def shaping(
    name: str, *, needs: Needs = (), lengths: tuple[str, ...] = (), check: Check | None = None
) -> Callable[[T], T]:
    """Mark a shaping: `(x: CreditInputs, *, …) -> Tensor[n] | Tensor[t]`, new rewards, before the advantage.

    Sync, and then run in a thread, or async, and then awaited on the event loop of the training.

    Args:
        name: Its name within its plugin.
        needs: Optional fields of its inputs that it reads.
        lengths: Options that are lengths of a response; where one is null, it gets the run's `sampling.max_tokens`.
        check: `(run: RunFacts, options) -> [(option, why)]`: options that cannot take effect in a run are faults of
            its configuration.
    """
    return mark("shaping", name, needs=needs, lengths=tuple(lengths), check=check)


def advantage(
    name: str,
    *,
    needs: Needs = (),
    reads_rewards: bool = True,
    lengths: tuple[str, ...] = (),
    check: Check | None = None,
) -> Callable[[T], T]:
    """Mark an advantage: `(x: CreditInputs, *, …) -> Tensor[n] | Tensor[t] | Credit`.

    Sync, and then run in a thread, or async, and then awaited on the event loop of the training.

    Args:
        name: Its name within its plugin.
        needs: Optional fields of its inputs that it reads.
        reads_rewards: False for one that never looks at rewards: a run without other readers needs no reward.
        lengths: As for a shaping.
        check: As for a shaping.
    """
    marks = {"reads_rewards": reads_rewards, "lengths": tuple(lengths), "check": check}
    return mark("advantage", name, needs=needs, **marks)


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
    """Mark a policy loss: `(x: LossInputs, *, …) -> Tensor[t] | (Tensor[t], metrics)`, per token, never a mean.

    Args:
        name: Its name within its plugin.
        needs: Optional fields of its inputs that it reads. Without `pairs`, `preferred` is True for a right answer;
            with `pairs`, for the better one of each pair.
        whole_batch: It reads `x.whole`.
        aggregates: The aggregations that its formula is defined for; a run with another is refused. Empty: all.
        corrects: The ratio to the policy that sampled by which it weighs tokens itself: `old` for that of
            `old_logprobs` to `behaviour_logprobs`, `policy` for that of `logprobs`. A correction that weighs as well is
            refused, and `old` also where the two are the same numbers (`old_logprobs: rollout`).
        lengths: As for a shaping.
        check: As for a shaping.
    """
    marks = {"aggregates": tuple(aggregates), "corrects": corrects, "lengths": tuple(lengths), "check": check}
    return mark("policy_loss", name, needs=needs, whole_batch=whole_batch, **marks)


def correction(
    name: str, *, needs: Needs = (), masks: bool = False, replays_routing: bool = False, check: Check | None = None
) -> Callable[[T], T]:
    """Mark a correction: `(x: LossInputs, *, …) -> Tensor[t] | (Tensor[t], metrics)`, detached weights.

    Args:
        name: Its name within its plugin.
        needs: Optional fields of its inputs that it reads.
        masks: True if its weights are 0 or 1; it may then be combined with a policy loss that reweights by itself.
        replays_routing: True if the learner's actor is to use the experts that the engine chose.
        check: As for a shaping.
    """
    marks = {"masks": masks, "replays_routing": replays_routing, "check": check}
    return mark("correction", name, needs=needs, corrects="old", **marks)


def kl(name: str) -> Callable[[T], T]:
    """Mark a KL estimator: `(logprobs[t], ref_logprobs[t]) -> Tensor[t]`."""
    return mark("kl", name)


def filter(name: str, *, reads_rewards: bool = True) -> Callable[[T], T]:  # noqa: A001 - the contract's name
    """Mark a filter: `(group: Group, *, …) -> bool | Group`, whether, or which part, to train on.

    Args:
        name: Its name within its plugin.
        reads_rewards: False for one that never looks at rewards.
    """
    return mark("filter", name, reads_rewards=reads_rewards)


def buffer(name: str, *, reads_rewards: bool = True, check: Check | None = None) -> Callable[[T], T]:
    """Mark a buffer policy: `(group, *, step, uses, …) -> priority | None`; None drops.

    Args:
        name: Its name within its plugin.
        reads_rewards: False for one that never looks at rewards.
        check: As for a shaping.
    """
    return mark("buffer", name, reads_rewards=reads_rewards, check=check)


def stop(name: str) -> Callable[[T], T]:
    """Mark a stop rule: `(*, available, target, …) -> bool`, may sampling for this step end."""
    return mark("stop", name)


def workflow(name: str, *, rewards: bool = False, one_answer: bool = False) -> Callable[[T], T]:
    """Mark a workflow: a class with `async run(self, task, chat) -> Rollout | Sequence[Rollout]`, or a function.

    Args:
        name: Its name within its plugin.
        rewards: It gives rewards itself (`chat.reward`): where a configuration names no reward, these count.
        one_answer: A rollout is the task's prompt and one answer, never longer than `sampling.max_tokens`; without it,
            a response may be as long as `model.max_length`.
    """
    return mark("workflow", name, rewards=rewards, one_answer=one_answer)


def environment(name: str, *, isolation: Isolation = "thread") -> Callable[[T], T]:
    """Mark an environment: a class with `reset(seed) -> Observation` and `step(text) -> Step`, sync or async.

    Args:
        name: Its name within its plugin.
        isolation: `thread`: calls of several instances run at once, in threads of one process. `lock`: one after the
            other, for what has state that instances share. `process`: each instance has a process of its own, which
            is killed when a call takes too long.
    """
    if isolation not in ISOLATIONS:
        raise PluginError(
            f"@rlsdk.environment({name!r}): isolation is one of {', '.join(ISOLATIONS)}; got {isolation!r}"
        )
    return mark("environment", name, isolation=isolation)


def tasks(name: str, *, costly: CostlyToRead | None = None) -> Callable[[T], T]:
    """Mark a task source: `(*, split, …) -> Sequence[Task]`, sized, indexable, deterministic by seed.

    Args:
        name: Its name within its plugin.
        costly: `(options) -> bool`: True if reading the source with these options downloads something, or takes long.
            `rlsdk explain` does not read such a source. It may raise `DataError`.
    """
    return mark("tasks", name, costly=costly)


def engine(name: str) -> Callable[[T], T]:
    """Mark an engine: generates tokens with logprobs and takes weights with a version."""
    return mark("engine", name)


def learner(name: str) -> Callable[[T], T]:
    """Mark a learner: logprobs, values, update, export of weights, save, load."""
    return mark("learner", name)


def tracker(name: str) -> Callable[[T], T]:
    """Mark a tracker: `open(run)`, `log(step, metrics)`, `close()`."""
    return mark("tracker", name)


def renderer(name: str) -> Callable[[T], T]:
    """Mark a renderer: turns conversations into a model's tokens, and its answers into messages.

    Args:
        name: Its name within its plugin.
    """
    return mark("renderer", name)


def tool_parser(name: str) -> Callable[[T], T]:
    """Mark a parser of tool calls: a class with `parse(text)`, `write(calls)`, `instructions` and `begins`.

    Args:
        name: Its name within its plugin.
    """
    return mark("tool_parser", name)


def diagnosis(name: str) -> Callable[[T], T]:
    """Mark a diagnosis: `(history: History, *, …) -> Finding | None`, what is wrong with a run by its metrics.

    It is called after each step while a run trains, and afterwards; history and finding are classes of
    `rlsdk.contracts`. It only looks: whatever it does, the run continues.

    Args:
        name: Its name within its plugin.
    """
    return mark("diagnosis", name)


def weight_transfer(name: str) -> Callable[[T], T]:
    """Mark a weight transfer: carries weights from the ranks of the learner to the engines.

    Args:
        name: Its name within its plugin.
    """
    return mark("weight_transfer", name)
