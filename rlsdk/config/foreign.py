"""Better error messages for configurations written for another trainer, or with keys of one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlsdk.config.schema import COMPONENT_KEYS, LISTS, Config
from rlsdk.config.tree import Source, leaves
from rlsdk.contracts import AlgorithmDefaults

_UNKNOWN = re.compile(r"(?P<path>[\w.\[\]@-]+): (?P<says>unknown (?:key|option) '(?P<name>[^']+)').*", re.DOTALL)


def explained(source: Source, tree: Mapping[str, Any], faults: Sequence[str]) -> list[str]:
    """Replace the faults of another trainer's configuration by one, or add the rlsdk names of its keys."""
    from rlsdk.migration.recognition import hint, recognise  # imported only if something is wrong

    table = None if isinstance(source, Config) else recognise(source)
    if table is not None:
        name = "this mapping" if isinstance(source, Mapping) else str(source)
        file = "FILE" if isinstance(source, Mapping) else name
        return [
            f"{name} looks like a config of {table.title}; `rlsdk migrate {table.name} {file}` converts it to one of "
            "rlsdk and reports on every key"
        ]
    texts = []
    for fault in faults:
        match = _UNKNOWN.fullmatch(fault)
        known = []
        if match and not (match["says"].startswith("unknown key") and _in_an_option(match["path"])):
            below = [path for path, _ in leaves(tree) if path.startswith((f"{match['path']}.", f"{match['path']}["))]
            if below and _is_misspelt(match["name"], fault):
                texts.append(fault)
                continue
            known = list(dict.fromkeys(filter(None, map(hint, below or [match["path"]]))))
            near = "unknown option" in fault and "did you mean" in fault  # of the component's own
            own = [] if near else own_paths(match["name"])
            if own and not any(path in text for path in own for text in known):
                known = [f", did you mean {' or '.join(own)}?"]
        texts.append(f"{match['path']}: {match['says']}{''.join(known)}" if match and known else fault)
    return texts


def _is_misspelt(name: str, fault: str) -> bool:
    """Return whether the section that the fault suggests differs from the name in a letter or two."""
    meant = re.search(r"did you mean '([^']+)'\?$", fault)
    return meant is not None and bool(difflib.get_close_matches(name, [meant[1]], cutoff=0.8))


def _in_an_option(path: str) -> bool:
    """Return whether a key belongs to the value of a component's option, such as `tasks.train.columns.level`."""
    component = re.sub(r"\[\d+\]", "", path).rpartition(".")[0].rpartition(".")[0]
    return component in (*COMPONENT_KEYS, *LISTS)


def own_paths(name: str) -> list[str]:
    """Return where a configuration has a key of this name; empty for a name that is used too often to be a hint."""
    from rlsdk.config.reference import settings

    paths = [key.path for key in settings() if key.path.rpartition(".")[2] == name]
    paths += [f"algorithm.{name}"] if name in AlgorithmDefaults.__annotations__ else []
    shown = [path if "." in path else f"{path} at the top level" for path in paths]
    return shown if len(shown) <= 3 and name not in ("name", "steps") else []
