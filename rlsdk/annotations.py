"""Human annotations of rollouts: pairs, scores and corrections, stored in `annotations.jsonl` of a run's folder."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import attrs

from rlsdk.errors import DataError, RunError, ValueFault
from rlsdk.messages import Message
from rlsdk.plurals import counted

if TYPE_CHECKING:
    from rlsdk.types import Rollout

log = logging.getLogger(__name__)
ANNOTATIONS = "annotations.jsonl"
Kind = Literal["pair", "score", "edit", "skip", "undo"]
ASKED: tuple[Kind, ...] = ("pair", "score", "edit")
"""Kinds of questions for annotators."""
PREFERENCES = ("first", "second", "same")
"""Values of a pair annotation: which rollout is better."""
_LONGEST_LABEL = 200


@attrs.frozen(kw_only=True)
class AnnotatedRollout:
    """A rollout shown to an annotator.

    Attributes:
        id: Hash of task id and conversation, equal wherever the rollout is stored; see `rollout_id`.
        number: Number of its group in the run's store.
        index: Position in the group.
        answer: Text after the prompt, or messages as JSON if there are several answers.
    """

    id: str
    number: int
    index: int
    answer: str | Sequence[Mapping[str, Any]]


def _rollouts(value: Iterable[AnnotatedRollout]) -> tuple[AnnotatedRollout, ...]:
    return tuple(value)


@attrs.frozen(kw_only=True)
class Annotation:
    """A person's judgement of one or two rollouts.

    Attributes:
        kind: `pair`, `score` or `edit`; `skip` for a skipped question, `undo` for an undone annotation.
        value: For a pair `first`, `second` or `same`; for a score a number or a label; for an edit the corrected last
            answer; for a skip the kind of question; for an undo the id of the annotation.
        by: Name of the person.
        rollouts: Two rollouts for a pair, none for an undo, otherwise one.
        task: Task as JSON: `id`, `prompt`, `answer`, `metadata`, `source`.
        id: Id of the annotation.
        time: Creation time in seconds since 1970.
    """

    kind: Kind
    value: Any
    by: str
    rollouts: tuple[AnnotatedRollout, ...] = attrs.field(default=(), converter=_rollouts)
    task: Mapping[str, Any] = attrs.field(factory=dict)
    id: str = attrs.field(factory=lambda: uuid.uuid4().hex[:16])
    time: float = attrs.field(factory=lambda: round(time.time(), 3))

    def __attrs_post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueFault(f"kind is {self.kind!r}; expected one of {', '.join(get_args(Kind))}")
        expected = {"pair": 2, "undo": 0}.get(self.kind)
        if self.kind == "skip":
            expected = 2 if self.value == "pair" else 1
        if len(self.rollouts) != (1 if expected is None else expected):
            raise ValueFault(f"{self.kind}: {counted(len(self.rollouts), 'rollout')} given; expected {expected or 1}")
        if fault := _value_fault(self.kind, self.value):
            raise ValueFault(f"{self.kind}: value is {self.value!r:.80}; expected {fault}")

    @property
    def prefill(self) -> str:
        """Prefill: the beginning of the answers, as given by the prompt."""
        prompt = self.task.get("prompt")
        last = prompt[-1] if isinstance(prompt, list | tuple) and prompt else {}
        return str(last.get("content") or "") if last.get("role") == "assistant" else ""

    def response(self, i: int) -> str:
        """Return the policy's text in one of the rollouts, like `Rollout.response`."""
        answer = self.rollouts[i].answer
        texts = [answer] if isinstance(answer, str) else [str(m["content"]) for m in answer if m["role"] == "assistant"]
        return self.prefill + "\n".join(texts)

    def number(self, labels: Mapping[str, float]) -> float:
        """Return the value of a score as a number.

        Raises:
            DataError: The value is a label that `labels` lacks.
        """
        if not isinstance(self.value, str):
            return float(self.value)
        if self.value not in labels:
            raise DataError(
                f"{self.by} scored a rollout of task {self.task.get('id')!r} {self.value!r}, a label without a value; "
                f"add it to `labels`, such as {{{self.value}: 1}}; known labels: {', '.join(labels) or 'none'}"
            )
        return float(labels[self.value])

    def as_json(self) -> dict[str, Any]:
        """Return the annotation as JSON values."""
        return attrs.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Annotation:
        """Parse an annotation; keys added by later versions of rlsdk are ignored.

        Raises:
            ValueFault: The value is not an annotation.
        """
        try:
            given = {field.name: value[field.name] for field in attrs.fields(cls)}
            names = [field.name for field in attrs.fields(AnnotatedRollout)]
            given["rollouts"] = [AnnotatedRollout(**{n: each[n] for n in names}) for each in given["rollouts"]]
        except (LookupError, TypeError) as error:
            raise ValueFault(f"an annotation lacks {error}") from error
        return cls(**given)


def _value_fault(kind: str, value: Any) -> str:
    """Describe the expected value; empty if the value is valid."""
    if kind == "pair":
        return "" if value in PREFERENCES else "first, second or same"
    if kind == "score":
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        is_label = isinstance(value, str) and 0 < len(value.strip()) <= _LONGEST_LABEL
        return "" if is_number or is_label else "a finite number or a label"
    if kind == "skip":
        return "" if value in ASKED else f"the kind of question, one of {', '.join(ASKED)}"
    return "" if isinstance(value, str) and value.strip() else "a text that is not empty"


