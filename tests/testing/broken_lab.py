"""A plugin whose components each violate the one requirement of their kind that they are named for."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Mapping
from typing import Any

import attrs
import torch

import rlsdk
from rlsdk.batch import Groups, row_sums
from rlsdk.components import Use
from rlsdk.contracts import Call, Finding, Malformed, Weights
from rlsdk.kit import TextRenderer
from rlsdk.weights import joined

# --- every kind


def _made():
    @rlsdk.reward("picklable-by-reference")
    def inner(rollout) -> float:
        """Marked within a function, where no name leads to it."""
        return 0.0

    return inner


closure = _made()


@rlsdk.reward("options-documented")
def options_documented(rollout, *, scale: float = 1.0) -> float:
    """One option of it is explained nowhere."""
    return scale


@rlsdk.reward("defaults-valid")
def defaults_valid(rollout, *, scale: float = "1") -> float:
    """A default that is text.

    Args:
        scale: A number, by its annotation.
    """
    return float(scale)


@rlsdk.reward("options-typed")
def options_typed(rollout, *, scale=1.0) -> float:
    """An option without a type.

    Args:
        scale: A number, one hopes.
    """
    return float(scale)


@rlsdk.tracker("contract")
class Contract:
    """It cannot be closed."""

    def open(self, run):
        """Nothing to open."""

    def log(self, step, metrics):
        """Nothing to log."""


# --- batches


@rlsdk.advantage("needs-declared")
def needs_declared(x):
    """Reads the entropy."""
    return x.rewards + x.sequence_sum(x.entropy)


@rlsdk.field("first_tokens")
def first_tokens(batch):
    """One number per rollout."""
    return batch.arrays.starts


@rlsdk.advantage("fields-produced", needs=(first_tokens,))
def fields_produced(x):
    """Reads a field whose function counts rollouts."""
    return x.rewards


@rlsdk.advantage("shapes")
def shapes(x):
    """A mean."""
    return x.rewards.mean()


@rlsdk.policy_loss("shapes")
def mean_loss(x):
    """A mean."""
    return (-x.advantages * x.logprobs).mean()


@rlsdk.shaping("shapes")
def credit_in_place_of_rewards(x):
    """Returns a value that only an advantage may return."""
    return rlsdk.Credit(x.loss_mask.float(), x.loss_mask.float())


@rlsdk.advantage("deterministic")
def deterministic(x):
    """Some noise."""
    return x.rewards + torch.rand_like(x.rewards)


@rlsdk.advantage("finite-on-singletons")
def finite_on_singletons(x):
    """Divides by the number of the others."""
    return x.rewards / (x.group_size() - 1)


@rlsdk.advantage("finite-on-equal-rewards")
def finite_on_equal_rewards(x):
    """Divides by the spread."""
    groups = Groups(x.groups)
    spread = torch.where(x.group_size() > 1, groups.max(x.rewards) - groups.min(x.rewards), 1)
    return x.rewards / spread


@rlsdk.advantage("finite-when-all-invalid")
def finite_when_all_invalid(x):
    """Divides by the number of tokens."""
    return x.rewards / x.sampled_tokens()


@rlsdk.policy_loss("finite-when-all-invalid")
def least_trained(x):
    """The least of nothing raises."""
    return -x.advantages * x.logprobs + 0 * x.old_logprobs[x.loss_mask].abs().min()


@rlsdk.advantage("finite-on-extremes")
def finite_on_extremes(x):
    """Overflows."""
    return x.rewards.exp()


@rlsdk.policy_loss("finite-on-extremes")
def overflowing_ratio(x):
    """The ratio of whole rollouts, without a bound."""
    return -x.advantages * x.sequence_sum(x.logprobs - x.old_logprobs).exp()


@rlsdk.advantage("permutation")
def permutation(x):
    """Later rollouts get more."""
    return x.rewards + torch.arange(len(x.rewards))


@rlsdk.policy_loss("permutation", whole_batch=True)
def later_tokens(x):
    """Later tokens of the optimiser batch count more."""
    return -x.advantages * x.logprobs * (1 + x.offset + torch.arange(len(x.logprobs)))


@rlsdk.advantage("packing")
def packing(x):
    """A mean over a plane, padding included."""
    plane = x.to_padded(x.loss_mask.float())
    return x.rewards + plane.sum(1) / max(plane.shape[1], 1)


@rlsdk.advantage("gaps", needs=("values",))
def gaps(x):
    """Sums over tool results, too."""
    return x.rewards + row_sums(x.values, x.lengths)


@rlsdk.policy_loss("gaps")
def unmasked_mean(x):
    """The rollout's mean over tokens that are not trained on as well."""
    lengths = torch.bincount(x.segments, minlength=x.rollouts)
    mean = row_sums(x.old_logprobs, lengths) / lengths.clamp(min=1)
    return -x.advantages * x.logprobs * mean[x.segments]


