"""Checks of a plan that need its data, its model or this machine, made before anything starts.

`rlsdk explain` shows the findings; `rlsdk train` refuses to start if there are faults or warnings.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlsdk import preflight
from rlsdk.cluster.gpus import ROLES, GPUNode
from rlsdk.cluster.placement import gpu_map
from rlsdk.config import Plan, TaskSource
from rlsdk.config.rules import longest_prompt
from rlsdk.contracts import OnlySamples, PlaysEpisodes, Requires, RequiresPrograms, SpansGPUs, StreamsTensors
from rlsdk.engines.common import end_ids, open_tokenizer
from rlsdk.errors import (
    ConfigError,
    DataError,
    EngineError,
    EnvironmentFault,
    OptionError,
    RefusedMessagesError,
    RlsdkError,
    UnreachableDataError,
    described,
    first_line,
)
from rlsdk.learners.base import TransformersLearner
from rlsdk.messages import parts_of
from rlsdk.plugins import ComponentRef
from rlsdk.plurals import counted
from rlsdk.readiness.demonstrations import check_demonstrations
from rlsdk.readiness.disk import DiskEstimate, estimate, skeleton
from rlsdk.readiness.models import exact_faults, idle_notes, image_faults, length_notes, model_faults, rank_faults
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.rollout.stream import opened
from rlsdk.types import Message, Task

PROMPTS = 64
"""Number of prompts per source to render, spread over all its tasks."""
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""Names of the files of a tokenizer."""
WEIGHT_FILES = tuple(
    f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json")
)
"""Names of the files by which transformers finds weights."""
ENGINES_PER_CORE = 2
"""Maximum number of engines, or of learner ranks, per CPU core."""


@attrs.frozen
class PlanFinding:
    """A problem of a plan, and the path of the affected setting."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


@attrs.frozen
class Readiness:
    """Result of the checks.

    Attributes:
        faults: Problems on any machine.
        warnings: Problems of this machine only.
        notes: Harmless findings that may surprise the user.
        tasks: Tasks of each source in `tasks.train`; empty if not read.
        disk: Required disk space; None if the program has no learner.
        built: The model without its weights; None, and the reason, if it cannot be built.
    """

    faults: tuple[PlanFinding, ...] = ()
    warnings: tuple[PlanFinding, ...] = ()
    notes: tuple[PlanFinding, ...] = ()
    tasks: tuple[Sequence[Task], ...] = ()
    disk: DiskEstimate | None = None
    built: tuple[Any, str] = (None, "")

    def require(self) -> Readiness:
        """Return this result if the run can start here.

        Raises:
            ConfigError: There are faults.
            EnvironmentFault: There are only warnings.
        """
        if self.faults:
            raise ConfigError(map(str, self.faults))
        preflight.require(map(str, self.warnings))
        return self


def machine(plan: Plan, *, trains: bool = True, devices: bool = True) -> list[PlanFinding]:
    """Check that this machine has the devices, packages, programs and models that a plan needs.

    Args:
        plan: Checked plan.
        trains: True for a program with a learner, which writes checkpoints, and with trackers.
        devices: Check GPUs and cores; false if the plan is for other machines.
    """
    found = [PlanFinding("placement.device", text) for text in preflight.torch_companions()]
    found += _devices(plan, trains=trains) if devices else []
    return [*found, *_models(plan, trains=trains), *_requirements(plan, trains=trains)]


def space(plan: Plan, disk: DiskEstimate) -> list[PlanFinding]:
    """Compare the disk space that a run needs with the free space at its folder's location."""
    return [PlanFinding("out", text) for text in preflight.free_space(plan.folder, disk.needed)]


