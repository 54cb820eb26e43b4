"""An mkdocs hook that writes a page for each named algorithm, and one for each kind of part of an algorithm.

The pages show the output of `rlsdk plugins`, with formulas and links. All of it comes from docstrings and signatures,
so a fact that is missing on a page is missing in a docstring.

`make configuration` writes the first page, `docs/algorithms/index.md`, which is committed so that links to it work in
the repository. The other pages exist only in the built site.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.structure.files import Files

sys.path.insert(0, str(Path(__file__).parent))

from docs_reference import replaced, with_pages

from rlsdk.batch import aggregate
from rlsdk.cli import listing
from rlsdk.components import Component, Use, brief
from rlsdk.docstrings import LABELS, labelled
from rlsdk.kinds import Kind
from rlsdk.options import Option
from rlsdk.plugins import CORE, Plugins

PARTS: dict[Kind, str] = {
    "shaping": "Shapings",
    "advantage": "Advantages",
    "policy_loss": "Policy losses",
    "correction": "Corrections",
    "kl": "KL estimators",
    "filter": "Filters",
}
"""Kind of part -> title of its page, in the order in which a step uses them."""

FIELDS: dict[str, Kind] = {**{kind: kind for kind in PARTS if kind != "filter"}, "filters": "filter"}
"""Field of an algorithm -> kind of component that it names."""


@cache
def components(kind: Kind) -> list[Component]:
    """Return the built-in components of a kind."""
    return [component for _, component in listing.collect(Plugins(), [CORE], kind).components]


def linked(text: str) -> str:
    """Return a text with links for arXiv numbers, DOIs and URLs."""
    text = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    text = re.sub(r"\bdoi:(10\.[^\s,)]+)", r"[doi:\1](https://doi.org/\1)", text)
    return re.sub(r"(?<!\]\()(https?://[^\s,)]+[^\s,).])", r"<\1>", text)


def table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table; empty without rows. Bars are escaped except in code."""
    cells = [[re.sub(r"(`[^`]*`)|\|", lambda m: m[1] or r"\|", cell) for cell in row] for row in rows]
    titles = list(titles)
    lines = [f"| {' | '.join(row)} |" for row in [titles, ["---"] * len(titles), *cells]]
    return "\n".join(lines) if cells else ""


def anchor(name: str) -> str:
    """Return a component's anchor: `k1+` -> `k1-plus`."""
    return name.replace("+", "-plus")


def described(component: Component) -> list[str]:
    """Return summary and notes, then the labelled facts."""
    found = labelled(component.help)
    facts = [f"* **{label}:** {linked(found[label])}" for label in LABELS if label in found]
    return [linked(component.summary), linked(found.get("", "")), "\n".join(facts)]


def link(kind: Kind, name: str, base: str = "parts/") -> str:
    """Return a link to a component on its kind's page."""
    return f"[`{name}`]({base}{kind}.md#{anchor(name)})"


def uses(value: Any) -> list[Use]:
    """Return the components that a field of an algorithm names."""
    return [each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, Use)]


def chosen(algorithm: Component) -> list[tuple[Kind, Use]]:
    """Return the parts of an algorithm, in the order in which a step uses them."""
    defaults = {option.name: option.default for option in algorithm.options}
    return [(FIELDS[name], use) for name in FIELDS for use in uses(defaults[name])]


def part(component: Component) -> str:
    """Return a component's section on its kind's page."""
    options = ((f"`{o.name}`", _type(o), _default(o), linked(o.help)) for o in component.options)
    users = [a.name for a in components("algorithm") if (component.kind, component.name) in _names(chosen(a))]
    facts = [
        f"Reads {', '.join(f'`{need}`' for need in component.needs)}." if component.needs else "",
        f"Part of {', '.join(f'[`{name}`](../{name}.md)' for name in users)}." if users else "",
        f"Defined in `{component.obj.__module__}`.",
    ]
    return _page(
        f"### `{component.name}` {{ #{anchor(component.name)} }}",
        *described(component),
        table(("option", "type", "default", "meaning"), options),
        " ".join(filter(None, facts)),
    )


def kind_page(kind: Kind) -> str:
    """Return the page of a kind: a table of its components, then each module's notation and components."""
    found = {component.name: component for component in components(kind)}
    rows = ((f"[`{name}`](#{anchor(name)})", linked(c.summary)) for name, c in found.items())
    sections = []
    for module in dict.fromkeys(c.obj.__module__ for c in found.values()):
        title, _, notes = (inspect.getdoc(sys.modules[module]) or "").partition("\n")
        order = list(vars(sys.modules[module]))
        inside = [c for c in found.values() if c.obj.__module__ == module]
        inside.sort(key=lambda c: order.index(c.obj.__name__))
        sections += [f"## {title.removesuffix('.')}", linked(notes.strip()), *(part(c) for c in inside)]
    return _page(f"# {PARTS[kind]}", table(("name", "in short"), rows), *sections)