@rlsdk.advantage("bf16-and-fp32")
def precision(x):
    """Makes a float32 tensor and copies into it."""
    return torch.zeros(len(x.rewards)).index_copy(0, torch.arange(len(x.rewards)), x.rewards)


@rlsdk.shaping("inputs-unchanged")
def inputs_unchanged(x):
    """Changes inputs that others read."""
    return x.rewards.mul_(2)


@rlsdk.shaping("memory")
class Memory:
    """Counts without reporting it."""

    def __init__(self):
        self.count = 0

    def __call__(self, x):
        """More each time."""
        self.count += 1
        return x.rewards + self.count


@rlsdk.advantage("memory")
class Forgetful:
    """Has a state that it does not take up."""

    def __init__(self):
        self.count = 0

    def __call__(self, x):
        """More each time."""
        self.count += 1
        return x.rewards + self.count

    def state(self):
        """The count."""
        return {"count": self.count}

    def restore(self, state):
        """Nothing."""


# --- losses


@rlsdk.policy_loss("memory-by-step")
class OfTheLastMicroBatch:
    """Remembers the sum of the last micro-batch's advantages."""

    def __init__(self):
        self.total = 0.0

    def __call__(self, x):
        """Plain policy gradient."""
        self.total = float(torch.where(x.loss_mask, x.advantages, 0).sum())
        return -x.advantages * x.logprobs

    def state(self):
        """The sum."""
        return {"total": self.total}

    def restore(self, state):
        """Take it up."""
        self.total = state["total"]


@rlsdk.policy_loss("micro-batches")
def micro_batches(x):
    """Advantages over the mean of the micro-batch."""
    mean = torch.where(x.loss_mask, x.advantages, 0).sum() / x.loss_mask.sum().clamp(min=1)
    return -(x.advantages - mean) * x.logprobs


@rlsdk.policy_loss("gradient-only-through-logprobs")
def gradient_only_through_logprobs(x):
    """Nothing to learn from."""
    return -x.advantages * x.logprobs.detach()


@rlsdk.kl("gradient-only-through-logprobs")
def another_leaf(logprobs, ref_logprobs):
    """With a parameter of its own."""
    return (logprobs - ref_logprobs) * torch.ones(1, requires_grad=True)


@rlsdk.correction("detached")
def detached(x):
    """With a gradient."""
    return x.logprobs.exp()


@rlsdk.policy_loss("metrics")
def metrics(x):
    """A metric with a gradient."""
    return -x.advantages * x.logprobs, {"mean": x.logprobs.mean()}


@rlsdk.kl("zero-where-equal")
def zero_where_equal(logprobs, ref_logprobs):
    """One too much."""
    return (logprobs - ref_logprobs).abs() + 1


@rlsdk.kl("positive-on-average")
def positive_on_average(logprobs, ref_logprobs):
    """The KL with its sign turned round."""
    return ref_logprobs - logprobs


@rlsdk.policy_loss("follows-the-advantage")
def follows_the_advantage(x):
    """A reward to be maximised, where a loss is minimised."""
    return x.advantages * x.logprobs


# --- rewards and filters


@rlsdk.reward("scores")
def scores(rollout):
    """Words."""
    return "good"


@rlsdk.reward("deterministic")
def noisy_reward(rollout):
    """A coin."""
    return random.random()


@rlsdk.reward("any-text")
def any_text(rollout):
    """Divides by the length."""
    return 1 / len(rollout.text)


