"""code_tests: forms of tests, comparison, verdicts that tested code cannot forge, and confinement."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlsdk
from rlsdk.errors import DataError, OptionError
from rlsdk.isolation import sandbox
from rlsdk.isolation.sandboxed.border import encode
from rlsdk.rewards.code_cases import same_text, same_value
from rlsdk.rewards.code_tests import last_block
from rlsdk.testing.conformance import checks

MISSING = sandbox.missing()
isolated = pytest.mark.skipif(bool(MISSING), reason=f"this machine isolates nothing: {MISSING}")
WAYS = [pytest.param("namespaces", marks=isolated), "none"]
DOUBLE = [{"input": "2\n", "output": "4"}, {"input": "3\n", "output": "6\n"}]


def fenced(code):
    return f"Like this:\n\n```python\n{textwrap.dedent(code)}\n```\nDone."


PATIENT = 30.0
"""Seconds for code that ends by itself: on a busy machine, even two seconds of work can take that long."""


def judge(code, answer, text=None, isolation="namespaces", timeout=PATIENT, **options):
    reward = rlsdk.load("reward", "code_tests", isolation=isolation, timeout=timeout, **options)
    return reward(rlsdk.Rollout.from_text(rlsdk.Task("t", "?", answer), text or fenced(code)))


ADD = "def add(a, b): return a + b"
DEEP = "x, y = [], []\nfor _ in range(10**5): x, y = [x], [y]"
SOLUTION = "class Solution:\n    def add(self, a, b): return (a, b)"


@pytest.mark.parametrize("isolation", WAYS)
@pytest.mark.parametrize(
    ("code", "answer"),
    [
        (ADD, "assert add(1, 2) == 3\nassert 0 == add(0, 0)\nassert add(1, 1) > 1"),
        (ADD, ["assert add(1, 2) == 3", "assert not add(1, -1)"]),
        (ADD, "import math\ndef check(f):\n    assert f(1, 2) == math.floor(3.5)\ncheck(add)"),
        (ADD, "try: add('1', 2)\nexcept TypeError: pass\nelse: assert False\nfor i in range(3): assert add(i, 1) > i"),
        (ADD, {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]}),
        (ADD, {"fn_name": "add", "inputs": ["1\n2", '"a"\n"b"'], "outputs": ["3", '"ab"']}),
        (ADD, json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]})),  # as APPS has it
        (
            "class Solution:\n    def add(self, a, b): return (a, b)",
            {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[1, 2]]},
        ),
        ("def f(x): return {1: {x}, 'a': b'b'}", "assert f(2) == {'a': b'b', 1: {2}}"),
        ("def f(x): return {1: x}", {"fn_name": "f", "inputs": [[None]], "outputs": [{"1": None}]}),
        ("def f(x): return 10 ** x", f"assert f(5000) == 10 ** 5000\nassert f(4999) == {hex(10**4999)}"),
        ("print(2 * int(input()))", DOUBLE),
        ("print(2 * int(input()))", json.dumps(DOUBLE)),
        ("import sys\nprint(2 * int(sys.stdin.read()))\nexit()", {"inputs": ["2", "3"], "outputs": ["4", "6"]}),
        ("a, b = input(), input()\nprint(b)\nprint(a)", [{"input": ["1", "2"], "output": ["2", "1"]}]),
        ("if __name__ == '__main__': print('é', input())", [{"input": "ß", "output": "é  ß \n\n"}]),
        ("import threading\nthreading.Thread(target=lambda: print(2 * int(input()))).start()", DOUBLE),
        ("import atexit\natexit.register(lambda: print(2 * int(input())))", DOUBLE),
        ("from __future__ import annotations\nprint(2 * int(input()))", DOUBLE),
    ],
)
def test_right_code_passes(code, answer, isolation):
    score = judge(code, answer, isolation=isolation, prelude="import itertools")
    assert (score.value, score.valid, score.reason) == (1.0, True, "")
    assert score.metrics == {"passed": 1.0, "correct": 1.0, "format": 1.0}


@isolated
@pytest.mark.parametrize(
    ("code", "answer", "share", "reason"),
    [
        (ADD, "assert add(1, 2) == 3\nassert add(1, 2) == 4", 0.5, "1 of 2 tests failed; test 2: it gave 3"),
        (ADD, "assert add(1, 2) == (3,)\nassert add(1, 2) > 3", 0.0, "2 of 2 tests failed; test 1: it gave 3"),
        (ADD, "assert add(1) == 3", 0.0, "TypeError: add() missing"),
        (ADD, "assert sub(1, 2) == 3", 0.0, "NameError: name 'sub'"),
        (ADD, {"fn_name": "sub", "inputs": [[1, 2]], "outputs": [3]}, 0.0, "no function 'sub'"),
        (ADD, "assert add(1, 2) == 3\nfor i in range(3): assert add(i, i) == i", 0.5, "test 2: AssertionError"),
        (ADD, "def check(n):\n    assert add(n, n) == n\nfor i in range(3): check(i)", 0.0, "1 of 1 tests failed"),
        (ADD, "try:\n    add(1, 2)\n    assert 0\nexcept ValueError: pass\nassert add(1, 2) == 3", 0.5, "Assertion"),
        ("def f(): return (1, 2)", "assert f() == [1, 2]", 0.0, "it gave {'tuple': [1, 2]}"),
        ("def f(): return '3'", {"fn_name": "f", "inputs": [[]], "outputs": [3]}, 0.0, "it gave '3'"),
        ("print(int(input()) + 2)", DOUBLE, 0.5, "1 of 2 tests failed; test 2: it printed '5\\n'"),
        ("print(4)\nraise SystemExit(3)", DOUBLE, 0.0, "exit status 3"),
        ("print(4)\nraise SystemExit('enough')", DOUBLE, 0.0, "exit status 1: enough"),
        ("import atexit\natexit.register(lambda: print(5))\nprint(4)", DOUBLE, 0.0, "it printed '4\\n5\\n'"),
        ("import sys\nsys.stdout.close()", DOUBLE, 0.0, "exit status 120: ValueError: I/O operation on closed file"),
        ("print(4)\n1 / 0", DOUBLE, 0.0, "ZeroDivisionError: division by zero"),
        ("print(4", DOUBLE, 0.0, "SyntaxError: '(' was never closed"),
        ("", DOUBLE, 0.0, "it printed ''"),
    ],
)
def test_wrong_code_fails(code, answer, share, reason):
    score = judge(code, answer)
    assert (score.value, score.valid, score.metrics["correct"]) == (share, True, 0.0)
    assert reason in score.reason


CASES = """
import unittest

