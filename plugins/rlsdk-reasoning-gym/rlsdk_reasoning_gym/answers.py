"""Check answers before passing them to scorers that evaluate them.

Some scorers of reasoning-gym pass the model's text to Python's `eval`, or to sympy's `parse_expr`, which calls it.
Answers to their datasets are parsed here before they are scored. A tree that contains anything but data, or anything
but arithmetic, is never evaluated. An answer that Python cannot parse cannot run, and is left to the scorer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

MAX_CHARACTERS = 10_000
"""Maximum characters of an answer; ten times the right answer's length is added."""
MAX_EVALUATED = 2_000
"""Maximum characters of an answer that is evaluated."""
MAX_EXPONENT = 100
MAX_POWERS = 2
"""Maximum number of nested powers."""

_TRIGONOMETRY = {"sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth"}
FUNCTIONS = frozenset(
    {"exp", "log", "ln", "sqrt", "Abs", "Rational", "Integer", "Float"}
    | {prefix + name for prefix in ("", "a", "arc") for name in _TRIGONOMETRY}
)
"""Functions of sympy that an antiderivative may call."""

_DATA = (ast.Expression, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Name, ast.Load, ast.Constant, ast.USub, ast.UAdd)
_ARITHMETIC = (
    *(ast.Expression, ast.Load, ast.Name, ast.UnaryOp, ast.USub, ast.UAdd),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow),
)
_HUGE = re.compile(r"[0-9.][eE][-+]?[0-9_]{4}")
_REWRITTEN = re.compile(r"[!\[\]'\"\\_@;:={}]|lambda")
"""Syntax that sympy rewrites before evaluating it (factorials, repeating decimals), or that is not arithmetic."""


def refused(dataset: str, answer: str, entry: Mapping[str, Any]) -> str:
    """Return the reason why an answer is withheld from the dataset's scorer; empty if it is not."""
    right = str(entry["answer"])
    if answer.strip() == right.strip():
        return ""
    if len(answer) > MAX_CHARACTERS + 10 * len(right):
        return f"the answer is too long: {len(answer):,} characters"
    check = EVALUATED.get(dataset)
    return check(answer) if check else ""


def _parsed(answer: str) -> ast.Expression | None:
    """Parse a Python expression; None if it does not parse."""
    try:
        return ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # unbalanced, a NUL, nested too deep for the parser
        return None


def _data(answer: str) -> str:
    """Return why an answer must not reach `eval`: it may contain only numbers, text and names, in lists."""
    if len(answer) > MAX_EVALUATED:
        return f"the answer is too long to be evaluated: {len(answer):,} characters"
    tree = _parsed(answer)
    for node in ast.walk(tree) if tree else ():
        signed = isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)
        if not signed and not isinstance(node, _DATA):
            return f"the answer is code ({type(node).__name__}), which is not run"
    return ""


def _expression(answer: str) -> str:
    """Return why an answer must not reach `parse_expr`, which gets only names and arithmetic with a few functions."""
    if len(answer) > MAX_EVALUATED:
        return f"the answer is too long to be evaluated: {len(answer):,} characters"
    other = _REWRITTEN.search(answer)
    if other:
        return f"unexpected {other[0]!r} in an expression"
    if _HUGE.search(answer):
        return "the answer contains a huge number"
    tree = _parsed(answer)
    return _tree_fault(tree.body) if tree else ""


def _tree_fault(root: ast.expr) -> str:
    waiting: list[tuple[ast.AST, int]] = [(root, 0)]
    while waiting:
        node, powers = waiting.pop()
        if isinstance(node, ast.Call):
            if node.keywords or not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS:
                return f"the answer calls {ast.unparse(node.func)[:40]}, which is not allowed"
            waiting += [(each, powers) for each in node.args]
            continue
        if isinstance(node, ast.Constant):
            if isinstance(node.value, complex) or not isinstance(node.value, int | float):
                return f"unexpected {str(node.value)[:40]!r} in an expression"
            continue
        if not isinstance(node, _ARITHMETIC):
            return f"the answer is code ({type(node).__name__}), which is not run"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            powers += 1
            if powers > MAX_POWERS or _too_high(node.right):
                return "a power is too large to be computed"
        waiting += [(each, powers) for each in ast.iter_child_nodes(node)]
    return ""


def _too_high(exponent: ast.expr) -> bool:
    """Return True if an exponent contains a number over the limit, a power, or more than one product."""
    nodes = list(ast.walk(exponent))
    numbers = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, int | float)]
    operators = [node.op for node in nodes if isinstance(node, ast.BinOp)]
    products = sum(isinstance(op, ast.Mult | ast.Div) for op in operators)
    towers = any(isinstance(op, ast.Pow) for op in operators)
    return any(abs(number) > MAX_EXPONENT for number in numbers) or (bool(numbers) and (towers or products > 1))


def _fraction(answer: str) -> str:
    """Return why an answer must not reach `Fraction`, which expands `1e9999999`."""
    return "the answer contains a huge number" if _HUGE.search(answer) else ""


EVALUATED: Mapping[str, Callable[[str], str]] = {
    "binary_matrix": _data,
    "n_queens": _data,
    "spiral_matrix": _data,
    "string_insertion": _data,
    "coin_flip": _fraction,
    "countdown": _expression,
    "intermediate_integration": _expression,
    "polynomial_multiplication": _expression,
    "puzzle24": _expression,
    "simple_integration": _expression,
}
"""Dataset -> function that returns why an answer must not be evaluated, or an empty text."""
