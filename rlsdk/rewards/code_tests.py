"""Reward for Python code that passes its task's tests."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import attrs

import rlsdk
from rlsdk.errors import ValueFault
from rlsdk.isolation import sandbox
from rlsdk.isolation.sandbox import Isolation, SandboxLimits
from rlsdk.limits import above
from rlsdk.rewards.code_cases import cases_of
from rlsdk.rewards.countdown import last_answer
from rlsdk.types import Rollout, Score

MAX_CODE = 200_000
"""Maximum characters of an answer."""

_FENCE = re.compile(r"^[ \t]*```([^\n]*)$", re.MULTILINE)
_PYTHON = {"python", "py", "python3"}


@rlsdk.reward("code_tests")
@attrs.frozen(kw_only=True)
class CodeTests:
    """Share of the task's tests that the model's Python code passes, run in a sandbox.

    Tests are the task's answer: asserts, or test cases of `unittest`, as text (or a list of them); a list of
    `{input, output}`, or `{inputs, outputs}`, for programs that read and print; `{fn_name, inputs, outputs}` for a
    function or a method of a class `Solution`; each also as JSON. Outputs, results and literals are compared
    outside of the sandbox; other asserts run in a separate process, which calls the model's code in another process
    and receives plain data. Code that fails, hangs, exits or exceeds a limit fails its tests.

    Attributes:
        where: Location of the code: the last Python code fence of the last message, or the last `<answer>…</answer>`.
        all_or_nothing: 1 if all tests pass, else 0.
        tolerance: Allowed difference of numbers: absolute below 1, relative above; null compares exactly.
        timeout: Seconds for all tests of a response together. Keep it at least 3 seconds below `scoring.timeout`, after
            which the pool ends the call and the score is invalid.
        limits: Resource limits of the code: `cpu` seconds; `memory`, `disk`, `file`, `output` in MiB; `processes`,
            `files`.
        prelude: Python code inserted before the response's, such as `from typing import *`.
        packages: Allow the code to import packages installed in this Python, such as numpy.
        isolation: `namespaces`, or `none` if the kernel does not allow them: then the code can do whatever you can.
    """

    where: Literal["fence", "answer"] = "fence"
    all_or_nothing: bool = False
    tolerance: float | None = None
    timeout: Annotated[float, above(0)] = 6.0
    limits: SandboxLimits = attrs.field(factory=SandboxLimits)
    prelude: str = ""
    packages: bool = False
    isolation: Isolation = "namespaces"

    def __attrs_post_init__(self) -> None:
        if self.tolerance is not None and not self.tolerance >= 0:
            raise ValueFault(f"tolerance must be a number of at least 0, or null; got {self.tolerance}")
        sandbox.require(self.prelude, self.limits, self.isolation, self.packages)

    def __call__(self, rollout: Rollout) -> Score:
        """Score one rollout.

        Args:
            rollout: Rollout to score; its task's answer holds the tests.

        Returns:
            A score with the metrics `passed` (the share), `correct` (0 or 1: all of them) and `format` (0 or 1: there
            is code); its reason is that of the first test that failed.

        Raises:
            DataError: The task's answer holds no tests.
            EnvironmentFault: The sandbox did not start.
        """
        cases = cases_of(rollout.task, self.tolerance)
        code = answered(rollout, self.where)
        if code is None:
            wanted = "block fenced as ```python" if self.where == "fence" else "<answer> … </answer>"
            return _nothing(f"there is no {wanted}", found=False)
        if len(code) > MAX_CODE:
            return _nothing(f"the code has {len(code)} characters, more than {MAX_CODE}", found=True)
        ran = sandbox.run(
            [self.prelude, cases.imports, code],
            cases.runs,
            timeout=self.timeout,
            limits=self.limits,
            isolation=self.isolation,
            packages=self.packages,
        )
        verdicts = cases.judge(ran)
        failed = [(i, why) for i, why in enumerate(verdicts, 1) if why]
        share = 1 - len(failed) / cases.count
        reason = f"{len(failed)} of {cases.count} tests failed; test {failed[0][0]}: {failed[0][1]}" if failed else ""
        value = float(not failed) if self.all_or_nothing else share
        return Score(value, metrics={"passed": share, "correct": float(not failed), "format": 1.0}, reason=reason)


def answered(rollout: Rollout, where: Literal["fence", "answer"]) -> str | None:
    """Return the code of a response; None if there is none."""
    text = rollout.text
    if where == "answer":
        held = last_answer(text)
        return None if held is None else last_block(held) or held
    return last_block(text)


def last_block(text: str) -> str | None:
    """Return the content of the last closed Python code fence; None if there is none."""
    found = None
    begun = language = None
    for fence in _FENCE.finditer(text):
        words = fence[1].split()
        if begun is None and "`" not in fence[1]:
            begun, language = fence.end(), words[0].lower() if words else ""
        elif begun is not None and not words:
            if language in _PYTHON:
                found = text[begun : fence.start()]
            begun = None
    return None if found is None else found.strip("\n")


def _nothing(reason: str, *, found: bool) -> Score:
    return Score(0.0, metrics={"passed": 0.0, "correct": 0.0, "format": float(found)}, reason=reason)