@rlsdk.reward("batch-order", batch=True)
def batch_order(rollouts):
    """Sorted."""
    return sorted(float(len(rollout.text)) for rollout in rollouts)


@rlsdk.reward("batch-splits", batch=True)
def batch_splits(rollouts):
    """From 0 for the longest answer to 1 for the shortest."""
    order = sorted(range(len(rollouts)), key=lambda i: -len(rollouts[i].text))
    return [order.index(i) / max(len(rollouts) - 1, 1) for i in range(len(rollouts))]


@rlsdk.filter("keeps-a-part")
def keeps_a_part(group):
    """A number."""
    return len(group)


@rlsdk.filter("degenerate-groups")
def degenerate_groups(group):
    """Takes the spread of one."""
    return statistics.stdev(score.value for score in group.scores) > 0


_calls = itertools.count()


@rlsdk.filter("deterministic")
def every_other(group):
    """Keeps every other group."""
    return next(_calls) % 2 == 0


@rlsdk.filter("permutation")
def first_one(group):
    """Keeps the first rollout."""
    return rlsdk.Group(group.task, group.rollouts[:1], group.scores[:1])


# --- worlds


class _World:
    def reset(self, seed):
        """An empty room."""
        return rlsdk.Observation("a room")

    def step(self, text):
        """The same room."""
        return rlsdk.Step(rlsdk.Observation("a room"))


@rlsdk.environment("steps")
class Steps(_World):
    """Shows plain text."""

    def reset(self, seed):
        """Text."""
        return "a room"


@rlsdk.environment("deterministic")
class Shaken(_World):
    """Never the same."""

    def step(self, text):
        """Some reward."""
        return rlsdk.Step(rlsdk.Observation("a room"), reward=random.random())


@rlsdk.environment("any-text")
class Short(_World):
    """Cannot read much."""

    def step(self, text):
        """Raises."""
        if len(text) > 1000:
            raise ValueError("too long")
        return super().step(text)


@rlsdk.tasks("sized-and-indexable")
def sized_and_indexable():
    """Two tasks of one id."""
    return [rlsdk.Task("same", "1?"), rlsdk.Task("same", "2?")]


@rlsdk.tasks("deterministic")
def other_tasks(*, split: str):
    """Other tasks each time.

    Args:
        split: Of no meaning.
    """
    return [rlsdk.Task(f"{i}", f"{random.random()}?") for i in range(3)]


@rlsdk.sampler("draws-what-is-available")
class DrawsWhatIsAvailable:
    """The first task, always."""

    def draw(self, available, random):
        """Words."""
        return 0

    def note(self, index, group):
        """Words."""


@rlsdk.sampler("resumes-its-draws")
class ResumesItsDraws:
    """Never the task noted last, which a checkpoint does not keep."""

    def __init__(self):
        self.last = -1

    def draw(self, available, random):
        """Words."""
        others = [index for index in available if index != self.last]
        return int(random.choice(others or available))

    def note(self, index, group):
        """Words."""
        self.last = index


@rlsdk.buffer("gives-a-priority")
def gives_a_priority(group, *, step, uses):
    """Words."""
    return "high"


@rlsdk.stop("answers-yes-or-no")
def answers_yes_or_no(*, available, target):
    """A number."""
    return available - target


@rlsdk.stop("more-is-enough")
def more_is_enough(*, available, target):
    """Even numbers only, but one."""
    return available % 2 == 0 and available != 6


# --- algorithms


@rlsdk.algorithm("parts-resolve")
@attrs.frozen(kw_only=True)
class PartsResolve(rlsdk.Algorithm):
    """Names an advantage that is not there."""

    advantage: Use = Use("grop")


@rlsdk.algorithm("defaults-fit")
@attrs.frozen(kw_only=True)
class DefaultsFit(rlsdk.Algorithm):
    """Sets a key that no run has."""

    defaults: Mapping[str, Any] = {"rollout.dynamic_samplin": True}


@rlsdk.algorithm("parts-merge")
@attrs.frozen(kw_only=True)
class PartsMerge(rlsdk.Algorithm):
    """Overrides the config's value with its own."""

    def __attrs_post_init__(self):
        object.__setattr__(self, "advantage", Use("grpo"))


