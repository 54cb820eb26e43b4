"""An mkdocs hook that writes the API reference, with a page for each module that plugins may import.

Each name is documented once, under its shortest public path (`rlsdk.Task`, not `rlsdk.types.Task`). Sources are read,
not imported, so the documentation builds without ray, vllm or deepspeed.

`make configuration` writes the first page, `docs/reference/index.md`, which is committed so that links to it work in
the repository. The others exist only in the built site, where mentions of public names become links.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rlsdk"
INTRODUCTION = """\
# Python API

Plugins and scripts may import only from the modules on this page; all others may change in any version
([what is promised](../api_policy.md)). The commands explain themselves with `rlsdk COMMAND --help`, and all keys
of a configuration are in [Configuration](../configuration.md).
"""


def source_of(module: str) -> Path:
    """Return the file of a module of rlsdk."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def parsed(module: str) -> ast.Module:
    """Return the syntax tree of a module of rlsdk."""
    return ast.parse(source_of(module).read_text(encoding="utf-8"))


def assigned(tree: ast.Module, name: str) -> Any:
    """Return the value of a constant; None if the module does not define it."""
    values = (node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name)
    value = next(values, None)
    return None if value is None else ast.literal_eval(value)


PUBLIC: tuple[str, ...] = assigned(parsed("rlsdk"), "PUBLIC_MODULES")


def imported(tree: ast.Module) -> dict[str, str]:
    """Return name -> origin for all imports of a module from rlsdk, at run time or for type checkers."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0)
    aliases = ((alias.asname or alias.name, f"{node.module}.{alias.name}") for node in nodes for alias in node.names)
    return {name: origin for name, origin in aliases if origin.startswith("rlsdk.")}


def offered(module: str) -> list[str]:
    """Return the names that a public module offers: its `__all__` or, if that is computed, the names imported `as`."""
    tree = parsed(module)
    try:
        names: list[str] | None = assigned(tree, "__all__")
    except ValueError:
        nodes = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != "types")
        names = sorted(alias.asname for node in nodes for alias in node.names if alias.asname)
    if names is None:
        raise SystemExit(f"{source_of(module)} is public but has no __all__, which lists what plugins may use")
    return names


def home(address: str) -> str:
    """Return the path where a name is defined, following re-exports."""
    module, _, name = address.rpartition(".")
    origin = imported(parsed(module)).get(name) if source_of(module).is_file() else None
    return home(origin) if origin else address


@cache  # every page needs it
def surface() -> dict[str, dict[str, str]]:
    """Return public module -> its public names, each with the path under which it is documented."""
    found: dict[str, dict[str, str]] = {}
    first: dict[str, str] = {}
    for module in PUBLIC:
        found[module] = {}
        for name in offered(module):
            address = f"{module}.{name}"
            if address not in PUBLIC:
                found[module][name] = first.setdefault(home(address), address)
    return found


def summary(module: str) -> str:
    """Return the first sentence of a module's docstring."""
    return (ast.get_docstring(parsed(module)) or "").split("\n\n", 1)[0].replace("\n", " ")


def index(*, linked: bool) -> str:
    """Return the first page as Markdown, with or without links to the other pages."""
    sections = []
    for module, names in surface().items():
        title = f"[`{module}`][{module}]" if linked else f"`{module}`"
        shown = (f"[`{name}`][{address}]" if linked else f"`{name}`" for name, address in sorted(names.items()))
        sections.append(f"## {title}\n\n{summary(module)}\n\n{', '.join(shown)}\n")
    return "\n".join([INTRODUCTION, *sections])


def page(module: str, names: dict[str, str]) -> str:
    """Return the Markdown for a module: its docstring, and each name that is documented there."""
    own = [f"::: {address}" for name, address in sorted(names.items()) if address == f"{module}.{name}"]
    return "\n\n".join([f"::: {module}\n    options: {{heading_level: 1, members: false}}", *own]) + "\n"


def pages() -> dict[str, str]:
    """Return file name -> Markdown of each page."""
    named = {f"{module.replace('.', '_')}.md": page(module, names) for module, names in surface().items()}
    return {"index.md": index(linked=True), **named}


def mentions(text: str) -> str:
    """Turn public names in a page's inline code, such as `rlsdk.Task`, into links; fences and links stay unchanged."""
    addresses = {f"{module}.{name}": to for module, names in surface().items() for name, to in names.items()}

    def link(found: re.Match[str]) -> str:
        to = addresses.get(found[1])
        return f"[{found[0]}][{to}]" if to else found[0]

    # A name in brackets is already the text of a link.
    outside = re.split(r"(^```.*?^```\s*$|^#.*?$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(
        part if index % 2 else re.sub(r"(?<![\[`])`(rlsdk(?:\.\w+)+)`(?!`)", link, part)
        for index, part in enumerate(outside)
    )


def on_config(config: Any) -> Any:
    """Insert the pages into the navigation, in place of the first page."""
    titled = [{module: f"reference/{module.replace('.', '_')}.md"} for module in PUBLIC]
    config.nav = replaced(config.nav, "reference/index.md", ["reference/index.md", *titled])
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not on disk, and replace the one that is."""
    return with_pages(files, config, "reference", pages())


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Link the public names that a page mentions; generated pages already have links."""
    return markdown if page.file.src_uri.startswith("reference/") else mentions(markdown)


def replaced(nav: Any, target: str, entries: list[Any]) -> Any:
    """Return the navigation with an entry replaced by a section."""
    if isinstance(nav, list):
        return [replaced(entry, target, entries) for entry in nav]
    if isinstance(nav, dict):
        return {title: replaced(entry, target, entries) for title, entry in nav.items()}
    return entries if nav == target else nav


def with_pages(files: Files, config: Any, folder: str, texts: dict[str, str]) -> Files:
    """Return a site's files with the generated pages, which replace committed files of the same name."""
    for name, text in texts.items():
        uri = f"{folder}/{name}"
        committed = files.get_file_from_path(uri)
        if committed is not None:
            files.remove(committed)
        files.append(File.generated(config, uri, content=text))
    return files
