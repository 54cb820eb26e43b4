"""Properties of what surrounds the policy: environments, task sources, buffers, stop rules, weight transfers."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import pickle
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from rlsdk.contracts import DescribesTools, SendsFromEachRank, StreamsTensors, StreamsWeights, Weights, Workflow
from rlsdk.errors import described
from rlsdk.loops import LoopWatch
from rlsdk.nano import make_tokenizer
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.testing import samples
from rlsdk.testing.findings import Case, NotApplicable, Violated, shape, time_limit
from rlsdk.testing.scripted import run_workflow
from rlsdk.testing.subject import Subject, holds
from rlsdk.types import Group, Observation, Step, Task
from rlsdk.weights import checksums, joined

SECONDS = 10.0
EPISODE_SECONDS = 30.0
"""Time limit in seconds for an environment's constructor and an episode of a few steps."""
WORKFLOW_SECONDS = 10.0
"""Time limit in seconds for a workflow whose policy answers immediately."""
BLOCKED_SECONDS = 0.5
"""Time limit in seconds for each stretch of a workflow between two awaits."""
SEEDS = (0, 7)
ACTIONS = ("", "look", "<action>1</action>", "2")
_FAULT_OF_CODE = re.compile(
    r"\b(NameError|UnboundLocalError|ImportError|ModuleNotFoundError|ValueFault)\b"
    r"|AttributeError: '(?!NoneType|str|int|float|list|tuple|dict|mappingproxy)\w+' object"
)
"""Errors of a workflow that no other task would prevent, unlike those from reading a task's answer or metadata."""
LOOKED_AT = 16
"""Number of tasks of a source to examine, in addition to the last one."""
ENGINES = 2
HOST = "127.0.0.1"


def _play(subject: Subject, env: Any, seed: int, actions: tuple[str, ...]) -> list[Observation | Step]:
    """Play an episode, and return its observations and steps."""
    shown: list[Observation | Step] = [subject.call(env.reset, seed)]
    if not isinstance(shown[0], Observation):
        raise Violated("form", "an rlsdk.Observation from reset", shape(shown[0]))
    for action in actions:
        step = subject.call(env.step, action)
        if not isinstance(step, Step) or not isinstance(step.observation, Observation):
            raise Violated("form", "an rlsdk.Step with an rlsdk.Observation from step", shape(step))
        if not math.isfinite(step.reward):
            raise Violated("value", "a finite reward", f"{step.reward}")
        shown.append(step)
        if step.terminated or step.truncated:
            break
    return shown


def _seeds(_: Subject) -> list[Case[Any]]:
    return [Case(f"seed {seed}, actions {list(ACTIONS)}", seed) for seed in SEEDS]


@holds(
    "steps",
    "environment",
    inputs=_seeds,
    remedy="return rlsdk.Observation(text) from reset(seed), and rlsdk.Step(observation, reward, …) from step(text); "
    "limit each wait",
)
def steps(subject: Subject, seed: int) -> None:
    """`reset` returns an Observation, `step` a Step with a finite reward, in limited time."""
    with time_limit(EPISODE_SECONDS):
        _play(subject, subject.make(), seed, ACTIONS)


@holds(
    "deterministic",
    "environment",
    inputs=_seeds,
    remedy="draw all randomness from random.Random(seed), created in reset; keep state in the instance, not in the "
    "class or the module, and replace it in reset; use no clock, id(), or hash() of text",
    after=("steps",),
)
def same_world(subject: Subject, seed: int) -> None:
    """The same seed and actions give the same observations and rewards, in a new instance and after a reset."""
    with time_limit(EPISODE_SECONDS):
        env = subject.make()
        first = _play(subject, env, seed, ACTIONS)
        for what, again in (("after a second reset", env), ("in another instance", subject.make())):
            second = _play(subject, again, seed, ACTIONS)
            if first != second:
                here, got = next(pair for pair in itertools.zip_longest(first, second) if pair[0] != pair[1])
                raise Violated("value", f"{here} {what}", f"{got}")