def _devices(plan: Plan, *, trains: bool) -> Iterator[PlanFinding]:
    """Check GPUs, cores and limits, unless a cluster of other machines provides them."""
    place = plan.config.placement
    if place.device != "cpu":
        yield from (PlanFinding("placement.device", text) for text in preflight.gpu_capability())
    elsewhere = bool(place.ray or os.environ.get("RAY_ADDRESS"))
    gpus, cores = preflight.gpu_count() if place.device != "cpu" else 0, os.cpu_count() or 1
    on_cpu = place.device == "cpu" or (place.device == "auto" and not gpus and not elsewhere)
    if trains and plan.needs_engine and on_cpu and _device_of_transfer(plan) == "cuda":
        yield PlanFinding(
            "rollout.weight_transfer",
            f"{plan.weight_transfer.name!r} sends weights from GPU to GPU, but this run uses none; use gloo, "
            "shared_memory or object_store",
        )
    if elsewhere:
        return
    yield from (PlanFinding("placement", text) for text in [*preflight.open_files(), *preflight.file_size()])
    if place.device == "cuda" or gpus:
        for text in gpu_faults(plan, [GPUNode("this machine", gpus)], trains=trains):
            yield PlanFinding("placement.device", f"{text}; set placement.device=cpu, or train where the GPUs are")
    counts = {"engines": place.engines if plan.needs_engine else 0, "learners": place.learners if trains else 0}
    for name, count in counts.items():
        if count > ENGINES_PER_CORE * cores:
            yield PlanFinding(
                f"placement.{name}",
                f"{count} {name} on {cores} CPU cores: each is a process that computes constantly, and a core can "
                f"serve {ENGINES_PER_CORE}; give at most {ENGINES_PER_CORE * cores}",
            )


def _device_of_transfer(plan: Plan) -> str:
    transfer = plan.plugins.resolve(plan.weight_transfer)
    return transfer.device if isinstance(transfer, StreamsTensors) else "cpu"


def gpu_faults(plan: Plan, nodes: Sequence[GPUNode], *, trains: bool = True) -> list[str]:
    """Return why the actors of a plan cannot be placed on the GPUs of given nodes, or share them; empty if they can."""
    place, faults = plan.config.placement, []
    engine = plan.plugins.resolve(plan.engine)
    if plan.needs_engine and isinstance(engine, SpansGPUs) and engine.gpus != place.gpus_per_engine:
        faults.append(
            f"each engine divides its model among {engine.gpus} GPUs (engine.tensor_parallel_size), but is given "
            f"{place.gpus_per_engine} (placement.gpus_per_engine); set both to the same number"
        )
    if trains and plan.needs_engine and place.colocate and plan.config.rollout.runs_ahead:
        faults.append("rollouts cannot run ahead of a learner on their own GPUs; set placement.colocate=false")
    if trains and plan.needs_engine and place.colocate and _device_of_transfer(plan) == "cuda":
        faults.append(
            f"rollout.weight_transfer={plan.weight_transfer.name} sends weights from GPU to GPU, but engines and "
            "learner share theirs; set placement.colocate=false, or use shared_memory or object_store"
        )
    try:
        gpu_map(plan, nodes, ROLES if trains else ("engine",))
    except EnvironmentFault as fault:
        faults.append(str(fault))
    return faults


def _models(plan: Plan, *, trains: bool) -> Iterator[PlanFinding]:
    section = plan.config.model
    loads = trains and isinstance(plan.plugins.resolve(plan.learner), TransformersLearner)
    others = [*(["reference"] if plan.needs_reference else []), *(["critic"] if plan.algorithm.critic else [])]
    for key in ("path", "tokenizer", *others):
        if not (name := getattr(section, key)):
            continue
        if not os.path.isdir(folder := os.path.expanduser(name)):
            faults = preflight.hub_model(name)
            yield from (PlanFinding(f"model.{key}", text) for text in faults)
            if faults or not preflight.hub_is_offline():
                continue
            folder = preflight.cached_folder(name)
        if (
            loads
            and key != "tokenizer"
            and not any(os.path.exists(os.path.join(folder, each)) for each in WEIGHT_FILES)
        ):
            yield PlanFinding(
                f"model.{key}",
                f"{name} has no weights for the learner (expected model.safetensors, or its index); download or copy "
                "the whole model, or create a small one with `rlsdk model new nano`",
            )


def _requirements(plan: Plan, *, trains: bool) -> Iterator[PlanFinding]:
    """Check for packages and programs that components need with the given options."""
    used: list[tuple[str, ComponentRef]] = [("engine", plan.engine)] if plan.needs_engine else []
    if trains:
        used += [("learner", plan.learner), *((f"{role}.learner", own) for role, own in plan.apart.items())]
        used += [("trackers", tracker) for tracker in plan.trackers]
    for path, reference in used:
        component = plan.plugins.resolve(reference)
        what = f"{reference.kind} {reference.name} with these options"
        if isinstance(component, Requires):
            yield from (PlanFinding(path, text) for text in preflight.packages(component.requires, what))
        if isinstance(component, RequiresPrograms):
            yield from (PlanFinding(path, text) for text in preflight.programs(component.programs, what))


