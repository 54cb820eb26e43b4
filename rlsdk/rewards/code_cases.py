"""Convert tests of coding tasks, in the formats that data sets use, to sandbox runs, and compare their results."""

from __future__ import annotations

import ast
import builtins
import json
import math
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs

from rlsdk.errors import DataError
from rlsdk.isolation.sandbox import SandboxResult, SandboxRun
from rlsdk.isolation.sandboxed.border import encode
from rlsdk.isolation.sandboxed.play import Step
from rlsdk.types import Task

FORMS = (
    "asserts as text or a list of them, a list of {input, output}, {inputs, outputs}, or {fn_name, inputs, outputs}, "
    "each also as JSON"
)
_UNITTEST = """\
_result = __import__("unittest").TestResult()
__import__("unittest").defaultTestLoader.loadTestsFromName({name!r}, __import__("sys").modules["tests"]).run(_result)
for _, _text in [*_result.errors, *_result.failures]:
    raise AssertionError(_text.strip().rpartition("\\n")[2])
"""
"""Source of a test that runs one method of a `TestCase`."""
_MAX_MESSAGE = 200
"""Maximum characters of a message from tested code."""


class BadTestsError(ValueError):
    """The tests of a task cannot be used; the message says why."""


Verdicts = list[str]
"""One text per test: empty if it passed, otherwise why it failed."""


@attrs.frozen
class Cases:
    """Tests of one task.

    Attributes:
        runs: Sandbox runs.
        count: Number of tests.
        judge: Computes the verdicts from the results of the runs; the last runs may be missing.
        imports: Python source that makes the tests' imports available to the answer.
    """

    runs: Sequence[SandboxRun]
    count: int
    judge: Callable[[Sequence[SandboxResult]], Verdicts]
    imports: str = ""