@holds(
    "any-text",
    "environment",
    inputs=lambda _: [Case(title, action) for title, action in samples.HOSTILE],
    remedy="answer a meaningless action with an observation that says so; bound its length before parsing",
    after=("steps",),
)
def any_action(subject: Subject, action: str) -> None:
    """For any text of the policy, `step` returns a Step in limited time."""
    with time_limit(SECONDS):
        _play(subject, subject.make(), 0, (action,))


@holds(
    "sized-and-indexable",
    "tasks",
    remedy="return a sequence: len(tasks), tasks[i] from 0, IndexError after the end, unique ids",
)
def sized(subject: Subject, _: Any) -> None:
    """It is a sequence of tasks with unique ids."""
    found = subject.call(subject.make)
    found = subject.call(found) if callable(found) else found
    if not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
        raise Violated("form", "a sequence of tasks", shape(found))
    count: int = subject.call(len, found)
    if count < 1:
        raise Violated("form", "at least one task", "none")
    tasks = [subject.call(found.__getitem__, i) for i in _looked_at(count)]
    for i, task in zip(_looked_at(count), tasks, strict=True):
        if not isinstance(task, Task):
            raise Violated("form", f"an rlsdk.Task at {i}", shape(task))
        try:
            pickle.dumps(task)
        except Exception as error:
            expected = f"a task at {i} that can be sent to scoring processes"
            raise Violated("form", expected, f"answer or metadata that cannot be pickled: {error}") from error
    if len({task.id for task in tasks}) < len(tasks):
        raise Violated("value", "unique ids", f"{[task.id for task in tasks]}")
    try:
        subject.call(found.__getitem__, count)
    except Violated as error:
        if isinstance(error.__cause__, IndexError):
            return
        raise
    raise Violated("form", f"an IndexError at {count}, after the last of {count} tasks", "a task")


def _looked_at(count: int) -> list[int]:
    return sorted({*range(min(count, LOOKED_AT)), count - 1})


@holds(
    "deterministic",
    "tasks",
    remedy="create the task at an index only from seed and index",
    after=("sized-and-indexable",),
)
def same_tasks(subject: Subject, _: Any) -> None:
    """Created twice and read in any order, it gives the same tasks."""
    first, second = (_source(subject) for _ in range(2))
    index = _looked_at(len(first))
    if len(second) != len(first):
        raise Violated("value", f"{len(first)} tasks again", f"{len(second)}")
    ahead = [subject.call(first.__getitem__, i) for i in index]
    back = [subject.call(second.__getitem__, i) for i in index[::-1]][::-1]
    for i, here, got in zip(index, ahead, back, strict=True):
        if here != got:
            raise Violated("value", f"task {i}: {here}", f"{got}")


def _source(subject: Subject) -> Any:
    found = subject.call(subject.make)
    return subject.call(found) if callable(found) else found


@holds(
    "gives-a-priority",
    "buffer",
    inputs=lambda _: [*samples.ordinary_groups(), *samples.degenerate_groups()],
    remedy="return a finite number, greater for groups to train on first, or None to drop the group",
)
def gives_a_priority(subject: Subject, held: Any) -> None:
    """It returns a finite priority or None for each group."""
    answer = subject.call(subject.make(), held)
    number = isinstance(answer, int | float | np.number) and not isinstance(answer, bool) and math.isfinite(answer)
    if answer is not None and not number:
        raise Violated("form", "a finite number or None", shape(answer))


@holds("answers-yes-or-no", "stop", remedy="return True or False")
def answers_yes_or_no(subject: Subject, _: Any) -> None:
    """It returns whether the sampling for a step may end."""
    answer = subject.call(subject.make())
    if not isinstance(answer, bool | np.bool_):
        raise Violated("form", "True or False", shape(answer))


@holds(
    "more-is-enough",
    "stop",
    remedy="a whole batch must be enough, and so must more groups whenever fewer are: compare available with target",
    after=("answers-yes-or-no",),
)
def more_is_enough(subject: Subject, _: Any) -> None:
    """A whole batch is enough, and if some number of groups is enough, so are more."""
    target = 8
    made = subject.make()
    answers = [subject.call(lambda n=n: made(available=n, target=target)) for n in range(1, target + 1)]
    least = answers.index(True) if True in answers else target - 1
    wanted = [i >= least for i in range(target)]
    if answers != wanted:
        raise Violated("value", f"{wanted} for 1 to {target} groups of {target}", f"{answers}")