@rlsdk.workflow("ends")
async def ends(task, chat):
    """Waits forever."""
    await asyncio.Event().wait()


@rlsdk.workflow("gives-rollouts")
async def gives_rollouts(task, chat):
    """Forgets its sampled tokens."""
    await chat.sample()


@rlsdk.workflow("leaves-its-loop-free")
async def leaves_its_loop_free(task, chat):
    """Waits in a way that stops all conversations."""
    await chat.sample()
    time.sleep(0.8)  # noqa: ASYNC251
    return chat.finish()


@rlsdk.workflow("describes-its-tools")
class DescribesItsTools:
    """Offers a tool that the policy cannot know how to use."""

    tool_schemas = ({"function": {"name": "add", "description": "", "parameters": {"properties": {}}}},)

    async def run(self, task, chat):
        """Sample once."""
        await chat.sample()
        return chat.finish()


# --- renderers and parsers of tool calls


class Lines(TextRenderer):
    """ChatML, written by hand."""

    def render_text(self, messages, tools, *, add_generation_prompt, continue_final_message):
        """Write the turns."""
        text = "".join(f"<|im_start|>{m['role']}\n{self.content(m)}<|im_end|>\n" for m in messages)
        if continue_final_message:
            return text.removesuffix("<|im_end|>\n")
        return text + "<|im_start|>assistant\n" * add_generation_prompt

    def content(self, message):
        """Return the content as it is."""
        return message["content"]


@rlsdk.renderer("opens-an-answer")
class ForgetsTheHeader(Lines):
    """Its prompts end with the question."""

    def prompt_tokens(self, messages, tools=()):
        """Leave the header out."""
        return self.codec.encode(self.render_closed(messages, tools))


@rlsdk.renderer("leaves-a-prefill-open")
class ClosesPrefills(Lines):
    """It closes the turn that the policy should continue."""

    def prompt_tokens(self, messages, tools=()):
        """Open an answer after each message."""
        return self.codec.encode(self._render(messages, tools, add_generation_prompt=True))


@rlsdk.renderer("bridges-once")
class ClosesTwice(Lines):
    """It closes an answer again that ended by itself."""

    def bridge_tokens(self, messages, new, *, ended, tools=()):
        """Forget how the answer ended."""
        return super().bridge_tokens(messages, new, ended=ended[:0], tools=tools)


@rlsdk.renderer("data-stays-data")
class TrustsMessages(Lines):
    """It joins a truncated answer."""

    def content(self, message):
        """Drop every character that is none."""
        return message["content"].replace("\ufdd0", "")


@rlsdk.renderer("reads-answers")
class Shouts(Lines):
    """It reads capitals."""

    def parse(self, token_ids, **how):
        """Raise the voice."""
        parsed = super().parse(token_ids, **how)
        return attrs.evolve(parsed, content=parsed.content.upper())


class Objects:
    """Calls as a line of JSON each."""

    instructions = "Answer with JSON."
    begins = ()

    def parse(self, text):
        """Read the lines that are objects."""
        return [self.call(line) for line in text.splitlines() if line.startswith('{"name"')]

    def call(self, line):
        """Read one line."""
        try:
            read = json.loads(line)
            return Call(read["name"], read["arguments"])
        except (ValueError, KeyError, RecursionError) as error:
            return Malformed(str(error))

    def write(self, calls):
        """Write lines."""
        return "\n".join(json.dumps({"name": name, "arguments": dict(given)}) for name, given in calls)


@rlsdk.tool_parser("reads-what-it-writes")
class FirstAlone(Objects):
    """It reads one call."""

    def parse(self, text):
        """Drop the others."""
        return super().parse(text)[:1]


@rlsdk.tool_parser("never-raises")
class Trusts(Objects):
    """It takes every line for a call."""

    def call(self, line):
        """Read without care."""
        read = json.loads(line)
        return Call(read["name"], read["arguments"])


@rlsdk.tool_parser("prose-is-no-call")
class Demands(Objects):
    """It takes a final answer for an attempt."""

    def parse(self, text):
        """Complain."""
        return super().parse(text) or [Malformed("no call")]