def cases_of(task: Task, tolerance: float | None) -> Cases:
    """Parse the tests of a task; without a tolerance, numbers are compared exactly.

    Raises:
        DataError: The answer has none of the accepted forms, or contains no test.
    """
    try:
        answer = task.answer
        if isinstance(answer, str) and answer.lstrip()[:1] in ("{", "["):
            answer = json.loads(answer)
        return _cases(answer, tolerance)
    except (BadTestsError, SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        of = f" of {task.source!r}" if task.source else ""
        raise DataError(
            f"task {task.id!r}{of}: expected tests as its answer ({FORMS}), got {reprlib.repr(task.answer)}: {error}"
        ) from error


def _cases(answer: Any, tolerance: float | None) -> Cases:
    if isinstance(answer, str):
        return _statements(answer, tolerance)
    if isinstance(answer, Mapping):
        inputs, outputs = _list(answer, "inputs"), _list(answer, "outputs")
        if len(inputs) != len(outputs) or not inputs:
            raise BadTestsError(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
        name = answer.get("fn_name")
        return _calls(name, inputs, outputs, tolerance) if name else _programs(inputs, outputs, tolerance)
    listed = list(answer) if isinstance(answer, Sequence) else []
    if listed and all(isinstance(each, str) for each in listed):
        return _statements("\n".join(listed), tolerance)
    if listed and all(isinstance(each, Mapping) and {"input", "output"} <= set(each) for each in listed):
        return _programs([each["input"] for each in listed], [each["output"] for each in listed], tolerance)
    raise BadTestsError("it has none of these forms")


def _list(answer: Mapping[str, Any], name: str) -> list[Any]:
    value = answer.get(name)
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise BadTestsError(f"expected a list as {name}, got {reprlib.repr(value)}")
    return list(value)


def _programs(inputs: Sequence[Any], outputs: Sequence[Any], tolerance: float | None) -> Cases:
    """Return tests of programs that read standard input; each test is a separate process."""
    expected = [_text(each) for each in outputs]
    runs = [SandboxRun(input=_text(each).encode("utf-8", "surrogateescape")) for each in inputs]

    def verdict(ran: SandboxResult, wanted: str) -> str:
        if ran.stopped or ran.status:
            return _ended(ran)
        given = ran.output.decode("utf-8", "replace")
        return "" if same_text(given, wanted, tolerance) else f"it printed {reprlib.repr(given)}"

    def judge(ran: Sequence[SandboxResult]) -> Verdicts:
        found = [verdict(*pair) for pair in zip(ran, expected, strict=False)]
        return found + ["there was no time left"] * (len(expected) - len(found))

    return Cases(runs, len(runs), judge)


def _text(value: Any) -> str:
    """Return text, given as such or as a list of lines."""
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(each, str) for each in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise BadTestsError(f"expected text that is read or written, got {reprlib.repr(value)}")
    return value


def _ended(ran: SandboxResult) -> str:
    """Describe how a process failed."""
    if ran.stopped == "time":
        return "it ran out of time"
    if ran.stopped == "output":
        return "it printed too much"
    if ran.status == 0:
        return "it ended before the test was done"
    message = ran.errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
    how = f"signal {-ran.status}" if ran.status and ran.status < 0 else f"exit status {ran.status}"
    return f"{how}: {brief(message)}" if message else how


def brief(text: str) -> str:
    """Return the beginning of a message from tested code, without control characters."""
    return "".join(c if c.isprintable() else " " for c in text[:_MAX_MESSAGE])


def _calls(name: Any, inputs: Sequence[Any], outputs: Sequence[Any], tolerance: float | None) -> Cases:
    """Return tests that call one function, all in one process."""
    if not isinstance(name, str) or not name.isidentifier():
        raise BadTestsError(f"expected the name of a function as fn_name, got {name!r}")
    steps: list[Step] = [("call", name, _arguments(each)) for each in inputs]

    def right(value: Any, expected: Any) -> bool:
        if same_value(value, expected, tolerance, as_json=True):
            return True
        # Data sets derived from APPS wrap some results in one-item lists.
        return (
            isinstance(expected, list)
            and len(expected) == 1
            and same_value(value, expected[0], tolerance, as_json=True)
        )

    wanted = [json.loads(each) if isinstance(given, str) else each for given, each in zip(inputs, outputs, strict=True)]
    return _stepped(SandboxRun(steps=steps), dict(enumerate(wanted)), right)


def _arguments(given: Any) -> list[Any]:
    """Return arguments, given as a list or as text with one JSON value per line."""
    if isinstance(given, str):
        return [json.loads(line) for line in given.split("\n") if line.strip()]
    if not isinstance(given, Sequence):
        raise BadTestsError(f"expected the arguments of a call as a list, got {reprlib.repr(given)}")
    return json.loads(json.dumps(list(given)))  # type: ignore[no-any-return]  # plain lists and mappings


def _statements(text: str, tolerance: float | None) -> Cases:
    """Return tests written in Python: asserts, calls of functions that assert, and helpers, all in one process.

    They run in a process separate from the answer's code; the literal in `assert EXPRESSION == LITERAL` never enters
    the sandbox.
    """
    steps: list[Step] = []
    expected: dict[int, Any] = {}
    tree = ast.parse(text)
    methods = _unittest_methods(tree)
    if not methods and not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise BadTestsError("it asserts nothing")
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    checks = {f.name for f in functions if any(isinstance(node, ast.Assert) for node in ast.walk(f))}
    for statement in tree.body:
        if methods and ast.unparse(statement).startswith("unittest.main("):  # it would look for them in a program
            continue
        if isinstance(statement, ast.Assert):
            expression, expected[len(steps)] = _comparison(statement.test)
            steps.append(("value", expression, None))
        elif (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)) or _asserts(statement, checks):
            expected[len(steps)] = True
            steps.append(("test", ast.unparse(statement), None))
        else:
            steps.append(("run", ast.unparse(statement), None))
    for name in methods:
        expected[len(steps)] = True
        steps.append(("test", _UNITTEST.format(name=name), None))
    if not expected:
        raise BadTestsError("no statement at its top level asserts, or calls something that does")
    run = SandboxRun(steps=steps, names=_asked(tree))
    cases = _stepped(run, expected, lambda value, wanted: same_value(value, wanted, tolerance, as_json=False))
    # The answer may rely on the tests' imports; a failed import is ignored until it is used.
    found = [each for each in tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
    texts = [ast.unparse(each) for each in found if getattr(each, "module", "") != "__future__"]
    imports = "\n".join(f"try:\n    {text}\nexcept ImportError:\n    pass" for text in texts)
    return attrs.evolve(cases, imports=imports)


def _unittest_methods(tree: ast.Module) -> list[str]:
    """Return `CLASS.METHOD` of each test method of the test cases of `unittest`."""
    cases, found = {"TestCase", "unittest.TestCase", "unittest.IsolatedAsyncioTestCase"}, []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not cases.isdisjoint(map(ast.unparse, node.bases)):
            cases.add(node.name)
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            found += [f"{node.name}.{method.name}" for method in methods if method.name.startswith("test")]
    return found


def _asserts(node: ast.AST, checks: Collection[str]) -> bool:
    """Return True if code asserts when it runs, itself or by calling one of the functions `checks`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return False
    if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):  # tests are a module, not a program
        return False
    if isinstance(node, ast.Assert) or (isinstance(node, ast.Call) and getattr(node.func, "id", "") in checks):
        return True
    return any(_asserts(child, checks) for child in ast.iter_child_nodes(node))


def _asked(tree: ast.AST) -> list[str]:
    """Return the names that the tests read and the answer may define.

    Builtins are Python's, even if the answer redefines them, unless the tests read no other unbound name: then they
    test a function named like a builtin.
    """
    nodes = list(ast.walk(tree))
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)}
    bound |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    theirs = read - vars(builtins).keys()
    return sorted(theirs if theirs - bound else read)


def _comparison(test: ast.expr) -> tuple[str, Any]:
    """Split a test into the expression to evaluate and its expected value: `EXPRESSION == LITERAL`, or else true."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        for one, other in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
            try:
                return ast.unparse(one), ast.literal_eval(other)
            except (ValueError, TypeError):  # not a literal
                continue
    return f"bool({ast.unparse(test)})", True


def _stepped(run: SandboxRun, expected: dict[int, Any], right: Callable[[Any, Any], bool]) -> Cases:
    def judge(ran: Sequence[SandboxResult]) -> Verdicts:
        found = _results(ran[0]) if ran else {}
        unreported = _ended(ran[0]) if ran else "there was no time left"
        return [_result(found.get(i), wanted, right, unreported) for i, wanted in expected.items()]

    return Cases([run], len(expected), judge)


def _results(ran: SandboxResult) -> dict[int, dict[str, Any]]:
    """Return the results of the tests' process, by step."""
    found: dict[int, dict[str, Any]] = {}
    for line in ran.output.decode("utf-8", "replace").split("\n"):
        index, _, content = line.partition(" ")
        try:
            found[int(index)] = json.loads(content)
        except (ValueError, RecursionError):  # a truncated line, and the empty one at the end
            continue
    return found


def _result(found: dict[str, Any] | None, wanted: Any, right: Callable[[Any, Any], bool], unreported: str) -> str:
    if found is None:
        return f"there is no result: {unreported}"
    if "value" not in found:
        return brief(str(found.get("raised")))
    try:
        if right(found["value"], wanted):
            return ""
    except (TypeError, ValueError, RecursionError):  # not a result of `encode`
        pass
    return f"it gave {brief(reprlib.repr(found['value']))}"


_LONGEST_NUMBER = 64
"""Characters of a word that may be read as a number."""


def same_text(given: str, expected: str, tolerance: float | None) -> bool:
    """Compare two outputs line by line and word by word; runs of spaces count as one, and blank lines are ignored.

    Args:
        given: Output of a program.
        expected: Expected output.
        tolerance: Allowed difference of words that are numbers: absolute below 1, relative above.
    """
    ours, theirs = _words(given), _words(expected)
    if ours == theirs:
        return True
    if tolerance is None or list(map(len, ours)) != list(map(len, theirs)):
        return False
    pairs = ((a, b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True))
    return all(a == b or _near(_number(a), _number(b), tolerance) for a, b in pairs)


def _words(text: str) -> list[list[str]]:
    return [words for line in text.splitlines() if (words := line.split())]


def _number(word: str) -> float | None:
    if len(word) > _LONGEST_NUMBER or not word.isascii() or "_" in word:
        return None
    try:
        return float(word)
    except ValueError:
        return None


def _near(a: float | None, b: float | None, tolerance: float) -> bool:
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return False
    return abs(a - b) <= tolerance * max(1.0, abs(b))


def same_value(given: Any, expected: Any, tolerance: float | None, *, as_json: bool) -> bool:
    """Compare a result with an expected value; numbers are equal across their types, as in Python.

    Args:
        given: Result of `encode`, passed through JSON.
        expected: Expected Python value.
        tolerance: Allowed difference of numbers: absolute below 1, relative above.
        as_json: True if the expected value comes from JSON, which has no tuples and only text keys in mappings.
    """
    return _CodeComparison(tolerance, as_json).same(given, encode(expected))


class _CodeComparison:
    def __init__(self, tolerance: float | None, as_json: bool) -> None:
        self._tolerance, self._as_json = tolerance, as_json

    def same(self, a: Any, b: Any) -> bool:
        if isinstance(a, dict) and isinstance(b, dict):
            return self._same_held(a, b)
        if isinstance(a, bool | int | float) and isinstance(b, bool | int | float):
            return a == b or self._near_numbers(a, b)
        return type(a) is type(b) and not isinstance(a, list) and bool(a == b)

    def _near_numbers(self, a: float, b: float) -> bool:
        try:
            return self._tolerance is not None and _near(float(a), float(b), self._tolerance)
        except OverflowError:  # an integer too large for a float
            return False

    def _same_held(self, a: dict[str, Any], b: dict[str, Any]) -> bool:
        if len(a) != 1:
            return False
        ((kind, ours),), ((wanted, theirs),) = a.items(), b.items()
        if self._as_json and kind == "tuple":
            kind = "list"
        if kind != wanted or kind == "other" or type(ours) is not type(theirs):
            return False
        if kind in ("list", "tuple"):
            return len(ours) == len(theirs) and all(map(self.same, ours, theirs))
        if kind == "set":
            return {self._key(each) for each in ours} == {self._key(each) for each in theirs}
        if kind == "dict":
            mine, others = self._by_key(ours), self._by_key(theirs)
            return mine.keys() == others.keys() and all(self.same(mine[key], others[key]) for key in mine)
        return bool(ours == theirs)

    def _by_key(self, pairs: list[Any]) -> dict[str, Any]:
        return {self._key(key): value for key, value in pairs}

    def _key(self, value: Any) -> str:
        """Return a text that is the same for equal keys."""
        if self._as_json and isinstance(value, bool | int | float | None):
            value = json.dumps(value)
        return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """Return a value with equal numbers (1, 1.0 and True) written the same way."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return {name: _plain(each) for name, each in value.items()} if isinstance(value, dict) else value