def examine(plan: Plan, *, trains: bool = True, starts: bool = True, devices: bool = True) -> Readiness:
    """Check a plan's data, tokenizer and machine, without starting anything.

    Args:
        plan: Checked plan.
        trains: True for a program that has a learner.
        starts: True if a run follows. Otherwise slow checks are skipped: large files are not read, and nothing is
            downloaded.
        devices: Check this machine's GPUs and cores; false if the plan is for other machines.
    """
    found = _PlanChecks(plan, starts)
    found.warnings += machine(plan, trains=trains, devices=devices)
    if trains and plan.needs_engine:
        found.faults += [PlanFinding("engine", text) for text in training_faults(plan)]
    if trains:
        found.faults += [PlanFinding(*fault) for fault in rank_faults(plan)]
        found.notes += [PlanFinding(*note) for note in idle_notes(plan)]
    codec = found.codec()
    built = skeleton(plan, download=starts)
    if (net := built[0]) is not None:
        found.vocabulary = vocabulary = getattr(net.config.get_text_config(), "vocab_size", sys.maxsize)
        if codec is not None and codec.size > vocabulary:
            text = f"the tokenizer {codec.name!r} has {codec.size} tokens, and the model has embeddings of {vocabulary}"
            found.notes.append(PlanFinding(found.tokenizer, f"{text}: prompts with one of the others are refused"))
        found.faults += [PlanFinding(*fault) for fault in model_faults(plan, net, trains=trains)]
        found.notes += [PlanFinding(*note) for note in length_notes(plan, net)]
    found.faults += [PlanFinding(*fault) for fault in exact_faults(plan, net)]
    tasks = [
        found.source(f"tasks.{section}" + (f"[{i}]" if len(sources) > 1 else ""), source, codec)
        for section, sources in (("train", plan.tasks_train), ("eval", plan.tasks_eval))
        for i, source in enumerate(sources)
    ]
    if found.sources and all(each is not None for each in tasks):
        found.unmet_sources()
    trained = [each for each in tasks[: len(plan.tasks_train)] if each is not None]
    firsts = [each[0] for each in tasks if each]
    found.faults += [PlanFinding(*fault) for fault in image_faults(plan, net, firsts)]
    disk = None
    if trains:
        count = sum(map(len, trained)) if len(trained) == len(plan.tasks_train) else None
        disk = estimate(plan, tasks=count, built=built)
        found.warnings += space(plan, disk)
        if count and count < plan.config.batch_size:
            text = f"{counted(count, 'task')}, fewer than batch_size={plan.config.batch_size}: some repeat in a step"
            found.notes.append(PlanFinding("tasks.train", text))
    if plan.config.eval.every and not plan.tasks_eval:
        text = f"{plan.config.eval.every}, but nothing is evaluated, since there are no tasks.eval"
        found.notes.append(PlanFinding("eval.every", text))
    return Readiness(
        faults=tuple(found.faults),
        warnings=tuple(found.warnings),
        notes=tuple(found.notes),
        tasks=tuple(trained),
        disk=disk,
        built=built,
    )


def training_faults(plan: Plan) -> Sequence[str]:
    """Return why the samples of a plan's engine cannot be trained on; empty if they can."""
    engine = plan.plugins.resolve(plan.engine)
    return engine.training_faults() if isinstance(engine, OnlySamples) else []


