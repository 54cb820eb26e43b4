"""The source of marked objects in a script or notebook: their definitions and everything that these refer to.

A run started with an object in place of a name saves this text as a plugin file. It contains definitions only: other
actions of the script, such as starting a run, are not repeated when the file is imported.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import attrs

NOTEBOOK = "notebook"
"""Name of the plugin made from a notebook's cells."""
_CELLS = "In"
"""IPython's variable with the executed cells."""


@attrs.frozen
class _Statement:
    """A top-level statement of a module or cell, with the names that it binds and reads."""

    text: str
    binds: frozenset[str]
    reads: frozenset[str]
    always: bool


def plugin_name(obj: Any) -> str | None:
    """Return the plugin name for saving an object's source; None if it cannot be saved.

    Args:
        obj: A marked function or class.
    """
    module = sys.modules.get(obj.__module__)
    if module is None or "<locals>" in obj.__qualname__ or _texts(obj) is None:
        return None
    if _CELLS in vars(module):
        return NOTEBOOK
    file = getattr(module, "__file__", None)
    return re.sub(r"\W", "_", Path(file).stem) if file else None


def source_of(objects: Sequence[Any]) -> str:
    """Return the definitions of objects of one module or notebook, in order, as the text of a plugin.

    Args:
        objects: Marked functions and classes with the same `plugin_name`.
    """
    first = objects[0]
    statements = list(_statements(_texts(first) or (), first.__module__))
    if plugin_name(first) == NOTEBOOK:
        statements = _latest(statements)
    chosen = _reachable(statements, {obj.__name__ for obj in objects})
    head = '"""Source of a run: what its configuration refers to."""'
    return "\n\n".join([head, *(statement.text for statement in chosen)]) + "\n"


@lru_cache(maxsize=64)
def overwritten(text: str, marks: frozenset[str]) -> tuple[str, int, int] | None:
    """Find a marked function or class in the source of a module whose name is defined again further down.

    Args:
        text: Source of the module.
        marks: Names of the decorators that mark.

    Returns:
        Its name, its line, and the line of the later definition; None if there is no such function or class.
    """
    marked: dict[str, int] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name in marked:
                return node.name, marked[node.name], node.lineno
            decorators = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
            if any(ast.unparse(each).rpartition(".")[2] in marks for each in decorators):
                marked[node.name] = node.lineno
    return None


def _texts(obj: Any) -> list[str] | None:
    """Return the source of a module, or the cells of a notebook; None for code from an interactive interpreter."""
    module = sys.modules[obj.__module__]
    cells = vars(module).get(_CELLS)
    if isinstance(cells, list):
        return [cell for cell in cells if isinstance(cell, str)]
    try:
        return [inspect.getsource(module)]
    except (OSError, TypeError):
        return None


def _statements(texts: Iterable[str], module: str) -> Iterator[_Statement]:
    for text in texts:
        try:
            tree = ast.parse(text)
        except SyntaxError:  # a cell that failed
            continue
        lines = text.splitlines()
        for node in tree.body:
            if not _is_main_guard(node):
                yield _statement(node, lines, module)


def _statement(node: ast.stmt, lines: Sequence[str], module: str) -> _Statement:
    if isinstance(node, ast.ImportFrom) and node.level:
        package = (getattr(sys.modules[module], "__package__", None) or "").split(".")
        base = package[: len(package) - node.level + 1]
        node.module, node.level = ".".join([*base, *filter(None, [node.module])]), 0
        text = ast.unparse(node)
    else:
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        text = "\n".join(lines[first - 1 : node.end_lineno])
    reads = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
    special = isinstance(node, ast.ImportFrom) and (node.module == "__future__" or node.names[0].name == "*")
    return _Statement(text, frozenset(_bound(node)), frozenset(reads), always=special)


def _bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement binds in its module."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((each.asname or each.name).partition(".")[0] for each in node.names)
    elif isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Store):
            yield node.id
    elif not isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        for child in ast.iter_child_nodes(node):
            yield from _bound(child)


def _is_main_guard(node: ast.stmt) -> bool:
    if not isinstance(node, ast.If):
        return False
    return any(isinstance(each, ast.Name) and each.id == "__name__" for each in ast.walk(node.test))


def _latest(statements: Sequence[_Statement]) -> list[_Statement]:
    """Drop statements rebound by a later cell; one that was rerun unchanged keeps its first position."""
    last = {name: i for i, each in enumerate(statements) for name in each.binds}
    kept = [each for i, each in enumerate(statements) if each.always or i in last.values()]
    texts = {each.text for each in kept}
    return list({each.text: each for each in statements if each.text in texts}.values())


def _reachable(statements: Sequence[_Statement], names: Collection[str]) -> list[_Statement]:
    """Return the statements that bind the given names and, transitively, the names that these statements read."""
    wanted, chosen = set(names), set[int]()
    while found := {i for i, each in enumerate(statements) if i not in chosen and each.binds & wanted}:
        chosen |= found
        wanted = wanted.union(*(statements[i].reads for i in found))
    return [each for i, each in enumerate(statements) if i in chosen or each.always]
