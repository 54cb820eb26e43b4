"""Reward for the format of a response, independent of its content.

JSON is validated against a schema within limits of size, depth and time, and without network access.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import attrs

import rlsdk
from rlsdk.errors import ValueFault
from rlsdk.limits import above
from rlsdk.rewards.matching import compiled
from rlsdk.types import Rollout, Score

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"\w[\w.-]*")


def _where(reward: Format) -> Literal["driver", "pool"]:
    """Choose where the reward runs: counting tags is fast, but a pattern or schema may take its whole `timeout`."""
    return "driver" if reward.pattern is None and reward.json_schema is None else "pool"


@rlsdk.reward("format", runs=_where, cache=True)
@attrs.frozen(kw_only=True)
class Format:
    """1 if the response is the given tags, in order and each once, or matches a pattern or JSON schema; else 0.

    Only white space may be outside the tags. If the prompt is text that ends with the first opening tag (`…<think>`),
    the response continues after that tag.

    Attributes:
        pattern: Regular expression (of the package `regex`) that must match the whole response; it replaces the tags.
            Begin it with `(?s)` if `.` should match line breaks.
        tags: Names of the tags; `think` means `<think>…</think>`.
        json_schema: A JSON schema, or the path of a .json file with one. The whole response must be JSON that satisfies
            it; this replaces the tags unless `within` is given.
        within: Name of the tag that contains the JSON; the tags are then also checked.
        timeout: Seconds for a match of the pattern or a check of the schema; if exceeded, the score is invalid.
    """

    pattern: str | None = None
    tags: tuple[str, ...] = ("think", "answer")
    json_schema: Mapping[str, Any] | str | None = None
    within: str | None = None
    timeout: Annotated[float, above(0)] = 1.0
    _compiled: Any = attrs.field(default=None, init=False, eq=False, repr=False)
    _schema: str | None = attrs.field(default=None, init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        wrong = [tag for tag in self.tags if not _NAME.fullmatch(tag)]
        if wrong or not self.tags or len(set(self.tags)) < len(self.tags):
            raise ValueFault(f"tags must be different names without brackets, such as think; got {list(self.tags)}")
        if self.pattern is not None:
            object.__setattr__(self, "_compiled", compiled(self.pattern))
        if self.json_schema is not None:
            object.__setattr__(self, "_schema", read_schema(self.json_schema))
        if self.pattern is not None and self.json_schema is not None:
            raise ValueFault("pattern and json_schema both describe the whole response; give only one of them")
        if self.within is not None and (self.json_schema is None or self.within not in self.tags):
            raise ValueFault(
                f"within must name the one of the tags {', '.join(self.tags)} that holds the JSON of json_schema; got "
                f"{self.within!r}" + (" without json_schema" if self.json_schema is None else "")
            )

    def __call__(self, rollout: Rollout) -> Score:
        """Score one rollout.

        Returns:
            Score 1 or 0, also as the metric `format`; invalid if the pattern or the schema ran out of time.
        """
        try:
            fault = self._fault(rollout)
        except TimeoutError:
            what = "pattern" if self._schema is None else "schema"
            return Score.invalid(f"the {what} took longer than {self.timeout:g} s")
        return Score(float(not fault), metrics={"format": float(not fault)}, reason=fault)

    def _fault(self, rollout: Rollout) -> str:
        """Return the format error of the response; empty if there is none."""
        if self._compiled is not None:
            matched = self._compiled.fullmatch(rollout.response, timeout=self.timeout)
            return "" if matched else "the response does not match the pattern"
        if self._schema is not None and self.within is None:
            return json_fault(rollout.response, self._schema, self.timeout)
        text, opening = rollout.response, f"<{self.tags[0]}>"
        prompt = rollout.task.prompt
        if isinstance(prompt, str) and prompt.rstrip().endswith(opening):  # the response continues it
            text = opening + text
        fault = _tags_fault(text, self.tags)
        if fault or self._schema is None:
            return fault
        held = text.partition(f"<{self.within}>")[2].partition(f"</{self.within}>")[0]
        fault = json_fault(held, self._schema, self.timeout)
        return f"<{self.within}>: {fault}" if fault else ""


def _tags_fault(text: str, tags: tuple[str, ...]) -> str:
    """Return the error in the tags of a text; empty if there is none."""
    for tag in tags:
        for mark in (f"<{tag}>", f"</{tag}>"):
            if text.count(mark) != 1:
                return f"{mark} occurs {text.count(mark)} times; expected once"
    position = 0
    for tag in tags:
        position = _SPACE.match(text, position).end()  # type: ignore[union-attr]  # it matches the empty text
        if not text.startswith(f"<{tag}>", position):
            return f"<{tag}> is not where it should be"
        position = text.find(f"</{tag}>", position) + len(tag) + 3
        if position < len(tag) + 3:
            return f"</{tag}> comes before <{tag}>"
    return "" if not text[position:].strip() else f"there is text after </{tags[-1]}>"


MAX_CHARACTERS = 100_000
MAX_REASON = 200

_REFUSED = {
    "pattern": "a regular expression can take forever: the option `pattern` has a time limit",
    "patternProperties": "a regular expression can take forever: the option `pattern` has a time limit",
    "format": "formats are not checked; use keywords such as `enum` or `minLength` instead",
    "uniqueItems": "it takes quadratic time",
}
_OF_NAMES = frozenset({"properties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value maps names to schemas."""
_OF_DATA = frozenset({"const", "enum", "default", "examples", "example"})
_OTHERS = frozenset(
    {"$anchor", "$defs", "$dynamicAnchor", "$schema", "$vocabulary", "contentSchema", "deprecated", "example"}
    | {"maxContains", "minContains", "writeOnly"}
)
"""Keywords that `jsonschema` neither checks nor has in the properties of a metaschema."""