class Adds(unittest.TestCase):
    def setUp(self): self.one = 1
    def test_sum(self): self.assertEqual(add(self.one, 2), 3)
    def test_more(self):
        with self.assertRaises(TypeError): add(self.one, "2")

class Others(Adds):
    def test_text(self): assert add("a", "b") == "ba", "the order"
"""


@pytest.mark.parametrize("end", ["", "unittest.main()", "if __name__ == '__main__':\n    unittest.main()"])
def test_test_cases_of_unittest_are_run_method_by_method(end):
    score = judge(ADD, CASES + end, isolation="none")
    assert score.value == pytest.approx(2 / 3)
    assert score.reason.startswith("1 of 3 tests failed; test 3: AssertionError: AssertionError: ")


@isolated
def test_all_or_nothing():
    answer = "assert add(1, 2) == 3\nassert add(1, 2) == 4"
    score = judge(ADD, answer, all_or_nothing=True)
    assert (score.value, score.metrics["passed"]) == (0.0, 0.5)


@isolated
def test_tolerance():
    near = "print(1 / 3)"
    answer = [{"input": "", "output": "0.333333"}]
    assert judge(near, answer).value == 0.0
    assert judge(near, answer, tolerance=1e-5).value == 1.0
    assert judge("def f(): return 1 / 3", "assert f() == 0.333333", tolerance=1e-5).value == 1.0


@isolated
def test_arrays_go_to_an_answer_and_are_compared():
    code = "import numpy as np\ndef f(n): return np.arange(n)\ndef g(a): return a.sum()"
    answer = "import numpy as np\nwant = 6\nassert g(np.arange(4)) == want\nassert np.allclose(f(3), np.arange(3))"
    score = judge(code, answer, packages=True)
    assert (score.value, score.reason) == (1.0, "")


@isolated
def test_packages_on_request():
    code = "import attrs\ndef f(): return attrs.__name__"
    assert "No module named 'attrs'" in judge(code, "assert f() == 'attrs'").reason
    assert judge(code, "assert f() == 'attrs'", packages=True).value == 1.0


@pytest.mark.parametrize(
    ("text", "where", "found"),
    [
        ("no code", "fence", None),
        ("```python\nx = 1\n", "fence", None),  # cut off
        ("```js\nx\n```", "fence", None),
        ("```py\na\n```\n```Python3\nb\n```\n```\nc\n```", "fence", "b"),
        ("  ```python title='x'\n  a\n  ```", "fence", "  a"),
        ("```text\n```python\n```\n", "fence", None),
        ("<answer>a</answer>", "answer", "a"),
        ("<answer>\n```python\na\n```\n</answer>", "answer", "a"),
        ("```python\na\n```", "answer", None),
    ],
)
def test_where_code_is_looked_for(text, where, found):
    from rlsdk.rewards.code_tests import answered

    assert answered(rlsdk.Rollout.from_text(rlsdk.Task("t", "?"), text), where) == found


def test_without_code_nothing_runs():
    score = judge("", "assert f()", text="I do not know.", isolation="none")
    assert (score.value, score.valid, score.metrics["format"]) == (0.0, True, 0.0)
    assert "there is no block fenced as ```python" in score.reason
    score = judge("", "assert f()", text="```python\n" + "#" * 300_000 + "\n```", isolation="none")
    assert (score.value, score.metrics["format"]) == (0.0, 1.0)
    assert "characters, more than" in score.reason


def test_many_fences_take_no_time():
    started = time.process_time()
    for text in (
        "```" * 300_000,
        "```" + " " * 500_000 + "`",
        "```\n" * 200_000,
        "```" + "a" * 10**6 + "`",
        "\n" * 10**6,
    ):
        assert last_block(text) is None
    assert time.process_time() - started < 3


@pytest.mark.parametrize(
    "answer",
    [
        None, 42, "42", "x = 1", "def f():\n    assert True", "assert", "if __name__ == '__main__':\n    assert 1", [],
        ["a", 1], [{"input": "1"}], {},
        {"inputs": ["1"], "outputs": []}, {"inputs": "1", "outputs": "1"}, {"inputs": [1], "outputs": ["1"]},
        {"fn_name": "a b", "inputs": [[1]], "outputs": [1]}, {"fn_name": "f", "inputs": [1], "outputs": [1]},
        "[1", "assert " + "(" * 10_000, "assert f() == '\ud800'",
    ],
)  # fmt: skip
def test_a_task_without_tests_is_named(answer):
    with pytest.raises(DataError, match="task 't': expected tests as its answer"):
        judge("x", answer, isolation="none")


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"timeout": 0.0}, "timeout: expected float > 0, got 0.0"),
        ({"tolerance": -1.0}, "tolerance must be a number of at least 0"),
        ({"limits": {"memory": 0}}, "memory is 0"),
        ({"limits": {"ram": 1}}, "unknown key 'ram'"),
        ({"isolation": "docker"}, "expected 'namespaces' | 'none'"),
        ({"prelude": "x ="}, "a program of one line fails with: SyntaxError: invalid syntax"),
        ({"prelude": "import attrs"}, "No module named 'attrs'"),
        ({"limits": {"memory": 1}}, "with this prelude and these limits a program of one line fails"),
    ],
)
def test_options_that_cannot_work(options, fault):
    with pytest.raises(OptionError, match=fault.replace("|", r"\|")):
        rlsdk.load("reward", "code_tests", **{"isolation": "none", **options})


# What it compares.


@pytest.mark.parametrize(
    ("given", "expected", "tolerance", "same"),
    [
        ("1 2\n3", "1  2 \r\n\n3\n\n", None, True),
        ("1 2 3", "1 2\n3", None, False),
        ("1.0", "1", None, False),
        ("1.0", "1", 0.0, True),
        ("1000001", "1000000", 1e-5, True),
        ("nan", "nan", 1e-5, True),  # the same word
        ("nan", "1", 1e9, False),
        ("inf", "1", 1e9, False),
        ("1_0", "11", 0.5, False),
        ("9" * 10**6, "1", 1.0, False),
        ("a 1", "a", 1.0, False),
    ],
)
def test_outputs(given, expected, tolerance, same):
    assert same_text(given, expected, tolerance) is same


ATOMS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
WORDS = st.text(max_size=3)
PLAIN = st.recursive(
    ATOMS | st.binary(max_size=3),
    lambda each: st.lists(each, max_size=3) | st.tuples(each, each) | st.dictionaries(WORDS, each, max_size=3),
    max_leaves=8,
)
TAGS = st.sampled_from(["list", "dict", "set", "bytes", "x"])
JSON = st.recursive(ATOMS, lambda each: st.lists(each, max_size=4) | st.dictionaries(TAGS, each, max_size=2))


@given(PLAIN, PLAIN)
def test_values_are_equal_where_python_says_so(a, b):
    def through(value):
        return json.loads(json.dumps(encode(value)))

    assert same_value(through(a), a, None, as_json=False)
    assert same_value(through(b), a, None, as_json=False) is (a == b)


@given(JSON, PLAIN)
def test_any_json_is_compared_or_refused(given_, expected):
    """Output of the sandbox may be any JSON."""
    from rlsdk.rewards.code_cases import _result

    found = _result({"value": given_}, expected, lambda a, b: same_value(a, b, 1e-6, as_json=True), "")
    assert isinstance(found, str)


@pytest.mark.parametrize(
    ("value", "expected", "as_json", "same"),
    [
        (True, 1, False, True),
        ({1.0: "a"}, {True: "a"}, False, True),
        ({1, 2.0}, {2, 1}, False, True),
        ((1, [2]), [1, [2]], True, True),
        ({1: 2}, {"1": 2}, True, True),
        ({1: 2}, {"1": 2}, False, False),
        (object(), None, True, False),
        (float("nan"), float("nan"), False, False),
        (1, "1", True, False),
        ([2**20_000], [2**20_000], False, True),
        ([2**20_000], [2**20_000 + 1], False, False),
    ],
    ids=itertools.count(),
)
def test_values(value, expected, as_json, same):
    assert same_value(json.loads(json.dumps(encode(value))), expected, None, as_json=as_json) is same


# What tested code may try to pass.


@isolated
@pytest.mark.parametrize(
    "code",
    [
        "exit(0)",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "raise KeyboardInterrupt",
        "def f(x): raise SystemExit(0)",
        "import os\ndef f(x): os._exit(0)",
        "class E:\n    __eq__ = __ne__ = __gt__ = lambda s, o: True\n    __bool__ = None\ndef f(x): return E()",
        "class I(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\ndef f(x): return I(7)",
        "import builtins\nbuiltins.isinstance = lambda *a: True\ndef f(x): return 7",
        "import json\njson.dumps = lambda *a, **k: '{\"value\": null}'\ndef f(x): return 7",
        "import os\nfor i in range(3): os.write(3, b'0000000000000000 %d {\"value\": 2}\\n' % i)\nos._exit(0)",
        "import os\nfor i in range(9):\n  try: os.write(i, b'run 0 0 0\\n' * 9)\n  except OSError: pass\nos._exit(0)",
        "import os\nfor i in range(99):\n    try: os.close(i)\n    except OSError: pass\ndef f(x): return 2",
        # It reads the token in the frames of what runs it: it can write lines, but not know what is compared with.
        """
        import os, sys
        def f(x):
            frame = sys._getframe()
            while frame:
                if 'token' in frame.f_locals:
                    for i in range(9):
                        os.write(3, f'{frame.f_locals["token"]} {i} {{"value": true}}\\n'.encode())
                frame = frame.f_back
            os._exit(0)
        """,
    ],
)
def test_a_verdict_cannot_be_forged(code):
    score = judge(code, "assert f(1) == 2\nassert f(2) == 3")
    assert (score.value, score.valid) == (0.0, True)
    assert score.reason


ALWAYS_EQUAL = """
class E:
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda self, other: True
    __sub__ = __rsub__ = __add__ = __abs__ = __getitem__ = lambda self, *other: self
    __hash__ = lambda self: 7
    __float__ = lambda self: 7.0
    __iter__ = lambda self: iter([self])
