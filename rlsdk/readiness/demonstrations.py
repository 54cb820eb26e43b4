"""Check demonstrations before anything starts, by reading them as a run does."""

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
    """Read the demonstrations of some tasks; do nothing if the algorithm only samples.

    A user's workflow may do anything, and is left to the run.

    Args:
        plan: The plan.
        tasks: Tasks to train on.
        codec: Tokenizer of its model.

    Raises:
        RlsdkError: A task has no demonstration, an unusable one, or no label although the loss reads it.
    """
    kind = plan.algorithm.rollouts
    if kind == "sampled":
        return
    # Mixed with samples, demonstrations come from one workflow; alone, from the plan's, such as the one for pairs.
    mixed = kind == "mixed"
    if "preferred" in plan.needs and "pairs" not in plan.needs and (mixed or not plan.rewards):
        for task in tasks:
            label_of(task)
    workflow = load("workflow", defaults.DEMONSTRATION.name) if mixed else plan.plugins.resolve(plan.workflow)
    if runs_user_code(workflow):
        return
    context = RolloutContext(codec=codec, client=None, sampling=Sampling(), max_length=plan.config.model.max_length)
    with ThreadPoolExecutor(1) as pool:  # in a notebook, an event loop is already running in this thread
        pool.submit(run_to_end, _take(RolloutGenerator(workflow, None, None), tasks, context)).result()


async def _take(generator: RolloutGenerator, tasks: Sequence[Task], context: RolloutContext) -> None:
    for task in tasks:
        try:
            await generator.group(task, context, 1, "check")
        except ExceptionGroup as error:
            raise first_error(error) from None