@holds(
    "ends",
    "workflow",
    remedy="limit its turns by an option, stop when chat.room() is 0, and limit each wait: "
    "async with asyncio.timeout(seconds); call blocking code with await asyncio.to_thread(function, …)",
)
def ends(subject: Subject, _: Any) -> None:
    """It ends in limited time if the policy answers immediately."""
    _run(subject)


@holds(
    "gives-rollouts",
    "workflow",
    remedy="await chat.sample() and every other async call, and return chat.finish()",
    after=("ends",),
)
def gives_rollouts(subject: Subject, _: Any) -> None:
    """It awaits async calls, and returns the policy's samples as a Rollout or a list of Rollouts."""
    groups, forgotten = _run(subject)
    if forgotten:
        raise Violated("form", "an await before each async call", forgotten[0])
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    reasons = [score.reason for group in groups for score in group.scores if not score.valid]
    for reason in reasons:
        if "failed: it returned " in reason or subject.tasks or _FAULT_OF_CODE.search(reason):
            raise Violated("form", "a Rollout of each task", reason)
    if reasons:
        example = """--task '{prompt: "1 + 1?", answer: 2}'"""
        raise NotApplicable(f"{reasons[0]}; give a task that it can run, as in {example}")
    if not any(rollout.loss_mask.any() for rollout in rollouts):
        raise Violated("form", "a Rollout with the policy's samples", "one without a sampled token")


@holds(
    "leaves-its-loop-free",
    "workflow",
    remedy="all conversations share its event loop: call code that blocks, such as time.sleep or requests, with "
    "await asyncio.to_thread(function, …), or use an async client, such as asyncio.sleep or httpx.AsyncClient",
    after=("ends",),
)
def leaves_its_loop_free(subject: Subject, _: Any) -> None:
    """It does not block its event loop, so that other conversations continue meanwhile."""
    made = subject.make()
    run = made.run if isinstance(made, Workflow) else made
    longest: list[tuple[float, str]] = []

    async def watched(task: Task, chat: Any) -> Any:
        watch = LoopWatch(asyncio.get_running_loop(), threading.current_thread(), "the workflow", WORKFLOW_SECONDS)
        began = time.monotonic()
        try:
            return await run(task, chat)
        finally:
            if time.monotonic() - began >= BLOCKED_SECONDS:  # a shorter run cannot have blocked it for so long
                await asyncio.sleep(BLOCKED_SECONDS / 2)  # for the watch to see that the loop runs again
            watch.close()
            longest.append(watch.longest)

    for _attempt in range(2):  # the first one may import modules, or get no processor on a busy machine
        _run(subject, watched)
        if longest[-1][0] < BLOCKED_SECONDS:
            return
    seconds, code = min(longest)
    raise Violated("late", f"an await at least every {BLOCKED_SECONDS:g} s", f"{seconds:.1f} s without one, in {code}")


@holds(
    "describes-its-tools",
    "workflow",
    remedy="write what a tool does as its docstring's first paragraph, and a line `NAME: …` for each parameter under "
    "`Args:`; the policy sees nothing else of it",
)
def describes_its_tools(subject: Subject, _: Any) -> None:
    """Each function and method that its options name as a tool has a description, and so has each parameter."""
    workflow: Any = subject.make()
    if not isinstance(workflow, DescribesTools):
        return
    for schema in workflow.tool_schemas:
        tool = schema["function"]
        bare = [name for name, each in tool["parameters"]["properties"].items() if not each.get("description")]
        if not tool["description"]:
            raise Violated("form", f"a docstring of {tool['name']}", "none")
        if bare:
            raise Violated("form", f"{tool['name']}: a description of each parameter", f"none of {', '.join(bare)}")