def f(x): return E()
"""
PATCHED = """
import builtins, math
class Equal:
    def __init__(self, *given): pass
    __eq__ = lambda self, other: True
set = sorted = builtins.set = builtins.sorted = Equal
builtins.abs = abs = lambda x: 0
math.isclose = isclose = lambda *a, **k: True
def f(x): return 0
"""
FRAMES = """
import gc, os, sys
def f(x):
    frame = sys._getframe()
    while frame:
        for names in (frame.f_locals, frame.f_globals):
            if 'want' in names: return names['want']
            for fd in range(9):
                try: os.write(fd, b'0 {"value": true}\\n' * ('results' in names))
                except OSError: pass
        frame = frame.f_back
    return next((each['want'] for each in gc.get_objects() if type(each) is dict and 'want' in each), 0)
"""
HIJACKED = """
import rlsdk.isolation.sandboxed.border as border
names = {"abs": 1, "sorted": 1, "want": 0, "f": {"far": [0, "function"]}, "math": {"far": [1, "module"]}}
def reply(self, do, *rest):
    return {"value": {"dict": list(map(list, names.items()))} if do == "names" else 0, "changed": []}
border.Answer._reply = reply
"""


@isolated
@pytest.mark.parametrize(
    "code", [ALWAYS_EQUAL, PATCHED, FRAMES, HIJACKED], ids=["equal", "patched", "frames", "hijacked"]
)
@pytest.mark.parametrize(
    "answer",
    [
        "def check(candidate):\n    assert candidate(2) == 7\ncheck(f)",
        "want = 7\nassert f(2) == want\nassert want == f(3)",
        "want = 7.0\nassert abs(f(2) - want) < 1e-6",
        "import math\nwant = 7.0\nassert math.isclose(f(2), want)",
        "want = [7]\nassert set([f(2)]) == set(want)\nassert sorted([f(2)]) == want",
        "assert all(map(lambda x: f(x) == 7, [1, 2]))",
    ],
)
def test_tests_judge_plain_data_alone(code, answer):
    """The tests run where nothing of the model's does, and no object of its making takes part in a comparison."""
    score = judge(code, answer)
    assert (score.value, score.valid) == (0.0, True)


