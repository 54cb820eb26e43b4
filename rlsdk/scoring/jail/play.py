"""What the tested code runs in: a program of its own, or functions that are called.

Nothing here decides whether an answer is right: results leave the sandbox as data and are compared outside.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

MAX_DIGITS = 4_000
"""Whole numbers with more are written in hexadecimal: Python refuses to read them, or write them, in decimal."""

Step = tuple[str, str, Any]
"""What to do with the module of the answer: ("run", source, None), ("value", expression, None), ("test", source, None)
or ("call", name of a function, arguments)."""


def to_its_end(run: Callable[[], None]) -> NoReturn:
    """Run what a process is for, and end it as Python ends a program: threads, exit functions, output, status."""
    status = 0
    try:
        run()
    except SystemExit as asked:
        status = _status(asked.code)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.__excepthook__(*sys.exc_info())
        status = 1
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - as above
        sys.__excepthook__(*sys.exc_info())
        status = status or 120
    try:
        sys.stderr.flush()
    finally:
        os._exit(status)


def _status(code: Any) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def program(code: list[str]) -> None:
    """Run code as the program that Python was started with; its exceptions and its exit are its own."""
    _module("__main__", code)


def steps(code: list[str], todo: list[Step], token: str, results: int) -> None:
    """Run code as a module and take steps with it; a line for each result, as it comes.

    A line is `TOKEN INDEX JSON`. Code that knows neither what is compared with nor the token cannot write a better one;
    code that searches the interpreter's memory can find the token, as nothing within one process is a secret.

    Args:
        code: Of the module.
        todo: What to do with it.
        token: That makes a line one of ours.
        results: Where lines are written.
    """
    write, dumps, encoded = os.write, json.dumps, encode
    module = _module("answer", code)
    for index, step in enumerate(todo):
        try:
            found = {"value": encoded(_take(step, module))}
        except BaseException as error:  # noqa: BLE001 - whatever the answer's code raises, SystemExit too, is its result
            found = {"raised": f"{type(error).__name__}: {_said(error)}"}
        line = f"{token} {index} {dumps(found)}\n".encode()
        while line:
            line = line[write(results, line) :]


def _module(name: str, code: list[str]) -> ModuleType:
    module = ModuleType(name)
    sys.modules[name] = module
    for part in code:
        # Not under the `from __future__` of this file.
        compiled = compile(part, "<answer>", "exec", dont_inherit=True)
        exec(compiled, module.__dict__)  # noqa: S102 - in the sandbox, which is made for it
    return module


def _take(step: Step, module: ModuleType) -> Any:
    kind, source, arguments = step
    if kind == "call":
        return _function(module, source)(*arguments)
    if kind == "value":
        return eval(compile(source, "<test>", "eval", dont_inherit=True), module.__dict__)  # noqa: S307 - in the sandbox
    exec(compile(source, "<test>", "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - in the sandbox
    return True


def _function(module: ModuleType, name: str) -> Callable[..., Any]:
    """A function of the module, or a method of a new `Solution`, as LeetCode has it."""
    found: Any = getattr(module, name, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    if isinstance(solution := getattr(module, "Solution", None), type):
        method: Callable[..., Any] = getattr(solution(), name)
        return method
    raise NameError(f"there is no function {name!r}, and no class Solution with it")


def _said(error: BaseException) -> str:
    try:
        return str(error)[:200]
    except BaseException:  # noqa: BLE001 - an exception of the answer's code may have a __str__ that raises
        return ""


def encode(value: Any) -> Any:
    """A value as JSON that keeps the types of Python's literals apart.

    Numbers, text, booleans and None stand for themselves; lists, tuples, sets, mappings, bytes and very large numbers
    are objects with one key. What else there may be is known by its type's name only, and equals nothing.
    """
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() < 3 * MAX_DIGITS else {"hex": hex(value)}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [encode(each) for each in value]}
    if isinstance(value, set | frozenset):
        return {"set": [encode(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(each)] for key, each in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    return {"other": type(value).__name__}
