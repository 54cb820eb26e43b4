"""Code executed in the sandbox: a program, or an answer with its tests in a separate process.

Nothing here decides whether an answer is right: results leave the sandbox as data and are compared outside.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, BinaryIO, NoReturn

from rlsdk.isolation.sandboxed.border import AnswerServer, Far, Tested, encode

Step = tuple[str, str, Any]
"""An operation on the answer's module: ("run", source, None), ("value", expression, None), ("test", source, None) or
("call", function name, arguments)."""


def to_its_end(run: Callable[[], None]) -> NoReturn:
    """Run a function, then end the process as Python ends a program, with threads, exit handlers, output and status."""
    status = 0
    try:
        run()
    except SystemExit as asked:
        if asked.code is None or isinstance(asked.code, int):
            status = (asked.code or 0) & 0xFF
        else:
            sys.stderr.write(f"{asked.code}\n")
            status = 1
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


def program(code: list[str]) -> None:
    """Run code as Python's main program; the caller handles its exceptions and its exit."""
    _module("__main__", code)


def answer(code: list[str], requests: BinaryIO, replies: int) -> None:
    """Run code as a module and serve calls from the tests' process."""
    AnswerServer(_module("answer", code), requests, replies).serve()


def tests(todo: list[Step], names: list[str], tested: Tested, results: int) -> None:
    """Run test steps against an answer in another process, and write a line `INDEX JSON` for each result.

    This process runs no code of the model, and the answer's process cannot access the results.

    Args:
        todo: Steps to run.
        names: Names that the steps may use from the answer.
        tested: Answer under test.
        results: File descriptor for the result lines.
    """
    space = _module("tests", []).__dict__
    space.update(tested.names(names))
    for index, (kind, source, arguments) in enumerate(todo):
        try:
            if kind == "call":
                value = tested.function(source)(*arguments)
            elif kind == "value":
                value = eval(compile(source, "<test>", "eval", dont_inherit=True), space)  # noqa: S307 - in the sandbox
            else:
                exec(compile(source, "<test>", "exec", dont_inherit=True), space)  # noqa: S102 - in the sandbox
                value = True
            result = {"value": encode(value, _kind)}
        except BaseException as error:  # noqa: BLE001 - any exception of a test is its result
            result = {"raised": f"{type(error).__name__}: {error}"[:200]}
        line = f"{index} {json.dumps(result)}\n".encode()
        while line:
            line = line[os.write(results, line) :]


def _kind(value: Any) -> dict[str, str]:
    return {"other": value._kind if isinstance(value, Far) else type(value).__name__}


def _module(name: str, code: list[str]) -> ModuleType:
    module = ModuleType(name)
    sys.modules[name] = module
    for part in code:
        # Not under the `from __future__` of this file.
        compiled = compile(part, "<answer>", "exec", dont_inherit=True)
        exec(compiled, module.__dict__)  # noqa: S102 - in the sandbox, which is made for it
    return module
