"""Demonstrations of tasks, taken before anything starts as a run takes them: a task without one is found at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rlsdk.config import Plan, defaults
from rlsdk.contracts import Sampling, runs_user_code
from rlsdk.contracts.tasks import label_of
from rlsdk.isolation.threads import run_to_end
from rlsdk.plugins import load
from rlsdk.rollout.chat import RolloutContext
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.rollout.generator import RolloutGenerator, first_error
from rlsdk.types import Task


def check_demonstrations(plan: Plan, tasks: Sequence[Task], codec: ChatTokenizer) -> None:
    """Take the demonstrations of some tasks; nothing happens where an algorithm only samples.

    A workflow that is not rlsdk's own may do anything, and is left to the run.

    Args:
        plan: The plan.
        tasks: Tasks to train on.
        codec: Tokenizer of its model.

    Raises:
        RlsdkError: The first task that has none, or an unusable one, or no label where a loss reads one.
    """
    kind = plan.algorithm.rollouts
    if kind == "sampled":
        return
    # Beside samples, demonstrations come from one workflow; without any, from that of the plan, such as one of pairs.
    mixed = kind == "mixed"
    if "preferred" in plan.needs and "pairs" not in plan.needs and (mixed or not plan.rewards):
        for task in tasks:
            label_of(task)
    workflow = load("workflow", defaults.DEMONSTRATION.name) if mixed else plan.plugins.resolve(plan.workflow)
    if runs_user_code(workflow):
        return
    context = RolloutContext(codec=codec, client=None, sampling=Sampling(), max_length=plan.config.model.max_length)
    with ThreadPoolExecutor(1) as pool:  # in a notebook, an event loop runs in this thread already
        pool.submit(run_to_end, _take(RolloutGenerator(workflow, None, None), tasks, context)).result()


async def _take(generator: RolloutGenerator, tasks: Sequence[Task], context: RolloutContext) -> None:
    for task in tasks:
        try:
            await generator.group(task, context, 1, "check")
        except ExceptionGroup as error:
            raise first_error(error) from None