def _run(subject: Subject, workflow: Any = None) -> tuple[list[Group], list[str]]:
    """Run the workflow on a task against a policy that answers immediately; also return forgotten awaits."""
    workflow = workflow or subject.make()
    task = next(iter(subject.tasks), Task("sample", "1+2=", answer="3"))
    try:
        codec = ChatTokenizer(make_tokenizer(100))
    except ImportError as error:
        raise NotApplicable("a scripted policy needs transformers: pip install 'rlsdk[train]'") from error
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            with time_limit(WORKFLOW_SECONDS):
                groups = run_workflow(workflow, [task], codec, lambda _: "3")
        except Violated:
            raise
        except Exception as error:
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            cause = " ".join(described(error).split())
            raise NotApplicable(f"it does not run on the suite's task: {cause}") from error
        gc.collect()  # a coroutine that was never awaited warns when it is deleted
    texts = [str(each.message) for each in heard]
    return groups, [each for each in texts if "was never awaited" in each]


def _models(_: Subject) -> Iterator[Case[Sequence[Weights]]]:
    """Yield weights in parts, as learners send them, each with a title."""
    random = np.random.default_rng(0)

    def part(**tensors: np.ndarray) -> Weights:
        # Dtypes that numpy lacks are sent as integers with the same bits.
        names = {"uint16": "bfloat16"}
        return Weights(3, tensors, {name: names.get(a.dtype.name, a.dtype.name) for name, a in tensors.items()})

    def layer(index: int, dtype: str) -> Weights:
        bits = random.integers(0, 2**16, (257, 33)).astype(dtype)
        return part(**{f"layers.{index}.weight": bits, f"layers.{index}.bias": bits[0].copy()})

    tied = random.random((100, 7), np.float32)
    yield Case("one tensor", [part(weight=tied)])
    yield Case("16-bit layers", [layer(i, "uint16") for i in range(5)])
    yield Case("tied tensors, a number, and none at all", [part(a=tied, b=tied), part(c=np.array(1.5)), part()])
    yield Case("not contiguous", [part(a=tied.T, b=tied[::2])])


def _carried(subject: Subject, parts: Sequence[Weights]) -> list[Weights | None]:
    """Return the weights that engines receive in successive transfers, in threads of this process."""
    makes: Callable[[], Any] = subject.make
    sender, receivers = makes(), [makes() for _ in range(ENGINES)]
    if isinstance(sender, StreamsTensors) and sender.device == "cuda":
        raise NotApplicable(f"needs {ENGINES + 1} GPUs")  # the members are threads here, and would share one
    found: list[Weights | None] = []
    for _ in range(2):  # an instance performs many transfers
        offer = subject.call(sender.offer, iter(parts), ENGINES, HOST)
        if isinstance(sender, SendsFromEachRank):  # here, there is one rank
            offer = [offer]
        if not isinstance(sender, StreamsWeights):
            found.append(offer)
            continue
        with ThreadPoolExecutor(ENGINES + 1) as pool:

            def received(receiver: Any, seat: int, offer: Any = offer) -> Any:
                return subject.call(lambda: joined(receiver.receive(offer, seat), copy=True))

            sent = pool.submit(subject.call, sender.send, iter(parts))
            gets = [pool.submit(received, receiver, seat) for seat, receiver in enumerate(receivers, 1)]
            found += [get.result() for get in gets]
            sent.result()
    return found


@holds(
    "carries-all-bits",
    "weight_transfer",
    inputs=_models,
    remedy="send each tensor's exact bytes, with its shape, its dtype from `Weights.dtypes`, and the version",
)
def carries_all_bits(subject: Subject, parts: Any) -> None:
    """In every transfer, every engine gets all tensors of the learner with the same bits, names, shapes and dtypes."""
    sent = joined(parts)
    assert sent is not None
    for found in _carried(subject, parts):
        if not isinstance(found, Weights):
            raise Violated("form", "Weights, from offer() or receive()", f"{type(found).__name__} {found!r}"[:200])
        if found.version != sent.version or dict(found.dtypes) != dict(sent.dtypes):
            raise Violated("form", f"version {sent.version}, {sent.dtypes}", f"{found.version}, {found.dtypes}")
        shapes = {name: array.shape for name, array in found.tensors.items()}
        if shapes != {name: array.shape for name, array in sent.tensors.items()}:
            raise Violated("form", "the same names and shapes", repr(shapes)[:200])
        if checksums(found) != checksums(sent):
            raise Violated("value", repr(checksums(sent))[:200], repr(checksums(found))[:200])