@isolated
def test_an_answer_cannot_end_the_loops_of_tests():
    score = judge("def f(x): raise StopIteration", "assert all(map(lambda x: f(x) == 7, [1, 2]))")
    assert score.value == 0.0
    assert "StopIteration" in score.reason


STACK = """
class Stack:
    def __init__(self, *held): self.held = list(held)
    def push(self, value):
        self.held.append(value)
        return self
    def __len__(self): return len(self.held)
    def __str__(self): return f'Stack{self.held}'
"""
STACKED = """
s = Stack(1)
assert s.push(2).push(3) and len(s) == 3 and str(s) == 'Stack[1, 2, 3]'
assert s.held == [1, 2, 3] and s is s.push(4) and not hasattr(s, 'pop')
s.held = []
assert not s
"""
RAISES = """
def check():
    for given, kind in ((1, ValueError), (0, KeyError)):
        try:
            f(given)
        except kind as error:
            assert 'no' in error.args[0]
        else:
            raise AssertionError
check()
"""
CALLED_BACK = """
calls = []
def third():
    calls.append(1)
    if len(calls) < 3: raise ValueError('not yet')
    return inc(6)
assert retry(third) == 7 and len(calls) == 3
assert each(lambda x: inc(x) + 1, [1, 2]) == [3, 4] and each(len, ['a']) == [1]
"""


