"""Explain why a text is not YAML, by line."""

from __future__ import annotations

import re

import yaml


def yaml_fault(error: yaml.YAMLError, text: str) -> str:
    """Return where a text stops being YAML, why, and the line itself."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    problem, mark = error.problem or "", error.problem_mark
    if "could not find expected ':'" in problem and error.context_mark is not None:
        mark = error.context_mark  # the parser notices it only on a later line
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    rest = line[mark.column :]
    if "duplicate key" in problem:
        advice = "; keep one of them"
    elif "undefined alias" in problem and (alias := re.match(r"\*([^\s,\]}]+)", rest)):
        advice = f"; define it above as &{alias[1]}"
    elif rest.startswith("\t"):
        advice = "; indent with spaces, not with tabs"
    elif "mapping values are not allowed" in problem:
        advice = "; put text that contains a colon in quotes, and indent the keys of a section equally"
    elif "expected key" in problem or "expected <block end>" in problem:
        advice = "; indent the keys of a section equally"
    elif "flow node" in (error.context or ""):
        advice = "; a bracket is not closed"
    elif "flow" in (error.context or "") and error.context_mark is not None:
        advice = f"; the bracket was opened in line {error.context_mark.line + 1}"
    else:
        advice = ""
    shown = f" ({line.strip()})" if line.strip() else ""
    return f"line {mark.line + 1}, column {mark.column + 1}{shown}: {problem}{advice}"