@attrs.define
class _PlanChecks:
    """Collects the findings of `examine`."""

    plan: Plan
    starts: bool
    faults: list[PlanFinding] = attrs.field(factory=list)
    warnings: list[PlanFinding] = attrs.field(factory=list)
    notes: list[PlanFinding] = attrs.field(factory=list)
    sources: set[str] = attrs.field(factory=set)
    """Sources of the tried tasks."""
    vocabulary: int = sys.maxsize
    """Number of tokens that the model has embeddings for."""

    @property
    def tokenizer(self) -> str:
        """Path of the setting that names the tokenizer."""
        return "model.tokenizer" if self.plan.model.tokenizer else "model.path"

    def codec(self) -> ChatTokenizer | None:
        """Open the tokenizer and check that answers can end; None if it cannot be opened."""
        plan, model = self.plan, self.plan.model
        missing = any(found.path in ("model.path", "model.tokenizer") for found in self.warnings)
        if missing and not all(
            os.path.isdir(os.path.expanduser(each or ".")) for each in (model.path, model.tokenizer)
        ):
            return None  # the model is not on this machine, which is already reported
        name = model.tokenizer or model.path
        try:
            tokenizer = open_tokenizer(model)
            ends = end_ids(model, tokenizer)
        except Exception as error:  # noqa: BLE001 - transformers raises anything for a file that it cannot use
            text = f"the tokenizer in {name!r} cannot be opened: {first_line(error)}"
            if Path(name).is_dir() and not any(file for each in _TOKENIZERS for file in Path(name).glob(each)):
                text = f"the folder {name!r} has no tokenizer: save one there, or set model.tokenizer to another folder"
            elif "trust_remote_code" in str(error):
                text = (
                    f"{model.path!r} runs only with Python code that comes with it (auto_map in its config.json); read "
                    "that code, and set model.trust_remote_code=true if you trust it"
                )
            self.warnings.append(PlanFinding("model.path", text))
            return None
        if plan.needs_engine and not ends and not plan.config.sampling.stop:
            self.faults.append(
                PlanFinding(
                    "model.path",
                    f"the model {model.path!r} has no end-of-text token: neither its tokenizer nor its config names an "
                    "eos_token, so that every answer would have sampling.max_tokens tokens; set eos_token in "
                    "tokenizer_config.json, or give sampling.stop",
                )
            )
        return ChatTokenizer.of(plan, tokenizer)

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
        except OptionError as error:
            self.faults += [PlanFinding(f"{path}.{below}", text) for below, text in error.faults]
        except ConfigError as error:
            self.faults += [PlanFinding(path, text) for text in error.faults]
        except EngineError as error:
            self.faults.append(PlanFinding("workflow", f"{self.plan.workflow.name!r}: {error}"))
        except UnreachableDataError as error:
            self.warnings.append(PlanFinding(path, str(error)))
        except RlsdkError as error:
            self.faults.append(PlanFinding(path, str(error)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin's code
            self.faults.append(PlanFinding(path, f"source {source.name!r} failed: {described(error)}"))
        else:
            return tasks
        return None

    def _prompts(self, path: str, tasks: Sequence[Task], count: int, codec: ChatTokenizer) -> None:
        """Render prompts as a run does: each must contain its task's text, and some must be short enough."""
        config, prompts, trained = self.plan.config, [], path.startswith("tasks.train")
        workflow = self.plan.workflow if trained else self.plan.eval_workflow
        asks = self.plan.plugins.component(workflow).one_answer
        for task in tasks:
            try:
                ids = codec.prompt(task)[1]
            except RefusedMessagesError as error:
                self.faults += [PlanFinding(path, f"task {task.id!r}: {text}") for text in error.faults]
                return
            prompts.append(ids)
            if wrong := unreadable(task, codec, ids, asks=asks):
                self.faults.append(PlanFinding(path, wrong))
                return
            if wrong := not_embedded(codec, ids, self.vocabulary):
                self.faults.append(PlanFinding(self.tokenizer, f"the prompt of task {task.id!r} has {wrong}"))
                return
        self._unknown_tokens(path, tasks, prompts, codec)
        if not asks and any(not isinstance(task.prompt, str) for task in tasks):
            self._several_rollouts(codec)
        lengths = [len(ids) for ids in prompts]
        # Evaluations drop no prompts.
        limit, setting = longest_prompt(config) if trained else (config.model.max_length - 1, "model.max_length")
        if not lengths or max(lengths) <= limit:
            return
        least = max(lengths) + (setting == "model.max_length")
        if min(lengths) > limit:
            seen = f"all {count}" if count == len(tasks) else f"all {len(tasks)} that were tried of {count}"
            text = f"no prompt of {path} fits in {limit} tokens: {seen} have from {min(lengths)} to {max(lengths)}"
            self.faults.append(PlanFinding(setting, f"{text}; give at least {least}"))
        elif not trained:
            text = f"{limit + 1} tokens leave no room for an answer: {path} has a prompt of {max(lengths)} tokens"
            self.faults.append(PlanFinding(setting, f"{text}; give at least {least}, or leave such tasks out"))
        elif config.long_prompts == "error":
            text = f"{limit}, but {path} has a prompt of {max(lengths)} tokens, and long_prompts=error"
            self.faults.append(PlanFinding(setting, f"{text}; give at least {least}, or drop them"))
        else:
            dropped = sum(length > limit for length in lengths)
            others = "; epochs count them, so the others are drawn again in their place" if config.epochs else ""
            text = f"{limit} tokens: of {counted(len(lengths), 'prompt')} of {path} that were tried, {dropped} would be"
            self.notes.append(PlanFinding(setting, f"{text} dropped as longer{others}"))

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
            text = f"no part is for task {task.id!r} of {path}, whose source is {task.source!r}; `sources` has {given}"
            self.faults.append(PlanFinding("reward", text))

    def _unplayed(self, path: str, tasks: Sequence[Task]) -> None:
        """Report the first task that names no environment, or one that is not there, though the workflow plays one."""
        plan, trained = self.plan, path.startswith("tasks.train")
        workflow = plan.plugins.resolve(plan.workflow if trained else plan.eval_workflow)
        if not isinstance(workflow, PlaysEpisodes) or (trained and not plan.sampled):
            return
        for task in tasks:
            try:
                use, _ = workflow.episode(task)
            except DataError as error:
                self.faults.append(PlanFinding(path, str(error)))
                return
            try:
                plan.plugins.reference("environment", use.name, use.options)
            except RlsdkError as error:
                self.faults.append(PlanFinding(path, f"the environment of task {task.id!r}: {error}"))
                return

    def unmet_sources(self) -> None:
        """Report parts of the reward for sources that none of the tried tasks has."""
        rewards = self.plan.rewards
        for i, part in enumerate(rewards):
            if part.rule.sources and self.sources.isdisjoint(part.rule.sources):
                text = (
                    f"{', '.join(part.rule.sources)}: none of the tried tasks has this source, so {part.rule.name} "
                    f"may score none; their sources are: {', '.join(sorted(self.sources))}"
                )
                self.notes.append(PlanFinding(f"reward[{i}].sources" if len(rewards) > 1 else "reward.sources", text))

    def _answers_as_prefills(self, path: str, source: TaskSource, tasks: Sequence[Task]) -> None:
        """Note prompts that end with an answer although no prefill was requested, as in data for imitation."""
        last = [task.prompt[-1] for task in tasks if not isinstance(task.prompt, str) and task.prompt]
        if source.reference.options.get("prefill") or not any(message.role == "assistant" for message in last):
            return
        said = next(message.text for message in last if message.role == "assistant")
        text = (
            f"prompts end with an assistant message, such as {said[-40:]!r}: the policy continues it, and "
            "rewards read both as one answer. If it is the answer to learn, leave it out of the prompt (the column "
            "`demonstration` may hold it)"
        )
        self.notes.append(PlanFinding(path, text))

    def _unknown_tokens(
        self, path: str, tasks: Sequence[Task], prompts: Sequence[np.ndarray], codec: ChatTokenizer
    ) -> None:
        """Report a fault if the tokenizer can encode less than half of the characters of every prompt."""
        tokenizer = codec.tokenizer
        unknown = tokenizer.unk_token_id
        if unknown in (None, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
            return  # GPT-2's unknown token is its end-of-text token, which stands for no text
        if prompts and all(len(ids) and (ids == unknown).mean() > 0.5 for ids in prompts):
            text = (
                f"the tokenizer {codec.name!r} has no token for most of what the prompts say: task {tasks[0].id!r} "
                f"becomes {codec.shown(prompts[0])[:60]!r}; train a model that was made for such text"
            )
            self.faults.append(PlanFinding(path, text))

    def _several_rollouts(self, codec: ChatTokenizer) -> None:
        """Note, once, that multi-turn conversations become several rollouts if thoughts are dropped."""
        talk = (Message("user", "Q"), Message("assistant", "A"), Message("user", "Q"))
        try:
            new_rollout = codec.bridge_tokens(talk, 1, plain=False) is None
        except ConfigError:
            return  # a run logs it for the conversation that has such a turn
        text = (
            "drops the thoughts of earlier answers: a conversation in which the user speaks again trains as several "
            "rollouts of one trajectory, each after the prompt that is rendered for its turn (model.keep_history: true "
            "keeps the tokens as sampled)"
        )
        finding = PlanFinding("model.renderer", text)
        if new_rollout and finding not in self.notes:
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
    texts = [str(task.prompt)] if chat is None else [_said(m) for m in chat if m.role != "assistant"]
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


def _said(message: Message) -> str:
    return " ".join(part for part in parts_of(message.content) if isinstance(part, str))