@pytest.mark.parametrize("isolation", WAYS)
@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("def f(xs): xs.sort()", "given = [3, 1, 2]\nf(given)\nassert given == [1, 2, 3]"),
        ("def sum(a, b): return a + b", "assert sum(1, 2) == 3\nassert sum(1, 2) > 2"),
        (
            "def f(n):\n    while True:\n        yield n",
            "from itertools import islice\nassert list(islice(f(2), 2)) == [2, 2]",
        ),
        ("def f(): yield 1", "found = f()\nassert next(found) == 1\nassert next(found, 0) == 0"),
        (STACK, STACKED),
        ("class B(ValueError): pass\ndef f(x):\n    if x: raise B('no')\n    raise KeyError('no')", RAISES),
        (
            "def inc(x): return x + 1\ndef each(g, xs): return [g(x) for x in xs]\ndef retry(g):\n"
            "    for _ in range(5):\n        try: return g()\n        except ValueError: pass",
            CALLED_BACK,
        ),
        ("def f(x): return math.floor(x)", "import math, missing\nimport math\nassert f(2.5) == 2"),
        ("def f(x): return x * 2", "from decimal import Decimal\nassert str(f(Decimal('1.5'))) == '3.0'"),
        ("def f(x): return x * 2", "from decimal import Decimal as D\nwant = D('3')\nassert f(D('1.5')) == want"),
        ("def f(x): return x / 2", "from fractions import Fraction as F\nwant = F(1, 6)\nassert f(F(1, 3)) == want"),
        (
            "from datetime import date, datetime\ndef f(): return [date(2024, 2, 29), datetime(2024, 2, 29, 1)]",
            "import datetime as d\nwant = [d.date(2024, 2, 29), d.datetime(2024, 2, 29, 1)]\nassert f() == want",
        ),
        (
            "import math\nTAU = 2 * math.pi\ndef f(*, do, self, function): return TAU * do",
            "assert math.isclose(f(do=1, self=2, function=3), TAU)",
        ),
    ],
)  # fmt: skip
def test_what_tests_may_do_with_an_answer(code, answer, isolation):
    score = judge(code, answer, isolation=isolation)
    assert (score.value, score.reason) == (1.0, "")