def rollout_id(rollout: Rollout) -> str:
    """Return a hash of task id and conversation that identifies a rollout in any run, store or process."""
    said = [rollout.task.id, [[message.role, message.text] for message in rollout.messages]]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:24]


def annotated(rollout: Rollout, number: int, index: int) -> AnnotatedRollout:
    """Return a rollout in the form that annotations store.

    Args:
        rollout: The rollout.
        number: Number of its group in the run's store.
        index: Position in the group.
    """
    *_, answers = _parts(rollout)
    one = len(answers) == 1 and answers[0].role == "assistant"
    answer = answers[0].text if one else tuple(message.as_json() for message in answers)
    return AnnotatedRollout(id=rollout_id(rollout), number=number, index=index, answer=answer)


def task_json(rollout: Rollout) -> dict[str, Any]:
    """Return the task of a rollout as JSON; its prompt is the policy's input before the first answer.

    Answers and metadata that cannot be written as JSON are omitted.
    """
    task, (prompt, _) = rollout.task, _parts(rollout)
    is_text = isinstance(task.prompt, str) and [(m.role, m.text) for m in prompt] == [("user", task.prompt)]
    return {
        "id": task.id,
        "prompt": task.prompt if is_text else [message.as_json() for message in prompt],
        "answer": _plain(task.answer),
        "metadata": {str(key): _plain(value) for key, value in task.metadata.items() if _plain(value) is not None},
        "source": task.source,
    }


def _parts(rollout: Rollout) -> tuple[list[Message], list[Message]]:
    """Split a conversation into the prompt, with a prefill as its last message, and the messages after it."""
    messages = list(rollout.messages)
    first = next((i for i, m in enumerate(messages) if m.role == "assistant" and not m.prompt), len(messages))
    prompt, after = messages[:first], messages[first:]
    given = rollout.task.prompt
    if after and not isinstance(given, str) and given and given[-1].role == "assistant":
        prefill = given[-1].text
        if after[0].text.startswith(prefill):
            prompt.append(given[-1])
            after[0] = attrs.evolve(after[0], content=after[0].text[len(prefill) :])
    return prompt, after


def _plain(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return None


class AnnotationFile:
    """The annotations of a run, an append-only file: undone annotations stay in it.

    Several threads may use it, and several programs may append to one file.
    """

    def __init__(self, folder: Path) -> None:
        """Set the path of the file, which is created with the first annotation.

        Args:
            folder: Run folder, or a file of annotations.
        """
        self.path = folder if folder.suffix == ".jsonl" else folder / ANNOTATIONS
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._standing: dict[str, Annotation] = {}
        self._position = 0

    def read(self) -> tuple[Annotation, ...]:
        """Return the annotations that were not undone, in the order they were made; only new lines are read.

        An incomplete line, as a crash may leave, is skipped.
        """
        with self._lock:
            self._refresh()
            return tuple(self._standing.values())

    def append(self, annotation: Annotation) -> None:
        """Add an annotation; it is on disk when this returns."""
        with self._lock:
            self._append(annotation)

    def undo(self, by: str) -> Annotation | None:
        """Undo a person's last annotation or skipped question that was not undone yet.

        Returns:
            The annotation; None if there is none.
        """
        with self._lock:
            self._refresh()
            last = next((each for each in reversed(self._standing.values()) if each.by == by), None)
            if last is not None:
                self._append(Annotation(kind="undo", value=last.id, by=by))
            return last

    def _append(self, annotation: Annotation) -> None:
        line = json.dumps(annotation.as_json(), allow_nan=False).encode() + b"\n"
        try:
            is_new = not self.path.exists()
            with self.path.open("ab+", buffering=0) as file:
                if file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # the previous line was cut off: start a new one
                        line = b"\n" + line
                if file.write(line) != len(line):
                    raise OSError("the disk is full")
                os.fsync(file.fileno())
            if is_new:
                _sync_folder(self.path.parent)
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def _refresh(self) -> None:
        try:
            if self.path.is_file() and self.path.stat().st_size < self._position:
                self._forget()
            with self.path.open("rb") as file:
                file.seek(self._position)
                content = file.read()
        except FileNotFoundError:
            self._forget()
            return
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror or error}") from error
        whole = content.rfind(b"\n") + 1
        for annotation in _lines(content[:whole], self.path):
            if annotation.kind == "undo":
                self._standing.pop(annotation.value, None)
            else:
                self._standing[annotation.id] = annotation
        self._position += whole


def _lines(content: bytes, path: Path) -> Iterator[Annotation]:
    for line in content.split(b"\n"):
        if not line.strip():
            continue
        try:
            yield Annotation.from_json(json.loads(line))
        except (ValueError, RecursionError, AttributeError, TypeError) as error:
            log.warning("%s: skipped a line that is not an annotation (%s): %.60r", path, error, line)


def _sync_folder(folder: Path) -> None:
    """Make a new file's directory entry survive a crash, if the system supports it."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_annotations(paths: Sequence[str]) -> list[Annotation]:
    """Return the annotations of runs, without undone ones.

    Args:
        paths: Run folders, or files of annotations.

    Raises:
        RunError: A path has no annotations.
    """
    found: list[Annotation] = []
    for path in paths:
        file = AnnotationFile(Path(path).expanduser())
        if not file.path.is_file():
            raise RunError(
                f"{file.path}: there are no annotations; expected a run's folder, or its {ANNOTATIONS}. Annotate "
                "rollouts on the Annotate page of `rlsdk view`"
            )
        found += file.read()
    return found
