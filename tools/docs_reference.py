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


def exports() -> list[str]:
    """The names that `import rlsdk` offers, as its `__all__` lists them."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    assigned = (node for node in tree.body if isinstance(node, ast.Assign))
    (names,) = (node.value for node in assigned if getattr(node.targets[0], "id", "") == "__all__")
    return ast.literal_eval(names)


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
    index = "\n".join(f"* [`rlsdk.{name}`][rlsdk.{name}]" for name in exports())
    return {
        "index.md": f"# Reference\n\nWhat `import rlsdk` offers:\n\n{index}\n",
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
