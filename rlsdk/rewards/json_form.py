"""Validation of JSON against a schema, within limits of size, depth and time, and without network access."""

from __future__ import annotations

import difflib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from rlsdk.errors import ValueFault

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

    Args:
        given: Schema, or path of a schema file.

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