# What may happen to the machine.


STACK_OVERFLOW = "signal 11" if sys.version_info < (3, 12) else "RecursionError"


@isolated
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("while True: pass", "it ran out of time"),
        ("import time\ntime.sleep(99)", "it ran out of time"),
        ("x = [0] * 10**10", "MemoryError"),
        ("x = []\nwhile True: x.append('a' * 10**6)", "MemoryError"),
        ("while True: print('x' * 10**5)", "it printed too much"),
        ("with open('f', 'w') as f:\n    while True: f.write('x' * 10**6)", "File too large"),
        ("for i in range(99):\n    with open(f'{i}', 'w') as f: f.write('x' * 10**7)", "No space left on device"),
        ("for i in range(10**5): open(f'{i}', 'w').close()", "No space left on device"),
        ("x = [open('/dev/null') for _ in range(999)]", "Too many open files"),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "it ran out of time"),
        ("import os\nwhile True: os.fork()", "status 1"),  # many write at once: whose last line it is, nobody knows
        ("from threading import *\nfor _ in range(99): Timer(9, print).start()", "it ran out of time"),
        ("import os, signal\nos.kill(1, 9); os.kill(-1, 9)", "No such process"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
        ("import ctypes\nctypes.string_at(0)", "signal 11"),
        ("def f(): f()\nf()", "RecursionError"),
        (f"import sys\nsys.setrecursionlimit(10**9)\n{DEEP}\nx == y", STACK_OVERFLOW),
        ("(" * 100_000, "too many nested parentheses"),
        ("x = " + "-" * 100_000 + "1", "exit status 1"),
        ("a\0b", "null bytes"),
        ("x = '\ud800'\nprint(x)", "surrogates not allowed"),
        ("a b " * 20_000, "exit status 1"),
        ("import socket\nsocket.create_connection(('1.1.1.1', 80), 1)", "Network is unreachable"),
        ("import socket\nsocket.socket(40).connect((2, 1024))", "Operation not permitted"),
        ("open('/etc/passwd')", "No such file or directory"),
        ("open('/proc/1/environ')", "No such file or directory"),
        ("import os\nos.setuid(0)", "exit status 1"),
        ("import os\nos.chroot('.')", "Operation not permitted"),
        ("import subprocess\nsubprocess.run(['/bin/sh', '-c', 'true'])", "No such file or directory"),
    ],
)  # fmt: skip
def test_hostile_code_is_a_wrong_answer_and_the_next_call_works(code, reason):
    started = time.monotonic()
    timeout = 0.5 if reason == "it ran out of time" else PATIENT
    # Any other reason takes at most two seconds of CPU time; a process that needs more ends with signal 24.
    score = judge(code, [{"input": "", "output": "never"}], timeout=timeout, limits={"memory": 192, "cpu": 2})
    assert time.monotonic() - started < timeout + 30
    assert (score.value, score.valid) == (0.0, True)
    assert reason in score.reason
    assert judge("print(2 * int(input()))", DOUBLE).value == 1.0


def printed(code, **options):
    """A program's view inside the sandbox."""
    found = sandbox.run(
        [textwrap.dedent(code)], [sandbox.SandboxRun()], timeout=PATIENT, limits=sandbox.SandboxLimits(), **options
    )
    assert found[0].status == 0, found[0].errors.decode()
    return json.loads(found[0].output)


