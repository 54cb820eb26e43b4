"""Write the committed generated pages; run `make configuration` after changing a docstring or a signature.

`docs/configuration.md` and `docs/rlsdk.schema.json` list every key of a configuration, for people and for editors. The
first pages of the algorithms and of the reference are committed without links; the built site adds the links.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from docs_algorithms import index_page, linked, table
from docs_reference import index

from rlsdk.cli.config import offered, shown_default
from rlsdk.config.json_schema import json_schema
from rlsdk.config.reference import ConfigKey, of_component, settings
from rlsdk.kinds import Kind
from rlsdk.plugins import CORE, Plugins

DOCS = Path(__file__).resolve().parent.parent / "docs"
KINDS: dict[Kind, str] = {
    "tasks": "Tasks",
    "sampler": "Task samplers",
    "workflow": "Workflows",
    "environment": "Environments",
    "reward": "Rewards",
    "renderer": "Renderers",
    "tool_parser": "Tool-call parsers",
    "engine": "Engines",
    "learner": "Learners",
    "optimizer": "Optimisers",
    "lr_schedule": "Learning-rate schedules",
    "weight_transfer": "Weight transfers",
    "buffer": "Buffers",
    "stop": "Stop rules",
    "tracker": "Trackers",
    "diagnosis": "Diagnoses",
}
"""Kinds of components whose options the page lists; algorithms and their parts have separate pages."""
INTRODUCTION = """\
# Configuration

<!-- Written by `make configuration`; change the docstrings instead. -->

A run is described by one YAML file. Every key has a default unless the table says *required*, and `KEY=VALUE` on the
command line replaces any of them: `rlsdk train config.yaml sampling.temperature=0.8`. Unknown keys and values of
another type are refused before anything starts, with the nearest name.

* `rlsdk config [SECTION]` shows these tables in a terminal, `rlsdk config --json` gives them to programs.
* `rlsdk explain config.yaml --full` shows every value of a run, and where it comes from: a default, the algorithm, a
  line of the file or an override.
* `rlsdk config --schema > rlsdk.schema.json` writes a JSON schema, with the options of installed plugins. With the
  line `# yaml-language-server: $schema=rlsdk.schema.json` at the top of a config, editors with a YAML language server
  (VS Code, Neovim, Emacs) complete keys, show their meaning and mark mistakes. The [schema of the built-in
  components](rlsdk.schema.json) is here.
* A relative path (a model, a data file, a plugin's file) is looked up in the working folder, then next to the
  configuration. If both have it, the working folder's is used, and a warning names the other. What a run writes (`out`,
  `mirror`) is always relative to the working folder.
* `${key}` takes the value of another key, `${oc.env:NAME}` that of an environment variable.

A **component** (an engine, a reward, a task source) is written as its name, `engine: vllm`, or as a mapping with its
options, `engine: {use: vllm, max_num_seqs: 64}`. Options alone belong to the default: `learner: {lr: 1.0e-5}`.
"""


def page() -> str:
    """Return the page as Markdown."""
    found = settings()
    top = [s for s in found if "." not in s.path and not s.section]
    sections = [s for s in found if s.section and "." not in s.path]
    parts = [INTRODUCTION, "## The run", _table(top)]
    for section in sections:
        below = [s for s in found if s.path.startswith(f"{section.path}.")]
        parts += [f"## `{section.path}`", section.help, _table(below)]
    parts += ["## Algorithms", "Their fields and parts, with the options of each: [Algorithms](algorithms/index.md)."]
    for kind, components in offered(Plugins(), [CORE]).items():
        if kind not in KINDS:
            continue
        parts.append(f"## {KINDS[kind]}")
        for name, component in components.items():
            parts += [f"### `{name}` {{ #{kind}-{name} }}", linked(component.summary)]
            parts.append(_table(of_component(component, ""), prefix="."))
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def schema() -> str:
    """Return the JSON schema of the built-in components."""
    return json.dumps(json_schema(offered(Plugins(), [CORE])), indent=1) + "\n"


def committed() -> dict[str, str]:
    """Return path below `docs` -> text of each committed generated file."""
    return {
        "configuration.md": page(),
        "rlsdk.schema.json": schema(),
        "algorithms/index.md": index_page(linked_parts=False),
        "reference/index.md": index(linked=False),
    }


def _table(found: Iterable[ConfigKey], prefix: str = "") -> str:
    units = any(setting.unit for setting in found)
    rows = (
        (
            f"`{setting.path.removeprefix(prefix)}`",
            f"`{setting.type_name}`",
            _default(setting),
            *([setting.unit] if units else []),
            linked(setting.help),
        )
        for setting in found
    )
    return table(("key", "type", "default", *(["unit"] if units else []), "meaning"), rows)


def _default(setting: ConfigKey) -> str:
    if setting.required:
        return "*required*"
    return "" if setting.section and setting.default is not None else f"`{shown_default(setting)}`"


if __name__ == "__main__":
    for name, text in committed().items():
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(text, encoding="utf-8")
