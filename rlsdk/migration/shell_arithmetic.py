"""Compute integer arithmetic of a shell script, as in `$((1024 * 8))`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

_OPERATORS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1),
    ast.Mod: lambda left, right: abs(left) % abs(right) * (-1 if left < 0 else 1),
}
_LARGEST = 10**15


def computed(expression: str, value_of: Callable[[str], int]) -> int | None:
    """Return the value of an expression; None if a part of it is unknown.

    Args:
        expression: The expression.
        value_of: Returns the value of a variable; raises ValueError for one that is unknown.
    """

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            found = node.value
        elif isinstance(node, ast.Name):
            found = value_of(node.id)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            found = -value(node.operand)
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            found = _OPERATORS[type(node.op)](value(node.left), value(node.right))
        else:
            raise ValueError(expression)
        if abs(found) > _LARGEST:
            raise ValueError(expression)
        return found

    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