@isolated
def test_nothing_of_the_machine_is_seen(monkeypatch):
    monkeypatch.setenv("RLSDK_SECRET", "hush")
    found = printed("""
        import ctypes, json, os, sys
        def writes(path):
            try: open(path + '/x', 'w'); return True
            except OSError: return False
        libc = ctypes.CDLL(None, use_errno=True)
        tried = ("/", "/usr/lib", "/dev", "/etc", os.path.dirname(os.__file__), os.getcwd())
        print(json.dumps({
            "root": sorted(os.listdir("/")),
            "environment": dict(os.environ),
            "parent": os.getppid(),
            "modules": sorted(m for m in sys.modules if "attr" in m),
            "writes": [path for path in tried if writes(path)],
            "null": open("/dev/null", "w").write("x"),
            "random": len(open("/dev/urandom", "rb").read(3)),
            "refused": [libc.unshare(0x10000000), libc.ptrace(16, 1, 0, 0), libc.setns(0, 0)],
            "home": os.path.expanduser("~"),
        }))
    """)
    assert {"home", "tmp", "proc", "sys", "var", "bin"}.isdisjoint(found["root"])
    assert "hush" not in json.dumps(found)
    assert set(found["environment"]) <= {"HOME", "TMPDIR", "PATH", "LANG"}
    assert (found["parent"], found["modules"], found["writes"]) == (1, [], ["/sandbox"])
    assert (found["null"], found["random"], found["refused"]) == (1, 3, [-1, -1, -1])
    assert found["home"] == "/sandbox"


@isolated
def test_memory_that_no_limit_counts_is_refused():
    found = printed("""
        import ctypes, errno, json, os
        libc = ctypes.CDLL(None, use_errno=True)
        def refused(name, *given):
            return getattr(libc, name)(*given) == -1 and ctypes.get_errno() == errno.EPERM
        print(json.dumps([
            refused("shmget", 0, 4096, 0o1600), refused("msgget", 0, 0o1600), refused("semget", 0, 1, 0o1600),
            refused("memfd_create", b"x", 0), refused("mq_open", b"/x", os.O_CREAT | os.O_RDWR, 0o600, None),
        ]))
    """)
    assert found == [True] * 5


HOARD = """
import os, time
ready, tell = os.pipe()
for _ in range({processes}):
    if not os.fork():
        hoard = bytearray(os.urandom(1 << 20)) * {mib}
        os.write(tell, b"x")
        time.sleep(60)
count = 0
while count < {processes}:
    count += len(os.read(ready, 16))
time.sleep({rest})
print("hoarded")
"""


@isolated
@pytest.mark.parametrize(("processes", "passes"), [(2, True), (8, False)])
def test_memory_of_all_processes_together_is_limited(processes, passes):
    """Each of them stays below the limit of a process."""
    code = HOARD.format(processes=processes, mib=60, rest=0 if passes else 30)
    limits = sandbox.SandboxLimits(memory=512, memory_together=256)
    ran = sandbox.run([code], [sandbox.SandboxRun()], timeout=20, limits=limits)[0]
    assert (ran.status, ran.output) == ((0, b"hoarded\n") if passes else (-signal.SIGKILL, b""))


@isolated
def test_the_filter_leaves_honest_means():
    found = printed("""
        import concurrent.futures, json, mmap, multiprocessing, sqlite3, tempfile
        with tempfile.TemporaryFile() as file, mmap.mmap(-1, 4096) as shared, multiprocessing.Lock():
            file.write(b"x")
            shared[:1] = b"y"
            with concurrent.futures.ThreadPoolExecutor(2) as threads:
                squares = list(threads.map(lambda x: x * x, range(3)))
            forked = multiprocessing.get_context("fork").Process(target=shared.__setitem__, args=(0, 65))
            forked.start()
            forked.join()
            print(json.dumps([shared[0], squares, sqlite3.connect(":memory:").execute("select 1").fetchone()]))
    """)
    assert found == [65, [0, 1, 4], [1]]


def test_without_isolation_there_are_limits_and_a_folder(monkeypatch):
    monkeypatch.setenv("RLSDK_SECRET", "hush")
    found = printed("""
        import json, os, resource
        names = ("CPU", "AS", "FSIZE", "NOFILE", "CORE")
        limits = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in names}
        open("x", "w").close()
        print(json.dumps({"secret": "RLSDK_SECRET" in os.environ, "folder": os.getcwd(), "limits": limits}))
    """, isolation="none")  # fmt: skip
    assert found["secret"] is False
    assert found["limits"] == {"CPU": 6, "AS": 2**30, "FSIZE": 2**24, "NOFILE": 64, "CORE": 0}
    assert not Path(found["folder"]).exists()


def test_without_isolation_what_hangs_is_killed(tmp_path):
    code = f"import os, time\nopen('{tmp_path}/pids', 'a').write(str(os.getpid()))\nos.fork()\ntime.sleep(60)"
    for timeout in (1.0, PATIENT):  # a busy machine may not even start it within a second
        score = judge(code, DOUBLE, isolation="none", timeout=timeout)
        if (tmp_path / "pids").exists():
            break
    assert score.reason == "2 of 2 tests failed; test 1: it ran out of time"
    (pid,) = (tmp_path / "pids").read_text().split()
    assert ended(lambda: _alive(int(pid)) is False)


