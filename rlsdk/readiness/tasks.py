"""Checks of a plan's tasks, made before anything starts: prompts, demonstrations, sources, and the tokenizer."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlsdk.config import Plan, TaskSource, defaults
from rlsdk.config.rules import longest_prompt
from rlsdk.contracts import PlaysEpisodes, Sampling, runs_user_code
from rlsdk.contracts.tasks import label_of
from rlsdk.engines.pretrained import end_ids, open_tokenizer
from rlsdk.errors import (
    ConfigError,
    DataError,
    EngineError,
    OptionError,
    RefusedMessagesError,
    RlsdkError,
    UnreachableDataError,
    ValueFault,
    described,
    first_line,
)
from rlsdk.isolation.threads import run_to_end
from rlsdk.messages import parts_of
from rlsdk.plugins import load
from rlsdk.plurals import counted
from rlsdk.readiness.tool_objects import unstartable
from rlsdk.rollout.chat import RolloutContext
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.rollout.generator import RolloutGenerator, first_error
from rlsdk.rollout.stream import is_ordered, opened
from rlsdk.types import Message, Task

PROMPTS = 64
"""Number of prompts per source to render, spread over all its tasks."""
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""Names of the files of a tokenizer."""


@attrs.frozen
class PlanFinding:
    """A problem of a plan, and the path of the affected setting."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


@attrs.define
class PlanChecks:
    """Collects the findings of `examine`."""

    plan: Plan
    starts: bool
    faults: list[PlanFinding] = attrs.field(factory=list)
    warnings: list[PlanFinding] = attrs.field(factory=list)
    notes: list[PlanFinding] = attrs.field(factory=list)
    sources: set[str] = attrs.field(factory=set)
    """Sources of the tried tasks."""
    ends: tuple[int, ...] = ()
    """End-of-text tokens of the model."""
    vocabulary: int = sys.maxsize
    """Number of tokens that the model has embeddings for."""

    def fault(self, path: str, *messages: str) -> None:
        """Add faults of a setting."""
        self.faults += [PlanFinding(path, message) for message in messages]

    def warn(self, path: str, message: str) -> None:
        """Add a warning about a setting."""
        self.warnings.append(PlanFinding(path, message))

    def note(self, path: str, message: str) -> None:
        """Add a note on a setting."""
        self.notes.append(PlanFinding(path, message))

    @property
    def tokenizer(self) -> str:
        """Path of the setting that names the tokenizer."""
        return "model.tokenizer" if self.plan.model.tokenizer else "model.path"

    @property
    def of_model(self) -> bool:
        """True if anything is found wrong with the model or its tokenizer."""
        return any(each.path in ("model.path", "model.tokenizer") for each in (*self.warnings, *self.faults))

    def codec(self) -> ChatTokenizer | None:
        """Open the tokenizer and check that answers can end; None if it cannot be opened."""
        plan, model = self.plan, self.plan.model
        if self.of_model and not all(
            os.path.isdir(os.path.expanduser(each or ".")) for each in (model.path, model.tokenizer)
        ):
            return None  # the model is not on this machine, which is already reported
        name = model.tokenizer or model.path
        folder = Path(name).expanduser()
        # transformers would make an empty tokenizer of a folder with nothing but a config.json of some models.
        if folder.is_dir() and not any(file for each in _TOKENIZERS for file in folder.glob(each)):
            missing = f"the folder {name!r} has no tokenizer: save one there, or set model.tokenizer to another folder"
            self.warn(self.tokenizer, missing)
            return None
        try:
            tokenizer = open_tokenizer(model)
            self.ends = end_ids(model, tokenizer)
        except ValueFault as fault:
            self.fault("model.path", str(fault))
            return None
        except Exception as error:  # noqa: BLE001 - transformers raises anything for a file that it cannot use
            text = f"the tokenizer in {name!r} cannot be opened: {first_line(error)}"
            if "trust_remote_code" in str(error):
                text = (
                    f"{model.path!r} runs only with Python code that comes with it (auto_map in its config.json); read "
                    "that code, and set model.trust_remote_code=true if you trust it"
                )
            self.warn("model.path", text)
            return None
        if plan.needs_engine and not self.ends and not plan.config.sampling.stop:
            self.fault(
                "model.path",
                f"the model {model.path!r} has no end-of-text token: neither its tokenizer nor its config names an "
                "eos_token, so that every answer would have sampling.max_tokens tokens; set eos_token in "
                "tokenizer_config.json, or give sampling.stop",
            )
        return ChatTokenizer.of(plan, tokenizer)

    def unreachable_ends(self) -> None:
        """Report end-of-text tokens that the model has no embeddings for, and therefore never samples."""
        unreachable = [token for token in self.ends if not 0 <= token < self.vocabulary]
        if not unreachable or not self.plan.needs_engine:
            return
        text = (
            f"eos_token_id {', '.join(map(str, unreachable))} of the model {self.plan.model.path!r} (in config.json, "
            f"generation_config.json or its tokenizer) is outside of its vocabulary, 0 to {self.vocabulary - 1}"
        )
        if len(unreachable) < len(self.ends) or self.plan.config.sampling.stop:
            self.note("model.path", f"{text}: no answer ends there")
        else:
            remedy = "so that every answer would have sampling.max_tokens tokens; correct it, or give sampling.stop"
            self.fault("model.path", f"{text}, {remedy}")

    def source(self, path: str, source: TaskSource, codec: ChatTokenizer | None) -> Sequence[Task] | None:
        """Read the tasks of a source and check some prompts; None if the tasks were not read."""
        try:
            costly = self.plan.plugins.component(source.reference).costly
            if not self.starts and costly is not None and costly(source.reference.options):
                return None
            tasks = opened(source, self.plan.plugins)
            if wrong := no_tasks(tasks, empty=not path.startswith("tasks.train")):
                raise DataError(f"source {source.name!r} {wrong}")
            count = len(tasks)
            if codec is not None and source.weight > 0:
                every = max(1, count // PROMPTS)
                some = [tasks[i] for i in range(0, count, every)][:PROMPTS]
                self._prompts(path, some, count, codec)
                self._answers_as_prefills(path, source, some)
                self._unscored(path, some)
                self._unplayed(path, some)
                self.sources |= {task.source for task in some}
                if path.startswith("tasks.train"):
                    check_demonstrations(self.plan, some, codec)
            if path.startswith("tasks.train") and self.plan.sampler is not None and is_ordered(tasks):
                text = "training does not keep the order of these tasks, since rollout.sampler chooses the next one"
                self.note(path, text)
        except OptionError as error:
            self.faults += [PlanFinding(f"{path}.{below}", text) for below, text in error.faults]
        except ConfigError as error:
            self.fault(path, *error.faults)
        except EngineError as error:
            self.fault("workflow", f"{self.plan.workflow.name!r}: {error}")
        except UnreachableDataError as error:
            self.warn(path, str(error))
        except RlsdkError as error:
            self.fault(path, str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin's code
            self.fault(path, f"source {source.name!r} failed: {described(error)}")
        else:
            return tasks
        return None

    def _prompts(self, path: str, tasks: Sequence[Task], count: int, codec: ChatTokenizer) -> None:
        """Render prompts as a run does: each must contain its task's text, and some must be short enough."""
        config, prompts, trained = self.plan.config, [], path.startswith("tasks.train")
        workflow = self.plan.workflow if trained else self.plan.eval_workflow
        asks = self.plan.plugins.component(workflow).one_answer
        if not self._known_to(codec, path, tasks):
            return
        for task in tasks:
            try:
                ids = codec.prompt(task)[1]
            except RefusedMessagesError as error:
                self.fault(path, *(f"task {task.id!r}: {text}" for text in error.faults))
                return
            prompts.append(ids)
            if wrong := unreadable(task, codec, ids, asks=asks):
                self.fault(path, wrong)
                return
            if wrong := not_embedded(codec, ids, self.vocabulary):
                self.fault(self.tokenizer, f"the prompt of task {task.id!r} has {wrong}")
                return
        if any(not isinstance(task.prompt, str) for task in tasks):
            self._template_notes(codec, talks=not asks)
        lengths = [len(ids) for ids in prompts]
        # Evaluations drop no prompts.
        limit, setting = longest_prompt(config) if trained else (config.model.max_length - 1, "model.max_length")
        if not lengths or max(lengths) <= limit:
            return
        least = max(lengths) + (setting == "model.max_length")
        if min(lengths) > limit:
            seen = f"all {count}" if count == len(tasks) else f"all {len(tasks)} that were tried of {count}"
            text = f"no prompt of {path} fits in {limit} tokens: {seen} have from {min(lengths)} to {max(lengths)}"
            self.fault(setting, f"{text}; give at least {least}")
        elif not trained:
            text = f"{limit + 1} tokens leave no room for an answer: {path} has a prompt of {max(lengths)} tokens"
            self.fault(setting, f"{text}; give at least {least}, or leave such tasks out")
        elif config.long_prompts == "error":
            text = f"{limit}, but {path} has a prompt of {max(lengths)} tokens, and long_prompts=error"
            self.fault(setting, f"{text}; give at least {least}, or drop them")
        else:
            dropped = sum(length > limit for length in lengths)
            others = "; epochs count them, so the others are drawn again in their place" if config.epochs else ""
            text = f"{limit} tokens: of {counted(len(lengths), 'prompt')} of {path} that were tried, {dropped} would be"
            self.note(setting, f"{text} dropped as longer{others}")

    def _unscored(self, path: str, tasks: Sequence[Task]) -> None:
        """Report tasks whose source no part of the reward applies to; a multi-turn workflow may name another source."""
        plan, trained = self.plan, path.startswith("tasks.train")
        workflow = plan.plugins.component(plan.workflow if trained else plan.eval_workflow)
        rules = [part.rule for part in plan.rewards]
        if not rules or not workflow.one_answer or (trained and not plan.sampled):
            return
        task = next((task for task in tasks if not any(rule.applies(task) for rule in rules)), None)
        if task is not None:
            given = "; ".join(f"{rule.name}: {', '.join(rule.sources)}" for rule in rules)
            self.fault(
                "reward",
                f"no part applies to task {task.id!r} of {path}, whose source is {task.source!r}; `sources` has "
                f"{given}",
            )

    def _unplayed(self, path: str, tasks: Sequence[Task]) -> None:
        """Report the first task that lacks what the workflow's environment or tool classes start with."""
        plan, trained = self.plan, path.startswith("tasks.train")
        workflow = plan.plugins.resolve(plan.workflow if trained else plan.eval_workflow)
        if trained and not plan.sampled:
            return
        if fault := unstartable(workflow, tasks):
            self.fault(path, fault)
        if not isinstance(workflow, PlaysEpisodes):
            return
        for task in tasks:
            try:
                use, _ = workflow.episode(task)
            except DataError as error:
                self.fault(path, str(error))
                return
            try:
                plan.plugins.reference("environment", use.name, use.options)
            except RlsdkError as error:
                self.fault(path, f"the environment of task {task.id!r}: {error}")
                return

    def unmet_sources(self) -> None:
        """Report parts of the reward for sources that none of the tried tasks has."""
        rewards = self.plan.rewards
        for i, part in enumerate(rewards):
            if part.rule.sources and self.sources.isdisjoint(part.rule.sources):
                self.note(
                    f"reward[{i}].sources" if len(rewards) > 1 else "reward.sources",
                    f"{', '.join(part.rule.sources)}: none of the tried tasks has this source, so {part.rule.name} "
                    f"may score none; their sources are: {', '.join(sorted(self.sources))}",
                )

    def _answers_as_prefills(self, path: str, source: TaskSource, tasks: Sequence[Task]) -> None:
        """Note prompts that end with an answer although no prefill was requested, as in data for imitation."""
        last = [task.prompt[-1] for task in tasks if not isinstance(task.prompt, str) and task.prompt]
        if source.reference.options.get("prefill") or not any(message.role == "assistant" for message in last):
            return
        said = next(message.text for message in last if message.role == "assistant")
        self.note(
            path,
            f"prompts end with an assistant message, such as {said[-40:]!r}: the policy continues it, and rewards read "
            "both as one answer. If it is the answer to learn, leave it out of the prompt (the column `demonstration` "
            "may hold it)",
        )

    def _known_to(self, codec: ChatTokenizer, path: str, tasks: Sequence[Task]) -> bool:
        """Report prompts that are mostly unknown to the tokenizer: a fault if all are, and then return False."""
        tokenizer = codec.tokenizer
        unknown = tokenizer.unk_token_id
        if unknown in (None, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
            return True  # GPT-2's unknown token is its end-of-text token, which stands for no text
        lost = []
        for task in tasks:
            # Without the chat template, whose tokens are known.
            text = task.prompt if isinstance(task.prompt, str) else " ".join(each.text for each in task.prompt)
            ids = codec.encode(text)
            if len(ids) and (ids == unknown).mean() > 0.5:
                lost.append(f"task {task.id!r} becomes {codec.shown(ids)[:60]!r}")
        head = f"the tokenizer {codec.name!r} has no token for most of what"
        remedy = "train a model that was made for such text"
        if lost and len(lost) == len(tasks):
            self.fault(path, f"{head} the prompts say: {lost[0]}; {remedy}")
            return False
        if lost:
            tried = f"{len(lost)} of {counted(len(tasks), 'prompt')} that were tried"
            self.note(path, f"{head} {tried} say: {lost[0]}; leave such tasks out, or {remedy}")
        return True

    def _template_notes(self, codec: ChatTokenizer, *, talks: bool) -> None:
        """Note, once, what the chat template does that a user may not expect.

        Args:
            codec: Tokenizer with the template.
            talks: True if conversations may have several turns.
        """
        texts = []
        if header := codec.missing_header:
            texts.append(
                f"prompts end before {header!r}, which the chat template of {codec.name!r} writes before an answer: it "
                "ignores add_generation_prompt, so that the policy must write this text itself, and rewards read it. "
                "End the template with {% if add_generation_prompt %}…{% endif %}"
            )
        talk = (Message("user", "Q"), Message("assistant", "A"), Message("user", "Q"))
        with suppress(ConfigError):  # a run logs it for the conversation that has such a turn
            if talks and codec.bridge_tokens(talk, 1, plain=False) is None:
                texts.append(
                    "drops the thoughts of earlier answers: a conversation in which the user speaks again trains as "
                    "several rollouts of one trajectory, each after the prompt that is rendered for its turn "
                    "(model.keep_history: true keeps the tokens as sampled)"
                )
        for finding in (PlanFinding("model.renderer", text) for text in texts):
            if finding not in self.notes:
                self.notes.append(finding)


def no_tasks(tasks: Any, *, empty: bool) -> str:
    """Return why a value is not a list of tasks; empty if it is.

    Args:
        tasks: Return value of a source.
        empty: True if the list may be empty.
    """
    if not isinstance(tasks, Sized) or isinstance(tasks, Mapping):
        return f"returned {type(tasks).__name__}; expected a list of rlsdk.Task"
    if not len(tasks):
        return "" if empty else "holds no task"
    first: Any = tasks[0]  # type: ignore[index]
    return "" if isinstance(first, Task) else f"holds {type(first).__name__}; expected rlsdk.Task"


def unreadable(task: Task, codec: ChatTokenizer, ids: np.ndarray, *, asks: bool) -> str:
    """Return why a policy cannot read a task's prompt; empty if it can.

    Args:
        task: The task.
        codec: Tokenizer that renders it.
        ids: Tokens of the rendered prompt.
        asks: True if the workflow adds nothing to the prompt, which must then not be empty.
    """
    chat = None if isinstance(task.prompt, str) else task.prompt
    texts = (
        [str(task.prompt)]
        if chat is None
        else [
            " ".join(part for part in parts_of(m.content) if isinstance(part, str))
            for m in chat
            if m.role != "assistant"
        ]
    )
    words = [word for text in texts[-1:] for word in text.split()]
    by = f"tokenizer {codec.name!r}"
    if not words:
        return f"task {task.id!r}: its prompt is empty" if asks and not len(ids) else ""
    if chat is not None:
        shown = codec.shown(ids)
        by = f"the chat template of {by}"
        if not any(word in shown for word in words):
            begins = f"{shown[:40]!r}" if shown.strip() else "nothing"
            return (
                f"task {task.id!r}: {by} leaves out what the prompt says ({texts[-1][:40]!r} becomes {begins}); a "
                "template reads message['content'] or message.content of each of its messages"
            )
    return "" if len(ids) else f"task {task.id!r}: its prompt {texts[-1][:40]!r} has no tokens by {by}"


def not_embedded(codec: ChatTokenizer, ids: np.ndarray, vocabulary: int) -> str:
    """Return the first token for which a model of `vocabulary` tokens has no embedding; empty if there is none."""
    if not len(beyond := ids[ids >= vocabulary]):
        return ""
    return (
        f"the token {beyond[0]}, {codec.shown(beyond[:1])!r}, but the model has embeddings of {vocabulary} tokens, and "
        f"the tokenizer {codec.name!r} has {codec.size}: use the tokenizer that the model was made for, or enlarge the "
        "model with transformers (model.resize_token_embeddings(len(tokenizer)), model.save_pretrained)"
    )


def check_demonstrations(plan: Plan, tasks: Sequence[Task], codec: ChatTokenizer) -> None:
    """Read the demonstrations of some tasks; do nothing if the algorithm only samples.

    A user's workflow may do anything, and is left to the run.

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
    generator = RolloutGenerator(workflow, None, None)

    async def read() -> None:
        for task in tasks:
            try:
                await generator.group(task, context, 1, "check")
            except ExceptionGroup as error:
                raise first_error(error) from None

    with ThreadPoolExecutor(1) as pool:  # in a notebook, an event loop is already running in this thread
        pool.submit(run_to_end, read()).result()