def algorithm_page(algorithm: Component) -> str:
    """Return the page of an algorithm: its purpose, its parts with their options, and its fields."""
    plugins, values = Plugins(), listing.parts(algorithm)
    sections = []
    for kind, use in chosen(algorithm):
        _, component = plugins.find(kind, use.name)
        given: Mapping[str, Any] = {o.name: use.options.get(o.name, o.default) for o in component.options}
        rows = ((f"`{o.name}`", f"`{brief(given[o.name])}`", linked(o.help)) for o in component.options)
        formula = labelled(component.help).get("Formula", "")
        sections += [
            f"### {kind.replace('_', ' ').capitalize().replace('Kl', 'KL')}: `{component.name}`",
            f"{linked(component.summary)} More, and what the symbols mean: {link(kind, component.name)}.",
            f"* **Formula:** {linked(formula)}" if formula else "",
            table(("option", "value", "meaning"), rows),
        ]
    fields = ((f"`{o.name}`", f"`{values[o.name]}`", linked(o.help)) for o in algorithm.options)
    return _page(
        f"# {algorithm.name}",
        *described(algorithm),
        f"```yaml\nalgorithm: {algorithm.name}\n```",
        "## Parts",
        *sections,
        f"### Aggregation: `{values['aggregate']}`",
        linked(aggregations()[values["aggregate"]]),
        "## Defaults",
        "Each may be replaced alone; an override merges into what is here.",
        table(("field", "default", "meaning"), fields),
    )


def aggregations() -> dict[str, str]:
    """Return aggregation mode -> description, from the table in the docstring of `aggregate`."""
    rows = re.findall(r"^\| `([\w-]+)` \| (.*) \|$", inspect.getdoc(aggregate) or "", re.MULTILINE)
    return {mode: f"{value[0].upper()}{value[1:]}." for mode, value in rows}


def index_page(*, linked_parts: bool = True) -> str:
    """Return the first page, a table of all algorithms and kinds of parts, with or without links to the other pages."""
    rows = []
    for algorithm in components("algorithm"):
        named = {kind: _part(kind, str(use.name), linked_parts) for kind, use in chosen(algorithm)}
        name = f"[`{algorithm.name}`]({algorithm.name}.md)" if linked_parts else f"`{algorithm.name}`"
        rows.append((name, linked(algorithm.summary), named["advantage"], named["policy_loss"]))
    kinds = []
    for kind, title in PARTS.items():
        names = ", ".join(_part(kind, component.name, linked_parts) for component in components(kind))
        kinds.append((f"[{title}](parts/{kind}.md)" if linked_parts else title, names))
    return _page(
        "# Algorithms",
        "An algorithm is a set of named parts with the defaults of its paper. Choose one by name and "
        "[replace any part](../howto/algorithm.md). The built site has a page for each, made from the docstrings, as "
        "`rlsdk plugins` is; packages of plugins add more, which `rlsdk plugins algorithm` lists.",
        table(("algorithm", "in short", "advantage", "policy loss"), rows),
        "## Parts",
        table(("kind", "built in"), kinds),
    )


def pages() -> dict[str, str]:
    """Return file name -> Markdown of each page."""
    return {
        "index.md": index_page(),
        **{f"parts/{kind}.md": kind_page(kind) for kind in PARTS},
        **{f"{algorithm.name}.md": algorithm_page(algorithm) for algorithm in components("algorithm")},
    }


def on_config(config: Any) -> Any:
    """Insert the pages into the navigation, in place of the first page."""
    parts = [{title: f"algorithms/parts/{kind}.md"} for kind, title in PARTS.items()]
    named = [{algorithm.name: f"algorithms/{algorithm.name}.md"} for algorithm in components("algorithm")]
    entries = ["algorithms/index.md", {"Parts": parts}, {"Algorithms by name": named}]
    config.nav = replaced(config.nav, "algorithms/index.md", entries)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not on disk, and replace the one that is."""
    return with_pages(files, config, "algorithms", pages())


def _page(*blocks: str) -> str:
    return "\n\n".join(block for block in blocks if block) + "\n"


def _part(kind: Kind, name: str, linked: bool) -> str:
    return link(kind, name) if linked else f"`{name}`"


def _names(chosen: Iterable[tuple[Kind, Use]]) -> set[tuple[Kind, Any]]:
    return {(kind, use.name) for kind, use in chosen}


def _type(option: Option) -> str:
    return f"`{option.type_name}`{' or schedule' if option.schedule else ''}"


def _default(option: Option) -> str:
    return "required" if option.required else f"`{brief(option.default)}`"