BREED = """
import os, sys, time
def detach():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True: time.sleep(0.01)
        os._exit(0)
for _ in range(4): detach()
"""


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def inside():
    """Processes that live in another namespace of processes than this one, as those of sandboxes do."""
    own = os.readlink("/proc/self/ns/pid")
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(path / "ns" / "pid") != own:
                found.add(int(path.name))
        except OSError:  # it has ended
            continue
    return found


def ended(condition, seconds=PATIENT):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return False


@isolated
@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees the namespaces of others' processes")
@pytest.mark.parametrize("rest", ["print('bred')", "while True: pass"])
def test_no_process_outlives_the_call(rest):
    """Code that forks, leaves its session and forks again has left nothing when the call returns."""
    before = inside()
    ends = "bred" in rest
    score = judge(BREED + rest, [{"input": "", "output": "bred"}], timeout=PATIENT if ends else 1.0)
    assert score.value == float(ends)
    assert inside() - before == set()


KILLED = """
import sys
from rlsdk.isolation import sandbox
breed = sys.argv[1] + "\\nwhile True: pass"
print("ready", flush=True)
sandbox.run([breed], [sandbox.SandboxRun()], timeout=60, limits=sandbox.SandboxLimits())
"""


@isolated
@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees the namespaces of others' processes")
def test_a_sandbox_dies_with_its_caller():
    """A pool kills a worker that takes too long."""
    before = inside()
    caller = subprocess.Popen([sys.executable, "-c", KILLED, BREED], stdout=subprocess.PIPE)
    try:
        assert ended(lambda: len(inside() - before) >= 6)  # its first process, the code's, and four more
    finally:
        caller.send_signal(signal.SIGKILL)
        caller.wait()
        caller.stdout.close()
    assert ended(lambda: inside() - before == set())


@isolated
def test_nothing_listens_to_the_outside():
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)\nprint(1)"
        assert judge(code, [{"input": "", "output": "1"}]).value == 0.0
        assert judge(code, [{"input": "", "output": "1"}], isolation="none").value == 1.0


def test_a_machine_without_isolation_is_named():
    """As it is where no namespace may be made."""
    code = """
    import os, sys
    from rlsdk.isolation.sandboxed import kernel
    import rlsdk, rlsdk.isolation.sandbox as sandbox
    from rlsdk.errors import OptionError
    if sys.platform == "linux":
        kernel.unshare(kernel.NEWUSER)
        open("/proc/sys/user/max_user_namespaces", "w").write("0")
        kernel.drop_capabilities()
    try:
        rlsdk.load("reward", "code_tests")
    except OptionError as error:
        print(error)
    task = rlsdk.Task("t", "?", "assert f() == 1")
    rollout = rlsdk.Rollout.from_text(task, "```python\\ndef f(): return 1\\n```")
    print(rlsdk.load("reward", "code_tests", isolation="none")(rollout).value)
    """
    if MISSING:
        pytest.skip(MISSING)
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    said, value = ran.stdout.splitlines()
    assert "cannot be isolated on this machine: the sandbox did not start: unshare: No space left on device" in said
    assert "set `isolation: none`" in said
    assert value == "1.0", ran.stderr


@isolated
def test_a_sandbox_that_cannot_start_is_not_a_wrong_answer(monkeypatch):
    monkeypatch.setattr(sandbox, "_visible", lambda extra: ["/no/such/folder"])
    with pytest.raises(rlsdk.errors.EnvironmentFault, match="did not start: No such file or directory"):
        judge(ADD, "assert add(1, 2) == 3")


@isolated
@settings(max_examples=15)
@given(st.text(st.characters(exclude_categories=()), max_size=300))
def test_any_text_is_an_answer(text):
    score = judge("", DOUBLE, text=f"```python\n{text}\n```")
    assert score.valid
    assert score.value == 0.0


@isolated
def test_it_conforms():
    task = rlsdk.Task("six", "Define f.", "assert f() == 42")
    (check,), _ = checks(rlsdk.Plugins(), "core", kind="reward", component="code_tests", tasks=[task])
    assert {finding.outcome for finding in check.findings()} <= {"passed"}