_until: ContextVar[float] = ContextVar("until")


def read_schema(given: Mapping[str, Any] | str) -> str:
    """Read and check a schema; return it as text.

    Raises:
        ValueFault: It cannot be read, is not a JSON schema, has external references, or an unbounded keyword.
    """
    schema = _from_file(given) if isinstance(given, str) else given
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueFault(f"json_schema is not JSON: {error}") from error
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueFault(f"json_schema must be a mapping or the path of a .json file; got {text[:MAX_REASON]}")
    import jsonschema

    try:
        jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueFault(f"json_schema is not a JSON schema: {_shown(error)}") from error
    _check_keywords(schema)
    return text


def _from_file(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueFault(f"json_schema: {path} is not a JSON file: {error}") from error


def _check_keywords(schema: dict[str, Any]) -> None:
    import referencing
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    resource = referencing.Resource.from_contents(schema, default_specification=DRAFT202012)
    resolver = referencing.Registry().with_resource(schema.get("$id", ""), resource).resolver(schema.get("$id", ""))
    known = _known_keywords()
    if schema and known.isdisjoint(schema):
        raise ValueFault(
            f"json_schema contains no JSON schema keyword, so any JSON would satisfy it; its keys: "
            f"{', '.join(schema)}. Keys of the JSON belong under `properties`"
        )
    annotations: list[str] = []
    for path, keyword, value in _keywords(schema, ""):
        if keyword not in known and not path.startswith(tuple(annotations)):
            # A misspelt keyword would be ignored, as any validator ignores annotations that it does not know.
            near = difflib.get_close_matches(keyword.lower(), [each.lower() for each in known], 1, cutoff=0.75)
            if near and not keyword.startswith("x-"):
                meant = next(each for each in known if each.lower() == near[0])
                raise ValueFault(f"json_schema{path}: unknown keyword {keyword!r}, did you mean {meant!r}?")
            annotations.append(f"{path}.{keyword}")
        if keyword in _REFUSED:
            raise ValueFault(f"json_schema{path}: {keyword!r} is not supported: {_REFUSED[keyword]}")
        if keyword in {"$ref", "$dynamicRef"}:
            try:
                if not str(value).startswith("#"):
                    raise ValueFault(f"json_schema{path}: {value!r} points elsewhere; only # references are followed")
                resolver.lookup(str(value))
            except Unresolvable as error:
                raise ValueFault(f"json_schema{path}: there is no {value!r} in the schema") from error


@cache
def _known_keywords() -> frozenset[str]:
    """Return the keywords of all versions of JSON schema."""
    from jsonschema import validators

    drafts = (f"Draft{number}Validator" for number in ("3", "4", "6", "7", "201909", "202012"))
    found = [getattr(validators, name) for name in drafts]
    return _OTHERS.union(*(each.VALIDATORS for each in found), *(each.META_SCHEMA["properties"] for each in found))


def _keywords(schema: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield all keywords of a schema and its subschemas, with path and value, except names of properties and data."""
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from _keywords(item, f"{path}[{index}]")
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        yield path, keyword, value
        if keyword in _OF_NAMES and isinstance(value, dict):
            for name, inner in value.items():
                yield from _keywords(inner, f"{path}.{keyword}.{name}")
        elif keyword not in _OF_DATA:
            yield from _keywords(value, f"{path}.{keyword}")


def json_fault(text: str, schema: str, timeout: float) -> str:
    """Validate a text as JSON against a schema; return the error, empty if there is none.

    Args:
        text: Text from the model.
        schema: Result of `read_schema`.
        timeout: Time limit of the check, in seconds of this thread's CPU time, which does not depend on the machine's
            load.

    Raises:
        TimeoutError: The check exceeded its time limit.
    """
    if len(text) > MAX_CHARACTERS:
        return f"it has {len(text)} characters, more than {MAX_CHARACTERS}"
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
    except RecursionError:
        return "its brackets are nested too deeply"
    except ValueError as error:
        return f"it is not JSON: {str(error)[:MAX_REASON]}"
    validator = _validator(schema)  # imports its library the first time, which must not count towards the time limit
    token = _until.set(time.thread_time() + timeout)
    try:
        found = next(validator.iter_errors(value), None)
    except RecursionError:
        return "its brackets are nested too deeply"
    except ArithmeticError:  # a multiple of a number too large for a float
        return "it holds a number that is too large"
    finally:
        _until.reset(token)
    return "" if found is None else _shown(found)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large")
    return value


def _shown(error: Any) -> str:
    message: str = error.message
    shown = message if len(message) <= MAX_REASON else f"{message[:MAX_REASON]}…"
    return f"{error.json_path[:MAX_REASON]}: {shown}"


@lru_cache(maxsize=64)
def _validator(schema: str) -> Any:
    """Return a validator that checks the time limit at every keyword and resolves no external reference."""
    import jsonschema
    import referencing

    loaded = json.loads(schema)
    plain = jsonschema.validators.validator_for(loaded, default=jsonschema.Draft202012Validator)
    timed = {keyword: _timed(check) for keyword, check in plain.VALIDATORS.items()}
    # With an empty registry, external references fail instead of being fetched.
    return jsonschema.validators.extend(plain, timed)(loaded, registry=referencing.Registry())


def _timed(check: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*arguments: Any) -> Any:
        if time.thread_time() > _until.get():
            raise TimeoutError
        return check(*arguments)

    return checked
