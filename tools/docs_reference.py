"""A hook of mkdocs: the reference, with a page for each module or subpackage of rlsdk that is there.

Sources are read, not imported, so the documentation builds without ray, vllm or deepspeed.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PACKAGE = Path(__file__).resolve().parent.parent / "rlsdk"


def modules(path: Path) -> list[str]:
    """The dotted names of a module, or of a package and all that is public in it."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    names = (file.relative_to(PACKAGE.parent).with_suffix("").parts for file in files)
    public = ([part for part in parts if part != "__init__"] for parts in names)
    return [".".join(parts) for parts in public if not any(part.startswith("_") for part in parts)]


def assigned(module: str, name: str) -> Any:
    """The value of a constant in a module of rlsdk."""
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    values = (node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == name)
    return ast.literal_eval(next(values))


def index() -> str:
    """Markdown of the first page: the modules that plugins may import, and what `rlsdk` and `rlsdk.kit` offer."""
    modules = "\n".join(f"* [`{name}`][{name}]" for name in assigned("__init__.py", "PUBLIC_MODULES")[1:])
    names = "\n".join(f"* [`rlsdk.{name}`][rlsdk.{name}]" for name in assigned("__init__.py", "__all__"))
    defined = {name: module for module, names in assigned("kit.py", "_NAMES").items() for name in names}
    kit = "\n".join(f"* [`rlsdk.kit.{name}`][{defined[name]}.{name}]" for name in assigned("kit.py", "__all__"))
    return (
        f"# Reference\n\nWhat `import rlsdk` offers:\n\n{names}\n\nWhat plugins are written with:\n\n{kit}\n\n"
        f"Plugins import from `rlsdk` and these modules alone; others may change at any time:\n\n{modules}\n"
    )


def page(names: list[str]) -> str:
    """Markdown for a module, or for a package and its modules."""
    first, *others = (f"::: {name}" for name in names)
    # What a package re-exports is documented where it is defined: one name, one place to link to.
    options = "heading_level: 1, members: false" if others else "heading_level: 1"
    return "\n\n".join([f"{first}\n    options: {{{options}}}", *others]) + "\n"


def pages() -> dict[str, str]:
    """File name and Markdown of each page. Commands of `rlsdk.cli` explain themselves with `--help`."""
    top = sorted(PACKAGE.iterdir(), key=lambda path: path.stem)
    public = [path for path in top if path.suffix == ".py" or (path / "__init__.py").exists()]
    named = {path.stem: modules(path) for path in public if not path.stem.startswith("_") and path.stem != "cli"}
    return {
        "index.md": index(),
        **{f"{name}.md": page(found) for name, found in named.items()},
    }


def on_config(config: Any) -> Any:
    """Append the reference to the navigation."""
    titled = [{f"rlsdk.{Path(name).stem}": f"reference/{name}"} for name in pages() if name != "index.md"]
    config.nav.append({"Reference": ["reference/index.md", *titled]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, which exist nowhere on disk."""
    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    return files