# --- weight transfers


@rlsdk.weight_transfer("carries-all-bits")
class Halved:
    """Sends half of the bits of each tensor."""

    def offer(self, parts, engines, host):
        """Return the remaining text."""
        found = joined(parts)
        halved = {name: array.astype("float16").astype(array.dtype) for name, array in found.tensors.items()}
        return Weights(found.version, halved, found.dtypes)


# --- diagnoses


@rlsdk.diagnosis("finds-or-is-silent")
def finds_or_is_silent(history):
    """Says something, in a text."""
    return "the reward is low" if history["reward/mean"].last(1).mean < 0 else None


@rlsdk.diagnosis("reads-known-metrics", metrics=("lab/speed",))
def reads_known_metrics(history):
    """Reads a metric of its own, and then a misspelt one."""
    speed = history["lab/speed"]
    return Finding("fast", "nothing") if len(speed) and history["actor/grad_nrom"].mean > 1 else None


@rlsdk.diagnosis("silent-at-first")
def silent_at_first(history):
    """Judges a run by its first step."""
    return Finding("it has no metrics", "wait") if not len(history["reward/mean"]) else None


_SEEN = []


@rlsdk.diagnosis("same-history-same-finding")
def same_history_same_finding(history):
    """Counts its calls."""
    _SEEN.append(history.step)
    return Finding(f"looked at {len(_SEEN)} histories", "nothing") if history.step > 1 else None


# --- optimisers


class Descent(torch.optim.Optimizer):
    """Gradient descent with weight decay, by directions that a subclass chooses."""

    def __init__(self, groups):
        super().__init__(groups, {})

    def direction(self, parameter):
        """Return the gradient."""
        return parameter.grad

    def rate(self, group):
        """Return the learning rate of a group."""
        return group["lr"]

    @torch.no_grad()
    def step(self, closure=None):
        """Take a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - self.rate(group) * group["weight_decay"])
                    parameter.sub_(self.rate(group) * self.direction(parameter))


@rlsdk.lr_schedule("shares-of-the-peak")
def shares_of_the_peak(step, steps):
    """Linear, and below zero after the end."""
    return 1 - step / max(steps, 1)


@rlsdk.lr_schedule("same-step-same-rate")
class SameStepSameRate:
    """Counts its calls in place of the steps."""

    def __init__(self):
        self.calls = 0

    def __call__(self, step, steps):
        """The inverse of the number of calls."""
        self.calls += 1
        return 1 / self.calls


@rlsdk.optimizer("creates-an-optimizer")
def creates_an_optimizer(groups):
    """Returns a function."""
    return lambda: groups


@rlsdk.optimizer("descends")
def descends(groups):
    """Climbs."""
    return torch.optim.SGD(groups, maximize=True)


@rlsdk.optimizer("obeys-its-groups")
class Stubborn(Descent):
    """Keeps the first learning rate."""

    def rate(self, group):
        """Return what it was at first."""
        return group.setdefault("initial_lr", group["lr"])


@rlsdk.optimizer("skips-missing-gradients")
class Decays(Descent):
    """Decays all weights."""

    @torch.no_grad()
    def step(self, closure=None):
        """Take a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
        super().step()


@rlsdk.optimizer("finite-on-zero-gradients")
class Divides(Descent):
    """Divides by the size of each number."""

    def direction(self, parameter):
        """Return the sign."""
        return parameter.grad / parameter.grad.abs()


@rlsdk.optimizer("resumes")
class Forgets(Descent):
    """Keeps its momentum outside of its state."""

    def direction(self, parameter):
        """Return the gradient, and half of the last direction."""
        if not hasattr(self, "last"):
            self.last = {}
        self.last[parameter] = parameter.grad + 0.5 * self.last.get(parameter, 0.0)
        return self.last[parameter]


@rlsdk.optimizer("element-wise")
class Normed(Descent):
    """Divides by the norm of each tensor."""

    def direction(self, parameter):
        """Return a direction of length one."""
        return parameter.grad / (parameter.grad.norm() + 1e-8)
